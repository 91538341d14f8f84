"""Outlet: the bytes of a worker's blocks, block by block, for whoever sends them on: views where
the blocks lie in host memory, copies through page-locked rows of its own where they lie on a
device.

The caller keeps the blocks in place. One asyncio loop; the device copies in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from kvstore.transport.base import BlockMemory
from kvstore.transport.device import PinnedStaging
from process.tasks import complete_despite_cancel


class Outlet:
    """See the module."""

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory
        self._staging: PinnedStaging | None = None
        self._turn = asyncio.Lock()
        if memory.device is not None:
            self._staging = PinnedStaging(
                memory.device, memory.address, memory.block_bytes, memory.num_blocks
            )

    async def blocks(self, block_ids: Sequence[int]) -> AsyncIterator[memoryview]:
        """The bytes of each block, in order; good until the next one is asked for.

        Raises: TransferFailed when the device failed.
        """
        if self._staging is None:
            for block_id in block_ids:
                yield self._memory.view[block_id].data
            return
        num_rows = self._staging.num_rows
        for start in range(0, len(block_ids), num_rows):
            batch = await self._fetch(self._staging, block_ids[start : start + num_rows])
            for block in batch:
                yield memoryview(block)

    async def close(self) -> None:
        """Nothing may be under way."""
        if self._staging is not None:
            await asyncio.to_thread(self._staging.close)

    async def _fetch(self, staging: PinnedStaging, block_ids: Sequence[int]) -> list[bytes]:
        """Copies: a reader that is slow must not keep the rows from others."""

        def fetch() -> list[bytes]:
            staging.fetch(block_ids)
            return [row.tobytes() for row in staging.rows[: len(block_ids)]]

        async with self._turn:
            fetching = asyncio.ensure_future(asyncio.to_thread(fetch))
            await complete_despite_cancel(fetching)  # the rows are in use until then
        return fetching.result()
