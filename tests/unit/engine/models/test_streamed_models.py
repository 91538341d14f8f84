"""A model with less device memory than it has weights: its numbers are those of the model that lies
there whole, to the last bit, and never more of it is there than was given."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints
from engine.batch import Batch, TokenSpan
from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from engine.errors import IntegrityError, LoadError
from engine.kv import sizing
from engine.kv.memory import TORCH_DTYPES, KvMemory
from engine.layers.torch_attention import TorchPagedAttention
from engine.models import fusion as fuse_module
from engine.models import loader, transformers_backend, weights
from engine.models.loader import load_model
from engine.models.self_check import random_instance
from engine.models.transformers_backend import (
    Built,
    OnHost,
    TransformersModel,
    build,
    cache_latents,
    find_layers,
    run,
)
from engine.models.weight_streaming import PackedLayer, weights_of
from engine.speculation.config import SpeculationConfig
from engine.speculation.loader import load_draft_model
from process.settings import SettingsError
from tests.harness.adapters import save_adapter
from tests.harness.engines import finish, make_request, tokens_of
from tests.harness.models import FAMILIES, save, small_config
from tokens.tokenizer import Tokenizer

DEVICES = ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]
BLOCK = 4
MODEL = "baton-5m"
FOLDER = checkpoints.resolve(MODEL, files="all").path
WEIGHT_BYTES = weights.num_weight_bytes(FOLDER, 4)


@pytest.fixture(autouse=True)
def _plain_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed ones round otherwise, and what is streamed is not packed."""
    monkeypatch.setattr(transformers_backend, "unavailable_reason", lambda *_: "switched off")


class _Model:
    """A random one of `config`, built anew from the same numbers each time."""

    def __init__(self, config: Any, seed: int, dtype: str = "float32", device: str = "cpu") -> None:
        self._config, self._dtype, self._device = config, dtype, device
        model = random_instance(config, seed)
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        state = model.state_dict()
        self._state = {name: tensor for name, tensor in state.items() if name not in tied}
        resident = self.build()
        layers = find_layers(resident.model)
        own = {id(tensor) for layer in layers for tensor in weights_of(layer)}
        every = [*resident.model.parameters(), *resident.model.buffers()]
        self.resident = resident
        self.rest_bytes = sum(tensor.nbytes for tensor in every if id(tensor) not in own)
        self.layer_bytes = [PackedLayer(layer).num_bytes for layer in layers]
        self.least_bytes = self.rest_bytes + 2 * max(self.layer_bytes) + 4096
        """That it can be streamed to: what is not fused has parts that are aligned one by one."""

    def build(self, streamed_to_bytes: int = 0) -> Built:
        how: dict[str, Any] = {"streamed_to_bytes": streamed_to_bytes} if streamed_to_bytes else {}
        how |= {"device": self._device, "dtype": self._dtype, "block_size": BLOCK}
        return build(self._config, self._tensors, **how)

    def _tensors(self) -> dict[str, torch.Tensor]:
        dtype = TORCH_DTYPES[self._dtype]
        return {name: tensor.to(dtype, copy=True) for name, tensor in self._state.items()}


def _logits(model: Any, layout: Any, device: str, rng: random.Random) -> torch.Tensor:
    """Of random prompts, cut at random, through the paged cache."""
    lengths = [rng.randint(1, 30) for _ in range(3)]
    counts = [layout.num_blocks_for(length) for length in lengths]
    memory = KvMemory(layout, sum(counts), device)
    views = memory.layer_views()
    tables = [tuple(range(sum(counts[:at]), sum(counts[: at + 1]))) for at in range(len(counts))]
    done, found = [0] * len(lengths), []
    while any(start < length for start, length in zip(done, lengths, strict=True)):
        spans, token_ids = [], []
        for at, (start, length) in enumerate(zip(done, lengths, strict=True)):
            count = rng.randint(0, length - start)
            if count:
                end = done[at] = start + count
                spans.append(TokenSpan(start, count, tables[at][: layout.num_blocks_for(end)]))
                token_ids += [rng.randrange(60) for _ in range(count)]
        if spans:
            batch = Batch(tuple(token_ids), tuple(spans), tuple(range(len(token_ids))))
            step = TorchPagedAttention(batch, views, layout.block_size)
            with torch.inference_mode():
                found.append(run(model, batch, step, torch.device(device)).clone())
    return torch.cat(found)


