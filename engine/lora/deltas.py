"""What adapters add to one linear layer: `x @ A.T @ B`, for the rows of a step that ask for it.

AdapterRows says which rows of the step's row of tokens belong to which slot; there is one per
model, set before each forward pass. Deltas holds one linear layer's factors by slot. Rows without
an adapter are neither read nor written, so they stay equal to the last bit; rows of one adapter are
multiplied together, so that no adapter's numbers meet another's. With no adapter in the step
nothing is computed. Source of the grouping: Punica, arXiv:2310.18547, section 4. Engine thread
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import linear

from engine.batch import Span
from engine.errors import IntegrityError

_MAX_WIDE_ROWS = 32
"""Up to this many rows of each adapter are multiplied in the dtype that factors are held in
(float32 on CPU: a product costs 2-5 us where bfloat16 costs 12-20 us to dispatch, and that is more
than the bytes cost); more, in the model's, whose products of many rows are several times as fast.
Measured."""


class AdapterRows:
    """The rows of one step by slot.

    Attributes:
        slots: those in the step, none twice.
        sizes: rows of each of them; the picked rows are those of slots[0], then of slots[1], ...
        index: [n] the picked rows in the step's row; None: all of it, in its order.
        num_rows: of the step.
        is_small: no adapter has more than _MAX_WIDE_ROWS rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.slots: tuple[int, ...] = ()
        self.sizes: list[int] = []
        self.index: torch.Tensor | None = None
        self.num_rows = 0
        self.is_small = True

    def place(self, spans: Sequence[Span]) -> None:
        """Set it for one step."""
        self.slots, self.index = (), None
        if not any(span.adapter for span in spans):
            return
        ranges: dict[int, list[range]] = {}
        first = 0
        for span in spans:
            if span.adapter:
                rows = range(first, first + span.num_tokens)
                ranges.setdefault(span.adapter, []).append(rows)
            first += span.num_tokens
        picked = [row for parts in ranges.values() for rows in parts for row in rows]
        self.slots = tuple(ranges)
        self.sizes = [sum(map(len, parts)) for parts in ranges.values()]
        self.is_small = max(self.sizes) <= _MAX_WIDE_ROWS
        self.num_rows = first
        if picked != list(range(first)):
            self.index = torch.tensor(picked, device=self._device)

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """[T, F] -> [n, F], the rows that have an adapter."""
        if x.shape[0] != self.num_rows:
            raise IntegrityError(f"a linear saw {x.shape[0]} rows in a step of {self.num_rows}")
        return x if self.index is None else x.index_select(0, self.index)


@dataclass(frozen=True)
class LowRank:
    """One slot's factors for one linear layer."""

    a: torch.Tensor  # [R, in]
    b: torch.Tensor  # [R, out], the scale in it

    @property
    def num_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in (self.a, self.b))


class Deltas:
    """See the module. Hangs on its linear layer as `deltas`."""

    def __init__(self, rows: AdapterRows, out_features: int, dtype: torch.dtype) -> None:
        self._rows = rows
        self._out_features = out_features
        self._dtype = dtype  # of all factors
        self.by_slot: dict[int, LowRank] = {}

    @property
    def is_wanted(self) -> bool:
        """Some row of this step has an adapter that adds to this layer."""
        return not self.by_slot.keys().isdisjoint(self._rows.slots)

    @property
    def is_whole(self) -> bool:
        """Every row of this step has an adapter, in the order of the groups."""
        return self._rows.index is None

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """[T, F] -> [n, F], the rows of this step that have an adapter."""
        return self._rows.pick(x)

    def put(self, out: torch.Tensor, picked: torch.Tensor) -> None:
        """Write [n, F] over those rows of [T, F]."""
        if self._rows.index is None:
            out.copy_(picked)
        else:
            out.index_copy_(0, self._rows.index, picked)

    def add(self, x: torch.Tensor, out: torch.Tensor, times: torch.Tensor | None = None) -> None:
        """Add to `out` [T, out], in place, what the adapters make of `x` [T, in].

        Args:
            times: [T, out] what it is multiplied with before.
        """
        delta = self._delta(self.pick(x))
        if times is not None:
            delta = delta * self.pick(times)
        delta = delta.to(out.dtype)
        if self._rows.index is None:
            out += delta
        else:
            out.index_add_(0, self._rows.index, delta)

    def delta(self, picked: torch.Tensor) -> torch.Tensor:
        """[n, in] -> [n, out] in the same dtype, zero where an adapter does not touch this
        layer."""
        return self._delta(picked).to(picked.dtype)

    def _delta(self, picked: torch.Tensor) -> torch.Tensor:
        """`delta` before it is rounded."""
        rows = self._rows
        dtype = self._dtype if rows.is_small else picked.dtype
        parts: list[torch.Tensor] = []
        for slot, x in zip(rows.slots, torch.split(picked.to(dtype), rows.sizes), strict=True):
            factors = self.by_slot.get(slot)
            if factors is None:
                parts.append(x.new_zeros(x.shape[0], self._out_features))
            else:
                parts.append(linear(x, factors.a.to(dtype)) @ factors.b.to(dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
