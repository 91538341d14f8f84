"""Plan: what a step computes without guesses, as far as guessing goes by it. Pure values over
sequences; what nobody asks for is not found out.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import State
from engine.sequence import Sequence as Sample
from engine.speculation.possible import num_levels, takes_guesses

Planned = tuple[Sample, int]
"""A sample, and how many of its pending tokens a step computes."""


class Plan:
    """See the module.

    Attributes:
        num_rows: tokens that are computed.
        num_drawing: samples that draw.
        num_tokens: that all samples have.
        is_going_on: somebody has drawn before.
    """

    def __init__(self, planned: Sequence[Planned]) -> None:
        self.planned = planned
        self._possible: list[Sample] | None = None
        self.num_rows = self.num_drawing = self.num_tokens = 0
        self.is_going_on = False
        for sample, num_tokens in planned:
            num_known = len(sample.token_ids)
            self.num_rows += num_tokens
            self.num_tokens += num_known
            self.num_drawing += num_tokens == num_known - sample.num_computed_tokens
            self.is_going_on = self.is_going_on or sample.state is State.RUNNING

    @property
    def possible(self) -> list[Sample]:
        """Those that may be guessed for; found out when somebody asks first."""
        if self._possible is None:
            self._possible = [
                sample
                for sample, num_tokens in self.planned
                if takes_guesses(sample, num_tokens) and num_levels(sample) > 0
            ]
        return self._possible
