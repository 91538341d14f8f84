"""RouterService: the router's protocol-independent front end; gRPC and HTTP handlers pass it a
request and a function that sends messages.

It checks the request, admits it among the attempts in flight and in the fair queue, runs its
RequestLifecycle under a deadline, and counts, logs and traces what happens. It also answers the
other calls of the API: models, readiness, explain, cluster status. It knows no protocol.

`AdapterUse` counts the requests that use each content of each adapter; contents in use are neither
dropped nor unloaded. Invariant: while the router is idle, all counts are zero.

`log_prompt` and `log_answer_message` write the text of requests to the log, one line for each
prompt and for each message, where the setting `log_prompts` asks for it; no other code logs text of
requests.

One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from process import logs
from process.deadline import Deadline
from process.rpc_errors import BatonError, Cancelled, DeadlineExceeded, InvalidArgument
from process.tracing import OFF, Tracing
from protos import inference_pb2
from services.router import explain, identity, validation
from services.router.admission import (
    Admission,
    AdmissionRequest,
    AdmissionTicket,
    Holding,
    asked_of,
)
from services.router.attempts import Attempt, Attempts
from services.router.callers import ANYBODY, ApiKeys, Caller
from services.router.client_limits import LoopPace
from services.router.cluster_status import ClusterStatus
from services.router.config import RouterLimits
from services.router.lifecycle import RequestLifecycle, Send
from services.router.metrics import RequestTraffic, RouterMetrics, Traffic, TrafficPlace, code_of
from services.router.request import PromptEncoder, RouterRequest
from services.router.request_stats import (
    INTERVAL_S,
    RequestLog,
    RequestRecord,
    StageTimes,
    UsageHistory,
)
from services.router.served_models import OneModel, ServedModels
from services.router.tracing import RequestTrace, TracedCall
from services.router.worker_directory import AdapterContent

logger = logging.getLogger(__name__)


def log_prompt(job: RouterRequest, encoder: PromptEncoder) -> None:
    """Log the prompt as text, as the model gets it, with the chat template applied."""
    text = encoder.tokenizer.decode(list(job.prompt_token_ids), skip_special_tokens=False)
    logs.event(logger, "prompt", request_id=job.request_id, tenant=job.tenant, text=text)


def log_answer_message(message: inference_pb2.GenerateResponse) -> None:
    """Log the text of one message, as the client gets it."""
    if message.text:
        logs.event(
            logger,
            "answer",
            request_id=message.request_id,
            sample_index=message.sample_index,
            text=message.text,
        )


class AdapterUse:
    """Number of running requests for each adapter and digest."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def using(self, adapter: AdapterContent) -> Iterator[None]:
        """Context manager: count a request for `adapter` while the body runs."""
        if not adapter.name:
            yield
            return
        key = (adapter.name, adapter.digest)
        self._counts[key] += 1
        try:
            yield
        finally:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]

    def of(self, name: str) -> Mapping[str, int]:
        """Return the number of requests that use adapter `name`, by digest."""
        return {digest: num for (own, digest), num in self._counts.items() if own == name}

    def names(self) -> set[str]:
        """Return the names of the adapters in use."""
        return {name for name, _ in self._counts}

    @property
    def num_requests(self) -> int:
        """Number of requests that use any adapter."""
        return self._counts.total()


_ANSWER_S = 0.25
_ANSWER_SHARE = 0.1
"""How much earlier than its client's gRPC deadline a request ends, so that its status arrives in
time: at most `_ANSWER_S` seconds, and at most this share of what is left. Guessed."""

_NUM_STAGES_TOLD = 3


