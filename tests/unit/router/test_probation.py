"""Whom a router mistrusts: growing pauses, one probe, one request that tries, and another life."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from process.rpc_errors import Cancelled, DeadlineExceeded, Internal, NoCapacity, Unavailable
from services.router.circuit_breaker import ALLOWED, Probation, Suspicion
from tests.harness.waiting import Clock

W, LIFE = "d0", "a life"


def _probation(clock: Clock) -> Probation:
    return Probation(first_s=1.0, most_s=8.0, clock=clock, jitter=lambda: 1.0)


def _half_open(probation: Probation, clock: Clock) -> None:
    probation.failed(W, LIFE)
    clock.now_s += 1000
    assert probation.due() == [(W, LIFE)]
    probation.probed(W, LIFE, is_well=True)


def test_pauses_grow_and_are_bounded() -> None:
    clock = Clock()
    probation = _probation(clock)
    for pause_s in (1.0, 2.0, 4.0, 8.0, 8.0):
        probation.failed(W, LIFE)
        assert probation.standing(W, LIFE) is Suspicion.PAUSED
        clock.now_s += pause_s - 0.01
        assert probation.due() == [] and probation.is_suspect(W, LIFE)
        clock.now_s += 0.02
        assert probation.due() == [(W, LIFE)]
        assert probation.due() == []  # one probe at a time
        assert probation.standing(W, LIFE) is Suspicion.PROBING
        probation.check_integrity()


@pytest.mark.parametrize(
    ("error", "standing"),
    [
        (Unavailable("gone"), Suspicion.PAUSED),
        (NoCapacity("full"), Suspicion.TRUSTED),
        (DeadlineExceeded("late"), Suspicion.HALF_OPEN),
        (Cancelled("by its client"), Suspicion.HALF_OPEN),
        (KeyboardInterrupt(), Suspicion.HALF_OPEN),
    ],
)
def test_how_the_try_ends(error: BaseException, standing: Suspicion) -> None:
    """An answer of any kind is one; what we end ourselves says nothing of the worker."""
    clock = Clock()
    probation = _probation(clock)
    _half_open(probation, clock)
    with pytest.raises(type(error)), probation.trial(W, LIFE):
        raise error
    assert probation.standing(W, LIFE) is standing


def test_a_failed_probe_counts_and_a_late_one_does_not() -> None:
    clock = Clock()
    probation = _probation(clock)
    probation.failed(W, LIFE)
    clock.now_s += 2
    probation.due()
    probation.probed(W, LIFE, is_well=False)
    assert probation.standing(W, LIFE) is Suspicion.PAUSED
    probation.served(W, LIFE)
    probation.probed(W, LIFE, is_well=False)  # somebody was served meanwhile
    assert probation.standing(W, LIFE) is Suspicion.TRUSTED


def test_a_second_request_beside_the_try_does_not_end_it() -> None:
    clock = Clock()
    probation = _probation(clock)
    _half_open(probation, clock)
    with probation.trial(W, LIFE):
        with pytest.raises(DeadlineExceeded), probation.trial(W, LIFE):
            raise DeadlineExceeded("late")
        assert probation.standing(W, LIFE) is Suspicion.TRIED


def test_another_life_is_trusted_and_who_is_gone_forgotten() -> None:
    clock = Clock()
    probation = _probation(clock)
    told: list[str] = []
    probation.on_change.append(told.append)
    probation.failed(W, LIFE)
    assert probation.standing(W, "another life") is Suspicion.TRUSTED
    probation.reconcile({W: LIFE})
    assert probation.is_suspect(W, LIFE)
    probation.reconcile({W: "another life"})
    assert not probation.num_mistrusted
    probation.failed(W, "another life")
    probation.reconcile({})
    assert not probation.num_mistrusted
    assert told == [W] * 4


def test_moves_outside_the_table_are_refused() -> None:
    assert set(ALLOWED) == set(Suspicion)
    probation = _probation(Clock())
    probation.failed(W, LIFE)
    with pytest.raises(Internal, match="paused -> may be tried"):
        probation._move(W, Suspicion.HALF_OPEN)


def test_whatever_happens_the_laws_hold(seed: int, scale: Callable[[int], int]) -> None:
    rng, clock = random.Random(seed), Clock()
    probation = _probation(clock)
    lives = {f"w{i}": "life 0" for i in range(4)}
    for _ in range(scale(20_000)):
        worker_id = rng.choice(list(lives))
        life = rng.choice([lives[worker_id], lives[worker_id], "old life"])
        action = rng.randrange(6)
        clock.now_s += rng.random()
        if action == 0:
            probation.failed(worker_id, life)
        elif action == 1:
            probation.served(worker_id, life)
        elif action == 2:
            for due in probation.due():
                if rng.random() < 0.7:
                    probation.probed(*due, is_well=rng.random() < 0.5)
        elif action == 3:
            lives[worker_id] = f"life {rng.randrange(3)}"
            probation.reconcile(lives)
        else:
            error = rng.choice([None, Unavailable("x"), NoCapacity("x"), Cancelled("x")])
            try:
                with probation.trial(worker_id, life):
                    if error is not None:
                        raise error
            except (Unavailable, NoCapacity, Cancelled):
                pass
        probation.check_integrity()
        if action == 0:
            assert probation.is_suspect(worker_id, life)
