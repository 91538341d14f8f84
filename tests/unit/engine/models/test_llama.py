"""Our own decoder: what it reads of a config, which it leaves to transformers' code; and chunks,
decodes, stages and 8-bit weights compute what the whole does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.batch import Batch, TokenSpan
from engine.config import EngineConfig
from engine.decoder.inputs import DecodeInputs, mixed_inputs
from engine.kv.memory import KvMemory
from engine.kv.sizing import DeviceMemory
from engine.models import loader
from engine.models.interface import InOneProcess
from engine.models.llama import (
    LlamaDecoder,
    Share,
    block_rows,
    read_llama_config,
    rope_table,
    unsupported_reason,
)
from engine.models.loader import load_model
from engine.models.weights import read_weights
from engine.speculation.config import SpeculationConfig
from tests.harness.models import FAMILIES, save


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_counts_its_parameters_as_transformers_does(family: str) -> None:
    config = FAMILIES[family]()
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    assert unsupported_reason(config) is None
    assert read_llama_config(config).num_parameters == sum(
        one.numel() for one in model.parameters()
    )


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.GPT2Config(), "gpt2 is none of llama, mistral"),
        (transformers.LlamaConfig(hidden_act="gelu"), "its activation is gelu"),
        (
            transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=3, head_dim=16),
            "not a multiple",
        ),
        (
            transformers.LlamaConfig(
                rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            "its RoPE is dynamic",
        ),
        (
            transformers.LlamaConfig(
                rope_parameters={
                    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                }
            ),
            "a part of each head",
        ),
    ],
)  # fmt: skip
def test_what_it_does_not_do_is_named(config: Any, reason: str) -> None:
    assert reason in str(unsupported_reason(config))
    with pytest.raises(ValueError, match=reason.split()[0]):
        read_llama_config(config)


def test_windows_are_those_that_the_code_reads() -> None:
    llama = FAMILIES["llama"]()
    llama.sliding_window = 20  # left over: transformers' llama does not read it
    assert read_llama_config(llama).windows == (None,) * 3
    assert read_llama_config(FAMILIES["mistral-window"]()).windows == (21,) * 3
    assert read_llama_config(FAMILIES["mistral"]()).windows == (None,) * 3
    assert read_llama_config(FAMILIES["qwen2-window"]()).windows == (None, 13, 13)


_ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
    },
    {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
]  # fmt: skip


@pytest.mark.parametrize("rope", _ROPES, ids=lambda rope: str(rope["rope_type"]))
def test_the_table_of_angles_is_transformers(rope: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(
        head_dim=64, max_position_embeddings=512, rope_parameters=rope
    )
    table = rope_table(read_llama_config(config), 500, torch.device("cpu"))
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1, dtype=torch.float32), torch.arange(500)[None])
    assert torch.equal(table, torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=1))


def test_a_share_is_cut_evenly_or_refused_by_name() -> None:
    shape = read_llama_config(FAMILIES["qwen3"]())  # 6 heads, 2 of keys
    half = shape.share(2)
    assert (half.num_heads, half.num_kv_heads, half.intermediate_size) == (3, 1, 40)
    assert half.num_layers == shape.num_layers
    with pytest.raises(ValueError, match="2 key-value heads cannot be shared by 4 ranks"):
        shape.share(4)


# -- what it computes


def _model(path: Path, **fields: Any) -> Any:
    model = load_model(EngineConfig(model=str(path), device="cpu", decoder="own", **fields))
    model.attach(KvMemory(model.layout, 12))
    return model


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_a_long_chunk_drawn_once_gives_what_all_its_rows_would(
    family: str, tmp_path: Path, seed: int
) -> None:
    """The last layer skips rows that nothing is drawn from; their KV is written all the same."""
    save(FAMILIES[family](), tmp_path, seed % 1000)
    model = _model(tmp_path)
    token_ids = tuple((31 * i + seed) % 259 + 1 for i in range(150))
    spans = (
        TokenSpan(0, 100, tuple(range(7))),
        TokenSpan(0, 49, tuple(range(7, 11))),
        TokenSpan(0, 1, (11,)),
    )
    last = tuple(end - 1 for end in (100, 149, 150))
    full = model.forward(Batch(token_ids, spans, tuple(range(150))))
    written = model._memory.cache.clone()
    model._memory.cache.fill_(7.0)
    drawn = model.forward(Batch(token_ids, spans, last))
    assert torch.allclose(drawn, full[list(last)], rtol=1e-4, atol=1e-4)
    is_written = written != 0
    assert torch.equal(model._memory.cache[is_written], written[is_written])


def test_no_draw_gives_no_logits(llama: Path) -> None:
    model = _model(llama)
    assert model.forward(Batch((5,) * 80, (TokenSpan(0, 80, tuple(range(5))),), ())).shape == (
        0,
        260,
    )


def test_decode_equals_forward_and_padding_does_nothing(llama: Path, seed: int) -> None:
    model = _model(llama)
    decoder: LlamaDecoder = model.decoder
    prompts = [tuple((13 * i + seed + j) % 259 + 1 for i in range(20)) for j in range(3)]
    spans = tuple(TokenSpan(0, 19, (3 * j, 3 * j + 1)) for j in range(3))
    model.forward(Batch(sum((prompt[:19] for prompt in prompts), ()), spans, ()))
    before = model._memory.cache.clone()
    steps = tuple(TokenSpan(19, 1, span.block_ids) for span in spans)
    expected = model.forward(Batch(tuple(prompt[19] for prompt in prompts), steps, (0, 1, 2)))
    written = model._memory.cache.clone()
    model._memory.cache.copy_(before)
    tables = torch.full((5, 4), 11, dtype=torch.int32)  # beyond their own: never followed
    tables[:3, :2] = torch.tensor([span.block_ids for span in spans])
    ids = torch.tensor([prompt[19] for prompt in prompts] + [0, 0], dtype=torch.int32)
    positions = torch.tensor([19, 19, 19, -1, -1], dtype=torch.int32)
    with torch.inference_mode():
        logits = decoder.decode(DecodeInputs(ids, positions, tables))
    assert torch.allclose(logits[:3], expected, rtol=1e-4, atol=1e-4)
    assert bool(torch.isfinite(logits).all())
    assert torch.allclose(model._memory.cache, written, rtol=1e-4, atol=1e-4)
    assert torch.equal(model._memory.cache == before, written == before)  # nothing beside


@pytest.mark.parametrize("cut", [1, 2])
def test_stages_compute_what_the_whole_does(cut: int, llama: Path, seed: int) -> None:
    model = _model(llama)
    token_ids = tuple((31 * i + seed) % 259 + 1 for i in range(90))
    batch = Batch(token_ids, (TokenSpan(0, 90, tuple(range(6))),), (89,))
    expected = model.forward(batch)
    memory = KvMemory(model.layout, 12)
    with torch.inference_mode():
        first = _stage(llama, memory, 0, cut)
        second = _stage(llama, memory, cut, 3 - cut)
        inputs = mixed_inputs(batch, torch.device("cpu"))
        hidden = first.forward(inputs)
        assert hidden.shape == (90, 48)
        logits = second.forward(inputs, hidden)
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.allclose(memory.cache, model._memory.cache, rtol=1e-4, atol=1e-4)


def _stage(folder: Path, memory: KvMemory, first: int, count: int) -> LlamaDecoder:
    """Layers [first, first + count)."""
    cpu = torch.device("cpu")
    shape = read_llama_config(transformers.AutoConfig.from_pretrained(folder))
    share = Share(first_layer=first, num_layers=count)
    weights = read_weights(folder, shape, dtype=torch.float32, device=cpu, share=share)
    decoder = LlamaDecoder(weights, rope_table(shape, 700, cpu))
    views = memory.layer_views(range(first, first + count))
    decoder.attach([block_rows(view, memory.layout) for view in views])
    return decoder


def test_fp8_weights_are_near_the_plain_ones_and_another_model() -> None:
    """A trained model; layers only: embedding and head stay as they are."""
    token_ids = tuple((31 * i + 5) % 2000 for i in range(100))
    batch = Batch(token_ids, (TokenSpan(0, 100, tuple(range(7))),), tuple(range(100)))
    plain = _model(Path("baton-5m"), dtype="float32")
    small = _model(Path("baton-5m"), dtype="float32", weight_dtype="fp8_e4m3")
    expected, actual = plain.forward(batch), small.forward(batch)
    error = float((actual - expected).norm() / expected.norm())
    assert 1e-3 < error < 0.1  # measured: 0.036
    assert small.info.fingerprint != plain.info.fingerprint
    layers = small.decoder.weights.layers
    matrices = sum(one.tensors[0].nbytes for layer in layers for one in layer.projections)
    assert plain.info.weight_bytes - small.info.weight_bytes > 2.9 * matrices
    assert small.decoder.weights.head.weight.dtype == torch.float32


def test_whoever_is_guessed_for_has_graphs_and_room_for_them(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model computes trees, too, though nobody guesses for it."""
    made: list[dict[str, int]] = []
    monkeypatch.setattr(
        loader, "make_plain_graphs", lambda decoder, memory, **sizes: made.append(sizes)
    )
    measured = DeviceMemory("a GPU", 1 << 40, 1 << 40, 0, 1000)
    monkeypatch.setattr(InOneProcess, "device_memory", lambda model: measured)
    speculation = SpeculationConfig(max_num_nodes=9)
    config = EngineConfig(
        model=str(llama), device="cpu", decoder="own", max_num_running=5,
        max_num_tokens_per_step=70, speculation=speculation,
    )  # fmt: skip
    speculation = dataclasses.replace(speculation, drafters=("ngram",))
    guessing = dataclasses.replace(config, speculation=speculation)
    for one, is_draft in ((config, False), (guessing, False), (config, True)):
        model = load_model(one, is_draft=is_draft)
        model.attach(KvMemory(model.layout, 12))
        made.clear()
        model.warm_up()
        found = model.device_memory()
        assert found is not None
        if one is config and not is_draft:
            assert not made and found.step_bytes == 1000
        else:
            (sizes,) = made
            assert (sizes["max_rows"], sizes["max_tokens"], sizes["max_num_nodes"]) == (5, 70, 9)
            assert found.step_bytes > 1000 + 2 * 70 * 4 * model.info.vocab_size
