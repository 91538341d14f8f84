"""The memory of one life of a store, and the file tier under it: made when the first worker tells
how large a block is.

Life: `make` in a thread -> `Memory` on the loop -> `touch_ahead` now and then -> `close`. The
mapping stays as long as the process lives: peers may hold its address.

Knows no workers. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from kvstore import huge_pages
from kvstore.block_store import BlockStore, StoreLimits
from kvstore.change_log import ChangeLog
from kvstore.config import KvStoreSettings
from kvstore.file_tier import FileTier, OpenedPages, open_pages
from kvstore.history import BlockHistory
from kvstore.slab import Slab, SlabLayout, default_capacity_bytes, free_bytes
from kvstore.tenancy import TenantShares
from process import host_memory, logs
from process.errors import NoCapacity
from process.tasks import end_tasks
from process.tracing import OFF, Tracing

logger = logging.getLogger(__name__)

TOUCH_AHEAD_BYTES = 64 * 1024 * 1024
"""Memory kept ready beyond the frames in use: a quarter of a second of writes at 256 MB/s."""
_LOCK_WAIT_S = 10.0
_LOCK_POLL_S = 0.02
_TOUCH_STEP_BYTES = 8 * 1024 * 1024


def make(
    settings: KvStoreSettings, node_id: str, incarnation: bytes, block_bytes: int
) -> tuple[Slab, OpenedPages]:
    """Take the memory, and open the file tier if one was asked for. For a thread: may take seconds.

    Raises: NoCapacity when the memory cannot be had; a file tier that cannot be had has a
        `problem`.
    """
    slab = _make_slab(settings, node_id, incarnation, block_bytes)
    if not settings.file_tier_dir:
        return slab, OpenedPages(None)
    folder = Path(settings.file_tier_dir)
    return slab, open_pages(folder, node_id, settings.file_tier_bytes, block_bytes)


def _make_slab(
    settings: KvStoreSettings, node_id: str, incarnation: bytes, block_bytes: int
) -> Slab:
    slab_dir = Path(settings.slab_dir)
    page_bytes = huge_pages.page_bytes_in(slab_dir)
    # What is free counts once the stores that start beside this one have their memory.
    with _locked(slab_dir):
        capacity_bytes = settings.capacity_bytes or default_capacity_bytes(
            block_bytes,
            free_memory_bytes=host_memory.available_bytes(),
            free_folder_bytes=free_bytes(slab_dir),
        )
        layout = SlabLayout.fitting(capacity_bytes, block_bytes, page_bytes)
        return Slab.create(slab_dir, node_id, incarnation, layout)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """No other store takes memory in this folder while the body runs. Where another store keeps
    the lock for _LOCK_WAIT_S, as one that was stopped does, the body runs without it, and the log
    says so."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise NoCapacity(f"slab_dir: {folder}: {error.strerror}") from error
    try:
        ends_s = time.monotonic() + _LOCK_WAIT_S
        while time.monotonic() < ends_s:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOCK_POLL_S)
            else:
                break
        else:
            logs.event(logger, "slab_dir_not_locked", level=logging.WARNING, path=str(folder))
        yield
    finally:
        os.close(fd)


class Memory:
    """The slab, its store and the file tier under it."""

    def __init__(
        self,
        settings: KvStoreSettings,
        slab: Slab,
        opened: OpenedPages,
        changes: ChangeLog | None,
        tracing: Tracing = OFF,
    ) -> None:
        """Takes over what `make` made; must be called on the loop."""
        shares = TenantShares.parse(settings.tenant_shares)
        self.slab = slab
        self.store = BlockStore(
            slab.layout.num_frames,
            slab.layout.frame_bytes,
            StoreLimits(settings.max_lease_s, settings.quarantine_grace_s, shares),
            published=slab.generations,
            changes=changes,
            history=BlockHistory(settings.max_history_blocks, tracing=tracing),
        )
        logs.event(
            logger,
            "slab",
            path=str(slab.path),
            num_frames=slab.layout.num_frames,
            frame_bytes=slab.layout.frame_bytes,
            num_bytes=slab.num_bytes,
            page_bytes=slab.page_bytes,
        )
        self.tier: FileTier | None = None
        self._tier_problem = opened.problem
        if opened.pages is not None:
            self.tier = FileTier(
                self.store,
                slab,
                opened.pages,
                opened.stored,
                num_torn=opened.num_torn,
                num_threads=settings.num_file_io_threads,
                demote_below_free=settings.demote_below_free,
            )
            self.tier.start()
        self.num_touched = 0
        """Frames whose memory is there."""
        self._toucher: asyncio.Task[None] | None = None
        self.touch_ahead()

    @property
    def file_tier_problem(self) -> str:
        """Why the file tier that was asked for is not used; empty: it is, or none was asked for."""
        return self.tier.problem if self.tier is not None else self._tier_problem

    def look_for_room(self) -> None:
        """Something was stored, or time went by: see whether older blocks should go to the file
        tier. Never waits."""
        if self.tier is not None:
            self.tier.kick()

    def touch_ahead(self) -> None:
        """Keep memory ready for the next frames: free ones are taken lowest first."""
        ahead = TOUCH_AHEAD_BYTES // self.slab.layout.stride_bytes
        goal = min(self.store.frames.num_slots, self.store.frames.num_ever_taken + ahead)
        is_busy = self._toucher is not None and not self._toucher.done()
        if goal > self.num_touched and not is_busy:
            self._toucher = asyncio.create_task(self._touch(goal))

    async def close(self) -> None:
        """End what moves, then take the slab's name away."""
        await end_tasks([self._toucher])
        if self.tier is not None:
            await self.tier.close()
        self.slab.unlink()
        self.slab.close()

    async def _touch(self, goal: int) -> None:
        step = max(1, _TOUCH_STEP_BYTES // self.slab.layout.stride_bytes)
        while self.num_touched < goal:
            end = min(goal, self.num_touched + step)
            await asyncio.to_thread(self.slab.touch, self.num_touched, end)
            self.num_touched = end
