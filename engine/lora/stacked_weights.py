"""Application of LoRA adapters to a model's linear layers: `x @ A.T @ B`, for the rows of a step
that have an adapter.

A `Site` is a linear layer, or columns of one, that adapters can be added to. There are two forms of
the factors:

- `Deltas`, one for each linear layer with an adapter: rows of one adapter are multiplied together,
  adapter by adapter. AdapterRows has the slot of each row of the step; there is one per model, set
  before each forward pass. Rows without an adapter are neither read nor written, so that their
  bits do not change. With no adapter in the step nothing is computed.
- `StackedLora`: the factors of all slots in tensors at fixed addresses, which a CUDA graph can
  read. One pair of tensors for each linear layer, allocated once, for every slot and for the
  highest rank that is launched; zeros where an adapter has a lower rank, and where there is none.
  A decode step adds the products of all its rows' adapters at once (baton_kernels.lora).

LoraManager fills and clears both. Source of the grouping: Punica, arXiv:2310.18547, section 4. It
knows no model and no requests: models find their sites. Engine thread only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from baton_kernels.dispatch import Backend
from baton_kernels.lora import LoraRows, add_lora
from torch import nn
from torch.utils.hooks import RemovableHandle

from engine.batch import TokenSpan
from engine.errors import IntegrityError

# -- adapter by adapter


_MAX_WIDE_ROWS = 32
"""Largest number of rows of each adapter that are multiplied in the dtype of the stored factors
(float32 on CPU: dispatching a product costs 2-5 us, in bfloat16 12-20 us, which is more than the
bytes cost). More rows are multiplied in the model's dtype, several times as fast. Measured."""


class AdapterRows:
    """The rows of one step by adapter slot.

    Attributes:
        slots: the distinct slots of the step.
        sizes: number of rows of each slot; the picked rows are those of slots[0], then of slots[1],
            ...
        index: [n] indices of the picked rows in the step; None: all rows, in their order.
        num_rows: number of rows of the step.
        is_small: whether no adapter has more than _MAX_WIDE_ROWS rows.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.slots: tuple[int, ...] = ()
        self.sizes: list[int] = []
        self.index: torch.Tensor | None = None
        self.num_rows = 0
        self.is_small = True

    def place(self, spans: Sequence[TokenSpan]) -> None:
        """Record the rows of each adapter slot in a step. Args: spans: the step's spans, in the
        order of its rows."""
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
        """Select the rows that have an adapter: [T, F] -> [n, F]."""
        if x.shape[0] != self.num_rows:
            raise IntegrityError(f"a linear saw {x.shape[0]} rows in a step of {self.num_rows}")
        return x if self.index is None else x.index_select(0, self.index)


@dataclass(frozen=True)
class LowRank:
    """The factors of one slot for one linear layer."""

    a: torch.Tensor  # [R, in]
    b: torch.Tensor  # [R, out], the scale in it

    @property
    def num_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in (self.a, self.b))


class Deltas:
    """The factors of one linear layer by slot, multiplied one adapter at a time, so that numbers of
    different adapters are never in one product. The layer has it as `deltas`."""

    def __init__(self, rows: AdapterRows, out_features: int, dtype: torch.dtype) -> None:
        self._rows = rows
        self._out_features = out_features
        self._dtype = dtype  # of all factors
        self.by_slot: dict[int, LowRank] = {}

    @property
    def is_wanted(self) -> bool:
        """Whether some row of this step has an adapter that adds to this layer."""
        return not self.by_slot.keys().isdisjoint(self._rows.slots)

    @property
    def is_whole(self) -> bool:
        """Whether every row of this step has an adapter, in the order of the groups."""
        return self._rows.index is None

    def pick(self, x: torch.Tensor) -> torch.Tensor:
        """Select the rows of this step that have an adapter: [T, F] -> [n, F]."""
        return self._rows.pick(x)

    def put(self, out: torch.Tensor, picked: torch.Tensor) -> None:
        """Write rows [n, F] over the rows of `out` [T, F] that have an adapter."""
        if self._rows.index is None:
            out.copy_(picked)
        else:
            out.index_copy_(0, self._rows.index, picked)

    def add(self, x: torch.Tensor, out: torch.Tensor, times: torch.Tensor | None = None) -> None:
        """Add the adapters' products of `x` [T, in] to `out` [T, out], in place.

        Args: times: [T, out], factors of the products; None: 1.
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
        """Compute the adapters' products of the picked rows: [n, in] -> [n, out] in the same dtype,
        zero where an adapter has no factors for this layer."""
        return self._delta(picked).to(picked.dtype)

    def _delta(self, picked: torch.Tensor) -> torch.Tensor:
        """Compute `delta` before it is rounded to the dtype of the rows."""
        rows = self._rows
        dtype = self._dtype if rows.is_small else picked.dtype
        parts: list[torch.Tensor] = []
        for slot, x in zip(rows.slots, torch.split(picked.to(dtype), rows.sizes), strict=True):
            factors = self.by_slot.get(slot)
            if factors is None:
                parts.append(x.new_zeros(x.shape[0], self._out_features))
            else:
                parts.append(nn.functional.linear(x, factors.a.to(dtype)) @ factors.b.to(dtype))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


# -- linear layers that adapters can add to


class AdaptedLinear(nn.Module):
    """Base of this package's linear layers, which add `deltas` themselves, before the operations
    fused after the product. Any other linear layer is an nn.Linear, and gets a hook."""

    in_features: int
    out_features: int
    deltas: Deltas | None = None


