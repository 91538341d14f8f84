"""Frames arrive whole and in order however the bytes are cut, and are bounded."""

from __future__ import annotations

import random
import socket
import struct
import threading

import pytest

from engine.parallel.framing import MAX_FRAME_BYTES, FrameReader, FrameWriter
from process.rpc_errors import InvalidArgument, Unavailable
from tests.harness.waiting import WAIT_S


def test_frames_of_any_size_and_any_cut(seed: int) -> None:
    rng = random.Random(seed)
    sent = [rng.randbytes(size) for size in (0, 1, 3, 4, 5, 70_000, 300_000, 2)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = FrameReader(theirs)
        stream = b"".join(struct.pack("<I", len(frame)) + frame for frame in sent)

        def write() -> None:
            start = 0
            while start < len(stream):
                end = start + rng.randrange(1, 50_000)
                ours.sendall(stream[start:end])
                start = end

        thread = threading.Thread(target=write)
        thread.start()
        assert [reader.read(10.0) for _ in sent] == sent
        thread.join()
        reader.close()


def test_silence_keeps_what_has_come_and_the_end_is_said() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader, writer = FrameReader(theirs), FrameWriter(ours)
        ours.sendall(b"\x03\x00\x00\x00a")
        assert reader.read(0.01) is None
        ours.sendall(b"bc")
        assert reader.read(1.0) == b"abc"
        writer.write(b"last", 1.0)
        writer.close()
        ours.close()
        assert reader.read(1.0) == b"last"
        with pytest.raises(EOFError):
            reader.read(1.0)
        reader.close()


def test_sizes_are_bounded() -> None:
    largest = bytes(MAX_FRAME_BYTES)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader, writer = FrameReader(theirs), FrameWriter(ours)
        sending = threading.Thread(target=writer.write, args=(largest, WAIT_S))
        sending.start()
        assert reader.read(WAIT_S) == largest
        sending.join()
        with pytest.raises(InvalidArgument, match=f"{MAX_FRAME_BYTES + 1} bytes"):
            writer.write(largest + b"x", 1.0)
        ours.sendall(struct.pack("<I", MAX_FRAME_BYTES + 1))
        with pytest.raises(Unavailable, match=f"{MAX_FRAME_BYTES + 1} bytes"):
            reader.read(WAIT_S)
        reader.close()
        writer.close()


def test_a_reader_that_does_not_read_ends_the_writer() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = FrameWriter(ours)
        with pytest.raises(EOFError):
            writer.write(b"x" * 8_000_000, 0.05)
        writer.close()
