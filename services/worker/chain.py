"""Chain: the chain-hash namespace of one tenant, model and adapter. Pure; any thread."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from engine.request import BlockHasher
from kvstore import block_hash
from kvstore.block_hash import HashTurns


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

    async def hashes_in_turns(self, token_ids: tuple[int, ...], turns: HashTurns) -> list[bytes]:
        """`hashes`, with turns for whatever else the loop has to do."""
        return await turns.chain(self.root, token_ids, self.block_size)
