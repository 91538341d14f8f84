"""What a kubelet restarts a process for, and what a balancer leaves one out for, must differ."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from process import metrics
from process.metrics import HealthProbes, MetricsServer
from tests.harness.waiting import Clock, until


def test_it_is_alive_from_the_start_and_ready_when_its_own_check_says_so() -> None:
    why = ["no route"]
    one = HealthProbes("loading the model")
    assert (one.why_not_alive(), one.why_not_ready()) == ("", "loading the model")
    one.say("weights, 1 of 2")
    assert one.why_not_ready() == "weights, 1 of 2"
    one.set_check(lambda: why[0])
    assert (one.why_not_alive(), one.why_not_ready()) == ("", "no route")
    why[0] = ""
    assert one.why_not_ready() == ""
    one.end()
    assert (one.why_not_alive(), one.why_not_ready()) == ("", "stopping")


async def test_a_loop_that_does_not_turn_is_not_alive() -> None:
    """And one that turns again is."""
    clock = Clock(0.0)
    one = HealthProbes(clock=clock, turn_s=0.001)
    one.follow()
    clock.now_s = metrics.STUCK_S  # busy, for as long as anybody ever was
    assert one.why_not_alive() == ""
    clock.now_s += 1
    assert one.why_not_alive() == "the event loop has not turned for 61 s"
    await until(lambda: not one.why_not_alive())
    clock.now_s += metrics.STUCK_S + 1
    turn = one._turn
    one.end()
    assert one.why_not_alive() == ""  # it ends: nobody shall cut that short
    assert turn is not None and turn.cancelled()  # and its watch is over


@pytest.fixture
def server() -> Iterator[tuple[MetricsServer, HealthProbes]]:
    one = HealthProbes()
    made = MetricsServer(health=one)
    made.start("127.0.0.1:0")
    yield made, one
    made.stop()


def ask(server: MetricsServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{server.address}{path}", timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_probes_are_told_in_one_line(server: tuple[MetricsServer, HealthProbes]) -> None:
    made, one = server
    assert ask(made, "/livez") == (200, "ok\n")
    assert ask(made, "/readyz") == (503, "starting\n")
    one.set_check(lambda: "")
    assert ask(made, "/readyz") == (200, "ok\n")
    assert ask(made, "/metrics")[0] == 200


def test_a_server_without_probes_says_that_it_has_none() -> None:
    """Not metrics with 200: a probe of it would never fail."""
    made = MetricsServer()
    made.start("127.0.0.1:0")
    try:
        assert [ask(made, path)[0] for path in ("/livez", "/readyz")] == [404, 404]
    finally:
        made.stop()
