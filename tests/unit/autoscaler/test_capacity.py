"""What is learned of workers and requests: soon, robustly, and not forgotten by a quiet night."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.autoscaler.capacity_model import (
    CLIP,
    MOST_SHARE_CACHED,
    Capacity,
    Mean,
    StepLine,
    learn,
)
from services.autoscaler.config import Priors
from services.autoscaler.signals import ByRole, Role, Work
from tests.unit.autoscaler.looks import STEP_S, STREAM_S, TOKENS_PER_S, look, traffic

PRIORS = Priors()


def after(looks: int, rate: float = 5.0, workers: ByRole[int] | None = None) -> Capacity:
    capacity = Capacity.believed(PRIORS)
    for index in range(looks):
        seen = look(index * 5.0, workers or ByRole(1, 1), rate)
        capacity = learn(capacity, seen, stale_s=15.0)
    return capacity


def test_before_anything_was_seen_it_believes_the_settings_and_says_so() -> None:
    capacity = Capacity.believed(PRIORS)
    assert 1 / capacity.token_s.value == pytest.approx(PRIORS.prefill_tokens_per_s)
    assert capacity.decode.line == (PRIORS.decode_step_s, PRIORS.decode_stream_s)
    assert capacity.uncached_tokens == pytest.approx(PRIORS.num_prompt_tokens)
    assert len(capacity.missing) == 5


def test_a_few_looks_outweigh_the_settings() -> None:
    capacity = after(6)
    assert not capacity.missing
    assert 1 / capacity.token_s.value == pytest.approx(TOKENS_PER_S, rel=0.01)
    assert capacity.prompt_tokens.value == pytest.approx(1000, rel=0.02)
    assert capacity.output_tokens.value == pytest.approx(200, rel=0.02)


def test_settings_that_are_a_hundred_times_off_cost_looks_only() -> None:
    priors = replace(PRIORS, prefill_tokens_per_s=1e6, decode_step_s=1.0, decode_stream_s=0.01)
    capacity = Capacity.believed(priors)
    for index in range(24):
        capacity = learn(capacity, look(index * 5.0, ByRole(1, 1), 5.0), stale_s=15.0)
    assert 1 / capacity.token_s.value == pytest.approx(TOKENS_PER_S, rel=0.1)
    batch = capacity.decode.points[0][1].batch
    assert capacity.decode.step_s(batch) == pytest.approx(STEP_S + STREAM_S * batch, rel=0.1)


def test_the_line_of_decode_steps_is_found_from_several_batch_sizes() -> None:
    line = StepLine(PRIORS.decode_step_s, PRIORS.decode_stream_s)
    rng = random.Random(7)
    for _ in range(200):
        batch = rng.choice([2, 8, 20, 40])
        line = line.add(batch, (STEP_S + STREAM_S * batch) * rng.uniform(0.9, 1.1), 4.0)
    a, b = line.line
    assert a == pytest.approx(STEP_S, rel=0.1) and b == pytest.approx(STREAM_S, rel=0.2)


def test_what_one_worker_showed_alone_is_known_when_two_share_the_load() -> None:
    """Else the second one is taken away and comes back, for ever: found by the property test."""
    line = StepLine(PRIORS.decode_step_s, PRIORS.decode_stream_s)
    for _ in range(10):
        line = line.add(56, STEP_S + STREAM_S * 56, 5.0)
    for _ in range(200):
        line = line.add(18, STEP_S + STREAM_S * 18, 5.0)
    assert line.step_s(56) == pytest.approx(STEP_S + STREAM_S * 56, rel=0.05)


def test_of_one_batch_size_alone_the_prior_says_how_steep_the_line_is() -> None:
    line = StepLine(0.01, 0.001)
    for _ in range(20):
        line = line.add(10, 0.04, 5.0)  # twice as slow as believed
    assert line.step_s(10) == pytest.approx(0.04)
    assert line.step_s(30) == pytest.approx(0.08, rel=0.01)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 5000), st.floats(1e-6, 100), st.floats(1e-3, 1e4)), max_size=40
    )
)
def test_a_step_always_takes_time_and_more_with_more_streams(
    steps: list[tuple[float, float, float]],
) -> None:
    line = StepLine(PRIORS.decode_step_s, PRIORS.decode_stream_s)
    for batch, step_s, weight_s in steps:
        line = line.add(batch, step_s, weight_s)
    a, b = line.line
    assert a > 0 and b > 0


def test_a_machine_that_stood_still_for_a_moment_is_no_slow_machine() -> None:
    capacity = after(12)
    before_s = capacity.token_s.value
    stuck = look(100.0, ByRole(1, 1), 5.0)
    (worker,) = stuck.pools.prefill.workers
    worker = replace(worker, work=replace(worker.work, step_s=worker.work.step_s * 1000))
    pools = stuck.pools.but(Role.PREFILL, replace(stuck.pools.prefill, workers=(worker,)))
    capacity = learn(capacity, replace(stuck, pools=pools), stale_s=15.0)
    assert capacity.token_s.value < before_s * CLIP


def test_a_lasting_change_is_believed() -> None:
    mean = Mean.believed(1.0, 10.0, 100.0)
    for _ in range(50):
        mean = mean.add(10.0, 10.0)
    for _ in range(50):
        mean = mean.add(500.0, 10.0)
    assert mean.value == pytest.approx(50.0, rel=0.05)


def test_a_quiet_night_teaches_nothing_and_forgets_nothing() -> None:
    capacity = after(12)
    quiet = look(0.0, ByRole(1, 1), 0.0)
    idle = tuple(replace(w, work=Work(), num_running=0) for w in quiet.pools.decode.workers)
    none = tuple(replace(w, work=Work()) for w in quiet.pools.prefill.workers)
    pools = ByRole(
        replace(quiet.pools.prefill, workers=none), replace(quiet.pools.decode, workers=idle)
    )
    later = capacity
    for _ in range(5000):
        later = learn(later, replace(quiet, pools=pools), stale_s=15.0)
    assert later == capacity


def test_what_a_stale_worker_says_is_not_learned() -> None:
    capacity = Capacity.believed(PRIORS)
    seen = look(0.0, ByRole(1, 1), 5.0, traffic=None)
    old = seen.pools.map(
        lambda _, pool: replace(
            pool, workers=tuple(replace(worker, age_s=16.0) for worker in pool.workers)
        )
    )
    after_all = learn(capacity, replace(seen, pools=old), stale_s=15.0)
    assert replace(after_all, num_blocks=0) == capacity


def test_prompts_that_decode_computes_itself_are_no_slow_steps() -> None:
    seen = look(0.0, ByRole(1, 1), 5.0)
    (worker,) = seen.pools.decode.workers
    plain = learn(after(12), seen, stale_s=15.0).decode
    mixed = replace(
        worker.work,
        num_computed_tokens=worker.work.num_computed_tokens + 2000,
        step_s=worker.work.step_s + 2000 / TOKENS_PER_S,
    )
    decode = replace(seen.pools.decode, workers=(replace(worker, work=mixed),))
    other = replace(seen, pools=seen.pools.but(Role.DECODE, decode))
    assert learn(after(12), other, stale_s=15.0).decode.line == pytest.approx(plain.line, rel=0.02)


def test_cached_prompts_cost_less_but_never_nothing() -> None:
    capacity = Capacity.believed(PRIORS)
    for index in range(40):
        asked = traffic(10.0)
        asked = replace(asked, num_cached_tokens=asked.num_prompt_tokens * 2)  # nonsense, bounded
        seen = look(index * 5.0, ByRole(1, 1), 10.0, traffic=asked)
        capacity = learn(capacity, seen, stale_s=15.0)
    assert 0.95 < capacity.cached.value <= 1.0
    assert capacity.uncached_tokens == pytest.approx(1000 * (1 - MOST_SHARE_CACHED), rel=0.05)


def test_blocks_are_those_of_the_smallest_worker_and_what_streams_hold() -> None:
    seen = look(0.0, ByRole(1, 2), 8.0)
    one, two = seen.pools.decode.workers
    decode = replace(
        seen.pools.decode, workers=(one, replace(two, num_blocks=5_000, num_free_blocks=4_700))
    )
    capacity = learn(
        Capacity.believed(PRIORS),
        replace(seen, pools=seen.pools.but(Role.DECODE, decode)),
        stale_s=15.0,
    )
    assert capacity.num_blocks == 5_000
    assert capacity.stream_blocks.value == pytest.approx(75)
