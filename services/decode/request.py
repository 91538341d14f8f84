"""One request of a decode worker: one task, which ends by giving back all it took.

Life of a request (a cancel, the deadline or the end of its stream may come in any state):

1. RESERVING  asks the engine for blocks                         -> cancel: a late grant is aborted
2. RESERVED   holds blocks, waits for the handle                  -> cancel, or no handle in time:
   blocks back
3. PREFETCHING  pulls what is stored while prefill still runs     -> cancel: as in FETCHING; then
   RESERVED again
4. FETCHING   copies and verifies what the handle names           -> cancel: what may still be
   written into is quarantined
5. RUNNING    takes part in the engine's steps; full blocks go to the store behind it -> cancel: out
   of the next step, blocks back
6. FINISHED   | CANCELLED | FAILED: said on the stream, unless the stream is gone

Belongs to the loop's thread; speaks values, not stubs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.request import (
    Beam,
    EngineStats,
    Request,
    RequestEvent,
    Reservation,
    Sampling,
    StepOutput,
)
from process.deadline import Deadline
from process.errors import BatonError, FailedPrecondition, Internal, InvalidArgument
from services.decode.intake import Handover, Intake, IntakeAsk
from services.decode.leases import give_back, is_for
from services.decode.states import ALLOWED, DecodeState
from services.worker import handle as handles
from services.worker.adapters import check_digest
from services.worker.core import Chain, WorkerCore
from services.worker.engine_port import WorkerEngine
from services.worker.provenance import Leg, StageClock
from services.worker.sampling import named_on_wire
from services.worker.write_back import AnswerChain, WriteBack

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodeAsk:
    """The samples of one prompt to decode."""

    request_id: str
    tenant: str
    adapter: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    chain: Chain
    priority: int
    num_samples: int = 1
    beam: Beam | None = None


@dataclass(frozen=True)
class Load:
    """The worker's load, as it rides with every message."""

    num_free_blocks: int
    num_running: int
    num_waiting: int
    step: int

    @classmethod
    def after_step(cls, output: StepOutput) -> Load:
        return cls(output.num_free_blocks, output.num_running, output.num_waiting, output.step)

    @classmethod
    def now(cls, stats: EngineStats) -> Load:
        return cls(
            stats.num_free_blocks + stats.num_cached_blocks,
            stats.num_running,
            stats.num_waiting,
            stats.num_steps,
        )


class EventSink(Protocol):
    """One stream's way out. Events wait for `flush`, which makes one message of them.

    None of it blocks.
    """

    def reserved(self, key: int, num_tokens_local: int) -> None: ...
    def tokens(self, key: int, event: RequestEvent) -> None:
        """News of one sample while the request goes on; they may be the sample's last."""

    def finished(
        self, key: int, event: RequestEvent | None, leg: Leg, seconds: dict[str, float]
    ) -> None:
        """`event` None: cancelled."""

    def failed(self, key: int, error: BaseException, leg: Leg | None) -> None: ...
    def flush(self, load: Load) -> None: ...


