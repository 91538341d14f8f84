"""What is told of a prompt is what one plain pass of unmodified transformers says, whatever the
chunks, beside decodes and other prompts, and after a prefix hit: its log probabilities, and its
embedding, which is the last hidden state at length 1."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.engine import LLMEngine
from engine.errors import InvalidRequest
from engine.outputs import PositionLogprobs, RequestOutput
from engine.request import Beam, Request
from tests.harness.engines import all_events, block_hash
from tests.harness.models import Tiny
from tests.parity.conftest import DEVICES, ROUTES, endless, prompts_of

NUM_TOP = 5
LENGTHS = [1, 2, 15, 16, 17, 33, 100, 170]

Get = Callable[[str], Tiny]


@pytest.fixture
def tiny(family: str, decoder: str, get_tiny: Get, get_wide: Get) -> Tiny:
    return get_wide(family) if decoder == "own" else get_tiny(family)


def _finish(engine: LLMEngine) -> list[RequestOutput]:
    events = list(all_events(engine))
    assert all(event.error is None for event in events)
    assert engine.stats().num_referenced_blocks == 0
    return events


def _embeddings(
    engine: LLMEngine, prompts: dict[str, list[int]], wanted: set[str]
) -> dict[str, torch.Tensor]:
    """The others decode a few tokens."""
    for name, prompt in prompts.items():
        wants = name in wanted
        sampling = endless(1 if wants else 6)
        engine.submit(Request(name, tuple(prompt), sampling, block_hash, wants_embedding=wants))
    found: dict[str, torch.Tensor] = {}
    for event in _finish(engine):
        has_one = event.request_id in wanted and bool(event.token_ids)
        assert (event.embedding is not None) == has_one
        if event.embedding is not None:
            found[event.request_id] = torch.tensor(event.embedding)
    return found


def _expected_embedding(tiny: Tiny, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        output = tiny.oracle(torch.tensor([prompt]), output_hidden_states=True)
    return torch.nn.functional.normalize(output.hidden_states[-1][0, -1].float(), dim=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "decoder"), ROUTES)
def test_an_embedding_is_the_last_hidden_state(
    tiny: Tiny, decoder: str, device: str, load: Callable[..., LLMEngine], seed: int
) -> None:
    prompts = prompts_of(random.Random(seed), LENGTHS)
    wanted = {name for name in prompts if int(name) % 3 != 2}
    fields = {"max_num_tokens_per_step": 48, "max_num_running": 16}
    engine = load(tiny.path, decoder=decoder, device=device, dtype="float32", **fields)
    for _ in ("computed", "found in the cache"):
        found = _embeddings(engine, prompts, wanted)
        assert found.keys() == wanted
        for name, embedding in found.items():
            expected = _expected_embedding(tiny, prompts[name])
            torch.testing.assert_close(embedding, expected, rtol=0, atol=3e-5, msg=name)
    engine.close()


@pytest.mark.parametrize("decoder", ["own", "transformers"])
def test_over_a_quantized_cache_an_embedding_is_near(
    decoder: str, get_tiny: Get, load: Callable[..., LLMEngine], seed: int
) -> None:
    """Random weights make small errors large: the bound is on the angle, and loose."""
    tiny, prompts = get_tiny("qwen3"), prompts_of(random.Random(seed), [75])
    engine = load(tiny.path, decoder=decoder, dtype="float32", kv_dtype="int8")
    found = _embeddings(engine, prompts, {"0"})["0"]
    assert float(found @ _expected_embedding(tiny, prompts["0"])) > 0.99
    engine.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"num_samples": 2}, "one sample"), ({"beam": Beam(2)}, "without beams")],
)
def test_what_does_not_go_with_an_embedding_is_refused(
    changes: dict[str, Any], said: str, get_tiny: Get, load: Callable[..., LLMEngine]
) -> None:
    engine = load(get_tiny("llama").path)
    request = Request("a", (1, 2), endless(1), block_hash, wants_embedding=True, **changes)
    with pytest.raises(InvalidRequest, match=f"wants_embedding.*{said}"):
        engine.reserve(request)
    engine.close()


def _logprobs(
    engine: LLMEngine, prompts: dict[str, list[int]], scored: set[str]
) -> dict[str, list[PositionLogprobs]]:
    """Of those that are to be scored; all of them decode a few tokens, too."""
    for name, prompt in prompts.items():
        sampling = endless(4, logprobs=1 if name in scored else None)
        wanted = NUM_TOP if name in scored else None
        engine.submit(Request(name, tuple(prompt), sampling, block_hash, prompt_logprobs=wanted))
    found: dict[str, list[PositionLogprobs]] = {}
    for event in _finish(engine):
        if event.prompt_logprobs:
            found.setdefault(event.request_id, []).extend(event.prompt_logprobs)
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "decoder"), ROUTES)
def test_log_probabilities_are_those_of_a_plain_pass(
    tiny: Tiny, decoder: str, device: str, load: Callable[..., LLMEngine], seed: int
) -> None:
    prompts = prompts_of(random.Random(seed), LENGTHS)
    scored = {name for name in prompts if int(name) % 4 != 2}
    for budget in (24, 400):
        fields = {"max_num_tokens_per_step": budget, "max_num_running": 16}
        engine = load(tiny.path, decoder=decoder, device=device, dtype="float32", **fields)
        for _ in ("computed", "in the cache"):
            found = _logprobs(engine, prompts, scored)
            assert found.keys() == scored
            for name in scored:
                _check_logprobs(tiny, prompts[name], found[name])
        engine.close()


def _check_logprobs(tiny: Tiny, prompt: list[int], found: list[PositionLogprobs]) -> None:
    with torch.inference_mode():
        logits = tiny.oracle(torch.tensor([prompt])).logits[0]
    expected = torch.log_softmax(logits.float(), dim=-1)
    assert [one.token_id for one in found] == prompt
    assert math.isnan(found[0].logprob) and not found[0].top
    for place, one in enumerate(found[1:]):
        row = expected[place]
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        assert [value for _, value in one.top] == pytest.approx(
            row.topk(NUM_TOP).values.tolist(), abs=1e-4
        )
        for token_id, value in one.top:
            assert value == pytest.approx(float(row[token_id]), abs=1e-4)
