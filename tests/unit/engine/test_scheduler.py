"""Who goes first, who may pass whom, who shares a batch, what a step computes and who loses its
blocks: each rule as a property over values; and the orders that come of them in an engine."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.request import RequestState
from engine.scheduler import (
    MAX_PROMPT_ROWS,
    NUM_LOOKED_AT,
    AdmissionResult,
    BatchTraits,
    BlockHolder,
    FreeCapacity,
    RequestQueue,
    RunningSequence,
    SchedulingPolicy,
    WaitingSequence,
    admit,
    admit_ranked,
    choose_victim,
    is_pass,
    may_share_batch,
    plan_step,
    rank,
)
from engine.testing.fake_model import FakeModel
from tests.harness.engines import make_request

policies = st.sampled_from(("fcfs", "priority", "cache_aware"))


def _waiting(order: int, **fields: Any) -> WaitingSequence:
    fields = {"key": (str(order), 0), "priority": 0, "order": order, "num_tokens": 1} | fields
    return WaitingSequence(**fields)


waiting = st.fixed_dictionaries(
    {
        "priority": st.integers(-1, 1),
        "num_tokens": st.integers(1, 20),
        "num_blocks": st.integers(0, 6),
        "num_places": st.integers(1, 3),
        "num_matched_tokens": st.integers(0, 40),
        "num_passes": st.integers(0, 4),
        "is_preempted": st.booleans(),
        "adapter": st.sampled_from(["", "", "x", "y"]),
    }
)
queues = st.lists(waiting, max_size=12).map(
    lambda rows: [_waiting(order, **one) for order, one in enumerate(rows)]
)


rooms = st.builds(
    FreeCapacity,
    num_blocks=st.integers(0, 16),
    num_tokens=st.integers(0, 40),
    batch=st.builds(
        BatchTraits, num_rows=st.integers(0, 4), adapters=st.sets(st.just("x")).map(frozenset)
    ),
    max_num_rows=st.integers(4, 8),
    max_num_adapters=st.integers(0, 2),
)


@given(queue=queues, room=rooms, policy=policies, max_passes=st.integers(0, 4))
def test_who_is_let_in_fits_and_passes_nobody_too_often(
    queue: list[WaitingSequence], room: FreeCapacity, policy: SchedulingPolicy, max_passes: int
) -> None:
    outcome = admit(queue, room, policy, max_passes)
    by_key = {one.key: one for one in queue}
    let_in = [by_key[key] for key in outcome.keys]
    left = [one for one in queue if one.key not in outcome.keys]
    assert len(set(outcome.keys)) == len(outcome.keys)
    assert sum(one.num_blocks for one in let_in) <= room.num_blocks
    assert room.batch.num_rows + sum(one.num_places for one in let_in) <= max(
        room.max_num_rows, room.batch.num_rows
    )
    adapters = room.batch.adapters | {one.adapter for one in let_in if one.adapter}
    if room.max_num_adapters:
        assert len(adapters) <= max(room.max_num_adapters, len(room.batch.adapters))
    # Each who joins gets a token in this very step.
    assert sum(one.num_tokens for one in let_in[:-1]) < max(room.num_tokens, 1)
    for one in left:
        num_passes = outcome.num_passes.get(one.key, 0)
        assert one.num_passes + num_passes <= max(max_passes, one.num_passes)
        passers = [first for first in let_in if is_pass(one, first, policy)]
        free_riders = [first for first in passers if first.num_blocks == 0]
        assert len(passers) - len(free_riders) <= num_passes <= len(passers)
    for one in left:
        if one.is_preempted or one.num_passes >= max_passes:
            assert all(first.num_blocks == 0 for first in let_in if is_pass(one, first, policy)), (
                "only one that takes no blocks may pass one that was passed too often"
            )


@given(queue=queues, room=rooms, policy=policies, max_passes=st.integers(0, 4))
def test_whoever_could_be_let_in_is(
    queue: list[WaitingSequence], room: FreeCapacity, policy: SchedulingPolicy, max_passes: int
) -> None:
    """No room is left idle: the first in order is let in if it fits."""
    outcome = admit(queue, room, policy, max_passes)
    if not queue:
        assert not outcome.keys
        return
    first = min(queue, key=lambda one: rank(one, policy, max_passes))
    fits = (
        room.num_tokens > 0
        and first.num_blocks <= room.num_blocks
        and may_share_batch(
            room.batch,
            num_rows=first.num_places,
            adapter=first.adapter,
            max_num_rows=room.max_num_rows,
            max_num_adapters=room.max_num_adapters,
        )
    )
    passed = [one for one in queue if is_pass(one, first, policy)]
    if fits and all(one.num_passes < max_passes and not one.is_preempted for one in passed):
        assert outcome.keys[0] == first.key


def _admit_looking_at_all(
    queue: list[WaitingSequence], room: FreeCapacity, policy: SchedulingPolicy, max_passes: int
) -> AdmissionResult:
    """The rules, read plainly: everybody who waits may be passed, wherever it stands."""
    remaining = sorted(queue, key=lambda one: rank(one, policy, max_passes))
    lacking: set[object] = set()
    passes: Counter[object] = Counter()
    keys = []
    num_blocks, num_tokens, batch = room.num_blocks, room.num_tokens, room.batch
    for one in list(remaining):
        if num_tokens <= 0 or batch.num_rows >= room.max_num_rows:
            break
        passed = [
            other
            for other in remaining
            if is_pass(other, one, policy) and (one.num_blocks or other.key not in lacking)
        ]
        can_share = may_share_batch(
            batch,
            num_rows=one.num_places,
            adapter=one.adapter,
            max_num_rows=room.max_num_rows,
            max_num_adapters=room.max_num_adapters,
        )
        if can_share and one.num_blocks > num_blocks:
            lacking.add(one.key)
        elif can_share and not any(
            other.is_preempted or other.num_passes + passes[other.key] >= max_passes
            for other in passed
        ):
            passes.update(other.key for other in passed)
            remaining.remove(one)
            keys.append(one.key)
            num_blocks, num_tokens = num_blocks - one.num_blocks, num_tokens - one.num_tokens
            adapters = batch.adapters | ({one.adapter} if one.adapter else set())
            batch = BatchTraits(batch.num_rows + one.num_places, adapters)
    left = {one.key: passes[one.key] for one in remaining if passes[one.key]}
    return AdmissionResult(tuple(keys), left)


@given(queue=queues, room=rooms, policy=policies, max_passes=st.integers(0, 4))
def test_who_stands_behind_the_last_let_in_is_not_looked_at(
    queue: list[WaitingSequence], room: FreeCapacity, policy: SchedulingPolicy, max_passes: int
) -> None:
    """And the outcome is as if all were."""
    expected = _admit_looking_at_all(queue, room, policy, max_passes)
    ranked = sorted(queue, key=lambda one: rank(one, policy, max_passes))
    taken: list[WaitingSequence] = []

    def coming() -> Iterator[WaitingSequence]:
        for one in ranked:
            taken.append(one)
            yield one

    outcome = admit_ranked(coming(), room, policy, max_passes)
    assert outcome == expected == admit(queue, room, policy, max_passes)
    let_in = [one for one in queue if one.key in outcome.keys]
    num_rows = room.batch.num_rows + sum(one.num_places for one in let_in)
    is_full = sum(one.num_tokens for one in let_in) >= room.num_tokens
    if policy != "cache_aware" and (is_full or num_rows >= room.max_num_rows):
        last = outcome.keys[-1:]
        assert [one.key for one in taken[-1:]] == list(last)
    else:
        assert taken == ranked


def test_orders_of_the_policies() -> None:
    queue = [
        _waiting(1),
        _waiting(2, priority=1),
        _waiting(3, num_matched_tokens=8),
        _waiting(4, num_matched_tokens=16),
        _waiting(5, num_passes=9),
        _waiting(6, is_preempted=True),
    ]

    def order(policy: SchedulingPolicy) -> list[int]:
        return [one.order for one in sorted(queue, key=lambda one: rank(one, policy, 9))]

    assert order("fcfs") == [6, 1, 2, 3, 4, 5]
    assert order("priority") == [2, 6, 1, 3, 4, 5]
    assert order("cache_aware") == [2, 6, 5, 4, 3, 1]


def test_a_later_one_that_fits_passes_until_the_head_is_aged() -> None:
    room = FreeCapacity(3, 100, BatchTraits(0, frozenset()), 100)
    head = _waiting(1, num_blocks=5)
    for num_passes in range(3):
        aged = head._replace(num_passes=num_passes)
        outcome = admit([aged, _waiting(2, num_blocks=1)], room, "fcfs", max_passes=2)
        assert outcome.keys == ((("2", 0),) if num_passes < 2 else ())
        assert outcome.num_passes == ({("1", 0): 1} if num_passes < 2 else {})
    # One that has its blocks already is no competition for them.
    outcome = admit([aged, _waiting(2, num_blocks=0)], room, "fcfs", max_passes=2)
    assert outcome.keys == (("2", 0),) and outcome.num_passes == {}


def test_the_cold_do_not_starve_behind_a_stream_of_the_warm(
    seed: int, scale: Callable[[int], int]
) -> None:
    """Warm requests keep coming; the cold one goes after at most max_passes of them."""
    for index in range(scale(200)):
        rng = random.Random(f"{seed} {index}")
        max_passes = rng.randint(0, 12)
        queue = [_waiting(0, num_tokens=5)]
        order = num_before = 0
        while queue and queue[0].order == 0:
            for _ in range(rng.randint(1, 3)):
                order += 1
                queue.append(_waiting(order, num_matched_tokens=rng.randint(4, 64)))
            room = FreeCapacity(8, 100, BatchTraits(0, frozenset()), rng.randint(1, 3))
            outcome = admit(queue, room, "cache_aware", max_passes)
            assert outcome.keys
            if (("0", 0)) not in outcome.keys:
                num_before += len(outcome.keys)
            queue = [
                one._replace(num_passes=one.num_passes + outcome.num_passes.get(one.key, 0))
                for one in queue
                if one.key not in outcome.keys
            ]
        assert num_before <= max_passes


@given(
    rows=st.integers(0, 8),
    more=st.integers(1, 8),
    adapters=st.sets(st.sampled_from("xyz")).map(frozenset),
    adapter=st.sampled_from(["", "x", "y", "z"]),
    bound=st.integers(0, 3),
)
def test_what_shares_a_batch(
    rows: int, more: int, adapters: frozenset[str], adapter: str, bound: int
) -> None:
    may = may_share_batch(
        BatchTraits(rows, adapters),
        num_rows=more,
        adapter=adapter,
        max_num_rows=8,
        max_num_adapters=bound,
    )
    num_adapters = len((adapters | {adapter}) - {""})
    is_new = bool(adapter) and adapter not in adapters
    assert may == (rows + more <= 8 and not (is_new and bound and num_adapters > bound))


@given(
    rows=st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 9), st.integers(0, 2))),
    policy=policies,
)
def test_the_victim_matters_least(
    rows: list[tuple[int, int, int]], policy: SchedulingPolicy
) -> None:
    holders = [
        BlockHolder((f"{order} {priority}", sample), priority, order)
        for priority, order, sample in rows
    ]
    victim = choose_victim(holders, policy)
    if victim is None:
        assert not holders
        return
    (one,) = {holder for holder in holders if holder.key == victim}
    for other in holders:
        if policy != "fcfs":
            assert one.priority <= other.priority
        if policy == "fcfs" or one.priority == other.priority:
            assert one.order >= other.order


def test_passes_are_counted_once_for_each_who_goes_first() -> None:
    queue = [_waiting(i, num_matched_tokens=10 * i) for i in range(4)]
    room = FreeCapacity(8, 100, BatchTraits(0, frozenset()), 2)
    outcome = admit(queue, room, "cache_aware", max_passes=5)
    assert outcome.keys == (("3", 0), ("2", 0))
    assert Counter(outcome.num_passes) == Counter({("0", 0): 2, ("1", 0): 2})


# -- what a step computes


def _candidate(order: int, pending: int, drawn: bool, priority: int = 0) -> RunningSequence:
    return RunningSequence((str(order), 0), pending, drawn, priority, order)


rows = st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(-1, 1)), max_size=20)
policies = st.sampled_from(("fcfs", "priority", "cache_aware"))


@given(rows=rows, budget=st.integers(1, 64), bound=st.integers(0, 20), policy=policies)
def test_a_plan_keeps_its_promises(
    rows: list[tuple[int, bool, int]], budget: int, bound: int, policy: SchedulingPolicy
) -> None:
    candidates = [_candidate(i, *row) for i, row in enumerate(rows)]
    budget = max(budget, len(candidates))  # the engine lets no more in
    plan = plan_step(candidates, num_tokens_budget=budget, max_num_tokens_each=bound, policy=policy)
    by_key = {c.key: c for c in candidates}
    assert sum(plan.values()) <= budget
    assert all(1 <= n <= by_key[key].num_pending_tokens for key, n in plan.items())
    assert all(c.key in plan for c in candidates if c.has_drawn)
    assert list(plan) == sorted(plan, key=lambda key: not by_key[key].has_drawn)
    if bound:
        assert all(n <= bound for key, n in plan.items() if not by_key[key].has_drawn)
    if candidates:
        assert plan
    prompts = [by_key[key] for key in plan if not by_key[key].has_drawn]
    ranks = [(0 if policy == "fcfs" else -c.priority, c.order) for c in prompts]
    assert ranks == sorted(ranks)
    cut = [
        key
        for key, n in plan.items()
        if n < min(by_key[key].num_pending_tokens, bound or budget) and not by_key[key].has_drawn
    ]
    assert cut in ([], list(plan)[-1:])  # only the last is cut by the budget
    if len(plan) < len(candidates):
        assert sum(plan.values()) == budget


PLANS: dict[str, tuple[list[Any], dict[str, Any], list[tuple[int, int]]]] = {
    # rows of _candidate; limits; (order, number of tokens) as planned
    "decodes before prompts, prompts in order": (
        [(1, 30, False), (2, 9, False), (3, 1, True), (4, 9, False)],
        {"num_tokens_budget": 40},
        [(3, 1), (1, 30), (2, 9)],
    ),
    "a higher priority, but not before decodes": (
        [(1, 30, False), (2, 5, False, 7), (3, 1, True, -5)],
        {"num_tokens_budget": 16},
        [(3, 1), (2, 5), (1, 10)],
    ),
    "no priorities": (
        [(1, 30, False), (2, 5, False, 7), (3, 1, True, -5)],
        {"num_tokens_budget": 16, "policy": "fcfs"},
        [(3, 1), (1, 15)],
    ),
    "a bound lets prompts advance together": (
        [(order, 30, False) for order in range(4)],
        {"num_tokens_budget": 20, "max_num_tokens_each": 8},
        [(0, 8), (1, 8), (2, 4)],
    ),
    "forced text of one leaves every other decode its token": (
        [(0, 9, True), (1, 1, True), (2, 1, True), (3, 1, True)],
        {"num_tokens_budget": 8},
        [(0, 5), (1, 1), (2, 1), (3, 1)],
    ),
}


@pytest.mark.parametrize(("rows", "limits", "expected"), PLANS.values(), ids=PLANS)
def test_plans(rows: list[Any], limits: dict[str, Any], expected: list[tuple[int, int]]) -> None:
    plan = plan_step([_candidate(*row) for row in rows], **limits)
    assert [(int(key[0]), num_tokens) for key, num_tokens in plan.items()] == expected


def test_rows_of_logits_of_a_step_are_bounded() -> None:
    """Where log probabilities of prompts are asked for."""
    rows = [_candidate(order, 1000, False) for order in range(3)]
    rows[:2] = [row._replace(is_scored=True) for row in rows[:2]]
    assert plan_step(rows, num_tokens_budget=2000) == {("0", 0): MAX_PROMPT_ROWS, ("2", 0): 1000}


def test_the_short_way_is_the_same_plan(seed: int, scale: Callable[[int], int]) -> None:
    rng = random.Random(seed)
    num_short = 0
    for _ in range(scale(200)):
        running = rng.randint(1, 4)
        config = EngineConfig(
            num_blocks=400,
            max_num_tokens_per_step=rng.randint(4, 12),
            max_num_running=running,
            max_num_tokens_per_request_step=rng.randint(0, 3),
            policy=rng.choice(["fcfs", "priority"]),
        )
        engine = LLMEngine(config, FakeModel(context_window=64))
        scheduler = engine._scheduler
        for number in range(rng.randint(1, 6)):
            prompt = tuple(rng.randrange(1, 97) for _ in range(rng.randint(1, 9)))
            fields = {"max_tokens": rng.randint(1, 12), "num_samples": rng.randint(1, running)}
            engine.reserve(make_request(str(number), prompt, **fields))
            engine.start(str(number))
        while engine.has_work():
            candidates = [
                RunningSequence(
                    key,
                    one.num_pending_tokens,
                    one.state is RequestState.RUNNING,
                    0,
                    one.group.order,
                )
                for key, one in scheduler.running.items()
            ]
            expected = plan_step(
                candidates,
                num_tokens_budget=config.max_num_tokens_per_step,
                max_num_tokens_each=config.max_num_tokens_per_request_step,
                policy=scheduler._policy,
            )
            assert list(scheduler._plan().items()) == list(expected.items())
            num_short += bool(candidates) and all(one.has_drawn for one in candidates)
            engine.step()
        engine.check_integrity()
    assert num_short > 10


# -- the line


def _sequence(
    number: int, order: int, priority: int, state: RequestState = RequestState.QUEUED
) -> Any:
    """As much of one as a line looks at."""
    return SimpleNamespace(
        key=(str(number), 0),
        group=SimpleNamespace(order=order),
        request=SimpleNamespace(priority=priority),
        state=state,
    )


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_it_is_that_of_rank(policy: SchedulingPolicy, seed: int) -> None:
    """Those of three kinds; who came first may join the line last (its grammar took its time)."""
    rng = random.Random(f"line {seed}")
    config = EngineConfig(num_blocks=16, policy=policy)
    for _ in range(20):
        scheduler = LLMEngine(config, FakeModel(block_size=4, context_window=64))._scheduler
        orders = rng.sample(range(100), 40)
        waiting = []
        for number, order in enumerate(orders):
            kind = rng.choice(
                [
                    RequestState.QUEUED,
                    RequestState.WAITING,
                    RequestState.PREEMPTED,
                    RequestState.PARKED,
                ]
            )
            one = _sequence(number, order, rng.randint(-1, 1), kind)
            if kind is RequestState.QUEUED:
                scheduler.queued.add(one)
            elif kind is RequestState.WAITING:
                scheduler.waiting[one.key] = one
            else:
                scheduler.preempted[one.key] = one
            is_preempted = kind in (RequestState.PREEMPTED, RequestState.PARKED)
            waiting.append(
                WaitingSequence(one.key, one.request.priority, order, 1, is_preempted=is_preempted)
            )
        ranked = sorted(waiting, key=lambda one: rank(one, policy, 3))
        assert [one.key for one in scheduler.next_in_line()] == [one.key for one in ranked]


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans())), st.booleans(), st.integers(0, 9))
def test_a_line_is_a_sorted_list(
    comings: list[tuple[int, bool]], has_priorities: bool, num: int
) -> None:
    line, model = RequestQueue(has_priorities=has_priorities), list[Any]()
    for number, (priority, leaves) in enumerate(comings):
        one = _sequence(number, number, priority)
        line.add(one)
        model.append(one)
        if leaves:
            gone = model.pop(number % len(model))
            assert line.pop(gone.key) is gone
            assert line.pop(gone.key) is None
    model.sort(key=lambda one: (-one.request.priority * has_priorities, one.group.order))
    assert list(line.first(num)) == model[:num]
    assert len(line) == len(model) == len(dict(line.items()))
    assert all(one.key in line and line[one.key] is one for one in model)


def test_a_higher_priority_passes_any_backlog() -> None:
    config = EngineConfig(num_blocks=64, max_num_tokens_per_step=16, max_num_running=2)
    engine = LLMEngine(config, FakeModel())
    for number in range(NUM_LOOKED_AT + 50):
        engine.submit(make_request(str(number), (1, 2), max_tokens=2))
    engine.step()
    engine.submit(make_request("urgent", (1, 2), max_tokens=2, priority=5))
    names = [event.request_id for _ in range(3) for event in engine.step().events]
    assert "urgent" in names


# -- cache-aware order
# Longest matched prefix first is depth-first over the radix tree of the prompts (Zheng et al. 2024,
# theorem 3.1): with a cache as large as the longest request, nothing is computed twice. A block is
# an edge of `block_size` tokens, what follows a prompt's last full block an edge of its own. As in
# the proof, requests run one at a time; no prompt ends on a block's border (its last token is
# always computed); and no request is aged.


SIZE = 4


def _prompts(rng: random.Random) -> list[tuple[int, ...]]:
    """A random tree of prompts, some of them prefixes of others, in random order."""
    trunks: list[list[int]] = [[]]
    for _ in range(rng.randint(2, 14)):
        base = rng.choice(trunks)
        keep = rng.randint(0, len(base))
        trunks.append(base[:keep] + [rng.randrange(1, 97) for _ in range(rng.randint(1, 24))])
    prompts = [tuple(one[:60]) for one in trunks[1:]]
    prompts = [one if len(one) % SIZE else (*one, 5) for one in prompts]
    rng.shuffle(prompts)
    return prompts


def _num_edge_tokens(prompts: list[tuple[int, ...]]) -> int:
    """The sum over the tree's edges."""
    blocks = {
        prompt[: end + SIZE] for prompt in prompts for end in range(0, len(prompt) - SIZE + 1, SIZE)
    }
    return len(blocks) * SIZE + sum(len(prompt) % SIZE for prompt in prompts)


