"""HandleBuilder: builds the handle to a prompt's KV from runs of leased blocks in one or several
stores, or at a lender, without a gap from block 0 on. `runs_of` computes these runs.

No I/O; a handle takes a random nonce and the wall clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore.block_refs import Block, PackedBlocks
from services.worker import handle as handles
from services.worker.runtime import WorkerCore


class BlockOwner(Protocol):
    """Store or lender that keeps blocks, as its client identifies it."""

    @property
    def node_id(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def incarnation(self) -> bytes: ...


@dataclass(frozen=True)
class LeasedBlocks:
    """Leading blocks of a prompt at one keeper, pinned by one lease."""

    keeper: BlockOwner
    lease_id: str
    refs: Sequence[Block]

    def run(self, first_block: int, blocks: Sequence[Block]) -> handles.HandleRun:
        """Return a handle's run of some blocks at this keeper."""
        keeper = self.keeper
        return handles.HandleRun(
            keeper.node_id,
            keeper.address,
            keeper.incarnation,
            self.lease_id,
            first_block,
            PackedBlocks.of(blocks),
        )


def runs_of(parts: Iterable[LeasedBlocks]) -> tuple[handles.HandleRun, ...]:
    """Combine parts into runs without gaps from block 0 on. Of two keepers with the same block the
    first is named; a keeper that adds no block is left out."""
    runs: list[handles.HandleRun] = []
    num_covered = 0
    for part in parts:
        if len(part.refs) > num_covered:
            runs.append(part.run(num_covered, part.refs[num_covered:]))
            num_covered = len(part.refs)
    return tuple(runs)


class HandleSubject(Protocol):
    """Request fields that a handle names."""

    @property
    def request_id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def adapter(self) -> str: ...


class HandleBuilder:
    """Builder of the handles of one request.

    Args: num_tokens: number of tokens whose KV is handed over once all of it is stored or lent.
    """

    def __init__(self, core: WorkerCore, ask: HandleSubject, num_tokens: int) -> None:
        self._core = core
        self._ask = ask
        self._num_tokens = num_tokens

    def partial(self, parts: Iterable[LeasedBlocks], ttl_s: float) -> handles.Handle | None:
        """Build a partial handle of the full blocks kept so far; None if there are none. Its leases
        stay the producer's."""
        return self._make(runs_of(parts), None, ttl_s, is_partial=True)

    def whole(
        self, parts: Sequence[LeasedBlocks], tail: Block | None, ttl_s: float
    ) -> handles.Handle | None:
        """Build the final handle of all blocks that are kept; None if there are none.

        Args: parts: runs of blocks; the last one's store also has the tail.
        tail: the unfilled block behind all full ones there. It is left out where full
            blocks are missing.
        """
        runs = runs_of(parts)
        num_full_blocks = self._num_tokens // self._core.model.block_size
        tail_run = None
        if tail is not None and _num_blocks(runs) == num_full_blocks:
            tail_run = parts[-1].run(num_full_blocks, [tail])
        return self._make(runs, tail_run, ttl_s, is_partial=False)

    def _make(
        self,
        runs: tuple[handles.HandleRun, ...],
        tail: handles.HandleRun | None,
        ttl_s: float,
        *,
        is_partial: bool,
    ) -> handles.Handle | None:
        if not runs and tail is None:
            return None
        ask, core = self._ask, self._core
        num_tokens = _num_blocks(runs) * core.model.block_size
        if tail is not None:
            num_tokens += tail.blocks[0].num_tokens
        return handles.Handle(
            request_id=ask.request_id,
            tenant=ask.tenant,
            adapter=ask.adapter,
            model_fingerprint=core.model.fingerprint,
            producer_id=core.identity.worker_id,
            producer_incarnation=core.identity.incarnation,
            block_size=core.model.block_size,
            num_tokens=num_tokens,
            runs=runs,
            tail=tail,
            deadline_unix_ms=handles.deadline_unix_ms(ttl_s),
            nonce=handles.new_nonce(),
            is_partial=is_partial,
        )


def _num_blocks(runs: Iterable[handles.HandleRun]) -> int:
    return sum(len(run.blocks) for run in runs)
