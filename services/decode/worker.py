"""DecodeWorker: the decode requests of one worker, and the dispatch of the engine's events to them.
DecodeRequest: one such request: one task, which ends by releasing all of its resources.

States of a request (a cancel, the deadline, or the end of its stream or worker may come in any
state):

1. RESERVING  asks the engine for blocks                         -> cancel: a late grant is aborted
2. RESERVED   holds blocks, waits for the handle                  -> cancel, or no handle in time:
   blocks released
3. PREFETCHING  pulls stored blocks while prefill still runs      -> cancel: as in FETCHING; then
   RESERVED again
4. FETCHING   copies and verifies the blocks of the handle        -> cancel: blocks that a transfer
   may still write into are quarantined
5. RUNNING    takes part in the engine's steps; full blocks go to the store behind it -> cancel: out
   of the next step, blocks released
6. MOVING     its worker drains: out of the engine's steps, its KV goes into the store
   -> cancel: as in RUNNING; a pending put never commits
7. FINISHED   | MOVED | CANCELLED | FAILED: sent on the stream, unless the stream is gone

A draining worker tells each request to leave. Before FETCHING a request fails with Unavailable, so
that the router sends it elsewhere; a FETCHING request continues up to RUNNING and then moves; a
RUNNING request moves at once. When the time limit of its DrainDeadline is over, the request gets
DrainTimeout and moves without its KV.

A request holds places in the engine's steps, one for each sample, from its reservation on, so that
a stream that has begun never waits for another. A request for which there are no places is queued,
and its reservation is answered when it has them. Invariant: at most as many places are held
as there are. The events of one engine step reach every stream by one `flush`.

Parts of a request: SampleProgress (which samples are unfinished, and how many tokens of each were
sent), AnswerChains (background writes of the samples' full blocks; none where nothing is written
back, and none for a beam search, whose blocks are not in the prefix cache), TracedDrafts and
TracedSteps (one span each for all draft calls and all decode steps of a traced request).

Used on the event loop's thread; no protobuf types.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from types import TracebackType

from engine.errors import NoBlocks
from engine.outputs import RequestOutput, StepOutput
from engine.request import DetachedRequest, Reservation
from engine.speculation.remote import DraftTraces
from kvstore.errors import DEADLINE
from process.deadline import Deadline
from process.rpc_errors import (
    BatonError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from process.trace_spans import Span
from services.decode import migration
from services.decode.event_sink import DecodeEventSink, StreamLoad
from services.decode.kv_loader import GenerateCommand, KvArrival, KvLoader, give_back, is_for
from services.decode.migration import MigratedKv
from services.decode.request_spec import ALLOWED, DecodeRequestSpec, DecodeState
from services.worker import provenance
from services.worker.adapters import check_digest
from services.worker.engine_port import WorkerEngine
from services.worker.provenance import LegProvenance, StageClock
from services.worker.runtime import WorkerCore
from services.worker.store_writer import WriteBehind, WriteChain
from services.worker.stream_servicer import named_on_wire


class SampleProgress:
    """Progress of one request's samples."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self.open = set(range(num_samples))
        self.num_outputs = [0] * num_samples

    @property
    def ended(self) -> list[int]:
        """Return the indices of samples that have ended or are no longer wanted, in order."""
        return sorted(set(range(self._num_samples)) - self.open)

    def begin(self, handover: GenerateCommand) -> tuple[tuple[int, ...], ...]:
        """Start from the tokens that were drawn already, of each sample. Returns: these tokens.
        Raises: InvalidArgument for another number of samples, or when all have ended."""
        if len(handover.outputs) != self._num_samples:
            raise InvalidArgument(
                "outputs", f"of {len(handover.outputs)} samples, not {self._num_samples}"
            )
        self.num_outputs = [len(token_ids) for token_ids in handover.outputs]
        self.open -= handover.over
        if not self.open:
            raise InvalidArgument("outputs", "every sample has ended")
        return handover.outputs


class DrainTimeout(Unavailable):
    """Error raised when a draining worker waits for this request no longer."""


