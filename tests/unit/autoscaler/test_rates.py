"""How many requests workers carry: ascending in workers, descending in targets, and right where it
can be reckoned another way."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.autoscaler import capacity_model
from services.autoscaler.capacity_model import Capacity, Rates, rates_of, wait_s
from services.autoscaler.config import PoolLimits, Priors, ScaleLimits, Targets
from services.autoscaler.signals import ByRole, Role

PRIORS = Priors()
LIMITS = ScaleLimits(PoolLimits(1, 16), PoolLimits(1, 16))


def rates(priors: Priors = PRIORS, targets: Targets | None = None) -> Rates:
    return rates_of(Capacity.believed(priors), targets or Targets(), LIMITS, priors)


@settings(max_examples=50)
@given(
    st.floats(10, 1e6),
    st.floats(1e-4, 1.0),
    st.floats(1e-6, 0.1),
    st.integers(1, 100_000),
    st.integers(1, 10_000),
    st.floats(0.01, 100),
    st.floats(0.001, 10),
    st.floats(0.01, 0.999),
)
def test_more_workers_carry_more_and_a_need_is_its_inverse(
    tokens_per_s: float,
    step_s: float,
    stream_s: float,
    num_prompt: int,
    num_output: int,
    ttft_s: float,
    tpot_s: float,
    quantile: float,
) -> None:
    priors = replace(
        PRIORS,
        prefill_tokens_per_s=tokens_per_s,
        decode_step_s=step_s,
        decode_stream_s=stream_s,
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
    )
    found = rates(priors, Targets(ttft_s, tpot_s, quantile))
    for role in Role:
        table = found.table.of(role)
        assert table[0] == 0.0
        assert all(low < high for low, high in itertools.pairwise(table))
        for num in (1, 5, 16):
            assert found.needed(role, table[num]) == num
            assert found.needed(role, table[num] * 1.001) == num + 1
        assert found.needed(role, 0.0) == 0
        needs = [found.needed(role, table[-1] * share / 10) for share in range(40)]
        assert needs == sorted(needs)


def test_looser_targets_need_no_more_workers() -> None:
    strict, loose = rates(targets=Targets(0.3, 0.02)), rates(targets=Targets(3.0, 0.2))
    for role in Role:
        for num in range(17):
            assert loose.of(role, num) >= strict.of(role, num)


def erlang_wait_share(num: int, load: float) -> float:
    """The exact probability of waiting of M/M/N (Erlang's C formula)."""
    terms = [load**k / math.factorial(k) for k in range(num)]
    last = load**num / math.factorial(num) * num / (num - load)
    return last / (sum(terms) + last)


@pytest.mark.parametrize("num", [1, 2, 4, 8])
@pytest.mark.parametrize("utilisation", [0.6, 0.8, 0.9])
def test_waits_are_those_of_the_exact_queue(num: int, utilisation: float) -> None:
    """Exponential prompts: the quantile of the wait is known. Sakasegawa's error is a few per
    cent of a service time."""
    share = 0.9
    waits = erlang_wait_share(num, num * utilisation)
    exact = 0.0
    if waits > 1 - share:
        exact = math.log(waits / (1 - share)) / (num * (1 - utilisation))
    assert wait_s(num, utilisation, 1.0, share) == pytest.approx(exact, abs=0.25, rel=0.1)


def test_decode_workers_are_reckoned_by_littles_law() -> None:
    """At the rate of the table so many streams run that a step takes no longer than it may."""
    found = rates()
    capacity = Capacity.believed(PRIORS)
    rate = found.of(Role.DECODE, 4)
    streams = PRIORS.max_num_running / 2
    for _ in range(200):  # a fixed point: streams = rate * tokens * time of a step
        streams = rate / 4 * PRIORS.num_output_tokens * capacity.decode.step_s(streams)
    assert streams <= found.bounds.max_batch
    assert streams == pytest.approx(found.bounds.max_batch, rel=0.15)
    assert found.bounds.batch_by == "max_num_running"


def test_blocks_bound_the_batch_where_they_are_few() -> None:
    capacity = replace(Capacity.believed(PRIORS), num_blocks=1000)
    capacity = replace(capacity, stream_blocks=capacity.stream_blocks.add(1000, 10))
    found = rates_of(capacity, Targets(), LIMITS, PRIORS)
    assert found.bounds.batch_by == "blocks"
    assert found.bounds.max_batch == pytest.approx(8)


def test_a_target_that_cannot_be_met_is_said_and_does_not_ask_for_the_moon() -> None:
    found = rates(targets=Targets(ttft_s=0.01, tpot_s=0.001))
    assert len(found.bounds.problems) == 2
    assert found.of(Role.PREFILL, 1) > 1
    assert found.of(Role.DECODE, 1) > 0.1


@settings(max_examples=50)
@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 3), st.integers(1, 3), st.data())
def test_the_best_pair_is_the_best_of_all_that_are_allowed(
    most_prefill: int, most_decode: int, per_prefill: int, per_decode: int, data: st.DataObject
) -> None:
    """Beside trying them all."""
    prefill = PoolLimits(1, most_prefill, per_prefill)
    decode = PoolLimits(1, most_decode, per_decode)
    budget = data.draw(st.integers(per_prefill + per_decode, 40))
    limits = ScaleLimits(prefill, decode, budget)
    found = rates_of(Capacity.believed(PRIORS), Targets(), limits, PRIORS)
    every = [
        ByRole(p, d)
        for p in range(1, most_prefill + 1)
        for d in range(1, most_decode + 1)
        if p * per_prefill + d * per_decode <= budget
    ]
    assert capacity_model.most_carried(found, limits) == max(found.carried(pair) for pair in every)
    assert capacity_model.num_pairs(limits) == (most_prefill * most_decode, len(every))


def test_a_move_is_told_only_where_it_gains_more_than_the_slack() -> None:
    table = ByRole((0.0, 10.0, 20.0, 30.0, 40.0, 50.0), (0.0, 8.0, 16.0, 24.0, 32.0, 40.0))
    found = Rates(table, rates().bounds)
    limits = ScaleLimits(PoolLimits(1, 5), PoolLimits(1, 5), 6)
    assert capacity_model.move_that_helps(ByRole(4, 2), found, limits, slack=0.2) == (
        Role.DECODE,
        ByRole(3, 3),
    )
    # 24 a second either way
    assert capacity_model.move_that_helps(ByRole(3, 3), found, limits, slack=0.2) is None
    assert capacity_model.move_that_helps(ByRole(4, 2), found, limits, slack=0.6) is None


def test_workers_are_added_where_they_let_most_through(seed: int) -> None:
    rng = random.Random(seed)
    found = rates()
    for _ in range(50):
        before = ByRole(rng.randint(1, 4), rng.randint(1, 4))
        needed = ByRole(rng.randint(1, 16), rng.randint(1, 16))
        free, most = rng.randint(0, 8), rng.randint(0, 8)
        grown = capacity_model.grown_pair(
            before, needed, found, LIMITS, free_devices=free, most=most
        )
        added = grown.map(lambda role, num, b=before: num - b.of(role))
        lack = before.map(lambda role, num, n=needed: max(0, n.of(role) - num))
        assert added.prefill + added.decode == min(free, most, lack.prefill + lack.decode)
        assert all(0 <= added.of(role) <= lack.of(role) for role in Role)