def _assert_equal(streamed: Built, resident: Built, device: str, seed: object) -> None:
    assert streamed.stream is not None and resident.stream is None
    expected = _logits(resident.model, resident.layout, device, random.Random(f"{seed}"))
    actual = _logits(streamed.model, streamed.layout, device, random.Random(f"{seed}"))
    assert torch.equal(actual, expected)
    streamed.stream.check_integrity()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("model_type", "dtype"),
    [
        ("llama", "float32"),
        ("qwen3", "bfloat16"),
        ("gemma2", "float32"),
        ("mixtral", "bfloat16"),
    ],
)
def test_streamed_layers_give_the_resident_models_bits(
    model_type: str, dtype: str, device: str, seed: int
) -> None:
    """Fused layers, such as are not, and experts; with as little as may be, and as many resident
    layers as fit at random."""
    rng = random.Random(f"{seed}-{model_type}")
    model = _Model(small_config(model_type), rng.randrange(2**31), dtype, device)
    least, whole = model.least_bytes, model.rest_bytes + sum(model.layer_bytes)
    for given in (least, rng.randint(least, whole - 1)):
        streamed = model.build(given)
        assert streamed.fused == model.resident.fused
        stream = streamed.stream
        assert stream is not None and len(stream.plan.streamed) >= 3
        assert stream.account.peak == stream.plan.device_bytes <= given
        _assert_equal(streamed, model.resident, device, seed)
        stream.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
@pytest.mark.timeout(400)  # half a billion random numbers are made on the host, and copied twice
def test_large_layers_arrive_before_they_are_computed(seed: int) -> None:
    """Copies that take longer than the computation, and the other way round, on a real device."""
    config = small_config("llama")
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 2048, 8192, 8
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 16, 16, 128
    model = _Model(config, seed, "bfloat16", "cuda:0")
    given = model.rest_bytes + 4 * max(model.layer_bytes) + 2**20
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    streamed = model.build(given)
    assert torch.cuda.max_memory_allocated() - before < given + 2**27  # and what a pass needs
    assert streamed.stream is not None
    assert all(host.bytes.is_pinned() for host in streamed.stream._hosts)
    for index in range(20):
        _assert_equal(streamed, model.resident, "cuda:0", f"{seed}-{index}")
    streamed.stream.close()


def test_a_pass_that_fails_leaves_the_next_one_right(seed: int) -> None:
    model = _Model(small_config("llama"), 1)
    streamed = model.build(model.least_bytes)

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    for index, layer in enumerate(streamed.model.model.layers):
        hook = layer.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            _logits(streamed.model, streamed.layout, "cpu", random.Random(0))
        hook.remove()
        _assert_equal(streamed, model.resident, "cpu", f"{seed}-{index}")


def test_the_host_has_what_is_streamed_once_and_the_rest_not_at_all() -> None:
    def live() -> list[torch.Tensor]:
        """On the host, in memory of their own kind: other tests leave tensors without any."""
        gc.collect()
        kinds = torch.Tensor, torch.nn.Parameter
        found = [one for one in gc.get_objects() if type(one) in kinds]
        return [one for one in found if one.layout is torch.strided and one.device.type == "cpu"]

    config = small_config("llama")
    config.hidden_size = config.intermediate_size = 256
    model = _Model(config, 3)
    others = live()  # kept, so that none of their addresses comes again
    known = {one.untyped_storage().data_ptr() for one in others}
    found = model.build(model.least_bytes)
    assert found.stream is not None
    stores = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in live()}
    after = {place: store.nbytes() for place, store in stores.items() if place not in known}
    plan = found.stream.plan
    for memory in (*found.stream._buffers, *(host.bytes for host in found.stream._hosts)):
        assert after[memory.data_ptr()] == memory.nbytes
    assert sum(after.values()) < plan.host_bytes + plan.device_bytes + min(model.layer_bytes)


