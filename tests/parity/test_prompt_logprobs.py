"""Log probabilities of a prompt == log_softmax over one plain pass of unmodified transformers:
whatever the chunks, beside decodes and other prompts, and with the whole prompt in the prefix
cache."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch

from engine.engine import LLMEngine
from engine.outputs import PositionLogprobs
from engine.request import Request, Sampling
from tests.harness.engines import all_events, block_hash
from tests.harness.models import VOCAB_SIZE, Tiny

DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]
CASES = [
    ("llama", "transformers"),
    ("mistral-window", "transformers"),
    ("llama", "own"),
    ("qwen3", "own"),
]
NUM_TOP = 5


def _ask(
    engine: LLMEngine, prompts: dict[str, list[int]], scored: set[str]
) -> dict[str, list[PositionLogprobs]]:
    """Of those that are to be scored; all of them decode a few tokens, too."""
    for name, prompt in prompts.items():
        sampling = Sampling(max_tokens=4, ignore_eos=True, logprobs=1 if name in scored else None)
        wanted = NUM_TOP if name in scored else None
        engine.reserve(Request(name, tuple(prompt), sampling, block_hash, prompt_logprobs=wanted))
        engine.start(name)
    found: dict[str, list[PositionLogprobs]] = {}
    for event in all_events(engine):
        assert event.error is None
        if event.prompt_logprobs:
            found.setdefault(event.request_id, []).extend(event.prompt_logprobs)
    assert engine.stats().num_referenced_blocks == 0
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "decoder"), CASES)
def test_they_are_those_of_a_plain_pass(
    family: str,
    decoder: str,
    device: str,
    get_tiny: Callable[[str], Tiny],
    get_wide: Callable[[str], Tiny],
    load: Callable[..., LLMEngine],
    seed: int,
) -> None:
    tiny = get_wide(family) if decoder == "own" else get_tiny(family)
    rng = random.Random(seed)
    prompts = {
        str(index): [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]
        for index, length in enumerate([1, 2, 16, 17, 33, 100, 170])
    }
    scored = {name for name in prompts if int(name) % 4 != 2}
    for num_tokens in (24, 48, 400):
        engine = load(
            tiny.path,
            decoder=decoder,
            device=device,
            dtype="float32",
            max_num_tokens_per_step=num_tokens,
            max_num_running=16,
        )
        for _ in ("computed", "in the cache"):
            found = _ask(engine, prompts, scored)
            assert found.keys() == scored
            for name in scored:
                _check(tiny, prompts[name], found[name])
        engine.close()


def _check(tiny: Tiny, prompt: list[int], found: list[PositionLogprobs]) -> None:
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
