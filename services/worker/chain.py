"""Chain: the chain-hash namespace of one tenant, model and adapter. Pure; any thread."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

from engine.request import BlockHasher
from kvstore import block_hash

TURN_TOKENS = 1024
"""Hashed in one turn of a loop: 0.05 ms, about what a turn costs beside."""


@dataclass(frozen=True)
class Chain:
    """See the module."""

    root: bytes
    block_size: int
    adapter_digest: str = ""

    @property
    def hasher(self) -> BlockHasher:
        """What the engine is given."""
        return partial(block_hash.extend, self.root)

    def hashes(self, token_ids: tuple[int, ...]) -> list[bytes]:
        """Of the full blocks of `token_ids`."""
        return block_hash.chain(self.root, token_ids, self.block_size)

    async def hashes_in_turns(self, token_ids: tuple[int, ...]) -> list[bytes]:
        """`hashes`, with a turn for whatever else the loop has to do after every TURN_TOKENS."""
        size = self.block_size
        step = max(1, TURN_TOKENS // size) * size
        hashes: list[bytes] = []
        for start in range(0, len(token_ids), step):
            if start:
                await asyncio.sleep(0)
            parent = hashes[-1] if hashes else b""
            hashes += block_hash.chain(self.root, token_ids[start : start + step], size, parent)
        return hashes
