"""Newcomer: a worker that wants to be let in (node.py), as it says itself."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.push import PeerBlocks
from kvstore.transport.base import TRANSPORTS
from process.errors import InvalidArgument


@dataclass(frozen=True)
class Newcomer:
    """See the module. peer: of transport nixl."""

    worker_id: str
    worker_incarnation: bytes
    model_fingerprint: bytes
    block_bytes: int
    transport: str
    peer: PeerBlocks | None = None

    def check(self) -> None:
        """Raises: InvalidArgument naming what cannot be."""
        if not self.worker_id:
            raise InvalidArgument("worker_id", "must be given")
        if self.transport not in TRANSPORTS:
            raise InvalidArgument("transport", f"one of {', '.join(TRANSPORTS)}")
        if self.block_bytes < 1:
            raise InvalidArgument("block_bytes", "must be positive")
