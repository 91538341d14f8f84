"""Tokens for a step, as properties over values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler import RunningSequence, SchedulingPolicy, plan_step


def _candidate(order: int, pending: int, drawn: bool, priority: int) -> RunningSequence:
    return RunningSequence(
        key=(str(order), 0),
        num_pending_tokens=pending,
        has_drawn=drawn,
        priority=priority,
        order=order,
    )


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


def test_decodes_come_before_prompts_and_prompts_in_order() -> None:
    candidates = [
        _candidate(1, 30, False, 0),
        _candidate(2, 9, False, 0),
        _candidate(3, 1, True, 0),
        _candidate(4, 9, False, 0),
    ]
    plan = plan_step(candidates, num_tokens_budget=40)
    assert list(plan.items()) == [(("3", 0), 1), (("1", 0), 30), (("2", 0), 9)]


def test_a_higher_priority_prompt_goes_first_but_not_before_decodes() -> None:
    candidates = [
        _candidate(1, 30, False, 0),
        _candidate(2, 5, False, 7),
        _candidate(3, 1, True, -5),
    ]
    plan = plan_step(candidates, num_tokens_budget=16)
    assert list(plan.items()) == [(("3", 0), 1), (("2", 0), 5), (("1", 0), 10)]
    plan = plan_step(candidates, num_tokens_budget=16, policy="fcfs")
    assert list(plan.items()) == [(("3", 0), 1), (("1", 0), 15)]


def test_a_bound_lets_prompts_advance_together() -> None:
    candidates = [_candidate(i, 30, False, 0) for i in range(4)]
    plan = plan_step(candidates, num_tokens_budget=20, max_num_tokens_each=8)
    assert list(plan.values()) == [8, 8, 4]


def test_forced_text_of_one_leaves_every_other_decode_its_token() -> None:
    candidates = [_candidate(i, 9 if i == 0 else 1, True, 0) for i in range(4)]
    assert list(plan_step(candidates, num_tokens_budget=8).values()) == [5, 1, 1, 1]