def test_a_fusion_that_changes_numbers_is_undone_and_streamed(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    def wrong(model: Any, **how: Any) -> tuple[str, ...]:
        done = fuse_module.fuse(model, **how)
        model.model.layers[1].norm_eps = 1.0
        return done

    monkeypatch.setattr(transformers_backend, "fuse", lambda *_, **__: ())
    model = _Model(small_config("llama"), 2)
    monkeypatch.setattr(transformers_backend, "fuse", wrong)
    streamed = model.build(model.least_bytes)
    assert streamed.fused[0].startswith("nothing: fused logits were")
    _assert_equal(streamed, model.resident, "cpu", seed)


# -- what cannot be


@pytest.mark.parametrize(
    ("model_type", "told"),
    [
        (
            "deepseek_v3",
            "weights_device_bytes: DeepseekV3ForCausalLM caches latents (MLA), and matrices that "
            "belong to them are kept apart from its layers: they cannot be streamed; leave it 0",
        ),
        (
            "longcat_flash",
            "weights_device_bytes: LongcatFlashForCausalLM keeps its {num_layers} layers in 0 "
            "lists; only layers of one list can be streamed: leave it 0",
        ),
    ],
)
def test_models_whose_layers_cannot_be_streamed_are_named(model_type: str, told: str) -> None:
    """A LongCat layer is two to some versions of transformers: the count told is theirs."""
    model = random_instance(small_config(model_type), 0)
    cache_latents(model)
    with pytest.raises(LoadError) as caught:
        OnHost(model, "cpu", 2**40)
    assert str(caught.value) == told.format(num_layers=model.config.num_hidden_layers)


def test_layers_that_share_weights_are_refused() -> None:
    model = random_instance(small_config("llama"), 0)
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(LoadError, match="layers of LlamaForCausalLM share weights"):
        OnHost(model, "cpu", 2**40)


@pytest.mark.parametrize(
    "fields",
    [
        {"decoder": "own"},
        {"exact": True},
        {"weight_dtype": "fp8_e4m3"},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
    ],
)
def test_settings_that_do_not_go_with_it_are_refused_by_name(fields: dict[str, Any]) -> None:
    (name,) = fields
    with pytest.raises(SettingsError, match=rf"^{name}: .* does not go with weights_device_bytes"):
        EngineConfig(weights_device_bytes=1, **fields)
    EngineConfig(**fields)
    with pytest.raises(SettingsError, match="weights_device_bytes: must be at least 0, got -1"):
        EngineConfig(weights_device_bytes=-1)


def _config(**fields: Any) -> EngineConfig:
    given = {"weights_device_bytes": WEIGHT_BYTES * 6 // 10} | fields
    return EngineConfig(model=MODEL, device="cpu", dtype="float32", num_blocks=128, **given)


def _no_read(*_: object, **__: object) -> None:
    raise AssertionError("weights were read")


def test_too_few_bytes_are_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader, "read_tensors", _no_read)
    with pytest.raises(LoadError) as caught:
        load_model(_config(weights_device_bytes=5_000_000))
    (line,) = str(caught.value).splitlines()
    assert line.startswith("weights_device_bytes: 5000000 are too few: 2 buffers of a layer (29")
    assert line.endswith("take 8000512")


def test_too_little_host_memory_is_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU what is streamed must be there, and on the device what is not; on a CPU, both."""
    free = {"cpu": 0, "cuda:0": 10**9}
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda device: free[device])
    monkeypatch.setattr(loader, "read_tensors", _no_read)
    streamed, on_device = 5 * 2951168, 2098176 + 3 * 2951168
    stored = 2  # bytes of a number in the files
    for device, dtype, needed in (
        ("cpu", "float32", streamed + on_device),
        ("cuda:0", "float32", WEIGHT_BYTES),  # all of it is converted first
        ("cuda:0", "bfloat16", streamed * stored // 4),
    ):
        config = _config(weights_device_bytes=WEIGHT_BYTES * 6 // 10 * stored // 2)
        if dtype == "bfloat16":
            config = replace(config, weights_device_bytes=config.weights_device_bytes // 2)
        free["cpu"] = needed - 1
        with pytest.raises(LoadError) as caught:
            weights.check_memory(config, FOLDER, MODEL, device, dtype)
        (line,) = str(caught.value).splitlines()
        assert f"{needed} bytes of host memory are needed on cpu, and {needed - 1} are" in line
        free["cpu"] = needed
        weights.check_memory(config, FOLDER, MODEL, device, dtype)
    free["cuda:0"] = 5_000_000
    with pytest.raises(LoadError, match=r"bytes of memory are needed on cuda:0, and 5000000 are"):
        weights.check_memory(config, FOLDER, MODEL, "cuda:0", "bfloat16")
    free["cpu"] = 0
    with pytest.raises(LoadError, match=f"^{MODEL}: of its weights as float32, "):
        load_model(_config())


# -- in an engine


def _answers(engine: LLMEngine) -> list[list[int]]:
    """To a greedy request and a sampled one."""
    prompt = Tokenizer.load(FOLDER).encode("Once upon a time there was a little")
    for seed, temperature in enumerate((0.0, 0.8)):
        fields = {"max_tokens": 24, "temperature": temperature, "seed": seed}
        engine.submit(make_request(f"{seed}", prompt, **fields))
    return [tokens_of(events) for _, events in sorted(finish(engine).items())]


def _stream_of(engine: LLMEngine) -> Any:
    assert isinstance(engine._model, TransformersModel)
    return engine._model.stream


def test_the_engine_checks_the_law_of_streamed_layers() -> None:
    engine = load_engine(_config())
    engine.check_integrity()
    stream = _stream_of(engine)
    stream._streamed[0].point(stream._streamed[0].views(stream._hosts[0].bytes))
    with pytest.raises(IntegrityError, match="streamed layer 0 lies in no buffer"):
        engine.check_integrity()
    engine.close()


def test_a_draft_model_lies_on_the_device_whole() -> None:
    """What the target's weights may take is no bound of the draft model's."""
    proposer = load_draft_model(replace(_config(weights_device_bytes=1), model="baton-5m-draft"))
    assert proposer._model.info.decoder == "own"  # which streams nothing


def test_trees_cut_the_passes_of_a_streamed_model() -> None:
    """The same answers as without streaming, and half the copies at most."""
    trees = SpeculationConfig(draft_models=("baton-5m-draft",), expansion=(2, 1, 1, 1), always=True)
    resident = load_engine(
        _config(weights_device_bytes=WEIGHT_BYTES, decoder="transformers")  # it fits
    )
    assert _stream_of(resident) is None and resident.model_info.weight_bytes == WEIGHT_BYTES
    expected = _answers(resident)
    num_passes: list[float] = []
    for speculation in (SpeculationConfig(), trees):
        engine = load_engine(_config(speculation=speculation))
        info, stream = engine.model_info, _stream_of(engine)
        assert info.linear == "plain (layers are streamed)"
        assert info.decoder == "transformers (layers are streamed)"
        assert info.weight_bytes == stream.plan.device_bytes <= WEIGHT_BYTES * 6 // 10
        before = stream.num_copies
        assert _answers(engine) == expected
        num_passes.append((stream.num_copies - before) / len(stream.plan.streamed))
        assert _stream_of(engine) is stream
        engine._model.close()
    assert num_passes[0] == 24
    assert num_passes[1] <= num_passes[0] / 2


def test_adapters_go_with_it(tmp_path: Path) -> None:
    config = FAMILIES["llama"]()
    model = save(config, tmp_path / "model", 1)
    adapter = save_adapter(tmp_path / "adapter", model, 2)
    total = sum(tensor.nbytes for tensor in weights_of(model))
    outcomes: list[torch.Tensor] = []
    for given in (0, total - 1000):
        where: dict[str, Any] = {"model": str(tmp_path / "model"), "device": "cpu"}
        loaded = load_model(
            EngineConfig(**where, weights_device_bytes=given, decoder="transformers")
        )
        loaded.attach(KvMemory(loaded.layout, 4))
        loaded.adapters.load("a", adapter)
        token_ids = tuple(range(3, 33))
        span = TokenSpan(0, 30, (0, 1))
        for slot in (0, loaded.adapters.slot("a")):
            one = span._replace(adapter=slot)
            outcomes.append(loaded.forward(Batch(token_ids, (one,), tuple(range(30)))).clone())
        loaded.close()
    plain, adapted, streamed_plain, streamed_adapted = outcomes
    assert torch.equal(plain, streamed_plain) and torch.equal(adapted, streamed_adapted)
    assert not torch.allclose(plain, adapted, atol=1e-3)
