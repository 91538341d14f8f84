"""Who goes first, who may pass whom, who shares a batch, who loses its blocks: each rule as a
property over values."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler import (
    AdmissionResult,
    BatchTraits,
    BlockHolder,
    FreeCapacity,
    SchedulingPolicy,
    WaitingSequence,
    admit,
    admit_ranked,
    choose_victim,
    is_pass,
    may_share_batch,
    rank,
)

policies = st.sampled_from(("fcfs", "priority", "cache_aware"))


def _waiting(order: int, **fields: object) -> WaitingSequence:
    base: dict[str, object] = {
        "key": (str(order), 0),
        "priority": 0,
        "order": order,
        "num_tokens": 1,
    }
    return WaitingSequence(**(base | fields))  # type: ignore[arg-type]


@st.composite
def _queues(draw: st.DrawFn) -> list[WaitingSequence]:
    fields = st.fixed_dictionaries(
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
    return [_waiting(order, **one) for order, one in enumerate(draw(st.lists(fields, max_size=12)))]


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


@given(queue=_queues(), room=rooms, policy=policies, max_passes=st.integers(0, 4))
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


@given(queue=_queues(), room=rooms, policy=policies, max_passes=st.integers(0, 4))
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


@given(queue=_queues(), room=rooms, policy=policies, max_passes=st.integers(0, 4))
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