@dataclass
class RequestCounters:
    """Requests since start, by how they ended. Refused (INVALID_ARGUMENT) and cancelled requests
    are in neither count."""

    num_finished: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Failed requests by status code."""

    def on_end(self, outcome: str, code: str) -> None:
        """Count a request that ended."""
        self.num_finished += outcome == "finished"
        if outcome == "failed":
            self.failed[code] += 1


@dataclass(frozen=True)
class RouterService:
    """Entry point of every request, whatever its protocol."""

    models: ServedModels
    in_flight: Attempts
    limits: RouterLimits
    status: ClusterStatus
    metrics: RouterMetrics
    log: RequestLog
    history: UsageHistory
    admission: Admission
    traffic: Traffic
    holding: Holding
    adapter_use: AdapterUse
    keys: ApiKeys | None = None
    """API keys of the clients; None: clients need no key."""
    counters: RequestCounters = field(default_factory=RequestCounters)
    tracing: Tracing = OFF
    pace: LoopPace = field(default_factory=LoopPace)
    log_prompts: bool = False
    last_infos: dict[str, tuple[inference_pb2.ModelInfo, ...]] = field(default_factory=dict)
    """By model name: the ModelInfos of its workers, when it last had workers."""

    def caller_of(self, authorization: str) -> Caller:
        """Return the caller that sends this `authorization` header (empty: none was sent).

        Raises: Unauthenticated.
        """
        return ANYBODY if self.keys is None else self.keys.caller_of(authorization)

    def encoder(self, model: str) -> PromptEncoder:
        """Return the prompt encoder of a model (empty: of the only one). Raises:
        InvalidArgument."""
        return self.models.find(model).preparer.encoder

    def deadline(
        self, request: inference_pb2.GenerateRequest, left_s: float | None = None
    ) -> Deadline:
        """Return the deadline of `request`, from its own budget or the router's default.

        Args: left_s: seconds left by the protocol's deadline. The request ends a moment earlier,
            because the answer must arrive before the client's own timer ends the call without a
            reason.
        """
        budget_s = self.limits.default_budget_s
        if request.budget_ms:
            budget_s = request.budget_ms / 1000
        if left_s is not None:
            budget_s = min(budget_s, left_s - min(_ANSWER_S, _ANSWER_SHARE * left_s))
        return Deadline.after(budget_s)

    async def serve(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        *,
        deadline: Deadline,
        send: Send,
        times: StageTimes,
        call: TracedCall,
    ) -> None:
        """Serve one request. Its messages go to `send` as they come; `send` raises ConnectionError
        when the client has gone.

        Cancelling the calling task cancels the request at its workers. `times` must begin with the
        request's first byte. Raises: BatonError.
        """
        name = self.models.name_of(request.model)
        trace = RequestTrace(self.tracing, call, request, times, name)
        with self.metrics.errors_counted(), trace:
            await self._admit(
                request, caller, deadline=deadline, send=send, times=times, trace=trace
            )

    def trace_unread(self, call: TracedCall, times: StageTimes, error: BatonError) -> None:
        """Trace a request of a known caller that could not be parsed."""
        RequestTrace(self.tracing, call, None, times, "").end(error)

    async def _admit(
        self,
        request: inference_pb2.GenerateRequest,
        caller: Caller,
        *,
        deadline: Deadline,
        send: Send,
        times: StageTimes,
        trace: RequestTrace,
    ) -> None:
        """Check and admit a request, then serve it."""
        model = self.models.find(request.model)
        validation.check_request(request, served=model.served.names, limits=self.limits)
        times.mark("receive")
        tenant = caller.tenant_of(request)
        caller.check_priority(request)
        request_id = request.request_id or identity.fresh_request_id()
        digest = identity.body_digest(request)
        with self.traffic.follow(model.name) as traffic:
            async with self.in_flight.admit(tenant, request_id, digest, deadline) as attempt:
                asked = asked_of(
                    request,
                    tenant,
                    model.name,
                    default_max_tokens=self.limits.default_max_tokens,
                )
                with self.log.follow(request_id, tenant, model.name, times) as record:
                    async with self._admitted(
                        asked,
                        deadline,
                        record,
                        times,
                        model=model,
                        adapter=request.adapter,
                        traffic=traffic,
                    ) as ticket:
                        await self._serve(
                            request,
                            attempt,
                            model,
                            times=times,
                            deadline=deadline,
                            send=send,
                            record=record,
                            trace=trace,
                            ticket=ticket,
                            traffic=traffic,
                        )

    @asynccontextmanager
    async def _admitted(
        self,
        asked: AdmissionRequest,
        deadline: Deadline,
        record: RequestRecord,
        times: StageTimes,
        *,
        model: OneModel,
        adapter: str,
        traffic: RequestTraffic,
    ) -> AsyncIterator[AdmissionTicket]:
        """Context manager: run the body when there are workers and it is the request's turn. A
        request that is not admitted is counted as well."""
        try:
            await self._hold(model, adapter, deadline, record, times, traffic)
            async with self.admission.admit(asked, deadline, record.entry) as ticket:
                times.mark("queue")
                record.doing = "being tokenized"
                traffic.move(TrafficPlace.RUNNING)
                yield ticket
        except BaseException as error:
            if not record.outcome:
                spent = _budget_spent(deadline, times, record.doing)
                times.mark("queue")
                record.outcome, record.code = _outcome_of(error), code_of(error)
                self.counters.on_end(record.outcome, record.code)
                self.metrics.on_end(record.outcome, record.code, times.elapsed_s, times.stages())
                if isinstance(error, DeadlineExceeded):
                    raise spent from error
            raise

    async def _hold(
        self,
        model: OneModel,
        adapter: str,
        deadline: Deadline,
        record: RequestRecord,
        times: StageTimes,
        traffic: RequestTraffic,
    ) -> None:
        """Wait for the model's first workers, where the settings hold requests for them, or for a
        worker that will soon have the request's adapter."""
        doing = record.doing

        def on_held() -> None:
            record.doing = "waiting for a worker to start"
            traffic.move(TrafficPlace.HELD)

        workers = model.candidates

        def find() -> None:
            workers.bounds()
            workers.adapter(adapter)

        def is_coming() -> bool:
            return workers.are_expected() or workers.is_adapter_expected(adapter)

        if await self.holding.wait(find, deadline, on_held, is_coming):
            times.mark("hold")
            record.doing = doing
            traffic.move(TrafficPlace.QUEUED)

    def list_models(self) -> inference_pb2.ListModelsReply:
        """Return the served models; see `infos`."""
        return inference_pb2.ListModelsReply(
            models=[info for model in self.models for info in self.infos(model)]
        )

    def infos(self, model: OneModel) -> Sequence[inference_pb2.ModelInfo]:
        """Return one ModelInfo for each fingerprint among the model's workers. Without workers:
        those of the last workers while requests wait for new ones, else none."""
        infos = tuple(model.infos())
        if not infos and (self.holding.is_on or model.candidates.are_expected()):
            infos = self.last_infos.get(model.name, ())
        return infos

    def note_workers(self) -> None:
        """React to a change of the known workers."""
        for model in self.models:
            infos = tuple(model.infos())
            if infos:
                self.last_infos[model.name] = infos
        self.holding.look()

    def ready(self) -> None:
        """Raises: Unavailable when a model lacks a serving worker of some role. A model that has no
        workers, and none starting, counts as ready where requests are held for it: it is scaled
        to zero, and only a request brings workers back."""
        for model in self.models:
            if not (self.holding.is_on and model.candidates.is_at_zero()):
                model.candidates.check_serving()

    def explain(self, request: inference_pb2.ExplainRequest) -> inference_pb2.ExplainReply:
        """Return why a request was placed where it was, or why it waits. Raises: NotFound."""
        return explain.explain(self.models, self.log, self.admission, request)

    async def cluster_status(
        self, request: inference_pb2.GetClusterStatusRequest
    ) -> inference_pb2.GetClusterStatusReply:
        """Return workers, stores, counters and problems."""
        reply = await (self.status.as_heard() if request.as_heard else self.status.collect())
        reply.requests.extend(self.log.newest(request.num_requests))
        if request.with_history:
            reply.history.extend(self.history.points)
            reply.history_interval_ms = round(INTERVAL_S * 1000)
        reply.problems.extend(filter(None, [self.admission.problem]))
        reply.num_requests_in_flight = self.in_flight.num_attempts
        reply.num_requests_finished = self.counters.num_finished
        reply.num_requests_failed = self.counters.failed.total()
        reply.num_requests_failed_by_code.update(self.counters.failed)
        return reply

    async def _serve(
        self,
        request: inference_pb2.GenerateRequest,
        attempt: Attempt,
        model: OneModel,
        *,
        times: StageTimes,
        deadline: Deadline,
        send: Send,
        record: RequestRecord,
        trace: RequestTrace,
        ticket: AdmissionTicket,
        traffic: RequestTraffic,
    ) -> None:
        """Serve an admitted request; count, log and trace how it ended."""
        flow: RequestLifecycle | None = None
        meter = self.metrics.meter(lambda: times.elapsed_s, others=(traffic,))

        async def send_counted(message: inference_pb2.GenerateResponse) -> None:
            try:
                await send(message)
            except ConnectionError as error:
                raise _ClientGone from error
            is_first = times.first_token_s is None
            if message.token_ids:
                times.first_token()
                prompt = record.num_prompt_tokens if is_first else 0
                ticket.on_tokens(prompt + len(message.token_ids))
            elif message.finish_reason and is_first:  # no token is shown: count the prompt
                ticket.on_tokens(record.num_prompt_tokens)
            trace.on_message(message)
            if self.log_prompts:
                log_answer_message(message)
            meter.on_message(message)
            traffic.on_message(message)
            record.on_message(message)
            if self.pace.pause_s and not (is_first or message.finish_reason):
                await asyncio.sleep(self.pace.pause_s)

        try:
            async with deadline.timeout("request"):
                # Admitting the request took time: let tokens of other requests out first.
                await asyncio.sleep(0)
                job, answers = await model.preparer.prepare(request, attempt, times)
                flow = RequestLifecycle(
                    model.cluster,
                    job,
                    answers,
                    times=times,
                    deadline=deadline,
                    send=send_counted,
                    on_reserved=ticket.on_reserved,
                )
                record.flow, record.num_prompt_tokens = flow, len(job.prompt_token_ids)
                trace.on_job(job)
                if self.log_prompts:
                    log_prompt(job, model.preparer.encoder)
                with self.adapter_use.using(job.adapter):
                    await flow.run()
            record.outcome = "finished"
        except BaseException as error:
            where = flow.state.value if flow is not None else "being tokenized"
            seen = _as_its_client_sees(error, deadline, times, where)
            record.outcome, record.code = _outcome_of(seen), code_of(seen)
            if seen is error:
                raise
            raise seen from error
        finally:
            self.counters.on_end(record.outcome, record.code)
            trace.on_end(record.outcome, flow.state.value if flow is not None else "preparing")
            self.metrics.on_end(record.outcome, record.code, times.elapsed_s, times.stages())
            traffic.on_stages(times.stages())
            logs.event(
                logger,
                "request_over",
                request_id=attempt.request_id,
                tenant=attempt.tenant,
                outcome=record.outcome,
                state=flow.state.name if flow is not None else "PREPARING",
                times={stage: round(seconds, 6) for stage, seconds in times.stages()},
            )


