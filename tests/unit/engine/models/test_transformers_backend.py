"""Models of transformers: fused layers are the plain model's equals, and the probe refuses by name
what paged attention would compute wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.batch import Batch, TokenSpan
from engine.config import EngineConfig
from engine.errors import ModelNotSupported
from engine.kv.layout import LayerKv
from engine.kv.memory import KvMemory
from engine.models import fusion as fuse_module
from engine.models import transformers_backend
from engine.models.loader import load_model
from engine.models.self_check import Recorder, probe_kv_layout
from tests.harness.models import FAMILIES, save


def _load(path: Path, **fields: Any) -> Any:
    return load_model(EngineConfig(model=str(path), device="cpu", decoder="transformers", **fields))


def _prompt(num_tokens: int) -> Batch:
    """A fresh prompt that touches no block; all its logits are wanted."""
    token_ids = tuple((31 * i + 5) % 259 + 1 for i in range(num_tokens))
    return Batch(token_ids, (TokenSpan(0, num_tokens, ()),), tuple(range(num_tokens)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_every_family_is_fused_and_gives_the_plain_models_logits(
    family: str, dtype: str, is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(FAMILIES[family](), tmp_path, 2)
    if not is_packed:
        monkeypatch.setattr(transformers_backend, "unavailable_reason", lambda *_: "switched off")
    fused = _load(tmp_path, dtype=dtype)
    reason = transformers_backend.unavailable_reason(getattr(torch, dtype), "cpu")
    assert fused.info.fused[0] == "3 of 3 decoder layers"
    assert fused.info.linear == ("packed" if is_packed and reason is None else fused.info.linear)
    assert (fused.info.linear == "packed") == (is_packed and reason is None)
    monkeypatch.setattr(transformers_backend, "fuse", lambda *_, **__: ())
    plain = _load(tmp_path, dtype=dtype)
    batch = _prompt(40)
    for model in (plain, fused):
        model.attach(KvMemory(model.layout, 4))
    expected, actual = plain.forward(batch).float(), fused.forward(batch).float()
    error = float((actual - expected).norm() / expected.norm())
    assert error < {"float32": 1e-5, "bfloat16": 0.1}[dtype]


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_window_that_the_models_code_ignores_is_ignored(
    is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A llama's config.json may have a leftover sliding_window that transformers does not read."""
    config = FAMILIES["llama"]()
    config.sliding_window = 20
    save(config, tmp_path, 3)
    if not is_packed:
        monkeypatch.setattr(transformers_backend, "unavailable_reason", lambda *_: "switched off")
    model = _load(tmp_path)
    assert model.info.fused[0] == "3 of 3 decoder layers"
    model.attach(KvMemory(model.layout, 4))
    batch = _prompt(40)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        expected = plain(input_ids=torch.tensor([batch.token_ids]), use_cache=False).logits[0]
    error = float((model.forward(batch) - expected).norm() / expected.norm())
    assert error < 1e-5


