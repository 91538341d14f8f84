"""DecodeServicer: the Decode gRPC service, with one multiplexed stream per router. A StreamSession
is one such stream: its keys, their requests, and the cancellation of all of them when the stream
breaks.

The session releases a handle's leases only if the handle was made for a request of this stream,
which may be over by then; the leases of a handle under an unknown key or for another request are
left to expire. Used on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from engine.outputs import RequestOutput
from process import rpc, trace_spans
from process.deadline import Deadline
from process.rpc_errors import AlreadyExists, BatonError, InvalidArgument, NotFound
from protos import common_pb2, decode_pb2, decode_pb2_grpc
from services.decode.event_sink import DecodeEventSink, StreamLoad
from services.decode.kv_loader import GenerateCommand, give_back, is_for
from services.decode.migration import MigratedKv
from services.decode.request_spec import DecodeRequestSpec
from services.decode.worker import DecodeRequest, DecodeWorker
from services.worker import handle as handles
from services.worker.adapters import info_to_proto
from services.worker.handle import Handle
from services.worker.provenance import (
    FINISH_REASONS,
    LegProvenance,
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

_MAX_PAST = 256
"""Most finished requests that are remembered, of whose end a router may not have learned when it
hands over. Guessed, far above what a router has in progress at one worker."""


class StreamSession:
    """Requests of one stream, by the router's keys."""

    def __init__(self, worker: DecodeWorker, sink: DecodeEventSink) -> None:
        self._worker = worker
        self._sink = sink
        self._requests: dict[int, DecodeRequest] = {}
        self._past: dict[int, tuple[str, str]] = {}  # request id and tenant by key, oldest first
        self._idle = asyncio.Event()
        self._idle.set()

    def reserve(self, key: int, ask: DecodeRequestSpec, deadline: Deadline) -> None:
        """Begin a request. Raises: AlreadyExists when the key is in use."""
        if key in self._requests:
            raise AlreadyExists(f"key {key} is in use on this stream")
        request = self._worker.begin(self._sink, key, ask, deadline)
        assert request.task is not None
        self._requests[key] = request
        self._idle.clear()
        request.task.add_done_callback(lambda _: self._over(request))

    def generate(self, key: int, handover: GenerateCommand) -> None:
        """Pass a handover to its request. For an unknown key (refused, ended) the failure is sent;
        the handle's leases are released if they belong to that key's request."""
        request = self._requests.get(key)
        owner = request.owner if request is not None else self._past.get(key)
        try:
            if request is None:
                raise NotFound(f"no request {key} on this stream (any more)")
            request.hand_over(handover)
        except BatonError as error:
            if handover.handle is not None and owner and is_for(handover.handle, *owner):
                give_back(self._worker.core, handover.handle)
            self.refuse(key, error)

    def prefetch(self, key: int, handle: Handle) -> None:
        """Start to pull what a partial handle names; ignored when the request is over, or has its
        final handle already."""
        request = self._requests.get(key)
        if request is not None:
            request.arrival.prefetch(handle)

    def cancel(self, key: int) -> None:
        """Cancel a request; one that is over is ignored."""
        request = self._requests.get(key)
        if request is not None:
            request.cancel(say_so=True)

    def cancel_sample(self, key: int, sample_index: int) -> None:
        """End one sample of a request, and the request with its last one."""
        request = self._requests.get(key)
        if request is not None:
            request.cancel_sample(sample_index)

    def refuse(self, key: int, error: BaseException) -> None:
        """Send the error of an invalid command under its key."""
        self._sink.failed(key, error, None)
        self._sink.flush(StreamLoad.now(self._worker.core.thread.stats))

    async def wait_idle(self) -> None:
        """Wait until every request of the stream is over. Each has its own deadline."""
        await self._idle.wait()

    def close(self) -> None:
        """Cancel all requests because the stream has ended, and release the handles that were not
        delivered. Idempotent."""
        for request in list(self._requests.values()):
            request.cancel(say_so=False)
        self._sink.close()

    def _over(self, request: DecodeRequest) -> None:
        del self._requests[request.key]
        self._past[request.key] = request.owner
        if len(self._past) > _MAX_PAST:
            del self._past[next(iter(self._past))]
        if not self._requests:
            self._idle.set()


