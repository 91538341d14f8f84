"""Parts: which leading blocks of one prompt somebody keeps, and the runs without a gap that several
of them make. Values and one pure function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.block_refs import Block, PackedBlocks
from services.worker import handle as handles


class Keeper(Protocol):
    """Who keeps the blocks: a store, as its client knows it, or a lender."""

    @property
    def node_id(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def incarnation(self) -> bytes: ...


@dataclass(frozen=True)
class Part:
    """Blocks 0.. of the prompt at one keeper, pinned by one lease."""

    keeper: Keeper
    lease_id: str
    refs: Sequence[Block]

    def run(self, first_block: int, blocks: Sequence[Block]) -> handles.Run:
        """Some blocks of this keeper, as a handle names them."""
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
    """Runs without a gap from block 0 on. Of two stores that have a block the first one gives it;
    one that adds nothing is not named.
    """
    runs: list[handles.Run] = []
    num_covered = 0
    for part in parts:
        if len(part.refs) > num_covered:
            runs.append(part.run(num_covered, part.refs[num_covered:]))
            num_covered = len(part.refs)
    return tuple(runs)
