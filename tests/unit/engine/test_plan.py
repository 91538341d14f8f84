"""The scheduler's policy, as properties over values."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.schedule.step import Candidate, plan_step


def _candidate(order: int, pending: int, drawn: bool, admitted: bool, priority: int) -> Candidate:
    return Candidate(
        request_id=str(order),
        num_pending_tokens=1 if drawn else pending,
        has_drawn=drawn,
        is_admitted=admitted or drawn,
        priority=priority,
        order=order,
    )


rows = st.lists(
    st.tuples(st.integers(1, 40), st.booleans(), st.booleans(), st.integers(-1, 1)), max_size=20
)


@given(rows=rows, budget=st.integers(1, 64), places=st.integers(1, 64))
def test_a_plan_keeps_its_promises(
    rows: list[tuple[int, bool, bool, int]], budget: int, places: int
) -> None:
    candidates = [_candidate(i, *row) for i, row in enumerate(rows)]
    places = min(places, budget)
    num_admitted = sum(c.is_admitted for c in candidates)
    if num_admitted > places:  # the engine never gets there: it admits by this very plan
        places = num_admitted
        budget = max(budget, places)
    plan = plan_step(candidates, num_tokens_budget=budget, max_num_running=places)
    by_id = {c.request_id: c for c in candidates}
    assert sum(plan.values()) <= budget
    assert all(1 <= n <= by_id[i].num_pending_tokens for i, n in plan.items())
    assert all(c.request_id in plan for c in candidates if c.has_drawn)
    assert num_admitted + sum(not by_id[i].is_admitted for i in plan) <= places
    cut = [i for i, n in plan.items() if n < by_id[i].num_pending_tokens]
    assert len(cut) <= 1 and cut == list(plan)[-1:][: len(cut)]  # only the last is cut
    if candidates:
        assert plan
    left_out = [c for c in candidates if c.request_id not in plan]
    if left_out and sum(plan.values()) < budget:  # only places can have kept them out
        assert all(not c.is_admitted for c in left_out)
        assert num_admitted + sum(not by_id[i].is_admitted for i in plan) == places


def test_decodes_come_before_prompts_and_prompts_in_order() -> None:
    candidates = [
        _candidate(1, 30, False, True, 0),
        _candidate(2, 9, False, False, 0),
        _candidate(3, 1, True, True, 0),
        _candidate(4, 9, False, False, 0),
    ]
    plan = plan_step(candidates, num_tokens_budget=40, max_num_running=8)
    assert plan == {"3": 1, "1": 30, "2": 9}


def test_a_higher_priority_prompt_goes_first_but_not_before_decodes() -> None:
    candidates = [
        _candidate(1, 30, False, False, 0),
        _candidate(2, 5, False, False, 7),
        _candidate(3, 1, True, True, -5),
    ]
    plan = plan_step(candidates, num_tokens_budget=16, max_num_running=8)
    assert list(plan.items()) == [("3", 1), ("2", 5), ("1", 10)]
