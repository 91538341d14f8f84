"""A plain TCP stream over loopback between two processes: what a byte costs that crosses sockets.

The far end is a process of its own that receives into one buffer and answers each batch with one
byte, or sends from it. No framing, no checks: a ceiling for whatever moves blocks over a socket.
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

_START_S = 30.0
_MOVE_S = 120.0
_ORDER = struct.Struct("<cQ")
_BUFFER_BYTES = 4 * 1024 * 1024
"""Of the sockets: what loopback takes at once."""


def _far_end(tell: Connection) -> None:
    """Serve one connection until it ends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_START_S)
        tell.send(server.getsockname()[1])
        connection, _ = server.accept()
    with connection:
        _tune(connection)
        buffer = bytearray()
        while order := connection.recv(_ORDER.size, socket.MSG_WAITALL):
            kind, num_bytes = _ORDER.unpack(order)
            if len(buffer) < num_bytes:
                buffer = bytearray(num_bytes)
            view = memoryview(buffer)[:num_bytes]
            if kind == b"w":
                _receive(connection, view)
                connection.sendall(b"k")
            else:
                connection.sendall(view)


def _tune(connection: socket.socket) -> None:
    connection.settimeout(_MOVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)


def _receive(connection: socket.socket, view: memoryview) -> None:
    while view:
        num_bytes = connection.recv_into(view)
        if num_bytes == 0:
            raise ConnectionError("the far end has gone")
        view = view[num_bytes:]


class TcpStream:
    """One connection to a far end."""

    def __enter__(self) -> Self:
        # A fresh interpreter: a fork would share our memory and its page tables.
        spawning = multiprocessing.get_context("spawn")
        near, far = spawning.Pipe()
        self._process = spawning.Process(target=_far_end, args=(far,), daemon=True)
        self._process.start()
        if not near.poll(_START_S):
            raise ConnectionError("the far end did not start")
        self._connection = socket.create_connection(("127.0.0.1", near.recv()), _START_S)
        _tune(self._connection)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()
        self._process.join(_START_S)

    def write(self, data: npt.NDArray[np.uint8]) -> float:
        """Send all of it. Returns: seconds until the far end has it."""
        view = data.reshape(-1).data
        began = time.perf_counter()
        self._connection.sendall(_ORDER.pack(b"w", len(view)))
        self._connection.sendall(view)
        if self._connection.recv(1) != b"k":
            raise ConnectionError("the far end has gone")
        return time.perf_counter() - began

    def read(self, into: npt.NDArray[np.uint8]) -> float:
        """Receive as much as `into` holds. Returns: seconds until it is there."""
        view = into.reshape(-1).data
        began = time.perf_counter()
        self._connection.sendall(_ORDER.pack(b"r", len(view)))
        _receive(self._connection, view)
        return time.perf_counter() - began
