"""Staging: rows of host memory for blocks in transit, their lock, and the event loop whose tasks
move their bytes.

The engine's thread allocates rows and runs callbacks on the loop; tasks on the loop move bytes and
free rows. The owner records which rows belong to which transfer. Knows no store.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol

from kvstore.errors import Quarantine
from services.worker.staging_rows import StagingRows


class RowHolder(Protocol):
    """Owner of rows; its fields change under the lock."""

    rows: tuple[int, ...]


class Staging:
    """Staging rows shared by the engine's thread and the event loop. Closed until `open`.

    Attributes:
        rows: allocator of the rows; used under `lock`.
    """

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.rows = StagingRows(num_rows, row_bytes)
        self.lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Open the staging rows; callbacks run on the calling event loop from here on."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Close the staging rows; callbacks are refused from here on."""
        self._loop = None

    @property
    def is_open(self) -> bool:
        """Return whether staging is open; any thread."""
        return self._loop is not None

    def tell(self, callback: Callable[..., object], *arguments: object) -> bool:
        """Run a callback on the event loop; any thread. Returns: False when staging is closed."""
        loop = self._loop
        if loop is None:
            return False
        try:
            loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # closed
            return False
        return True

    @property
    def num_rows(self) -> dict[str, int]:
        """Return the number of rows by state; any thread."""
        with self.lock:
            free, quarantined = self.rows.num_free, self.rows.num_quarantined
            taken = self.rows.num_rows - free - quarantined
        return {"free": free, "taken": taken, "quarantined": quarantined}

    def give_back(self, holder: RowHolder) -> None:
        """Free the holder's rows, which are neither read nor written any more; called under the
        lock."""
        rows, holder.rows = holder.rows, ()
        self.rows.give_back(rows)

    def quarantine(
        self, holder: RowHolder, quarantine: Quarantine, then: Callable[[], object]
    ) -> None:
        """Quarantine those of the holder's rows that a transfer may still write into, until it is
        over, then run `then` on the loop."""
        held = quarantine.block_ids
        with self.lock:
            self.rows.quarantine(held)
            holder.rows = tuple(row for row in holder.rows if row not in held)

        def settled(_: object) -> None:
            with self.lock:
                self.rows.settle(held)
            then()

        quarantine.settled.add_done_callback(settled)
