"""PrefillServicer: the Prefill gRPC service, with one multiplexed stream per router. A
PrefillSession is one such stream: its keys, their prompts, and the cancellation of all of them when
the stream breaks.

States of a key: RUNNING -> its answer or its failure, each the last message. A cancel leads from
RUNNING to the failure CANCELLED and has no effect afterwards. Invariant: a handle belongs to the
router once its answer was written; the leases of an answer that was not written are released. Used
on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc.aio

from engine.outputs import PositionLogprobs, RequestOutput
from engine.scheduler import MAX_PROMPT_ROWS
from process import rpc, trace_spans
from process.background_tasks import start_task
from process.deadline import Deadline
from process.rpc_errors import AlreadyExists, BatonError, Cancelled, Internal, InvalidArgument
from process.trace_spans import NOOP_SPAN, Span
from protos import common_pb2, prefill_pb2, prefill_pb2_grpc
from services.prefill.handoff import PrefillAnswer
from services.prefill.request import Firsts, PrefillRequestSpec, PrefixRun
from services.prefill.worker import PrefillSink, PrefillWorker
from services.worker import handle as handles
from services.worker.adapters import info_to_proto
from services.worker.provenance import (
    FINISH_REASONS,
    HandoverPath,
    logprobs_to_proto,
    times_to_proto,
    traces_to_proto,
)
from services.worker.runtime import WorkerCore
from services.worker.stream_servicer import (
    Outbox,
    beam_from_proto,
    num_samples_of,
    sampling_from_proto,
    serve,
    token_ids_of,
)

logger = logging.getLogger(__name__)


class PrefillEventSink(PrefillSink, Protocol):
    """Interface to send the events of one key; its methods do not block."""

    def answered(self, answer: PrefillAnswer) -> None:
        """Send the answer. Raises: when it cannot be sent."""

    def failed(self, error: BaseException) -> None: ...


class PrefillSession:
    """Prompts of one stream, by the router's keys."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._untold: dict[int, PrefillAnswer] = {}
        self._is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(
        self,
        key: int,
        ask: PrefillRequestSpec,
        deadline: Deadline,
        sink: PrefillEventSink,
        span: Span,
    ) -> None:
        """Start to prefill a prompt; `span` ends with it. Raises: AlreadyExists when the key is in
        use."""
        if key in self._tasks:
            raise AlreadyExists(f"key {key} is in use on this stream")
        self._idle.clear()
        work = self._live(key, ask, deadline, sink, span)
        self._tasks[key] = start_task(work, f"prefill {key}", is_for_many=True)
        self._tasks[key].add_done_callback(lambda _: self._over(key))

    def cancel(self, key: int) -> None:
        """Cancel a prompt; one that is over is ignored."""
        task = self._tasks.get(key)
        if task is not None:
            task.cancel()

    def told(self, key: int) -> None:
        """Record that the key's answer was written, so that its handle belongs to the router."""
        self._untold.pop(key, None)

    async def wait_idle(self) -> None:
        """Wait until every prompt of the stream is over. Each has its own deadline."""
        await self._idle.wait()

    def close(self) -> None:
        """Cancel all prompts because the stream has ended, and take back the answers that were not
        delivered. Idempotent. Raises: the error of taking one back, after all of them were."""
        self._is_closed = True
        for task in list(self._tasks.values()):
            task.cancel()
        with contextlib.ExitStack() as taking:  # all of them, whatever one of them raises
            for answer in self._untold.values():
                taking.callback(answer.take_back)
            self._untold.clear()

    async def _live(
        self,
        key: int,
        ask: PrefillRequestSpec,
        deadline: Deadline,
        sink: PrefillEventSink,
        span: Span,
    ) -> None:
        try:
            with span:
                await self._worker.prefill(
                    ask, deadline, sink, lambda answer: self._tell(key, answer, sink)
                )
        except asyncio.CancelledError:
            sink.failed(Cancelled(f"request {ask.request_id} was cancelled"))
        except Exception as error:  # the translator of this border: the sink makes a status of it
            if isinstance(error, Internal) or not isinstance(error, BatonError):
                fields = {"fields": {"request_id": ask.request_id}}
                logger.error("prefill_request_failed", exc_info=error, extra=fields)
            sink.failed(error)

    def _tell(self, key: int, answer: PrefillAnswer, sink: PrefillEventSink) -> None:
        """Send an answer. Raises: when it cannot be sent; the caller then takes the answer back."""
        if self._is_closed:
            raise Cancelled("the stream is gone")
        sink.answered(answer)
        self._untold[key] = answer

    def _over(self, key: int) -> None:
        del self._tasks[key]
        if not self._tasks:
            self._idle.set()


Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """gRPC servicer of Prefill. A broken stream cancels its prompts; each also has its own
    deadline."""

    def __init__(self, core: WorkerCore, worker: PrefillWorker) -> None:
        self._core = core
        self._worker = worker

    @rpc.unary  # a coroutine that writes: unlike a generator, a broken stream ends it at once
    async def Stream(
        self, commands: AsyncIterator[prefill_pb2.PrefillCommand], context: Context
    ) -> None:
        session = PrefillSession(self._worker)
        outbox = Outbox[prefill_pb2.PrefillEvent]()

        def obey(command: prefill_pb2.PrefillCommand) -> None:
            sink = _Caller(command.key, outbox, self._core)
            try:
                self._dispatch(command, session, sink)
            except BatonError as error:
                sink.failed(error)

        async def write(events: list[prefill_pb2.PrefillEvent]) -> None:
            await context.write(prefill_pb2.PrefillEvents(events=events))
            for event in events:
                if event.reply.HasField("leg"):
                    session.told(event.key)

        await serve(commands, obey, session, outbox, write, self._core.outboxes)

    @rpc.unary
    async def GetWorkerStatus(
        self, request: common_pb2.GetWorkerStatusRequest, context: Context
    ) -> common_pb2.WorkerStatus:
        return await self._core.checked_status()

    @rpc.unary
    async def LoadAdapter(
        self, request: common_pb2.LoadAdapterRequest, context: Context
    ) -> common_pb2.LoadAdapterReply:
        info = await self._core.adapters.load(
            request.name,
            Path(request.folder),
            hold_s=request.hold_ms / 1000,
            version=request.version,
        )
        return common_pb2.LoadAdapterReply(adapter=info_to_proto(request.name, info))

    @rpc.unary
    async def UnloadAdapter(
        self, request: common_pb2.UnloadAdapterRequest, context: Context
    ) -> common_pb2.UnloadAdapterReply:
        await self._core.adapters.unload(request.name, request.digest)
        return common_pb2.UnloadAdapterReply()

    def _dispatch(
        self, command: prefill_pb2.PrefillCommand, session: PrefillSession, sink: _Caller
    ) -> None:
        kind = command.WhichOneof("command")
        if kind == "prefill":
            request = command.prefill
            deadline = self._core.deadline(request.budget_ms / 1000 if request.budget_ms else None)
            ask = self._ask(request)
            session.begin(command.key, ask, deadline, sink, self._span(request.traceparent))
        elif kind == "cancel":
            session.cancel(command.key)
        else:
            raise InvalidArgument("command", "is absent")

    def _span(self, traceparent: str) -> Span:
        """Start the span of one prompt, where the router traces the request."""
        core = self._core
        if not (core.tracing.is_on and traceparent):
            return NOOP_SPAN
        return core.tracing.follow(
            "serve prefill", trace_spans.parse_traceparent(traceparent), core.about
        )

    def _ask(self, request: prefill_pb2.PrefillRequest) -> PrefillRequestSpec:
        self._core.check_model(request.model_fingerprint, request.adapter, request.adapter_digest)
        num_samples = num_samples_of(request.sampling)
        if request.output_token_ids and (num_samples > 1 or request.sampling.HasField("beam")):
            raise InvalidArgument("output_token_ids", "go with one sample only")
        return PrefillRequestSpec(
            request_id=request.request_id,
            tenant=request.tenant,
            adapter=request.adapter,
            prompt_token_ids=token_ids_of(request.prompt_token_ids),
            output_token_ids=tuple(request.output_token_ids),
            sampling=sampling_from_proto(request.sampling, request.sample_index),
            chain=self._core.chain(request.tenant_salt, request.adapter_digest),
            priority=request.priority,
            wants_handle=request.wants_handle,
            handover=_handover(request.handover),
            num_samples=num_samples,
            beam=beam_from_proto(request.sampling),
            wants_embedding=_wants_embedding(request),
            prompt_logprobs=(
                request.prompt_logprobs if request.HasField("prompt_logprobs") else None
            ),
            prefix_runs=_prefix_runs(request.hints),
        )


