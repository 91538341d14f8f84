"""HandoffBuilder: builds the handle with which decode takes over a prefilled prompt. On the direct
path the handle names this worker's own blocks, which the worker lends; otherwise blocks in stores.
Where the direct path is requested and not possible, stores are used, and the request's leg
(LegProvenance) says which path it was. Used on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore.errors import STORE_UNAVAILABLE
from process.deadline import Deadline
from services.prefill.lending import LentPrompt
from services.prefill.request import PrefillRequest, PrefixLease
from services.worker import handle as handles
from services.worker.handle_builder import HandleBuilder, LeasedBlocks
from services.worker.provenance import HandoverPath, LegProvenance
from services.worker.runtime import WorkerCore
from services.worker.store_writer import BlockWriter, TailSource, Written


class HandedOver(Protocol):
    """Leases that are handed over with a handle."""

    def release(self) -> None:
        """Release the leases because the handle was not delivered."""


@dataclass(frozen=True)
class PrefillAnswer:
    """Result of a prefill request: the handle to the prompt's KV, and the leg."""

    handle: handles.Handle | None
    leg: LegProvenance
    seconds: dict[str, float]
    leases: tuple[HandedOver, ...]
    """Leases that are handed over with the handle."""
    end_request: Callable[[], None] = lambda: None
    """Callback that frees what the request still holds; idempotent. Background puts need what the
    leases pin."""

    def take_back(self) -> None:
        """Release the leases because the handle was not delivered."""
        try:
            self.end_request()
        finally:
            for lease in self.leases:
                lease.release()


class HandoffBuilder:
    """Maker of the handles of one worker's requests, over the direct path or through stores."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core

    def ttl_s(self, deadline: Deadline) -> float:
        """Return the lease time in seconds for a deadline: the request's remaining time, within the
        configured bound."""
        return min(deadline.left_s(), self._core.limits.lease_ttl_s)

    def open_lent(self, job: PrefillRequest, chain_hashes: Sequence[bytes]) -> LentPrompt | None:
        """Prepare to lend the request's blocks, where the direct path is requested and this worker
        lends. chain_hashes: of the full blocks."""
        lender, ask = self._core.lender, job.ask
        if lender is None or not ask.wants_handle or ask.handover is not HandoverPath.DIRECT:
            return None
        size = self._core.model.block_size
        return LentPrompt(
            lender,
            self._core.thread,
            job.engine_id,
            num_blocks=-(-ask.num_context_tokens // size),
            block_size=size,
            chain_hashes=chain_hashes,
            num_ahead=-(-self._core.settings.engine.max_num_tokens_per_step // size),
        )

    async def partial(self, job: PrefillRequest) -> handles.Handle | None:
        """Return a partial handle of the blocks lent or stored by now; its leases stay the
        producer's. None: there is nothing new, or the first tokens have come, which must not
        wait."""
        parts = held(job)
        if job.writer is not None:
            parts.append(LeasedBlocks(job.writer.client, job.writer.lease_id, job.writer.refs))
        if job.lent is not None:
            lending = job.lent.lend_later()
            either: list[asyncio.Future[Any]] = [lending, job.first]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not lending.done():
                return None
            if job.lent.problem is None:
                parts = [job.lent.part]
        job.early.told(max((len(part.refs) for part in parts), default=0))
        return self._maker(job).partial(parts, self.ttl_s(job.deadline))

    async def direct(
        self, job: PrefillRequest, lent: LentPrompt, tail: TailSource | None
    ) -> PrefillAnswer | None:
        """Return the answer with a handle to this worker's own blocks; None: they cannot be
        lent."""
        ttl_s = self.ttl_s(job.deadline)
        await lent.lend(tail)
        handle = self._maker(job).whole([lent.part], lent.tail, ttl_s)
        if handle is None or not lent.hand_over(ttl_s):
            return None
        job.handed_over = frozenset(handle.lease_ids)
        job.leg.handover = HandoverPath.DIRECT
        if job.behind is None:
            job.leg.not_stored[STORE_UNAVAILABLE] += len(lent.refs)
        return PrefillAnswer(handle, job.leg, job.clock.seconds, (lent,))

    def from_store(
        self, job: PrefillRequest, writer: BlockWriter, written: Written
    ) -> PrefillAnswer:
        """Return the answer with a handle to blocks in stores, which takes their leases along."""
        parts = [*held(job), LeasedBlocks(writer.client, written.lease_id, written.refs)]
        handle = self._maker(job).whole(parts, written.tail, self.ttl_s(job.deadline))
        if handle is None:
            return PrefillAnswer(None, job.leg, job.clock.seconds, ())
        job.handed_over = frozenset(handle.lease_ids)
        job.leg.handover = HandoverPath.STORE
        own = PrefixLease(writer.client, written.lease_id, written.refs, writer.release_later)
        leases = [pin for pin in (*job.pins.held, own) if pin.lease_id in job.handed_over]
        return PrefillAnswer(handle, job.leg, job.clock.seconds, tuple(leases))

    def _maker(self, job: PrefillRequest) -> HandleBuilder:
        return HandleBuilder(self._core, job.ask, job.ask.num_context_tokens)


def held(job: PrefillRequest) -> list[LeasedBlocks]:
    """Return the pins of the request in stores, besides its writer's lease."""
    return [LeasedBlocks(pin.client, pin.lease_id, pin.refs) for pin in job.pins.held]
