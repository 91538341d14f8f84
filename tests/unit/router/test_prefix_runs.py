"""Runs over the union of stores: in order, without gaps, home first, as far as anybody's prefix."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from services.router.prefixes import FoundPrefixes, StoreRun, plan_runs, to_hints
from services.router.worker_views import StoreView

NODES = ("a", "b", "c", "d", "e")

held_by_node = st.dictionaries(st.sampled_from(NODES), st.integers(0, 12))
distances = st.fixed_dictionaries(
    {node: st.sampled_from([0.0, 1.0, 2.0, math.inf]) for node in NODES}
)


@given(held=held_by_node, home=st.sampled_from(NODES), distance=distances)
def test_runs_cover_the_longest_prefix_without_gaps_home_first(
    held: Mapping[str, int], home: str, distance: Mapping[str, float]
) -> None:
    runs = plan_runs(held, home, distance.__getitem__)
    # In order and without gaps, from block 0.
    end = 0
    for run in runs:
        assert run.first_block == end and run.num_blocks > 0
        end += run.num_blocks
        # Who is asked holds it: presence is prefix-closed.
        assert held[run.node_id] >= end
    # As far as anybody reaches from whom something may be fetched.
    usable = [n for node, n in held.items() if node == home or distance[node] < math.inf]
    assert end == max(usable, default=0)
    # Home first, with all it has; nobody is asked twice.
    num_home = held.get(home, 0)
    assert (StoreRun(home, 0, num_home) in runs) == (num_home > 0)
    assert [run.node_id for run in runs[1:]].count(home) == 0 and len(runs) <= 2
    # The nearest of those that reach as far.
    if runs and runs[-1].node_id != home:
        far = runs[-1].node_id
        others = [node for node, n in held.items() if n == held[far] and node != home]
        assert distance[far] == min(distance[node] for node in others)


@given(held=held_by_node, home=st.sampled_from(NODES), distance=distances)
def test_every_router_plans_the_same(
    held: Mapping[str, int], home: str, distance: Mapping[str, float]
) -> None:
    """Whatever the order in which the stores are known."""
    backwards = dict(reversed(held.items()))
    rank = distance.__getitem__
    assert plan_runs(held, home, rank) == plan_runs(backwards, home, rank)


@given(held=held_by_node)
def test_without_a_store_of_its_own_a_worker_fetches_nothing(held: Mapping[str, int]) -> None:
    assert plan_runs(held, "", lambda _: 0.0) == ()


def test_hints_name_the_life_that_the_index_was_asked_about() -> None:
    stores = {
        "a": StoreView("a", "127.0.0.1:1", "aa" * 16),
        "b": StoreView("b", "127.0.0.1:2", "bb" * 16),
    }
    first, second = to_hints([StoreRun("a", 0, 2), StoreRun("b", 2, 3)], stores)
    assert (first.node_id, first.store_address) == ("a", "127.0.0.1:1")
    assert (first.store_incarnation, first.num_blocks) == (b"\xaa" * 16, 2)
    assert (second.node_id, second.first_block, second.num_blocks) == ("b", 2, 3)


def test_hints_end_at_a_store_that_is_not_known() -> None:
    stores = {"b": StoreView("b", "127.0.0.1:2", "bb" * 16)}
    assert to_hints([StoreRun("a", 0, 2), StoreRun("b", 2, 3)], stores) == ()


def test_prefixes_of_a_layout_that_was_not_asked_are_empty() -> None:
    prefixes = FoundPrefixes({("f", 16): {"a": 1}})
    assert prefixes.of(("f", 16)) == {"a": 1} and prefixes.of(("f", 8)) == {}
