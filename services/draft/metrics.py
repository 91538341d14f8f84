"""What a draft worker's /metrics shows: its sessions, and what it was asked. Read from where it is
counted, by the thread of whoever scrapes."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from process.metrics import counter, gauge
from services.draft.thread import DraftThread


class DraftCollector(Collector):
    """See the module."""

    def __init__(self, thread: DraftThread, worker_id: str) -> None:
        self._thread = thread
        self._labels = {"worker_id": worker_id, "role": "draft"}

    def collect(self) -> Iterable[Metric]:
        """All metrics, now."""
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
