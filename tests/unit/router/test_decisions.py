"""The record of choices: bounded, by request, and able to say what was weighed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.router.placement import FIRST, MAX_CANDIDATES, PlacementDecision, PlacementLog
from services.router.policies import PlacementQuery, Pools, make
from services.router.prefixes import FoundPrefixes
from tests.unit.router.pools import COSTS, load

ASK = PlacementQuery(num_prompt_tokens=160, max_tokens=17, affinity=b"a")
POOLS = Pools.of([load(f"p{i}") for i in range(12)], [load(f"d{i}") for i in range(12)], COSTS)


def _decision(occasion: str = FIRST, turn: int = 0) -> PlacementDecision:
    policy = make("joint", COSTS)
    ask = replace(ASK, turn=turn)
    return PlacementDecision(occasion, policy, POOLS, ask, policy.choose(POOLS, ask), 1e-4, 1000.0)


def test_the_oldest_request_is_forgotten_first() -> None:
    decisions = PlacementLog(3)
    for number in range(5):
        decisions.add("t", f"r{number}", _decision(turn=number))
        decisions.check_integrity()
    assert decisions.find("r1") is None
    found = decisions.find("r2")
    assert found is not None and found[0] == ("t", "r2")
    latest = decisions.find()
    assert latest is not None and latest[0] == ("t", "r4")


def test_of_one_request_the_first_and_the_last_choices_are_kept() -> None:
    decisions = PlacementLog(3)
    decisions.add("t", "r", _decision(turn=0))
    for turn in range(1, 30):
        decisions.add("t", "r", _decision("decode refused", turn))
        decisions.check_integrity()
    found = decisions.find("r")
    assert found is not None
    turns = [decision.ask.turn for decision in found[1]]
    assert turns[0] == 0 and turns[1:] == list(range(23, 30))


def test_another_attempt_of_the_same_id_begins_anew() -> None:
    decisions = PlacementLog(3)
    for turn in range(2):
        decisions.add("t", "r", _decision(turn=turn))
    found = decisions.find("r", "t")
    assert found is not None and [d.ask.turn for d in found[1]] == [1]


def test_tenants_do_not_meet() -> None:
    decisions = PlacementLog(3)
    decisions.add("a", "r", _decision(turn=1))
    decisions.add("b", "r", _decision(turn=2))
    for tenant, turn in (("a", 1), ("b", 2), ("", 2)):
        found = decisions.find("r", tenant)
        assert found is not None and found[1][0].ask.turn == turn
    assert decisions.find("r", "c") is None


def test_a_long_prompts_hashes_are_not_kept_and_change_nothing() -> None:
    layout = POOLS.prefill[0].layout
    prefixes = FoundPrefixes({layout: {"s": 3}}, chains={layout: [b"h" * 32] * 9})
    made = _decision()
    made = replace(made, ask=replace(ASK, prefixes=prefixes))
    decisions = PlacementLog(3)
    decisions.add("t", "r", made)
    found = decisions.find("r")
    assert found is not None and found[1][0].ask.prefixes.held == prefixes.held
    assert not found[1][0].ask.prefixes.chains and made.ask.prefixes.chains
    assert found[1][0].weighed() == made.weighed()


def test_what_was_weighed_is_bounded_and_names_the_winner() -> None:
    decision = _decision()
    rows = decision.weighed()
    assert len(rows) == 2 * MAX_CANDIDATES
    chosen = {row.worker_id for row in rows if row.is_chosen}
    assert chosen == {decision.choice.prefill_id, decision.choice.decode_id}
    attributes = decision.attributes()
    assert attributes["baton.choice.prefill"] == decision.choice.prefill_id
    whys = [value for name, value in attributes.items() if name.startswith("baton.choice.why.")]
    assert sum(float(why) for why in whys) == pytest.approx(decision.choice.cost)
