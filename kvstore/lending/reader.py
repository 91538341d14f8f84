"""Who lends and who reads, as each introduces itself. Values."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.push import PeerBlocks


@dataclass(frozen=True)
class LenderIdentity:
    """Who lends. fingerprint: of the model, which a reader's must be."""

    node_id: str
    incarnation: bytes
    fingerprint: bytes


@dataclass(frozen=True)
class Reader:
    """What a worker says about itself. peer: of transport nixl. host_id: of cuda_ipc."""

    worker_id: str
    worker_incarnation: bytes
    fingerprint: bytes
    block_bytes: int
    transport: str
    peer: PeerBlocks | None = None
    host_id: str = ""
