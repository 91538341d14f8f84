"""DecodeServicer: the Decode gRPC service, with one multiplexed stream per router.

The only module here that knows the stubs.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from engine.outputs import RequestOutput
from process import rpc, trace_spans
from process.errors import BatonError, InvalidArgument
from protos import common_pb2, decode_pb2, decode_pb2_grpc
from services.decode.ask import DecodeAsk
from services.decode.intake import Handover
from services.decode.leases import give_back
from services.decode.moving import Luggage
from services.decode.session import StreamSession
from services.decode.sink import Load
from services.decode.worker import DecodeWorker
from services.worker import handle as handles
from services.worker.adapters import info_to_proto
from services.worker.core import WorkerCore
from services.worker.multiplexed import Outbox, serve
from services.worker.provenance import Leg
from services.worker.sampling import beam_from_proto, num_samples_of, sampling_from_proto
from services.worker.status import (
    FINISH_REASONS,
    logprobs_to_proto,
    times_to_proto,
    traces_to_proto,
)
from services.worker.token_ids import token_ids_of

Context = grpc.aio.ServicerContext[Any, Any]


class Outbound:
    """`EventSink` of one stream, which collects events into messages. Invariant: a handle belongs
    to the router once its `moved` event was written; leases of handles that were not written are
    released."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._load: Load | None = None
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
        self, key: int, event: RequestOutput | None, leg: Leg, seconds: dict[str, float]
    ) -> None:
        finished = decode_pb2.DecodeFinished(
            finish_reason=common_pb2.FINISH_REASON_CANCELLED,
            leg=self._core.leg_to_proto(leg),
            times=times_to_proto(seconds),
        )
        if event is not None and event.finish_reason is not None:
            _fill(finished, event)
        self.outbox.put(decode_pb2.DecodeEvent(key=key, finished=finished))

    def failed(self, key: int, error: BaseException, leg: Leg | None) -> None:
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
        luggage: Luggage,
        num_output_tokens: Sequence[int],
        leg: Leg | None,
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

    def flush(self, load: Load) -> None:
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
        load = self._load or Load.now(self._core.thread.stats)
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

    def _ask(self, message: decode_pb2.ReserveDecode) -> DecodeAsk:
        self._core.check_model(message.model_fingerprint, message.adapter, message.adapter_digest)
        return DecodeAsk(
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

    def _handover(self, message: decode_pb2.GenerateFromHandle) -> Handover:
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
        return Handover(handle, outputs, over, beam_start, refusal, alone)


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
