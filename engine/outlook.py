"""Outlook: what a sequence will have when the launch that it is in (engine/in_flight.py) is booked,
so that the step after that can be planned before. Whatever is drawn, so much is known: how many
tokens there are, and who has all that it may have. Who ends by its token is not known: it is
planned for nothing. Pure; engine thread only.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.in_flight import Planned
from engine.models.interface import LaunchRow
from engine.request import State
from engine.sequence import Sequence


class Following(NamedTuple):
    """The plan of the step after one that is in flight."""

    planned: list[tuple[Sequence, int]]
    """Who takes part, and how many tokens each will have to compute. Who is known to end by then
    may be in it."""

    is_decoding: bool
    """Each has drawn, and has one token to compute now, as then."""


class Outlook(NamedTuple):
    """See the module."""

    num_computed_tokens: int

    num_tokens: int
    """Known ones, and the one that is being drawn."""

    has_drawn: bool

    is_over: bool
    """Its length ends it."""

    @property
    def num_pending_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens


def outlook(sequence: Sequence, planned: Planned | None) -> Outlook:
    """Args: planned: its part of the launch; None: it is in none, and stays as it is."""
    num_computed, num_tokens = sequence.num_computed_tokens, len(sequence.token_ids)
    has_drawn = sequence.state is State.RUNNING
    if planned is None:
        return Outlook(num_computed, num_tokens, has_drawn, False)
    row = planned[1]
    is_drawing = row.draw is not None
    return Outlook(
        num_computed + row.num_tokens,
        num_tokens + is_drawing,
        has_drawn or is_drawing,
        is_last(sequence, row),
    )


def is_last(sequence: Sequence, row: LaunchRow) -> bool:
    """It draws the last token that its sequence may have."""
    if row.draw is None:
        return False
    num_drawn = row.draw.position + 1 - sequence.num_prompt_tokens
    return num_drawn >= sequence.group.max_output_tokens
