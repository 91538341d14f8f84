"""QuantizedFake: a FakeModel over a quantized cache, whose tokens show each wrong number that is
seen there, and whether it was seen as computed or as quantized: to the bit, in whatever batch.

All that a token sees has the same weight, so that its attention times their number is the sum of
their values. These are whole numbers and a quarter, of which int8 keeps the whole number: with the
greatest at 127 its steps are 1. Sums are told apart by quarters, far above what float32 loses. The
second layer's values depend on what the first one saw.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from engine.batch import Batch, TokenSpan
from engine.kv.layout import LayerKv, layout_of
from engine.kv.memory import KvMemory
from engine.layers.quantized_attention import QuantizedAttention, Scales
from engine.testing.fake_model import FakeModel

_GREATEST, _DIM = 127, 8


def quantize_fake(model: FakeModel, scale: str) -> None:
    """Give a fake's cache a quantized layout, with scales of this kind, and a fingerprint of it."""
    layout = layout_of(
        [LayerKv(1, _DIM, 1, _DIM)] * 2,
        block_size=model.layout.block_size,
        dtype="float32",
        kv_dtype="int8",
        scale=scale,
    )
    identity = model.info.fingerprint + layout.fingerprint_part
    fingerprint = hashlib.blake2b(identity.encode(), digest_size=32).hexdigest()
    model.layout = layout
    model.info = replace(model.info, fingerprint=fingerprint)


class SeesQuantized(FakeModel):
    """To be mixed in before a FakeModel: see the module. After `quantize_fake`."""

    def attach(self, memory: KvMemory) -> None:
        self._quantized = memory
        self._views = memory.layer_views()
        self._seen: dict[tuple[int, ...], tuple[int, list[bytes]]] = {}

    def forward(self, batch: Batch) -> torch.Tensor:
        """See FakeModel. All is attended to before any history is asked for."""
        self._seen = {}
        if all(span.block_ids for span in batch.spans):
            seen = self._attend(batch)
            first = 0
            for span in batch.spans:
                own = seen[first : first + span.num_tokens]
                self._seen[span.block_ids] = span.start, own
                first += span.num_tokens
        return super().forward(batch)

    def _attend(self, batch: Batch) -> list[bytes]:
        fixed: list[Scales] = [(1.0, 1.0)] * 2 if self.layout.scale == "tensor" else []
        step = QuantizedAttention(batch, self._quantized, self._views, fixed)
        positions = np.array(batch.positions)
        zeros = torch.zeros(1, len(positions), _DIM)
        told: Iterable[bytes] = [f"{one} {at}".encode() for one, at in
                                 zip(batch.token_ids, positions, strict=True)]  # fmt: skip
        for layer in range(2):
            values = torch.tensor([_numbers(one) for one in told])[None]
            out = step.attend(layer, zeros, zeros, values, 1.0, None)[:, 0]  # [T, D]
            sums = out.double().numpy() * (positions[:, None] + 1) * 4
            assert np.abs(sums - sums.round()).max() < 0.2, "sums are no quarters"
            told = [row.tobytes() for row in sums.round().astype(np.int64)]
        return list(told)

    def _write(self, span: TokenSpan, token_ids: object) -> None:
        """It is written already."""

    def _read(self, span: TokenSpan, slots: list[int]) -> bytes:
        start, seen = self._seen[span.block_ids]
        return seen[slots[-1] - start]


def _numbers(told: bytes) -> list[float]:
    digest = hashlib.blake2b(told, digest_size=_DIM - 1).digest()
    return [float(_GREATEST), *(byte % _GREATEST + 0.25 for byte in digest)]


class QuantizedFake(SeesQuantized):
    """One by itself.

    Args:
        scale: what one of the cache's scales is for.
    """

    def __init__(
        self, scale: str, *, context_window: int, block_size: int, vocab_size: int = 97
    ) -> None:
        super().__init__(
            vocab_size=vocab_size, context_window=context_window, block_size=block_size
        )
        quantize_fake(self, scale)
