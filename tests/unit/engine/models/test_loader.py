"""Loading: what is refused, by which name, and that fused layers are the plain model's equals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine import engine as engine_module
from engine.batch import Batch, TokenSpan
from engine.config import EngineConfig
from engine.engine import load_engine
from engine.errors import LoadError, ModelNotSupported, TooFewBlocks
from engine.kv.memory import KvMemory
from engine.models import fusion as fuse_module
from engine.models import loader, transformers_backend
from engine.models.llama import LlamaModel
from engine.models.loader import choose_device, load_model
from engine.speculation import loader as proposer_loading
from process.settings import SettingsError
from tests.harness.models import FAMILIES, save

Checkpoint = Callable[..., Path]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save(FAMILIES["llama"](), path, 1)
    return path


@pytest.fixture
def broken(llama: Path, tmp_path: Path) -> Checkpoint:
    """`broken(file=..., edit=...)`: a copy of the checkpoint with one file removed or changed."""

    def make(config: dict[str, Any] | None = None, remove: str | None = None) -> Path:
        folder = tmp_path / "copy"
        folder.mkdir()
        for file in llama.iterdir():
            if file.name != remove:
                (folder / file.name).write_bytes(file.read_bytes())
        if config is not None:
            path = folder / "config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | config))
        return folder

    return make


def _load(path: Path, **fields: Any) -> Any:
    return load_model(EngineConfig(model=str(path), device="cpu", decoder="transformers", **fields))


def _prompt(num_tokens: int) -> Batch:
    """A fresh prompt that touches no block; all its logits are wanted."""
    token_ids = tuple((31 * i + 5) % 259 + 1 for i in range(num_tokens))
    return Batch(token_ids, (TokenSpan(0, num_tokens, ()),), tuple(range(num_tokens)))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"model_type": "bloom"}, "'bloom' is not supported: positions are a bias"),
        ({"model_type": "qwen3_next"}, "'qwen3_next' is not supported: some layers keep a recur"),
        ({"model_type": "minimax"}, "'minimax' is not supported: some layers keep a recurrent"),
        ({"model_type": "mpt"}, "'mpt' is not supported: positions are a bias"),
        ({"model_type": "gpt6"}, "'gpt6' is not supported: it is not known here"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "type linear_attention are not"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"model_type": None}, "None"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_before_weights_load(
    config: dict[str, Any], named: str, broken: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(loader, "read_tensors", no_read)
    with pytest.raises(ModelNotSupported, match=named) as caught:
        _load(broken(config))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named_in_one_line(missing: str, broken: Checkpoint) -> None:
    with pytest.raises(LoadError) as caught:
        _load(broken(remove=missing))
    assert "copy" in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(LoadError, match="/nowhere/at/all"):
        _load(Path("/nowhere/at/all"))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"num_hidden_layers": 4}, r"missing keys: .*layers\.3"),
        ({"num_hidden_layers": 2}, r"unexpected keys: .*layers\.2"),
        ({"intermediate_size": 96}, "mlp"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    config: dict[str, Any], named: str, broken: Checkpoint
) -> None:
    with pytest.raises(LoadError, match=named) as caught:
        _load(broken(config))
    assert "\n" not in str(caught.value)


def test_a_window_beyond_the_models_is_refused(llama: Path) -> None:
    with pytest.raises(LoadError, match=r"context_window: 701 .*700"):
        _load(llama, context_window=701)
    assert _load(llama, context_window=100).info.context_window == 100


@pytest.mark.parametrize(("field", "value"), [("kv_dtype", "int4"), ("kv_scale", "channel")])
def test_a_kv_choice_that_does_not_exist_is_refused_by_name(field: str, value: str) -> None:
    with pytest.raises(SettingsError, match=f"{field}: '{value}' is none of"):
        EngineConfig(**{field: value})  # type: ignore[arg-type]


def test_too_few_blocks_stop_the_start(llama: Path) -> None:
    with pytest.raises(TooFewBlocks, match="700 tokens"):
        load_engine(EngineConfig(model=str(llama), device="cpu", num_blocks=43))


def test_cuda_where_there_is_none_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LoadError, match="device"):
        load_model(EngineConfig(model=str(llama), device="cuda"))


def test_a_cuda_device_is_taken_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = {device: choose_device(device) for device in ("auto", "cpu", "cuda", "cuda:1")}
    assert chosen == {"auto": "cuda:0", "cpu": "cpu", "cuda": "cuda:0", "cuda:1": "cuda:1"}
    with pytest.raises(LoadError, match=r"cuda:2 was asked for, .* the last one is cuda:1"):
        choose_device("cuda:2")
    for wrong in ("gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", ""):
        with pytest.raises(SettingsError, match=r"device: .* is none of"):
            EngineConfig(device=wrong)


def test_progress_reaches_its_end_for_digest_weights_and_warm_up(llama: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    load_engine(
        EngineConfig(model=str(llama), device="cpu"),
        progress=lambda what, done, total: seen.setdefault(what, []).append((done, total)),
    )
    assert set(seen) == {"verify weights", "weights", "warm-up"}
    for steps in seen.values():
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert steps[-1][0] == steps[-1][1] > 0


def test_warm_up_writes_no_kv(llama: Path) -> None:
    engine = load_engine(EngineConfig(model=str(llama), device="cpu"))
    assert not engine.kv.host_view.any()
    assert engine.stats().num_computed_tokens == 0


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


def test_eos_of_both_configs_counts(broken: Checkpoint) -> None:
    folder = broken({"eos_token_id": 1})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    assert _load(folder).info.eos_token_ids == (1, 5, 9)


def test_the_fingerprint_follows_what_the_kv_depends_on(llama: Path, broken: Checkpoint) -> None:
    base = _load(llama)
    assert _load(llama).info.fingerprint == base.info.fingerprint
    assert len(bytes.fromhex(base.info.fingerprint)) == 32
    others = [
        _load(llama, dtype="bfloat16"),
        _load(llama, block_size=8),
        _load(llama, kv_dtype="bfloat16"),
        _load(llama, kv_dtype="int8", kv_scale="block"),
        _load(llama, kv_dtype="int8", kv_scale="token_head"),
        _load(llama, kv_dtype="fp8_e4m3", kv_scale="token_head"),
        _load(broken({"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}})),
    ]
    found = {base.info.fingerprint} | {other.info.fingerprint for other in others}
    assert len(found) == 8
    assert _load(llama, kv_dtype="float32").info.fingerprint == base.info.fingerprint
    assert _load(llama, context_window=64).info.fingerprint == base.info.fingerprint


def test_fixed_scales_of_a_model_with_few_positions(tmp_path: Path) -> None:
    """Its table of positions is shorter than the prompt that scales are found with."""
    config = transformers.GPT2Config(
        vocab_size=260, n_embd=48, n_layer=2, n_head=6, n_positions=40, eos_token_id=1,
        bos_token_id=None, dtype="float32",
    )  # fmt: skip
    save(config, tmp_path, 1)
    model = _load(tmp_path, kv_dtype="int8", kv_scale="tensor")
    assert model.info.context_window == 40
    model.attach(KvMemory(model.layout, 4))
    assert bool(torch.isfinite(model.forward(_prompt(20))).all())


def test_auto_dtype_is_the_checkpoints(broken: Checkpoint, llama: Path) -> None:
    assert _load(llama).info.dtype == "float32"
    assert _load(broken({"dtype": "bfloat16"})).info.dtype == "bfloat16"


def test_an_engine_that_cannot_be_made_closes_its_model(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the processes of its other ranks would stay."""
    closed: list[object] = []
    monkeypatch.setattr(LlamaModel, "close", lambda model: closed.append(model))
    with pytest.raises(TooFewBlocks):
        load_engine(EngineConfig(model=str(llama), device="cpu", num_blocks=43))
    assert len(closed) == 1


