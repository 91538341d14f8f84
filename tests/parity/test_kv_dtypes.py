"""Whatever the KV cache stores, output is a function of the request: not of the chunks its prompt
came in, of prefix hits, batch-mates, other samples, or of being preempted and brought back.

Quantized bytes follow the model's float32 numbers, which differ in the last bit between batch
shapes: where a number lies on the border between two steps, one byte may differ. So a first
difference is allowed where the two best tokens were nearly a tie, and nowhere else; without
quantization none is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.engine import LLMEngine
from engine.request import Request, Sampling
from tests.conftest import LONG, third
from tests.harness.engines import all_events, block_hash
from tests.harness.models import VOCAB_SIZE, Tiny

AS_NUMBERS = [("float32", "block"), ("bfloat16", "block")]
QUANTIZED = [
    (dtype, scale) for dtype in ("int8", "fp8_e4m3") for scale in ("tensor", "block", "token_head")
]
CHOSEN = third(QUANTIZED)
NUM_OUTPUT = 24 if LONG else 16
LENGTHS = [1, 7, 8, 9, 15, 31, 33, 100]
"""In this order the first six begin together and then outgrow 18 blocks."""
TIE = 0.05
"""In natural-log probability. Random models' best two tokens are about 1 apart."""

Outputs = dict[tuple[str, int], list[tuple[int, float]]]
"""(request, sample) -> (token, how far ahead of the second best it was) by position."""


def _run(engine: LLMEngine, requests: dict[str, Request]) -> Outputs:
    for request in requests.values():
        engine.submit(request)
    outputs: Outputs = {}
    for event in all_events(engine):
        assert event.error is None
        place = outputs.setdefault((event.request_id, event.sample_index), [])
        for one in event.logprobs or ():
            place.append((one.token_id, one.top[0][1] - one.top[1][1]))
    assert engine.stats().num_referenced_blocks == 0
    return outputs


def _assert_same(actual: Outputs, expected: Outputs, *, is_exact: bool) -> None:
    assert actual.keys() == expected.keys()
    num_different = 0
    for key, tokens in expected.items():
        pairs = list(zip(tokens, actual[key], strict=True))
        first = next((i for i, (a, b) in enumerate(pairs) if a[0] != b[0]), None)
        if first is not None:
            num_different += 1
            assert not is_exact, (key, first)
            assert min(gap for _, gap in pairs[first]) < TIE, (key, first, pairs[first])
    assert num_different <= 1 + len(expected) // 20


@pytest.mark.parametrize(("kv_dtype", "kv_scale"), third(AS_NUMBERS + QUANTIZED))
def test_output_does_not_depend_on_what_happens_around(
    kv_dtype: str,
    kv_scale: str,
    get_tiny: Callable[[str], Tiny],
    load: Callable[..., Any],
    seed: int,
    scale: Callable[[int], int],
) -> None:
    rng = random.Random(f"{seed} {kv_dtype} {kv_scale}")
    tiny = get_tiny(rng.choice(["qwen3", "mistral-window", "llama"]))
    sampling = Sampling(max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=2)
    requests = {
        str(i): Request(
            str(i),
            tuple(rng.randrange(2, VOCAB_SIZE) for _ in range(LENGTHS[i % len(LENGTHS)])),
            sampling,
            block_hash,
        )
        for i in range(max(len(LENGTHS), scale(100)))
    }
    fields = {"kv_dtype": kv_dtype, "kv_scale": kv_scale, "block_size": 8, "context_window": 128}
    is_exact = kv_dtype in ("float32", "bfloat16")
    alone = load(tiny.path, **fields)
    expected: Outputs = {}
    for name, request in requests.items():
        expected |= _run(alone, {name: request})
    if kv_dtype == "float32":
        for name, request in requests.items():
            tokens = [token for token, _ in expected[name, 0]]
            assert tokens == tiny.generate(list(request.prompt_token_ids), NUM_OUTPUT)
    chunked = load(tiny.path, max_num_tokens_per_step=11, max_num_running=4, **fields)
    for _ in range(2):  # the second time from cached blocks
        _assert_same(_run(chunked, requests), expected, is_exact=is_exact)
    assert chunked.stats().num_local_prefix_tokens > 0
    for preemption in ("recompute", "swap"):
        engine = load(
            tiny.path, preemption=preemption, num_blocks=18, max_num_tokens_per_step=40,
            max_num_running=6, **fields,
        )  # fmt: skip
        _assert_same(_run(engine, requests), expected, is_exact=is_exact)
        assert sum(count for _, count in engine.stats().num_preemptions) > 0, (
            "nothing was preempted"
        )


