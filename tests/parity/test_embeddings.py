"""A prompt's embedding == the last hidden state of unmodified transformers, at length 1: beside
decodes and other prompts, in chunks, after a prefix hit, over a quantized cache about so."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.engine import LLMEngine
from engine.errors import InvalidRequest
from engine.request import Beam, Request, Sampling
from tests.harness.engines import all_events, block_hash
from tests.harness.models import VOCAB_SIZE, Tiny

DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]
SMALL_STEPS = {"max_num_tokens_per_step": 48, "max_num_running": 16}
CASES = [
    ("llama", "transformers"),
    ("mistral-window", "transformers"),
    ("llama", "own"),
    ("qwen3", "own"),
]


def _expected(tiny: Tiny, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        output = tiny.oracle(torch.tensor([prompt]), output_hidden_states=True)
    return torch.nn.functional.normalize(output.hidden_states[-1][0, -1].float(), dim=0)


def _ask(engine: LLMEngine, requests: dict[str, tuple[list[int], bool]]) -> dict[str, torch.Tensor]:
    """Embeddings by id of those that want one; the others decode a few tokens."""
    for name, (prompt, wants) in requests.items():
        sampling = Sampling(max_tokens=1 if wants else 6, ignore_eos=True)
        engine.reserve(Request(name, tuple(prompt), sampling, block_hash, wants_embedding=wants))
        engine.start(name)
    found: dict[str, torch.Tensor] = {}
    for event in all_events(engine):
        assert event.error is None
        wants = requests[event.request_id][1]
        assert (event.embedding is not None) == (wants and bool(event.token_ids))
        if event.embedding is not None:
            found[event.request_id] = torch.tensor(event.embedding)
    assert engine.stats().num_referenced_blocks == 0
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("family", "decoder"), CASES)
def test_it_is_the_last_hidden_state(
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
    engine = load(tiny.path, decoder=decoder, device=device, dtype="float32", **SMALL_STEPS)
    lengths = [1, 15, 16, 17, 33, 100, 170]
    prompts = {
        f"{index}": [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]
        for index, length in enumerate(lengths)
    }
    asked = {name: (prompt, int(name) % 3 != 2) for name, prompt in prompts.items()}
    for _ in ("computed", "found in the cache"):
        found = _ask(engine, asked)
        assert found.keys() == {name for name, (_, wants) in asked.items() if wants}
        for name, embedding in found.items():
            torch.testing.assert_close(
                embedding, _expected(tiny, prompts[name]), rtol=0, atol=3e-5, msg=name
            )
    engine.close()


def test_over_a_quantized_cache_it_is_near(
    get_tiny: Callable[[str], Tiny], load: Callable[..., LLMEngine], seed: int
) -> None:
    """Random weights make small errors large: the bound is on the angle, and loose."""
    tiny, rng = get_tiny("qwen3"), random.Random(seed)
    prompt = [rng.randrange(2, VOCAB_SIZE) for _ in range(75)]
    for decoder in ("own", "transformers"):
        engine = load(tiny.path, decoder=decoder, dtype="float32", kv_dtype="int8")
        found = _ask(engine, {"a": (prompt, True)})["a"]
        assert float(found @ _expected(tiny, prompt)) > 0.99
        engine.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"num_samples": 2}, "one sample"), ({"beam": Beam(2)}, "without beams")],
)
def test_what_does_not_go_with_it_is_refused(
    changes: dict[str, Any],
    said: str,
    get_tiny: Callable[[str], Tiny],
    load: Callable[..., LLMEngine],
) -> None:
    engine = load(get_tiny("llama").path)
    request = Request(
        "a", (1, 2), Sampling(max_tokens=1), block_hash, wants_embedding=True, **changes
    )
    with pytest.raises(InvalidRequest, match=f"wants_embedding.*{said}"):
        engine.reserve(request)
    engine.close()
