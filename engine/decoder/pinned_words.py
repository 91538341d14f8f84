"""PinnedWords: where the host writes a step's words, and the device copies them from: pinned memory
at an address that stays, so that a graph can have the copy in it, and that is kept, since to take
some anew, and to find out which of it is free again, takes the host longer than to fill it.

Invariant: nobody writes before what reads is over: that goes on while the host does, and an event
behind it says when. It is over long before wherever a draw is waited for between two steps; nothing
depends on that. Steps of one form share most of their words: those are left where they lie. Without
CUDA what reads is over when it returns. Engine thread only.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


class PinnedWords:
    """See the module.

    Attributes:
        words: [num_words] int32, all 0 at first.
        is_kept: what `begin` gave are the words of a step of the same form.
    """

    def __init__(self, num_words: int, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self.words = torch.zeros(num_words, dtype=torch.int32, pin_memory=self._is_cuda)
        self._array: NDArray[np.int32] = self.words.numpy()
        self._read: torch.cuda.Event | None = None
        self._form: object = None
        self._written: object = None
        self.is_kept = False

    def begin(self, first: int, num_words: int, form: object = None) -> NDArray[np.int32]:
        """Words of the next step, to be filled and then read: all 0, or what was read last where
        that was of the same form (`is_kept`). The others are as they were.

        Args:
            form: whatever says that two steps have the same words here but for those that are
                filled in any case; None: as no other step.
        """
        self.wait()
        words = self._array[first : first + num_words]
        self.is_kept = form is not None and form == self._written
        self._form = form
        if not self.is_kept:
            self._written = None
            words[:] = 0
        return words

    def wait(self) -> None:
        """Until what reads the words is over."""
        if self._read is not None:
            self._read.synchronize()

    def on_read(self) -> None:
        """What reads the words is queued on the device's current stream."""
        self._written = self._form
        if self._is_cuda:
            if self._read is None:
                self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read.record(torch.cuda.current_stream(self._device))


class PinnedTurns:
    """Two PinnedWords in turn, each as large as the largest step that it had: for steps that are
    queued one behind the other, whose words a copy of their own brings."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turns: list[PinnedWords | None] = [None, None]
        self._turn = 0
        self._num_words = 0

    def reserve(self, num_words: int) -> None:
        """Room for so many, before the first step."""
        for turn in range(len(self._turns)):
            self._room(turn, num_words)

    def begin(self, num_words: int) -> NDArray[np.int32]:
        """Words of the next step, all 0: to be filled, and then `send`. Those of the step before
        the one before are gone."""
        self._turn = (self._turn + 1) % len(self._turns)
        self._num_words = num_words
        return self._room(self._turn, num_words).begin(0, num_words)

    def send(self, target: torch.Tensor) -> None:
        """Queue their copy on the current stream of the device.

        Args:
            target: [as many] int32.
        """
        pinned = self._room(self._turn, self._num_words)
        target.copy_(pinned.words[: self._num_words], non_blocking=True)
        pinned.on_read()

    def _room(self, turn: int, num_words: int) -> PinnedWords:
        pinned = self._turns[turn]
        if pinned is None or len(pinned.words) < num_words:
            if pinned is not None:
                pinned.wait()  # a copy may still read what goes back
            pinned = PinnedWords(1 << (num_words - 1).bit_length(), self._device)
            self._turns[turn] = pinned
        return pinned
