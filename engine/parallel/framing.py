"""Messages on a stream socket: 4 bytes of length (little endian), then that many bytes.

A message of more than MAX_FRAME_BYTES is refused by its sender; a longer length ends the
connection. Every call has a deadline. One thread reads and one writes; they use duplicates of one
socket, since a timeout belongs to the object.
"""

from __future__ import annotations

import socket
import struct

from process.rpc_errors import InvalidArgument, Unavailable

MAX_FRAME_BYTES = 64 * 1024 * 1024
"""Largest size of a message; guessed: a prompt of a million tokens takes 5 MB."""

_LENGTH = struct.Struct("<I")
_READ_BYTES = 256 * 1024


class FrameReader:
    """Reads frames from a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection.dup()
        self._buffer = bytearray()

    def read(self, timeout_s: float) -> bytes | None:
        """Return the next frame; None if nothing is received for `timeout_s` seconds before it is
        complete (the bytes received are kept for the next call). Raises: EOFError if the other
        side has closed, Unavailable for an invalid length."""
        self._socket.settimeout(timeout_s)
        while (frame := self._take()) is None:
            try:
                data = self._socket.recv(_READ_BYTES)
            except TimeoutError:
                return None
            except OSError as error:
                raise EOFError(str(error)) from error
            if not data:
                raise EOFError("closed by the other side")
            self._buffer += data
        return frame

    def fileno(self) -> int:
        """Return the descriptor for `select`; it is not readable for frames that are in the buffer
        already."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this duplicate of the socket."""
        self._socket.close()

    def _take(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (num_bytes,) = _LENGTH.unpack_from(self._buffer)
        if num_bytes > MAX_FRAME_BYTES:
            raise Unavailable(f"a frame of {num_bytes} bytes; {MAX_FRAME_BYTES} are allowed")
        end = _LENGTH.size + num_bytes
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return frame


class FrameWriter:
    """Writes frames to a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection.dup()

    def write(self, frame: bytes, timeout_s: float) -> None:
        """Send a whole frame. Raises: InvalidArgument for one that is too long (nothing is sent
        then); EOFError if it could not be sent in time or the other side has closed, after which
        the stream cannot be used."""
        check_size(frame)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
        except OSError as error:  # TimeoutError is one
            raise EOFError(str(error)) from error

    def close(self) -> None:
        """Close this duplicate of the socket."""
        self._socket.close()


def check_size(frame: bytes) -> None:
    """Check the size of a frame. Raises: InvalidArgument above MAX_FRAME_BYTES."""
    if len(frame) > MAX_FRAME_BYTES:
        raise InvalidArgument("ask", f"{len(frame)} bytes; {MAX_FRAME_BYTES} can be sent")
