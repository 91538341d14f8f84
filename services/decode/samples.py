"""Samples: which samples of a decode request are wanted and unfinished, and how many tokens of each
were sent. Values; one request, the loop's thread."""

from __future__ import annotations

from process.errors import InvalidArgument
from services.decode.intake import Handover


class Samples:
    """Progress of one request's samples."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples
        self.open = set(range(num_samples))
        self.num_outputs = [0] * num_samples

    @property
    def ended(self) -> list[int]:
        """Return the indices of samples that have ended or are no longer wanted, in order."""
        return sorted(set(range(self._num_samples)) - self.open)

    def begin(self, handover: Handover) -> tuple[tuple[int, ...], ...]:
        """Start from the tokens that were drawn already, of each sample. Returns: these tokens.
        Raises: InvalidArgument for another number of samples, or when all have ended."""
        if len(handover.outputs) != self._num_samples:
            raise InvalidArgument(
                "outputs", f"of {len(handover.outputs)} samples, not {self._num_samples}"
            )
        self.num_outputs = [len(token_ids) for token_ids in handover.outputs]
        self.open -= handover.over
        if not self.open:
            raise InvalidArgument("outputs", "every sample has ended")
        return handover.outputs
