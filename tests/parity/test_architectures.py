"""Every model type that is served gives transformers' own greedy tokens, from a small random
checkpoint of its own: ragged prompts, shared prefixes, chunked prefill mixed with decode, block 4.

Each run takes the types that its seed says; the full run takes all. What is not served is refused
by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from checkpoints.architectures import FUSED, REFUSED, SERVED
from engine.errors import ModelNotSupported
from engine.models.self_check import VOCAB_SIZE, WINDOW, check_architecture, random_instance
from engine.request import Sampling
from tests.conftest import LONG, SESSION_SEED
from tests.harness.models import Tiny, small_config

LENGTHS = [1, 3, 4, 5, 13, 21, 34]
SHARED = 17
NUM_OUTPUT = 14
NUM_TYPES = 6
"""Of the types, in a run that is not the full one."""


def _chosen() -> list[str]:
    names = sorted(SERVED)
    return names if LONG else sorted(random.Random(SESSION_SEED).sample(names, NUM_TYPES))


def _save(model_type: str, folder: Path, seed: int) -> Any:
    model = random_instance(small_config(model_type), seed)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    Tokenizer(WordLevel({str(i): i for i in range(VOCAB_SIZE)}, unk_token="0")).save(
        str(folder / "tokenizer.json")
    )
    return model


@pytest.mark.parametrize("model_type", _chosen())
def test_greedy_tokens_are_transformers_own(
    model_type: str,
    tmp_path: Path,
    load: Callable[..., Any],
    run: Callable[..., Any],
    seed: int,
) -> None:
    rng = random.Random(f"{seed} {model_type}")
    oracle = Tiny(model_type, tmp_path, _save(model_type, tmp_path, seed))
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
    prompts.append(prompts[-1][:SHARED] + [rng.randrange(3, VOCAB_SIZE) for _ in range(9)])
    assert max(map(len, prompts)) > 4 * WINDOW
    sampling = Sampling(max_tokens=NUM_OUTPUT, ignore_eos=True)
    requests = {str(index): (prompt, sampling) for index, prompt in enumerate(prompts)}
    expected = {name: oracle.generate(prompt, NUM_OUTPUT) for name, (prompt, _) in requests.items()}
    engine = load(
        tmp_path,
        block_size=4,
        num_blocks=200,
        context_window=64,
        max_num_tokens_per_step=11,
        max_num_running=4,
    )
    info = engine.model_info
    is_fused = info.fused[:1] == ("4 of 4 decoder layers",)
    assert is_fused == (SERVED[model_type][0] == FUSED), info.fused
    assert run(engine, requests) == expected
    before = engine.stats().num_local_prefix_tokens
    assert run(engine, requests) == expected  # from cached blocks
    assert engine.stats().num_local_prefix_tokens > before


def test_every_known_type_is_served_or_refused_with_a_reason() -> None:
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert set(SERVED) | set(REFUSED) == known
    assert not set(SERVED) & set(REFUSED)
    assert all(reason and "\n" not in reason for reason in REFUSED.values())


@pytest.mark.parametrize("model_type", ["qwen3_next", "minimax", "bloom", "mpt", "falcon_h1"])
def test_a_type_that_is_not_served_is_refused_in_one_line(
    model_type: str, tmp_path: Path, load: Callable[..., Any]
) -> None:
    _save("llama", tmp_path, 0)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": model_type}))
    with pytest.raises(ModelNotSupported) as caught:
        load(tmp_path)
    assert str(caught.value).endswith(f"is not supported: {REFUSED[model_type]}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "model_type",
    ["qwen3_next", "minimax", "bloom", "mpt", "zaya", "llama4_text", "deepseek_v32", "diffllama"],
)
def test_the_rehearsal_alone_refuses_what_would_be_computed_wrongly(model_type: str) -> None:
    """The list is not the only guard: these run, or nearly so, and give something else."""
    config = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]()
    with pytest.raises(ModelNotSupported, match=model_type) as caught:
        check_architecture(config, model_type)
    assert "\n" not in str(caught.value)


def test_the_rehearsal_sees_an_attention_that_is_slightly_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It must be able to fail: one token more in the window is enough."""
    from baton_kernels import attention_reference

    right = attention_reference.one_mask

    def wrong(
        ends: torch.Tensor, num_positions: int, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor:
        return right(ends, num_positions, window + 1 if window else None, dtype)

    config = small_config("mistral")
    check_architecture(config, "mistral")
    monkeypatch.setattr(attention_reference, "one_mask", wrong)
    with pytest.raises(ModelNotSupported, match="off those of transformers"):
        check_architecture(config, "mistral")
