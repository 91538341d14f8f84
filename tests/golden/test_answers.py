"""200 answers of the bundled model through `baton.LLM`, with all that can be asked of a request:
token ids, texts, reasons and log probabilities, as they were recorded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from baton import LLM, SamplingParams
from tests.golden.recorded import check

pytestmark = pytest.mark.oracle

MODEL = "baton-5m"
TEXTS = (
    "Once upon a time",
    "One day a little girl named Lily went to the park with her mom.",
    "The dog was sad because he had lost his red ball. He asked the cat,",
    "Tom and Sam were friends. They liked to play with",
    "It was a sunny day, and the bird wanted to fly over the big tree.",
    "In the morning,",
)
JSON_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 20},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
}
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"json_schema": JSON_SCHEMA},
    {"regex": r"(The|A) (cat|dog) (ran|sat)( and [a-z]{3,6})?\."},
    {"ebnf": 'root ::= item ("," item)*\nitem ::= [a-z]{2,5}\n'},
    {"choice": ["yes", "no", "perhaps"]},
)
DRAWS: dict[str, Any] = {"temperature": 1.0}


def _adapter(folder: Path, seed: int) -> Path:
    """A random LoRA adapter for the bundled model, in PEFT's format."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(6):
        for name, width in (("q_proj", 256), ("v_proj", 128)):
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_"
            tensors[f"{key}A.weight"] = rng.normal(size=(4, 256)).astype(np.float32)
            tensors[f"{key}B.weight"] = (0.02 * rng.normal(size=(width, 4))).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


Workload = tuple[str, dict[str, Any], dict[str, Any]]
"""The prompt, SamplingParams' fields, and `generate`'s own arguments."""


def _workloads() -> dict[str, Workload]:
    """By name; always the same."""
    rng = random.Random(20_261_128)
    made: dict[str, Workload] = {}

    def add(kind: str, num: int, params: Any, **options: Any) -> None:
        for index in range(num):
            fields = {"max_tokens": rng.choice((12, 20, 28)), "seed": rng.randrange(2**63)}
            fields |= params(index)
            made[f"{kind}-{index}"] = (rng.choice(TEXTS), fields, options)

    add("greedy", 16, lambda index: {"temperature": 0.0, "ignore_eos": bool(index % 2)})
    add(
        "drawn",
        40,
        lambda _: {
            "temperature": rng.choice((0.3, 0.7, 1.0, 1.6)),
            "top_p": rng.choice((0.5, 0.9, 1.0)),
            "top_k": rng.choice((0, 5, 40)),
            "min_p": rng.choice((0.0, 0.05)),
        },
    )
    add("samples", 16, lambda index: DRAWS | {"n": 2 + index % 3})
    add("beams", 16, lambda i: {"num_beams": 2 + i % 3, "n": 1 + i % 2, "early_stopping": i > 8})
    add(
        "penalties",
        16,
        lambda index: {
            "temperature": (index % 2) * 0.8,
            "repetition_penalty": rng.choice((1.0, 1.3)),
            "presence_penalty": rng.choice((0.0, 0.7)),
            "frequency_penalty": rng.choice((0.0, 0.7)),
            "no_repeat_ngram": rng.choice((0, 2)),
        },
    )
    add("words", 16, lambda _: DRAWS | {"bad_words": ["the", "dog"], "logit_bias": {300: 2.5}})
    add("allowed", 4, lambda _: DRAWS | {"allowed_token_ids": list(range(100, 200))})
    add("grammar", 24, lambda index: DRAWS | GRAMMARS[index % 4] | {"max_tokens": 48})
    add("grammar-n", 4, lambda index: DRAWS | GRAMMARS[index] | {"n": 2, "max_tokens": 48})
    add("stops", 12, lambda index: DRAWS | {"stop": [" and", "."], "include_stop_text": index > 6})
    add("least", 4, lambda _: {"temperature": 0.0, "min_tokens": 6, "stop_token_ids": [1, 300, 16]})
    add("logprobs", 16, lambda index: {"temperature": index % 2, "logprobs": index % 4})
    add("first", 8, lambda index: {"temperature": index % 2}, adapter="first")
    add("second", 4, lambda index: {"temperature": index % 2}, adapter="second")
    add("urgent", 4, lambda _: DRAWS, priority=5)
    assert len(made) == 200
    return made


