"""PinnedWords: where the host writes a step's words from which a copy brings them to the device,
step after step: pinned memory that is kept, since to take some anew, and to find out which of it is
free again, takes the host longer than to fill it.

Two buffers in turn. Invariant: nobody writes into a buffer before the copy that read it last is
over: the copy goes on while the host does, and an event behind it says when. It is over long before
its buffer's turn comes wherever a draw is waited for between two steps; nothing depends on that.
Without CUDA a copy is over when it returns. Engine thread only.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_NUM_BUFFERS = 2


class PinnedWords:
    """See the module."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32)] * _NUM_BUFFERS
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_BUFFERS
        self._turn = 0
        self._num_words = 0

    def reserve(self, num_words: int) -> None:
        """Room for so many, before the first step."""
        for turn in range(_NUM_BUFFERS):
            self._hold(turn, num_words)

    def _hold(self, turn: int, num_words: int) -> None:
        if len(self._buffers[turn]) < num_words:
            most = 1 << (num_words - 1).bit_length()
            self._buffers[turn] = torch.empty(most, dtype=torch.int32, pin_memory=self._is_cuda)

    def begin(self, num_words: int) -> NDArray[np.int32]:
        """Words of the next step, all 0: to be filled, and then `send`. Those of the step before
        the one before are gone."""
        self._turn = turn = (self._turn + 1) % _NUM_BUFFERS
        copied = self._copied[turn]
        if copied is not None:
            copied.synchronize()
        self._hold(turn, num_words)
        self._num_words = num_words
        words: NDArray[np.int32] = self._buffers[turn].numpy()[:num_words]
        words[:] = 0
        return words

    def send(self, target: torch.Tensor) -> None:
        """Queue their copy on the current stream of the device.

        Args:
            target: [as many] int32.
        """
        turn = self._turn
        target.copy_(self._buffers[turn][: self._num_words], non_blocking=True)
        if self._is_cuda:
            copied = self._copied[turn]
            if copied is None:
                copied = self._copied[turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(self._device))
