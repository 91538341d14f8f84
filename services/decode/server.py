"""The Decode service: one multiplexed stream per router. Messages in, values to the session, one
message out per step.

The only module here that knows the stubs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio

from engine.request import RequestEvent
from process import serving
from process.errors import BatonError, InvalidArgument
from protos import common_pb2, decode_pb2, decode_pb2_grpc
from services.decode.intake import Handover
from services.decode.request import DecodeAsk, Load
from services.decode.session import StreamSession
from services.decode.worker import DecodeWorker
from services.worker import handle as handles
from services.worker.adapters import info_to_proto
from services.worker.core import WorkerCore
from services.worker.provenance import Leg
from services.worker.sampling import beam_from_proto, num_samples_of, sampling_from_proto
from services.worker.status import (
    FINISH_REASONS,
    logprobs_to_proto,
    times_to_proto,
    traces_to_proto,
)

Context = grpc.aio.ServicerContext[Any, Any]


class Outbound:
    """The `EventSink` of one stream: collects events, makes one message of all that came since the
    last write.

    While the reader keeps up that is one message per engine step; behind a slow one steps share a
    message, so that what waits here is bounded by the requests' own lengths.
    """

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._events: list[decode_pb2.DecodeEvent] = []
        self._load: Load | None = None
        self._wake = asyncio.Event()
        self._is_ended = False

    def reserved(self, key: int, num_tokens_local: int) -> None:
        reserved = decode_pb2.DecodeReserved(num_tokens_local=num_tokens_local)
        self._events.append(decode_pb2.DecodeEvent(key=key, reserved=reserved))

    def tokens(self, key: int, event: RequestEvent) -> None:
        tokens = decode_pb2.DecodeTokens()
        _fill(tokens, event)
        self._events.append(decode_pb2.DecodeEvent(key=key, tokens=tokens))

    def finished(
        self, key: int, event: RequestEvent | None, leg: Leg, seconds: dict[str, float]
    ) -> None:
        finished = decode_pb2.DecodeFinished(
            finish_reason=common_pb2.FINISH_REASON_CANCELLED,
            leg=self._core.leg_to_proto(leg),
            times=times_to_proto(seconds),
        )
        if event is not None and event.finish_reason is not None:
            _fill(finished, event)
        self._events.append(decode_pb2.DecodeEvent(key=key, finished=finished))

    def failed(self, key: int, error: BaseException, leg: Leg | None) -> None:
        code, message = serving.status_of(error)
        failed = decode_pb2.DecodeFailed(
            code=serving.code_number(code),
            message=message,
            leg=self._core.leg_to_proto(leg) if leg is not None else None,
        )
        if isinstance(error, BatonError) and error.retry_after_s is not None:
            failed.retry_after_s = error.retry_after_s
        self._events.append(decode_pb2.DecodeEvent(key=key, failed=failed))

    def flush(self, load: Load) -> None:
        self._load = load
        self._wake.set()

    def end(self) -> None:
        """No event comes any more."""
        self._is_ended = True
        self._wake.set()

    async def messages(self) -> AsyncIterator[decode_pb2.DecodeEvents]:
        """What is to be written, until `end`."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            events, self._events = self._events, []
            if events:
                load = self._load or Load.now(self._core.thread.stats)
                yield decode_pb2.DecodeEvents(
                    events=events,
                    num_free_blocks=load.num_free_blocks,
                    num_running=load.num_running,
                    num_waiting=load.num_waiting,
                    step=load.step,
                )
            if self._is_ended and not self._events:
                return


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    """See the module."""

    def __init__(self, core: WorkerCore, worker: DecodeWorker) -> None:
        self._core = core
        self._worker = worker

    @serving.unary  # a coroutine that writes: unlike a generator, a broken stream ends it at once
    async def Stream(
        self, commands: AsyncIterator[decode_pb2.DecodeCommand], context: Context
    ) -> None:
        outbound = Outbound(self._core)
        session = StreamSession(self._worker, outbound)
        reader = asyncio.create_task(self._read(commands, session, outbound))
        try:
            async for message in outbound.messages():
                await context.write(message)
            await reader
        finally:
            session.close()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    @serving.unary
    async def GetWorkerStatus(
        self, request: common_pb2.GetWorkerStatusRequest, context: Context
    ) -> common_pb2.WorkerStatus:
        return await self._core.checked_status()

    @serving.unary
    async def LoadAdapter(
        self, request: common_pb2.LoadAdapterRequest, context: Context
    ) -> common_pb2.LoadAdapterReply:
        info = await self._core.adapters.load(request.name, Path(request.folder))
        return common_pb2.LoadAdapterReply(adapter=info_to_proto(info))

    @serving.unary
    async def UnloadAdapter(
        self, request: common_pb2.UnloadAdapterRequest, context: Context
    ) -> common_pb2.UnloadAdapterReply:
        await self._core.adapters.unload(request.name)
        return common_pb2.UnloadAdapterReply()

    async def _read(
        self,
        commands: AsyncIterator[decode_pb2.DecodeCommand],
        session: StreamSession,
        outbound: Outbound,
    ) -> None:
        """Take commands until the router has no more; then the stream ends with its last
        request.
        """
        try:
            async for command in commands:
                try:
                    self._dispatch(command, session)
                except BatonError as error:
                    session.refuse(command.key, error)
            await session.wait_idle()
        finally:
            outbound.end()

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
            prompt_token_ids=tuple(message.prompt_token_ids),
            sampling=sampling_from_proto(message.sampling, message.sample_index),
            chain=self._core.chain(message.tenant_salt, message.adapter),
            priority=message.priority,
            num_samples=num_samples_of(message.sampling),
            beam=beam_from_proto(message.sampling),
        )

    def _prefetch(self, key: int, message: common_pb2.KvHandle, session: StreamSession) -> None:
        """A partial handle that cannot be believed or read is passed over: the final one is looked
        at by itself. Raises: InvalidArgument for one that is not partial: it would hand over leases
        that nobody gives back."""
        try:
            handle = handles.from_proto(message, self._core.handle_keys)
        except handles.HandleRefused as refused:
            self._core.counts.early_pulls_failed[refused.reason] += 1
            return
        if not handle.is_partial:
            raise InvalidArgument("prefetch.handle", "is not partial; it belongs into `generate`")
        session.prefetch(key, handle)

    def _handover(self, message: decode_pb2.GenerateFromHandle) -> Handover:
        """A handle that is forged, comes again or cannot be read is passed on as refused, with its
        reason: the prompt is recomputed. Its leases are not ours to give back.
        """
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
        return Handover(handle, outputs, over, beam_start, refusal)


def _fill(part: decode_pb2.DecodeTokens | decode_pb2.DecodeFinished, event: RequestEvent) -> None:
    """One sample's news."""
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
