"""Clients that ask and then take nothing: whoever lets an answer wait for `stall_s` has its request
cancelled, so that the workers' blocks serve somebody who reads.

A `Reader` says when it begins to write and when its client took it, which costs next to nothing;
one look every `stall_s` / 8 finds those that have waited too long. Knows no protocol and no
request. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from process.errors import Cancelled, Internal


class StalledReaders:
    """See the module."""

    def __init__(self, stall_s: float) -> None:
        self.num_stalled = 0
        """Found so since the start."""
        self._stall_s = stall_s
        self._readers: set[Reader] = set()
        self._next_look: asyncio.TimerHandle | None = None

    @property
    def num_readers(self) -> int:
        """Answers that are on their way."""
        return len(self._readers)

    def reader(self) -> Reader:
        """Of one answer: a context around it. Raises at its end: Cancelled, if it stalled."""
        return Reader(self)

    def check_integrity(self) -> None:
        """Raises: Internal when answers are not looked after."""
        if self._readers and self._next_look is None:
            raise Internal(f"{len(self._readers)} answers are written, and nobody looks after them")

    def add(self, reader: Reader) -> None:
        """Look after it from now on."""
        self._readers.add(reader)
        if self._next_look is None:
            self._look_later()

    def remove(self, reader: Reader) -> None:
        """No more."""
        self._readers.discard(reader)

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(self._stall_s / 8, self._look)

    def _look(self) -> None:
        self._next_look = None
        late_s = asyncio.get_running_loop().time() - self._stall_s
        for reader in self._readers:
            if reader.waits_since_s is not None and reader.waits_since_s <= late_s:
                self.num_stalled += not reader.is_stalled
                reader.end(f"the client took nothing of its answer for {self._stall_s:g} s")
        if self._readers:
            self._look_later()


class Reader:
    """One client, while its answer is written; see `StalledReaders.reader`."""

    __slots__ = ("_all", "_time", "_why", "waits_since_s")

    def __init__(self, readers: StalledReaders) -> None:
        self.waits_since_s: float | None = None
        """When the message that its client has not taken yet was written; None: it took all."""
        self._all = readers
        self._time = asyncio.timeout(None)
        self._why = ""

    @property
    def is_stalled(self) -> bool:
        """Whether it was given up."""
        return bool(self._why)

    def begin(self) -> None:
        """A message is about to be written."""
        self.waits_since_s = asyncio.get_running_loop().time()

    def took(self) -> None:
        """And was taken."""
        self.waits_since_s = None

    def end(self, why: str) -> None:
        """Cancel what runs in this context. Once."""
        if not self._why:
            self._why = why
            self._time.reschedule(0.0)

    async def __aenter__(self) -> Self:
        await self._time.__aenter__()
        self._all.add(self)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._all.remove(self)
        try:
            await self._time.__aexit__(kind, error, traceback)
        except TimeoutError as late:
            raise Cancelled(self._why) from late
