"""StoreWatch: the look that a store takes at itself every moment. It ends what has lapsed, notices
workers that are gone, keeps room and memory ready, and recomputes the conservation laws when
something changed and nothing is under way.

Recomputing takes 9 us a frame (9 s for a million). So it goes in slices of `SLICE_S`, between which
the loop serves calls, and begins again another time when something changed in between. A law that
does not hold is looked at once more in one go before it is reported, since only that is free of
changes.

Life: made and started with the memory -> `heard_call`, `heard_beat` -> `stop`. A law that breaks
in use is reported for the rest of this life, whatever later checks find, and ends nothing.

Knows no stubs and no transports but their names. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable

from kvstore import invariants
from kvstore.attachments import Attachment
from kvstore.config import KvStoreSettings
from kvstore.errors import IntegrityError
from kvstore.memory import Memory
from process import logs
from process.deadline import Clock
from process.tasks import end_tasks, start_task

logger = logging.getLogger(__name__)

SLICE_S = 0.005
"""Of a check, between two turns of the loop."""

CHECK_BUDGET_S = 0.25
"""What a call waits for a check that it asked for; then it gets the result of the last one."""

_END = object()

_STEPS = 64
"""Between two looks at the clock: 20 to 60 us (measured)."""


class StoreWatch:
    """See the module."""

    def __init__(
        self,
        memory: Memory,
        settings: KvStoreSettings,
        clock: Clock,
        on_gone: Callable[[], None],
        slice_s: float = SLICE_S,
    ) -> None:
        """on_gone: called after workers may have gone; must not raise."""
        self.integrity_error = ""
        """What failed in the last check, or in use; empty: every law held."""
        self._memory = memory
        self._settings = settings
        self._clock = clock
        self._on_gone = on_gone
        self._slice_s = slice_s
        self._broken = ""  # a law that did not hold in use
        self._num_calls = 0
        self._num_beats = 0  # heartbeats: that the store heard of changes, but no work
        self._checked_at = (0, -1.0)  # (calls and beats, time) of the last check
        self._task: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = start_task(self._look_for_ever(), "store watch")

    async def stop(self) -> None:
        await end_tasks([self._task, self._checking])

    def heard_call(self) -> None:
        """Somebody asked something of the store."""
        self._num_calls += 1

    def heard_beat(self) -> None:
        """Somebody only said that they live: a store of many workers hears that all the time."""
        self._num_beats += 1

    async def check_integrity(self, budget_s: float = CHECK_BUDGET_S) -> str:
        """Recompute every law, for `budget_s` at most; calls that ask at once share one check.
        Returns: what the last complete check found, or what failed in use; empty when all held."""
        if self._checking is None or self._checking.done():
            self._checking = start_task(self._check_for(budget_s), "store check")
        await asyncio.wait([self._checking], timeout=2 * budget_s)
        return self.integrity_error

    async def _check_for(self, budget_s: float) -> None:
        until_s = time.monotonic() + budget_s
        while not await self._check(until_s) and time.monotonic() < until_s:
            await asyncio.sleep(0)

    async def _check(self, until_s: float) -> bool:
        """Returns: whether it came to its end: nothing changed meanwhile, in time."""
        store = self._memory.store
        self._in_use(lambda: store.lapse(self._clock()))
        state, steps = self._state(), invariants.check_store(store)
        slice_end_s = time.monotonic() + self._slice_s
        try:
            while next(itertools.islice(steps, _STEPS - 1, None), _END) is not _END:
                if time.monotonic() < slice_end_s:
                    continue
                await asyncio.sleep(0)
                if self._state() != state or time.monotonic() >= until_s:
                    return False
                slice_end_s = time.monotonic() + self._slice_s
        except RuntimeError:  # a table changed while it was iterated over
            return False
        except IntegrityError:
            return self._state() == state and not self._holds_in_one_go()
        self.integrity_error = self._broken
        return True

    def _holds_in_one_go(self) -> bool:
        try:
            invariants.check(self._memory.store)
        except IntegrityError as error:
            self._tell(error)
            return False
        return True

    def _state(self) -> tuple[int, ...]:
        """Differs when something that is checked has changed, or may have."""
        store = self._memory.store
        return self._num_calls, store.frames.num_changes, len(store.leases)

    async def _look_for_ever(self) -> None:
        num_calls = 0
        while True:
            await asyncio.sleep(self._settings.sweep_interval_s)
            now_s = self._clock()
            self._in_use(lambda: self._memory.store.lapse(self._clock()))
            self._in_use(lambda: self._notice_gone(self._clock()))
            self._memory.look_for_room()
            self._memory.touch_ahead()
            is_idle, num_calls = num_calls == self._num_calls, self._num_calls
            num_heard = num_calls + self._num_beats
            checked_heard, checked_s = self._checked_at
            due = now_s - checked_s >= self._settings.integrity_interval_s
            if is_idle and due and checked_heard != num_heard and await self._check(math.inf):
                self._checked_at = (num_heard, now_s)

    def _in_use(self, work: Callable[[], None]) -> None:
        """Do what may break a law."""
        try:
            work()
        except IntegrityError as error:
            self._tell(error)
            self._broken = str(error)

    def _notice_gone(self, now_s: float) -> None:
        """Detach workers that are dead (their lock is gone) or silent for too long."""
        for attachment in list(self._memory.store.attachments):
            # Before its first call the worker may not have taken its lock yet.
            has_called = attachment.last_seen_s > attachment.attached_at_s
            silent_s = now_s - attachment.last_seen_s
            is_silent = silent_s >= self._settings.attachment_ttl_s
            if attachment.transport == "shm":
                is_locked = self._memory.slab.is_locked(attachment.attachment_id)
                if (has_called or is_silent) and not is_locked:
                    self._gone(attachment, 0.0, "its process ended")
            elif is_silent:
                self._gone(attachment, None, f"silent for {silent_s:.0f} s")
        self._on_gone()

    def _gone(self, attachment: Attachment, grace_s: float | None, why: str) -> None:
        logs.event(logger, "worker_gone", worker_id=attachment.worker_id, why=why)
        self._memory.store.detach(attachment.attachment_id, self._clock(), grace_s)

    def _tell(self, error: IntegrityError) -> None:
        self.integrity_error = str(error)
        logs.event(logger, "integrity_error", level=logging.ERROR, error=str(error))
