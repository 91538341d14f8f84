"""DecoderWeights: the tensors of our decoder, fused, on the device; and Builder, which makes them
empty and says what belongs where.

Query, key and value rows lie below one another, gate rows above inner rows. A rank of several has
only its share. Where matrices are kept in fp8, those of the layers are, with a scale per row;
embedding and head are not. Knows no files (engine/models/weights.py) and no KV. Load time only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from baton_kernels.fp8_linear import FP8, Fp8Weight, quantize_weight

from engine.decoder.shape import DecoderShape
from engine.layers.linear import FusedLinear

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
LAYERS = "model.layers."


@dataclass(frozen=True)
class Share:
    """One rank's part: a cut through every layer (tensor parallel), of some layers (pipeline)."""

    rank: int = 0
    """Of the ranks that share layers."""

    num_ranks: int = 1

    first_layer: int = 0

    num_layers: int = -1
    """-1: all from `first_layer` on."""

    def layers(self, shape: DecoderShape) -> range:
        """Which of the model's layers it has. Raises: ValueError where they do not exist."""
        num_layers = self.num_layers
        end = shape.num_layers if num_layers < 0 else self.first_layer + num_layers
        if not 0 <= self.first_layer < end <= shape.num_layers:
            raise ValueError(f"layers {self.first_layer} to {end} of a model of {shape.num_layers}")
        return range(self.first_layer, end)

    def part(self, size: int) -> slice:
        """Its part of `size` things that are dealt in equal runs."""
        each = size // self.num_ranks
        return slice(self.rank * each, (self.rank + 1) * each)


WHOLE = Share()


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Norms are [hidden] or [D]."""

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
class DecoderWeights:
    """One rank's tensors."""

    shape: DecoderShape
    """Of this rank's part, with the whole model's number of layers."""

    share: Share
    layers: tuple[LayerWeights, ...]

    embedding: torch.Tensor | None
    """[V, hidden], whole on every rank of the first stage; None: another stage has it."""

    norm: torch.Tensor | None
    """The last norm; None: another stage has it, and the head."""

    head: FusedLinear | None
    """[V / ranks, hidden]."""

    @property
    def projections(self) -> list[FusedLinear]:
        """All, the head's last."""
        found = [one for layer in self.layers for one in layer.projections]
        return found if self.head is None else [*found, self.head]

    @property
    def is_fp8(self) -> bool:
        """The layers' matrices are kept in fp8."""
        return any(isinstance(one.weight, Fp8Weight) for one in self.projections)

    @property
    def num_bytes(self) -> int:
        """On the device; what is tied counts once."""
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
    """Where (a part of) one of a checkpoint's tensors goes."""

    name: str
    full_shape: tuple[int, ...]
    """As the checkpoint must have it."""

    target: torch.Tensor
    """A dense view of a fused buffer."""

    rows: slice
    columns: slice
    """What of it is this rank's; of a vector, `rows`."""

    scales: torch.Tensor | None = None
    """[target's rows] float32, where the target is fp8: its numbers are quantized."""

    def put(self, numbers: torch.Tensor) -> None:
        """Fill it.

        Args:
            numbers: of the target's shape, in the dtype computed in, on its device.
        """
        if self.scales is None:
            self.target.copy_(numbers)
            return
        quantized = quantize_weight(numbers)
        self.target.copy_(quantized.values)
        self.scales.copy_(quantized.scales)


ALL = slice(None)


class Builder:
    """Makes empty buffers and notes what belongs into them.

    Args:
        dtype: that is computed in.
        weight_dtype: "fp8_e4m3": of the layers' matrices; "": the dtype computed in.
    Attributes:
        placements: what is to be filled.
        others: tensors of these layers that only another rank takes.
    """

    def __init__(
        self,
        shape: DecoderShape,
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

    def build(self) -> DecoderWeights:
        """All buffers of this share, not filled."""
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
        return DecoderWeights(self.local, share, layers, embedding, norm, head)

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
        """Several projections as one, each cut by its outputs."""
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
        """A projection cut by its inputs: ranks' products are added up, so one has the bias."""
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
        """Of a layer."""
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
        """`rows` and `columns` of a tensor belong into `part` of a buffer's rows."""
        if isinstance(buffer, Fp8Weight):
            values, scales = buffer.values[part], buffer.scales[part]
            self.placements.append(Placement(name, full_shape, values, rows, columns, scales))
        else:
            self.placements.append(Placement(name, full_shape, buffer[part], rows, columns))
