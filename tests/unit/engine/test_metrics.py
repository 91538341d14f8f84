"""Metrics with a clock that the test moves."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.errors import IntegrityError
from engine.metrics import RATE_WINDOW_S, REQUEST_BOUNDS_S, EngineMetrics, Histogram
from engine.request import FinishReason
from tests.harness.waiting import Clock


def make() -> tuple[EngineMetrics, Clock]:
    clock = Clock(1000.0)
    return EngineMetrics(clock, num_blocks=100), clock


def test_one_request_from_reserve_to_end() -> None:
    metrics, clock = make()
    metrics.on_reserve("a", num_prompt_tokens=100, num_cached_tokens=32)
    clock.now_s += 0.5  # somebody loads blocks: no queue time, but time to the first token
    metrics.on_start("a", num_loaded_tokens=16)
    clock.now_s += 0.25
    metrics.on_first_scheduled("a")
    clock.now_s += 0.25
    metrics.on_tokens("a")
    for _ in range(4):
        clock.now_s += 0.125
        metrics.on_tokens("a")
    metrics.on_finish("a", FinishReason.EOS)
    clock.now_s += 5.0  # held until somebody has read its blocks
    metrics.on_end("a", "finished")
    metrics.check_integrity()
    seen = metrics.snapshot()
    assert (seen.queue_s.count, seen.queue_s.sum) == (1, 0.25)
    assert (seen.ttft_s.count, seen.ttft_s.sum) == (1, 1.0)
    assert (seen.itl_s.count, seen.itl_s.sum) == (4, 0.5)
    assert (seen.tpot_s.count, seen.tpot_s.sum) == (1, 0.125)
    assert (seen.num_output_tokens, seen.num_loaded_tokens) == (5, 16)
    assert seen.hit_rate == 0.32
    assert seen.finished == (("eos", 1),) and seen.ended == (("finished", 1),)
    assert (seen.num_requests, seen.num_live_requests) == (1, 0)


def test_forced_tokens_come_as_one_interval_and_count_for_the_time_per_token() -> None:
    metrics, clock = make()
    metrics.on_reserve("a", 10, 0)
    metrics.on_start("a")
    metrics.on_tokens("a", 2)
    clock.now_s += 1.0
    metrics.on_tokens("a", 4)
    metrics.on_finish("a", FinishReason.GRAMMAR)
    seen = metrics.snapshot()
    assert (seen.itl_s.count, seen.itl_s.sum) == (1, 1.0)
    assert seen.tpot_s.sum == 0.25
    assert seen.num_output_tokens == 6


def test_a_request_whose_first_token_came_from_elsewhere_has_no_ttft() -> None:
    metrics, clock = make()
    metrics.on_reserve("a", 10, 0)
    metrics.on_start("a", num_earlier_tokens=1)
    clock.now_s += 1.0
    metrics.on_tokens("a")
    metrics.on_finish("a", FinishReason.LENGTH)
    seen = metrics.snapshot()
    assert (seen.ttft_s.count, seen.itl_s.count, seen.tpot_s.count) == (0, 0, 0)
    metrics.check_integrity()


def test_samples_of_one_request_are_timed_apart() -> None:
    metrics, clock = make()
    metrics.on_reserve("a", 10, 0)
    metrics.on_start("a")
    for gap, sample_index in ((0.5, 0), (0.5, 1), (1.0, 0), (2.0, 1)):
        clock.now_s += gap
        metrics.on_tokens("a", sample_index=sample_index)
    for sample_index in (0, 1):
        metrics.on_finish("a", FinishReason.LENGTH, sample_index=sample_index)
    seen = metrics.snapshot()
    assert (seen.ttft_s.count, seen.ttft_s.sum) == (1, 0.5)
    assert (seen.itl_s.count, seen.itl_s.sum) == (2, 1.5 + 3.0)
    assert seen.tpot_s.count == 2
    metrics.check_integrity()


def test_a_preempted_request_waits_once() -> None:
    metrics, clock = make()
    metrics.on_reserve("a", 10, 0)
    metrics.on_start("a")
    clock.now_s += 1.0
    metrics.on_first_scheduled("a")
    metrics.on_preempt("blocks")
    clock.now_s += 9.0
    metrics.on_first_scheduled("a")
    seen = metrics.snapshot()
    assert (seen.queue_s.count, seen.queue_s.sum) == (1, 1.0)
    assert seen.preemptions == (("blocks", 1),)


def test_throughput_is_of_the_last_seconds() -> None:
    metrics, clock = make()
    for _ in range(30):
        clock.now_s += 1.0
        metrics.on_step(100, 8, 0.5, num_used_blocks=40)
    metrics.on_step(0, 0, 0.5, num_used_blocks=25)
    seen = metrics.snapshot()
    assert seen.prefill_tokens_per_s == 100.0 and seen.decode_tokens_per_s == 8.0
    assert (seen.num_prefill_tokens, seen.num_decode_tokens) == (3000, 240)
    assert (seen.cache_utilisation, seen.max_used_blocks) == (0.25, 40)
    clock.now_s += RATE_WINDOW_S
    assert metrics.snapshot().prefill_tokens_per_s == 0.0
    assert len(metrics._steps) == 0


def test_throughput_of_a_young_engine_is_over_its_life() -> None:
    metrics, clock = make()
    assert metrics.snapshot().prefill_tokens_per_s == 0.0
    clock.now_s += 2.0
    metrics.on_step(100, 8, 0.5, num_used_blocks=40)
    assert metrics.snapshot().prefill_tokens_per_s == 50.0


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.0, 1.0, 1.5, 2.0, 2.5, 99.0):
        histogram.observe(value)
    seen = histogram.snapshot()
    assert seen.counts == (2, 2, 2)
    assert (seen.quantile(0.0), seen.quantile(0.3), seen.quantile(0.5)) == (1.0, 1.0, 2.0)
    assert seen.quantile(1.0) == float("inf")
    assert seen.mean == 106.0 / 6
    empty = Histogram((1.0,)).snapshot()
    assert (empty.mean, empty.quantile(0.5)) == (0.0, 0.0)


def test_any_life_keeps_the_law(seed: int, scale: Callable[[int], int]) -> None:
    rng = random.Random(seed)
    for _ in range(scale(100)):
        metrics, clock = make()
        live: list[str] = []
        for number in range(60):
            clock.now_s += rng.random()
            action = rng.randrange(5)
            if action == 0 or not live:
                live.append(str(number))
                num_prompt = rng.randint(1, 50)
                metrics.on_reserve(live[-1], num_prompt, rng.randint(0, num_prompt - 1))
                metrics.on_start(live[-1], num_earlier_tokens=rng.randint(0, 1))
                continue
            name, sample = rng.choice(live), rng.randrange(3)
            if action == 1:
                metrics.on_first_scheduled(name)
            elif action == 2:
                metrics.on_tokens(name, rng.randint(1, 3), sample_index=sample)
            elif action == 3:
                metrics.on_finish(name, rng.choice(list(FinishReason)), sample_index=sample)
            else:
                live.remove(name)
                metrics.on_end(name, rng.choice(["finished", "aborted", "InvalidLogits"]))
            metrics.check_integrity()
            seen = metrics.snapshot()
            assert seen.num_live_requests == len(live)
            assert 0.0 <= seen.hit_rate < 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("_num_output_tokens", 7),
        ("_num_requests", 3),
        ("_num_draws", 9),
        ("_num_cached_tokens", 11),
        ("_num_finished_without_tpot", 2),
    ],
)
def test_integrity_notices_a_miscount(name: str, value: int) -> None:
    """check_integrity must be able to fail."""
    metrics, _ = make()
    metrics.on_reserve("a", 10, 4)
    metrics.on_start("a")
    metrics.on_tokens("a")
    metrics.check_integrity()
    setattr(metrics, name, value)
    with pytest.raises(IntegrityError, match="metrics"):
        metrics.check_integrity()


def test_integrity_notices_a_bucket_that_lost_a_count() -> None:
    metrics, clock = make()
    metrics.on_reserve("a", 10, 4)
    metrics.on_start("a")
    clock.now_s += REQUEST_BOUNDS_S[3]
    metrics.on_tokens("a")
    metrics._ttft.counts[3] -= 1
    with pytest.raises(IntegrityError, match="buckets"):
        metrics.check_integrity()