def test_a_start_that_ends_behind_the_model_closes_it(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint may be gone when the tokenizer's folder is asked for."""
    closed: list[object] = []
    monkeypatch.setattr(LlamaModel, "close", lambda model: closed.append(model))

    def gone(*_: object, **__: object) -> None:
        raise LoadError("the checkpoint is gone")

    monkeypatch.setattr(engine_module, "resolve", gone)
    with pytest.raises(LoadError, match="gone"):
        load_engine(EngineConfig(model=str(llama), device="cpu"))
    assert len(closed) == 1


def test_what_fails_while_all_is_closed_hides_neither_the_cause_nor_the_model(
    llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[str] = []

    class Stuck:
        def __init__(self, name: str) -> None:
            self.name = name

        def close(self) -> None:
            closed.append(self.name)
            raise OSError(f"the {self.name} is stuck")

    proposers = [Stuck("first proposer"), Stuck("second proposer")]
    monkeypatch.setattr(proposer_loading, "load_proposers", lambda *_: proposers)
    monkeypatch.setattr(LlamaModel, "close", lambda _: Stuck("model").close())
    with pytest.raises(TooFewBlocks):
        load_engine(EngineConfig(model=str(llama), device="cpu", num_blocks=43))
    assert closed == ["second proposer", "first proposer", "model"]
    assert all(f"the {name} is stuck" in caplog.text for name in closed)


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


def test_a_cache_that_there_is_no_memory_for_is_named(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LoadError, match=r"KV cache of \d+ blocks .*num_blocks"):
        load_engine(EngineConfig(model=str(llama), device="cpu", num_blocks=1 << 46))

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.\nSee docs")

    layout = _load(llama).layout
    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(LoadError, match=r"on cuda:1 .*KV cache of 9 blocks") as caught:
        KvMemory(layout, 9, "cuda:1")
    assert "\n" not in str(caught.value)
