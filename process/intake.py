"""Intake: room in memory for what callers send, of one process, in bytes.

A message that is being read counts with the most that it may have, one that has been read with what
it has, until its call is over. Who finds no room waits a while, in the order of coming, and is then
refused with a retry time. One owner never has more than half of the room, so that who sends slowly,
or sends much, leaves the others theirs.

One owner may be many callers, behind an ingress: so a message that arrives slowly keeps its room
only while nobody waits for it. When somebody does, the one that has been read for the longest is
refused, once that is longer than `patience_s`; then, if that was not enough, the next.

Laws: `num_bytes` is the sum of what is held, over all owners and each of them; what is read holds
room; while somebody waits for what is read, an alarm is set, or one that was refused is on its way
out (`check_integrity`). Knows no message and no protocol. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from process.errors import Internal, InvalidArgument, NoCapacity

PATIENCE = 0.25
"""Of the longest wait for room: so long a message may arrive while others wait for its room.
Guessed: a few slow ones give way in turn before anybody has waited in vain."""


class Intake:
    """See the module."""

    def __init__(self, max_bytes: int, *, wait_s: float) -> None:
        """`wait_s`: longest wait for room."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        """Held now."""
        self.num_refused = 0
        """Waits that were in vain, since the start."""
        self.num_recalled = 0
        """Messages that were refused since they arrived slowly and others waited, since the start.
        """
        self.patience_s = wait_s * PATIENCE
        self._wait_s = wait_s
        self._rooms: set[Room] = set()
        self._by_owner: Counter[str] = Counter()
        self._waiting: dict[Room, asyncio.Future[None]] = {}
        self._reading: dict[Room, float] = {}  # since when, on the loop's clock; oldest first
        self._leaving: Room | None = None
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def max_owner_bytes(self) -> int:
        """Most that one owner may hold."""
        return self.max_bytes // 2

    @property
    def num_waiting(self) -> int:
        """Those who wait for room now."""
        return len(self._waiting)

    def room(self, owner: str, num_bytes: int) -> Room:
        """Of one call; not taken yet."""
        return Room(self, owner, num_bytes)

    def check_integrity(self) -> None:
        """Raises: Internal naming the law that is broken."""
        by_owner: Counter[str] = Counter()
        for room in self._rooms:
            by_owner[room.owner] += room.num_bytes
        if by_owner != +self._by_owner or by_owner.total() != self.num_bytes:
            raise Internal(f"intake: {self.num_bytes} bytes counted, {by_owner.total()} held")
        if self.num_bytes > self.max_bytes or any(
            held > self.max_owner_bytes for held in by_owner.values()
        ):
            raise Internal(f"intake: {self.num_bytes} bytes held, above the bound")
        first = self._first_in_line()
        # One that was cancelled a moment ago lets the next in when its own task goes on.
        is_one_leaving = any(turn.done() for turn in self._waiting.values())
        if first is not None and self._is_room_for(first) and not is_one_leaving:
            raise Internal("intake: somebody waits for room that is there")
        recalled = {self._leaving} if self._leaving is not None else set()
        if not self._rooms >= {*self._reading, *recalled}:
            raise Internal("intake: a message is read without room")
        if self._slowest() is not None and self._alarm is None and not recalled:
            raise Internal("intake: somebody waits for what is read, and no alarm is set")

    def _is_owners_turn(self, room: Room) -> bool:
        """Whether its owner may hold that much more."""
        return self._by_owner[room.owner] + room.num_bytes <= self.max_owner_bytes

    def _is_room_for(self, room: Room) -> bool:
        return self.num_bytes + room.num_bytes <= self.max_bytes

    def _first_in_line(self) -> Room | None:
        """The oldest of those that wait for room and not for their own owner's share."""
        for room, turn in self._waiting.items():
            if not turn.done() and self._is_owners_turn(room):
                return room
        return None

    async def take(self, room: Room) -> None:
        """As `Room.take`."""
        if room.num_bytes > self.max_owner_bytes:
            raise InvalidArgument(
                "request", f"has {room.num_bytes} bytes, at most {self.max_owner_bytes} are taken"
            )
        is_first = self._is_owners_turn(room) and self._first_in_line() is None
        if is_first and self._is_room_for(room):
            self._hold(room)
            return
        self._waiting[room] = turn = asyncio.get_running_loop().create_future()
        self._watch()
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except TimeoutError:
            if room in self._rooms:  # the turn came with the end of the wait
                return
            self.num_refused += 1
            raise NoCapacity(
                "too many requests are being read; no room for this one came in time"
            ) from None
        except BaseException:
            if room in self._rooms:  # the turn came, and nobody is there to use it
                self.release(room)
            raise
        finally:
            self._waiting.pop(room, None)
            self._next()  # who left may have been in the way

    def _hold(self, room: Room) -> None:
        self._rooms.add(room)
        self._add(room.owner, room.num_bytes)

    def begin(self, room: Room) -> None:
        """Its message is read from now on. Raises: Internal where it holds nothing."""
        if room not in self._rooms:
            raise Internal("intake: a message is read without room")
        self._reading[room] = asyncio.get_running_loop().time()
        self._watch()

    def end(self, room: Room) -> None:
        """Its message is there, or will never be."""
        self._reading.pop(room, None)

    def shrink(self, room: Room, num_bytes: int) -> None:
        """As `Room.shrink`."""
        if self._leaving is room:
            self._leaving = None  # its last byte was there first
        self._add(room.owner, num_bytes - room.num_bytes)
        room.num_bytes = num_bytes
        self._next()

    def release(self, room: Room) -> None:
        """As `Room.release`."""
        self._rooms.remove(room)
        if self._leaving is room:
            self._leaving = None
        self._add(room.owner, -room.num_bytes)
        self._next()

    def _add(self, owner: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._by_owner[owner] += num_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]

    def _next(self) -> None:
        while (room := self._first_in_line()) is not None and self._is_room_for(room):
            turn = self._waiting.pop(room)
            self._hold(room)
            turn.set_result(None)
        self._watch()

    # ---- slow messages

    def _slowest(self) -> Room | None:
        """What has been read for the longest of that for whose room somebody waits."""
        waiting = [room for room, turn in self._waiting.items() if not turn.done()]
        if not waiting:
            return None
        if any(map(self._is_owners_turn, waiting)):  # all of it is held, whoever by
            return next(iter(self._reading), None)
        owners = {room.owner for room in waiting}
        return next((room for room in self._reading if room.owner in owners), None)

    def _watch(self) -> None:
        if self._alarm is not None or self._leaving is not None:
            return
        slowest = self._slowest()
        if slowest is not None:
            due_s = self._reading[slowest] + self.patience_s
            self._alarm = asyncio.get_running_loop().call_at(due_s, self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        slowest, now_s = self._slowest(), asyncio.get_running_loop().time()
        if slowest is not None and self._reading[slowest] + self.patience_s <= now_s:
            del self._reading[slowest]
            self._leaving = slowest
            self.num_recalled += 1
            slowest.recall()
        self._watch()


class Room:
    """One call's part of it: by `take` and `release`, or as a context."""

    __slots__ = ("_intake", "_scope", "num_bytes", "owner")

    def __init__(self, intake: Intake, owner: str, num_bytes: int) -> None:
        self._intake = intake
        self.owner = owner
        self.num_bytes = num_bytes
        self._scope: asyncio.Timeout | None = None

    async def take(self) -> None:
        """Wait for it. Raises: NoCapacity; InvalidArgument for more than any call may have."""
        await self._intake.take(self)

    def release(self) -> None:
        """The call is over."""
        self._intake.release(self)

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
        """The message is awaited in the body, and nothing else. Once, after `take`.

        Raises: NoCapacity, out of the body, when it arrives slowly and others wait for its room.
        """
        self._scope = scope = asyncio.timeout(None)
        try:
            async with scope:
                self._intake.begin(self)
                try:
                    yield
                finally:
                    self._intake.end(self)
        except TimeoutError:
            if not scope.expired():
                raise
            raise NoCapacity(
                "the request arrived too slowly while others waited to be read"
            ) from None

    def recall(self) -> None:
        """It is read too slowly: `reading` ends."""
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    def shrink(self, num_bytes: int) -> None:
        """What was to be read has been read, and has so many bytes: at most what was taken."""
        if num_bytes > self.num_bytes:
            raise Internal(f"intake: {num_bytes} bytes read where {self.num_bytes} were the most")
        self._intake.shrink(self, num_bytes)
