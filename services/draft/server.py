"""DraftWorker and DraftServicer: the gRPC server of a draft worker (baton.v1.Draft), around a
loaded proposer. Verifiers (decode workers) call it. One asyncio loop.

`serving_drafts` starts the thread, then the server. At the end the worker refuses new calls, lets
running ones finish within `limits.drain_s`, then ends the thread. `DraftCollector` exports the
counts of the sessions. This is the only module of the service that uses the generated stub.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.speculation.draft_protocol import DraftModelInfo, DraftRequest
from engine.speculation.draft_sessions import CachingProposer, DraftSessions, SessionLimits
from process import entrypoint, grpc_server, logs, rpc
from process.authorization import RULES, PeerRole
from process.deadline import Deadline
from process.metrics import MetricsServer, counter, gauge
from process.rpc_errors import Unavailable
from process.tls import TlsIdentity
from protos import draft_pb2, draft_pb2_grpc
from services.draft.config import DraftSettings
from services.draft.thread import DraftThread


class DraftCollector(Collector):
    """Prometheus metrics of a draft worker's sessions and calls, read from the live counters on the
    metrics server's thread.
    """

    def __init__(self, thread: DraftThread, worker_id: str) -> None:
        self._thread = thread
        self._labels = {"worker_id": worker_id, "role": "draft"}

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics."""
        labels, sessions = self._labels, self._thread.sessions
        is_up = self._thread.failure is None
        yield gauge("baton_up", "1 while the process answers.", labels, is_up)
        yield gauge("baton_draft_sessions", "Sequences that are remembered.", labels, len(sessions))
        yield gauge(
            "baton_draft_session_bytes",
            "What their token ids are counted with.",
            labels,
            sessions.num_bytes,
        )
        yield gauge(
            "baton_draft_waiting_calls",
            "Calls that are computed or wait.",
            labels,
            self._thread.num_waiting,
        )
        one_by_one = (
            ("baton_draft_asked", "Sequences that were asked for.", sessions.num_requests),
            ("baton_draft_nodes", "Guesses that were made.", sessions.num_nodes),
            (
                "baton_draft_unknown",
                "Sequences of which tokens were missing here.",
                sessions.num_unknown,
            ),
            (
                "baton_draft_evicted_sessions",
                "Sequences that gave way to others.",
                sessions.num_evicted,
            ),
        )
        for name, text, count in one_by_one:
            yield counter(name, text, labels, count)


logger = logging.getLogger(__name__)

JOIN_S = 5.0


class DraftWorker:
    """A draft worker that serves: its thread, address, incarnation, and readiness."""

    def __init__(self, worker_id: str, thread: DraftThread) -> None:
        self.worker_id = worker_id
        self.thread = thread
        self.incarnation = entrypoint.new_incarnation()
        self.address = ""
        self.is_draining = False

    def why_not_ready(self) -> str:
        """Return in one line why the worker takes no calls; empty: it takes them. For probes and
        callers, on any thread.
        """
        if self.is_draining:
            return f"{self.worker_id} is draining"
        return "" if self.thread.failure is None else str(self.thread.failure)


