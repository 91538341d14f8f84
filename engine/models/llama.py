"""LlamaDecoder and LlamaModel: our own decoder for the family of Llama (Llama, Mistral, Qwen2,
Qwen3), with five or six kernel launches per layer on a GPU.

- LlamaConfig: the sizes and switches of a model, read from a transformers config. Invariant: a
  config that `read_llama_config` accepts is computed as transformers does; loader.py checks that
  for every config (self_check.py).
- LlamaWeights: one rank's tensors, fused, on the device. The rows of query, key and value are
  concatenated, and so are those of gate and up projection. With fp8, the layers' matrices are
  stored in it with a scale per row; embedding and head are not. WeightsBuilder allocates them and
  records the place of each of the checkpoint's tensors; weights.py fills them.
- LlamaDecoder: the forward pass over the paged cache.
- LlamaModel: the decoder as a LoadedModel (interface.py): turns a Batch into tensors, and knows
  the layout of the cache.

It knows no files, no requests, no states and no sampling, and does not import transformers: ranks
start without it. Engine thread only.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from baton_kernels.block_rows import BlockRows
from baton_kernels.dispatch import Backend
from baton_kernels.fp8_linear import FP8, Fp8Weight, quantize_weight
from baton_kernels.layer_ops import rms_norm
from baton_kernels.linear import HalfNorm
from baton_kernels.packed_linear import unavailable_reason
from torch.nn.functional import embedding

from engine.batch import Batch
from engine.decoder.ahead import AheadDecoder
from engine.decoder.graph_set import capture_all
from engine.decoder.inputs import (
    DecodeInputs,
    MixedInputs,
    attending_inputs,
    mixed_inputs,
    singles_first,
)
from engine.decoder.plain_graphs import PlainGraphs
from engine.errors import LoadError
from engine.kv.layout import KvLayout, LayerKv, layout_of
from engine.kv.memory import TORCH_DTYPES, KvMemory, LayerView
from engine.kv.sizing import DeviceMemory
from engine.layers.attention import PagedAttention
from engine.layers.linear import FusedLinear
from engine.layers.quantized_attention import QuantizedAttention, Scales
from engine.layers.torch_attention import Attend, Scratch, TorchPagedAttention, scratch_for
from engine.lora.limits import LoraLimits
from engine.lora.manager import LoraManager
from engine.lora.stacked_weights import Site, StackedLora
from engine.models.interface import DecodesAhead, Ends, Guesses, InOneProcess, Progress
from engine.request import ModelInfo
from engine.sampling.host_device_copies import bring

# -- config


FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROPES = ("default", "linear", "llama3", "yarn")
"""RoPE types whose frequencies do not depend on a request's length."""


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and switches of the model, or of one rank's part of it."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    has_qkv_bias: bool
    has_o_bias: bool
    has_mlp_bias: bool
    has_head_norms: bool
    """Whether queries and keys of each head get an RMSNorm before RoPE (Qwen3)."""
    is_tied: bool
    """Whether the LM head shares the embedding's weight."""

    windows: tuple[int | None, ...]
    """The sliding window of each layer, in tokens; None: full attention."""

    rope_frequencies: tuple[float, ...]
    """RoPE frequencies, [D / 2], in radians per position, rounded to float32."""

    rope_scale: float
    """The factor of RoPE's cosines and sines (YaRN)."""

    @property
    def scaling(self) -> float:
        """The factor of attention scores, 1 / sqrt(D)."""
        return 1.0 / math.sqrt(self.head_dim)

    @property
    def qkv_features(self) -> int:
        """Number of columns of query, key and value heads together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Number of parameters of all weights; a tied LM head is not counted again."""
        hidden, inner, query = self.hidden_size, self.intermediate_size, self.num_heads
        query *= self.head_dim
        layer = self.qkv_features * hidden + query * hidden + 3 * inner * hidden + 2 * hidden
        layer += self.qkv_features * self.has_qkv_bias + hidden * self.has_o_bias
        layer += (2 * inner + hidden) * self.has_mlp_bias + 2 * self.head_dim * self.has_head_norms
        ends = self.vocab_size * hidden * (1 if self.is_tied else 2) + hidden
        return layer * self.num_layers + ends

    def why_not_shared(self, num_ranks: int) -> str | None:
        """Return why the layers cannot be split between `num_ranks` tensor-parallel ranks; None:
        they can."""
        for what, count in (
            ("key-value heads", self.num_kv_heads),
            ("heads", self.num_heads),
            ("inner features", self.intermediate_size),
            ("vocabulary entries", self.vocab_size),
        ):
            if count % num_ranks:
                return f"{count} {what} cannot be shared by {num_ranks} ranks"
        return None

    def share(self, num_ranks: int) -> LlamaConfig:
        """Return the sizes of one tensor-parallel rank's part. Raises: ValueError if the layers
        cannot be split."""
        reason = self.why_not_shared(num_ranks)
        if reason is not None:
            raise ValueError(reason)
        return replace(
            self,
            num_heads=self.num_heads // num_ranks,
            num_kv_heads=self.num_kv_heads // num_ranks,
            intermediate_size=self.intermediate_size // num_ranks,
        )


def unsupported_reason(config: Any) -> str | None:
    """Return why LlamaDecoder does not support a model of this transformers config; None: it
    does."""
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is none of {', '.join(FAMILIES)}"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, not silu"
    if config.num_attention_heads % config.num_key_value_heads:
        return "its heads are not a multiple of its key-value heads"
    rope = config.rope_parameters
    kind = rope.get("rope_type")
    if kind not in _ROPES:
        return f"its RoPE is {kind}: none of {', '.join(_ROPES)}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "its RoPE turns a part of each head only"
    return None