Linear = nn.Linear | AdaptedLinear


@dataclass(frozen=True)
class Site:
    """A place that an adapter can be added to: `out_features` columns of `linear`'s output, from
    `column` on."""

    linear: Linear
    column: int
    in_features: int
    out_features: int


def attach(linear: Linear, deltas: Deltas) -> RemovableHandle | None:
    """Make the linear layer add `deltas` from now on. Returns: the handle that `detach` needs."""
    if isinstance(linear, nn.Linear):
        return linear.register_forward_hook(_adding(deltas))
    linear.deltas = deltas
    return None


def detach(linear: Linear, handle: RemovableHandle | None) -> None:
    """Stop adding `deltas` to the linear layer. Args: handle: the result of `attach`."""
    if handle is not None:
        handle.remove()
    elif not isinstance(linear, nn.Linear):
        linear.deltas = None


def _adding(deltas: Deltas) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        if deltas.is_wanted:
            x = args[0]
            deltas.add(x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1]))

    return hook


# -- all adapters at once


class StepRows:
    """The adapter rows of the present step, which all stacks read.

    Attributes: rows: the rows with adapters; None: there is none.
    """

    def __init__(self) -> None:
        self.rows: LoraRows | None = None


class StackedFactors:
    """The stacked factors of one linear layer.

    Args:
        step: the rows to add to.
        num_slots: number of adapters that can be loaded at once.
        rank: the rank of one slot, summed over all modules that are columns of this layer.
    """

    def __init__(
        self,
        step: StepRows,
        linear: Linear,
        rank: int,
        *,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._step = step
        self.a = torch.zeros(num_slots, rank, linear.in_features, dtype=dtype, device=device)
        self.b = torch.zeros(num_slots, rank, linear.out_features, dtype=dtype, device=device)

    @property
    def is_wanted(self) -> bool:
        """Whether rows of this step have adapters."""
        return self._step.rows is not None

    def add(self, out: torch.Tensor, x: torch.Tensor, backend: Backend) -> torch.Tensor:
        """Add the products of the rows' adapters and x [M, in] to `out` [M, out], in place."""
        rows = self._step.rows
        if rows is None:
            raise IntegrityError("a step without adapters")
        return add_lora(out, x, self.a, self.b, rows, backend=backend)


class StackedLora:
    """The stacked factors of all loaded adapters that are launched ahead. Invariant: an empty slot
    contains zeros only.

    Args:
        sites: the model's linear layers by name.
        num_slots: number of adapters that can be loaded at once, in slots 1 to `num_slots`.
        max_rank: highest rank of an adapter that is launched ahead.
    """

    def __init__(
        self,
        sites: Mapping[str, Site],
        *,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_slots = num_slots
        self.max_rank = max_rank
        self._step = StepRows()
        self.by_linear: dict[Linear, StackedFactors] = {}
        self._held: set[int] = set()
        num_modules: dict[Linear, int] = {}
        for site in sites.values():
            num_modules[site.linear] = num_modules.get(site.linear, 0) + 1
        for linear, count in num_modules.items():
            rank = count * max_rank
            self.by_linear[linear] = StackedFactors(
                self._step, linear, rank, num_slots=num_slots, dtype=dtype, device=device
            )

    @property
    def num_bytes(self) -> int:
        """Number of bytes on the device, which does not depend on the loaded adapters."""
        pairs = [(one.a, one.b) for one in self.by_linear.values()]
        return sum(one.numel() * one.element_size() for pair in pairs for one in pair)

    def put(self, slot: int, by_linear: Mapping[Linear, LowRank]) -> None:
        """Copy an adapter of at most `max_rank` into an empty slot. Raises: IntegrityError if the
        slot is in use or does not exist."""
        self._check_empty(slot)
        for linear, factors in by_linear.items():
            stack, rank = self.by_linear[linear], factors.a.shape[0]
            stack.a[slot - 1, :rank].copy_(factors.a)
            stack.b[slot - 1, :rank].copy_(factors.b)
        self._held.add(slot)

    def clear(self, slot: int) -> None:
        """Remove the slot's adapter, if it has one."""
        if slot in self._held:
            self._held.remove(slot)
            for stack in self.by_linear.values():
                stack.a[slot - 1].zero_()
                stack.b[slot - 1].zero_()

    def holds(self, slot: int) -> bool:
        """Whether the slot has an adapter."""
        return slot in self._held

    def check_held(self, slots: Iterable[int]) -> None:
        """Check that each of these slots, except 0, has an adapter. Raises: IntegrityError."""
        unknown = {slot for slot in slots if slot} - self._held
        if unknown:
            raise IntegrityError(f"a row names adapter slots {sorted(unknown)}: not launched")

    @contextlib.contextmanager
    def of_step(self, rows: LoraRows | None) -> Generator[None, None, None]:
        """Set the rows of the present step, for the duration of the body."""
        self._step.rows = rows
        try:
            yield
        finally:
            self._step.rows = None

    def check_integrity(self, launched: Iterable[int]) -> None:
        """Check the set of slots in use; the factors are not read, since that would wait for the
        device.

        Args: launched: slots of all loaded adapters that are launched ahead.
        Raises: IntegrityError.
        """
        expected = set(launched)
        if self._held != expected:
            raise IntegrityError(f"stacks hold slots {sorted(self._held)}, not {sorted(expected)}")

    def _check_empty(self, slot: int) -> None:
        if not 1 <= slot <= self.num_slots or slot in self._held:
            raise IntegrityError(f"slot {slot} of {self.num_slots}: taken, or there is none")
