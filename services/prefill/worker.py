"""A prefill worker's requests. Each is one coroutine; each ends by giving back all it took.

Life of a request (a cancel or the deadline may end it in any state):

1. QUEUED     waits, first come first served, for blocks   -> cancel: the wait ends, a late grant is
   aborted
2. FETCHING   matches and copies what the store has         -> cancel: what may still be written
   into is quarantined first
3. COMPUTING  the engine computes the rest in chunks, full blocks go to the store behind it ->
   cancel: abort, lease released
4. STORING    its first tokens are shown, waits for the last puts -> cancel: as above; the tail is
   deleted with the lease
5. DONE       answered; the lease belongs to the handle     | CANCELLED | FAILED

The store's absence only makes the handle shorter. Belongs to the loop's thread; speaks values, not
stubs.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from engine.request import (
    Beam,
    FilledBlock,
    Request,
    RequestEvent,
    Reservation,
    Sampling,
    StepOutput,
)
from kvstore.block import Block
from kvstore.client import StoreClient
from kvstore.errors import STORE_UNAVAILABLE
from process.deadline import Deadline
from process.errors import BatonError, Internal
from services.worker import handle as handles
from services.worker.admission import Admission
from services.worker.block_writer import BlockWriter, TailSource, Written
from services.worker.connector import reason_of
from services.worker.core import Chain, WorkerCore
from services.worker.provenance import Leg, StageClock
from services.worker.sampling import named_on_wire


class PrefillState(enum.Enum):
    """Where a request is; see the module."""

    QUEUED = "queued"
    FETCHING = "fetching"
    COMPUTING = "computing"
    STORING = "storing"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


_OVER = frozenset({PrefillState.CANCELLED, PrefillState.FAILED})
ALLOWED: dict[PrefillState, frozenset[PrefillState]] = {
    PrefillState.QUEUED: frozenset({PrefillState.FETCHING}) | _OVER,
    PrefillState.FETCHING: frozenset({PrefillState.COMPUTING}) | _OVER,
    PrefillState.COMPUTING: frozenset({PrefillState.STORING}) | _OVER,
    PrefillState.STORING: frozenset({PrefillState.DONE}) | _OVER,
    PrefillState.DONE: frozenset(),
    PrefillState.CANCELLED: frozenset(),
    PrefillState.FAILED: frozenset(),
}


@dataclass(frozen=True)
class PrefillAsk:
    """One prompt to prefill, and how many samples of it shall draw their first token."""

    request_id: str
    tenant: str
    adapter: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling: Sampling
    chain: Chain
    priority: int
    wants_handle: bool
    num_samples: int = 1
    beam: Beam | None = None

    @property
    def num_firsts(self) -> int:
        """Events with a first token. A beam search has one, for all of its beams."""
        return 1 if self.beam is not None else self.num_samples


Firsts = Sequence[RequestEvent]
"""The event with the first token of each sample, in their order."""

Show = Callable[[Firsts], Awaitable[None]]
"""Takes the first tokens to whoever asked; returns when they are on their way."""


@dataclass(frozen=True)
class PrefillAnswer:
    """Where the prompt's KV lies, and what it took."""

    handle: handles.Handle | None
    leg: Leg
    seconds: dict[str, float]


@dataclass(eq=False)
class _Job:
    ask: PrefillAsk
    engine_id: str
    deadline: Deadline
    leg: Leg
    first: asyncio.Future[Firsts]
    firsts: dict[int, RequestEvent] = field(default_factory=dict)
    """Of the samples that have drawn, until all have."""
    clock: StageClock = field(default_factory=StageClock)
    state: PrefillState = PrefillState.QUEUED
    client: StoreClient | None = None
    lease_id: str = ""
    writer: BlockWriter | None = None
    owns_lease: bool = True
    """False once the handle has it."""

    def move(self, state: PrefillState) -> None:
        if state not in ALLOWED[self.state]:
            raise Internal(
                f"{self.engine_id}: {self.state.value} -> {state.value} is no transition"
            )
        self.state = state

    @property
    def context(self) -> tuple[int, ...]:
        """All tokens that are known before the draw."""
        return self.ask.prompt_token_ids + self.ask.output_token_ids


