"""KvLayout: what one block's bytes mean, as a table. Built from what the model's probe saw, not
from its config.

A block is one contiguous byte record. Layers that cache equally many kv heads form a group; a group
is one run, heads outermost (so that a tensor-parallel rank's share is one run), then layers, then
keys before values, each [block_size, dim]. Where all layers agree, which is nearly always, there is
one group; where all dims agree, too, the record is [kv_heads, layers, 2, block_size, head_dim].
Latents (MLA) are keys without values: one head, whose first `v_head_dim` columns are the values.
Quantized numbers take one byte; each head's run then ends with its scales (float32), in the order
of its matrices: a block is read with nothing beside it. Knows no torch and no memory. Pure values;
any thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from engine.errors import ModelNotSupported

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8_e4m3": 1}
QUANTIZED = ("int8", "fp8_e4m3")
_SCALE_BYTES = 4


@dataclass(frozen=True)
class LayerKv:
    """The heads and dims that one attention layer caches per token."""

    num_k_heads: int
    k_head_dim: int
    num_v_heads: int
    """Number of value heads. 0: latents (MLA), whose values are the first `v_head_dim` columns of
    the keys."""
    v_head_dim: int

    @property
    def is_latent(self) -> bool:
        """Whether the values are a part of the keys and have no bytes of their own (MLA)."""
        return self.num_v_heads == 0

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The numbers that one head stores per token: (key dim, value dim), or (latent dim,)."""
        return (self.k_head_dim,) if self.is_latent else (self.k_head_dim, self.v_head_dim)


@dataclass(frozen=True)
class Section:
    """The place of one layer's keys (or values) in a block: one matrix [block_size, dim] per
    head."""

    layer: int
    kv: int
    """0: keys, or latents; 1: values."""

    offset: int
    """Elements (bytes in a quantized cache) from the start of the block to head 0's matrix."""

    head_stride: int
    """Elements (bytes in a quantized cache) from one head's matrix to the next one's."""

    num_heads: int
    dim: int

    scale_offset: int = 0
    """Bytes from the start of the block to head 0's scales; used in a quantized cache only."""


