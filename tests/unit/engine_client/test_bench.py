"""Benchmarks measure what they say: so many prompts, of such lengths, and honest quantiles."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.testing.fake_model import FakeModel
from engine_client import bench
from engine_client.in_process import InProcessClient
from engine_client.llm import ClientLLM
from process.rpc_errors import InvalidArgument


@pytest.fixture
def llm() -> Iterator[ClientLLM]:
    engine = LLMEngine(EngineConfig(num_blocks=400, max_num_running=8), FakeModel())
    with ClientLLM(InProcessClient(engine)) as made:
        yield made


def test_latency_measures_the_rounds_after_the_warm_up(llm: ClientLLM) -> None:
    told: list[tuple[int, int]] = []
    result = bench.latency(
        llm,
        batch=3,
        num_input_tokens=10,
        num_output_tokens=5,
        num_warm_up=1,
        num_rounds=4,
        on_progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(done, 5) for done in range(1, 6)]
    assert result.ttft.num == 12 and result.total.num == 4
    assert result.itl is not None and result.itl.num == 48
    assert 0 < result.ttft.p50_ms <= result.ttft.p99_ms <= result.total.p99_ms
    stats = llm.stats()[0]
    assert stats.num_output_tokens == 5 * 3 * 5
    assert stats.num_local_prefix_tokens == 0, "the prefix cache must not help"


def test_throughput_counts_what_was_done(llm: ClientLLM) -> None:
    result = bench.throughput(llm, num_prompts=20, num_input_tokens=12, num_output_tokens=6)
    assert (result.num_prompts, result.num_input_tokens, result.num_output_tokens) == (20, 240, 120)
    assert result.output_tokens_per_s == pytest.approx(120 / result.seconds, rel=0.01)
    assert result.requests_per_s == pytest.approx(20 / result.seconds, rel=0.01)
    assert result.ttft.num == 20 and result.tpot is not None and result.tpot.num == 20
    spread = bench.throughput(
        llm, num_prompts=30, num_input_tokens=12, num_output_tokens=6, spread=0.5
    )
    assert 30 * 6 <= spread.num_input_tokens <= 30 * 18
    assert 30 * 3 <= spread.num_output_tokens <= 30 * 9


def test_what_is_out_of_range_is_named(llm: ClientLLM) -> None:
    for values, field in (
        ({"batch": 0}, "batch"),
        ({"num_rounds": 0}, "num_rounds"),
        ({"num_input_tokens": 0}, "num_input_tokens"),
        ({"num_input_tokens": 250}, "num_input_tokens"),
        ({"num_output_tokens": 0}, "num_output_tokens"),
    ):
        lengths = {"num_input_tokens": 10, "num_output_tokens": 10} | values
        with pytest.raises(InvalidArgument) as caught:
            bench.latency(llm, **lengths)
        assert caught.value.field == field
    with pytest.raises(InvalidArgument, match=r"^spread: "):
        bench.throughput(llm, num_input_tokens=10, num_output_tokens=10, spread=1.0)
