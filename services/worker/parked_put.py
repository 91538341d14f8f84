"""One put of a StoreParking: what was put under a key, where its bytes are now, and what the engine
holds while they come back. Values only: who changes them, and under which lock, is
services/worker/parking.py's.
"""

from __future__ import annotations

import asyncio
import enum

from engine.parking import Blocks
from kvstore.block_refs import Block
from kvstore.client import PutResult
from kvstore.transport.base import BlockMemory


class Stage(enum.Enum):
    """Where parked bytes are; see services/worker/parking.py."""

    STAGED = "staged"
    STORED = "stored"
    COMING = "coming"
    HERE = "here"
    LOST = "lost"


OVER = frozenset({Stage.HERE, Stage.LOST})


class Put:
    """What was put under one key, once. `stage`, `rows` and the two flags: under the lock."""

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
    """A put's bytes on their way back; see engine/parking.py:Parked."""

    def __init__(self, put: Put, memory: BlockMemory) -> None:
        self._put = put
        self._memory = memory

    @property
    def is_done(self) -> bool:
        return self._put.stage in OVER

    def result(self) -> Blocks | None:
        """Rows are the put's own from HERE on, until it is dropped on this same thread."""
        if self._put.stage is not Stage.HERE:
            return None
        return self._memory.view[list(self._put.rows)]


class Unknown:
    """Nothing was put under that key."""

    is_done = True

    def result(self) -> Blocks | None:
        return None


def refs_of(result: PutResult, put: Put) -> tuple[Block, ...] | None:
    """Where all of it lies; None where some does not, or another block was named for it."""
    refs = result.refs if result.tail is None else (*result.refs, result.tail)
    hashes = [ref.chain_hash for ref in refs]
    asked = [*put.chain_hashes, b""][: put.num_blocks]
    return tuple(refs) if hashes == asked else None
