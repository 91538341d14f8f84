"""Background: one piece of work of a start that goes on in a thread while another is done, and
whose progress is told by the thread that waits for it. Start-up only.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")
Progress = Callable[[str, int, int], None]

_LOOK_EVERY_S = 0.1


class _NotWanted(Exception):
    """Ends work whose result nobody waits for any more."""


class Background(Generic[T]):
    """See the module. At the end of the `with` block the thread has ended: work that reports its
    progress stops at its next report. A process that ends meanwhile waits for nothing: whoever
    loads on a thread of its own is not held back by this one.

    Args:
        work: called in the thread, with what it reports its progress to.
        progress: told by `tell` and `result`, in the caller's thread.
    """

    def __init__(self, work: Callable[[Progress], T], progress: Progress | None) -> None:
        self._progress = progress
        self._latest: tuple[str, int, int] | None = None
        self._told: tuple[str, int, int] | None = None
        self._is_over = False
        self._work = work
        self._future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name="background", daemon=True)
        self._thread.start()

    def __enter__(self) -> Background[T]:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._is_over = True
        self._thread.join()

    def _run(self) -> None:
        try:
            self._future.set_result(self._work(self._note))
        except BaseException as error:  # the caller's
            self._future.set_exception(error)

    def _note(self, what: str, done: int, total: int) -> None:
        if self._is_over:
            raise _NotWanted
        self._latest = (what, done, total)

    def tell(self) -> None:
        """Report how far it is, if that is news."""
        latest = self._latest
        if latest is not None and latest != self._told and self._progress is not None:
            self._told = latest
            self._progress(*latest)

    def telling(self) -> Progress | None:
        """For the work beside it: reports that one's progress, and its own."""
        progress = self._progress
        if progress is None:
            return None

        def both(what: str, done: int, total: int) -> None:
            self.tell()
            progress(what, done, total)

        return both

    def result(self) -> T:
        """Wait for it. Raises: what the work raised."""
        while not self._future.done():
            concurrent.futures.wait((self._future,), timeout=_LOOK_EVERY_S)
            self.tell()
        self.tell()
        return self._future.result()
