"""Loading: which decoder a start takes; what is refused, by which name and before weights are read;
and work beside other work."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints
from checkpoints.resolve import resolve
from engine import engine as engine_module
from engine.config import EngineConfig
from engine.engine import load_engine
from engine.errors import LoadError, ModelNotSupported, TooFewBlocks
from engine.kv import sizing
from engine.kv.memory import KvMemory
from engine.models import loader, self_check, weights
from engine.models.checkpoint_config import read_checkpoint_config
from engine.models.llama import LlamaModel, rope_table
from engine.models.loader import Background, Progress, choose_device, load_model
from engine.speculation import loader as proposer_loading
from process.settings import SettingsError

Checkpoint = Callable[..., Path]


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


def _load(path: Path, decoder: str = "transformers", **fields: Any) -> Any:
    return load_model(EngineConfig(model=str(path), device="cpu", decoder=decoder, **fields))


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


@pytest.mark.parametrize("decoder", ["own", "transformers"])
def test_progress_reaches_its_end_and_a_warm_up_leaves_the_cache_untouched(
    decoder: str, llama: Path
) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    engine = load_engine(
        EngineConfig(model=str(llama), device="cpu", decoder=decoder),
        progress=lambda what, done, total: seen.setdefault(what, []).append((done, total)),
    )
    assert set(seen) == {"verify weights", "weights", "warm-up"}
    for steps in seen.values():
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
        assert steps[-1][0] == steps[-1][1] > 0
    assert not engine.kv.host_view.any() and not engine.stats().num_computed_tokens
    assert [name for name, _ in engine.model_info.seconds][-2:] == ["cache", "warm-up"]


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
    # An exact worker must not take blocks that another wrote.
    own = [{}, {"exact": True}, {"weight_dtype": "fp8_e4m3"}]
    assert len({_load(llama, "own", **fields).info.fingerprint for fields in own}) == 3
    assert _load(llama, kv_dtype="float32").info.fingerprint == base.info.fingerprint
    assert _load(llama, context_window=64).info.fingerprint == base.info.fingerprint


def test_auto_dtype_is_the_checkpoints(broken: Checkpoint, llama: Path) -> None:
    assert _load(llama).info.dtype == "float32"
    assert _load(broken({"dtype": "bfloat16"})).info.dtype == "bfloat16"


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
    with pytest.raises(TooFewBlocks, match="700 tokens"):
        load_engine(EngineConfig(model=str(llama), device="cpu", num_blocks=43))
    assert closed == ["second proposer", "first proposer", "model"]
    assert all(f"the {name} is stuck" in caplog.text for name in closed)


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


# -- which decoder


def test_the_decoder_is_chosen_by_device_model_and_setting(llama: Path, gpt2: Path) -> None:
    assert _load(llama, "auto").info.decoder == "own"
    assert _load(llama).info.decoder == "transformers (decoder=transformers)"
    assert _load(gpt2, "auto").info.decoder.startswith("transformers (gpt2 is none of llama")
    own = _load(llama, "own").info
    assert (own.decoder, own.fused) == ("own", ("3 of 3 decoder layers",))


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
        _load(gpt2, "auto", exact=True)
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


# -- memory


FOLDER = checkpoints.resolve("baton-5m", files="all").path


def test_a_model_too_big_for_the_memory_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = weights.num_weight_bytes(FOLDER, 4)
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda device: needed - 1)
    config = EngineConfig(model="baton-5m", device="cpu", dtype="float32")
    with pytest.raises(LoadError) as told:
        load_model(config)
    (line,) = str(told.value).splitlines()
    assert line.startswith("baton-5m: its weights take 0.0") and "memory limit" in line
    weights.check_memory(config, FOLDER, "baton-5m", "cpu", "bfloat16")  # half of it suffices
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda device: needed)
    weights.check_memory(config, FOLDER, "baton-5m", "cpu", "float32")


def test_ranks_on_devices_of_their_own_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = weights.num_weight_bytes(FOLDER, 4)
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda device: needed // 2)
    two = EngineConfig(model="baton-5m", tensor_parallel=2)
    weights.check_memory(two, FOLDER, "m", "cuda:0", "float32")
    with pytest.raises(LoadError):  # the ranks of a CPU share its memory
        weights.check_memory(two, FOLDER, "m", "cpu", "float32")


def test_the_weights_are_counted_as_they_will_lie() -> None:
    stored = sum(file.stat().st_size for file in FOLDER.glob("*.safetensors"))
    sizes = {size: weights.num_weight_bytes(FOLDER, size) for size in (1, 2, 4)}
    assert sizes[4] == 2 * sizes[2] == 4 * sizes[1]
    assert any(0 <= stored - size < 64 * 1024 for size in sizes.values())  # but for the header


# -- work beside other work


def test_progress_of_both_is_told_by_the_caller() -> None:
    seen: list[tuple[str, int, int, int]] = []

    def note(what: str, done: int, total: int) -> None:
        seen.append((what, done, total, threading.get_ident()))

    half = threading.Event()

    def work(report: Progress) -> str:
        report("beside", 1, 2)
        half.set()
        report("beside", 2, 2)
        return "done"

    with Background(work, note) as beside:
        assert half.wait(30)
        telling = beside.telling()
        assert telling is not None
        telling("main", 1, 1)
        assert beside.result() == "done"
    assert {ident for *_, ident in seen} == {threading.get_ident()}
    assert ("main", 1, 1, threading.get_ident()) in seen
    own = [done for what, done, *_ in seen if what == "beside"]
    assert own == sorted(set(own)) and own[-1] == 2


def test_its_error_is_the_callers() -> None:
    def work(report: Progress) -> None:
        raise OSError("the disk is gone")

    with Background(work, None) as beside, pytest.raises(OSError, match="the disk is gone"):
        beside.result()
    assert beside.telling() is None


def test_work_that_nobody_waits_for_stops() -> None:
    stopped = threading.Event()

    def work(report: Progress) -> None:
        try:
            while True:
                report("beside", 0, 1)
        finally:
            stopped.set()

    with pytest.raises(ValueError, match="other work"), Background(work, None):
        raise ValueError("other work")
    assert stopped.is_set()


def test_a_process_that_ends_does_not_wait_for_it() -> None:
    """As a worker that is told to stop while it loads: its loading thread is no reason to stay, nor
    is what goes on beside it and does not report for long."""
    code = """if True:
        import threading
        from engine.models.loader import Background

        began = threading.Event()

        def work(report):
            began.set()
            threading.Event().wait()

        def load():
            with Background(work, None) as beside:
                beside.result()

        threading.Thread(target=load, daemon=True).start()
        began.wait(30)
    """
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert ended.returncode == 0
