"""Parts of a prompt's KV by the store or lender that keeps them, and the runs without gaps that
they form. Values and one pure function."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.block_refs import Block, PackedBlocks
from services.worker import handle as handles


class Keeper(Protocol):
    """Store or lender that keeps blocks, as its client identifies it."""

    @property
    def node_id(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def incarnation(self) -> bytes: ...


@dataclass(frozen=True)
class Part:
    """Leading blocks of a prompt at one keeper, pinned by one lease."""

    keeper: Keeper
    lease_id: str
    refs: Sequence[Block]

    def run(self, first_block: int, blocks: Sequence[Block]) -> handles.Run:
        """Return a handle's run of some blocks at this keeper."""
        keeper = self.keeper
        return handles.Run(
            keeper.node_id,
            keeper.address,
            keeper.incarnation,
            self.lease_id,
            first_block,
            PackedBlocks.of(blocks),
        )


def runs_of(parts: Iterable[Part]) -> tuple[handles.Run, ...]:
    """Combine parts into runs without gaps from block 0 on. Of two keepers with the same block the
    first is named; a keeper that adds no block is left out."""
    runs: list[handles.Run] = []
    num_covered = 0
    for part in parts:
        if len(part.refs) > num_covered:
            runs.append(part.run(num_covered, part.refs[num_covered:]))
            num_covered = len(part.refs)
    return tuple(runs)
