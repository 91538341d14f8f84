"""Batch: one step's input as plain values, and Span: one request's part of it. No torch, no
requests, no states.

All new tokens of all requests lie in one row, request after request. Only tokens whose KV is not in
the cache go in.
"""

from __future__ import annotations

import itertools
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
    """Slot of its LoRA adapter (engine/lora/manager.py); 0: none."""

    branches: tuple[int, ...] = ()
    """Of its last tokens, if they are a token tree (engine/speculation/token_tree.py), or draft
    tokens over a quantized cache: which of them each follows, by number, or -1: the token before
    them all. A token sees the one that it follows and what that one sees, and its position is one
    more. KV goes into the next slots all the same, token after token; of a quantized cache beside
    it (engine/kv/partial_blocks.py)."""

    @property
    def end(self) -> int:
        """The slot after its last token's; without branches, the position, too."""
        return self.start + self.num_tokens

    @property
    def is_tree(self) -> bool:
        """Some token of it does not see all that lie before it."""
        return self.branches != tuple(range(-1, len(self.branches) - 1))

    @property
    def positions(self) -> list[int]:
        """[num_tokens] absolute positions."""
        trunk_end = self.end - len(self.branches)
        positions = list(range(self.start, trunk_end))
        trunk = len(positions)
        for parent in self.branches:
            # All of the span may be tree: then it hangs on a token that is in the cache.
            above = trunk_end - 1 if parent < 0 else positions[trunk + parent]
            positions.append(above + 1)
        return positions

    def slots_seen(self, index: int) -> list[int]:
        """Slots that the span's token `index` sees, its own the last of them."""
        trunk = self.num_tokens - len(self.branches)
        own: list[int] = []
        while index >= trunk:
            own.append(self.start + index)
            index = trunk + self.branches[index - trunk]
        return [*range(self.start + index + 1), *reversed(own)]


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

    wants_every_hidden: bool = False
    """Keep the same of all tokens, where the model can (LoadedModel.every_hidden). With
    `wants_hidden`."""

    wants_layers: tuple[int, ...] = ()
    """Keep what goes into these layers (LoadedModel.layer_inputs), by the number of layers before
    each. With `wants_every_hidden`; below Ends.num_layers."""

    @property
    def positions(self) -> list[int]:
        """[T] absolute positions."""
        return [position for span in self.spans for position in span.positions]


def warm_up(*lengths: int) -> Batch:
    """A batch of fresh prompts of these lengths that touches no block; the last token of each is
    drawn from."""
    ends = tuple(itertools.accumulate(lengths))
    spans = tuple(Span(0, length, ()) for length in lengths)
    return Batch((0,) * ends[-1], spans, tuple(end - 1 for end in ends))
