"""StoreDraftPages: an engine's DraftPages over the KV store: pages of draft models' own KV, beside
the target's blocks, in frames of the same size, under keys of their own (kvstore/block_hash.py).

The engine's thread asks, tasks on the loop do. Nothing waits on the engine's thread: without free
rows of staging memory a page is refused. A page that is put lies in a row until the store has it or
its put has failed; one that is fetched until it is dropped. Puts have the lowest priority: they
take half of the rows at most, go one after another, and stand back a while for fetches. No lease
outlives its call: what is put may be evicted, what was fetched lies here.

The memory that the store's transports see is the rows alone, so this is an attachment of its own
beside the worker's, as the parking's is.

Conservation: the rows' law (services/worker/staging_rows.py), where the taken ones are exactly
those of fetches that were not dropped, or move still, and of puts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from engine.errors import IntegrityError
from engine.speculation.draft_pages import (
    FAILED,
    MISSING,
    NO_ROWS,
    STOPPED,
    Fetch,
    PageCounts,
    Pages,
    PagesRefused,
)
from kvstore import block_hash
from kvstore.client import KvStoreClient
from kvstore.errors import (
    DEADLINE,
    STORE_UNAVAILABLE,
    TransferCancelled,
    TransferTimeout,
)
from kvstore.transport.base import BlockMemory
from process.deadline import Deadline
from process.errors import BatonError, DeadlineExceeded, FailedPrecondition
from process.settings import SettingsError
from process.tasks import end_tasks, start_task
from services.worker.block_writer import NO_ROOM
from services.worker.config import WorkerLimits
from services.worker.connector import StoreConnector, reason_of
from services.worker.draft_page_moves import StoredFetch, StoredPut, usable
from services.worker.staging import Staging


class StoreDraftPages:
    """See the module. `put`, `get`, `drop` and `check_integrity` belong to the engine's thread, the
    rest to the loop's."""

    def __init__(
        self,
        page_bytes: int,
        max_bytes: int,
        limits: WorkerLimits,
        *,
        make_connector: Callable[[BlockMemory], StoreConnector],
    ) -> None:
        """
        Args:
            page_bytes: of a frame of the store.
            max_bytes: of this process' memory for pages on their way.
            make_connector: the way to the store, given the memory that it moves bytes of.
        Raises: SettingsError where `max_bytes` holds no page.
        """
        if max_bytes < page_bytes:
            raise SettingsError(
                f"speculation.draft_share_bytes: {max_bytes} hold no page of {page_bytes} bytes; "
                "raise it, or set it to 0"
            )
        self.page_bytes = page_bytes
        self.counts = PageCounts()
        self._limits = limits
        self.staging = Staging(max_bytes // page_bytes, page_bytes)
        self._rows = self.staging.rows
        self._max_put_pages = max(1, self._rows.num_rows // 2)
        self.connector = make_connector(self._rows.memory)
        self._fetches: set[StoredFetch] = set()
        self._leaving: set[StoredFetch] = set()
        self._puts: deque[StoredPut] = deque()
        self._num_put_rows = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._putting: asyncio.Task[None] | None = None
        self._num_moving = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    # ---- life, on the loop

    async def start(self, *, wait_s: float) -> bool:
        """Attach, waiting at most `wait_s`. Returns and raises as StoreConnector.start."""
        self.staging.open()
        return await self.connector.start(wait_s=wait_s)

    async def stop(self, *, timeout_s: float) -> None:
        """Refuse what comes, end what moves, let the store go."""
        self.staging.close()
        await end_tasks([*self._tasks, self._putting])
        self._lose_rest()
        await self.connector.stop(timeout_s=timeout_s)

    # ---- the engine's thread

    @property
    def max_get_pages(self) -> int:
        """See DraftPages."""
        return self._rows.num_rows

    @property
    def num_free_get_pages(self) -> int:
        """See DraftPages."""
        with self.staging.lock:
            return self._rows.num_free if self.staging.is_open else 0

    @property
    def num_free_put_pages(self) -> int:
        """See DraftPages."""
        num_free = self.num_free_get_pages
        with self.staging.lock:
            return min(num_free, self._max_put_pages - self._num_put_rows)

    def key(self, model_fingerprint: str, num_tokens: int, chain_hash: bytes) -> bytes:
        """See DraftPages; any thread."""
        return block_hash.draft_page(model_fingerprint, num_tokens, chain_hash)

    def put(
        self,
        keys: Sequence[bytes],
        parent: bytes,
        pages: Pages,
        num_tokens: int,
        *,
        owner: str = "",
    ) -> StoredPut:
        """See DraftPages; the owner is the tenant whose share of the store is charged."""
        if pages.shape != (len(keys), self.page_bytes):
            raise IntegrityError(f"{len(keys)} pages of {self.page_bytes} bytes, not {pages.shape}")
        with self.staging.lock:
            rows = None
            if self._num_put_rows + len(keys) <= self._max_put_pages:
                rows = self._take(len(keys))
            if rows is None:
                raise PagesRefused(NO_ROWS)
        self._rows.memory.view[list(rows)] = pages
        put = StoredPut(keys, parent, num_tokens, rows, owner)
        with self.staging.lock:
            self._num_put_rows += len(rows)
            self._puts.append(put)
        if not self.staging.tell(self._put_in_line):
            self._lose_rest()
        return put

    def get(self, keys: Sequence[bytes], num_tokens: int) -> StoredFetch:
        """See DraftPages."""
        with self.staging.lock:
            rows = self._take(min(len(keys), self._rows.num_free))
            if not rows:
                raise PagesRefused(NO_ROWS)
            fetch = StoredFetch(keys[: len(rows)], num_tokens, rows, self._rows.memory)
            self._fetches.add(fetch)
        if not self.staging.tell(self._begin, fetch):
            self._end(fetch)
        return fetch

    def drop(self, fetch: Fetch) -> None:
        """See DraftPages. Rows that a transfer still uses come free when it is over."""
        with self.staging.lock:
            if not isinstance(fetch, StoredFetch) or fetch not in self._fetches:
                return
            self._fetches.remove(fetch)
            fetch.is_dropped = True
            if fetch.is_done:
                self.staging.give_back(fetch)
            else:
                self._leaving.add(fetch)

    def check_integrity(self, fetches: Collection[Fetch]) -> None:
        """See DraftPages, and the module."""
        with self.staging.lock:
            if self._fetches != set(fetches):
                raise IntegrityError(
                    f"draft pages: {len(self._fetches)} fetches are kept, not {len(fetches)}"
                )
            of_puts = [row for put in self._puts for row in put.rows]
            if len(of_puts) != self._num_put_rows:
                raise IntegrityError(
                    f"draft pages: {len(of_puts)} rows of puts, {self._num_put_rows} by count"
                )
            moving = (*self._fetches, *self._leaving)
            self._rows.check_integrity([*of_puts, *(row for one in moving for row in one.rows)])

    def _take(self, num_rows: int) -> tuple[int, ...] | None:
        if not self.staging.is_open:
            raise PagesRefused(STOPPED)
        return self._rows.take(num_rows)

    # ---- both, under the lock or taking it

    def _end(self, fetch: StoredFetch, num_came: int = 0, reason: str = STOPPED) -> None:
        """The leading pages came, and nothing moves for it any more; said once.

        To be done is to be over: who sees the one, as the engine's thread may at any moment, can
        count on the rows that its `drop` frees.
        """
        seconds = time.monotonic() - fetch.began_s
        with self.staging.lock:
            if fetch.is_done:
                return
            self._leaving.discard(fetch)
            self.staging.give_back(fetch, 0 if fetch.is_dropped else num_came)
            if not fetch.is_dropped:
                self.counts.num_fetched += num_came
                if reason:
                    self.counts.add_not_fetched(reason, fetch.num_asked - num_came)
            fetch.reason, fetch.seconds = reason, seconds
            fetch.num_came = num_came  # last: from here on the engine's thread reads it

    def _settle(self, put: StoredPut, num_lost: int, reason: str) -> None:
        with self.staging.lock:
            if put not in self._puts:
                return
            self._puts.remove(put)
            self._num_put_rows -= len(put.rows)
            self.staging.give_back(put)
            if num_lost:
                put.is_lost = True
                self.counts.add_not_put(reason, num_lost)

    def _lose_rest(self, reason: str = STOPPED) -> None:
        """The way to the store is closed, or not to be trusted."""
        with self.staging.lock:
            left = list(self._puts)
        for put in left:
            self._settle(put, len(put.keys), reason)

    # ---- fetching, on the loop

    def _begin(self, fetch: StoredFetch) -> None:
        if not self.staging.is_open:
            self._end(fetch)
            return
        self._num_moving += 1
        self._quiet.clear()
        task = start_task(self._fetch(fetch), "draft pages")
        self._tasks.add(task)

        def over(_: object) -> None:
            self._tasks.discard(task)
            self._end(fetch)
            self._num_moving -= 1
            if not self._num_moving:
                self._quiet.set()

        task.add_done_callback(over)

    async def _fetch(self, fetch: StoredFetch) -> None:
        client = self.connector.client
        if client is None:
            self._end(fetch, 0, STORE_UNAVAILABLE)
            return
        try:
            num_came, reason = await self._get(fetch, client)
        except TransferCancelled as error:
            self.staging.quarantine(fetch, error.quarantine)
            raise
        except TransferTimeout as error:
            self.staging.quarantine(fetch, error.quarantine)
            self.connector.suspect(client, error)
            num_came, reason = 0, DEADLINE
        except BatonError as error:
            self.connector.suspect(client, error)
            num_came, reason = 0, reason_of(error)
        self._end(fetch, num_came, reason)

    async def _get(self, fetch: StoredFetch, client: KvStoreClient) -> tuple[int, str]:
        """Returns: how many of the leading pages came, and why no more."""
        deadline = Deadline.after(self._limits.transfer_budget_s)
        matched = await client.match(fetch.keys, ttl_s=self._limits.lease_ttl_s, deadline=deadline)
        try:
            found, reason = usable(matched.blocks, fetch)
            if not found:
                return 0, reason
            items = list(zip(found, fetch.rows, strict=False))
            result = await client.get_blocks(
                matched.lease_id, items, deadline, incarnation=client.incarnation
            )
        finally:
            self.connector.release_later(client, [matched.lease_id])
        if not result.failed:
            return len(found), reason
        first = min(result.failed)
        if result.failed[first] == DEADLINE:
            self.connector.suspect(client, DeadlineExceeded("a transfer"))
        return first, result.failed[first]

    # ---- putting, on the loop

    def _put_in_line(self) -> None:
        if not self.staging.is_open:
            self._lose_rest()
        elif self._putting is None or self._putting.done():
            self._putting = start_task(self._put_all(), "draft pages")

    async def _put_all(self) -> None:
        while self._puts:
            with contextlib.suppress(DeadlineExceeded):
                async with Deadline.after(self._limits.put_budget_s).timeout("fetches"):
                    await self._quiet.wait()
            put = self._puts[0]
            num_lost, reason = len(put.keys), STOPPED
            try:
                num_lost, reason = await self._store(put)
            except Exception:  # those behind it keep no rows until somebody puts again
                self._lose_rest(FAILED)
                raise  # whoever runs the task logs it
            finally:
                self._settle(put, num_lost, reason)

    async def _store(self, put: StoredPut) -> tuple[int, str]:
        """Returns: how many pages are not there, and why."""
        client, num_pages = self.connector.client, len(put.keys)
        if client is None:
            return num_pages, STORE_UNAVAILABLE
        try:
            result = await client.put_blocks(
                None,
                put.parent,
                list(zip(put.keys, put.rows, strict=True)),
                None,
                self._limits.lease_ttl_s,
                Deadline.after(self._limits.put_budget_s),
                num_tokens=put.num_tokens,
                tenant=put.tenant,
            )
        except FailedPrecondition:  # what it follows is not there (any more)
            return num_pages, MISSING
        except BatonError as error:
            self.connector.suspect(client, error)
            return num_pages, reason_of(error)
        self.connector.release_later(client, [result.lease_id])
        self.counts.num_put += result.num_bytes // client.frame_bytes
        num_there = 0
        for ref, key in zip(result.refs, put.keys, strict=False):
            if ref.chain_hash != key:  # fail closed: it names another block
                break
            num_there += 1
        return num_pages - num_there, NO_ROOM
