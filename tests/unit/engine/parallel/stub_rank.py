"""A process that says what a rank says and computes nothing, so that it starts at once.

python stub_rank.py <behaviour> <socket> <files...>
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from typing import Any

import msgspec


def main(behaviour: str, connection: socket.socket) -> int:
    def say(kind: str, **fields: Any) -> None:
        frame = msgspec.msgpack.encode({"type": kind, **fields})
        connection.sendall(struct.pack("<I", len(frame)) + frame)

    def hear() -> Any:
        (num_bytes,) = struct.unpack("<I", _read(connection, 4))
        return msgspec.msgpack.decode(_read(connection, num_bytes))

    rank = hear()["rank"]
    if behaviour == "dies":
        return 7
    if behaviour == "refuses":
        say("RankRefused", reason="the checkpoint is a riddle; fetch it again")
        return 2
    if behaviour == "silent":
        time.sleep(600)
    say("RankLoading", what="weights", done=1, total=1)
    say("Ready", weight_bytes=7)
    while True:
        message = hear()
        if behaviour == "deaf":
            time.sleep(600)
        match message["type"]:
            case "Meet":
                say("Met", free_bytes=1000 * rank)
            case "ComputeBatch" if behaviour == "fails" and rank == 1:
                say("RankFailure", reason="ValueError: all wrong")
                return 1
            case "ComputeBatch" if behaviour in ("fails", "follows"):
                time.sleep(0.05 if rank == 2 else 0.0)
                say("RankFailure", reason="another rank is gone or too late (socket closed)")
                return 3
            case "StopRank":
                return 0


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        piece = connection.recv(num_bytes - len(data))
        if not piece:
            if sys.argv[1] == "deaf":
                time.sleep(600)
            os._exit(0)
        data += piece
    return data


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], socket.socket(fileno=int(sys.argv[2]))))
