"""The fair queue: shares by weight, classes in order, nobody starves, and the laws hold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from services.router.admission import (
    LOWER_EVERY,
    QUANTUM_TOKENS,
    FairQueue,
    QueuedRequest,
    patience_s,
)


def drain(queue: FairQueue) -> list[QueuedRequest]:
    found = []
    while (waiting := queue.pop()) is not None:
        queue.check_integrity()
        found.append(waiting)
    return found


def test_a_line_is_in_the_order_of_deadlines_then_of_arrival(seed: int) -> None:
    rng = random.Random(seed)
    queue = FairQueue()
    sent = [QueuedRequest("a", 0, rng.randint(1, 900), due_s=rng.randint(1, 9)) for _ in range(60)]
    for waiting in sent:
        ahead = [other for other in sent[: len(queue)] if other.due_s <= waiting.due_s]
        assert queue.tokens_ahead(waiting) == sum(other.num_tokens for other in ahead)
        queue.push(waiting)
        queue.check_integrity()
        assert queue.position(waiting) == (len(ahead) + 1, len(queue))
        assert queue.tokens_ahead(waiting) == sum(other.num_tokens for other in ahead)
    for waiting in rng.sample(sent, 20):
        queue.remove(waiting)
        sent.remove(waiting)
    assert drain(queue) == sorted(sent, key=lambda waiting: waiting.due_s)


@pytest.mark.parametrize("budget_s", [0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0])
def test_budgets_that_differ_by_their_way_here_are_equal(budget_s: float) -> None:
    due = {patience_s(budget_s * part) for part in (0.9, 0.99, 1.0, 1.01, 1.1)}
    assert len(due) == 1
    assert 0 < patience_s(0.0) <= patience_s(0.01) < patience_s(1.0) < patience_s(300.0)


def test_a_quiet_tenant_does_not_wait_behind_a_noisy_one() -> None:
    queue = FairQueue()
    for _ in range(1000):
        queue.push(QueuedRequest("noisy", 0, 400))
    for _ in range(10):
        queue.pop()
    quiet = QueuedRequest("quiet", 0, 400)
    queue.push(quiet)
    assert queue.tokens_ahead(QueuedRequest("quiet", 0, 400)) < 3000  # it says so, too
    order = [queue.pop() for _ in range(5)]
    assert quiet in order


def test_served_tokens_follow_the_weights(seed: int, scale: Callable[[int], int]) -> None:
    """While tenants always wait, none gets ahead of its share by more than a turn and a request."""
    rng = random.Random(seed)
    for _ in range(scale(400)):
        weights = {f"t{n}": rng.choice([0.25, 1.0, 1.0, 3.0]) for n in range(rng.randint(2, 5))}
        largest = rng.choice([10, 400, 3000, 50_000])
        queue, served = FairQueue(), Counter[str]()
        for tenant in sorted([*weights] * 3):
            queue.push(QueuedRequest(tenant, 0, rng.randint(1, largest), weights[tenant]))
        for _ in range(rng.randint(50, 300)):
            waiting = queue.pop()
            assert waiting is not None
            served[waiting.tenant] += waiting.num_tokens
            again = QueuedRequest(waiting.tenant, 0, rng.randint(1, largest), waiting.weight)
            queue.push(again)
            queue.check_integrity()
        shares = {tenant: served[tenant] / weights[tenant] for tenant in weights}
        for one in weights:
            for other in weights:
                slack = 2 * QUANTUM_TOKENS + largest / weights[one] + largest / weights[other]
                assert shares[one] - shares[other] <= slack, (one, other, weights)


def test_higher_classes_go_first_and_lower_ones_still_move() -> None:
    queue = FairQueue()
    for priority in (5, 0, -5):
        for _ in range(200):
            queue.push(QueuedRequest("a", priority, 10))
    first = [queue.pop() for _ in range(100)]
    counts = Counter(waiting.priority for waiting in first if waiting is not None)
    assert counts == {5: 90, 0: 5, -5: 5}
    assert LOWER_EVERY == 10


def test_a_blocked_tenant_is_passed_over_and_gains_nothing() -> None:
    queue = FairQueue()
    for tenant in ("a", "b"):
        for _ in range(20):
            queue.push(QueuedRequest(tenant, 0, 500))
    for _ in range(10):
        waiting = queue.pop(lambda tenant: tenant == "a")
        assert waiting is not None and waiting.tenant == "b"
    order = [waiting.tenant for waiting in drain(queue)][:8]
    assert order.count("a") <= 5
    assert queue.pop(lambda tenant: True) is None
    queue.push(QueuedRequest("a", 0, 1))
    assert queue.pop(lambda tenant: True) is None and len(queue) == 1


def test_asking_for_much_and_taking_it_back_saves_nothing_up() -> None:
    queue = FairQueue()
    for _ in range(10):
        queue.push(QueuedRequest("honest", 0, 600))
    trick = QueuedRequest("sly", 0, 50_000)
    queue.push(trick)
    for _ in range(10):
        queue.push(QueuedRequest("sly", 0, 600))
    for _ in range(3):
        queue.pop()
    queue.remove(trick)
    order = [waiting.tenant for waiting in drain(queue)][:6]
    assert order.count("honest") >= 2


@pytest.mark.parametrize("num_tenants", [1, 3])
def test_the_laws_hold_whatever_is_done(
    seed: int, scale: Callable[[int], int], num_tenants: int
) -> None:
    rng = random.Random(seed)
    for _ in range(scale(200)):
        queue, held = FairQueue(), list[QueuedRequest]()
        for _ in range(120):
            what = rng.random()
            if what < 0.5:
                waiting = QueuedRequest(
                    f"t{rng.randrange(num_tenants)}",
                    rng.choice([-1, 0, 0, 7]),
                    rng.choice([1, 1, 300, 9_000]),
                    rng.choice([0.01, 1.0, 100.0]),
                )
                queue.push(waiting)
                held.append(waiting)
            elif what < 0.7 and held:
                queue.remove(held.pop(rng.randrange(len(held))))
            else:
                blocked = {f"t{rng.randrange(num_tenants)}"} if rng.random() < 0.3 else set()
                popped = queue.pop(lambda tenant, blocked=blocked: tenant in blocked)
                free = [waiting for waiting in held if waiting.tenant not in blocked]
                assert (popped is None) == (not free)
                if popped is not None:
                    held.remove(popped)
            queue.check_integrity()
            assert len(queue) == len(held)
            longest = queue.longest()
            if held:
                assert longest is not None
                counts = Counter(waiting.tenant for waiting in held)
                assert queue.num_of(longest) == max(counts.values())
                assert queue.newest_of(longest) in held
            else:
                assert longest is None


def test_a_full_pool_is_passed_and_its_requests_keep_their_order(seed: int) -> None:
    rng = random.Random(seed)
    queue, held = FairQueue(), list[QueuedRequest]()
    for _ in range(60):
        waiting = QueuedRequest(
            f"t{rng.randrange(3)}", 0, rng.choice([1, 900]), pool=rng.choice("xy")
        )
        queue.push(waiting)
        held.append(waiting)
    for full in ({"x"}, set[str]()):
        while (popped := queue.pop(full=full)) is not None:
            queue.check_integrity()
            assert popped.pool not in full
            same = (popped.tenant, popped.pool)
            assert popped is next(one for one in held if (one.tenant, one.pool) == same)
            held.remove(popped)
        assert all(one.pool in full for one in held)
        assert queue.num_for == Counter(one.pool for one in held)
    assert not held
