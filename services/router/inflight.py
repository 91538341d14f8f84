"""Attempts under way, by (tenant, request id): at most one runs, the newest.

The same id with the same body: the older attempt is cancelled, and the new one starts when it is
over. With another body: refused. Life of an attempt: waiting -> running -> over; superseded
(cancelled) from waiting and running alike.

Law: an attempt is in the table from `admit` until its context is left; attempts of one id share one
body. One loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from process.deadline import Deadline
from process.errors import AlreadyExists, Cancelled, Internal, NoCapacity, Unavailable

Key = tuple[str, str]


@dataclass(eq=False)
class Attempt:
    """One attempt to serve one request."""

    tenant: str
    request_id: str
    digest: bytes
    task: asyncio.Task[object]
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    is_superseded: bool = False

    @property
    def key(self) -> Key:
        return self.tenant, self.request_id

    def supersede(self) -> None:
        """A newer attempt asks for the end of this one."""
        if not self.is_superseded:
            self.is_superseded = True
            self.task.cancel()


class InFlight:
    """The table of attempts."""

    def __init__(self, *, max_requests: int, supersede_wait_s: float) -> None:
        self._max_requests = max_requests
        self._supersede_wait_s = supersede_wait_s
        # Oldest first; the first one runs, the others wait for it to be over.
        self._attempts: dict[Key, list[Attempt]] = {}
        self._num_attempts = 0

    @property
    def num_attempts(self) -> int:
        """Running and waiting."""
        return self._num_attempts

    @asynccontextmanager
    async def admit(
        self, tenant: str, request_id: str, digest: bytes, deadline: Deadline
    ) -> AsyncIterator[Attempt]:
        """Run the body as the one attempt of this id, in the current task.

        Raises: AlreadyExists when the id runs with another body; NoCapacity when too many requests
            are in flight;
            Unavailable when the old attempt did not end in time; Cancelled when a newer attempt
            came.
        """
        attempt = self._enter(tenant, request_id, digest)
        try:
            await self._wait_for_turn(attempt, deadline)
            yield attempt
        except asyncio.CancelledError:
            # Our own cancel, as asyncio.timeout does it; one from outside as well must go on.
            if attempt.is_superseded and attempt.task.uncancel() == 0:
                raise Cancelled(
                    f"request_id {request_id}: a newer attempt with the same body took over"
                ) from None
            raise
        finally:
            self._leave(attempt)

    def check_integrity(self) -> None:
        """Raises: Internal when the table breaks its law."""
        if self._num_attempts != sum(len(attempts) for attempts in self._attempts.values()):
            raise Internal("in-flight count differs from the table")
        for key, attempts in self._attempts.items():
            if not attempts or len({attempt.digest for attempt in attempts}) != 1:
                raise Internal(f"in-flight entry {key} is empty or of several bodies")
            if any(not attempt.is_superseded for attempt in attempts[:-1]):
                raise Internal(f"in-flight entry {key} has two attempts that both go on")

    def _enter(self, tenant: str, request_id: str, digest: bytes) -> Attempt:
        task = asyncio.current_task()
        assert task is not None, "admit is called inside a task"
        attempt = Attempt(tenant, request_id, digest, task)
        earlier = self._attempts.get(attempt.key, [])
        if earlier and earlier[-1].digest != digest:
            raise AlreadyExists(f"request_id: {request_id} is in flight with another body")
        if self._num_attempts - len(earlier) >= self._max_requests:
            raise NoCapacity(f"{self._max_requests} requests are in flight")
        for older in earlier:
            older.supersede()
        self._attempts.setdefault(attempt.key, []).append(attempt)
        self._num_attempts += 1
        if not earlier:
            attempt.turn.set()
        return attempt

    async def _wait_for_turn(self, attempt: Attempt, deadline: Deadline) -> None:
        if attempt.turn.is_set():
            return
        bound = deadline.sooner(self._supersede_wait_s)
        try:
            async with asyncio.timeout(bound.left_s()):
                await attempt.turn.wait()
        except TimeoutError as error:
            raise Unavailable(
                f"request_id: the older attempt of {attempt.request_id} has not ended yet",
                retry_after_s=1.0,
            ) from error

    def _leave(self, attempt: Attempt) -> None:
        attempts = self._attempts[attempt.key]
        attempts.remove(attempt)
        self._num_attempts -= 1
        if attempts:
            attempts[0].turn.set()
        else:
            del self._attempts[attempt.key]
