"""Holding: requests wait for a worker that is not there but may come, instead of being refused.

`is_expected` is the rule for every such wait: of a new request and of an answer that has begun. A
worker may come if it served, or was starting, a short time ago. `Holding` is the wait of requests
for a model of which a role has never had a worker, or has none for longer than that:

    asked -> free     there are workers, or none is waited for
    asked -> refused  as many are held as may
    asked -> held -> free | refused (the time is up) | over (cancelled, its deadline)

Knows neither workers nor models: the caller's `find` raises while workers are missing, and `look`
is called after each look at the registry. Law: `num_held` is the number of callers inside `wait`.
One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from process.deadline import Deadline
from process.errors import DeadlineExceeded, Internal, NoCapacity, Unavailable

_RETRY_S = 1.0


def is_expected(
    seen_s: Mapping[str, float], here: Collection[str], now_s: float, wait_s: float
) -> bool:
    """Whether a worker is away that may soon be there: it served, or was starting, less than
    `wait_s` ago.

    Args: seen_s: when each worker of the role last served or was starting, by id. here: those that
        serve now.
    """
    return any(now_s - at_s < wait_s for name, at_s in seen_s.items() if name not in here)


class Holding:
    """See the module."""

    def __init__(self, hold_s: float, max_requests: int) -> None:
        """hold_s: how long one request is held at most where no worker is expected; 0: not at
        all."""
        self._hold_s = hold_s
        self._max_requests = max_requests
        self._waiting: set[asyncio.Future[None]] = set()
        self.num_held = 0

    @property
    def is_on(self) -> bool:
        """Whether requests are held where no worker is expected."""
        return self._hold_s > 0

    def look(self) -> None:
        """Who may serve may have changed: all that are held look again."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def wait(
        self,
        find: Callable[[], object],
        deadline: Deadline,
        on_held: Callable[[], None],
        is_coming: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Until `find` does not raise Unavailable any more.

        Args: on_held: called when it must wait. is_coming: whether the missing workers are
            expected; while it holds, only `deadline` ends the wait.
        Returns: whether it had to. Raises: NoCapacity when as many are held as may; Unavailable,
        the last one of `find`, when the time is up; DeadlineExceeded.
        """
        if _problem(find) is None or not (self.is_on or is_coming()):
            return False
        if self.num_held >= self._max_requests:
            raise NoCapacity(
                f"{self.num_held} requests wait for the first worker to start",
                retry_after_s=_RETRY_S,
            )
        bound = deadline.sooner(self._hold_s)
        self.num_held += 1
        try:
            on_held()
            while (problem := _problem(find)) is not None:
                if deadline.expired:
                    raise DeadlineExceeded("the request's time ran out: no worker started")
                if is_coming():
                    await self._news(deadline)
                elif bound.expired:
                    raise Unavailable(
                        f"{problem}; none started within {self._hold_s:g} s",
                        retry_after_s=_RETRY_S,
                    )
                else:
                    await self._news(bound)
        finally:
            self.num_held -= 1
        return True

    def check_integrity(self) -> None:
        """Raises: Internal when more wait for news than are held."""
        if len(self._waiting) > self.num_held:
            raise Internal(f"{len(self._waiting)} wait for workers, {self.num_held} are held")

    async def _news(self, bound: Deadline) -> None:
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait([future], timeout=bound.left_s())
        finally:
            self._waiting.discard(future)
            future.cancel()


def _problem(find: Callable[[], object]) -> Unavailable | None:
    try:
        find()
    except Unavailable as error:
        return error
    return None