def read_llama_config(config: Any) -> LlamaConfig:
    """Read the sizes from a transformers config. Raises: ValueError with the reason if
    `unsupported_reason` has one."""
    reason = unsupported_reason(config)
    if reason is not None:
        raise ValueError(reason)
    family = config.model_type
    has_bias = bool(getattr(config, "attention_bias", False)) and family in ("llama", "qwen3")
    frequencies, rope_scale = _rope(config)
    return LlamaConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim(config),
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        norm_eps=float(config.rms_norm_eps),
        has_qkv_bias=has_bias or family == "qwen2",
        has_o_bias=has_bias,
        has_mlp_bias=family == "llama" and bool(config.mlp_bias),
        has_head_norms=family == "qwen3",
        is_tied=bool(config.tie_word_embeddings),
        windows=_windows(config),
        rope_frequencies=frequencies,
        rope_scale=rope_scale,
    )


def rope_table(shape: LlamaConfig, num_positions: int, device: torch.device) -> torch.Tensor:
    """Compute the RoPE table [num_positions, D] float32: for every position the cosines, then the
    sines, of D / 2 angles. Angles are float32 products, as transformers computes them.

    Source: RoFormer, arXiv:2104.09864, section 3.4.2.
    """
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    frequencies = torch.tensor(shape.rope_frequencies, dtype=torch.float32, device=device)
    angles = positions[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(shape.rope_scale)


def head_dim(config: Any) -> int:
    """Return the head dim of a transformers config."""
    named = getattr(config, "head_dim", None)
    return int(named or config.hidden_size // config.num_attention_heads)


def _windows(config: Any) -> tuple[int | None, ...]:
    """Return the sliding window of each layer. Llama's code reads none, whatever its config
    says."""
    num_layers = int(config.num_hidden_layers)
    if config.model_type == "llama":
        return (None,) * num_layers
    window = None if config.sliding_window is None else int(config.sliding_window)
    if config.model_type == "mistral":
        return (window,) * num_layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def _rope(config: Any) -> tuple[tuple[float, ...], float]:
    """Return RoPE frequencies and scale; transformers computes those of scaled types."""
    rope = config.rope_parameters
    dim = head_dim(config)
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return tuple((1.0 / (rope["rope_theta"] ** exponents)).tolist()), 1.0
    # Here: processes that are given a shape need no transformers.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    if not math.isfinite(scale) or len(frequencies) != dim // 2:
        raise ValueError(f"transformers gives {len(frequencies)} frequencies, scale {scale}")
    return tuple(frequencies.float().tolist()), float(scale)


@dataclass(slots=True)
class HiddenStateCapture:
    """Hidden states that one forward pass keeps in addition to its logits. It is set on a
    LlamaDecoder of all layers for one pass, which fills it; not under a CUDA graph."""

    wants_every: bool = False
    """Whether to keep `every`; the last layer then computes all rows."""

    layers: tuple[int, ...] = ()
    """Indices of the layers whose `inputs` are kept."""

    hidden: torch.Tensor | None = None
    """[R, hidden], the LM head's input for the rows of the logits."""

    every: torch.Tensor | None = None
    """[T, hidden], the LM head's input for all rows."""

    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """The input of each of `layers`, [T, hidden]."""

    def enter(self, layer: int, x: torch.Tensor) -> None:
        """Keep the input of a layer, if wanted. Called before the layer, which overwrites x [T,
        hidden]."""
        if layer in self.layers:
            self.inputs[layer] = x.clone()

    def in_order(self, places: torch.Tensor) -> None:
        """Reorder `every` and `inputs` after a pass whose rows were in another order than the
        batch's.

        Args: places: [T] int64, the row of each of the batch's tokens in the pass.
        """
        if self.every is not None:
            self.every = self.every.index_select(0, places)
        self.inputs = {layer: rows.index_select(0, places) for layer, rows in self.inputs.items()}


# -- weights


EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
LAYERS = "model.layers."


@dataclass(frozen=True)
class Share:
    """One rank's part of a model: a slice of each layer (tensor parallel), of some of the layers
    (pipeline parallel)."""

    rank: int = 0
    """Index among the ranks that split the same layers."""

    num_ranks: int = 1

    first_layer: int = 0

    num_layers: int = -1
    """Number of layers; -1: all from `first_layer` on."""

    def layers(self, shape: LlamaConfig) -> range:
        """Return the indices of its layers in the model. Raises: ValueError if the model does not
        have them."""
        num_layers = self.num_layers
        end = shape.num_layers if num_layers < 0 else self.first_layer + num_layers
        if not 0 <= self.first_layer < end <= shape.num_layers:
            raise ValueError(f"layers {self.first_layer} to {end} of a model of {shape.num_layers}")
        return range(self.first_layer, end)

    def part(self, size: int) -> slice:
        """Return its slice of `size` items that are split into equal runs."""
        each = size // self.num_ranks
        return slice(self.rank * each, (self.rank + 1) * each)


WHOLE = Share()


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one decoder layer. Norms are [hidden] or [D]."""

    norm: torch.Tensor
    qkv: FusedLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: FusedLinear
    mlp_norm: torch.Tensor
    gate_up: FusedLinear
    down: FusedLinear

    @property
    def projections(self) -> tuple[FusedLinear, ...]:
        return self.qkv, self.o, self.gate_up, self.down


@dataclass(frozen=True)
class LlamaWeights:
    """The weights of one rank."""

    shape: LlamaConfig
    """The sizes of this rank's part, with the whole model's number of layers."""

    share: Share
    layers: tuple[LayerWeights, ...]

    embedding: torch.Tensor | None
    """[V, hidden], whole on every rank of the first pipeline stage; None on other stages."""

    norm: torch.Tensor | None
    """The final norm, [hidden], on the last pipeline stage; None on other stages."""

    head: FusedLinear | None
    """The LM head, [V / ranks, hidden], on the last pipeline stage; None on other stages."""

    @property
    def projections(self) -> list[FusedLinear]:
        """All projections of the layers, and then the LM head if there is one."""
        found = [one for layer in self.layers for one in layer.projections]
        return found if self.head is None else [*found, self.head]

    @property
    def is_fp8(self) -> bool:
        """Whether the layers' matrices are stored in fp8."""
        return any(isinstance(one.weight, Fp8Weight) for one in self.projections)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device; tied weights are counted once."""
        tensors = [self.embedding, self.norm]
        for layer in self.layers:
            tensors += [layer.norm, layer.mlp_norm, layer.q_norm, layer.k_norm]
        for projection in self.projections:
            tensors += projection.tensors
        storages = {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
            for one in tensors
            if one is not None
        }
        packed = [one.weight for one in self.projections if isinstance(one.weight, tuple)]
        return sum(storages.values()) + sum(half.num_bytes for one in packed for half in one)


@dataclass(frozen=True)
class Placement:
    """The place of (a part of) a checkpoint's tensor in a fused buffer."""

    name: str
    full_shape: tuple[int, ...]
    """The shape that the tensor must have in the checkpoint."""

    target: torch.Tensor
    """The place: a dense view of a fused buffer."""

    rows: slice
    columns: slice
    """The columns of the tensor that are this rank's. For a vector `rows` counts."""

    scales: torch.Tensor | None = None
    """[target's rows] float32 if the target is fp8, so that its numbers are quantized; else
    None."""

    def put(self, numbers: torch.Tensor) -> None:
        """Write numbers to the target, quantized if it is fp8.

        Args: numbers: of the target's shape, in the compute dtype, on its device.
        """
        if self.scales is None:
            self.target.copy_(numbers)
            return
        quantized = quantize_weight(numbers)
        self.target.copy_(quantized.values)
        self.scales.copy_(quantized.scales)


ALL = slice(None)


class WeightsBuilder:
    """Creates empty weights of one rank and records the place of each of the checkpoint's tensors.

    Args:
        dtype: the dtype to compute in.
        weight_dtype: the dtype of the layers' matrices, "fp8_e4m3"; "": the dtype to compute in.
    Attributes:
        placements: the places to fill.
        others: names of tensors of these layers that only another rank needs.
    """

    def __init__(
        self,
        shape: LlamaConfig,
        share: Share,
        dtype: torch.dtype,
        device: torch.device,
        weight_dtype: str = "",
    ) -> None:
        self.shape, self.share = shape, share
        self.local = shape.share(share.num_ranks)
        self.dtype, self.device = dtype, device
        self._is_fp8 = weight_dtype == "fp8_e4m3"
        self.placements: list[Placement] = []
        self.others: set[str] = set()

    def build(self) -> LlamaWeights:
        """Allocate all buffers of this rank's weights, without filling them."""
        shape, share = self.shape, self.share
        indices = share.layers(shape)
        layers = tuple(self._layer(f"{LAYERS}{index}.") for index in indices)
        is_first, is_last = indices.start == 0, indices.stop == shape.num_layers
        whole = (shape.vocab_size, shape.hidden_size)
        embedding = norm = head = None
        if is_first:
            embedding = self._empty(*whole)
            self._place(EMBEDDING, whole, embedding)
        if is_last:
            norm = self._vector("model.norm.weight", shape.hidden_size)
            part = share.part(shape.vocab_size)
            if embedding is not None and shape.is_tied:
                head = FusedLinear(embedding[part])
            else:
                weight = self._empty(part.stop - part.start, shape.hidden_size)
                self._place(EMBEDDING if shape.is_tied else HEAD, whole, weight, rows=part)
                head = FusedLinear(weight)
        return LlamaWeights(self.local, share, layers, embedding, norm, head)

    def _layer(self, prefix: str) -> LayerWeights:
        shape = self.shape
        hidden, inner, dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
        query, key = shape.num_heads * dim, shape.num_kv_heads * dim
        qkv = [("self_attn.q_proj", query), ("self_attn.k_proj", key), ("self_attn.v_proj", key)]
        gate_up = [("mlp.gate_proj", inner), ("mlp.up_proj", inner)]
        q_norm = k_norm = None
        if shape.has_head_norms:
            q_norm = self._vector(f"{prefix}self_attn.q_norm.weight", dim)
            k_norm = self._vector(f"{prefix}self_attn.k_norm.weight", dim)
        return LayerWeights(
            norm=self._vector(f"{prefix}input_layernorm.weight", hidden),
            qkv=self._by_rows(prefix, qkv, hidden, has_bias=shape.has_qkv_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            o=self._by_columns(f"{prefix}self_attn.o_proj", query, has_bias=shape.has_o_bias),
            mlp_norm=self._vector(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=self._by_rows(
                prefix, gate_up, hidden, has_bias=shape.has_mlp_bias, is_gated=True
            ),
            down=self._by_columns(
                f"{prefix}mlp.down_proj", share_of=inner, has_bias=shape.has_mlp_bias
            ),
        )

    def _by_rows(
        self,
        prefix: str,
        parts: list[tuple[str, int]],
        in_features: int,
        *,
        has_bias: bool,
        is_gated: bool = False,
    ) -> FusedLinear:
        """Create one linear layer of several projections, each split between ranks by its
        outputs."""
        num_rows = sum(features for _, features in parts) // self.share.num_ranks
        weight = self._matrix(num_rows, in_features)
        bias = self._empty(num_rows) if has_bias else None
        first = 0
        for name, features in parts:
            rows = self.share.part(features)
            end = first + rows.stop - rows.start
            full = (features, in_features)
            self._place(f"{prefix}{name}.weight", full, weight, slice(first, end), rows=rows)
            if bias is not None:
                self._place(f"{prefix}{name}.bias", full[:1], bias, slice(first, end), rows=rows)
            first = end
        return FusedLinear(weight, bias, is_gated=is_gated)

    def _by_columns(self, name: str, share_of: int, *, has_bias: bool) -> FusedLinear:
        """Create a linear layer that is split between ranks by its inputs; the ranks' products are
        summed, so that one rank has the bias."""
        hidden, columns = self.shape.hidden_size, self.share.part(share_of)
        weight = self._matrix(hidden, columns.stop - columns.start)
        self._place(f"{name}.weight", (hidden, share_of), weight, columns=columns)
        bias = None
        if has_bias and self.share.rank == 0:
            bias = self._vector(f"{name}.bias", hidden)
        elif has_bias:
            self.others.add(f"{name}.bias")
        return FusedLinear(weight, bias)

    def _vector(self, name: str, size: int) -> torch.Tensor:
        target = self._empty(size)
        self._place(name, (size,), target)
        return target

    def _empty(self, *sizes: int) -> torch.Tensor:
        return torch.empty(*sizes, dtype=self.dtype, device=self.device)

    def _matrix(self, num_rows: int, num_columns: int) -> torch.Tensor | Fp8Weight:
        """Allocate a matrix of a layer, in fp8 if the layers' matrices are."""
        if not self._is_fp8:
            return self._empty(num_rows, num_columns)
        values = torch.empty(num_rows, num_columns, dtype=FP8, device=self.device)
        return Fp8Weight(values, torch.empty(num_rows, dtype=torch.float32, device=self.device))

    def _place(
        self,
        name: str,
        full_shape: tuple[int, ...],
        buffer: torch.Tensor | Fp8Weight,
        part: slice = ALL,
        *,
        rows: slice = ALL,
        columns: slice = ALL,
    ) -> None:
        """Record that `rows` and `columns` of a checkpoint's tensor are written to rows `part` of a
        buffer."""
        if isinstance(buffer, Fp8Weight):
            values, scales = buffer.values[part], buffer.scales[part]
            self.placements.append(Placement(name, full_shape, values, rows, columns, scales))
        else:
            self.placements.append(Placement(name, full_shape, buffer[part], rows, columns))


# -- the forward pass


_LEAST_SPARED_ROWS = 64
"""Smallest number of unsampled rows for which the last layer computes the sampled rows only, which
costs two more small launches; guessed."""

_AttendLayer = Callable[[int, LayerWeights, torch.Tensor], torch.Tensor]
"""The attention of a layer: (index among this stage's layers, layer, qkv [T, (H + 2 K) D]) -> [T, H
D]."""


class Collective(Protocol):
    """Collective operations of the ranks that split the same layers."""

    @property
    def rank(self) -> int: ...

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' x, possibly in place."""
        ...

    def join_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' columns: [M, V / ranks] of each -> [M, V]."""
        ...


class Stream(NamedTuple):
    """The hidden states between two layers."""

    x: torch.Tensor
    """The hidden states, [T, hidden]."""

    half_norm: HalfNorm | None = None
    """The norm before the next layer, if the previous product has computed a part of it; else
    None."""


class LlamaDecoder:
    """The forward pass of a Llama model over the paged cache.

    `decode` computes one token of each sequence, with fixed shapes and nothing read back, so that a
    CUDA graph can capture it. `forward` computes any step. Both write KV and have no other side
    effect. A row attends to the cached tokens of its own sequence and to itself.

    Args:
        weights: this rank's weights.
        rope: [positions, D] float32 (`rope_table`), for as many positions as the longest request
            has.
        is_exact: the bits of a row's result do not depend on the other rows or the kind of step;
            slower.
        backend: the implementation of every kernel.
        collective: the collective operations, if several ranks split the layers; else None.
    """

    def __init__(
        self,
        weights: LlamaWeights,
        rope: torch.Tensor,
        *,
        is_exact: bool = False,
        backend: Backend = "auto",
        collective: Collective | None = None,
    ) -> None:
        self.weights = weights
        self.shape = weights.shape
        self.is_exact = is_exact
        self.capture: HiddenStateCapture | None = None
        """Where `forward` and `forward_attending` keep hidden states; None: they keep none. Not
        under a CUDA graph."""
        self.stacks: StackedLora | None = None
        self.backend: Backend
        self._collective = collective
        self._adds_residual = collective is None or collective.rank == 0
        first = weights.share.first_layer
        self._windows = weights.shape.windows[first : first + len(weights.layers)]
        self._attention = PagedAttention(
            num_heads=weights.shape.num_heads,
            scaling=weights.shape.scaling,
            norm_eps=weights.shape.norm_eps,
            rope=rope,
            windows=self._windows,
            is_exact=is_exact,
        )
        for projection in weights.projections:
            projection.is_exact = is_exact
        self.use_backend(backend)

    def use_backend(self, backend: Backend) -> None:
        """Set the implementation of every kernel from now on."""
        self.backend = self._attention.backend = backend
        for projection in self.weights.projections:
            projection.backend = backend

    def attach(self, rows: Sequence[BlockRows]) -> None:
        """Set the KV cache to use from now on. Args: rows: one entry for each of this stage's
        layers. Raises: ValueError for another number of them."""
        if len(rows) != len(self.weights.layers):
            raise ValueError(f"rows: {len(rows)} for {len(self.weights.layers)} layers")
        self._attention.rows = rows

    def stack(self, stacks: StackedLora) -> None:
        """Set the stacked LoRA adapters that rows of `decode` may use from now on.

        Args: stacks: the adapters of this decoder's projections.
        """
        self.stacks = stacks
        for projection in self.weights.projections:
            projection.stack = stacks.by_linear.get(projection)

    def decode(self, inputs: DecodeInputs, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Compute one token of each sequence.

        Args: hidden: [B, hidden], the output of the stage before, which is overwritten; None on the
            first stage.
        Returns: logits [B, V]; on a stage that is not the last, hidden states [B, hidden].
        """
        if inputs.adapted is None:
            return self._decode(inputs, hidden)
        if self.stacks is None:
            raise ValueError("inputs: rows with adapters, which lie nowhere")
        with self.stacks.of_step(inputs.adapted):
            return self._decode(inputs, hidden)

    def _decode(self, inputs: DecodeInputs, hidden: torch.Tensor | None) -> torch.Tensor:
        positions, block_tables = inputs.positions, inputs.block_tables

        def attend(index: int, layer: LayerWeights, qkv: torch.Tensor) -> torch.Tensor:
            return self._attention.decode(index, layer, qkv, positions, block_tables)

        stream = Stream(self._embed(inputs.token_ids, hidden))
        for index, layer in enumerate(self.weights.layers):
            stream = self._layer(index, layer, stream, attend)
        return self._logits(stream)

    def forward(self, inputs: MixedInputs, hidden: torch.Tensor | None = None) -> torch.Tensor:
        """Compute any step.

        Args: hidden: [T, hidden], the output of the stage before, which is overwritten; None on the
            first stage.
        Returns: logits [R, V] of the rows of `draw_indices`; on a stage that is not the last,
            hidden states [T, hidden].
        """

        def attend(index: int, layer: LayerWeights, qkv: torch.Tensor) -> torch.Tensor:
            return self._attention.forward(index, layer, qkv, inputs)

        stream = Stream(self._embed(inputs.token_ids, hidden))
        last = len(self.weights.layers) - 1
        for index, layer in enumerate(self.weights.layers):
            if self.capture is not None:
                self.capture.enter(index, stream.x)
            if index == last and self._spares_rows(inputs):
                return self._logits(self._last_layer(index, layer, stream, inputs), inputs.logits)
            stream = self._layer(index, layer, stream, attend)
        if self.weights.head is None:
            return stream.x
        self._keep_every(stream)
        if inputs.draw_indices is None:
            return self._logits(stream, inputs.logits)
        return self._logits(Stream(stream.x.index_select(0, inputs.draw_indices)), inputs.logits)

    def forward_attending(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        draw_indices: torch.Tensor,
        step: Attend,
    ) -> torch.Tensor:
        """Compute any step with another attention than the kernels': on a CPU, or over a quantized
        cache.

        Args:
            token_ids, positions: [T] int32.
            draw_indices: [R] int32.
            step: writes KV and computes the attention. For a decoder of all layers only.
        Returns: logits [R, V].
        """

        def attend(index: int, layer: LayerWeights, qkv: torch.Tensor) -> torch.Tensor:
            shape = self.shape
            key = qkv.new_empty(qkv.shape[0], shape.num_kv_heads, shape.head_dim)
            value = torch.empty_like(key)
            query = self._attention.rotate(index, layer, qkv, positions, key_value=(key, value))
            attended = step.attend(
                index,
                query.transpose(0, 1),
                key.transpose(0, 1),
                value.transpose(0, 1),
                shape.scaling,
                self._windows[index],
            )
            return attended.reshape(qkv.shape[0], -1)

        stream = Stream(self._embed(token_ids, None))
        for index, layer in enumerate(self.weights.layers):
            if self.capture is not None:
                self.capture.enter(index, stream.x)
            stream = self._layer(index, layer, stream, attend)
        self._keep_every(stream)
        return self._logits(Stream(stream.x.index_select(0, draw_indices)))

    # -- parts

    def _embed(self, token_ids: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        if hidden is not None:
            return hidden
        if self.weights.embedding is None:
            raise ValueError("hidden: this stage has no embedding")
        return embedding(token_ids, self.weights.embedding)

    def _layer(
        self, index: int, layer: LayerWeights, stream: Stream, attend: _AttendLayer
    ) -> Stream:
        """Compute one layer. Only the result may be used afterwards, not `stream`."""
        attended = attend(index, layer, self._qkv(layer, stream))
        return self._finish_layer(index, layer, stream.x, attended)

    def _qkv(self, layer: LayerWeights, stream: Stream) -> torch.Tensor:
        return layer.qkv.forward(
            stream.x,
            norm_weight=layer.norm,
            norm_eps=self.shape.norm_eps,
            half_norm=stream.half_norm,
        )

    def _finish_layer(
        self, index: int, layer: LayerWeights, x: torch.Tensor, attended: torch.Tensor
    ) -> Stream:
        """Compute the part of a layer after its attention: x [M, hidden], attended [M, H D]."""
        eps = self.shape.norm_eps
        within = self._room(layer.o, attended, layer.gate_up, layer.mlp_norm)
        x = self._added(layer.o.forward(attended, residual=self._residual(x), leaves=within))
        inner = layer.gate_up.forward(x, norm_weight=layer.mlp_norm, norm_eps=eps, half_norm=within)
        behind = None
        taker, norm = self._taker(index + 1)
        if taker is not None and norm is not None:
            behind = self._room(layer.down, inner, taker, norm)
        x = layer.down.forward(inner, residual=self._residual(x), leaves=behind)
        return Stream(self._added(x), behind)

    def _taker(self, index: int) -> tuple[FusedLinear | None, torch.Tensor | None]:
        """Return the projection and the norm that the hidden states before this layer go to, or
        those of the LM head after the last layer."""
        layers = self.weights.layers
        if index < len(layers):
            return layers[index].qkv, layers[index].norm
        return self.weights.head, self.weights.norm

    def _room(
        self, maker: FusedLinear, x: torch.Tensor, taker: FusedLinear, norm: torch.Tensor
    ) -> HalfNorm | None:
        """Return the buffer for a half-computed norm (FusedLinear.room); None for sums of several
        ranks, and with `is_exact`."""
        if self._collective is not None or self.is_exact:
            return None
        return maker.room(x, taker, norm, self.shape.norm_eps)

    def _last_layer(
        self, index: int, layer: LayerWeights, stream: Stream, inputs: MixedInputs
    ) -> Stream:
        """Compute the last layer for the rows of `draw_indices` only; the others only write their
        KV: [T, hidden] -> [R, hidden]."""
        drawn = inputs.draw_indices
        if drawn is None:
            raise ValueError("inputs: all rows are drawn from")
        qkv = self._qkv(layer, stream)
        attended = self._attention.forward_drawn(index, layer, qkv, inputs, drawn)
        return self._finish_layer(index, layer, stream.x.index_select(0, drawn), attended)

    def _spares_rows(self, inputs: MixedInputs) -> bool:
        is_head = self.weights.head is not None
        has_adapters = any(one.deltas is not None for one in self.weights.layers[-1].projections)
        spared = inputs.num_rows - inputs.num_draws
        return (
            is_head
            and inputs.num_draws > 0
            and inputs.trees is None  # whose rows are attended by their nodes
            and not has_adapters  # whose rows are those of the whole step
            and not (self.capture is not None and self.capture.wants_every)
            and spared >= _LEAST_SPARED_ROWS
        )

    def _residual(self, x: torch.Tensor) -> torch.Tensor | None:
        return x if self._adds_residual else None

    def _added(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._collective is None else self._collective.add_up(x)

    def _keep_every(self, stream: Stream) -> None:
        if self.capture is not None and self.capture.wants_every:
            self.capture.every = self._normed(stream)

    def _normed(self, stream: Stream) -> torch.Tensor:
        """Apply the final norm. Raises: ValueError on a stage that does not have it."""
        if self.weights.norm is None:
            raise ValueError("capture: this stage has no norm")
        normed: torch.Tensor = rms_norm(
            stream.x, self.weights.norm, self.shape.norm_eps, backend=self.backend
        )
        return normed

    def _logits(self, stream: Stream, out: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits: [R, hidden] -> [R, V]; on a stage without the head, return the hidden
        states.

        Args: out: a buffer for the logits (MixedInputs.logits); None: a new one.
        """
        head, norm = self.weights.head, self.weights.norm
        if head is None or norm is None:
            return stream.x
        if self.capture is not None:
            self.capture.hidden = self._normed(stream)
        logits: torch.Tensor = head.forward(
            stream.x,
            norm_weight=norm,
            norm_eps=self.shape.norm_eps,
            half_norm=stream.half_norm,
            out=out if self._collective is None else None,  # whose columns are some of them
        )
        return logits if self._collective is None else self._collective.join_columns(logits)


# -- the model behind the engine's seam


MakeAhead = Callable[[LlamaDecoder, KvMemory], AheadDecoder]
"""Creates the AheadDecoder of a decoder on its cache."""

MakeGraphs = Callable[[LlamaDecoder, KvMemory], PlainGraphs | None]
"""Creates the CUDA graphs of plain steps of a decoder on its cache; None if there are none."""

_NO_ROWS = Batch((), (), ())
_HERE = contextlib.nullcontext()


class LlamaModel(InOneProcess):
    """A LoadedModel (interface.py) over a LlamaDecoder. It turns a Batch into tensors; the decoder
    computes.

    Without the kernels (on a CPU), and over a cache that stores another dtype than the model
    computes in, the attention is that of torch_attention.py and quantized_attention.py in
    engine/layers. A warm-up batch (spans without blocks) runs the same code as a request without
    writing KV; its logits are meaningless.

    Args:
        fixed_scales: the scales of each layer, if the cache has one scale for all keys of a layer.
        uses_kernels: False: torch's attention, whatever the cache stores.
        make_ahead: called when `ahead` is first read; None: no decode step is launched ahead. Used
            with the kernels' attention only.
        make_graphs: called by `warm_up` if nothing is launched ahead; None: plain steps are
            launched kernel by kernel. Used with the kernels' attention only.
        graph_bytes: upper limit of the device memory that these graphs need.
        launches_prompts: launch steps with prompts ahead, too; needs pinned memory.
    """

    def __init__(
        self,
        decoder: LlamaDecoder,
        info: ModelInfo,
        layout: KvLayout,
        *,
        lora: LoraLimits | None = None,
        fixed_scales: Sequence[Scales] = (),
        uses_kernels: bool = True,
        make_ahead: MakeAhead | None = None,
        make_graphs: MakeGraphs | None = None,
        graph_bytes: int = 0,
        launches_prompts: bool = False,
    ) -> None:
        self.info = info
        self.layout = layout
        self.decoder = decoder
        self._make_ahead = make_ahead
        self._make_graphs = make_graphs
        self._graph_bytes = graph_bytes
        self._launches_prompts = launches_prompts
        self._ahead: AheadDecoder | None = None
        self._graphs: PlainGraphs | None = None
        self._device = torch.device(info.device)
        self._fixed_scales = fixed_scales
        self._has_kernels = uses_kernels and layout.dtype == info.dtype
        self._memory: KvMemory | None = None
        self._views: list[LayerView] = []
        self._scratch: Scratch | None = None
        is_cpu = self._device.type == "cpu"
        limits = lora or LoraLimits()
        if make_ahead is not None and self._has_kernels and not decoder.is_exact:
            stack_adapters(decoder, limits, self._device, info.dtype)
        self.adapters = LoraManager(
            limits,
            lambda: find_sites(decoder.weights),
            dtype=torch.float32 if is_cpu else TORCH_DTYPES[info.dtype],
            device=self._device,
            stacks=decoder.stacks,
        )

    def attach(self, memory: KvMemory) -> None:
        """Use this KV cache from now on; drops the graphs of an earlier one."""
        share, layers = self.decoder.weights.share, self.decoder.weights.layers
        indices = range(share.first_layer, share.first_layer + len(layers))
        self._memory = memory
        self._views = memory.layer_views(indices, share.rank, share.num_ranks)
        self.decoder.attach([block_rows(view, memory.layout) for view in self._views])
        if not self._has_kernels:
            self._scratch = scratch_for(memory, self.info.dtype)
        self._ahead = self._graphs = None

    def check_integrity(self) -> None:
        """Check the memory into which steps gather KV. Raises: IntegrityError where its accounting
        is wrong."""
        if self._scratch is not None:
            self._scratch.check_integrity()

    def close(self) -> None:
        """Free the memory into which steps gather KV."""
        if self._scratch is not None:
            self._scratch.close()

    @property
    def reads_unwritten(self) -> bool:  # type: ignore[override]  # a constant elsewhere
        """Whether torch's attention is used, which reads whole blocks; the kernels read no slot
        after a sequence's end."""
        return not self._has_kernels

    @property
    def ends(self) -> Ends | None:
        """The embedding and the LM head; None on a rank that lacks one of them."""
        weights = self.decoder.weights
        embedding, head = weights.embedding, weights.head
        if embedding is None or head is None:
            return None

        def scores(hidden: torch.Tensor) -> torch.Tensor:
            with on_device(self._device):
                return head.forward(hidden)

        return Ends(
            embedding.shape[1],
            lambda token_ids: torch.nn.functional.embedding(token_ids, embedding),
            scores,
            len(weights.layers),
        )

    @property
    def guesses(self) -> Guesses:  # type: ignore[override]  # as above
        """TREES; CHAINS for an exact model, since a row of a tree sums in another order than the
        same token alone."""
        return Guesses.CHAINS if self.decoder.is_exact else Guesses.TREES

    @property
    def ahead(self) -> DecodesAhead | None:
        """The interface for launching decode steps ahead, created on first use; None if the model
        has none."""
        if self._memory is None or self._make_ahead is None or not self._has_kernels:
            return None
        if self._ahead is None:
            self._ahead = self._make_ahead(self.decoder, self._memory)
            if self._launches_prompts:
                self._ahead.take_prompts(self._forward)
            self._graphs = self._ahead.plain
        return self._ahead

    @property
    def graphs(self) -> PlainGraphs | None:
        """The CUDA graphs of plain steps; None if they are not captured, or there are none."""
        return self._graphs

    def device_memory(self) -> DeviceMemory | None:
        """Return the memory of the model's CUDA device, with adapters counted as weights and graphs
        as part of the largest step; None on CPU."""
        found = super().device_memory()
        if found is None:
            return None
        stacks = self.decoder.stacks
        return replace(
            found,
            weight_bytes=found.weight_bytes + (0 if stacks is None else stacks.num_bytes),
            step_bytes=found.step_bytes + self._graph_bytes,
        )

    def warm_up(self, progress: Progress | None = None) -> None:
        """Capture the CUDA graphs of plain steps, if the model has any."""
        if self._memory is None or self._make_graphs is None or not self._has_kernels:
            return
        self._graphs = self._make_graphs(self.decoder, self._memory)
        if self._graphs is not None:
            capture_all([self._graphs], self._device, progress)
            with on_device(self._device):
                self._graphs.reserve()

    def queues_step(self, batch: Batch) -> bool:
        """Whether a CUDA graph computes this batch; otherwise it is launched kernel by kernel."""
        graphs = None if batch.wants_hidden or self._device.type != "cuda" else self._graphs
        return graphs is not None and graphs.takes(batch)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the batch (LoadedModel.forward). Logits have the model's dtype. Raises:
        ValueError for a token tree on an exact model."""
        return self._forward(batch)

    def _forward(self, batch: Batch, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the batch, as ForwardDrawn (mixed_launch.py). With `drawn`, the tokens of the
        launch before, the cache stores the compute dtype, and the batch has no draft tokens and
        wants no hidden states."""
        if self.decoder.is_exact and any(span.is_tree for span in batch.spans):
            raise ValueError(
                "exact: one path of guesses, no token tree: its sums have another order"
            )
        self.kept_hidden = self.kept_every_hidden = None
        self.kept_layer_inputs = {}
        graphs = None if batch.wants_hidden or drawn is not None else self._graphs
        with on_device(self._device):
            # The device waits until its graph is launched: nothing else is done before.
            logits = None if graphs is None else graphs.verify(batch)
            return self._compute(batch, drawn) if logits is None else logits

    @torch.inference_mode()
    def _compute(self, batch: Batch, drawn: torch.Tensor | None) -> torch.Tensor:
        if not self._has_kernels and not batch.wants_hidden:
            return self._forward_attending(batch)
        if batch.wants_hidden:
            return self._forward_keeping(batch)
        ordered = singles_first(batch)
        logits = None if self._graphs is None else self._graphs.run(ordered, drawn)
        if logits is not None:
            return logits
        with self._adapting(ordered):
            return self.decoder.forward(mixed_inputs(ordered, self._device, drawn))

    def _forward_keeping(self, batch: Batch) -> torch.Tensor:
        """Compute the batch without CUDA graphs, and keep the hidden states that it wants."""
        capture = HiddenStateCapture(batch.wants_every_hidden, batch.wants_layers)
        self.decoder.capture = capture
        try:
            if self._has_kernels:
                ordered = singles_first(batch)
                with self._adapting(ordered):
                    logits = self.decoder.forward(mixed_inputs(ordered, self._device))
                if batch.wants_every_hidden:
                    capture.in_order(_places(batch, self._device))
            else:
                logits = self._forward_attending(batch)
        finally:
            self.decoder.capture = None
        self.kept_hidden, self.kept_every_hidden = capture.hidden, capture.every
        self.kept_layer_inputs = capture.inputs
        return logits

    @contextlib.contextmanager
    def _adapting(self, batch: Batch) -> Generator[None, None, None]:
        """Apply the adapters of the batch's rows in the body. Launches ahead find theirs in
        StackedLora."""
        self.adapters.begin(batch)
        try:
            yield
        finally:
            self.adapters.begin(_NO_ROWS)

    def _forward_attending(self, batch: Batch) -> torch.Tensor:
        """Compute the batch with torch's attention."""
        if self._memory is None:
            raise ValueError("no cache is attached")
        step: Attend
        if self._memory.tails is not None:
            step = QuantizedAttention(batch, self._memory, self._views, self._fixed_scales)
        else:
            step = TorchPagedAttention(batch, self._views, self.layout.block_size, self._scratch)
        with self._adapting(batch):
            return self.decoder.forward_attending(*attending_inputs(batch, self._device), step)


def _places(batch: Batch, device: torch.device) -> torch.Tensor:
    """Return the row of each token of a batch after `singles_first`, [T] int64."""
    every = tuple(range(len(batch.token_ids)))
    places = singles_first(replace(batch, draw_indices=every)).draw_indices
    return bring(np.array(places, dtype=np.int64), device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which `device` is the current one, on which kernels are launched."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    # The device waits meanwhile, and mostly it is the current one.
    if torch.cuda.current_device() == device.index:
        return _HERE
    return torch.cuda.device(device)


def kv_layout(
    shape: LlamaConfig, *, block_size: int, dtype: str, kv_dtype: str = "", scale: str = ""
) -> KvLayout:
    """Return the layout of the KV blocks of a whole model of these sizes. The arguments are those
    of `layout_of`."""
    layer = LayerKv(shape.num_kv_heads, shape.head_dim, shape.num_kv_heads, shape.head_dim)
    return layout_of(
        (layer,) * shape.num_layers,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        scale=scale,
    )


def block_rows(view: LayerView, layout: KvLayout) -> BlockRows:
    """Return one layer's part of the cache as an argument of the kernels."""
    return view.block_rows(layout.dtype if layout.is_quantized else "")


def find_sites(weights: LlamaWeights) -> dict[str, Site]:
    """Return the linear layers that adapters can be added to, by their names in the checkpoint.
    Raises: ValueError for a rank's part of a model, since adapters are not split."""
    if weights.share != Share():
        raise ValueError("adapters on a model that several ranks share")
    shape = weights.shape
    sites: dict[str, Site] = {}
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    for index, layer in enumerate(weights.layers):
        parts = {
            "self_attn.q_proj": Site(layer.qkv, 0, hidden, query),
            "self_attn.k_proj": Site(layer.qkv, query, hidden, key),
            "self_attn.v_proj": Site(layer.qkv, query + key, hidden, key),
            "self_attn.o_proj": Site(layer.o, 0, query, hidden),
            "mlp.gate_proj": Site(layer.gate_up, 0, hidden, inner),
            "mlp.up_proj": Site(layer.gate_up, inner, hidden, inner),
            "mlp.down_proj": Site(layer.down, 0, inner, hidden),
        }
        sites |= {f"model.layers.{index}.{name}": site for name, site in parts.items()}
    return sites


def stack_adapters(
    decoder: LlamaDecoder, limits: LoraLimits, device: torch.device, dtype: str
) -> None:
    """Allocate the stacked adapters of launched rows and set them on `decoder`, if the limits allow
    any. Raises: LoadError if the device lacks the memory."""
    if not limits.max_launched_rank or not limits.max_num_adapters:
        return
    try:
        stacks = StackedLora(
            find_sites(decoder.weights),
            num_slots=limits.max_num_adapters,
            max_rank=limits.max_launched_rank,
            dtype=TORCH_DTYPES[dtype],
            device=device,
        )
    except torch.OutOfMemoryError as error:
        raise LoadError(
            f"no memory on {device} for {limits.max_num_adapters} adapters of rank "
            f"{limits.max_launched_rank} beside the weights: lower lora.max_launched_rank, or "
            "lora.max_num_adapters"
        ) from error
    decoder.stack(stacks)


def pack_weights(decoder: LlamaDecoder, dtype: str) -> str:
    """Reorder a decoder's weights for this CPU, if possible. Returns: a description of how products
    are computed."""
    reason = unavailable_reason(TORCH_DTYPES[dtype], "cpu")
    if reason is not None:
        return f"plain ({reason})"
    for projection in decoder.weights.projections:
        projection.pack()
    return "packed"
