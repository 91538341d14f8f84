"""What a drafter is told that goes by the target's hidden states; kept.py gathers it. Engine
thread only."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from engine.sequence import Key
from engine.speculation.drafter import Drafter


class Wants(enum.IntEnum):
    """Whose hidden states are kept in a step; the greater one includes the smaller."""

    NONE = 0
    DRAWN = 1
    """Of tokens that something was drawn after: the last of each sequence, and its guesses."""
    EVERY = 2
    """Of prompts, too, where the model can (LoadedModel.every_hidden)."""


class Computed(NamedTuple):
    """Consecutive tokens of one sequence that a step computed and that stay."""

    key: Key
    token_ids: Sequence[int]
    """All of the sequence, what was drawn in the step included. Not kept: it grows."""
    start: int
    """Position of the first that was computed."""
    hidden: torch.Tensor
    """[n, hidden], the target's last norm included: what its head takes. n >= 1."""
    layers: Mapping[int, torch.Tensor] = MappingProxyType({})
    """[n, hidden] by layer: what went into it (LoadedModel.layer_inputs); of all that some reader
    wants."""


@runtime_checkable
class ReadsHidden(Drafter, Protocol):
    """A Drafter that goes by hidden states."""

    @property
    def wants(self) -> Wants:
        """What it can use."""
        ...

    @property
    def layers(self) -> tuple[int, ...]:
        """Whose inputs it can use, too; with Wants.EVERY."""
        ...

    def see(self, computed: Sequence[Computed]) -> None:
        """After each step, whether it guesses or not. What does not begin where the last of the
        same sequence ended follows a gap: computed elsewhere, or found in the prefix cache."""
        ...