@dataclass(frozen=True)
class KvLayout:
    """The layout of one KV block: layers, block size, dtype and scales, and the offsets that
    follow."""

    layers: tuple[LayerKv, ...]
    block_size: int

    dtype: str
    """The dtype of the stored numbers: a key of DTYPE_BYTES."""

    scale: str = ""
    """What one scale of a quantized cache covers: "tensor" (all keys, or all values, of a layer),
    "block" (one head of one block) or "token_head" (one head of one token). "": not quantized."""

    compute_dtype: str = ""
    """The dtype in which the model computes keys and values, if it differs from `dtype`; "": the
    same."""

    @classmethod
    def plain(
        cls, *, num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str
    ) -> KvLayout:
        """Create the layout of a model whose layers all have the same heads and dims."""
        layer = LayerKv(num_kv_heads, head_dim, num_kv_heads, head_dim)
        return cls((layer,) * num_layers, block_size, dtype)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_quantized(self) -> bool:
        return self.dtype in QUANTIZED

    @property
    def raw(self) -> KvLayout:
        """The layout of the same blocks in the model's compute dtype: unfilled blocks of a
        quantized cache are kept in it."""
        return KvLayout(self.layers, self.block_size, self.compute_dtype or self.dtype)

    @property
    def num_scales(self) -> int:
        """The number of scales of one head's matrix; 0 if the cache is not quantized."""
        if not self.is_quantized:
            return 0
        return self.block_size if self.scale == "token_head" else 1

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The sections of all layers, in the order of their bytes."""
        found: list[Section] = []
        start = 0
        for num_heads in dict.fromkeys(layer.num_k_heads for layer in self.layers):
            group = [i for i, layer in enumerate(self.layers) if layer.num_k_heads == num_heads]
            matrices = [
                (i, kv, dim) for i in group for kv, dim in enumerate(self.layers[i].head_dims)
            ]
            num_elements = sum(dim for _, _, dim in matrices) * self.block_size
            num_scale_bytes = self.num_scales * _SCALE_BYTES
            if num_scale_bytes:
                num_elements = -(-num_elements // _SCALE_BYTES) * _SCALE_BYTES
            stride = num_elements + num_scale_bytes * len(matrices)
            offset, scale_offset = start, start + num_elements
            for index, kv, dim in matrices:
                found.append(Section(index, kv, offset, stride, num_heads, dim, scale_offset))
                offset += dim * self.block_size
                scale_offset += num_scale_bytes
            start += stride * num_heads
        return tuple(found)

    def section(self, layer: int, kv: int) -> Section:
        """Return the section of a layer's keys (`kv` 0) or values (1). Raises: KeyError for the
        values of a layer of latents."""
        return self._by_place[layer, kv]

    @cached_property
    def _by_place(self) -> dict[tuple[int, int], Section]:
        return {(section.layer, section.kv): section for section in self.sections}

    @cached_property
    def num_elements(self) -> int:
        """The number of elements of a block; in a quantized cache its bytes, scales included."""
        strides = {section.num_heads: section.head_stride for section in self.sections}
        return sum(num_heads * stride for num_heads, stride in strides.items())

    @cached_property
    def row_elements(self) -> int:
        """The stride, in elements, that a row number counts (`rows` of the kernels): the greatest
        common divisor of the block's size and all head strides."""
        return math.gcd(self.num_elements, *(section.head_stride for section in self.sections))

    @property
    def is_uniform(self) -> bool:
        """Whether keys and values have one shape in all layers and are not quantized, so that the
        block is a plain array."""
        first = self.layers[0]
        return (
            not self.is_quantized
            and all(layer == first for layer in self.layers)
            and ((first.num_k_heads, first.k_head_dim) == (first.num_v_heads, first.v_head_dim))
        )

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of a block: (kv_heads, layers, 2, block_size, head_dim), or (elements,) where
        the layout is not uniform."""
        if not self.is_uniform:
            return (self.num_elements,)
        first = self.layers[0]
        return (first.num_k_heads, len(self.layers), 2, self.block_size, first.k_head_dim)

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers, its share of the block's scales included."""
        return self.block_bytes // self.block_size

    @property
    def block_bytes(self) -> int:
        return self.num_elements * DTYPE_BYTES[self.dtype]

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def fingerprint_part(self) -> str:
        """The part of the model fingerprint that describes the KV bytes: one line of JSON with
        everything on which their meaning depends.

        It counts the model's heads, not a rank's: the tensor-parallel degree is not in it.
        """
        common: dict[str, object] = {"block_size": self.block_size, "dtype": self.dtype}
        if self.compute_dtype not in ("", self.dtype):
            common["compute_dtype"] = self.compute_dtype
        if self.is_quantized:
            common |= {"scale": self.scale, "scales": "float32, after each head's matrices"}
        if self.is_uniform:
            first = self.layers[0]
            table: dict[str, object] = {
                "kind": "plain",
                "order": "block,kv_head,layer,kv,slot,dim",
                "num_layers": len(self.layers),
                "num_kv_heads": first.num_k_heads,
                "head_dim": first.k_head_dim,
            }
        else:
            table = {
                "kind": "table",
                "order": "block,group,kv_head,layer,kv,slot,dim",
                "layers": [
                    [layer.num_k_heads, layer.k_head_dim, layer.num_v_heads, layer.v_head_dim]
                    for layer in self.layers
                ],
            }
        return json.dumps(table | common, sort_keys=True)


def layout_of(
    layers: Sequence[LayerKv], *, block_size: int, dtype: str, kv_dtype: str = "", scale: str = ""
) -> KvLayout:
    """Build the layout of the layers that the probe of the model found.

    Args:
        dtype: the model's dtype.
        kv_dtype: the dtype of the stored KV; "": the model's.
        scale: what one scale covers (KvLayout.scale); ignored unless `kv_dtype` is a quantized one.

    Raises: ModelNotSupported if there is no layer, or naming one whose keys and values have
        different numbers of heads.
    """
    if not layers:
        raise ModelNotSupported(
            "the probe saw no attention layer; this model caches something else"
        )
    for index, layer in enumerate(layers):
        if not layer.is_latent and layer.num_k_heads != layer.num_v_heads:
            raise ModelNotSupported(
                f"layer {index} has {layer.num_k_heads} key heads and {layer.num_v_heads} value "
                "heads: paged attention has as many of both"
            )
    kv_dtype = kv_dtype or dtype
    return KvLayout(
        tuple(layers),
        block_size,
        kv_dtype,
        scale if kv_dtype in QUANTIZED else "",
        "" if kv_dtype == dtype else dtype,
    )
