"""Whatever the KV cache stores, output is a function of the request: not of the chunks its prompt
came in, of prefix hits, batch-mates, other samples, guesses, or of being preempted and brought
back; nor of what lies in a block before its request writes there.

Quantized bytes follow the model's float32 numbers, which differ in the last bit between batch
shapes: where a number lies on the border between two steps, one byte may differ. So a first
difference is allowed where the two best tokens were nearly a tie, and nowhere else; without
quantization none is.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.layers.torch_attention import Scratch
from engine.models.loader import load_model
from engine.request import Request
from engine.speculation.config import SpeculationConfig
from tests.conftest import LONG, SESSION_SEED, third
from tests.harness.engines import all_events, block_hash
from tests.harness.models import VOCAB_SIZE, Tiny, save, small_config
from tests.parity.conftest import endless, prompts_of
from tests.unit.engine.speculation.test_manager import KnowsTheAnswers

AS_NUMBERS = [("float32", "block"), ("bfloat16", "block")]
QUANTIZED = [
    (dtype, scale) for dtype in ("int8", "fp8_e4m3") for scale in ("tensor", "block", "token_head")
]
CHOSEN = third(QUANTIZED)
NUM_OUTPUT = 24 if LONG else 16
SIZES = {"block_size": 8, "context_window": 128}
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
    lengths = (LENGTHS[i % len(LENGTHS)] for i in range(max(len(LENGTHS), scale(100))))
    requests = {
        name: Request(name, tuple(prompt), endless(NUM_OUTPUT, logprobs=2), block_hash)
        for name, prompt in prompts_of(rng, lengths).items()
    }
    fields = {"kv_dtype": kv_dtype, "kv_scale": kv_scale, **SIZES}
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
    prompt = tuple(prompts_of(rng, [29])["0"])
    fields = {"kv_dtype": kv_dtype, "kv_scale": kv_scale, **SIZES}
    sampling = endless(NUM_OUTPUT, logprobs=2, temperature=2.0, seed=seed)
    engine = load(tiny.path, **fields)
    request = Request("n", prompt, sampling, block_hash, num_samples=4)
    together = {
        key: [token for token, _ in one] for key, one in _run(engine, {"n": request}).items()
    }
    assert len({tuple(tokens) for tokens in together.values()}) == 4
    for index in range(4):
        alone = Request("n", prompt, replace(sampling, sample_index=index), block_hash)
        tokens = [token for token, _ in _run(load(tiny.path, **fields), {"n": alone})["n", 0]]
        assert tokens == together["n", index]


@pytest.mark.parametrize(
    ("length", "kv_dtype", "kv_scale"),
    [
        (length, *one)
        for place, length in enumerate((7, 16, 29))
        for one in (QUANTIZED if LONG else [CHOSEN[place % len(CHOSEN)]])
    ],
)
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
    prompt = tuple(prompts_of(rng, [length])["0"])
    fields = {"kv_dtype": kv_dtype, "kv_scale": kv_scale, **SIZES}
    sampling = endless(NUM_OUTPUT, logprobs=2)
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


FUSED = "llama", "mistral-window", "qwen3"
UNFUSED = "gemma2", "deepseek_v3"
"""Capped scores; latents. No experts: which of them is taken may turn on a byte."""
_RNG = random.Random(SESSION_SEED)
GUESSED = [
    (decoder, family, *_RNG.choice(QUANTIZED))
    for decoder, families in (("own", FUSED), ("transformers", FUSED + UNFUSED))
    for family in (families if LONG else [_RNG.choice(families)])
]


@pytest.mark.parametrize(("decoder", "family", "kv_dtype", "kv_scale"), GUESSED)
def test_guesses_change_no_token(
    decoder: str,
    family: str,
    kv_dtype: str,
    kv_scale: str,
    get_tiny: Callable[[str], Tiny],
    tmp_path: Path,
    seed: int,
) -> None:
    """On real attention, by both decoders; several at once, chunked, preempted, one of two samples;
    blocks of 4 and of 8."""
    rng = random.Random(f"{seed} {family} {kv_dtype} {kv_scale}")
    if family in FUSED:
        path, vocab_size = get_tiny(family).path, VOCAB_SIZE
    else:
        config = small_config(family)
        config.first_k_dense_replace = config.num_hidden_layers
        path, vocab_size = tmp_path / family, int(config.vocab_size)
        save(config, path, seed % 2**30)
    config = EngineConfig(
        model=str(path),
        device="cpu",
        decoder=decoder,
        kv_dtype=kv_dtype,
        kv_scale=kv_scale,
        block_size=rng.choice([4, 8]),
        context_window=128,
        num_threads=1,
        num_blocks=36,
        preemption="recompute",
        max_num_tokens_per_step=40,
        max_num_running=4,
    )
    model = load_model(config)
    requests = {
        name: Request(
            name,
            tuple(prompt),
            endless(NUM_OUTPUT, logprobs=2),
            block_hash,
            num_samples=1 + (len(prompt) == 9),
        )
        for name, prompt in prompts_of(rng, (1, 7, 8, 9, 31), vocab_size).items()
    }
    plain = LLMEngine(config, model)
    expected = {}
    for name, request in requests.items():
        expected |= _run(plain, {name: request})
    answers = {
        name: {
            index: (tuple(token for token, _ in expected[name, index]), None, None, "")
            for index in range(request.num_samples)
        }
        for name, request in requests.items()
    }
    guessing = replace(config, speculation=SpeculationConfig(max_num_nodes=9, always=True))
    engine = LLMEngine(guessing, model, proposers=[KnowsTheAnswers(rng, answers, vocab_size)])
    _assert_same(_run(engine, requests), expected, is_exact=False)
    counts = engine.metrics()
    assert 0 < counts.num_kept_tokens < counts.num_guessed_tokens


DIRTY = [
    ("llama", "transformers", "cpu"),
    ("mistral-window", "transformers", "cpu"),
    ("qwen3", "own", "cpu"),
    ("mistral-window", "own", "cpu"),
    # Where steps are launched ahead: they clear no block that they enter.
    *([("qwen3", "own", "cuda:0")] if torch.cuda.is_available() else []),
]

SMALL: dict[str, Any] = {"dtype": "float32", "max_num_tokens_per_step": 24, "max_num_running": 8}


@pytest.mark.parametrize(("family", "decoder", "device"), DIRTY)
def test_nan_in_every_free_block_changes_no_token(
    family: str,
    decoder: str,
    device: str,
    get_tiny: Callable[[str], Tiny],
    load: Callable[..., Any],
    run: Callable[..., Any],
    seed: int,
) -> None:
    """Not even NaN, which a weight of zero does not hide (0 * NaN = NaN): it comes from a request
    whose own logits overflowed, and from refused transfers. Compared to the bit with the same
    engine without it: another one rounds otherwise, and a tie of two tokens would fail once in some
    hundred runs."""
    rng = random.Random(seed)
    tiny = get_tiny(family)
    prompts = prompts_of(rng, (1, 5, 16, 17, 33, 100))
    asked = {name: (prompt, endless(40)) for name, prompt in prompts.items()}
    outputs = []
    for left_there in (0.0, float("nan")):
        engine = load(tiny.path, decoder=decoder, device=device, **SMALL)
        engine.kv.cache.fill_(left_there)
        outputs.append(run(engine, asked))
    assert outputs[0] == outputs[1]
    assert all(len(tokens) == 40 for tokens in outputs[0].values())


def test_nan_in_what_steps_gather_into_changes_no_token(
    get_tiny: Callable[[str], Tiny],
    load: Callable[..., Any],
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    """On a CPU it is the same memory in each layer of each step, and gone when the engine is."""
    taken: set[Scratch] = set()
    take = Scratch.take

    def dirty(one: Scratch, *wanted: Any) -> torch.Tensor:
        taken.add(one)
        return take(one, *wanted).fill_(float("nan"))

    tiny, prompts = get_tiny("llama"), prompts_of(random.Random(seed), (1, 17, 33, 60))
    asked = {name: (prompt, endless(20)) for name, prompt in prompts.items()}
    clean = run(load(tiny.path, decoder="transformers", device="cpu", **SMALL), asked)
    monkeypatch.setattr(Scratch, "take", dirty)
    engine = load(tiny.path, decoder="transformers", device="cpu", **SMALL)
    assert run(engine, asked) == clean
    assert all(len(tokens) == 20 for tokens in clean.values())
    engine.check_integrity()
    (scratch,) = taken
    assert scratch.num_bytes > 0
    engine.close()
    assert scratch.num_bytes == 0
    engine.check_integrity()
