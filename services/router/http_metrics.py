"""What a router's /metrics shows of its HTTP port: answers by path and status, also those that were
refused before they were a request to anybody.

A path is as it was registered, so that there are as many as there are routes; what matched none is
one together. Counted on the event loop when an answer begins.
"""

from __future__ import annotations

from collections.abc import Iterable

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

NO_ROUTE = "(none)"


class HttpMetrics(Collector):
    """See the module."""

    def __init__(self, router_id: str) -> None:
        self._id = router_id
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "baton_router_http_answers",
            "Answers over HTTP, by path and status.",
            ("router_id", "path", "code"),
            registry=self._registry,
        )

    def add_to(self, app: web.Application) -> None:
        """Count what `app` answers."""
        app.on_response_prepare.append(self._count)

    def collect(self) -> Iterable[Metric]:
        """All metrics, now."""
        return self._registry.collect()

    async def _count(self, request: web.Request, response: web.StreamResponse) -> None:
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else NO_ROUTE
        self._answers.labels(self._id, path, str(response.status)).inc()
