"""Chain: the chain-hash namespace of one tenant, model and adapter. Pure; any thread."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from engine.request import BlockHasher
from kvstore import block_hash
from kvstore.block_hash import HashTurns


@dataclass(frozen=True)
class Chain:
    """Chain-hash namespace of one tenant, model and adapter: blocks match only within one
    namespace."""

    root: bytes
    block_size: int
    adapter_digest: str = ""

    @property
    def hasher(self) -> BlockHasher:
        """Return the hash function that an engine request is created with."""
        return partial(block_hash.extend, self.root)

    def hashes(self, token_ids: tuple[int, ...]) -> list[bytes]:
        """Return the chain hashes of the full blocks of `token_ids`."""
        return block_hash.chain(self.root, token_ids, self.block_size)

    async def hashes_in_turns(self, token_ids: tuple[int, ...], turns: HashTurns) -> list[bytes]:
        """Return `hashes(token_ids)`, yielding to the event loop between pieces of work."""
        return await turns.chain(self.root, token_ids, self.block_size)
