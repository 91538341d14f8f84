"""How long a request may take."""

from __future__ import annotations

from types import SimpleNamespace

from services.router.config import RouterLimits
from services.router.service import RouterService
from tests.harness.router_bench import request


def test_a_request_ends_before_its_clients_own_clock() -> None:
    desk = SimpleNamespace(limits=RouterLimits())
    for left_s, most_s in ((100.0, 99.75), (1.0, 0.9)):
        assert RouterService.deadline(desk, request(), left_s).left_s() <= most_s  # type: ignore[arg-type]
    assert RouterService.deadline(desk, request(budget_ms=500), 100.0).left_s() > 0.4  # type: ignore[arg-type]
