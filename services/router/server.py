"""The Inference servicer: raw bytes in, validated jobs to `flow`, messages out. Translates only.

Requests come as bytes so that what protobuf refuses gets INVALID_ARGUMENT with a field's name
instead of gRPC's INTERNAL. Generate writes through its context rather than yielding, so that
cancelling an attempt reaches it while a slow reader holds a write up. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from checkpoints.sampling_defaults import SamplingDefaults
from process import logs, serving
from process.deadline import Deadline
from process.errors import Cancelled, DeadlineExceeded, InvalidArgument
from protos import common_pb2, inference_pb2
from services.router import identity, sampling_defaults, validation
from services.router.answer import NO_TOOL_CALLS, Answer
from services.router.candidates import Candidates
from services.router.config import RouterLimits
from services.router.flow import RequestFlow
from services.router.inflight import Attempt, InFlight
from services.router.job import Cluster, Job
from services.router.metrics import RouterMetrics
from services.router.policy import DECODE, PREFILL
from services.router.prompt import PromptEncoder
from services.router.status import ClusterStatus
from services.router.tenants import TenantSalts
from services.router.times import StageTimes
from services.router.views import ServedModel
from services.router.wire_format import parse_request
from tokens.bad_words import bad_word_ids
from tokens.text import OutputText
from tokens.tool_calls import ToolCallEnds

logger = logging.getLogger(__name__)

SERVICE = "baton.v1.Inference"

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class Counters:
    """Requests since start, by how they ended. Refused ones (INVALID_ARGUMENT) are neither."""

    num_finished: int = 0
    num_failed: int = 0


@dataclass(frozen=True)
class Front:
    """What the servicer works with."""

    cluster: Cluster
    candidates: Candidates
    encoder: PromptEncoder
    in_flight: InFlight
    counters: Counters
    limits: RouterLimits
    defaults: SamplingDefaults
    served: ServedModel
    status: ClusterStatus
    salts: TenantSalts
    metrics: RouterMetrics


class InferenceServicer:
    """See the module."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the three methods. (The generated helper would parse requests before we see
        them.)
        """
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Generate": grpc.unary_stream_rpc_method_handler(self.generate),
            "ListModels": grpc.unary_unary_rpc_method_handler(
                self.list_models,
                response_serializer=inference_pb2.ListModelsReply.SerializeToString,
            ),
            "GetClusterStatus": grpc.unary_unary_rpc_method_handler(
                self.get_cluster_status,
                response_serializer=inference_pb2.GetClusterStatusReply.SerializeToString,
            ),
        }
        server.add_registered_method_handlers(SERVICE, handlers)

    @serving.unary
    async def generate(self, data: bytes, context: Context) -> None:
        """Serve one request; its messages go out through `context` as they come."""
        front, times = self._front, StageTimes()
        request = parse_request(data, max_bytes=front.limits.max_request_bytes)
        validation.check_request(request, served=front.served.names, limits=front.limits)
        deadline = Deadline.after(self._budget_s(request, context))
        tenant = request.tenant or identity.DEFAULT_TENANT
        request_id = request.request_id or identity.fresh_request_id()

        is_first = True

        async def send(message: inference_pb2.GenerateResponse) -> None:
            nonlocal is_first
            await context.write(message.SerializeToString())
            front.metrics.on_message(message)
            if is_first and message.token_ids:
                is_first = False
                front.metrics.on_first_token(times.elapsed_s)

        digest = identity.body_digest(request)
        async with front.in_flight.admit(tenant, request_id, digest, deadline) as attempt:
            await self._serve(request, attempt, times=times, deadline=deadline, send=send)

    @serving.unary
    async def list_models(self, data: bytes, context: Context) -> inference_pb2.ListModelsReply:
        """The model served, once for each fingerprint among its workers."""
        reply = inference_pb2.ListModelsReply()
        workers = [
            worker for role in (PREFILL, DECODE) for worker in self._front.candidates.usable(role)
        ]
        for fingerprint in sorted({worker.fingerprint for worker in workers}):
            alike = [worker for worker in workers if worker.fingerprint == fingerprint]
            reply.models.add(
                model=self._front.cluster.model,
                model_fingerprint=fingerprint,
                context_window=min(worker.context_window for worker in alike),
                vocab_size=min(worker.vocab_size for worker in alike),
                dtype=alike[0].dtype,
            )
        return reply

    @serving.unary
    async def get_cluster_status(
        self, data: bytes, context: Context
    ) -> inference_pb2.GetClusterStatusReply:
        """Workers, stores, counters, and what is not as it should be."""
        front = self._front
        reply = await front.status.collect()
        reply.num_requests_in_flight = front.in_flight.num_attempts
        reply.num_requests_finished = front.counters.num_finished
        reply.num_requests_failed = front.counters.num_failed
        return reply

    def _budget_s(self, request: inference_pb2.GenerateRequest, context: Context) -> float:
        budget_s = self._front.limits.default_budget_s
        if request.budget_ms:
            budget_s = request.budget_ms / 1000
        rpc_left_s = context.time_remaining()
        return budget_s if rpc_left_s is None else min(budget_s, rpc_left_s)

    async def _serve(
        self,
        request: inference_pb2.GenerateRequest,
        attempt: Attempt,
        *,
        times: StageTimes,
        deadline: Deadline,
        send: Callable[[inference_pb2.GenerateResponse], Awaitable[None]],
    ) -> None:
        counters, flow = self._front.counters, None
        outcome = "failed"
        try:
            async with deadline.timeout("request"):
                job, answers = await self._prepare(request, attempt, times)
                flow = RequestFlow(
                    self._front.cluster, job, answers, times=times, deadline=deadline, send=send
                )
                await flow.run()
            outcome = "finished"
            counters.num_finished += 1
        except InvalidArgument:
            outcome = "refused"
            raise
        except (asyncio.CancelledError, Cancelled):  # by its client, or by a newer attempt
            outcome = "cancelled"
            raise
        except DeadlineExceeded as error:
            where = flow.state.value if flow is not None else "being tokenized"
            raise DeadlineExceeded(f"the request's time ran out while {where}") from error
        finally:
            counters.num_failed += outcome == "failed"
            self._front.metrics.on_end(outcome, times.elapsed_s, times.stages())
            logs.event(
                logger,
                "request_over",
                request_id=attempt.request_id,
                tenant=attempt.tenant,
                outcome=outcome,
                state=flow.state.name if flow is not None else "PREPARING",
                times={stage: round(seconds, 6) for stage, seconds in times.stages()},
            )

    async def _prepare(
        self, request: inference_pb2.GenerateRequest, attempt: Attempt, times: StageTimes
    ) -> tuple[Job, list[Answer]]:
        """Tokens, the checks that need them, and every default."""
        front = self._front
        bounds = front.candidates.bounds()
        times.mark("receive")
        prompt = await front.encoder.encode(request)
        max_tokens = validation.check_tokens(
            prompt.token_ids, request, bounds=bounds, limits=front.limits
        )
        times.mark("tokenize")
        tenant, request_id, asked = attempt.tenant, attempt.request_id, request.sampling
        ends = self._tool_call_ends(asked)
        seed = asked.seed if asked.HasField("seed") else identity.seed_of(tenant, request_id)
        sampling = sampling_defaults.fill(
            asked,
            front.defaults,
            max_tokens=max_tokens,
            seed=seed,
            bad_words=self._bad_word_ids(asked),
            stop_token_ids=sorted(ends.token_ids),
        )
        salt = front.salts.of(tenant)
        job = Job(
            request_id=request_id,
            leg_id=identity.leg_id(request_id),
            tenant=tenant,
            tenant_salt=salt,
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            affinity=identity.affinity(salt, request.session, prompt.token_ids),
            priority=request.priority,
            adapter=front.candidates.adapter(request.adapter),
        )
        outputs = [
            OutputText(
                front.encoder.tokenizer,
                stop=asked.stop,
                include_stop_text=asked.include_stop_text,
                tool_call_ends=ends.strings,
                context_ids=prompt.context_ids,
            )
            for _ in range(sampling.n)
        ]
        answers = [
            Answer(request_id, output, sample_index=index, tool_call_ends=ends)
            for index, output in enumerate(outputs)
        ]
        return job, answers

    def _tool_call_ends(self, asked: common_pb2.SamplingParams) -> ToolCallEnds:
        if not asked.stop_at_tool_call:
            return NO_TOOL_CALLS
        ends = self._front.encoder.tool_call_ends
        if not ends:
            raise InvalidArgument(
                "sampling.stop_at_tool_call",
                "this model's tokenizer and chat template name no end of a tool call; name it in "
                "stop",
            )
        return ends

    def _bad_word_ids(self, asked: common_pb2.SamplingParams) -> list[tuple[int, ...]]:
        try:
            return bad_word_ids(self._front.encoder.tokenizer, asked.bad_words)
        except ValueError as error:
            raise InvalidArgument("sampling.bad_words", str(error)) from error
