"""StoreWatch: the look that a store takes at itself every moment. It ends what has lapsed, notices
workers that are gone, keeps room and memory ready, and recomputes the conservation laws when
something changed and nothing is under way.

Life: made and started with the memory -> `heard_call`, `heard_beat` -> `stop`. A law that breaks
in use is told for the rest of this life, whatever later checks find, and ends nothing.

Knows no stubs and no transports but their names. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvstore.attachments import Attachment
from kvstore.config import KvStoreSettings
from kvstore.errors import IntegrityError
from kvstore.memory import Memory
from process import logs
from process.deadline import Clock
from process.tasks import end_tasks, start_task

logger = logging.getLogger(__name__)


class StoreWatch:
    """See the module."""

    def __init__(
        self,
        memory: Memory,
        settings: KvStoreSettings,
        clock: Clock,
        on_gone: Callable[[], None],
    ) -> None:
        """on_gone: called after workers may have gone; must not raise."""
        self.integrity_error = ""
        """What failed in the last check, or in use; empty: every law held."""
        self._memory = memory
        self._settings = settings
        self._clock = clock
        self._on_gone = on_gone
        self._broken = ""  # a law that did not hold in use
        self._num_calls = 0
        self._num_beats = 0  # heartbeats: that the store heard of changes, but no work
        self._checked_at = (0, -1.0)  # (calls and beats, time) of the last check
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = start_task(self._look_for_ever(), "store watch")

    async def stop(self) -> None:
        await end_tasks([self._task])

    def heard_call(self) -> None:
        """Somebody asked something of the store."""
        self._num_calls += 1

    def heard_beat(self) -> None:
        """Somebody only said that they live: a store of many workers hears that all the time."""
        self._num_beats += 1

    def check_integrity(self) -> str:
        """Recompute every law. Returns: what failed, now or in use; empty when all held."""
        store = self._memory.store
        try:
            store.lapse(self._clock())
            store.check_integrity()
            self.integrity_error = self._broken
        except IntegrityError as error:
            self._tell(error)
        return self.integrity_error

    async def _look_for_ever(self) -> None:
        num_calls = 0
        while True:
            await asyncio.sleep(self._settings.sweep_interval_s)
            now_s = self._clock()
            try:
                self._memory.store.lapse(now_s)
                self._notice_gone(now_s)
            except IntegrityError as error:
                self._tell(error)
                self._broken = str(error)
            self._memory.look_for_room()
            self._memory.touch_ahead()
            is_idle, num_calls = num_calls == self._num_calls, self._num_calls
            num_heard = num_calls + self._num_beats
            checked_heard, checked_s = self._checked_at
            due = now_s - checked_s >= self._settings.integrity_interval_s
            if is_idle and due and checked_heard != num_heard:
                self.check_integrity()
                self._checked_at = (num_heard, now_s)

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