@asynccontextmanager
async def serving_drafts(
    proposer: CachingProposer,
    model_info: DraftModelInfo,
    settings: DraftSettings,
    metrics: MetricsServer | None = None,
    join_s: float = JOIN_S,
) -> AsyncIterator[DraftWorker]:
    """Serve drafts of `proposer`, which the worker owns from now on, until the body ends.

    Args:
        metrics: server that exports the worker's metrics; the caller starts and stops it.
        join_s: limit for a batch under way to finish at the end.
    Raises: Unavailable when the port is in use; SettingsError for a certificate of another role.
    """
    limits = settings.limits
    sessions = DraftSessions(
        proposer,
        model_info.vocab_size,
        SessionLimits(
            limits.max_num_sessions,
            limits.max_session_bytes,
            settings.engine.speculation.max_num_nodes,
            limits.catch_up_tokens,
        ),
    )
    identity = TlsIdentity.of(settings.tls, PeerRole.DRAFT)
    worker_id = settings.worker_id or f"draft-{secrets.token_hex(4)}"
    thread = DraftThread(sessions, limits.max_waiting_calls, step_timeout_s=limits.step_timeout_s)
    worker = DraftWorker(worker_id, thread)
    servicer = DraftServicer(
        worker.thread,
        model_info,
        worker_id=worker_id,
        incarnation=worker.incarnation,
        max_call_s=limits.max_call_s,
        why_not_ready=worker.why_not_ready,
    )
    health = grpc_server.HealthServicer({SERVICE: lambda: not worker.why_not_ready()})
    try:
        server, worker.address = await grpc_server.listen(
            settings.listen,
            [servicer.add_to, health.add_to],
            identity=identity,
            rules=RULES[PeerRole.DRAFT],
        )
        try:
            if metrics is not None:
                metrics.add(DraftCollector(worker.thread, worker_id))
            yield worker
        finally:
            worker.is_draining = True
            await server.stop(limits.drain_s)
    finally:
        if not await worker.thread.stop(join_s):
            # It is a daemon thread, so it does not keep the process alive.
            logs.event(logger, "guessing_goes_on", level=logging.ERROR, waited_s=join_s)


SERVICE = "baton.v1.Draft"

Context = grpc.aio.ServicerContext[Any, Any]


class DraftServicer(draft_pb2_grpc.DraftServicer):
    """Servicer of baton.v1.Draft: Describe, Propose, Forget.

    Args:
        max_call_s: limit of a call; also used where the caller gives no deadline or a longer one.
        why_not_ready: returns why calls are refused; empty: they are taken.
    """

    def __init__(
        self,
        thread: DraftThread,
        model_info: DraftModelInfo,
        *,
        worker_id: str,
        incarnation: bytes,
        max_call_s: float,
        why_not_ready: Callable[[], str],
    ) -> None:
        self._thread = thread
        self._max_call_s = max_call_s
        self._why_not_ready = why_not_ready
        self._description = draft_pb2.DescribeDraftReply(
            worker_id=worker_id,
            incarnation=incarnation,
            model=model_info.model,
            tokenizer_digest=model_info.tokenizer_digest,
            vocab_size=model_info.vocab_size,
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with a server that is not started yet."""
        draft_pb2_grpc.add_DraftServicer_to_server(self, server)

    @rpc.unary
    async def Describe(
        self, request: draft_pb2.DescribeDraftRequest, context: Context
    ) -> draft_pb2.DescribeDraftReply:
        self._check_ready()
        return self._description

    @rpc.unary
    async def Propose(
        self, request: draft_pb2.ProposeRequest, context: Context
    ) -> draft_pb2.ProposeReply:
        self._check_ready()
        left_s = context.time_remaining()
        budget_s = self._max_call_s if left_s is None else min(self._max_call_s, left_s)
        requests = [_draft_request(task) for task in request.tasks]
        answers = await self._thread.propose(request.verifier, requests, Deadline.after(budget_s))
        return draft_pb2.ProposeReply(
            trees=[
                draft_pb2.DraftTree(
                    is_unknown=not answer.is_known,
                    token_ids=answer.token_ids,
                    parents=answer.parents,
                    chances=answer.chances,
                )
                for answer in answers
            ]
        )

    @rpc.unary
    async def Forget(
        self, request: draft_pb2.ForgetRequest, context: Context
    ) -> draft_pb2.ForgetReply:
        self._check_ready()
        self._thread.forget(request.verifier, list(request.sessions))
        return draft_pb2.ForgetReply()

    def _check_ready(self) -> None:
        why_not = self._why_not_ready()
        if why_not:
            raise Unavailable(why_not)


def _draft_request(task: draft_pb2.DraftTask) -> DraftRequest:
    return DraftRequest(
        task.session,
        task.start,
        list(task.token_ids),
        task.num_prompt_tokens,
        task.num_nodes,
        task.temperature,
        task.top_p,
        task.top_k,
        task.min_p,
        task.seed,
        task.sample_index,
    )