Context = grpc.aio.ServicerContext[Any, Any]


class Outbound:
    """`DecodeEventSink` of one stream, which collects events into messages. Invariant: a handle
    belongs
    to the router once its `moved` event was written; leases of handles that were not written are
    released."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._load: StreamLoad | None = None
        self._untold: dict[int, handles.Handle] = {}
        self._is_closed = False
        self.outbox = Outbox[decode_pb2.DecodeEvent]()

    def queued(self, key: int) -> None:
        self.outbox.put(decode_pb2.DecodeEvent(key=key, queued=decode_pb2.DecodeQueued()))

    def reserved(self, key: int, num_tokens_local: int) -> None:
        reserved = decode_pb2.DecodeReserved(num_tokens_local=num_tokens_local)
        self.outbox.put(decode_pb2.DecodeEvent(key=key, reserved=reserved))

    def tokens(self, key: int, event: RequestOutput) -> None:
        tokens = decode_pb2.DecodeTokens()
        _fill(tokens, event)
        self.outbox.put(decode_pb2.DecodeEvent(key=key, tokens=tokens))

    def finished(
        self, key: int, event: RequestOutput | None, leg: LegProvenance, seconds: dict[str, float]
    ) -> None:
        finished = decode_pb2.DecodeFinished(
            finish_reason=common_pb2.FINISH_REASON_CANCELLED,
            leg=self._core.leg_to_proto(leg),
            times=times_to_proto(seconds),
        )
        if event is not None and event.finish_reason is not None:
            _fill(finished, event)
        self.outbox.put(decode_pb2.DecodeEvent(key=key, finished=finished))

    def failed(self, key: int, error: BaseException, leg: LegProvenance | None) -> None:
        code, message = rpc.status_of(error)
        failed = decode_pb2.DecodeFailed(
            code=rpc.code_number(code),
            message=message,
            leg=self._core.leg_to_proto(leg) if leg is not None else None,
        )
        if isinstance(error, BatonError) and error.retry_after_s is not None:
            failed.retry_after_s = error.retry_after_s
        self.outbox.put(decode_pb2.DecodeEvent(key=key, failed=failed))

    def moved(
        self,
        key: int,
        luggage: MigratedKv,
        num_output_tokens: Sequence[int],
        leg: LegProvenance | None,
        seconds: dict[str, float],
    ) -> None:
        moved = decode_pb2.DecodeMoved(
            num_output_tokens=num_output_tokens,
            leg=self._core.leg_to_proto(leg) if leg is not None else None,
            times=times_to_proto(seconds),
            reason=luggage.reason,
        )
        if luggage.handle is not None:
            if self._is_closed:
                give_back(self._core, luggage.handle)
                return
            moved.handle.CopyFrom(handles.to_proto(luggage.handle, self._core.handle_keys))
            self._untold[key] = luggage.handle
        self.outbox.put(decode_pb2.DecodeEvent(key=key, moved=moved))

    def flush(self, load: StreamLoad) -> None:
        self._load = load
        self.outbox.flush()

    def told(self, events: Iterable[decode_pb2.DecodeEvent]) -> None:
        """Record that events were written, so that their handles belong to the router."""
        for event in events:
            if event.HasField("moved"):
                self._untold.pop(event.key, None)

    def close(self) -> None:
        self._is_closed = True
        while self._untold:
            give_back(self._core, self._untold.popitem()[1])

    def message(self, events: list[decode_pb2.DecodeEvent]) -> decode_pb2.DecodeEvents:
        """Build one message of events, with the load as of the last flush."""
        load = self._load or StreamLoad.now(self._core.thread.stats)
        return decode_pb2.DecodeEvents(
            events=events,
            num_free_blocks=load.num_free_blocks,
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            step=load.step,
            num_free_places=self._core.num_free_places(),
        )


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """gRPC servicer of Decode."""

    def __init__(self, core: WorkerCore, worker: DecodeWorker) -> None:
        self._core = core
        self._worker = worker

    @rpc.unary  # a coroutine that writes: unlike a generator, a broken stream ends it at once
    async def Stream(
        self, commands: AsyncIterator[decode_pb2.DecodeCommand], context: Context
    ) -> None:
        outbound = Outbound(self._core)
        session = StreamSession(self._worker, outbound)

        def obey(command: decode_pb2.DecodeCommand) -> None:
            try:
                self._dispatch(command, session)
            except BatonError as error:
                session.refuse(command.key, error)

        async def write(events: list[decode_pb2.DecodeEvent]) -> None:
            await context.write(outbound.message(events))
            outbound.told(events)

        await serve(commands, obey, session, outbound.outbox, write, self._core.outboxes)

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

    def _dispatch(self, command: decode_pb2.DecodeCommand, session: StreamSession) -> None:
        kind = command.WhichOneof("command")
        if kind == "reserve":
            deadline = self._core.deadline(command.reserve.budget_ms / 1000)
            session.reserve(command.key, self._ask(command.reserve), deadline)
        elif kind == "generate":
            session.generate(command.key, self._handover(command.generate))
        elif kind == "prefetch":
            self._prefetch(command.key, command.prefetch.handle, session)
        elif kind == "cancel":
            session.cancel(command.key)
        elif kind == "cancel_sample":
            session.cancel_sample(command.key, command.cancel_sample.sample_index)
        else:
            raise InvalidArgument("command", "is absent")

    def _ask(self, message: decode_pb2.ReserveDecode) -> DecodeRequestSpec:
        self._core.check_model(message.model_fingerprint, message.adapter, message.adapter_digest)
        return DecodeRequestSpec(
            request_id=message.request_id,
            tenant=message.tenant,
            adapter=message.adapter,
            prompt_token_ids=token_ids_of(message.prompt_token_ids),
            sampling=sampling_from_proto(message.sampling, message.sample_index),
            chain=self._core.chain(message.tenant_salt, message.adapter_digest),
            priority=message.priority,
            num_samples=num_samples_of(message.sampling),
            beam=beam_from_proto(message.sampling),
            has_begun=message.has_begun,
            trace=trace_spans.parse_traceparent(message.traceparent)
            if message.traceparent
            else None,
        )

    def _prefetch(self, key: int, message: common_pb2.KvHandle, session: StreamSession) -> None:
        """Handle a partial handle; one that is not valid is ignored, since the final one is checked
        by itself. Raises: InvalidArgument for one that is not partial: it would hand over leases
        that are never released."""
        try:
            handle = handles.from_proto(message, self._core.handle_keys)
        except handles.HandleRefused as refused:
            self._core.counts.early_pulls_failed[refused.reason] += 1
            return
        if not handle.is_partial:
            raise InvalidArgument("prefetch.handle", "is not partial; it belongs into `generate`")
        session.prefetch(key, handle)

    def _handover(self, message: decode_pb2.GenerateFromHandle) -> GenerateCommand:
        """Convert a handover. A handle that is forged, of another version, replayed or malformed is
        passed on as refused, with its reason, and the prompt is recomputed. Its leases are not
        released: the first two kinds may come from anywhere."""
        handle: handles.Handle | None = None
        refusal: str | None = None
        if message.HasField("handle"):
            try:
                handle = handles.from_proto(message.handle, self._core.handle_keys)
                self._core.handle_ledger.take(handle, time.time())
            except handles.HandleRefused as refused:
                handle, refusal = None, refused.reason
        outputs = tuple(tuple(output.token_ids) for output in message.outputs)
        over = frozenset(index for index, output in enumerate(message.outputs) if output.is_over)
        beam_start = tuple((start.token_id, start.logprob) for start in message.beam_start)
        outputs = outputs or (tuple(message.output_token_ids),)
        alone = message.computes_prompt and not message.HasField("handle")
        return GenerateCommand(handle, outputs, over, beam_start, refusal, alone)


def _fill(part: decode_pb2.DecodeTokens | decode_pb2.DecodeFinished, event: RequestOutput) -> None:
    """Fill a message with one sample's event."""
    part.sample_index = event.sample_index
    part.token_ids.extend(event.token_ids)
    part.logprobs.extend(logprobs_to_proto(event.logprobs or ()))
    part.traces.extend(traces_to_proto(event.traces or ()))
    if event.finish_reason is not None:
        part.finish_reason = FINISH_REASONS[event.finish_reason]
    if event.stop_token_id is not None:
        part.stop_token_id = event.stop_token_id
    if event.score is not None:
        part.score = event.score
