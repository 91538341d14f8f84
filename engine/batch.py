"""Batch: one step's input as plain values, and Span: one sequence's part of it. No torch, no
requests, no states.

All new tokens of all sequences form one row, sequence after sequence. Tokens whose KV is in the
cache are not in it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple


class TokenSpan(NamedTuple):
    """`num_tokens` consecutive tokens of one sequence, the first at absolute position `start`."""

    start: int
    num_tokens: int

    block_ids: tuple[int, ...]
    """Blocks of tokens [0, start + num_tokens). Empty: a warm-up, which writes and reads no KV
    (`start` is 0 then)."""

    adapter: int = 0
    """Slot of the sequence's LoRA adapter (engine/lora/manager.py); 0: none."""

    branches: tuple[int, ...] = ()
    """For last tokens that are a token tree (engine/speculation/token_tree.py), or draft tokens
    over a quantized cache: the index among them of each one's parent, or -1 for the token before
    them all. A token attends to its parent and all that its parent attends to, and its position
    is one more. KV is written to consecutive slots all the same, or, with a quantized cache, to
    slots of its own (engine/kv/unquantized_tails.py)."""

    @property
    def end(self) -> int:
        """The slot after that of the last token; without branches, the position, too."""
        return self.start + self.num_tokens

    @property
    def is_tree(self) -> bool:
        """Whether some token does not attend to all tokens before it."""
        return self.branches != tuple(range(-1, len(self.branches) - 1))

    @property
    def positions(self) -> list[int]:
        """The absolute positions, [num_tokens]."""
        trunk_end = self.end - len(self.branches)
        positions = list(range(self.start, trunk_end))
        trunk = len(positions)
        for parent in self.branches:
            # All of the span may be tree: then it hangs on a token that is in the cache.
            above = trunk_end - 1 if parent < 0 else positions[trunk + parent]
            positions.append(above + 1)
        return positions

    def slots_seen(self, index: int) -> list[int]:
        """Return the slots that the span's token `index` attends to, its own the last of them."""
        trunk = self.num_tokens - len(self.branches)
        own: list[int] = []
        while index >= trunk:
            own.append(self.start + index)
            index = trunk + self.branches[index - trunk]
        return [*range(self.start + index + 1), *reversed(own)]


@dataclass(frozen=True)
class Batch:
    """The input of the model for one step."""

    token_ids: tuple[int, ...]
    """[T], the tokens of the spans, one span after the other."""

    spans: tuple[TokenSpan, ...]

    draw_indices: tuple[int, ...]
    """[R] ascending: indices of the tokens whose logits are computed."""

    wants_hidden: bool = False
    """Whether to keep the hidden states of which the logits are computed (LoadedModel.hidden)."""

    wants_every_hidden: bool = False
    """Whether to keep the hidden states of all tokens, if the model supports it
    (LoadedModel.every_hidden). Requires `wants_hidden`."""

    wants_layers: tuple[int, ...] = ()
    """Indices of the layers whose inputs are kept (LoadedModel.layer_inputs), below
    Ends.num_layers. Requires `wants_every_hidden`."""

    @property
    def positions(self) -> list[int]:
        """The absolute positions, [T]."""
        return [position for span in self.spans for position in span.positions]


def warm_up(*lengths: int) -> Batch:
    """Return a batch of new prompts of these lengths that reads and writes no block, with logits
    for the last token of each."""
    ends = tuple(itertools.accumulate(lengths))
    spans = tuple(TokenSpan(0, length, ()) for length in lengths)
    return Batch((0,) * ends[-1], spans, tuple(end - 1 for end in ends))
