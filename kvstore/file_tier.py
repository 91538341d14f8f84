"""FileTier: the disk tier of a store. Copies KV blocks from frames (slots in memory) to pages
(slots in a file) in the background, and back when a match asks for them.

Life: `open_pages` in a thread -> FileTier -> `start` -> demotes whenever fewer frames than the
watermark can be given away without loss, promotes what a match asks for -> `close`. A write that
fails (the disk is full, or broken) switches the tier off until the store restarts: `problem` has
the reason, blocks that lay in pages only leave the store, everything else goes on. A read that
fails costs its block and those below.

Bytes are checked both ways: a frame's before they are written, a page's after they were read. What
is moved, pinned and counted is FrameTable's.

Knows nothing of RPC. One asyncio loop; disk and checksums in `num_threads` threads of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvstore import block_hash
from kvstore.block_refs import StoredPage
from kvstore.block_store import BlockStore
from kvstore.frame_table import Demotion, PageWrite, Promotion
from kvstore.page_file import SUFFIX, PageFile, PageLayout
from kvstore.prefix_tree import TreeNode
from kvstore.slab import Slab
from process import logs
from process.background_tasks import complete_despite_cancel, end_tasks, start_task
from process.deadline import Deadline
from process.rpc_errors import FailedPrecondition, NoCapacity

logger = logging.getLogger(__name__)

BATCH = 32
"""Most blocks that are demoted together, or promoted together for one match."""
_CLOSE_S = 5.0


@dataclass(frozen=True)
class OpenedPages:
    """The outcome of opening a store's page file. pages: None when the tier cannot be used, for the
    reason `problem`."""

    pages: PageFile | None
    stored: Sequence[StoredPage] = ()
    num_torn: int = 0
    problem: str = ""


def open_pages(folder: Path, node_id: str, capacity_bytes: int, block_bytes: int) -> OpenedPages:
    """Open the page file of the store `node_id` for blocks of that size, and read its headers.
    Takes long for a large file: call it in a thread."""
    path = folder / f"{node_id}{SUFFIX}"
    try:
        pages = PageFile.open(path, PageLayout.fitting(capacity_bytes, block_bytes))
    except (OSError, NoCapacity, FailedPrecondition) as error:
        problem = str(error)
        logs.event(logger, "file_tier_off", level=logging.ERROR, why=problem)
        return OpenedPages(None, problem=problem)
    if pages.cleared:
        logs.event(
            logger, "file_tier_cleared", level=logging.WARNING, path=str(path), why=pages.cleared
        )
    try:
        stored, num_torn = pages.scan()
    except OSError as error:
        pages.close()
        logs.event(logger, "file_tier_off", level=logging.ERROR, why=str(error))
        return OpenedPages(None, problem=f"file_tier_dir: {path} cannot be read: {error}")
    return OpenedPages(pages, stored, num_torn)


class FileTier:
    """The task that demotes blocks of a store to its page file, and the promotions under way."""

    def __init__(
        self,
        store: BlockStore,
        slab: Slab,
        opened: PageFile,
        stored: Sequence[StoredPage],
        *,
        num_torn: int,
        num_threads: int,
        demote_below_free: float,
    ) -> None:
        """Args: opened: the page file, which the tier owns from here on. stored: the blocks found
        in it. num_torn: pages whose headers did not verify. demote_below_free: share of the
        frames that must be free or clean."""
        self.problem = ""
        self._store = store
        self._slab = slab
        self._pages = opened
        self._num_wanted = math.ceil(demote_below_free * store.frames.num_slots)
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="file-tier")
        self._serials = itertools.count(1 + max((each.serial for each in stored), default=0))
        self._promoting: dict[TreeNode, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._demoter: asyncio.Task[None] | None = None
        num_kept = store.table.open_pages(opened.layout.num_pages, stored)
        store.table.num_pages_bad += num_torn
        logs.event(
            logger,
            "file_tier",
            path=str(opened.path),
            num_pages=opened.layout.num_pages,
            num_blocks=num_kept,
            num_unusable=len(stored) - num_kept,
            num_torn=num_torn,
        )

    def start(self) -> None:
        """Start the task that demotes blocks."""
        self._demoter = start_task(self._demote_for_ever(), "file-tier")

    def kick(self) -> None:
        """Have the background task demote blocks if frames are short. Never waits."""
        if self._is_short():
            self._wake.set()

    async def promote(self, nodes: Sequence[TreeNode], deadline: Deadline) -> None:
        """Bring blocks that lie in pages only into frames, in order, as far as room, time and the
        pages allow. A promotion that is under way at the deadline goes on by itself."""
        absent = [node for node in nodes if node.block is None]
        for start in range(0, len(absent), BATCH):
            batch = absent[start : start + BATCH]
            tasks = [self._promotion_of(node) for node in batch if node.block is None]
            waiting = [task for task in tasks if task is not None]
            if waiting:
                await asyncio.wait(waiting, timeout=deadline.left_s())
            if any(node.block is None for node in batch):
                return

    async def close(self) -> None:
        """Stop demoting and promoting. Waits a bounded time for the disk."""
        self.problem = self.problem or "the store is stopping"
        await end_tasks([self._demoter])
        if self._promoting:
            await asyncio.wait(list(self._promoting.values()), timeout=_CLOSE_S)
        self._pool.shutdown(wait=False, cancel_futures=True)
        if not self._store.table.num_moving:
            self._pages.close()

    # -- demotion

    def _is_short(self) -> bool:
        return not self.problem and self._store.table.num_available < self._num_wanted

    async def _demote_for_ever(self) -> None:
        while not self.problem:
            await self._wake.wait()
            self._wake.clear()
            while self._is_short():
                demotion = self._store.table.begin_demotion(BATCH)
                if demotion is None:
                    break
                await self._demote(demotion)
        if self._promoting:
            await asyncio.wait(list(self._promoting.values()))
        num_lost = self._store.table.close_pages()
        logs.event(
            logger, "file_tier_off", level=logging.ERROR, why=self.problem, num_blocks=num_lost
        )

    async def _demote(self, demotion: Demotion) -> None:
        """Write its pages. Ends, even if cancelled, only when no thread writes any more."""
        loop = asyncio.get_running_loop()
        work = asyncio.gather(
            *(loop.run_in_executor(self._pool, self._write, write) for write in demotion.writes),
            return_exceptions=True,
        )
        try:
            await complete_despite_cancel(work)
        finally:
            if work.done():
                self._demoted(demotion, work.result())

    def _demoted(self, demotion: Demotion, results: Sequence[bool | BaseException]) -> None:
        self._store.table.end_demotion(demotion, [result is True for result in results])
        bad = [
            write.block
            for write, result in zip(demotion.writes, results, strict=True)
            if result is False
        ]
        if bad:
            num_dropped = self._store.drop(bad)
            logs.event(
                logger,
                "blocks_damaged",
                level=logging.ERROR,
                frames=[block.frame for block in bad],
                num_dropped=num_dropped,
            )
        for error in results:
            if isinstance(error, BaseException):
                self.problem = f"file_tier_dir: {self._pages.path} cannot be written: {error}"

    def _write(self, write: PageWrite) -> bool:
        """Write a block's bytes to its page, in a thread. Returns: False when the frame's bytes are
        bad. Raises: OSError."""
        node, block = write.node, write.block
        data = self._slab.block(block.frame)
        if block_hash.checksum(data) != block.checksum:
            return False
        page = StoredPage(
            index=write.index,
            chain_hash=node.chain_hash,
            parent=node.parent.chain_hash if node.parent is not None else b"",
            checksum=block.checksum,
            num_tokens=block.num_tokens,
            tenant=node.tenant,
            serial=next(self._serials),
        )
        self._pages.write(page, data)
        return True

    # -- promotion

    def _promotion_of(self, node: TreeNode) -> asyncio.Task[None] | None:
        """The one promotion of a node, which all matches share; None when there is no room."""
        task = self._promoting.get(node)
        if task is not None or self.problem or node.page is None:
            return task
        promotion = self._store.table.begin_promotion(node)
        if promotion is None:
            return None
        task = start_task(self._bring(promotion), "promotion")
        self._promoting[node] = task
        task.add_done_callback(lambda _: self._promoting.pop(node, None))
        return task

    async def _bring(self, promotion: Promotion) -> None:
        page = promotion.page
        into = self._slab.block(promotion.frame)
        work = asyncio.get_running_loop().run_in_executor(
            self._pool, self._pages.read, page.index, page.checksum, into
        )
        try:
            await complete_despite_cancel(work)
        finally:
            if work.done() and not work.cancelled():  # else the store is stopping
                is_good = work.exception() is None and work.result()
                num_dropped = self._store.table.end_promotion(promotion, is_good)
                if not is_good:
                    logs.event(
                        logger,
                        "page_damaged",
                        level=logging.ERROR,
                        page=page.index,
                        num_dropped=num_dropped,
                    )
        self.kick()