def _outcome_of(error: BaseException) -> str:
    """Return "refused", "cancelled" or "failed" for a request that ended with `error`."""
    if isinstance(error, InvalidArgument):
        return "refused"
    # Cancelled by the client or by a newer attempt.
    if isinstance(error, asyncio.CancelledError | Cancelled):
        return "cancelled"
    return "failed"


class _ClientGone(Exception):
    """A message could not be sent because the client has gone; not an error of a worker."""


def _as_its_client_sees(
    error: BaseException, deadline: Deadline, times: StageTimes, doing: str
) -> BaseException:
    """Return the error that the client gets for a request that fails with `error`."""
    if isinstance(error, _ClientGone):
        return Cancelled("its client has gone")
    if isinstance(error, DeadlineExceeded):
        return _budget_spent(deadline, times, doing)
    return error


def _budget_spent(deadline: Deadline, times: StageTimes, doing: str) -> DeadlineExceeded:
    """Return the error for a request whose budget ran out: its budget, and the stages that took
    most of it."""
    spent = dict(times.stages())
    spent[doing] = times.begin_s + times.elapsed_s - times.last_s
    most = sorted(spent.items(), key=lambda part: part[1], reverse=True)[:_NUM_STAGES_TOLD]
    told = ", ".join(f"{stage} {seconds:.3g} s" for stage, seconds in most)
    budget_s = deadline.at_s - times.begin_s
    return DeadlineExceeded(
        f"the request's budget of {budget_s:.3g} s ran out while {doing}; it went to: {told}"
    )
