"""Departure: when a request has to leave a draining worker, and how long it may take to store its
KV.

Life of one: created -> `tell` -> the request in the scope continues by itself, and gets `MustLeave`
when the time is over. Later calls have no effect. One request, the loop's thread.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from process.deadline import Deadline
from process.errors import Unavailable


class MustLeave(Unavailable):
    """Error raised when a draining worker waits for this request no longer."""


class Departure:
    """Time limit of one request's departure; a scope that is entered once."""

    def __init__(self, worker_id: str) -> None:
        self.told: asyncio.Future[Deadline] = asyncio.get_running_loop().create_future()
        """Until when it has to be gone."""
        self._worker_id = worker_id
        self._scope = asyncio.timeout(None)
        self._is_inside = False

    @property
    def is_told(self) -> bool:
        return self.told.done()

    def tell(self, by: Deadline) -> None:
        """Set the time by which the request must be gone; only the first call counts."""
        if self.is_told:
            return
        self.told.set_result(by)
        if self._is_inside:
            self._set_alarm(by)

    def _set_alarm(self, by: Deadline) -> None:
        self._scope.reschedule(asyncio.get_running_loop().time() + by.left_s())

    async def __aenter__(self) -> Departure:
        await self._scope.__aenter__()
        self._is_inside = True
        if self.is_told:
            self._set_alarm(self.told.result())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_inside = False
        try:
            await self._scope.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise MustLeave(f"{self._worker_id} is draining", retry_after_s=0.0) from late
