"""Threads that may be given up on."""

from __future__ import annotations

import threading

import pytest

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