@pytest.mark.parametrize(("kv_dtype", "kv_scale"), CHOSEN[:3])
def test_samples_share_the_prompt_by_copy_on_write(
    kv_dtype: str, kv_scale: str, get_tiny: Callable[[str], Tiny], load: Callable[..., Any],
    seed: int,
) -> None:  # fmt: skip
    """Each of four samples is what it is alone: the block that they fork in is quantized by each
    for itself, when its own tokens fill it."""
    rng = random.Random(f"{seed} {kv_dtype} {kv_scale}")
    tiny = get_tiny("qwen3")
    prompt = tuple(rng.randrange(2, VOCAB_SIZE) for _ in range(29))
    fields = {"kv_dtype": kv_dtype, "kv_scale": kv_scale, "block_size": 8, "context_window": 128}
    sampling = {"max_tokens": NUM_OUTPUT, "ignore_eos": True, "logprobs": 2, "temperature": 2.0,
                "seed": seed}  # fmt: skip
    engine = load(tiny.path, **fields)
    request = Request("n", prompt, Sampling(**sampling), block_hash, num_samples=4)
    together = {
        key: [token for token, _ in one] for key, one in _run(engine, {"n": request}).items()
    }
    assert len({tuple(tokens) for tokens in together.values()}) == 4
    for index in range(4):
        alone = Request("n", prompt, Sampling(**sampling, sample_index=index), block_hash)
        tokens = [token for token, _ in _run(load(tiny.path, **fields), {"n": alone})["n", 0]]
        assert tokens == together["n", index]


@pytest.mark.parametrize(("kv_dtype", "kv_scale"), CHOSEN)
@pytest.mark.parametrize("length", [7, 16, 29])
def test_a_handover_goes_on_with_the_same_tokens(
    kv_dtype: str,
    kv_scale: str,
    length: int,
    get_tiny: Callable[[str], Tiny],
    load: Callable[..., Any],
    seed: int,
) -> None:
    """Full blocks are all that a quantized cache hands over: they hold their scales. The tokens of
    the last block are computed again from there."""
    rng = random.Random(f"{seed} {kv_dtype} {kv_scale} {length}")
    tiny = get_tiny("llama")
    prompt = tuple(rng.randrange(2, VOCAB_SIZE) for _ in range(length))
    fields = {"kv_dtype": kv_dtype, "kv_scale": kv_scale, "block_size": 8, "context_window": 128}
    sampling = Sampling(max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=2)
    expected = _run(load(tiny.path, **fields), {"a": Request("a", prompt, sampling, block_hash)})
    prefill, decode = load(tiny.path, **fields), load(tiny.path, **fields)
    assert prefill.model_info.fingerprint == decode.model_info.fingerprint
    taken = prefill.reserve(Request("a", prompt, sampling, block_hash, hold_after=1))
    prefill.start("a")
    first = [one for event in prefill.step().events for one in event.logprobs or ()]
    given = decode.reserve(Request("a", prompt, sampling, block_hash))
    for source, target in zip(taken.block_ids, given.block_ids, strict=False):
        decode.kv.host_view[target] = prefill.kv.host_view[source]
    decode.start("a", num_loaded_tokens=length, outputs=[[first[0].token_id]])
    rest = [one for _ in range(NUM_OUTPUT) if decode.has_work() for event in decode.step().events
            for one in event.logprobs or ()]  # fmt: skip
    actual = [(one.token_id, one.top[0][1] - one.top[1][1]) for one in first + rest]
    _assert_same({("a", 0): actual}, expected, is_exact=False)
    assert decode.stats().num_computed_tokens == length % 8 + NUM_OUTPUT - 1
    decode.check_integrity()
