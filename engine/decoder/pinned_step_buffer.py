"""PinnedWords: pinned memory at a fixed address into which the host writes a step's words, and from
which the device copies them, so that a CUDA graph can contain the copy. It is kept, since
allocating pinned memory takes the host longer than filling it.

Invariant: the host writes only after the device's read is done, which an event shows. Where a
sample is waited for between two steps, the read is done long before; nothing depends on that. Steps
of one form share most of their words, which are left in place. Without CUDA a read is done when it
returns. Engine thread only.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


class PinnedWords:
    """Pinned words of one step at a time.

    Attributes:
        words: [num_words] int32, all 0 at first.
        is_kept: whether the words returned by `begin` are those of a step of the same form.
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
        """Return the words of the next step, to be filled and then read: all 0, or those of the
        last step if it had the same form (`is_kept`). Words outside of the range are unchanged.

        Args: form: a key of steps that share all words but those that are filled in any case; None:
            like no other step.
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
        """Wait until the device has read the words."""
        if self._read is not None:
            self._read.synchronize()

    def on_read(self) -> None:
        """Record that the read of the words is queued on the device's current stream."""
        self._written = self._form
        if self._is_cuda:
            if self._read is None:
                self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read.record(torch.cuda.current_stream(self._device))


class PinnedTurns:
    """Two buffers of pinned words in turn, each as large as the largest step that it had, for steps
    that are queued one after the other and copied separately."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turns: list[PinnedWords | None] = [None, None]
        self._turn = 0
        self._num_words = 0

    def reserve(self, num_words: int) -> None:
        """Allocate room for `num_words` words in both buffers, before the first step."""
        for turn in range(len(self._turns)):
            self._room(turn, num_words)

    def begin(self, num_words: int) -> NDArray[np.int32]:
        """Return the words of the next step, all 0, to be filled before `send`. They overwrite
        those of the step before the last."""
        self._turn = (self._turn + 1) % len(self._turns)
        self._num_words = num_words
        return self._room(self._turn, num_words).begin(0, num_words)

    def send(self, target: torch.Tensor) -> None:
        """Queue the copy of the words on the device's current stream.

        Args: target: [number of words] int32.
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
