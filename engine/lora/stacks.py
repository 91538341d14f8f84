"""Stacks: the factors of loaded adapters by slot, in tensors that stay where they are: what a CUDA
graph reads. One pair of tensors for each linear layer, made once, for every slot and for the
highest rank that is launched; zeros where an adapter has less, and where there is none.

Adapters (registry.py) fills and clears them; a decode step adds their products by
baton_kernels.lora, for all adapters of its rows at once. Knows no requests. Invariant: a slot that
is not held has only zeros. Engine thread only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping

import torch
from baton_kernels.dispatch import Backend
from baton_kernels.lora import LoraRows, add_lora

from engine.errors import IntegrityError
from engine.lora.deltas import LowRank
from engine.lora.site import Linear, Site


class StepRows:
    """What all stacks look at: the rows of the step that is computed.

    Attributes:
        rows: None: none of them has an adapter.
    """

    def __init__(self) -> None:
        self.rows: LoraRows | None = None


class Stack:
    """One linear layer's factors.

    Args:
        step: whose rows it adds to.
        num_slots: adapters that may be loaded at once.
        rank: of one slot, of all modules that are columns of this linear together.
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
        """Rows of this step have adapters."""
        return self._step.rows is not None

    def add(self, out: torch.Tensor, x: torch.Tensor, backend: Backend) -> torch.Tensor:
        """Add to `out` [M, out], in place, what the rows' adapters make of x [M, in]."""
        rows = self._step.rows
        if rows is None:
            raise IntegrityError("a step without adapters")
        return add_lora(out, x, self.a, self.b, rows, backend=backend)


class Stacks:
    """See the module.

    Args:
        sites: the model's linear layers by name.
        num_slots: adapters that may be loaded at once: slots 1 to this.
        max_rank: of an adapter that is launched.
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
        self.by_linear: dict[Linear, Stack] = {}
        self._held: set[int] = set()
        num_modules: dict[Linear, int] = {}
        for site in sites.values():
            num_modules[site.linear] = num_modules.get(site.linear, 0) + 1
        for linear, count in num_modules.items():
            rank = count * max_rank
            self.by_linear[linear] = Stack(
                self._step, linear, rank, num_slots=num_slots, dtype=dtype, device=device
            )

    @property
    def num_bytes(self) -> int:
        """On the device, from the first to the last day."""
        pairs = [(one.a, one.b) for one in self.by_linear.values()]
        return sum(one.numel() * one.element_size() for pair in pairs for one in pair)

    def put(self, slot: int, by_linear: Mapping[Linear, LowRank]) -> None:
        """An adapter, of at most `max_rank`, into a slot that is not held."""
        self._check_empty(slot)
        for linear, factors in by_linear.items():
            stack, rank = self.by_linear[linear], factors.a.shape[0]
            stack.a[slot - 1, :rank].copy_(factors.a)
            stack.b[slot - 1, :rank].copy_(factors.b)
        self._held.add(slot)

    def clear(self, slot: int) -> None:
        """The slot's adapter is taken off, if it holds one."""
        if slot in self._held:
            self._held.remove(slot)
            for stack in self.by_linear.values():
                stack.a[slot - 1].zero_()
                stack.b[slot - 1].zero_()

    def holds(self, slot: int) -> bool:
        """Its adapter is here."""
        return slot in self._held

    def check_held(self, slots: Iterable[int]) -> None:
        """Raises: IntegrityError for one of these, 0 apart, that is not held."""
        unknown = {slot for slot in slots if slot} - self._held
        if unknown:
            raise IntegrityError(f"a row names adapter slots {sorted(unknown)}: not launched")

    @contextlib.contextmanager
    def of_step(self, rows: LoraRows | None) -> Generator[None, None, None]:
        """These rows have their adapters meanwhile."""
        self._step.rows = rows
        try:
            yield
        finally:
            self._step.rows = None

    def check_integrity(self, launched: Iterable[int]) -> None:
        """Numbers are not looked at: the device would be waited for.

        Args:
            launched: slots of all loaded adapters that are launched.
        Raises: IntegrityError.
        """
        expected = set(launched)
        if self._held != expected:
            raise IntegrityError(f"stacks hold slots {sorted(self._held)}, not {sorted(expected)}")

    def _check_empty(self, slot: int) -> None:
        if not 1 <= slot <= self.num_slots or slot in self._held:
            raise IntegrityError(f"slot {slot} of {self.num_slots}: taken, or there is none")
