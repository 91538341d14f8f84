"""PrefillWorker: runs the prefill requests of one worker, each as one coroutine that ends by
releasing all of its resources.

States of a request (a cancel or the deadline may end it in any state):

1. QUEUED     waits for blocks in the BlockQueue           -> cancel: the wait ends, a late grant is
   aborted
2. FETCHING   matches and copies blocks that stores have    -> cancel: blocks that a transfer may
   still write into are quarantined first, leases released
3. COMPUTING  the engine computes the rest in chunks, full blocks go to the store behind it, and
   partial handles name them -> cancel: abort, leases released
4. STORING    its first tokens are sent; waits for the last puts that the handle names -> cancel:
   as above; the tail is deleted with the lease
5. DONE       answered; the leases belong to the handle    | CANCELLED | FAILED

On the direct path the worker lends its own blocks instead (services/prefill/lending.py), and
partial and final handles name this worker. Where that is not possible, the request goes through the
store, and its leg (LegProvenance) says so. Where no handle names the store (direct path, or no
handle wanted), the answer does not wait for it: services/worker/store_writer.py stores the prompt
in the background. Without the store the handle is shorter; the request does not fail.

BlockQueue: the FIFO queue for the engine's blocks. One engine call tries all waiting requests in
order, up to the first for which there is no room; they are tried again after `room_may_have_come`.
Invariant: a request never takes blocks while an earlier one waits.

Used on the event loop's thread; no protobuf types. See also services/prefill/prefix_loader.py
(source of the prefix) and services/prefill/handoff.py (path of a handle).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.errors import NoBlocks
from engine.outputs import FilledBlock, PositionLogprobs, StepOutput
from engine.request import Request, Reservation
from kvstore.errors import STORE_UNAVAILABLE
from process.background_tasks import end_tasks, start_task
from process.deadline import Deadline
from process.rpc_errors import BatonError, Internal, NoCapacity, Unavailable
from services.prefill.handoff import HandoffBuilder, PrefillAnswer
from services.prefill.prefix_loader import PrefixLoader, PrefixLoadRequest
from services.prefill.request import (
    BEFORE_FIRST,
    Firsts,
    PartialHandleSchedule,
    PrefillRequest,
    PrefillRequestSpec,
    PrefillState,
    PrefixLease,
    PrefixLeases,
)
from services.worker import handle as handles
from services.worker import provenance
from services.worker.adapters import check_digest
from services.worker.engine_port import WorkerEngine
from services.worker.engine_thread import EngineThread
from services.worker.provenance import LegProvenance
from services.worker.runtime import WorkerCore
from services.worker.store_writer import BlockWriter, TailSource, WriteChain
from services.worker.stream_servicer import named_on_wire

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Waiter:
    request: Request
    future: asyncio.Future[Reservation]


class BlockQueue:
    """FIFO queue in front of `engine.reserve`, at most `max_waiting` requests long."""

    def __init__(
        self,
        thread: EngineThread,
        *,
        max_waiting: int,
        on_full: Callable[[], None] = lambda: None,
    ) -> None:
        """Create an empty queue. on_full: called when a request has found no room."""
        self._thread = thread
        self._max_waiting = max_waiting
        self._on_full = on_full
        self._waiting: list[_Waiter] = []
        self._wake = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def reserve(self, request: Request, deadline: Deadline) -> Reservation:
        """Wait for room and reserve it, if the request's adapter is still loaded.

        The caller posts an `abort` of the request's id if this ends in any other way than by
        returning: a cancelled wait may still have been granted.
        Raises: NoCapacity when the queue is full; DeadlineExceeded; RequestTooLong and what else
        `reserve` refuses.
        """
        if len(self._waiting) >= self._max_waiting:
            raise NoCapacity(
                f"{len(self._waiting)} requests wait for room in this worker's KV cache",
                retry_after_s=1.0,
            )
        if self._pump is None:
            self._pump = start_task(self._grant_forever(), "admission", is_for_many=True)
        future: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(request, future)
        self._waiting.append(waiter)
        self._wake.set()
        try:
            async with deadline.timeout("waiting for room in the KV cache"):
                return await waiter.future
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._wake.set()

    def room_may_have_come(self) -> None:
        """Retry the waiting requests; called when blocks have been freed."""
        if self._waiting:
            self._wake.set()

    async def stop(self) -> None:
        """Stop the queue; requests that still wait are refused."""
        await end_tasks([self._pump])
        for waiter in self._waiting:
            if not waiter.future.done():
                waiter.future.set_exception(NoCapacity("the worker is stopping"))

    async def _grant_forever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch = list(self._waiting)
            if batch:
                await self._grant(batch)

    async def _grant(self, batch: list[_Waiter]) -> None:
        asked = [waiter.request for waiter in batch]
        try:
            outcomes = await self._thread.call(lambda engine: _reserve_in_order(engine, asked))
        except BatonError as error:  # the engine is down: nobody will be served
            outcomes = [error] * len(batch)
        except Exception as error:  # else the requests behind it would not be tried
            logger.exception("admission_failed")
            outcomes = [Internal(f"admission failed: {error}")] * len(batch)
        for waiter, outcome in zip(batch, outcomes, strict=False):
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            if waiter.future.done():
                continue
            if isinstance(outcome, BatonError):
                waiter.future.set_exception(outcome)
            else:
                waiter.future.set_result(outcome)
        if len(outcomes) < len(batch):
            self._on_full()


def _reserve_in_order(engine: WorkerEngine, asked: list[Request]) -> list[Reservation | BatonError]:
    """Reserve blocks in order. Returns: one outcome for each request up to the first without
    room."""
    outcomes: list[Reservation | BatonError] = []
    for request in asked:
        try:
            check_digest(engine, request.adapter)
            outcomes.append(engine.reserve(request))
        except NoBlocks:
            break
        except BatonError as error:
            outcomes.append(error)
    return outcomes


class PrefillSink(Protocol):
    """Interface to send a request's events; each method returns when the event is queued. One call
    at a time."""

    async def show_firsts(self, firsts: Firsts) -> None:
        """Send the first token of each sample; called once."""

    async def show_prompt_logprobs(self, logprobs: Sequence[PositionLogprobs]) -> None:
        """Send log-probabilities of the prompt's next tokens; all are sent before the first
        tokens."""

    async def show_partial(self, handle: handles.Handle) -> None:
        """Send a partial handle to what can be fetched while prefill still runs; before the first
        tokens."""


class PrefillWorker:
    """Prefill requests of one worker."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._jobs: dict[str, PrefillRequest] = {}
        self._admission = BlockQueue(
            core.thread,
            max_waiting=core.limits.max_waiting_requests,
            on_full=core.write_behind.give_way,
        )
        self._handover = HandoffBuilder(core)
        core.on_room = self._admission.room_may_have_come
        core.num_queued_tokens = self._num_queued_tokens

    def start(self) -> None:
        """Start the engine's thread; called once, on the event loop."""
        self._core.thread.start(self._on_step, self._on_failure)

    async def stop(self) -> None:
        """Refuse the requests that wait for room; store remaining blocks, for a bounded time."""
        await self._admission.stop()
        await self._core.write_behind.stop()

    @property
    def states(self) -> dict[str, PrefillState]:
        """Return the states of the live requests, by their engine request id."""
        return {engine_id: job.state for engine_id, job in self._jobs.items()}

    async def prefill(
        self,
        ask: PrefillRequestSpec,
        deadline: Deadline,
        audience: PrefillSink,
        tell: Callable[[PrefillAnswer], None] = lambda answer: None,
    ) -> PrefillAnswer:
        """Prefill one prompt and draw the next token of each sample, which `audience` gets at once;
        then store or lend the KV.

        Cancelling this coroutine is cancelling the request.
        Args: tell: called with the answer as soon as it is there; what the request still holds is
            given back behind whatever that puts on the loop. When it raises, the answer's leases
            are given back, too.
        Raises: NoCapacity, InvalidArgument, DeadlineExceeded, Unavailable, Internal; what `tell`
            raises.
        """
        with self._core.admit():
            job = self._new_job(ask, deadline)
            self._jobs[job.engine_id] = job
            answer: PrefillAnswer | None = None
            try:
                told = await self._answer(job, deadline, audience)
                answer = dataclasses.replace(told, end_request=lambda: self._close(job))
                tell(answer)
            except BaseException:
                if answer is None:
                    self._close(job)
                else:
                    answer.take_back()
                raise
            else:
                # Decode waits for the answer, nobody for this: a hold of each block of the prompt.
                asyncio.get_running_loop().call_soon(self._close, job)
            finally:
                provenance.set_leg_attributes(job.span, job.clock, job.leg)
            return answer

    async def _answer(
        self, job: PrefillRequest, deadline: Deadline, audience: PrefillSink
    ) -> PrefillAnswer:
        try:
            async with deadline.timeout("prefill"):
                answer = await self._run(job, audience)
            self._finish(job)
        except asyncio.CancelledError:
            job.move(PrefillState.CANCELLED)
            raise
        except Exception as error:  # also of `audience`: whoever asked is gone
            job.move(PrefillState.FAILED)
            raise named_on_wire(error, job.ask.sampling) from error
        return answer

    def _new_job(self, ask: PrefillRequestSpec, deadline: Deadline) -> PrefillRequest:
        core = self._core
        return PrefillRequest(
            ask,
            core.engine_id(ask.request_id),
            deadline,
            LegProvenance(len(ask.prompt_token_ids)),
            PrefixLeases(
                core.connector,
                ttl_s=lambda: self._handover.ttl_s(deadline),
                renew_budget_s=core.limits.put_budget_s,
                deadline=deadline,
            ),
            PartialHandleSchedule(wanted=ask.wants_handle),
            asyncio.get_running_loop().create_future(),
        )

    def _num_queued_tokens(self) -> int:
        """Return the number of prompt tokens that live requests have yet to compute, as estimated
        at their start; routers balance by it."""
        size = self._core.model.block_size
        return sum(
            job.num_to_compute(size) for job in self._jobs.values() if job.state in BEFORE_FIRST
        )

    # ---- the states

    async def _run(self, job: PrefillRequest, audience: PrefillSink) -> PrefillAnswer:
        ask = job.ask
        job.clock.enter("prefill_queue")
        reservation = await self._admission.reserve(
            Request(
                request_id=job.engine_id,
                prompt_token_ids=ask.prompt_token_ids,
                sampling=ask.sampling,
                block_hasher=ask.chain.hasher,
                prompt_hashes=tuple(ask.chain.hashes(ask.prompt_token_ids)),
                cache_root=ask.chain.root,
                hold_after=len(ask.output_token_ids) + 1,
                priority=ask.priority,
                num_samples=ask.num_samples,
                beam=ask.beam,
                adapter=ask.chain.adapter_digest,
                wants_embedding=ask.wants_embedding,
                prompt_logprobs=ask.prompt_logprobs,
                owner=ask.tenant,
            ),
            job.deadline,
        )
        job.leg.num_tokens_local = reservation.num_local_tokens
        job.move(PrefillState.FETCHING)
        job.clock.enter("prefill_fetch")
        num_loaded = await self._fetch(job, reservation)
        job.chunks.start(num_loaded)
        job.move(PrefillState.COMPUTING)
        job.clock.enter("prefill_compute")
        await self._core.thread.call(lambda engine: _start(engine, job, num_loaded))
        firsts = await self._wait_for_firsts(job, audience)
        job.move(PrefillState.STORING)
        job.clock.enter("prefill_store")
        await audience.show_firsts(firsts)
        answer = await self._store(job, firsts, reservation)
        job.clock.enter(None)
        return answer

    async def _fetch(self, job: PrefillRequest, reservation: Reservation) -> int:
        """Load what the stores have beyond the local prefix, and prepare to store new blocks.
        Returns: number of tokens whose KV is loaded."""
        job.chain_hashes = self._hashes(job, reservation)
        ask = PrefixLoadRequest(
            engine_id=job.engine_id,
            reservation=reservation,
            chain_hashes=job.chain_hashes,
            num_wanted_tokens=job.ask.num_fetchable_tokens,
            prefix_runs=job.ask.prefix_runs,
            ttl_s=self._handover.ttl_s(job.deadline),
            deadline=job.deadline,
        )
        fetch = PrefixLoader(self._core, ask, job.leg, job.pins)
        job.place = place = await fetch.run()
        job.lent = self._handover.open_lent(job, job.chain_hashes)
        if job.lent is not None:
            job.lent.add(fetch.here())
        if place is not None and (job.lent is not None or not job.ask.wants_handle):
            place.release()
            job.behind = self._begin_behind(job, place, fetch.num_blocks, len(place.refs))
        elif place is not None:
            job.writer = self._open_writer(job, place)
            job.writer.add(fetch.missing_at(place))
        self._on_more(job)
        return fetch.num_tokens

    async def _wait_for_firsts(self, job: PrefillRequest, audience: PrefillSink) -> Firsts:
        """Wait until the first tokens are drawn. Meanwhile send partial handles and the prompt's
        log-probabilities."""
        job.first.add_done_callback(lambda _: job.early.news.set())
        while not job.first.done():
            await job.early.news.wait()
            job.early.news.clear()
            if job.early.is_due and not job.first.done():
                handle = await self._handover.partial(job)
                if handle is not None:
                    await audience.show_partial(handle)
            await self._show_prompt_logprobs(job, audience)
        await self._show_prompt_logprobs(job, audience)
        return await job.first

    async def _show_prompt_logprobs(self, job: PrefillRequest, audience: PrefillSink) -> None:
        """Send the prompt log-probabilities that have come since the last call."""
        if job.prompt_logprobs:
            logprobs, job.prompt_logprobs = job.prompt_logprobs, []
            await audience.show_prompt_logprobs(logprobs)

    async def _store(
        self, job: PrefillRequest, firsts: Firsts, reservation: Reservation
    ) -> PrefillAnswer:
        """Lend the prompt, or wait for the puts that the handle names; the tail goes last. Returns:
        the answer, with a handle if one is wanted and there are blocks to hand over."""
        goes_on = any(event.finish_reason is None for event in firsts)
        wants_handle = job.ask.wants_handle and goes_on
        num_full_blocks, num_rest = divmod(job.ask.num_context_tokens, self._core.model.block_size)
        tail = None
        # An unfilled block of a quantized cache has no bytes of its own: decode computes it again.
        if wants_handle and num_rest and not self._core.layout.is_quantized:
            name = f"{job.engine_id}@{self._core.identity.incarnation.hex()}"
            tail = TailSource(name, reservation.block_ids[num_full_blocks], num_rest)
        job.last_filled = [block for event in firsts for block in event.filled]
        if wants_handle and job.lent is not None:
            job.lent.add(job.last_filled)
            answer = await self._handover.direct(job, job.lent, tail)
            if answer is not None:
                self._account_behind(job)
                return answer
            self._go_through_store(job)
        if not wants_handle:
            if job.writer is not None:  # the first token has ended the answer
                place = PrefixLease(job.writer.client, "", (), job.writer.release_later)
                stored = job.writer.num_stored
                job.behind = self._begin_behind(job, place, num_full_blocks, stored)
            self._account_behind(job)
            return PrefillAnswer(None, job.leg, job.clock.seconds, ())
        if job.writer is None:
            num_blocks = num_full_blocks + (num_rest > 0)
            job.leg.not_stored[STORE_UNAVAILABLE] += num_blocks
            return PrefillAnswer(None, job.leg, job.clock.seconds, ())
        job.writer.add(job.last_filled)
        written, _ = await asyncio.gather(job.writer.finish(tail), job.pins.renew())
        job.leg.bytes_written[job.writer.client.transport_name] = written.num_bytes
        if written.problem is not None:
            num_stored = len(written.refs) + (written.tail is not None)
            num_wanted = num_full_blocks + (tail is not None)
            job.leg.not_stored[written.problem] += num_wanted - num_stored
        return self._handover.from_store(job, job.writer, written)

    def _account_behind(self, job: PrefillRequest) -> None:
        """Count the prompt's blocks that are in the store when its answer is sent."""
        chain, place = job.behind, job.place
        if chain is None or place is None:
            return
        if chain.problem:  # counts the last blocks, too
            self._core.write_behind.add(chain, job.last_filled)
            job.last_filled = ()
        else:
            job.leg.num_blocks_behind = len(job.chain_hashes) - chain.num_stored
        num_bytes = chain.num_bytes + (job.writer.num_bytes if job.writer is not None else 0)
        job.leg.bytes_written[place.client.transport_name] = num_bytes

    # ---- ends

    def _finish(self, job: PrefillRequest) -> None:
        job.move(PrefillState.DONE)
        self._core.counts.add(job.leg)
        self._core.counts.num_output_tokens += sum(
            len(event.token_ids) for event in job.firsts.values()
        )

    def _close(self, job: PrefillRequest) -> None:
        """Release what the request holds, once; after DONE some leases belong to the handle."""
        if self._jobs.pop(job.engine_id, None) is None:
            return
        handed_over = job.handed_over if job.state is PrefillState.DONE else frozenset()
        lent, writer = job.lent, job.writer
        is_lent = lent is not None and lent.lease_id in handed_over
        if job.first.done() and not job.first.cancelled():
            job.first.exception()  # retrieved, even if no caller waits for it
        with contextlib.ExitStack() as ends:  # the last first, each whatever the others raise
            if job.state is PrefillState.DONE:
                ends.callback(self._core.finish, job.engine_id)
            else:
                ends.callback(self._core.drop, job.engine_id)
            ends.callback(job.pins.hand_over, handed_over)
            if job.behind is not None:
                ends.callback(self._end_behind, job, job.behind)
            if writer is not None and writer.lease_id not in handed_over:
                ends.callback(writer.cancel)
            if lent is not None:
                ends.callback(lent.close, is_handed_over=is_lent)

    # ---- the engine's events

    def _on_step(self, output: StepOutput) -> None:
        for event in output.events:
            job = self._jobs.get(event.request_id)
            if job is None:
                continue  # cancelled while the step ran
            job.chunks.add(event, output)
            if event.prompt_logprobs:
                job.prompt_logprobs += event.prompt_logprobs
                job.early.news.set()
            if event.error is not None and not job.first.done():
                job.first.set_exception(event.error)
            elif (event.token_ids or event.beam_start) and not job.first.done():
                job.firsts[event.sample_index] = event  # its blocks go with the tail, in one put
                if len(job.firsts) == job.ask.num_firsts:
                    job.first.set_result([job.firsts[index] for index in sorted(job.firsts)])
            else:
                self._write(job, event.filled)
                job.early.stepped()
                if job.lent is not None:
                    asyncio.get_running_loop().call_soon(job.lent.look_ahead)

    def _on_failure(self, error: Internal) -> None:
        for job in self._jobs.values():
            if job.state is PrefillState.COMPUTING and not job.first.done():
                # By no fault of the request: another worker can compute it.
                job.first.set_exception(Unavailable(str(error)))
        self._admission.room_may_have_come()  # those who wait for room hear of it, too
        self._core.failed.set()

    # ---- parts

    def _hashes(self, job: PrefillRequest, reservation: Reservation) -> Sequence[bytes]:
        if job.ask.output_token_ids:
            return job.ask.chain.hashes(job.ask.context)
        return reservation.chain_hashes

    def _open_writer(self, job: PrefillRequest, place: PrefixLease) -> BlockWriter:
        return BlockWriter(
            self._core.connector,
            place.client,
            lease_id=place.lease_id,
            refs=place.refs,
            block_size=self._core.model.block_size,
            ttl_s=self._handover.ttl_s(job.deadline),
            put_budget_s=self._core.limits.put_budget_s,
            deadline=job.deadline,
            tenant=job.ask.tenant,
            on_stored=lambda: self._on_more(job),
            release_later=place.release_later,
        )

    def _on_more(self, job: PrefillRequest) -> None:
        """Note that more of the prompt can be fetched than before."""
        num_blocks = [len(pin.refs) for pin in job.pins.held]
        if job.lent is not None:
            num_blocks.append(job.lent.num_filled)
        if job.writer is not None:
            num_blocks.append(job.writer.num_stored)
        job.early.stored(max(num_blocks, default=0))

    def _write(self, job: PrefillRequest, blocks: Sequence[FilledBlock]) -> None:
        if not blocks:
            return
        if job.writer is not None:
            job.writer.add(blocks)
        if job.behind is not None:
            self._core.write_behind.add(job.behind, blocks)
        if job.lent is not None:
            job.lent.add(blocks)
            if job.lent.problem is not None:
                self._go_through_store(job)
            self._on_more(job)

    def _begin_behind(
        self, job: PrefillRequest, place: PrefixLease, num_filled: int, num_stored: int
    ) -> WriteChain:
        """Begin the background chain of the prompt at the store of `place`, which has its leading
        `num_stored` blocks. num_filled: leading blocks that are computed or loaded."""
        is_home = place.release_later == self._core.connector.release_later
        return self._core.write_behind.begin(
            job.ask.tenant,
            job.chain_hashes[:num_filled],
            job.leg,
            num_stored=num_stored,
            client=None if is_home else place.client,
        )

    def _end_behind(self, job: PrefillRequest, chain: WriteChain) -> None:
        """End the background chain of a finished request."""
        behind, lent = self._core.write_behind, job.lent
        if job.state is not PrefillState.DONE or chain.problem:
            behind.drop(chain)
        elif lent is None or lent.lease_id not in job.handed_over:
            behind.add(chain, job.last_filled)
            behind.end(chain)
        else:
            loans, lease_id = lent.lender.loans, lent.lease_id
            behind.end_after_reader(
                chain, job.last_filled, lambda then: loans.when_over(lease_id, then)
            )

    def _go_through_store(self, job: PrefillRequest) -> None:
        """Switch to a handover through the store, because the request's blocks cannot be lent."""
        place, chain, lent = job.place, job.behind, job.lent
        if place is None or chain is None or lent is None or job.writer is not None:
            return
        self._core.write_behind.drop(chain)
        job.behind = None
        job.writer = self._open_writer(job, PrefixLease(place.client, "", (), place.release_later))
        job.writer.add(lent.filled)


def _start(engine: WorkerEngine, job: PrefillRequest, num_loaded_tokens: int) -> None:
    """Start the request, on the engine's thread; blocks that will be lent are quarantined from the
    start."""
    engine.start(
        job.engine_id,
        num_loaded_tokens=num_loaded_tokens,
        outputs=[job.ask.output_token_ids],
    )
    if job.lent is not None:
        job.lent.hold(engine)
