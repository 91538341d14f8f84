"""`Attempts`: table of the requests in flight, by tenant and request id; of each id at most the
newest attempt runs.

A new attempt with the same id and body cancels the older one and starts when that has ended. With
another body it is refused. States: waiting -> running -> over; a newer attempt, or the router's
shutdown, ends an attempt early from either state.

Invariant: an attempt is in the table from `admit` until its context is left, and all attempts of
one id have the same body. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from process.deadline import Deadline
from process.rpc_errors import (
    AlreadyExists,
    BatonError,
    Cancelled,
    Internal,
    NoCapacity,
    Unavailable,
)

Key = tuple[str, str]
_RETRY_S = 1.0
"""Retry time after a refusal by a router that stops: another or a restarted one serves then."""


@dataclass(eq=False)
class Attempt:
    """One attempt to serve a request. `digest`: of the request body."""

    tenant: str
    request_id: str
    digest: bytes
    task: asyncio.Task[object]
    turn: asyncio.Event = field(default_factory=asyncio.Event)
    ended_by: BatonError | None = None
    """Error with which the attempt was ended early; None: it was not."""

    @property
    def key(self) -> Key:
        return self.tenant, self.request_id

    def end(self, error: BatonError) -> None:
        """End the attempt early with `error`; an attempt ended before keeps its error."""
        if self.ended_by is None:
            self.ended_by = error
            self.task.cancel()


class Attempts:
    """Table of the attempts in flight; see the module docstring."""

    def __init__(self, *, max_requests: int, supersede_wait_s: float) -> None:
        self._max_requests = max_requests
        self._supersede_wait_s = supersede_wait_s
        # Oldest first; the first one runs, the others wait until it has ended.
        self._attempts: dict[Key, list[Attempt]] = {}
        self._num_attempts = 0
        self._none_left = asyncio.Event()
        self._none_left.set()
        self._is_closed = False

    @property
    def num_attempts(self) -> int:
        """Number of attempts, running and waiting."""
        return self._num_attempts

    @asynccontextmanager
    async def admit(
        self, tenant: str, request_id: str, digest: bytes, deadline: Deadline
    ) -> AsyncIterator[Attempt]:
        """Run the body as the only running attempt of this id, in the current task.

        Raises: AlreadyExists when the id is in flight with another body; NoCapacity when too many
            requests are in flight; Unavailable when the older attempt did not end in time, or the
            router stops; Cancelled when a newer attempt took over.
        """
        attempt = self._enter(tenant, request_id, digest)
        try:
            await self._wait_for_turn(attempt, deadline)
            yield attempt
        except asyncio.CancelledError:
            # Our own cancel, as in asyncio.timeout; one from outside must still propagate.
            if attempt.ended_by is not None and attempt.task.uncancel() == 0:
                raise attempt.ended_by from None
            raise
        finally:
            self._leave(attempt)

    async def drain(self, for_s: float, last_words_s: float) -> None:
        """Let attempts finish for `for_s` seconds, then end the rest and refuse new ones.

        Those end with Unavailable. Returns when none is left, at most `last_words_s` later.
        """
        if await self._is_empty_within(for_s):
            self._is_closed = True
            return
        self._is_closed = True
        for attempt in [each for attempts in self._attempts.values() for each in attempts]:
            attempt.end(_stopping())
        await self._is_empty_within(last_words_s)

    def check_integrity(self) -> None:
        """Check the table. Raises: Internal when its invariant is broken."""
        if self._num_attempts != sum(len(attempts) for attempts in self._attempts.values()):
            raise Internal("in-flight count differs from the table")
        for key, attempts in self._attempts.items():
            if not attempts or len({attempt.digest for attempt in attempts}) != 1:
                raise Internal(f"in-flight entry {key} is empty or of several bodies")
            if any(attempt.ended_by is None for attempt in attempts[:-1]):
                raise Internal(f"in-flight entry {key} has two attempts that both go on")

    def _enter(self, tenant: str, request_id: str, digest: bytes) -> Attempt:
        task = asyncio.current_task()
        assert task is not None, "admit is called inside a task"
        if self._is_closed:
            raise _stopping()
        attempt = Attempt(tenant, request_id, digest, task)
        earlier = self._attempts.get(attempt.key, [])
        if earlier and earlier[-1].digest != digest:
            raise AlreadyExists(f"request_id: {request_id} is in flight with another body")
        if self._num_attempts - len(earlier) >= self._max_requests:
            raise NoCapacity(f"{self._max_requests} requests are in flight")
        for older in earlier:
            older.end(
                Cancelled(f"request_id {request_id}: a newer attempt with the same body took over")
            )
        self._attempts.setdefault(attempt.key, []).append(attempt)
        self._num_attempts += 1
        self._none_left.clear()
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

    async def _is_empty_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._none_left.wait()
        except TimeoutError:
            return False
        return True

    def _leave(self, attempt: Attempt) -> None:
        attempts = self._attempts[attempt.key]
        attempts.remove(attempt)
        self._num_attempts -= 1
        if not self._num_attempts:
            self._none_left.set()
        if attempts:
            attempts[0].turn.set()
        else:
            del self._attempts[attempt.key]


def _stopping() -> Unavailable:
    return Unavailable("this router stops: send the request again", retry_after_s=_RETRY_S)
