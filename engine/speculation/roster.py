"""Roster: the drafters of one engine, and the sequences that they know. No answer needs a drafter:
one that raises forgets all and is not asked for a while, which doubles with each failure.

Engine thread only.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from engine.sequence import Key
from engine.sequence import Sequence as Sample
from engine.speculation.drafter import Draft, Drafter, Task
from engine.speculation.tree import EMPTY

logger = logging.getLogger(__name__)

FIRST_REST_S = 60.0
MAX_REST_S = 3600.0
"""How long a drafter that raised is not asked. Guessed."""


def rest_s(num_failures: int) -> float:
    """How long a drafter is not asked after its n-th failure, the first one being 1. Pure."""
    return min(MAX_REST_S, FIRST_REST_S * 2.0 ** min(num_failures - 1, 16))


class Roster:
    """See the module.

    Attributes:
        failed: numbers of those that are not asked now.
    """

    def __init__(
        self, drafters: Sequence[Drafter], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.failed: set[int] = set()
        self._clock = clock
        self._num_failures = Counter[int]()
        self._due_s: dict[int, float] = {}  # of those that are not asked now
        self._drafters = drafters
        self._known: dict[Key, Sample] = {}

    def __len__(self) -> int:
        return len(self._drafters)

    @property
    def is_live(self) -> bool:
        """Somebody guesses."""
        return len(self.failed) < len(self._drafters)

    def propose(self, index: int, tasks: list[Task]) -> list[Draft]:
        """See Drafter; of one that is not asked now, nothing."""
        if index not in self.failed:
            try:
                return self._drafters[index].propose(tasks)
            except Exception:
                self.fail(index)
        return [Draft(EMPTY, {})] * len(tasks)

    def fail(self, index: int) -> None:
        """With the exception that is being handled."""
        self.failed.add(index)
        self._num_failures[index] += 1
        seconds = rest_s(self._num_failures[index])
        self._due_s[index] = self._clock() + seconds
        drafter = self._drafters[index]
        logger.exception("drafter %s has failed; it is asked again in %g s", drafter.name, seconds)
        for key in self._known:
            with contextlib.suppress(Exception):  # it may well be broken
                drafter.forget(key)

    def _ask_again(self) -> None:
        """Drafters whose time has come, as if they knew no sequence yet."""
        for index in [index for index in self.failed if self._clock() >= self._due_s[index]]:
            self.failed.discard(index)
            del self._due_s[index]

    def meet(self, sample: Sample) -> None:
        """From now on its key is this sample's."""
        if self._known.get(sample.key) is not sample:
            self._forget(sample.key)
            self._known[sample.key] = sample

    def forget_all_but(self, running: Collection[Key]) -> None:
        """The others have no place in steps."""
        if self.failed:
            self._ask_again()
        for key in [key for key in self._known if key not in running]:
            self._forget(key)

    def _forget(self, key: Key) -> None:
        if self._known.pop(key, None) is None:
            return
        for index, drafter in enumerate(self._drafters):
            try:
                if index not in self.failed:
                    drafter.forget(key)
            except Exception:
                self.fail(index)

    def check_integrity(self) -> None:
        """Raises: IntegrityError where what one keeps does not add up that has not failed."""
        for index, drafter in enumerate(self._drafters):
            if index not in self.failed:
                drafter.check_integrity()
