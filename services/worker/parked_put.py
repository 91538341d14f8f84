"""Put: state of one parked put of a StoreParking: its key, where its bytes are, and the engine's
side while they are fetched back. Values only: services/worker/parking.py changes them under its
lock."""

from __future__ import annotations

import asyncio
import enum

from engine.parking import Blocks
from kvstore.block_refs import Block
from kvstore.client import PutResult
from kvstore.transport.base import BlockMemory


class Stage(enum.Enum):
    """Stages of parked bytes; services/worker/parking.py describes the transitions."""

    STAGED = "staged"
    STORED = "stored"
    COMING = "coming"
    HERE = "here"
    LOST = "lost"


OVER = frozenset({Stage.HERE, Stage.LOST})


class Put:
    """Blocks that were put under one key, once. `stage`, `rows` and the two flags change under the
    lock."""

    def __init__(
        self, key: str, chain_hashes: tuple[bytes, ...], rows: tuple[int, ...], tenant: str
    ) -> None:
        self.key = key
        self.tenant = tenant
        self.chain_hashes = chain_hashes
        self.rows = rows
        self.num_blocks = len(rows)
        self.stage = Stage.STAGED
        self.is_dropped = False
        self.is_ended = False
        """Its task is over: nothing moves for it any more."""
        self.wake = asyncio.Event()
        self.lease_id = ""
        self.incarnation = b""
        self.refs: tuple[Block, ...] = ()


class Coming:
    """A put whose bytes are being fetched back: a Parked of engine/parking.py."""

    def __init__(self, put: Put, memory: BlockMemory) -> None:
        self._put = put
        self._memory = memory

    @property
    def is_done(self) -> bool:
        return self._put.stage in OVER

    def result(self) -> Blocks | None:
        """Return the fetched blocks; None where they are not here, in transit or lost. Their rows
        stay the put's own until it is dropped on the engine's thread."""
        if self._put.stage is not Stage.HERE:
            return None
        return self._memory.view[list(self._put.rows)]


class Unknown:
    """Result of `get` for a key under which nothing was put."""

    is_done = True

    def result(self) -> Blocks | None:
        return None


def refs_of(result: PutResult, put: Put) -> tuple[Block, ...] | None:
    """Return the store references of all blocks; None where one is missing, or the store holds
    another block in its place."""
    refs = result.refs if result.tail is None else (*result.refs, result.tail)
    hashes = [ref.chain_hash for ref in refs]
    asked = [*put.chain_hashes, b""][: put.num_blocks]
    return tuple(refs) if hashes == asked else None