class _Caller:
    """Sender of one prompt's events to its router.

    Of partial handles that wait to be written only the newest is kept: for a router that does not
    read, at most one per prompt waits here, however much is computed meanwhile.
    """

    def __init__(
        self, key: int, outbox: Outbox[prefill_pb2.PrefillEvent], core: WorkerCore
    ) -> None:
        self._key = key
        self._outbox = outbox
        self._core = core
        self._partial: tuple[prefill_pb2.PrefillEvent, int] | None = None

    async def show_firsts(self, firsts: Firsts) -> None:
        for event in firsts:
            self._put(_first_message(event))

    async def show_prompt_logprobs(self, logprobs: Sequence[PositionLogprobs]) -> None:
        for first in range(0, len(logprobs), MAX_PROMPT_ROWS):  # of several steps, if we were late
            part = logprobs[first : first + MAX_PROMPT_ROWS]
            self._put(prefill_pb2.PrefillReply(prompt_logprobs=logprobs_to_proto(part)))

    async def show_partial(self, handle: handles.Handle) -> None:
        message = handles.to_proto(handle, self._core.handle_keys)
        waiting, num_batches = self._partial or (None, 0)
        if waiting is not None and num_batches == self._outbox.num_batches:
            waiting.reply.handle.CopyFrom(message)  # it names all that the older one did
            return
        event = self._put(prefill_pb2.PrefillReply(handle=message))
        self._partial = event, self._outbox.num_batches

    def answered(self, answer: PrefillAnswer) -> None:
        self._put(_last_message(answer, self._core))

    def failed(self, error: BaseException) -> None:
        code, message = rpc.status_of(error)
        failed = prefill_pb2.PrefillFailed(code=rpc.code_number(code), message=message)
        if isinstance(error, BatonError) and error.retry_after_s is not None:
            failed.retry_after_s = error.retry_after_s
        self._outbox.put(prefill_pb2.PrefillEvent(key=self._key, failed=failed))
        self._outbox.flush()

    def _put(self, reply: prefill_pb2.PrefillReply) -> prefill_pb2.PrefillEvent:
        event = prefill_pb2.PrefillEvent(key=self._key, reply=reply)
        self._outbox.put(event)
        self._outbox.flush()
        return event


