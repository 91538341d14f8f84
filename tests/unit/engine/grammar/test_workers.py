"""Threads that may be given up on."""

from __future__ import annotations

import logging
import threading

import pytest

from engine.errors import IntegrityError
from engine.grammar.workers import Workers


def test_calls_run_in_order_on_few_threads() -> None:
    workers = Workers("test", 1)
    found: list[int] = []
    tasks = [workers.submit(lambda number=number: found.append(number)) for number in range(50)]
    assert all(task.wait(30) for task in tasks)
    assert found == list(range(50))
    workers.check_integrity()
    workers.close()


def test_a_thread_that_is_given_up_on_is_replaced_and_counted() -> None:
    workers = Workers("test", 1)
    let_go, is_in = threading.Event(), threading.Event()

    def hang() -> None:
        is_in.set()
        let_go.wait(30)

    stuck = workers.submit(hang)
    assert is_in.wait(30)
    behind = workers.submit(lambda: None)
    assert not behind.wait(0.05)
    workers.give_up(stuck)
    assert behind.wait(30)
    assert workers.num_stuck == 1
    workers.check_integrity()
    let_go.set()
    assert stuck.wait(30)
    assert workers.num_stuck == 0
    workers.give_up(stuck)  # too late: it is done
    assert workers.num_stuck == 0
    workers.check_integrity()
    workers.close()


def test_after_close_nothing_is_taken() -> None:
    workers = Workers("test", 1)
    let_go, is_in = threading.Event(), threading.Event()
    ran = []

    def hang() -> None:
        is_in.set()
        let_go.wait(30)

    first = workers.submit(hang)
    assert is_in.wait(30)
    queued = workers.submit(lambda: ran.append(1))
    workers.close()
    assert queued.wait(30), "who waits is not left waiting"
    let_go.set()
    assert first.wait(30)
    assert ran == []
    with pytest.raises(RuntimeError, match="submit after close"):
        workers.submit(lambda: None)
    workers.check_integrity()


def test_a_call_that_raises_leaves_its_thread_at_work(caplog: pytest.LogCaptureFixture) -> None:
    workers = Workers("test", 1)

    def fail() -> None:
        raise ValueError("odd")

    with caplog.at_level(logging.ERROR):
        tasks = [workers.submit(fail) for _ in range(3)]
        assert all(task.wait(30) for task in tasks)
    found: list[int] = []
    assert workers.submit(lambda: found.append(1)).wait(30) and found == [1]
    assert len(workers._threads) == 1
    assert sum("test: a call failed" in record.message for record in caplog.records) == 3
    workers.check_integrity()
    workers.close()


def test_a_thread_that_is_gone_but_counted_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers("test", 1)
    monkeypatch.setattr(Workers, "_run", lambda self: None)
    workers.submit(lambda: None)
    for thread in workers._threads:
        thread.join(30)
    with pytest.raises(IntegrityError, match="0 threads live, 0 idle and 1 busy"):
        workers.check_integrity()
