"""The Prefill service: messages in, values to the worker, values out.

The only module here that knows the stubs.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc.aio

from engine.request import RequestEvent
from process import serving
from process.errors import InvalidArgument
from protos import common_pb2, prefill_pb2, prefill_pb2_grpc
from services.prefill.handover import PrefillAnswer
from services.prefill.job import Firsts, PrefillAsk, PrefixRun
from services.prefill.worker import PrefillWorker
from services.worker import handle as handles
from services.worker.adapters import info_to_proto
from services.worker.core import WorkerCore
from services.worker.provenance import HandoverPath
from services.worker.sampling import beam_from_proto, num_samples_of, sampling_from_proto
from services.worker.status import (
    FINISH_REASONS,
    logprobs_to_proto,
    times_to_proto,
    traces_to_proto,
)

Context = grpc.aio.ServicerContext[Any, Any]


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    """Cancelling the RPC, or its deadline, cancels the request."""

    def __init__(self, core: WorkerCore, worker: PrefillWorker) -> None:
        self._core = core
        self._worker = worker

    @serving.unary  # a coroutine that writes: unlike a generator, a broken stream ends it at once
    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> None:
        deadline = self._core.deadline(context.time_remaining())
        caller = _Caller(context, self._core)
        answer = await self._worker.prefill(self._ask(request), deadline, caller)
        try:
            await context.write(self._last_message(answer))
        except BaseException:
            answer.take_back()  # nobody has heard of it
            raise

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

    def _ask(self, request: prefill_pb2.PrefillRequest) -> PrefillAsk:
        self._core.check_model(request.model_fingerprint, request.adapter, request.adapter_digest)
        num_samples = num_samples_of(request.sampling)
        if request.output_token_ids and (num_samples > 1 or request.sampling.HasField("beam")):
            raise InvalidArgument("output_token_ids", "go with one sample only")
        return PrefillAsk(
            request_id=request.request_id,
            tenant=request.tenant,
            adapter=request.adapter,
            prompt_token_ids=tuple(request.prompt_token_ids),
            output_token_ids=tuple(request.output_token_ids),
            sampling=sampling_from_proto(request.sampling, request.sample_index),
            chain=self._core.chain(request.tenant_salt, request.adapter),
            priority=request.priority,
            wants_handle=request.wants_handle,
            handover=_handover(request.handover),
            num_samples=num_samples,
            beam=beam_from_proto(request.sampling),
            prefix_runs=_prefix_runs(request.hints),
        )

    def _last_message(self, answer: PrefillAnswer) -> prefill_pb2.PrefillReply:
        reply = prefill_pb2.PrefillReply(
            leg=self._core.leg_to_proto(answer.leg), times=times_to_proto(answer.seconds)
        )
        if answer.handle is not None:
            reply.handle.CopyFrom(handles.to_proto(answer.handle, self._core.handle_keys))
        return reply


class _Caller:
    """The router at the other end of one call."""

    def __init__(self, context: Context, core: WorkerCore) -> None:
        self._context = context
        self._core = core

    async def show_firsts(self, firsts: Firsts) -> None:
        for event in firsts:
            await self._context.write(_first_message(event))

    async def show_partial(self, handle: handles.Handle) -> None:
        message = handles.to_proto(handle, self._core.handle_keys)
        await self._context.write(prefill_pb2.PrefillReply(handle=message))


def _handover(number: int) -> HandoverPath:
    """A way that this version does not know is none that was asked for."""
    known = number in {int(path) for path in HandoverPath}
    return HandoverPath(number) if known else HandoverPath.UNSPECIFIED


def _prefix_runs(hints: Iterable[common_pb2.PrefixRun]) -> tuple[PrefixRun, ...]:
    """Raises: InvalidArgument for runs with a gap, without blocks, or without a store's life."""
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


def _first_message(event: RequestEvent) -> prefill_pb2.PrefillReply:
    reply = prefill_pb2.PrefillReply(
        sample_index=event.sample_index,
        token_ids=event.token_ids,
        logprobs=logprobs_to_proto(event.logprobs or ()),
        traces=traces_to_proto(event.traces or ()),
        beam_start=[
            common_pb2.BeamCandidate(token_id=token_id, logprob=logprob)
            for token_id, logprob in event.beam_start
        ],
    )
    if event.finish_reason is not None:
        reply.finish_reason = FINISH_REASONS[event.finish_reason]
    if event.stop_token_id is not None:
        reply.stop_token_id = event.stop_token_id
    return reply