def _last_message(answer: PrefillAnswer, core: WorkerCore) -> prefill_pb2.PrefillReply:
    reply = prefill_pb2.PrefillReply(
        leg=core.leg_to_proto(answer.leg), times=times_to_proto(answer.seconds)
    )
    if answer.handle is not None:
        reply.handle.CopyFrom(handles.to_proto(answer.handle, core.handle_keys))
    return reply


def _handover(number: int) -> HandoverPath:
    """Convert a handover path; one that this version does not know counts as not requested."""
    known = number in {int(path) for path in HandoverPath}
    return HandoverPath(number) if known else HandoverPath.UNSPECIFIED


def _wants_embedding(request: prefill_pb2.PrefillRequest) -> bool:
    """Return whether the request is for an embedding. Raises: InvalidArgument if it would continue
    after its first token."""
    if request.wants_embedding and (request.wants_handle or request.sampling.max_tokens != 1):
        raise InvalidArgument("wants_embedding", "goes with one token and without a handle")
    return request.wants_embedding


def _prefix_runs(hints: Iterable[common_pb2.PrefixRun]) -> tuple[PrefixRun, ...]:
    """Convert the router's hints. Raises: InvalidArgument for runs with a gap, without blocks, or
    without a store's incarnation."""
    runs: list[PrefixRun] = []
    for hint in hints:
        if hint.first_block != (runs[-1].end_block if runs else 0) or not hint.num_blocks:
            raise InvalidArgument("hints", "are runs in order, without gaps from block 0 on")
        if not hint.store_address or len(hint.store_incarnation) != handles.INCARNATION_BYTES:
            raise InvalidArgument("hints", "each names its store's address and 16-byte life")
        runs.append(
            PrefixRun(
                hint.node_id,
                hint.store_address,
                hint.store_incarnation,
                hint.first_block,
                hint.num_blocks,
            )
        )
    return tuple(runs)


def _first_message(event: RequestOutput) -> prefill_pb2.PrefillReply:
    reply = prefill_pb2.PrefillReply(
        sample_index=event.sample_index,
        token_ids=event.token_ids,
        logprobs=logprobs_to_proto(event.logprobs or ()),
        traces=traces_to_proto(event.traces or ()),
        beam_start=[
            common_pb2.BeamCandidate(token_id=token_id, logprob=logprob)
            for token_id, logprob in event.beam_start
        ],
        embedding=event.embedding or (),
    )
    if event.finish_reason is not None:
        reply.finish_reason = FINISH_REASONS[event.finish_reason]
    if event.stop_token_id is not None:
        reply.stop_token_id = event.stop_token_id
    return reply