def test_a_fusion_that_changes_numbers_is_undone_and_said(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison at load must be able to fail."""

    def wrong(model: Any, **how: Any) -> tuple[str, ...]:
        done = fuse_module.fuse(model, **how)
        model.model.layers[1].norm_eps = 1.0
        return done

    expected = _load(llama)
    monkeypatch.setattr(transformers_backend, "fuse", wrong)
    model = _load(llama)
    assert model.info.fused[0].startswith("nothing: fused logits were")
    assert model.info.linear.startswith("plain")
    for one in (expected, model):
        one.attach(KvMemory(one.layout, 4))
    batch = _prompt(20)
    assert torch.allclose(model.forward(batch), expected.forward(batch), atol=1e-3)


def test_look_alikes_are_not_fused() -> None:
    """Gemma's norm multiplies by 1 + weight, and its layers have more norms."""
    gemma = transformers.Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.Gemma2ForCausalLM(gemma)
    assert not fuse_module.is_plain_decoder_layer(model.model.layers[0])
    llama = transformers.LlamaForCausalLM(FAMILIES["llama"]())
    layer = llama.model.layers[0]
    assert fuse_module.is_plain_decoder_layer(layer)
    layer.mlp.act_fn = torch.nn.GELU()
    assert not fuse_module.is_plain_decoder_layer(layer)
    layer.mlp.act_fn = torch.nn.SiLU()
    layer.extra_norm = torch.nn.LayerNorm(8)
    assert not fuse_module.is_plain_decoder_layer(layer)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_packed", [True, False])
def test_a_checkpoint_that_is_overwritten_after_the_start_changes_nothing(
    dtype: str, is_packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, as a download that begins anew does it: the file that was read is the same."""
    config = FAMILIES["llama"]()
    config.dtype = dtype
    save(config, tmp_path, 4)
    if not is_packed:
        monkeypatch.setattr(transformers_backend, "unavailable_reason", lambda *_: "switched off")
    model = _load(tmp_path, dtype=dtype)
    model.attach(KvMemory(model.layout, 4))
    expected = model.forward(_prompt(20)).clone()
    for path in tmp_path.glob("*.safetensors"):
        with path.open("r+b") as file:
            num_bytes = path.stat().st_size
            file.seek(num_bytes // 4)
            file.write(bytes(num_bytes - num_bytes // 4))
    assert torch.equal(model.forward(_prompt(20)), expected)


def test_fixed_scales_of_a_model_with_few_positions(gpt2: Path) -> None:
    """Its table of positions is shorter than the prompt that scales are found with."""
    model = _load(gpt2, kv_dtype="int8", kv_scale="tensor")
    assert model.info.context_window == 40
    model.attach(KvMemory(model.layout, 4))
    assert bool(torch.isfinite(model.forward(_prompt(20))).all())


# -- the probe


def _build(config: Any) -> Any:
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    model.set_attn_implementation(transformers_backend.ATTENTION_NAME)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_show_their_kv(family: str) -> None:
    config = FAMILIES[family]()
    probed = probe_kv_layout(_build(config), num_layers=3, device="cpu")
    head_dim = getattr(config, "head_dim", None) or 8
    assert probed.layers == (LayerKv(2, head_dim, 2, head_dim),) * 3
    windows = {"mistral-window": (21,) * 3, "qwen2-window": (None, 13, 13)}
    assert probed.windows == windows.get(family, (None,) * 3)


def test_a_model_that_does_not_attend_in_each_layer_is_refused() -> None:
    with pytest.raises(ModelNotSupported, match=r"4 layers.*\[0, 1, 2\]"):
        probe_kv_layout(_build(FAMILIES["llama"]()), num_layers=4, device="cpu")


def test_a_keyword_that_is_not_known_is_refused() -> None:
    with pytest.raises(TypeError, match="attention with position_bias"):
        transformers_backend.paged_attention(
            torch.nn.Identity(), torch.zeros(1, 1, 1, 1), torch.zeros(1), torch.zeros(1), None,
            scaling=1.0, baton_step=Recorder(), position_bias=torch.zeros(1),
        )  # fmt: skip


def test_two_layers_under_one_index_are_refused() -> None:
    model = _build(FAMILIES["llama"]())
    model.model.layers[2].self_attn.layer_idx = 1
    with pytest.raises(ModelNotSupported, match="layer 1 attends twice"):
        probe_kv_layout(model, num_layers=3, device="cpu")


def test_attention_that_is_not_causal_is_refused() -> None:
    model = _build(FAMILIES["llama"]())
    model.model.layers[0].self_attn.is_causal = False
    with pytest.raises(ModelNotSupported, match="not causal"):
        probe_kv_layout(model, num_layers=3, device="cpu")


def test_keys_of_more_than_the_new_tokens_are_refused() -> None:
    query, key = torch.zeros(4, 3, 8), torch.zeros(2, 5, 8)
    with pytest.raises(TypeError, match="5 keys for 3 tokens"):
        Recorder().attend(0, query, key, key, 1.0, None)


def test_code_that_swallows_our_keyword_is_refused() -> None:
    with pytest.raises(TypeError, match="does not hand keywords on"):
        transformers_backend.paged_attention(
            torch.nn.Identity(), torch.zeros(1, 1, 1, 1), torch.zeros(1), torch.zeros(1), None,
            scaling=1.0,
        )  # fmt: skip
