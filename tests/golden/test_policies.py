"""What the router and the autoscaler decide for drawn values, as it was recorded."""

from __future__ import annotations

import pytest

from tests.golden.recorded import check
from tests.harness.policies import ROUTING_POLICIES, routed, scaled

pytestmark = pytest.mark.oracle

NUM_POOLS = 500
"""Of each policy."""
NUM_RUNS, NUM_LOOKS = 12, 42


def test_the_pairs_that_are_chosen() -> None:
    found = {name: list(routed(name, NUM_POOLS)) for name in ROUTING_POLICIES}
    batches = {
        f"{name} {first}": lines[first : first + 10]
        for name, lines in found.items()
        for first in range(0, NUM_POOLS, 10)
    }
    assert sum(len(set(lines)) for lines in found.values()) > NUM_POOLS
    check("pairs", batches)


def test_what_the_plan_decides() -> None:
    lines = list(scaled(NUM_RUNS, NUM_LOOKS))
    runs = (lines[first : first + NUM_LOOKS] for first in range(0, len(lines), NUM_LOOKS))
    check("plans", {f"run {number}": list(run) for number, run in enumerate(runs)})
