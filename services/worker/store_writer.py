"""BlockWriter and WriteBehind: write full KV blocks from the engine's cache to the KV store. In the
store the presence of blocks stays closed under prefixes: a block is stored only after its parent.

BlockWriter: the write-through of one request, whose handle names the blocks. It puts the full
blocks, parent first, while the engine computes the next ones: `add` as blocks are filled ->
`finish` with the tail -> done; or `cancel` at any time. Blocks that come during a put go together
with the next one, at most BATCH_BYTES in one. The first block that cannot be stored ends it.
Invariant: `refs[i]` is the location of full block i of the prompt, pinned by `lease_id`, without
gaps from block 0. A source block must not change until its put is over; after `cancel` it may,
since a cancelled put never commits.

WriteBehind: stores full blocks that no handle names, in the background; no request waits for it.
Decode workers store the blocks of their answers, for the next turn of a conversation. Prefill
workers store a prompt whose handle names their own cache, or that needs no handle (an embedding, an
answer of one token).

A chain is the full blocks of one sample or prompt: `begin` -> `add` as its blocks are filled ->
stored in batches while the request runs -> `end`, or `end_after_reader` -> the rest, at most
`put_budget_s` later -> removed. `drop` or the first failure ends it at once; a failure is counted
by reason, and another worker computes the missing blocks.

- Blocks are found by chain hash in the engine's prefix cache and quarantined during their put. So
  the state of their request does not matter, and an evicted block is not stored. Answers of a beam
  search are not in the prefix cache, and so are not stored; of a quantized cache it has frozen
  blocks only.
- The engine can be asked only between two steps, so each turn takes the blocks that two steps fill,
  of several chains; the turn after a late one makes up for it.
- A put carries blocks of as many chains as possible, since its two calls cost the worker's
  interpreter more than the blocks: on 2 shared cores 1.3 ms, and 6 us a block. There is one put at
  a time to each store, so a slow store delays only its own chains. The size of a put follows from
  the duration of the last, at most `max_put_bytes`; its time is at most `put_budget_s`.
- A put names the block before its first. The chain assumes that the blocks before `num_stored` are
  in the store; if they are not (evicted, or in another store), the store refuses the put and the
  chain is put from its beginning. Blocks that are present cost nothing.
- It has the lowest priority: requests' loads go first (`standing_back`), tokens never wait for it,
  and a request that finds no free blocks gets the quarantined ones (`give_way`): their puts are
  cancelled, and their chains are put again while they are cached.

Used on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.outputs import FilledBlock
from kvstore.block_refs import Block, PackedBlocks
from kvstore.client import KvStoreClient, PutChain, PutResult
from kvstore.errors import DEADLINE, MISSING, STORE_UNAVAILABLE
from process import trace_spans
from process.background_tasks import end_tasks, start_task
from process.deadline import Deadline
from process.rpc_errors import BatonError, FailedPrecondition
from process.trace_spans import Span
from services.worker.config import WorkerLimits
from services.worker.engine_port import WorkerEngine
from services.worker.engine_thread import EngineThread
from services.worker.provenance import LegProvenance, WorkerCounts
from services.worker.store_pool import StoreConnector, reason_of

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


HELD_STEPS = 2
"""Number of full steps whose blocks may be held at once: one step's, and as many that a late turn
has left. Guessed."""

BATCH_BLOCKS = 4
"""Number of blocks of a running request that are stored together: each put costs two calls.
Guessed."""

MIN_PUT_BYTES = 64 * 1024 * 1024
"""Bytes of the first put to a store. Guessed: far above what a call costs."""

MAX_PUT_BYTES = 512 * 1024 * 1024
"""Most bytes of any put. Guessed: a step of 8 prompts of 1,024 tokens, which fills 1 GiB of a model
of 8 B parameters, takes two."""

PUT_SHARE = 0.05
"""Share of `put_budget_s`: a put that takes less is followed by one twice as large, one that takes
four times as long by one of half the size. Guessed."""

MAX_CHAINS = 1024
"""Most chains that wait for their turn; the others are given up."""

DROPPED = "dropped"
"""Problem of a chain that `drop` has ended; its blocks do not count as lost."""

MAX_RESTARTS = 2
"""Most times that a chain is put from its beginning after the store evicted what it follows."""


@dataclass(eq=False)
class WriteChain:
    """Full blocks of one sample or of one prompt that are to be stored."""

    tenant: str
    hashes: list[bytes]
    """Chain hashes of its full blocks so far, from block 0."""
    leg: LegProvenance
    num_stored: int
    """Number of leading blocks that are in the store, or are assumed to be."""
    num_reached: int
    """Highest value of `num_stored`; blocks before it do not count as lost."""
    num_prompt_blocks: int = 0
    """Number of full blocks of the prompt, which do not count as written; set by decode."""
    client: KvStoreClient | None = None
    """Client of another node's store that holds the chain's beginning; None: this node's store."""
    num_bytes: int = 0
    """Number of bytes written by now."""
    num_restarts: int = 0
    problem: str = ""
    ends_by: Deadline | None = None
    """Time by which the chain must be stored; set when no further block will come."""
    span: Span = field(default_factory=trace_spans.current_span)
    """Trace span of the request."""

    @property
    def num_left(self) -> int:
        return len(self.hashes) - self.num_stored

    @property
    def is_due(self) -> bool:
        """Return whether a put is worth its cost now."""
        if self.problem:
            return False
        return self.num_left >= (BATCH_BLOCKS if self.ends_by is None else 1)