class DrainDeadline:
    """Time limit of one request's departure; a scope that is entered once."""

    def __init__(self, worker_id: str) -> None:
        self.told: asyncio.Future[Deadline] = asyncio.get_running_loop().create_future()
        """Until when it has to be gone."""
        self._worker_id = worker_id
        self._scope = asyncio.timeout(None)
        self._is_inside = False

    @property
    def is_told(self) -> bool:
        return self.told.done()

    def tell(self, by: Deadline) -> None:
        """Set the time by which the request must be gone; only the first call counts."""
        if self.is_told:
            return
        self.told.set_result(by)
        if self._is_inside:
            self._set_alarm(by)

    def _set_alarm(self, by: Deadline) -> None:
        self._scope.reschedule(asyncio.get_running_loop().time() + by.left_s())

    async def __aenter__(self) -> DrainDeadline:
        await self._scope.__aenter__()
        self._is_inside = True
        if self.is_told:
            self._set_alarm(self.told.result())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_inside = False
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise DrainTimeout(f"{self._worker_id} is draining", retry_after_s=0.0) from late


class TracedDrafts:
    """Span of the draft calls of one request.

    Args:
        request_id: the engine's name of the request.
    """

    def __init__(self, span: Span, traces: DraftTraces, request_id: str) -> None:
        self._span = span
        self._traces = traces
        self._request_id = request_id
        if span.is_recording:
            traces.watch(request_id)

    def tell(self) -> None:
        """End the span: the request is over."""
        if not self._span.is_recording:
            return
        calls = self._traces.take(self._request_id)
        if calls is None:
            return
        self._span.add_child(
            "draft_calls",
            calls.first_s,
            calls.last_s,
            {
                "baton.num_calls": calls.num_calls,
                "baton.num_late": calls.num_late,
                "baton.num_failed": calls.num_failed,
                "baton.num_guessed_tokens": calls.num_nodes,
                "baton.waited_s": calls.waited_s,
                "baton.longest_call_s": calls.longest_s,
                "baton.draft_workers": tuple(calls.addresses),
            },
        )


class TracedSteps:
    """Span of the decode steps of one request."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._first_s: float | None = None
        self._last_s = 0.0
        self._num_news = 0
        self._num_tokens = 0
        self._longest_s = 0.0

    def add(self, num_tokens: int) -> None:
        """Count a step that drew tokens of one sample."""
        if not self._span.is_recording:
            return
        now = time.monotonic()
        if self._first_s is None:
            self._first_s = now
        else:
            self._longest_s = max(self._longest_s, now - self._last_s)
        self._last_s = now
        self._num_news += 1
        self._num_tokens += num_tokens

    def tell(self) -> None:
        """End the span: the request is over."""
        if self._first_s is None:
            return
        self._span.add_child(
            "decode_steps",
            self._first_s,
            self._last_s,
            {
                "baton.num_news": self._num_news,
                "baton.num_tokens": self._num_tokens,
                "baton.longest_pause_s": self._longest_s,
            },
        )


class AnswerChains:
    """Background chains of one request's samples. Life: `follow` once -> `add` and `end` ->
    `end_all`."""

    def __init__(
        self, write_behind: WriteBehind, ask: DecodeRequestSpec, leg: LegProvenance, *, is_on: bool
    ) -> None:
        self._write_behind = write_behind
        self._is_on = is_on and write_behind.has_store
        self._ask = ask
        self._leg = leg
        self._chains: dict[int, WriteChain] = {}

    def follow(self, intake: KvLoader, handover: GenerateCommand, samples: Iterable[int]) -> None:
        """Begin to store the blocks that these samples fill, preceded by the prompt's blocks that
        only another node's store has."""
        ask = self._ask
        if ask.beam is not None or not self._is_on:
            return
        hashes = intake.hashes(intake.look_at(handover))
        num_at_home = intake.num_at_home(handover)
        num_prompt_blocks = len(ask.prompt_token_ids) // intake.block_size
        for index in samples:
            # What the prompt's blocks lack is filled by the first sample, before the others part.
            known = hashes[: intake.num_blocks] if index == 0 else hashes[:num_prompt_blocks]
            self._chains[index] = self._write_behind.begin(
                ask.tenant,
                known,
                self._leg,
                num_stored=min(num_at_home, len(known)),
                num_reached=len(known),
                num_prompt_blocks=num_prompt_blocks,
            )

    def add(self, event: RequestOutput) -> None:
        """Add the blocks that a step filled."""
        chain = self._chains.get(event.sample_index)
        if chain is not None and event.filled:
            self._write_behind.add(chain, event.filled)

    def end(self, sample_index: int) -> None:
        """End a sample's chain. Idempotent."""
        chain = self._chains.get(sample_index)
        if chain is not None:
            self._write_behind.end(chain)

    def end_all(self) -> None:
        """End the chains of all samples. Idempotent."""
        for chain in self._chains.values():
            self._write_behind.end(chain)


