"""MemoryBudget: a limit on the memory that messages of callers take in this process.

- A message that is being read counts with the most bytes that it may have, one that has been read
  with the bytes that it has, until its call is over.
- A call without room waits, first come, first served, and is refused with a retry time after
  `wait_s`. One owner never holds more than half of the budget, so that an owner that sends slowly
  or much leaves the others their half.
- One owner may be many callers, behind an ingress: so a message that arrives slowly keeps its
  bytes only while no call waits for them. Otherwise the message that has been read for the longest
  is evicted, once that is longer than `patience_s`; then, if that was not enough, the next.

Invariants (`check_integrity`): `num_bytes` is the sum over all grants, in total and by owner; a
message that is read holds a grant; while a call waits for bytes of a message that is read, an alarm
is set, or an evicted message is on its way out. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from process.rpc_errors import Internal, InvalidArgument, NoCapacity

PATIENCE = 0.25
"""Part of `wait_s` for which a message may arrive while others wait for its bytes. Guessed: a few
slow messages are evicted in turn before a waiting call times out."""


class MemoryBudget:
    """Hands out `max_bytes` of memory among the owners of calls."""

    def __init__(self, max_bytes: int, *, wait_s: float) -> None:
        """Args: wait_s: longest time that a call waits for bytes."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """The bytes granted now, of all calls together."""
        self.num_refused = 0
        """The number of calls refused after `wait_s`, since the start."""
        self.num_recalled = 0
        """The number of messages evicted because they arrived slowly while others waited, since the
        start."""
        self.patience_s = wait_s * PATIENCE
        self._wait_s = wait_s
        self._grants: set[MemoryGrant] = set()
        self._by_owner: Counter[str] = Counter()
        self._waiting: dict[MemoryGrant, asyncio.Future[None]] = {}
        # Since when, on the loop's clock; oldest first.
        self._reading: dict[MemoryGrant, float] = {}
        self._leaving: MemoryGrant | None = None
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def max_owner_bytes(self) -> int:
        """Most bytes that one owner may hold: half of the budget."""
        return self.max_bytes // 2

    @property
    def num_waiting(self) -> int:
        """The number of calls that wait for bytes now."""
        return len(self._waiting)

    def grant(self, owner: str, num_bytes: int) -> MemoryGrant:
        """Make the grant of one call of `owner`; its bytes are not taken yet."""
        return MemoryGrant(self, owner, num_bytes)

    def check_integrity(self) -> None:
        """Recompute the invariants of the budget. Raises: Internal naming the one that does not
        hold."""
        by_owner: Counter[str] = Counter()
        for grant in self._grants:
            by_owner[grant.owner] += grant.num_bytes
        if by_owner != +self._by_owner or by_owner.total() != self.num_bytes:
            raise Internal(
                f"memory budget: {self.num_bytes} bytes counted, {by_owner.total()} held"
            )
        if self.num_bytes > self.max_bytes or any(
            held > self.max_owner_bytes for held in by_owner.values()
        ):
            raise Internal(f"memory budget: {self.num_bytes} bytes held, above the bound")
        first = self._first_in_line()
        # A call that was just cancelled admits the next one when its own task goes on.
        is_one_leaving = any(turn.done() for turn in self._waiting.values())
        if first is not None and self._is_room_for(first) and not is_one_leaving:
            raise Internal("memory budget: a call waits for bytes that are free")
        evicted = {self._leaving} if self._leaving is not None else set()
        if not self._grants >= {*self._reading, *evicted}:
            raise Internal("memory budget: a message is read without a grant")
        if self._slowest_message() is not None and self._alarm is None and not evicted:
            raise Internal("memory budget: a call waits for a message's bytes, and no alarm is set")

    def _is_owners_turn(self, grant: MemoryGrant) -> bool:
        """Whether the owner may hold that much more."""
        return self._by_owner[grant.owner] + grant.num_bytes <= self.max_owner_bytes

    def _is_room_for(self, grant: MemoryGrant) -> bool:
        return self.num_bytes + grant.num_bytes <= self.max_bytes

    def _first_in_line(self) -> MemoryGrant | None:
        """The oldest call that waits for free bytes and not for its owner's share."""
        for grant, turn in self._waiting.items():
            if not turn.done() and self._is_owners_turn(grant):
                return grant
        return None

    async def take(self, grant: MemoryGrant) -> None:
        """Wait for the bytes of a grant. Raises: NoCapacity after `wait_s`; InvalidArgument for
        more than any call may have."""
        if grant.num_bytes > self.max_owner_bytes:
            raise InvalidArgument(
                "request", f"has {grant.num_bytes} bytes, at most {self.max_owner_bytes} are taken"
            )
        is_first = self._is_owners_turn(grant) and self._first_in_line() is None
        if is_first and self._is_room_for(grant):
            self._hold(grant)
            return
        self._waiting[grant] = turn = asyncio.get_running_loop().create_future()
        self._watch()
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except TimeoutError:
            if grant in self._grants:  # the turn came with the end of the wait
                return
            self.num_refused += 1
            raise NoCapacity(
                "too many requests are being read; no room for this one came in time"
            ) from None
        except BaseException:
            if grant in self._grants:  # the turn came, and the call has gone
                self.release(grant)
            raise
        finally:
            self._waiting.pop(grant, None)
            self._next()  # this call may have been the first in line

    def _hold(self, grant: MemoryGrant) -> None:
        self._grants.add(grant)
        self._add(grant.owner, grant.num_bytes)

    def begin(self, grant: MemoryGrant) -> None:
        """Note that the message of a grant is read from now on. Raises: Internal for a grant that
        is not taken."""
        if grant not in self._grants:
            raise Internal("memory budget: a message is read without a grant")
        self._reading[grant] = asyncio.get_running_loop().time()
        self._watch()

    def end(self, grant: MemoryGrant) -> None:
        """Note that the message of a grant has arrived, or never will."""
        self._reading.pop(grant, None)

    def shrink(self, grant: MemoryGrant, num_bytes: int) -> None:
        """Note that the message of a grant has `num_bytes`, at most as many as were taken: the rest
        comes free."""
        if self._leaving is grant:
            self._leaving = None  # its last byte arrived before the eviction
        self._add(grant.owner, num_bytes - grant.num_bytes)
        grant.num_bytes = num_bytes
        self._next()

    def release(self, grant: MemoryGrant) -> None:
        """Give back the bytes of a grant whose call is over."""
        self._grants.remove(grant)
        if self._leaving is grant:
            self._leaving = None
        self._add(grant.owner, -grant.num_bytes)
        self._next()

    def _add(self, owner: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._by_owner[owner] += num_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]

    def _next(self) -> None:
        while (grant := self._first_in_line()) is not None and self._is_room_for(grant):
            turn = self._waiting.pop(grant)
            self._hold(grant)
            turn.set_result(None)
        self._watch()

    # ---- slow messages

    def _slowest_message(self) -> MemoryGrant | None:
        """The message that has been read for the longest, of those whose bytes a call waits for."""
        waiting = [grant for grant, turn in self._waiting.items() if not turn.done()]
        if not waiting:
            return None
        if any(map(self._is_owners_turn, waiting)):  # any owner's bytes would do
            return next(iter(self._reading), None)
        owners = {grant.owner for grant in waiting}
        return next((grant for grant in self._reading if grant.owner in owners), None)

    def _watch(self) -> None:
        if self._alarm is not None or self._leaving is not None:
            return
        slowest = self._slowest_message()
        if slowest is not None:
            due_s = self._reading[slowest] + self.patience_s
            self._alarm = asyncio.get_running_loop().call_at(due_s, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        slowest, now_s = self._slowest_message(), asyncio.get_running_loop().time()
        if slowest is not None and self._reading[slowest] + self.patience_s <= now_s:
            del self._reading[slowest]
            self._leaving = slowest
            self.num_recalled += 1
            slowest.evict()
        self._watch()


class MemoryGrant:
    """The bytes of one call, held from `take` to `release`, or as a context manager."""

    __slots__ = ("_budget", "_scope", "num_bytes", "owner")

    def __init__(self, budget: MemoryBudget, owner: str, num_bytes: int) -> None:
        self._budget = budget
        self.owner = owner
        self.num_bytes = num_bytes
        self._scope: asyncio.Timeout | None = None

    async def take(self) -> None:
        """Wait for the bytes. Raises: NoCapacity when none come free in time; InvalidArgument for
        more than any call may have."""
        await self._budget.take(self)

    def release(self) -> None:
        """Give the bytes back, since the call is over."""
        self._budget.release(self)

    async def __aenter__(self) -> Self:
        await self.take()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Context that awaits the call's message, and nothing else; once, after `take`.

        Raises: NoCapacity, out of the body, when the message arrives slowly and others wait for its
            bytes.
        """
        self._scope = scope = asyncio.timeout(None)
        try:
            async with scope:
                self._budget.begin(self)
                try:
                    yield
                finally:
                    self._budget.end(self)
        except TimeoutError:
            if not scope.expired():
                raise
            raise NoCapacity(
                "the request arrived too slowly while others waited to be read"
            ) from None

    def evict(self) -> None:
        """End `reading`, since the message arrives too slowly."""
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    def shrink(self, num_bytes: int) -> None:
        """Give back what the message did not need: it has arrived with `num_bytes`, at most as many
        as were taken."""
        if num_bytes > self.num_bytes:
            raise Internal(
                f"memory budget: {num_bytes} bytes read where {self.num_bytes} were the most"
            )
        self._budget.shrink(self, num_bytes)