class PrefillWorker:
    """See the module."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._jobs: dict[str, _Job] = {}
        self._admission = Admission(core.thread, max_waiting=core.limits.max_waiting_requests)
        core.on_room = self._admission.room_may_have_come

    def start(self) -> None:
        """Begin to run the engine. Called once, on the loop."""
        self._core.thread.start(self._on_step, self._on_failure)

    async def stop(self) -> None:
        """Refuse those who still wait for room."""
        await self._admission.stop()

    @property
    def states(self) -> dict[str, PrefillState]:
        """Of the live requests, by their name in the engine."""
        return {engine_id: job.state for engine_id, job in self._jobs.items()}

    async def prefill(self, ask: PrefillAsk, deadline: Deadline, show: Show) -> PrefillAnswer:
        """Prefill one prompt and draw the next token of each sample, which `show` gets at once;
        then store the KV.

        Cancelling this coroutine is cancelling the request.
        Raises: NoCapacity, InvalidArgument, DeadlineExceeded, Unavailable, Internal.
        """
        with self._core.admit():
            job = _Job(
                ask,
                self._core.engine_id(ask.request_id),
                deadline,
                Leg(len(ask.prompt_token_ids), transport=self._core.connector.transport),
                asyncio.get_running_loop().create_future(),
            )
            self._jobs[job.engine_id] = job
            try:
                async with deadline.timeout("prefill"):
                    answer = await self._run(job, show)
                self._finish(job)
                return answer
            except asyncio.CancelledError:
                job.move(PrefillState.CANCELLED)
                raise
            except Exception as error:  # also of `show`: whoever asked is gone
                job.move(PrefillState.FAILED)
                raise named_on_wire(error, ask.sampling) from error
            finally:
                self._close(job)

    # ---- the states

    async def _run(self, job: _Job, show: Show) -> PrefillAnswer:
        ask = job.ask
        job.clock.enter("prefill_queue")
        reservation = await self._admission.reserve(
            Request(
                request_id=job.engine_id,
                prompt_token_ids=ask.prompt_token_ids,
                sampling=ask.sampling,
                block_hasher=ask.chain.hasher,
                cache_root=ask.chain.root,
                hold_after=len(ask.output_token_ids) + 1,
                priority=ask.priority,
                num_samples=ask.num_samples,
                beam=ask.beam,
                adapter=ask.adapter,
            ),
            job.deadline,
            adapter_digest=ask.chain.adapter_digest,
        )
        job.leg.num_tokens_local = reservation.num_local_tokens
        job.move(PrefillState.FETCHING)
        job.clock.enter("prefill_fetch")
        num_loaded = await self._fetch(job, reservation)
        job.move(PrefillState.COMPUTING)
        job.clock.enter("prefill_compute")
        await self._core.thread.call(
            lambda engine: engine.start(
                job.engine_id,
                num_loaded_tokens=num_loaded,
                outputs=[ask.output_token_ids],
            )
        )
        firsts = await job.first
        job.move(PrefillState.STORING)
        job.clock.enter("prefill_store")
        await show(firsts)
        handle = await self._store(job, firsts, reservation)
        job.clock.enter(None)
        return PrefillAnswer(handle, job.leg, job.clock.seconds)

    async def _fetch(self, job: _Job, reservation: Reservation) -> int:
        """Copy what the store has beyond the local prefix.

        Returns: tokens whose KV is there now.
        """
        connector, size = self._core.connector, self._core.model.block_size
        num_local_blocks = reservation.num_local_tokens // size
        num_fetchable = (len(job.context) - 1) // size
        client = connector.client
        if client is None:
            if connector.address:
                job.leg.recomputed[STORE_UNAVAILABLE] += num_fetchable - num_local_blocks
            return reservation.num_local_tokens
        hashes = self._hashes(job, reservation)
        try:
            matched = await client.match(
                hashes,
                ttl_s=self._ttl_s(job),
                deadline=job.deadline.sooner(self._core.limits.transfer_budget_s),
            )
        except BatonError as error:
            connector.suspect(client, error)
            job.leg.recomputed[reason_of(error)] += num_fetchable - num_local_blocks
            return reservation.num_local_tokens
        job.client, job.lease_id = client, matched.lease_id
        wanted = matched.blocks[num_local_blocks:num_fetchable]
        items = list(zip(wanted, reservation.block_ids[num_local_blocks:], strict=False))
        loaded = await connector.load(client, job.engine_id, matched.lease_id, items, job.deadline)
        num_loaded_tokens = (num_local_blocks + loaded.num_usable) * size
        leg = job.leg
        leg.store_node_id = client.node_id
        leg.num_bytes_read += loaded.num_bytes
        leg.recomputed.update(loaded.not_usable)
        leg.count_loaded(
            reservation.num_local_tokens,
            num_loaded_tokens,
            wanted[: loaded.num_usable],
            block_bytes=self._core.layout.block_bytes,
        )
        refs = matched.blocks
        if loaded.num_usable < len(items):
            refs = refs[: num_local_blocks + loaded.num_usable]
        self._open_writer(job, client, refs)
        # What the store has lost of our local prefix goes there again: presence must have no gap.
        self._write(
            job,
            [
                FilledBlock(index, reservation.block_ids[index], hashes[index])
                for index in range(len(refs), num_local_blocks)
            ],
        )
        return num_loaded_tokens

    async def _store(
        self, job: _Job, firsts: Firsts, reservation: Reservation
    ) -> handles.Handle | None:
        """Wait for the puts; the tail goes last.

        Returns: the handle, if one is wanted and there is something to hand.
        """
        goes_on = any(event.finish_reason is None for event in firsts)
        wants_handle = job.ask.wants_handle and goes_on
        num_full_blocks, num_rest = divmod(len(job.context), self._core.model.block_size)
        if job.writer is None:
            if wants_handle:
                num_blocks = num_full_blocks + (num_rest > 0)
                job.leg.not_stored[STORE_UNAVAILABLE] += num_blocks
            return None
        tail = None
        # An unfilled block of a quantized cache has no bytes of its own: decode computes it again.
        if wants_handle and num_rest and not self._core.layout.is_quantized:
            name = f"{job.engine_id}@{self._core.identity.incarnation.hex()}"
            tail = TailSource(name, reservation.block_ids[num_full_blocks], num_rest)
        self._write(job, [block for event in firsts for block in event.filled])
        written = await job.writer.finish(tail)
        job.leg.num_bytes_written = written.num_bytes
        if written.problem is not None:
            num_stored = len(written.refs) + (written.tail is not None)
            num_wanted = num_full_blocks + (tail is not None)
            job.leg.not_stored[written.problem] += num_wanted - num_stored
        if not wants_handle:
            return None
        handle = self._handle(job, job.writer.client, written, num_full_blocks)
        job.owns_lease = handle is None
        return handle

    def _handle(
        self, job: _Job, client: StoreClient, written: Written, num_full_blocks: int
    ) -> handles.Handle | None:
        size, core = self._core.model.block_size, self._core
        has_tail = written.tail is not None and len(written.refs) == num_full_blocks
        if not written.refs and not has_tail:
            return None

        def run(first_block: int, blocks: Sequence[Block]) -> handles.Run:
            return handles.Run(
                client.node_id,
                client.address,
                client.incarnation,
                written.lease_id,
                first_block,
                tuple(blocks),
            )

        num_tokens = len(written.refs) * size
        tail = None
        if written.tail is not None and has_tail:
            tail = run(num_full_blocks, [written.tail])
            num_tokens += written.tail.num_tokens
        return handles.Handle(
            request_id=job.ask.request_id,
            tenant=job.ask.tenant,
            adapter=job.ask.adapter,
            model_fingerprint=core.model.fingerprint,
            producer_id=core.identity.worker_id,
            producer_incarnation=core.identity.incarnation,
            block_size=size,
            num_tokens=num_tokens,
            runs=(run(0, written.refs),) if written.refs else (),
            tail=tail,
            deadline_unix_ms=handles.deadline_unix_ms(self._ttl_s(job)),
        )

    # ---- ends

    def _finish(self, job: _Job) -> None:
        job.move(PrefillState.DONE)
        self._core.counts.add(job.leg)
        self._core.counts.num_output_tokens += sum(
            len(event.token_ids) for event in job.firsts.values()
        )

    def _close(self, job: _Job) -> None:
        """Give back what the request holds; after DONE with a handle the lease is the handle's."""
        del self._jobs[job.engine_id]
        if job.writer is not None:
            if job.owns_lease or job.state is not PrefillState.DONE:
                job.writer.cancel()
        else:
            self._core.connector.release_later(job.client, [job.lease_id])
        if job.first.done() and not job.first.cancelled():
            job.first.exception()  # seen, even if nobody waited any more
        self._core.drop(job.engine_id)

    # ---- the engine's events

    def _on_step(self, output: StepOutput) -> None:
        for event in output.events:
            job = self._jobs.get(event.request_id)
            if job is None:
                continue  # cancelled while the step ran
            if event.error is not None and not job.first.done():
                job.first.set_exception(event.error)
            elif (event.token_ids or event.beam_start) and not job.first.done():
                job.firsts[event.sample_index] = event  # its blocks go with the tail, in one put
                if len(job.firsts) == job.ask.num_firsts:
                    job.first.set_result([job.firsts[index] for index in sorted(job.firsts)])
            else:
                self._write(job, event.filled)

    def _on_failure(self, error: Internal) -> None:
        for job in self._jobs.values():
            if job.state is PrefillState.COMPUTING and not job.first.done():
                job.first.set_exception(error)
        self._admission.room_may_have_come()  # those who wait for room hear of it, too
        self._core.failed.set()

    # ---- parts

    def _hashes(self, job: _Job, reservation: Reservation) -> Sequence[bytes]:
        if job.ask.output_token_ids:
            return job.ask.chain.hashes(job.context)
        return reservation.chain_hashes

    def _ttl_s(self, job: _Job) -> float:
        """A lease lives as long as the request may, within our bound."""
        return min(job.deadline.left_s(), self._core.limits.lease_ttl_s)

    def _open_writer(self, job: _Job, client: StoreClient, refs: Sequence[Block]) -> None:
        job.writer = BlockWriter(
            self._core.connector,
            client,
            lease_id=job.lease_id,
            refs=refs,
            block_size=self._core.model.block_size,
            ttl_s=self._ttl_s(job),
            put_budget_s=self._core.limits.put_budget_s,
            deadline=job.deadline,
        )

    def _write(self, job: _Job, blocks: Sequence[FilledBlock]) -> None:
        if job.writer is not None and blocks:
            job.writer.add(blocks)
