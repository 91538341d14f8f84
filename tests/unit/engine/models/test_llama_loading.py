"""Which decoder a start takes, and that a wrong one is refused before weights are read."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from checkpoints.resolve import resolve
from engine.batch import Batch, TokenSpan, warm_up
from engine.config import EngineConfig
from engine.decoder.inputs import DecodeInputs, mixed_inputs
from engine.engine import load_engine
from engine.errors import LoadError, ModelNotSupported
from engine.kv.memory import KvMemory
from engine.kv.sizing import DeviceMemory
from engine.models import loader, self_check
from engine.models.checkpoint_config import read_checkpoint_config
from engine.models.interface import InOneProcess
from engine.models.llama import LlamaDecoder, rope_table
from engine.models.loader import load_model
from engine.speculation.config import SpeculationConfig
from process.settings import SettingsError
from tests.harness.models import FAMILIES, save


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save(FAMILIES["llama"](), path, 1)
    return path


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(
        vocab_size=260, n_embd=48, n_layer=2, n_head=6, n_positions=40, eos_token_id=1,
        bos_token_id=None, dtype="float32",
    )  # fmt: skip
    save(config, path, 1)
    return path


def _load(path: Path, **fields: Any) -> Any:
    return load_model(EngineConfig(model=str(path), device="cpu", **fields))


def test_the_decoder_is_chosen_by_device_model_and_setting(llama: Path, gpt2: Path) -> None:
    assert _load(llama).info.decoder == "own"
    assert (
        _load(llama, decoder="transformers").info.decoder == "transformers (decoder=transformers)"
    )
    assert _load(gpt2).info.decoder.startswith("transformers (gpt2 is none of llama")
    own = _load(llama, decoder="own").info
    assert own.decoder == "own"
    assert own.fused == ("3 of 3 decoder layers",)


@pytest.mark.parametrize("overlap_prompts", [False, True])
def test_prompts_are_launched_where_the_settings_say_so(llama: Path, overlap_prompts: bool) -> None:
    model = _load(llama, decoder="own", overlap_prompts=overlap_prompts)
    model.attach(KvMemory(model.layout, 4, "cpu"))
    assert model.ahead.takes_prompts is overlap_prompts


def test_on_a_gpu_auto_takes_our_own(llama: Path) -> None:
    config = EngineConfig(model=str(llama))
    model_config = read_checkpoint_config(llama)
    assert model_config.shape is not None
    reason = "heads of 8 dimensions: kernels want 16"
    assert loader.choose_backend(config, model_config, "cuda:1", "tiny") == reason
    wider = dataclasses.replace(
        model_config, shape=dataclasses.replace(model_config.shape, head_dim=16)
    )
    assert loader.choose_backend(config, wider, "cuda:1", "tiny") is None
    assert loader.choose_backend(config, model_config, "cpu", "tiny") is None


def test_what_our_own_does_not_do_is_refused_where_it_is_asked_for(gpt2: Path, llama: Path) -> None:
    with pytest.raises(ModelNotSupported, match=r"decoder=own does not do it: gpt2 is none of"):
        _load(gpt2, decoder="own")
    with pytest.raises(LoadError, match=r"^exact: needs our own decoder, .*\(gpt2 is none of"):
        _load(gpt2, exact=True)
    with pytest.raises(LoadError, match=r"^weight_dtype=fp8_e4m3: needs our own decoder"):
        _load(llama, decoder="transformers", weight_dtype="fp8_e4m3")
    with pytest.raises(SettingsError, match="weight_dtype: 'fp4' is none of"):
        EngineConfig(weight_dtype="fp4")
    with pytest.raises(SettingsError, match="decoder: 'ours' is none of"):
        EngineConfig(decoder="ours")
    with pytest.raises(SettingsError, match=r"memory_share: .*1\.2"):
        EngineConfig(memory_share=1.2)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3", "bfloat16"])
def test_exact_sums_only_over_what_was_computed(kv_dtype: str, llama: Path) -> None:
    """Attention over other numbers sums by how many rows a step has."""
    with pytest.raises(LoadError, match=rf"^exact: not with kv_dtype={kv_dtype} where float32"):
        _load(llama, decoder="own", exact=True, kv_dtype=kv_dtype)
    assert _load(llama, decoder="own", exact=True, kv_dtype="float32").info.decoder == "own"


def test_both_decoders_share_fingerprint_and_layout(llama: Path) -> None:
    own, other = _load(llama, decoder="own"), _load(llama, decoder="transformers")
    assert own.layout == other.layout
    changed = {"decoder", "linear", "fused", "seconds"}
    assert {
        field.name
        for field in dataclasses.fields(own.info)
        if getattr(own.info, field.name) != getattr(other.info, field.name)
    } == changed
    assert [name for name, _ in own.info.seconds] == [
        "rehearsal", "weights", "verify", "measure", "digest",
    ]  # fmt: skip


@pytest.mark.parametrize("decoder", ["own", "auto"])
def test_a_decoder_that_computes_something_else_is_refused(
    decoder: str, llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rehearsal must be able to fail, and before weights are read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def wrong(shape: Any, num_positions: int, device: torch.device) -> torch.Tensor:
        return rope_table(shape, num_positions + 1, device)[1:].contiguous()  # all one further

    def half(*arguments: Any) -> torch.Tensor:
        return wrong(*arguments).mul_(0.99)

    def no_read(*_: object, **__: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(self_check, "rope_table", half)
    monkeypatch.setattr(loader, "load_decoder", no_read)
    with pytest.raises(ModelNotSupported, match="off those of transformers"):
        _load(llama, decoder=decoder)
    assert not list(tmp_path.rglob("*.json"))  # what failed once is rehearsed by the next start


def test_progress_and_phases_and_an_untouched_cache(llama: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    engine = load_engine(
        EngineConfig(model=str(llama), device="cpu", decoder="own", num_blocks=44),
        progress=lambda what, done, total: seen.setdefault(what, []).append((done, total)),
    )
    assert {"verify weights", "weights", "warm-up"} <= set(seen)
    for steps in seen.values():
        assert steps[-1][0] == steps[-1][1] > 0
    assert not engine.kv.host_view.any()
    assert [name for name, _ in engine.model_info.seconds][-2:] == ["cache", "warm-up"]


def _model(path: Path, **fields: Any) -> Any:
    model = _load(path, decoder="own", **fields)
    model.attach(KvMemory(model.layout, 12))
    return model


def test_a_warm_up_writes_nothing_and_gives_finite_logits(llama: Path) -> None:
    model = _model(llama)
    for num_tokens in (1, 2, 100):
        logits = model.forward(warm_up(num_tokens))
        assert logits.shape == (1, 260)
        assert bool(torch.isfinite(logits).all())
    assert not model._memory.cache.any()


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
def test_stages_compute_what_the_whole_does(
    cut: int, llama: Path, get_stage: Callable[..., LlamaDecoder], seed: int
) -> None:
    model = _model(llama)
    token_ids = tuple((31 * i + seed) % 259 + 1 for i in range(90))
    batch = Batch(token_ids, (TokenSpan(0, 90, tuple(range(6))),), (89,))
    expected = model.forward(batch)
    memory = KvMemory(model.layout, 12)
    with torch.inference_mode():
        first = get_stage(llama, memory, 0, cut)
        second = get_stage(llama, memory, cut, 3 - cut)
        inputs = mixed_inputs(batch, torch.device("cpu"))
        hidden = first.forward(inputs)
        assert hidden.shape == (90, 48)
        logits = second.forward(inputs, hidden)
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.allclose(memory.cache, model._memory.cache, rtol=1e-4, atol=1e-4)


@pytest.fixture
def get_stage() -> Callable[..., LlamaDecoder]:
    """`get_stage(folder, memory, first layer, number of layers)`."""
    from engine.models.llama import Share, block_rows, read_llama_config
    from engine.models.weights import read_weights

    def get(folder: Path, memory: KvMemory, first: int, count: int) -> LlamaDecoder:
        cpu = torch.device("cpu")
        shape = read_llama_config(transformers.AutoConfig.from_pretrained(folder))
        share = Share(first_layer=first, num_layers=count)
        weights = read_weights(folder, shape, dtype=torch.float32, device=cpu, share=share)
        decoder = LlamaDecoder(weights, rope_table(shape, 700, cpu))
        views = memory.layer_views(range(first, first + count))
        decoder.attach([block_rows(view, memory.layout) for view in views])
        return decoder

    return get


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


@pytest.mark.parametrize("decoder", ["own", "transformers"])
@pytest.mark.parametrize("how", ["overlap", "dtype"])
def test_a_broken_header_is_one_line(tmp_path: Path, how: str, decoder: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve("baton-5m", files="all").path, folder)
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    first, second = [name for name in header if name != "__metadata__"][:2]
    if how == "overlap":
        header[first]["data_offsets"] = header[second]["data_offsets"]
    else:
        header[first]["dtype"] = "F9"
    new = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + size :])
    with pytest.raises(LoadError, match=r"model\.safetensors"):
        load_model(
            EngineConfig(model=str(folder), device="cpu", context_window=64, decoder=decoder)
        )


@pytest.mark.parametrize("decoder", ["own", "transformers"])
def test_a_checkpoint_that_is_replaced_while_it_loads_is_refused(
    tmp_path: Path, decoder: str
) -> None:
    """Its fingerprint might be of the one, its weights of the other."""
    folder = tmp_path / "model"
    shutil.copytree(resolve("baton-5m", files="all").path, folder)
    other = shutil.copy(folder / "model.safetensors", tmp_path / "other")

    def progress(what: str, done: int, total: int) -> None:
        if what == "weights" and done == total and Path(other).exists():
            Path(other).replace(folder / "model.safetensors")

    config = EngineConfig(model=str(folder), device="cpu", context_window=64, decoder=decoder)
    with pytest.raises(LoadError, match="changed while the model was loaded; start again"):
        load_model(config, progress=progress)
    load_model(config).close()


def test_what_computes_other_numbers_has_another_fingerprint(llama: Path) -> None:
    """An exact worker must not take blocks that another wrote."""
    found = set()
    for fields in ({}, {"exact": True}, {"weight_dtype": "fp8_e4m3"}):
        config = EngineConfig(model=str(llama), device="cpu", decoder="own", **fields)
        model = load_model(config)
        found.add(model.info.fingerprint)
        model.close()
    assert len(found) == 3


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
