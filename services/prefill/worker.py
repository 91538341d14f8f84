"""PrefillWorker: runs prefill requests, each as one coroutine that ends by releasing all its
resources.

Life of a request (a cancel or the deadline may end it in any state):

1. QUEUED     waits, first come first served, for blocks   -> cancel: the wait ends, a late grant is
   aborted
2. FETCHING   matches and copies what the stores have       -> cancel: what may still be written
   into is quarantined first, what was pinned is released
3. COMPUTING  the engine computes the rest in chunks, full blocks go to the store behind it, and
   partial handles say so -> cancel: abort, leases released
4. STORING    its first tokens are shown, waits for the last puts that the handle names -> cancel:
   as above; the tail is deleted with the lease
5. DONE       answered; the leases belong to the handle    | CANCELLED | FAILED

Asked for the direct way, it lends its own blocks instead (services/prefill/lent_prompt.py): partial
handles and the last one name this worker. Where that cannot be, it goes through the store, and the
account says so. Where no handle names the store (the direct way, or no handle is wanted), the
answer does not wait for it: services/worker/write_behind.py stores the prompt.

The store's absence only makes the handle shorter. Belongs to the loop's thread; speaks values, not
stubs. Where the prefix comes from: services/prefill/prefix_fetch.py; which way a handle goes:
services/prefill/handover.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.outputs import FilledBlock, PositionLogprobs, StepOutput
from engine.request import Request, Reservation
from kvstore.errors import STORE_UNAVAILABLE
from process.deadline import Deadline
from process.errors import Internal, Unavailable
from services.prefill.early_handles import EarlyHandles
from services.prefill.handover import Handover, PrefillAnswer
from services.prefill.job import BEFORE_FIRST, Firsts, PrefillAsk, PrefillJob, PrefillState
from services.prefill.pins import Pin, Pins
from services.prefill.prefix_fetch import FetchAsk, PrefixFetch
from services.worker import handle as handles
from services.worker import request_spans
from services.worker.admission import Admission
from services.worker.block_writer import BlockWriter, TailSource
from services.worker.core import WorkerCore
from services.worker.engine_port import WorkerEngine
from services.worker.provenance import Leg
from services.worker.sampling import named_on_wire
from services.worker.write_behind import WriteChain


class Audience(Protocol):
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
        self._jobs: dict[str, PrefillJob] = {}
        self._admission = Admission(
            core.thread,
            max_waiting=core.limits.max_waiting_requests,
            on_full=core.write_behind.give_way,
        )
        self._handover = Handover(core)
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
        ask: PrefillAsk,
        deadline: Deadline,
        audience: Audience,
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
                request_spans.tell(job.span, job.clock, job.leg)
            return answer

    async def _answer(
        self, job: PrefillJob, deadline: Deadline, audience: Audience
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

    def _new_job(self, ask: PrefillAsk, deadline: Deadline) -> PrefillJob:
        core = self._core
        return PrefillJob(
            ask,
            core.engine_id(ask.request_id),
            deadline,
            Leg(len(ask.prompt_token_ids)),
            Pins(
                core.connector,
                ttl_s=lambda: self._handover.ttl_s(deadline),
                renew_budget_s=core.limits.put_budget_s,
                deadline=deadline,
            ),
            EarlyHandles(wanted=ask.wants_handle),
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

    async def _run(self, job: PrefillJob, audience: Audience) -> PrefillAnswer:
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

    async def _fetch(self, job: PrefillJob, reservation: Reservation) -> int:
        """Load what the stores have beyond the local prefix, and prepare to store new blocks.
        Returns: number of tokens whose KV is loaded."""
        job.chain_hashes = self._hashes(job, reservation)
        ask = FetchAsk(
            engine_id=job.engine_id,
            reservation=reservation,
            chain_hashes=job.chain_hashes,
            num_wanted_tokens=job.ask.num_fetchable_tokens,
            prefix_runs=job.ask.prefix_runs,
            ttl_s=self._handover.ttl_s(job.deadline),
            deadline=job.deadline,
        )
        fetch = PrefixFetch(self._core, ask, job.leg, job.pins)
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

    async def _wait_for_firsts(self, job: PrefillJob, audience: Audience) -> Firsts:
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

    async def _show_prompt_logprobs(self, job: PrefillJob, audience: Audience) -> None:
        """Send the prompt log-probabilities that have come since the last call."""
        if job.prompt_logprobs:
            logprobs, job.prompt_logprobs = job.prompt_logprobs, []
            await audience.show_prompt_logprobs(logprobs)

    async def _store(
        self, job: PrefillJob, firsts: Firsts, reservation: Reservation
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
                place = Pin(job.writer.client, "", (), job.writer.release_later)
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

    def _account_behind(self, job: PrefillJob) -> None:
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

    def _finish(self, job: PrefillJob) -> None:
        job.move(PrefillState.DONE)
        self._core.counts.add(job.leg)
        self._core.counts.num_output_tokens += sum(
            len(event.token_ids) for event in job.firsts.values()
        )

    def _close(self, job: PrefillJob) -> None:
        """Release what the request holds, once; after DONE some leases belong to the handle."""
        if self._jobs.pop(job.engine_id, None) is None:
            return
        handed_over = job.handed_over if job.state is PrefillState.DONE else frozenset()
        lent, writer = job.lent, job.writer
        is_lent = lent is not None and lent.lease_id in handed_over
        if job.first.done() and not job.first.cancelled():
            job.first.exception()  # seen, even if nobody waited any more
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

    def _hashes(self, job: PrefillJob, reservation: Reservation) -> Sequence[bytes]:
        if job.ask.output_token_ids:
            return job.ask.chain.hashes(job.ask.context)
        return reservation.chain_hashes

    def _open_writer(self, job: PrefillJob, place: Pin) -> BlockWriter:
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

    def _on_more(self, job: PrefillJob) -> None:
        """Note that more of the prompt can be fetched than before."""
        num_blocks = [len(pin.refs) for pin in job.pins.held]
        if job.lent is not None:
            num_blocks.append(job.lent.num_filled)
        if job.writer is not None:
            num_blocks.append(job.writer.num_stored)
        job.early.stored(max(num_blocks, default=0))

    def _write(self, job: PrefillJob, blocks: Sequence[FilledBlock]) -> None:
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
        self, job: PrefillJob, place: Pin, num_filled: int, num_stored: int
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

    def _end_behind(self, job: PrefillJob, chain: WriteChain) -> None:
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

    def _go_through_store(self, job: PrefillJob) -> None:
        """Switch to a handover through the store, because the request's blocks cannot be lent."""
        place, chain, lent = job.place, job.behind, job.lent
        if place is None or chain is None or lent is None or job.writer is not None:
            return
        self._core.write_behind.drop(chain)
        job.behind = None
        job.writer = self._open_writer(job, Pin(place.client, "", (), place.release_later))
        job.writer.add(lent.filled)


def _start(engine: WorkerEngine, job: PrefillJob, num_loaded_tokens: int) -> None:
    """Start the request, on the engine's thread; blocks that will be lent are quarantined from the
    start."""
    engine.start(
        job.engine_id,
        num_loaded_tokens=num_loaded_tokens,
        outputs=[job.ask.output_token_ids],
    )
    if job.lent is not None:
        job.lent.hold(engine)
