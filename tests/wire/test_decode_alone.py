"""A decode worker that computes the prompt itself: real workers of the small bundled model, against
one engine that serves the whole request."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.loop import load_engine
from protos import common_pb2, decode_pb2
from tests.harness.bundled_pair import MODEL, NUM_TOKENS, PROMPT, Workers, alone, workers
from tests.harness.prefill_decode_pair import RouterStream, Sample

pytestmark = pytest.mark.usefixtures("one_compile_process")

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Tom"]}, "likes_soup": {"type": "boolean"}},
        "required": ["name", "likes_soup"],
        "additionalProperties": False,
    }
)


WAIT_S = 60.0
"""A grammar is compiled beside everything else, which takes seconds on a machine that is busy."""


async def _generate(
    pair: Workers, name: str, *, budget_ms: int = 20_000, **sampling: Any
) -> tuple[dict[int, Sample], Any]:
    """All samples, and the worker's last word."""
    fields = pair.fields(PROMPT, name, "", "", **sampling)
    stream = RouterStream(pair.stubs[1].Stream())
    samples: dict[int, Sample] = {}
    try:
        key = await stream.reserve(decode_pb2.ReserveDecode(budget_ms=budget_ms, **fields))
        event = await stream.next(key, WAIT_S)
        assert event.WhichOneof("event") == "reserved", event
        command = decode_pb2.GenerateFromHandle(computes_prompt=True)
        for _ in range(sampling.get("n", 1) if sampling.get("n", 1) > 1 else 0):
            command.outputs.add()
        await stream.generate_from(key, command)
        while not event.HasField("finished"):
            event = await stream.next(key, WAIT_S)
            assert event.WhichOneof("event") in ("tokens", "finished"), event
            part = event.finished if event.HasField("finished") else event.tokens
            samples.setdefault(part.sample_index, Sample()).add(part)
    finally:
        await stream.close()
    return samples, event.finished


def _close(found: list[Any], expected: list[Any]) -> bool:
    """Whether the log probabilities are those: the same tokens, and numbers that other chunks of
    the same prompt may round otherwise."""
    entries = [
        [entry for step in steps for entry in (step.chosen, *step.top)]
        for steps in (found, expected)
    ]
    same_tokens = [e.token_id for e in entries[0]] == [e.token_id for e in entries[1]]
    return same_tokens and all(
        math.isclose(a.logprob, b.logprob, abs_tol=1e-3) for a, b in zip(*entries, strict=True)
    )


ASKED: tuple[dict[str, Any], ...] = (
    {"logprobs": 3},
    {"temperature": 0.9, "seed": 7, "n": 3, "logprobs": 2},
    {"json_schema": SCHEMA, "temperature": 0.9, "seed": 3, "max_tokens": 60},
    {"regex": r"(once|twice), [a-z]{2,6}\.", "n": 3, "temperature": 0.8, "logprobs": 2},
)


async def test_grammars_and_log_probabilities_begin_with_its_own_first_token(
    tmp_path: Path,
) -> None:
    """Both begin before the first output token, which no prefill worker draws here: drawn, masked
    and told by decode as by one engine, also when a part of the prompt is there."""
    engine = load_engine(EngineConfig(model=MODEL, device="cpu", kv_bytes=8 * 1024 * 1024))
    try:
        expected = [alone(engine, **{"max_tokens": NUM_TOKENS, **asked}) for asked in ASKED]
    finally:
        engine.close()
    async with workers(tmp_path) as pair:
        for number, (asked, samples) in enumerate(zip(ASKED, expected, strict=True)):
            assert all(sample.token_ids for sample in samples)
            for name in ("first", "again"):
                options = {"max_tokens": NUM_TOKENS, "budget_ms": 90_000, **asked}
                found, _ = await _generate(pair, f"{name}-{number}", **options)
                for index, sample in enumerate(samples):
                    ours = found[index]
                    assert (ours.token_ids, ours.finish_reason) == (
                        sample.token_ids,
                        sample.finish_reason,
                    ), asked
                    assert bool(ours.logprobs) == ("logprobs" in asked)
                    assert _close(ours.logprobs, sample.logprobs)
        await pair.check()


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "seed": 7}, {"temperature": 0.9, "seed": 7, "n": 3}]
)
async def test_decode_alone_draws_what_one_engine_draws(
    tmp_path: Path, sampling: dict[str, Any]
) -> None:
    """Greedy, sampled and several samples: the first token of each is decode's, too. Nothing of the
    prompt was to be had elsewhere, so nothing is told as missing."""
    options = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}
    engine = load_engine(EngineConfig(model=MODEL, device="cpu", kv_bytes=8 * 1024 * 1024))
    expected = alone(engine, **options)
    async with workers(tmp_path) as pair:
        for name in ("first", "again"):
            samples, finished = await _generate(pair, name, **options)
            for index, sample in enumerate(expected):
                assert samples[index].token_ids == sample.token_ids
            assert finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
            leg = finished.leg
            assert not leg.recomputed and not leg.from_store
            assert leg.num_tokens_computed + leg.num_tokens_local == len(PROMPT)
        assert leg.num_tokens_local == 16  # the second time its first block was there
        await pair.check()
