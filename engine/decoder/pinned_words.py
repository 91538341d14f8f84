"""PinnedWords: where the host writes a step's words from which a copy brings them to the device,
step after step: pinned memory that is kept, since to take some anew, and to find out which of it is
free again, takes the host longer than to fill it.

Two buffers in turn. Steps of one form share most of their words: a buffer that had a step of the
same form last is handed out as that one left it. Invariant: nobody writes into a buffer before the
copy that read it last is over: the copy goes on while the host does, and an event behind it says
when. It is over long before its buffer's turn comes wherever a draw is waited for between two
steps; nothing depends on that. Without CUDA a copy is over when it returns. Engine thread only.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_NUM_BUFFERS = 2


class PinnedWords:
    """See the module.

    Attributes:
        is_kept: the words that `begin` gave are those of a step of the same form.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._buffers = [torch.empty(0, dtype=torch.int32)] * _NUM_BUFFERS
        self._copied: list[torch.cuda.Event | None] = [None] * _NUM_BUFFERS
        self._forms: list[object] = [None] * _NUM_BUFFERS
        self._form: object = None
        self._turn = 0
        self._num_words = 0
        self.is_kept = False

    def begin(self, num_words: int, form: object = None) -> NDArray[np.int32]:
        """Words of the next step, to be filled, and then `send`: all 0, or what its buffer sent
        last where that was of the same form (`is_kept`). Those of the step before the one before
        are gone.

        Args:
            form: whatever says that so many words of two steps are the same but for those that are
                filled in any case; None: of no other step.
        """
        self._turn = turn = (self._turn + 1) % _NUM_BUFFERS
        copied = self._copied[turn]
        if copied is not None:
            copied.synchronize()
        self.is_kept = form is not None and self._forms[turn] == form
        self._form = form
        if len(self._buffers[turn]) < num_words:
            most = 1 << (num_words - 1).bit_length()
            self._buffers[turn] = torch.empty(most, dtype=torch.int32, pin_memory=self._is_cuda)
        self._num_words = num_words
        words: NDArray[np.int32] = self._buffers[turn].numpy()[:num_words]
        if not self.is_kept:
            self._forms[turn] = None
            words[:] = 0
        return words

    def send(self, target: torch.Tensor) -> None:
        """Queue their copy on the current stream of the device.

        Args:
            target: [as many] int32.
        """
        turn = self._turn
        self._forms[turn] = self._form  # all of it is written
        target.copy_(self._buffers[turn][: self._num_words], non_blocking=True)
        if self._is_cuda:
            copied = self._copied[turn]
            if copied is None:
                copied = self._copied[turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(torch.cuda.current_stream(self._device))