logger = logging.getLogger(__name__)


class DecodeRequest:
    """One decode request of a stream; `live` runs it from start to end.

    Args:
        num_waiting: returns the number of requests without a token, this one included.
        on_fewer_places: called when the running request holds or needs fewer places than before.
        on_over: called once, at the end.
    """

    def __init__(
        self,
        core: WorkerCore,
        sink: DecodeEventSink,
        key: int,
        ask: DecodeRequestSpec,
        deadline: Deadline,
        *,
        num_waiting: Callable[[], int],
        on_fewer_places: Callable[[], None],
        on_over: Callable[[DecodeRequest], None],
    ) -> None:
        self.key = key
        self.state = DecodeState.RESERVING
        self.engine_id = core.engine_id(ask.request_id)
        self.sink = sink
        self.is_decoding = False
        self._core = core
        self._num_waiting = num_waiting
        self._on_fewer_places = on_fewer_places
        self._on_over = on_over
        self._ask = ask
        self._deadline = deadline
        self._leg = LegProvenance(len(ask.prompt_token_ids), num_reached=0)
        self._clock = StageClock()
        self._span = core.tracing.follow("serve decode", ask.trace, core.about)
        self._steps = TracedSteps(self._span)
        self._drafts = TracedDrafts(self._span, core.draft_traces, self.engine_id)
        self.chunks = provenance.TracedChunks(self._span, len(ask.prompt_token_ids))
        """Of the prompt, as far as it is computed here."""
        self.arrival = KvArrival()
        """Of its KV."""
        self._chains = AnswerChains(core.write_behind, ask, self._leg, is_on=core.limits.write_back)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._samples = SampleProgress(ask.num_samples)
        self._departure = DrainDeadline(core.identity.worker_id)
        self._held: DetachedRequest | None = None
        self._is_cancel_wanted = False
        self._is_taken_in = False
        self._has_begun = False
        self._is_cancelled_early = False
        self._is_closed = False
        self._placed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    @property
    def num_places(self) -> int:
        """Return the number of places in the engine's steps that it has or will need: one per
        unfinished sample or per beam; 0 once it is over."""
        if self.state is DecodeState.FINISHED:
            return 0
        beam = self._ask.beam
        return len(self._samples.open) if beam is None else beam.num_beams

    @property
    def has_begun(self) -> bool:
        """Return whether the client has seen a part of the answer."""
        return self._ask.has_begun

    def take_places(self) -> None:
        """Record that the worker has granted all places that it needs; called once."""
        self._placed.set()

    @property
    def owner(self) -> tuple[str, str]:
        """Return the request id and the tenant."""
        return self._ask.request_id, self._ask.tenant

    # ---- what the stream says

    def hand_over(self, handover: GenerateCommand) -> None:
        """Pass the handover to the request. Raises: NotFound when the request is over,
        FailedPrecondition when it had a handover already."""
        if self._is_closed:
            raise NotFound(f"no request {self.key} on this stream any more")
        if self.arrival.is_over:
            raise FailedPrecondition(f"request {self._ask.request_id} was told to generate twice")
        self._clock.enter("decode_fetch")  # what was asked for ahead may still be on its way
        self.arrival.hand_over(handover)

    def cancel(self, *, say_so: bool) -> None:
        """Cancel the request in any state; `say_so`: whether its stream still exists and is sent
        the event."""
        if self.task is None or self._done.done():
            return
        self._is_cancel_wanted = say_so
        if self._has_begun:
            self._done.cancel()
            self.task.cancel()
        else:
            # A task cancelled before its first step would never run its own `finally`.
            self._is_cancelled_early = True

    def cancel_sample(self, sample_index: int) -> None:
        """End one sample that is no longer wanted; with the last one the request ends."""
        if sample_index not in self._samples.open or self._done.done():
            return
        self._samples.open.discard(sample_index)
        if not self._samples.open:
            self.cancel(say_so=True)
        elif self.state is DecodeState.RUNNING:
            engine_id = self.engine_id
            self._core.thread.post(lambda engine: engine.finish_sample(engine_id, sample_index))
        self._on_fewer_places()

    def leave(self, by: Deadline) -> None:
        """Leave the draining worker by the time `by`, with the KV moved to another worker if that
        is done by then. A request that has no KV yet ends at once."""
        if self.task is None or self._done.done():
            return
        self._departure.tell(by if self.arrival.is_over else Deadline.after(0))

    # ---- the states

    async def live(self) -> None:
        """Run the request from the reservation to the last event. Raises only a cancellation that
        need not be reported."""
        with self._span:  # the current one, of this task
            await self._live()

    async def _live(self) -> None:
        problem: BaseException | None = None
        self._has_begun = True
        try:
            if self._is_cancelled_early:
                raise asyncio.CancelledError
            with self._core.admit():
                async with self._deadline.timeout("decode"), self._departure:
                    await self._run()
        except asyncio.CancelledError as error:
            if self.state is DecodeState.FINISHED:
                return  # its last word was said in the same turn
            problem = error
            self._move(DecodeState.CANCELLED)
            if not self._is_cancel_wanted:
                raise
            self._clock.enter(None)
            self.sink.finished(self.key, None, self._leg, self._clock.seconds)
        except Exception as error:  # the translator of this border: the sink makes a status of it
            if self.state is DecodeState.FINISHED:
                return
            if isinstance(error, DrainTimeout) and self._is_taken_in:
                self._tell_moved(MigratedKv(None, DEADLINE))
            else:
                problem = error
                self._tell_failed(error)
        finally:
            self._on_over(self)
            self._steps.tell()
            self._drafts.tell()
            provenance.set_leg_attributes(self._span, self._clock, self._leg)
            self._span.end(problem)
        if self.state is not DecodeState.FINISHED:
            self.sink.flush(StreamLoad.now(self._core.thread.stats))

    def _tell_failed(self, error: Exception) -> None:
        self._move(DecodeState.FAILED)
        if isinstance(error, Internal) or not isinstance(error, BatonError):
            fields = {"fields": {"request_id": self._ask.request_id}}
            logger.error("decode_request_failed", exc_info=error, extra=fields)
        self.sink.failed(self.key, named_on_wire(error, self._ask.sampling), self._leg)

    async def _run(self) -> None:
        ask, thread = self._ask, self._core.thread
        self._core.refuse_when_full(self._num_waiting() - 1)
        request = await ask.request(self.engine_id, self._core.hashing)

        def reserve(engine: WorkerEngine) -> Reservation:
            check_digest(engine, request.adapter)
            return engine.reserve(request)

        try:
            reservation = await thread.call(reserve)
        except NoBlocks:  # the next attempt finds what is held for the store
            self._core.write_behind.give_way()
            raise
        self._leg.num_tokens_local = reservation.num_local_tokens
        if not (self._placed.is_set() or ask.has_begun):
            self.sink.queued(self.key)
            self.sink.flush(StreamLoad.now(thread.stats))
            await self._placed.wait()
        self._move(DecodeState.RESERVED)
        self.sink.reserved(self.key, reservation.num_local_tokens)
        self.sink.flush(StreamLoad.now(thread.stats))
        on_rest = self.arrival.news.set
        intake = KvLoader(self._core, ask, self.engine_id, reservation, self._leg, on_rest=on_rest)
        handover = await self.arrival.wait(
            intake,
            self._deadline,
            move=self._move,
            standing_back=self._core.write_behind.standing_back,
        )
        outputs = self._samples.begin(handover) if ask.beam is None else ((),)
        self._on_fewer_places()  # some may be over already
        self._move(DecodeState.FETCHING)
        self._is_taken_in = True
        try:
            num_loaded = await self._fetch(intake, handover)
            if self._placed.is_set():
                await self._start(num_loaded, handover, outputs)
        finally:
            # Behind the start: that is what the client waits for. But not behind a wait for places.
            intake.give_back(handover)
        if self.state is DecodeState.FETCHING:
            await self._placed.wait()
            await self._start(num_loaded, handover, outputs)
        if ask.beam is not None and not self._done.done():
            self._begin_decoding()  # it has no tokens to tell of before its end
        await asyncio.wait((self._done, self._departure.told), return_when=asyncio.FIRST_COMPLETED)
        if not self._done.done():
            self._held = await self._take_out()
        if self._done.done():
            await self._done
        else:
            await self._move_away()

    async def _fetch(self, intake: KvLoader, handover: GenerateCommand) -> int:
        """Load the handed-over KV. Returns: number of tokens whose KV is loaded."""
        with self._core.write_behind.standing_back():
            num_loaded = await intake.load(handover, self._deadline)
        self._clock.enter("decode_queue")  # until the first token: the wait and its first step
        self.chunks.start(num_loaded)
        self._leg.num_reached = num_loaded
        self._chains.follow(intake, handover, sorted(self._samples.open))
        return num_loaded

    async def _start(
        self, num_loaded: int, handover: GenerateCommand, outputs: tuple[tuple[int, ...], ...]
    ) -> None:
        """Start the request in the engine: FETCHING -> RUNNING."""
        self._move(DecodeState.RUNNING)
        # A cancel from here on is posted behind the start.
        over = self._samples.ended
        engine_id = self.engine_id

        def start(engine: WorkerEngine) -> None:
            engine.start(
                engine_id,
                num_loaded_tokens=num_loaded,
                outputs=outputs,
                beam_start=handover.beam_start,
            )
            for index in over:
                engine.finish_sample(engine_id, index)

        await self._core.thread.call(start)

    async def _take_out(self) -> DetachedRequest | None:
        return await migration.take_out(self._core, self._ask, self.engine_id, self._done.done)

    async def _move_away(self) -> None:
        """Move the request to another worker: RUNNING -> MOVED."""
        if self._held is None:
            self._tell_moved(MigratedKv(None, migration.SEVERAL_SAMPLES))
            return
        self._move(DecodeState.MOVING)
        self._clock.enter("decode_move")
        if self._leg.num_reached is not None:  # no event tells of the step in which it was held
            self._leg.num_reached = max(self._leg.num_reached, self._held.num_computed_tokens)
        num_held = len(self._held.token_ids) - len(self._ask.prompt_token_ids)
        num_told = self._samples.num_outputs[0]
        if num_held != num_told:
            raise Internal(f"{self.engine_id}: {num_held} tokens drawn, {num_told} told")
        luggage = await migration.pack(
            self._core,
            self._ask,
            self.engine_id,
            self._held,
            self._leg,
            ttl_s=min(self._deadline.left_s(), self._core.limits.lease_ttl_s),
            deadline=self._deadline,
        )
        self._tell_moved(luggage)

    def _tell_moved(self, luggage: MigratedKv) -> None:
        has_waited = self._held is not None and not self._held.block_ids and not self.is_decoding
        has_run = self.state is not DecodeState.FETCHING and not has_waited
        leg = self._leg if has_run else None
        self._move(DecodeState.MOVED)
        self._clock.enter(None)
        if leg is not None:
            self._core.counts.add(leg)
        self._core.counts.moved[luggage.reason] += 1
        self.sink.moved(self.key, luggage, self._samples.num_outputs, leg, self._clock.seconds)

    def _move(self, state: DecodeState) -> None:
        if state not in ALLOWED[self.state]:
            raise Internal(
                f"{self.engine_id}: {self.state.value} -> {state.value} is no transition"
            )
        self.state = state

    # ---- what the engine says

    def on_event(self, event: RequestOutput) -> None:
        """Pass one step's event to the sink; the worker flushes after all events of the step."""
        if self._done.done():
            return
        if event.error is not None:
            self._done.set_exception(event.error)
            return
        self._chains.add(event)
        self._note_reached(event)
        if event.sample_index not in self._samples.open:
            return  # cancelled while the step ran
        if not event.token_ids and event.finish_reason is None:
            return
        self._begin_decoding()
        self._steps.add(len(event.token_ids))
        self._core.counts.num_output_tokens += len(event.token_ids)
        self._samples.num_outputs[event.sample_index] += len(event.token_ids)
        if event.finish_reason is not None:
            self._samples.open.discard(event.sample_index)
            self._chains.end(event.sample_index)
        if self._samples.open:
            self.sink.tokens(self.key, event)
            return
        self._move(DecodeState.FINISHED)
        self._clock.enter(None)
        self._core.counts.add(self._leg)
        self.sink.finished(self.key, event, self._leg, self._clock.seconds)
        self._done.set_result(None)

    def _note_reached(self, event: RequestOutput) -> None:
        leg = self._leg
        if event.token_ids or event.finish_reason is not None:
            leg.num_reached = None  # a request that samples has all of its prompt
        elif leg.num_reached is not None:
            # Less where it was preempted: it has been computed all the same.
            leg.num_reached = max(leg.num_reached, event.num_computed_tokens)

    def _begin_decoding(self) -> None:
        if not self.is_decoding:
            self.is_decoding = True
            self._clock.enter("decode")

    def fail(self, error: Internal) -> None:
        """Fail the request because the engine has failed; another worker can continue it."""
        if self.state is DecodeState.RUNNING and not self._done.done():
            self._done.set_exception(Unavailable(str(error)))

    def close(self) -> None:
        """Release what is left: the engine's blocks, and the leases of a handle that was not
        used."""
        self._is_closed = True
        if self._done.done() and not self._done.cancelled():
            self._done.exception()  # retrieved, even if no caller waits for it
        if self.state is DecodeState.MOVED and self._held is not None:
            engine_id = self.engine_id
            self._core.thread.post(
                lambda engine: engine.release(engine_id), lambda: self._core.on_room()
            )
        elif self.state is not DecodeState.FINISHED:
            self._core.drop(self.engine_id)
        self._chains.end_all()
        if not self._is_taken_in:
            handle = self.arrival.untaken
            if handle is not None and is_for(handle, self._ask.request_id, self._ask.tenant):
                give_back(self._core, handle)


