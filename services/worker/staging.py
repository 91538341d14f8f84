"""Staging: one owner's staging rows, the lock that they and its account of them are under, and the
loop whose tasks move their bytes.

The engine's thread takes rows and tells the loop; tasks on the loop move bytes and give rows back.
Who has which rows is the owner's to know. Knows no store.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol

from kvstore.errors import Quarantine
from services.worker.staging_rows import StagingRows


class RowHolder(Protocol):
    """What rows were taken for; they change under the lock."""

    rows: tuple[int, ...]


class Staging:
    """See the module. Closed until `open`.

    Attributes:
        rows: called under `lock`.
    """

    def __init__(self, num_rows: int, row_bytes: int) -> None:
        self.rows = StagingRows(num_rows, row_bytes)
        self.lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """From here on the calling loop is told."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Nobody is told any more."""
        self._loop = None

    @property
    def is_open(self) -> bool:
        """Any thread."""
        return self._loop is not None

    def tell(self, callback: Callable[..., object], *arguments: object) -> bool:
        """Run it on the loop; any thread. Returns: False where there is none any more."""
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
        """By class, now; any thread."""
        with self.lock:
            free, quarantined = self.rows.num_free, self.rows.num_quarantined
            taken = self.rows.num_rows - free - quarantined
        return {"free": free, "taken": taken, "quarantined": quarantined}

    def give_back(self, holder: RowHolder) -> None:
        """Its rows, which are neither read nor written any more; under the lock."""
        rows, holder.rows = holder.rows, ()
        self.rows.give_back(rows)

    def quarantine(
        self, holder: RowHolder, quarantine: Quarantine, then: Callable[[], object]
    ) -> None:
        """Those of its rows that a transfer may still write into are out of use until it is over;
        `then` on the loop."""
        held = quarantine.block_ids
        with self.lock:
            self.rows.quarantine(held)
            holder.rows = tuple(row for row in holder.rows if row not in held)

        def settled(_: object) -> None:
            with self.lock:
                self.rows.settle(held)
            then()

        quarantine.settled.add_done_callback(settled)
