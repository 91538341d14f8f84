"""BlockWriter: puts one request's full blocks into the KV store, parent first, while the engine
computes the next ones.

Life: `add` as blocks are filled (any number of times) -> `finish` with the tail -> done; or
`cancel` at any time. Blocks that come while a put is under way go together with the next, at most
BATCH_BYTES in one. The first that cannot be stored ends it: nothing behind a block that is not
there may be stored (presence is prefix-closed).

Invariant: `refs[i]` is where full block i of the prompt lies, pinned by `lease_id`; no gaps from
block 0. A source block must not change until its put is over; after `cancel` it may, because a
cancelled put never commits.

Belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.outputs import FilledBlock
from kvstore.block_refs import Block
from kvstore.client import KvStoreClient
from process import trace_spans
from process.background_tasks import start_task
from process.deadline import Deadline
from process.errors import BatonError
from services.worker.connector import StoreConnector, reason_of

NO_ROOM = "no_room"

RENEWALS_PER_TTL = 3
"""Renewals per lease time, of a lease held during a wait: two may fail before it expires."""

BATCH_BYTES = 64 * 1024 * 1024
"""Most bytes of one put, which bounds a batch's time. Guessed: far above what a call costs."""

ReleaseLater = Callable[[KvStoreClient, Iterable[str]], None]
"""Function that releases leases of a store in the background."""


@dataclass(frozen=True)
class TailSource:
    """The unfilled last block of a prompt: its private name in the store, its place in the cache,
    and its number of filled slots."""

    name: str
    block_id: int
    num_tokens: int


@dataclass(frozen=True)
class Written:
    """Location of a prompt's blocks in the store."""

    refs: tuple[Block, ...]
    tail: Block | None
    lease_id: str
    num_bytes: int
    problem: str | None
    """Reason why the store does not hold the whole prompt; empty if it does."""


class BlockWriter:
    """Writer of one request's full blocks to one store."""

    def __init__(
        self,
        connector: StoreConnector,
        client: KvStoreClient,
        *,
        lease_id: str,
        refs: Sequence[Block],
        block_size: int,
        ttl_s: float,
        put_budget_s: float,
        deadline: Deadline,
        tenant: str = "",
        on_stored: Callable[[], None] = lambda: None,
        release_later: ReleaseLater | None = None,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        """Create a writer; it puts nothing before `add`.

        Args:
            refs: leading blocks of the prompt that the store has already, pinned by `lease_id`
                (empty: none).
            tenant: tenant whose share of the store the blocks are charged to.
            on_stored: called whenever `refs` has grown.
            release_later: releases leases of `client`; None: the connector's function.
            batch_bytes: most bytes of one put, or one block.
        """
        self.client = client
        self.lease_id = lease_id
        self._connector = connector
        self._refs = list(refs)
        self._block_size = block_size
        self._ttl_s = ttl_s
        self._put_budget_s = put_budget_s
        self._deadline = deadline
        self._tenant = tenant
        self._on_stored = on_stored
        self._batch_bytes = batch_bytes
        self.release_later: ReleaseLater = release_later or connector.release_later
        self._pending: list[FilledBlock] = []
        self._next_index = len(self._refs)
        self._tail: TailSource | None = None
        self._tail_ref: Block | None = None
        self._num_bytes = 0
        self._problem: str | None = None
        self._finishing = False
        self._wake = asyncio.Event()
        self._span = trace_spans.current_span()  # it may outlive its request's answer
        self._task = start_task(self._write(), "block writer")

    @property
    def refs(self) -> tuple[Block, ...]:
        """Return the store references of the prompt's leading blocks that are stored by now."""
        return tuple(self._refs)

    @property
    def num_stored(self) -> int:
        """Return the length of `refs` without copying it."""
        return len(self._refs)

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes written by now."""
        return self._num_bytes

    @property
    def problem(self) -> str | None:
        """Return the reason why the writer has stopped; no further block is stored."""
        return self._problem

    def add(self, blocks: Iterable[FilledBlock]) -> None:
        """Add filled blocks in the order of the prompt; blocks that are stored already are
        skipped."""
        for block in blocks:
            if block.index == self._next_index:
                self._pending.append(block)
                self._next_index += 1
        self._wake.set()

    async def finish(self, tail: TailSource | None) -> Written:
        """Wait until every added block is stored, the tail last. Bounded by the deadline and the
        put budget."""
        self._tail = tail
        self._finishing = True
        self._wake.set()
        await asyncio.shield(self._task)
        return Written(
            tuple(self._refs), self._tail_ref, self.lease_id, self._num_bytes, self._problem
        )

    def cancel(self) -> None:
        """Cancel the puts and release the lease, so that nothing stays pinned. Idempotent."""
        if not self._task.done():
            self._task.cancel()
        self._connector.spawn(self._release_after_end())

    async def _release_after_end(self) -> None:
        await asyncio.gather(self._task, return_exceptions=True)
        self.release_later(self.client, [self.lease_id])

    async def _write(self) -> None:
        while self._problem is None:
            await self._wait()
            self._wake.clear()
            max_blocks = max(1, self._batch_bytes // self.client.frame_bytes)
            blocks, self._pending = self._pending[:max_blocks], self._pending[max_blocks:]
            if self._pending:
                self._wake.set()
            # As of now: it may change while the put is under way.
            is_last = self._finishing and not self._pending
            tail = self._tail if is_last else None
            if blocks or tail is not None:
                await self._put(blocks, tail)
            if is_last:
                return

    async def _wait(self) -> None:
        """Wait until there is work. A prompt that queues long in the engine keeps its lease
        meanwhile, so that the blocks that were found in the store stay there."""
        while self._problem is None:
            try:
                async with asyncio.timeout(self._ttl_s / RENEWALS_PER_TTL):
                    await self._wake.wait()
                return
            except TimeoutError:
                await self._renew()

    async def _renew(self) -> None:
        if not self.lease_id:
            return
        deadline = self._deadline.sooner(self._put_budget_s)
        had_s = deadline.left_s()
        try:
            await self.client.renew(self.lease_id, ttl_s=self._ttl_s, deadline=deadline)
        except BatonError as error:
            self._problem = reason_of(error)
            self._connector.suspect(self.client, error, had_s=had_s)

    async def _put(self, blocks: list[FilledBlock], tail: TailSource | None) -> None:
        deadline = self._deadline.sooner(self._put_budget_s)
        had_s = deadline.left_s()
        try:
            with self._span.child("put"):
                result = await self.client.put_blocks(
                    self.lease_id or None,
                    self._refs[-1].chain_hash if self._refs else b"",
                    [(block.chain_hash, block.block_id) for block in blocks],
                    (tail.name, tail.block_id, tail.num_tokens) if tail is not None else None,
                    self._ttl_s,
                    deadline,
                    num_tokens=self._block_size,
                    tenant=self._tenant,
                )
        except BatonError as error:
            self._problem = reason_of(error)
            self._connector.suspect(self.client, error, had_s=had_s)
            return
        self.lease_id = result.lease_id
        num_stored = 0
        self._num_bytes += result.num_bytes
        # Fail closed: a ref that does not name the block asked for is none.
        for block, ref in zip(blocks, result.refs, strict=False):
            if ref.chain_hash != block.chain_hash:
                break
            self._refs.append(ref)
            num_stored += 1
        if num_stored:
            self._on_stored()
        if num_stored < len(blocks):
            self._problem = NO_ROOM
        elif tail is not None and (result.tail is None or result.tail.chain_hash):
            self._problem = NO_ROOM
        else:
            self._tail_ref = result.tail
