"""KvLayout: what one block's bytes mean. Built from what the model's probe saw, not from its
config.

A block is one contiguous run [kv_heads, layers, 2, block_size, head_dim] (heads outermost, so that
a tensor-parallel rank's share is one run; keys at 0, values at 1). Knows no torch and no memory.
Pure values; any thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from engine.errors import ModelNotSupported

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class LayerKv:
    """What one attention layer caches per token, as the probe saw it."""

    num_k_heads: int
    k_head_dim: int
    num_v_heads: int
    v_head_dim: int


@dataclass(frozen=True)
class KvLayout:
    """The byte layout of a block of plain attention with the same dims in every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """[kv_heads, layers, 2, block_size, head_dim]."""
        return (self.num_kv_heads, self.num_layers, 2, self.block_size, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        return self.num_kv_heads * self.num_layers * 2 * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.token_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    def fingerprint_part(self) -> str:
        """One line of JSON with everything a byte's meaning depends on; a part of the model
        fingerprint.

        The number of heads is the model's, not a rank's: the tensor-parallel degree is not in it.
        """
        return json.dumps(
            {
                "kind": "plain",
                "order": "block,kv_head,layer,kv,slot,dim",
                "num_layers": self.num_layers,
                "num_kv_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                "block_size": self.block_size,
                "dtype": self.dtype,
            },
            sort_keys=True,
        )


def uniform_layout(layers: Sequence[LayerKv], *, block_size: int, dtype: str) -> KvLayout:
    """The layout of `layers`.

    Raises: ModelNotSupported naming the first layer whose dims differ from layer 0's, or whose keys
        and values differ.
    """
    if not layers:
        raise ModelNotSupported(
            "the probe saw no attention layer; this model caches something else"
        )
    first = layers[0]
    if (first.num_k_heads, first.k_head_dim) != (first.num_v_heads, first.v_head_dim):
        raise ModelNotSupported(
            f"keys are {first.num_k_heads}x{first.k_head_dim} and values "
            f"{first.num_v_heads}x{first.v_head_dim}: different key and value dims are not "
            "supported yet"
        )
    for index, layer in enumerate(layers):
        if layer != first:
            raise ModelNotSupported(
                f"layer {index} caches {layer} but layer 0 {first}: per-layer KV dims are not "
                "supported yet"
            )
    return KvLayout(
        num_layers=len(layers),
        num_kv_heads=first.num_k_heads,
        head_dim=first.k_head_dim,
        block_size=block_size,
        dtype=dtype,
    )
