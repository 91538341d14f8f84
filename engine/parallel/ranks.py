"""Ranks: what a decoder says to the ranks that compute the rest of the same model. One seam: a
Protocol, and what stands behind it where there is one rank (`OneRank`) or several
(engine/parallel/process_ranks.py).

All ranks make the same calls in the same order, with tensors of the same shapes; what runs on
their devices is ordered by each device's current stream. No call waits for the device. Knows no
model and no batch. Engine thread (in other ranks: the main one).
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.parallel.place import SINGLE, Place


class Ranks(Protocol):
    """The other ranks, as one of them sees them. Every call raises RankFailed when another rank is
    gone or too late."""

    @property
    def place(self) -> Place:
        """What this rank computes."""
        ...

    @property
    def rank(self) -> int:
        """Among those that share layers; only 0 adds residuals and biases to its part of a sum."""
        ...

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum over the shares of this stage, in place: after the output and the down projection.

        Args:
            partial: [T, N] contiguous, of the model's dtype.
        Returns: `partial`; the same bits at every share.
        """
        ...

    def join_columns(self, part: torch.Tensor) -> torch.Tensor:
        """[R, V / num_shares] of each share, which are rows `place.part(V)` of the vocabulary ->
        [R, V] at every share of the last stage."""
        ...

    def receive(self, hidden: torch.Tensor) -> None:
        """Fill [T, N] with what the stage before sends: hidden states, the residual added. Not
        called in the first stage."""
        ...

    def send(self, hidden: torch.Tensor) -> None:
        """Give [T, N] contiguous to the stage after; it must not change before the next call
        returns. Not called in the last stage."""
        ...

    def pass_tokens(self, token_ids: torch.Tensor) -> None:
        """Give [B] int32 of the last stage to the first one, in place; other stages' are not
        changed. Called in every stage."""
        ...


class OneRank:
    """`Ranks` where this rank computes everything: nothing to sum, nobody to speak to."""

    @property
    def place(self) -> Place:
        return SINGLE

    @property
    def rank(self) -> int:
        return 0

    def add_up(self, partial: torch.Tensor) -> torch.Tensor:
        return partial

    def join_columns(self, part: torch.Tensor) -> torch.Tensor:
        return part

    def receive(self, hidden: torch.Tensor) -> None:
        raise AssertionError(f"one rank has no stage before it ({list(hidden.shape)})")

    def send(self, hidden: torch.Tensor) -> None:
        raise AssertionError(f"one rank has no stage after it ({list(hidden.shape)})")

    def pass_tokens(self, token_ids: torch.Tensor) -> None:
        """Nothing: they are here."""
