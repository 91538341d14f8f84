"""Samples: which of a decode request's are wanted and not over, and how many tokens each has by
what was told. Values; one request, the loop's thread.
"""

from __future__ import annotations

from process.errors import InvalidArgument
from services.decode.intake import Handover


class Samples:
    """See the module."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self.open = set(range(num_samples))
        self.num_outputs = [0] * num_samples

    @property
    def ended(self) -> list[int]:
        """Those that are over, or that nobody wants, in order."""
        return sorted(set(range(self._num_samples)) - self.open)

    def begin(self, handover: Handover) -> tuple[tuple[int, ...], ...]:
        """With what was drawn already, of each. Returns: that. Raises: InvalidArgument for another
        number of samples, or when all have ended."""
        if len(handover.outputs) != self._num_samples:
            raise InvalidArgument(
                "outputs", f"of {len(handover.outputs)} samples, not {self._num_samples}"
            )
        self.num_outputs = [len(token_ids) for token_ids in handover.outputs]
        self.open -= handover.over
        if not self.open:
            raise InvalidArgument("outputs", "every sample has ended")
        return handover.outputs