class DecodeWorker:
    """All decode requests of one engine, from all streams."""

    def __init__(self, core: WorkerCore) -> None:
        self.core = core
        self._num_places = core.settings.engine.max_num_running
        core.num_free_places = lambda: self.num_free_places
        self._requests: dict[str, DecodeRequest] = {}
        self._line: list[DecodeRequest] = []

    def start(self) -> None:
        """Start the engine's thread; called once, on the event loop."""
        self.core.thread.start(self._on_step, self._on_failure)

    @property
    def num_waiting(self) -> int:
        """Return the number of requests that have not drawn their first token here."""
        return sum(not request.is_decoding for request in self._requests.values())

    @property
    def num_free_places(self) -> int:
        """Return the number of places for samples of further requests, not counting those that
        waiting requests need. No reservation is refused for lack of places; routers hold requests
        back before a queue forms here."""
        num_taken = sum(request.num_places for request in self._requests.values())
        return max(0, self._num_places - num_taken)

    @property
    def num_in_line(self) -> int:
        """Return the number of requests that wait for places."""
        return len(self._line)

    @property
    def states(self) -> dict[str, DecodeState]:
        """Return the states of the live requests, by their engine request id."""
        return {engine_id: request.state for engine_id, request in self._requests.items()}

    def begin(
        self, sink: DecodeEventSink, key: int, ask: DecodeRequestSpec, deadline: Deadline
    ) -> DecodeRequest:
        """Start a request; the sink gets all its events from here on."""
        request = DecodeRequest(
            self.core,
            sink,
            key,
            ask,
            deadline,
            num_waiting=lambda: self.num_waiting,
            on_fewer_places=self._grant,
            on_over=self.forget,
        )
        self._requests[request.engine_id] = request
        self._line.append(request)
        # A client that has seen a part of its answer waits between two tokens.
        self._line.sort(key=lambda one: not one.has_begun)
        self._grant()
        request.task = asyncio.create_task(request.live())
        return request

    def leave(self, by: Deadline) -> None:
        """Move every request to another worker by the time `by`, with its KV if that is stored by
        then. New requests are refused already (`WorkerCore.draining`)."""
        for request in list(self._requests.values()):
            request.leave(by)

    def forget(self, request: DecodeRequest) -> None:
        """Remove a request at the end of its life; idempotent."""
        if self._requests.pop(request.engine_id, None) is not None:
            request.close()
            if request in self._line:
                self._line.remove(request)
            self._grant()

    def _on_step(self, output: StepOutput) -> None:
        load = StreamLoad.after_step(output)
        sinks: dict[int, DecodeEventSink] = {}
        for event in output.events:
            request = self._requests.get(event.request_id)
            if request is not None:  # else cancelled while the step ran
                request.chunks.add(event, output)
                request.on_event(event)
                sinks[id(request.sink)] = request.sink
        self._grant()
        for sink in sinks.values():
            sink.flush(load)

    def _grant(self) -> None:
        """Grant places to the next waiting requests, as far as they are free."""
        if not self._line:
            return
        num_needed = [request.num_places for request in self._line]
        num_held = sum(request.num_places for request in self._requests.values()) - sum(num_needed)
        num = num_granted(num_needed, num_held, self._num_places)
        granted, self._line = self._line[:num], self._line[num:]
        for request in granted:
            request.take_places()

    def _on_failure(self, error: Internal) -> None:
        for request in self._requests.values():
            request.fail(error)
        self.core.failed.set()


def num_granted(needed: Iterable[int], num_held: int, num_places: int) -> int:
    """Return how many waiting requests get their places now, from the head of the queue on, without
    overtaking.

    Args:
        needed: places that each waiting request needs.
        num_held: places that are held now.
        num_places: places in total.
    """
    num = 0
    for num_needed in needed:
        if num_held + num_needed > num_places:
            break
        num_held += num_needed
        num += 1
    return num
