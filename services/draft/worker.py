"""A draft worker from a loaded proposer to its clean end: thread, gRPC server, health, metrics.

Start: thread -> server. End: it says that it takes nothing more, calls under way end within
`limits.drain_s` -> thread. Belongs to the loop's thread. Tests and the process use the same one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.speculation.draft_protocol import DraftModelInfo
from engine.speculation.draft_sessions import CachingProposer, DraftSessions, SessionLimits
from process import entrypoint, grpc_server, logs
from process.authorization import RULES, PeerRole
from process.metrics import MetricsServer
from process.tls import TlsIdentity
from services.draft.config import DraftSettings
from services.draft.metrics import DraftCollector
from services.draft.server import SERVICE, DraftServicer
from services.draft.thread import DraftThread

logger = logging.getLogger(__name__)

JOIN_S = 5.0


class DraftWorker:
    """One that serves."""

    def __init__(self, worker_id: str, thread: DraftThread) -> None:
        self.worker_id = worker_id
        self.thread = thread
        self.incarnation = entrypoint.new_incarnation()
        self.address = ""
        self.is_draining = False

    def why_not_ready(self) -> str:
        """For probes and callers, any thread: one line; empty: it guesses."""
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
    """Propose with `proposer`, which is this worker's from now on, until the body ends.

    Args:
        metrics: that shows what is counted; its owner starts and stops it.
        join_s: for a guess under way to end, at the end.
    Raises: Unavailable when the port is taken; SettingsError for a certificate of another role.
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
            # The process ends all the same: it is a daemon thread.
            logs.event(logger, "guessing_goes_on", level=logging.ERROR, waited_s=join_s)
