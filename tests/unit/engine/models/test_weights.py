"""Fused tensors from a checkpoint: every number in its place, none missing, none of another shape;
and a rank's share is its part of the whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from baton_kernels.fp8_linear import quantize_weight
from safetensors.torch import load_file, save_file

from engine.errors import LoadError
from engine.models.llama import LlamaConfig, LlamaWeights, Share, read_llama_config
from engine.models.weights import random_weights, read_weights, take_weights
from tests.harness.models import FAMILIES, save

CPU = torch.device("cpu")
HEAD_DIM = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with biases, tied, whose 6 heads share 2 of keys."""
    path = tmp_path_factory.mktemp("weights")
    save(FAMILIES["llama-tied-llama3-rope"](), path, 5)
    return path


@pytest.fixture(scope="module")
def shape() -> LlamaConfig:
    return read_llama_config(FAMILIES["llama-tied-llama3-rope"]())


def _read(folder: Path, shape: LlamaConfig, share: Share | None = None) -> LlamaWeights:
    return read_weights(folder, shape, dtype=torch.float32, device=CPU, share=share or Share())


def test_every_tensor_is_where_it_belongs(folder: Path, shape: LlamaConfig) -> None:
    tensors = load_file(folder / "model.safetensors")
    weights = _read(folder, shape)
    layer, prefix = weights.layers[1], "model.layers.1."
    for kind, found in (("weight", layer.qkv.weight), ("bias", layer.qkv.bias)):
        assert found is not None
        parts = [tensors[f"{prefix}self_attn.{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(found, torch.cat(parts))
    parts = [tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(layer.gate_up.weight, torch.cat(parts))
    assert torch.equal(layer.o.weight, tensors[f"{prefix}self_attn.o_proj.weight"])
    assert torch.equal(layer.down.weight, tensors[f"{prefix}mlp.down_proj.weight"])
    assert torch.equal(layer.norm, tensors[f"{prefix}input_layernorm.weight"])
    assert torch.equal(layer.mlp_norm, tensors[f"{prefix}post_attention_layernorm.weight"])
    assert weights.embedding is not None and weights.head is not None
    assert weights.head.weight.data_ptr() == weights.embedding.data_ptr()  # tied: one copy
    assert weights.num_bytes == 4 * shape.num_parameters


def test_numbers_are_converted_and_progress_reaches_its_end(
    folder: Path, shape: LlamaConfig
) -> None:
    seen: list[tuple[int, int]] = []
    weights = read_weights(
        folder,
        shape,
        dtype=torch.bfloat16,
        device=CPU,
        progress=lambda what, done, total: seen.append((done, total)),
    )
    plain = _read(folder, shape)
    assert torch.equal(weights.layers[0].o.weight, plain.layers[0].o.weight.bfloat16())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] == (folder / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ({"model.norm.weight": None}, r"missing keys: 1, first model\.norm\.weight"),
        ({"model.layers.7.mlp.up_proj.weight": torch.ones(80, 48)}, r"unexpected keys: 1, .*7"),
        ({"model.layers.0.mlp.bonus.weight": torch.ones(1)}, "unexpected keys: 1, .*bonus"),
        ({"vision.weight": torch.ones(1)}, "unexpected keys: 1, first vision"),
        ({"model.layers.2.mlp.down_proj.weight": torch.ones(48, 79)}, r"\[48, 79\], not \[48, 80"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    edit: dict[str, torch.Tensor | None], named: str, folder: Path, shape: LlamaConfig,
    tmp_path: Path,
) -> None:  # fmt: skip
    tensors = load_file(folder / "model.safetensors") | edit
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=named) as caught:
        _read(tmp_path, shape)
    assert "\n" not in str(caught.value)


def test_an_old_buffer_that_nobody_reads_is_no_error(
    folder: Path, shape: LlamaConfig, tmp_path: Path
) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    assert _read(tmp_path, shape).layers


def test_ranks_have_the_whole_between_them(folder: Path, shape: LlamaConfig) -> None:
    whole = _read(folder, shape)
    parts = [_read(folder, shape, Share(rank, 2)) for rank in range(2)]
    for index, layer in enumerate(whole.layers):
        first, second = (part.layers[index] for part in parts)
        assert torch.equal(torch.cat((first.o.weight, second.o.weight), 1), layer.o.weight)
        assert torch.equal(torch.cat((first.down.weight, second.down.weight), 1), layer.down.weight)
        query = 3 * HEAD_DIM
        wanted = layer.qkv.weight.split((2 * query, 2 * HEAD_DIM, 2 * HEAD_DIM))
        found = [
            torch.cat(pair)
            for pair in zip(
                first.qkv.weight.split((query, HEAD_DIM, HEAD_DIM)),
                second.qkv.weight.split((query, HEAD_DIM, HEAD_DIM)),
                strict=True,
            )
        ]
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
        assert second.o.bias is None  # sums of ranks' products: one of them has it
        assert first.o.bias is not None and layer.o.bias is not None
        assert torch.equal(first.o.bias, layer.o.bias)
    heads = [part.head.weight for part in parts if part.head is not None]
    assert whole.head is not None and torch.equal(torch.cat(heads), whole.head.weight)


def test_stages_have_the_whole_between_them(folder: Path, shape: LlamaConfig) -> None:
    """The last one of a tied model has a copy of the embedding of its own."""
    whole = _read(folder, shape)
    first = _read(folder, shape, Share(num_layers=2))
    last = _read(folder, shape, Share(first_layer=2))
    assert (len(first.layers), len(last.layers)) == (2, 1)
    assert first.head is None and first.norm is None and last.embedding is None
    assert last.head is not None and whole.head is not None and last.norm is not None
    assert torch.equal(last.head.weight, whole.head.weight)
    assert torch.equal(last.layers[0].qkv.weight, whole.layers[2].qkv.weight)
    with pytest.raises(ValueError, match="layers 2 to 4 of a model of 3"):
        _read(folder, shape, Share(first_layer=2, num_layers=2))


def test_tensors_in_memory_are_taken_as_from_a_file(folder: Path, shape: LlamaConfig) -> None:
    tensors = load_file(folder / "model.safetensors")
    taken = take_weights(tensors, shape, dtype=torch.float32, device=CPU)
    read = _read(folder, shape)
    for a, b in zip(taken.projections, read.projections, strict=True):
        assert torch.equal(a.weight, b.weight)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(LoadError, match=r"missing keys: 1, .*up_proj"):
        take_weights(tensors, shape, dtype=torch.float32, device=CPU)


def test_random_weights_fill_everything(shape: LlamaConfig) -> None:
    poisoned = dataclasses.replace(shape, is_tied=False)
    weights = random_weights(poisoned, dtype=torch.float32, device=CPU, seed=1)
    for projection in weights.projections:
        assert 0.0 < float(projection.weight.std()) < 2.0
        assert bool(torch.isfinite(projection.weight).all())
    again = random_weights(poisoned, dtype=torch.float32, device=CPU, seed=1)
    assert torch.equal(weights.projections[-1].weight, again.projections[-1].weight)


def test_fp8_matrices_are_the_whole_ones_rounded(folder: Path, shape: LlamaConfig) -> None:
    """Each row by its own scale, whether it came from a file or from memory."""
    plain = _read(folder, shape)
    read = read_weights(folder, shape, dtype=torch.float32, device=CPU, weight_dtype="fp8_e4m3")
    tensors = load_file(folder / "model.safetensors")
    taken = take_weights(tensors, shape, dtype=torch.float32, device=CPU, weight_dtype="fp8_e4m3")
    for layer, other, whole in zip(read.layers, taken.layers, plain.layers, strict=True):
        for mine, theirs, exact in zip(
            layer.projections, other.projections, whole.projections, strict=True
        ):
            wanted = quantize_weight(exact.weight)
            for found in (mine.weight, theirs.weight):
                assert torch.equal(found.values.view(torch.int8), wanted.values.view(torch.int8))
                assert torch.equal(found.scales, wanted.scales)
    assert read.head is not None and read.head.weight.dtype == torch.float32
