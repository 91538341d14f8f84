"""HandleMaker: builds a handle without gaps from runs of blocks in one or several stores.

Pure but for the nonce and the wall clock that a handle needs. Knows no request state and no wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvstore.block_refs import Block
from services.worker import handle as handles
from services.worker.core import WorkerCore
from services.worker.parts import Part, runs_of


class Asked(Protocol):
    """Request fields that a handle names."""

    @property
    def request_id(self) -> str: ...
    @property
    def tenant(self) -> str: ...
    @property
    def adapter(self) -> str: ...


class HandleMaker:
    """Builder of the handles of one request.

    Args: num_tokens: number of tokens whose KV is handed over once all of it is stored or lent.
    """

    def __init__(self, core: WorkerCore, ask: Asked, num_tokens: int) -> None:
        self._core = core
        self._ask = ask
        self._num_tokens = num_tokens

    def partial(self, parts: Iterable[Part], ttl_s: float) -> handles.Handle | None:
        """Build a partial handle of the full blocks kept so far; None if there are none. Its leases
        stay the producer's."""
        return self._make(runs_of(parts), None, ttl_s, is_partial=True)

    def whole(
        self, parts: Sequence[Part], tail: Block | None, ttl_s: float
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
        runs: tuple[handles.Run, ...],
        tail: handles.Run | None,
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


def _num_blocks(runs: Iterable[handles.Run]) -> int:
    return sum(len(run.blocks) for run in runs)
