"""Batch: one step's input as plain values, and Span: one request's part of it. No torch, no
requests, no states.

All new tokens of all requests lie in one row, request after request. Only tokens whose KV is not in
the cache go in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """`num_tokens` consecutive tokens of one request, the first at absolute position `start`."""

    start: int
    num_tokens: int

    block_ids: tuple[int, ...]
    """Blocks of tokens [0, start + num_tokens). Empty: a warm-up, which writes and reads no KV
    (then start is 0)."""

    adapter: int = 0
    """Slot of its LoRA adapter (engine/lora/registry.py); 0: none."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True)
class Batch:
    """What the model computes in one step."""

    token_ids: tuple[int, ...]
    """[T], spans one after the other."""

    spans: tuple[Span, ...]

    draw_indices: tuple[int, ...]
    """[R] ascending: the tokens of the row whose logits are wanted."""

    wants_hidden: bool = False
    """Keep what the logits were made of (LoadedModel.hidden)."""

    @property
    def positions(self) -> list[int]:
        """[T] absolute positions."""
        return [position for span in self.spans for position in range(span.start, span.end)]


def warm_up(num_tokens: int) -> Batch:
    """A batch of one fresh prompt that touches no block."""
    return Batch((0,) * num_tokens, (Span(0, num_tokens, ()),), (num_tokens - 1,))