WORKLOADS = _workloads()


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: _adapter(folder / name, seed) for seed, name in enumerate(("first", "second"))}


def _llm(device: str = "cpu", **settings: Any) -> LLM:
    return LLM(MODEL, device=device, num_threads=1, progress=False, **settings)


def _answers(llm: LLM, names: list[str]) -> dict[str, Any]:
    """What came of each: in batches of those that share `generate`'s own arguments."""
    found: dict[str, Any] = {}
    batches: dict[str, list[str]] = {}
    for name in names:
        batches.setdefault(json.dumps(WORKLOADS[name][2]), []).append(name)
    for options, batch in batches.items():
        params = [SamplingParams(**WORKLOADS[name][1]) for name in batch]
        prompts = [WORKLOADS[name][0] for name in batch]
        answers = llm.generate(prompts, params, progress=False, **json.loads(options))
        for name, answer in zip(batch, answers, strict=True):
            found[name] = [_sample(sample) for sample in answer.samples]
    return {name: found[name] for name in names}


def _sample(sample: Any) -> dict[str, Any]:
    found = {
        "token_ids": list(sample.token_ids),
        "text": sample.text,
        "finish_reason": sample.finish_reason,
    }
    if sample.score is not None:
        found["score"] = sample.score
    if sample.logprobs is not None:
        found["logprobs"] = [
            [one.logprob, *(logprob for _, logprob in one.top)] for one in sample.logprobs
        ]
    return found


@pytest.fixture(scope="module")
def plain(adapters: dict[str, Path]) -> Iterator[LLM]:
    with _llm() as llm:
        for name, folder in adapters.items():
            llm.load_adapter(name, folder)
        yield llm


def test_answers_are_those_that_were_recorded(plain: LLM) -> None:
    check("answers", _answers(plain, list(WORKLOADS)))


def test_no_answer_depends_on_steps_that_run_ahead(plain: LLM, adapters: dict[str, Path]) -> None:
    """Decodes and prompts are launched before the step ahead of them was read, as on a GPU."""
    kinds = ("greedy", "drawn", "samples", "stops", "grammar", "first")
    names = [f"{kind}-{index}" for kind in kinds for index in range(2)]
    with _llm(decoder="own", overlap_prompts=True) as llm:
        for name, folder in adapters.items():
            llm.load_adapter(name, folder)
        assert _answers(llm, names) == _answers(plain, names)


def test_no_answer_depends_on_speculation(plain: LLM) -> None:
    names = [name for name in WORKLOADS if name.partition("-")[0] in ("greedy", "drawn", "grammar")]
    speculation = {"drafters": ["ngram"], "draft_models": ["baton-5m-draft"], "always": True}
    with _llm(speculation=speculation) as llm:
        assert _answers(llm, names) == _answers(plain, names)


def test_answers_over_a_quantized_cache_are_those_that_were_recorded() -> None:
    with _llm(kv_dtype="int8") as llm:
        check("answers_int8", _answers(llm, [name for name in WORKLOADS if "drawn" in name]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_answers_of_an_exact_gpu_are_those_that_were_recorded(adapters: dict[str, Path]) -> None:
    """Recorded on an H200 (compute capability 9.0); another kind of device sums otherwise."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("recorded on compute capability 9.0")
    with _llm("cuda", exact=True) as llm:
        for name, folder in adapters.items():
            llm.load_adapter(name, folder)
        found = _answers(llm, list(WORKLOADS))
        check("answers_cuda", found)
        few = [name for name in WORKLOADS if name.endswith("-0")]
        for name in few:  # alone: the other rows of a step change nothing
            assert _answers(llm, [name]) == {name: found[name]}