def _num_computed(
    prompts: list[tuple[int, ...]], num_blocks: int, policy: str, rng: random.Random
) -> tuple[int, list[str]]:
    config = EngineConfig(
        num_blocks=num_blocks,
        max_num_tokens_per_step=rng.randint(1, 64),
        max_num_running=1,
        policy=policy,
        max_passes=10_000,
    )
    engine = LLMEngine(config, FakeModel(context_window=num_blocks * SIZE, block_size=SIZE))
    for index, prompt in enumerate(prompts):
        engine.submit(make_request(f"{index}", prompt, max_tokens=1))
    order = []
    while engine.has_work():
        order += [event.request_id for event in engine.step().events if event.token_ids]
        engine.check_integrity()
    assert len(order) == len(prompts)
    num_computed = engine.stats().num_computed_tokens
    hit_rate = 1 - num_computed / sum(map(len, prompts))  # as defined there
    assert engine.metrics().hit_rate == pytest.approx(hit_rate)
    return num_computed, order


def test_cache_aware_order_computes_each_edge_once(seed: int, scale: Callable[[int], int]) -> None:
    num_worse = 0
    for index in range(scale(400)):
        rng = random.Random(f"{seed} {index}")
        prompts = _prompts(rng)
        longest = max(map(len, prompts))
        num_blocks = longest // SIZE + 1
        computed, _ = _num_computed(prompts, num_blocks, "cache_aware", rng)
        assert computed == _num_edge_tokens(prompts), (seed, index)
        in_order, _ = _num_computed(prompts, num_blocks, "fcfs", rng)
        assert in_order >= computed
        num_worse += in_order > computed
    assert num_worse > 0  # the order matters: first come first served computes more


def test_the_cold_go_after_at_most_max_passes_of_the_warm() -> None:
    for max_passes in (0, 1, 3):
        config = EngineConfig(
            num_blocks=64, max_num_running=1, policy="cache_aware", max_passes=max_passes
        )
        engine = LLMEngine(config, FakeModel(context_window=256, block_size=SIZE))
        warm = tuple(range(1, 18))
        engine.submit(make_request("first", warm, max_tokens=1))
        engine.step()
        engine.submit(make_request("cold", (90, 91, 92), max_tokens=1))
        order: list[str] = []
        for index in range(8):
            engine.submit(make_request(f"{index}", warm, max_tokens=1))
            order += [event.request_id for event in engine.step().events if event.token_ids]
        assert order.index("cold") == max_passes