@dataclass(eq=False)
class _Turn:
    """Blocks of one chain that are put in this turn."""

    chain: WriteChain
    first: int
    """Index of the first block of the turn."""
    hashes: tuple[bytes, ...]
    """Chain hashes from block 0 to the turn's last block."""
    held: list[int] = field(default_factory=list)
    """Ids of the blocks from `first`, quarantined until the turn ends; filled on the engine's
    thread."""
    num_over: int = 0
    """Number of held blocks whose put is over."""
    is_stuck: bool = False
    """Whether the last put stored none of the turn's blocks, so that the rest would lack its
    parent."""

    @property
    def num_left(self) -> int:
        """Return the number of held blocks that are still to be put."""
        return 0 if self.is_stuck or self.chain.problem else len(self.held) - self.num_over


class _Piece(NamedTuple):
    """Blocks of one turn that go into one put."""

    turn: _Turn
    hashes: tuple[bytes, ...]
    block_ids: list[int]
    put: PutChain


def _num_blocks(piece: _Piece) -> int:
    return len(piece.block_ids)


def next_put_bytes(num_bytes: int, share: float, *, is_whole: bool, least: int, most: int) -> int:
    """Return the number of bytes of the next put, after one of `num_bytes`.

    Args:
        share: share of `put_budget_s` that the put took; 1 for one that gave way.
        is_whole: whether the put carried as much as it could, and did not fail.
    """
    if share > 4 * PUT_SHARE:
        return max(least, num_bytes // 2)
    return min(most, num_bytes * 2) if is_whole and share < PUT_SHARE else num_bytes


class WriteBehind:
    """Background writer of the chains of one worker."""

    def __init__(
        self,
        connector: StoreConnector,
        thread: EngineThread,
        limits: WorkerLimits,
        counts: WorkerCounts,
        *,
        block_size: int,
        max_held_blocks: int,
        on_room: Callable[[], None],
        max_put_bytes: int = MAX_PUT_BYTES,
        max_chains: int = MAX_CHAINS,
    ) -> None:
        """Create a writer; nothing is stored before `begin`.

        Args:
            max_held_blocks: most blocks of one turn; more than an engine step fills.
            on_room: called when blocks have been freed.
        """
        self._connector = connector
        self._thread = thread
        self._limits = limits
        self._counts = counts
        self._block_size = block_size
        self._max_held_blocks = max_held_blocks
        self._on_room = on_room
        self._max_put_bytes = max_put_bytes
        self._put_bytes: dict[str, int] = {}  # of the next put, by the address of the store
        self._max_chains = max_chains
        # By the store that they go to, in the order of their turns.
        self._queues: dict[KvStoreClient | None, dict[WriteChain, None]] = {}
        self._tasks: dict[KvStoreClient | None, asyncio.Task[None]] = {}
        self._current: set[WriteChain] = set()
        self._deferred: dict[WriteChain, Callable[[], None]] = {}  # what ends each
        self._puts: set[asyncio.Task[list[PutResult]]] = set()
        self._num_asked_for = 0
        """How often a request has asked for what is held."""
        self._num_loads = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def has_store(self) -> bool:
        return bool(self._connector.address)

    # ---- what requests say

    def begin(
        self,
        tenant: str,
        hashes: Sequence[bytes],
        leg: LegProvenance,
        *,
        num_stored: int,
        num_reached: int | None = None,
        num_prompt_blocks: int = 0,
        client: KvStoreClient | None = None,
    ) -> WriteChain:
        """Begin a chain for a sample or a prompt that fills blocks.

        Args:
            hashes: chain hashes of the leading full blocks that are filled already.
            num_stored: those of them that are taken to be in the store, counted from the first.
            num_reached: leading blocks that do not count as lost; None: those that are stored.
            client: client of another store that the chain goes to, instead of this node's.
        """
        return WriteChain(
            tenant,
            list(hashes),
            leg,
            num_stored,
            num_stored if num_reached is None else num_reached,
            num_prompt_blocks,
            client,
        )

    def add(self, chain: WriteChain, blocks: Iterable[FilledBlock]) -> None:
        """Add filled blocks to a chain, in order."""
        for block in blocks:
            if block.index != len(chain.hashes):
                continue  # in the chain already, or after a block that was not added
            chain.hashes.append(block.chain_hash)
            if chain.problem:
                self._count_lost(chain, chain.problem, 1)
        self._put_in_line(chain)

    def end(self, chain: WriteChain) -> None:
        """End a chain: no further block will come. Idempotent."""
        if chain.ends_by is None:
            chain.ends_by = Deadline.after(self._limits.put_budget_s)
            self._put_in_line(chain)

    def end_after_reader(
        self,
        chain: WriteChain,
        last: Sequence[FilledBlock],
        when_read: Callable[[Callable[[], None]], None],
    ) -> None:
        """Add the last blocks and end the chain once their reader has copied them, at most
        `put_yield_s` seconds from now: a put beside the copy would slow the reader's request down.
        `when_read` runs its argument at that time."""

        def end() -> None:
            if self._deferred.pop(chain, None) is not None:
                timer.cancel()
                self.add(chain, last)
                self.end(chain)

        yield_s = min(self._limits.put_yield_s, self._limits.put_budget_s / 4)
        timer = asyncio.get_running_loop().call_later(yield_s, end)
        self._deferred[chain] = end
        when_read(end)

    def drop(self, chain: WriteChain) -> None:
        """Drop a chain, whose remaining blocks are not stored: its request failed, or hands over
        through the store."""
        chain.problem = chain.problem or DROPPED
        self._queues.get(chain.client, {}).pop(chain, None)

    @property
    def num_chains(self) -> int:
        """Return the number of chains that wait for their reader or their turn, or are being
        put."""
        return len({*self._deferred, *itertools.chain(*self._queues.values()), *self._current})

    async def stop(self) -> None:
        """Store what has been added, for at most `put_budget_s` seconds, then stop."""
        for end in list(self._deferred.values()):
            end()
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()), timeout=self._limits.put_budget_s)

    def give_way(self) -> None:
        """Free all held blocks, stored or not, because a request has found no free blocks."""
        self._num_asked_for += 1
        for put in self._puts:
            put.cancel()

    @contextmanager
    def standing_back(self) -> Iterator[None]:
        """Pause new puts while the body runs, in favour of a request's load."""
        self._num_loads += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._num_loads -= 1
            if self._num_loads == 0:
                self._quiet.set()

    # ---- one after another

    def _put_in_line(self, chain: WriteChain) -> None:
        to, queue = chain.client, self._queues.get(chain.client, {})
        if not chain.is_due or chain in queue:
            return
        num_waiting = sum(map(len, self._queues.values()))
        if num_waiting >= self._max_chains and chain not in self._current:
            self._give_up(chain, NO_ROOM)
            return
        queue[chain] = None
        self._queues[to] = queue
        if to not in self._tasks or self._tasks[to].done():
            self._tasks[to] = self._connector.spawn(self._drain(to, queue))

    async def _drain(self, to: KvStoreClient | None, queue: dict[WriteChain, None]) -> None:
        while queue:
            await self._wait_for_quiet()
            turns, num_asked_for = self._take(queue), self._num_asked_for
            self._current.update(turn.chain for turn in turns)
            try:
                await self._hold(turns)
                while any(turn.num_left for turn in turns) and num_asked_for == self._num_asked_for:
                    await self._put_next(to, turns, num_asked_for)
                self._go_on(turns)
            finally:
                self._current.difference_update(turn.chain for turn in turns)
                self._give_back(turns)
            if num_asked_for != self._num_asked_for:
                await asyncio.sleep(self._limits.put_yield_s)  # the request is served meanwhile
        del self._queues[to], self._tasks[to]

    def _take(self, queue: dict[WriteChain, None]) -> list[_Turn]:
        """Take chains off the queue, as many as may be held at once."""
        turns, room = [], self._max_held_blocks
        while queue and room > 0:
            chain = next(iter(queue))
            del queue[chain]
            if not chain.is_due:  # by now: it comes again with its next blocks, or its end
                continue
            first = chain.num_stored
            turns.append(_Turn(chain, first, tuple(chain.hashes[: first + room])))
            room -= len(turns[-1].hashes) - first
        return turns

    async def _wait_for_quiet(self) -> None:
        """Wait for loads in progress, for a limited time since they might never end."""
        try:
            async with asyncio.timeout(self._limits.put_yield_s):
                await self._quiet.wait()
        except TimeoutError:
            return

    async def _hold(self, turns: Sequence[_Turn]) -> None:
        """Quarantine those blocks of the turns that the engine still caches."""

        def hold(engine: WorkerEngine) -> None:
            for turn in turns:
                turn.held.extend(engine.hold_cached(turn.hashes, turn.first))

        try:
            async with Deadline.after(self._limits.put_budget_s).timeout("holding blocks"):
                await self._thread.call(hold)
        except BatonError as error:  # the engine is gone, or in a very long step
            for turn in turns:
                self._give_up(turn.chain, reason_of(error))

    def _give_back(self, turns: Sequence[_Turn]) -> None:
        """End the quarantines, after `_hold`, even where that has not run yet: it fills `held` on
        its own thread."""
        self._thread.post(
            lambda engine: engine.unquarantine([each for turn in turns for each in turn.held]),
            self._on_room,
        )

    async def _put_next(
        self, to: KvStoreClient | None, turns: Sequence[_Turn], num_asked_for: int
    ) -> None:
        """Put held blocks of the first turns once, unless a request has asked for blocks."""
        await self._wait_for_quiet()
        if num_asked_for != self._num_asked_for:
            return
        client = to or self._connector.client
        for turn in turns:
            ends_by = turn.chain.ends_by
            if turn.num_left and (client is None or client.broken is not None):
                self._give_up(turn.chain, STORE_UNAVAILABLE)
            elif turn.num_left and ends_by is not None and ends_by.expired:
                self._give_up(turn.chain, DEADLINE)
        if client is None:
            return
        first_bytes = min(MIN_PUT_BYTES, self._max_put_bytes)
        num_bytes = self._put_bytes.get(client.address, first_bytes)
        max_blocks = max(1, num_bytes // client.frame_bytes)
        pieces = self._cut(turns, max_blocks)
        if not pieces:
            return
        began_s = time.monotonic()
        putting = asyncio.create_task(self._put(client, pieces))
        self._puts.add(putting)
        try:
            await asyncio.wait([putting])
            puts = [] if putting.cancelled() else putting.result()
        finally:
            self._puts.discard(putting)
            await end_tasks([putting])
            for piece in pieces:
                piece.turn.num_over += len(piece.block_ids)
        is_whole = bool(puts) and sum(map(_num_blocks, pieces)) == max_blocks
        share = (time.monotonic() - began_s) / self._limits.put_budget_s
        self._put_bytes[client.address] = next_put_bytes(
            num_bytes,
            1.0 if putting.cancelled() else share,
            is_whole=is_whole,
            least=client.frame_bytes,
            most=self._max_put_bytes,
        )
        for piece, put in zip(pieces, puts, strict=False):
            self._book(piece, put, client.frame_bytes)

    def _cut(self, turns: Sequence[_Turn], max_blocks: int) -> list[_Piece]:
        """Return the next blocks of the first turns, at most `max_blocks`."""
        pieces = []
        for turn in turns:
            num_blocks = min(turn.num_left, max_blocks)
            if num_blocks == 0:
                continue
            max_blocks -= num_blocks
            chain, first = turn.chain, turn.first + turn.num_over
            block_ids = turn.held[turn.num_over : turn.num_over + num_blocks]
            hashes = turn.hashes[first : first + num_blocks]
            put = PutChain(
                turn.hashes[first - 1] if first else b"",
                list(zip(hashes, block_ids, strict=True)),
                self._block_size,
                tenant=chain.tenant,
                puts_again=first > 0 and chain.num_restarts < MAX_RESTARTS,
            )
            pieces.append(_Piece(turn, hashes, block_ids, put))
        return pieces

    async def _put(self, client: KvStoreClient, pieces: Sequence[_Piece]) -> list[PutResult]:
        """Put pieces into the store. Returns: one result for each piece; none when the put, and so
        every chain in it, failed."""
        deadline = Deadline.after(self._limits.put_budget_s)
        try:
            with ExitStack() as spans_of_requests:
                for piece in pieces:
                    chain = piece.turn.chain
                    spans_of_requests.enter_context(chain.span.child("write_behind"))
                async with deadline.timeout("writing behind"):
                    return await client.put_chains(
                        [piece.put for piece in pieces], self._limits.lease_ttl_s, deadline
                    )
        except FailedPrecondition:  # the store lost what one of them follows, since the Reserve
            return [PutResult("", PackedBlocks(), None, 0, 0, lacks_parent=True)] * len(pieces)
        except BatonError as error:
            self._connector.suspect(client, error)
            for piece in pieces:
                self._give_up(piece.turn.chain, reason_of(error))
            return []

    def _book(self, piece: _Piece, put: PutResult, frame_bytes: int) -> None:
        """Count a chain's blocks that are stored now."""
        turn, chain = piece.turn, piece.turn.chain
        if put.lacks_parent:
            turn.is_stuck = True
            if not piece.put.puts_again:
                self._give_up(chain, MISSING)
            chain.num_restarts += 1
            chain.num_stored = 0
            return
        num_stored = put.refs.num_matching(piece.hashes, self._block_size)
        first, end = chain.num_stored, chain.num_stored + num_stored
        chain.num_stored = end
        chain.num_bytes += put.num_bytes
        # Of the blocks that are there now, those present before come first and cost no bytes.
        num_of_answer = max(0, end - max(first, chain.num_prompt_blocks))
        num_written = min(put.num_bytes // frame_bytes, num_of_answer)
        chain.num_reached = max(chain.num_reached, end)
        chain.leg.num_blocks_written_back += num_written
        self._counts.num_blocks_written_back += num_written
        if num_stored < len(piece.hashes):
            self._give_up(chain, NO_ROOM)

    def _go_on(self, turns: Sequence[_Turn]) -> None:
        """Queue the chains of these turns again where they have more blocks."""
        for turn in turns:
            chain = turn.chain
            if turn.held:
                self._put_in_line(chain)
            elif chain.ends_by is not None and not chain.problem:
                self._give_up(chain, MISSING)  # the engine has it no more

    def _give_up(self, chain: WriteChain, reason: str) -> None:
        if chain.problem:
            return
        chain.problem = reason
        num_done = max(chain.num_reached, chain.num_prompt_blocks)
        self._count_lost(chain, reason, len(chain.hashes) - num_done)

    def _count_lost(self, chain: WriteChain, reason: str, num_blocks: int) -> None:
        if num_blocks > 0:
            chain.leg.not_stored[reason] += num_blocks
            self._counts.not_written_back[reason] += num_blocks