class DecodeRequest:
    """One request on one stream; `live` is its whole life.

    Args:
        num_waiting: how many requests have no token yet, this one among them.
        on_over: told once, at the very end.
    """

    def __init__(
        self,
        core: WorkerCore,
        write_back: WriteBack,
        sink: EventSink,
        key: int,
        ask: DecodeAsk,
        deadline: Deadline,
        *,
        num_waiting: Callable[[], int],
        on_over: Callable[[DecodeRequest], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.key = key
        self.state = DecodeState.RESERVING
        self.engine_id = core.engine_id(ask.request_id)
        self.sink = sink
        self.is_decoding = False
        self._core = core
        self._write_back = write_back
        self._num_waiting = num_waiting
        self._on_over = on_over
        self._ask = ask
        self._deadline = deadline
        self._leg = Leg(len(ask.prompt_token_ids), transport=self._core.connector.transport)
        self._clock = StageClock()
        self._handover: asyncio.Future[Handover] = loop.create_future()
        self._early: handles.Handle | None = None
        self._news = asyncio.Event()
        self._chains: dict[int, AnswerChain] = {}
        self._done: asyncio.Future[None] = loop.create_future()
        self._open = set(range(ask.num_samples))
        self._is_cancel_wanted = False
        self._is_taken_in = False
        self._has_begun = False
        self._is_cancelled_early = False
        self.task: asyncio.Task[None] | None = None

    @property
    def owner(self) -> tuple[str, str]:
        """Request id and tenant."""
        return self._ask.request_id, self._ask.tenant

    # ---- what the stream says

    def hand_over(self, handover: Handover) -> None:
        """The handle came. Raises: FailedPrecondition when there was one already."""
        if self._handover.done():
            raise FailedPrecondition(f"request {self._ask.request_id} was told to generate twice")
        self._handover.set_result(handover)
        self._news.set()

    def prefetch(self, handle: handles.Handle) -> None:
        """Prefill has stored so much by now. Of several that wait only the newest counts; one that
        comes behind the final handle, or never gets its turn, costs nothing."""
        self._early = handle
        self._news.set()

    def cancel(self, *, say_so: bool) -> None:
        """End it, in whatever state; `say_so`: its stream is still there to be told."""
        if self.task is None or self._done.done():
            return
        self._is_cancel_wanted = say_so
        if self._has_begun:
            self.task.cancel()
        else:
            # A task cancelled before its first step would never run its own `finally`.
            self._is_cancelled_early = True

    def cancel_sample(self, sample_index: int) -> None:
        """Nobody wants more of one sample; with the last one the request ends."""
        if sample_index not in self._open or self._done.done():
            return
        self._open.discard(sample_index)
        if not self._open:
            self.cancel(say_so=True)
        elif self.state is DecodeState.RUNNING:
            engine_id = self.engine_id
            self._core.thread.post(lambda engine: engine.finish_sample(engine_id, sample_index))

    # ---- the states

    async def live(self) -> None:
        """From the reservation to the last event.

        Raises nothing but a cancellation that nobody is to be told of.
        """
        self._has_begun = True
        try:
            if self._is_cancelled_early:
                raise asyncio.CancelledError
            with self._core.admit():
                async with self._deadline.timeout("decode"):
                    await self._run()
        except asyncio.CancelledError:
            if self.state is DecodeState.FINISHED:
                return  # its last word was said in the same turn
            self._move(DecodeState.CANCELLED)
            if not self._is_cancel_wanted:
                raise
            self._clock.enter(None)
            self.sink.finished(self.key, None, self._leg, self._clock.seconds)
        except Exception as error:  # the translator of this border: the sink makes a status of it
            if self.state is DecodeState.FINISHED:
                return
            self._move(DecodeState.FAILED)
            if isinstance(error, Internal) or not isinstance(error, BatonError):
                fields = {"fields": {"request_id": self._ask.request_id}}
                logger.error("decode_request_failed", exc_info=error, extra=fields)
            self.sink.failed(self.key, named_on_wire(error, self._ask.sampling), self._leg)
        finally:
            self._on_over(self)
        if self.state is not DecodeState.FINISHED:
            self.sink.flush(Load.now(self._core.thread.stats))

    async def _run(self) -> None:
        ask, thread = self._ask, self._core.thread
        self._core.refuse_when_full(self._num_waiting() - 1)
        request = Request(
            request_id=self.engine_id,
            prompt_token_ids=ask.prompt_token_ids,
            sampling=ask.sampling,
            block_hasher=ask.chain.hasher,
            cache_root=ask.chain.root,
            priority=ask.priority,
            num_samples=ask.num_samples,
            beam=ask.beam,
            adapter=ask.adapter,
        )

        def reserve(engine: WorkerEngine) -> Reservation:
            check_digest(engine, ask.adapter, ask.chain.adapter_digest)
            return engine.reserve(request)

        reservation = await thread.call(reserve)
        self._leg.num_tokens_local = reservation.num_local_tokens
        self._move(DecodeState.RESERVED)
        self.sink.reserved(self.key, reservation.num_local_tokens)
        self.sink.flush(Load.now(thread.stats))
        intake = Intake(
            self._core,
            IntakeAsk(
                ask.request_id,
                ask.tenant,
                ask.adapter,
                ask.chain,
                self.engine_id,
                reservation,
                ask.prompt_token_ids,
            ),
            self._leg,
        )
        handover = await self._pull_early(intake)
        outputs = self._outputs(handover)
        self._move(DecodeState.FETCHING)
        self._clock.enter("decode_fetch")
        drawn = outputs[0] or tuple(token_id for token_id, _ in handover.beam_start[:1])
        self._is_taken_in = True  # from here on it gives the leases back
        with self._write_back.standing_back():
            num_loaded = await intake.load(handover, ask.prompt_token_ids + drawn, self._deadline)
        self._follow_chains(intake, ask.prompt_token_ids + drawn)
        self._clock.enter("decode_queue")  # until the first token: the wait and its first step
        self._move(DecodeState.RUNNING)
        # Who is cancelled from here on is posted behind the start.
        over = sorted(set(range(ask.num_samples)) - self._open)
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

        await thread.call(start)
        if ask.beam is not None and not self._done.done():
            self._begin_decoding()  # it has no tokens to tell of before its end
        await self._done

    async def _pull_early(self, intake: Intake) -> Handover:
        """Wait for the final handle; meanwhile pull what partial ones name."""
        while not self._handover.done():
            await self._news.wait()
            self._news.clear()
            early, self._early = self._early, None
            if early is not None and not self._handover.done():
                self._move(DecodeState.PREFETCHING)
                with self._write_back.standing_back():
                    await intake.pull_early(early, self._deadline)
                self._move(DecodeState.RESERVED)
        return self._handover.result()

    def _follow_chains(self, intake: Intake, context: tuple[int, ...]) -> None:
        """From here on what is filled goes back to the store. A beam search fills nothing that
        others could find."""
        ask = self._ask
        if ask.beam is not None or not self._write_back.is_on:
            return
        hashes = intake.hashes(context)
        num_prompt_blocks = len(ask.prompt_token_ids) // self._core.model.block_size
        for index in sorted(self._open):
            # What the prompt's blocks lack is filled by the first sample, before the others part.
            known = hashes[: intake.num_blocks] if index == 0 else hashes[:num_prompt_blocks]
            self._chains[index] = self._write_back.begin(
                ask.tenant, known, num_prompt_blocks, self._leg
            )

    def _outputs(self, handover: Handover) -> tuple[tuple[int, ...], ...]:
        """What was drawn already, of each sample. Raises: InvalidArgument for another number of
        samples."""
        if self._ask.beam is not None:
            return ((),)
        if len(handover.outputs) != self._ask.num_samples:
            raise InvalidArgument(
                "outputs", f"of {len(handover.outputs)} samples, not {self._ask.num_samples}"
            )
        self._open -= handover.over
        if not self._open:
            raise InvalidArgument("outputs", "every sample has ended")
        return handover.outputs

    def _move(self, state: DecodeState) -> None:
        if state not in ALLOWED[self.state]:
            raise Internal(
                f"{self.engine_id}: {self.state.value} -> {state.value} is no transition"
            )
        self.state = state

    # ---- what the engine says

    def on_event(self, event: RequestEvent) -> None:
        """One step's news, for the sink; the worker flushes when all of the step is told."""
        if self._done.done():
            return
        if event.error is not None:
            self._done.set_exception(event.error)
            return
        chain = self._chains.get(event.sample_index)
        if chain is not None and event.filled:
            self._write_back.add(chain, event.filled)
        if event.sample_index not in self._open:
            return  # cancelled while the step ran
        if not event.token_ids and event.finish_reason is None:
            return
        self._begin_decoding()
        self._core.counts.num_output_tokens += len(event.token_ids)
        if event.finish_reason is not None:
            self._open.discard(event.sample_index)
            if chain is not None:
                self._write_back.end(chain)
        if self._open:
            self.sink.tokens(self.key, event)
            return
        self._move(DecodeState.FINISHED)
        self._clock.enter(None)
        self._core.counts.add(self._leg)
        self.sink.finished(self.key, event, self._leg, self._clock.seconds)
        self._done.set_result(None)

    def _begin_decoding(self) -> None:
        if not self.is_decoding:
            self.is_decoding = True
            self._clock.enter("decode")

    def fail(self, error: Internal) -> None:
        """The engine is gone."""
        if self.state is DecodeState.RUNNING and not self._done.done():
            self._done.set_exception(error)

    def close(self) -> None:
        """Give back what is left: the engine's blocks, the leases of a handle that was not taken
        in.
        """
        if self._done.done() and not self._done.cancelled():
            self._done.exception()  # seen, even if nobody waited any more
        if self.state is not DecodeState.FINISHED:
            self._core.drop(self.engine_id)
        for chain in self._chains.values():
            self._write_back.end(chain)
        if self._handover.done() and not self._handover.cancelled() and not self._is_taken_in:
            handle = self._handover.result().handle
            if handle is not None and is_for(handle, self._ask.request_id, self._ask.tenant):
                give_back(self._core, handle)
