"""WriteBehind: stores full blocks that no handle waits for, behind the requests that filled them.

Decode workers store the blocks of their answers, so that the next turn of a conversation finds
them. Prefill workers store the blocks of a prompt whose handle names their own cache, or that
needs no handle (an embedding, an answer of one token). No request's end waits for any of it.

Life of a chain (the full blocks of one sample, or of one prompt): `begin` -> `add` as its blocks
are filled -> stored in batches while the request runs -> `end`, or `end_after_reader` -> the rest,
at most `put_budget_s` later -> forgotten. `drop` ends it at once. The first failure ends it, and is
counted by its reason: another worker will compute what is missing.

Blocks are found by their chain hash in the engine's prefix cache and quarantined until a put has
read them. So it does not matter whether their request is live, preempted or over, and a block that
was evicted is not stored. The engine can be asked between two steps only, so a turn takes what one
step fills, of several chains, and puts it in several puts of at most `max_put_bytes`, one at a time
to each store. No more than that is held, each put for at most `put_budget_s`. A store that is slow
keeps the chains of no other store waiting.

Presence in the store stays closed under prefixes: a put names the block before its first. The chain
takes the blocks before `num_stored` to be in the store. Where they are not (evicted, or in another
store), the store refuses the put and the chain is put from its beginning (blocks that are present
cost nothing).

It has the lowest priority: requests' loads go first (`standing_back`), tokens never wait for it.
Nothing is read of a cache whose blocks are not whole: the prefix cache has full blocks only, of a
quantized cache frozen ones. A beam search's answers are not in it, so they are not stored.

Knows no request and no stub. Belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from engine.step_output import FilledBlock
from kvstore.client import KvStoreClient, PutResult
from kvstore.errors import DEADLINE, MISSING, STORE_UNAVAILABLE
from process import spans
from process.deadline import Deadline
from process.errors import BatonError, FailedPrecondition
from process.spans import Span
from services.worker.block_writer import BATCH_BYTES, NO_ROOM, ReleaseLater
from services.worker.config import WorkerLimits
from services.worker.connector import StoreConnector, reason_of
from services.worker.engine_port import WorkerEngine
from services.worker.engine_thread import EngineThread
from services.worker.provenance import Leg, WorkerCounts

BATCH_BLOCKS = 4
"""A running request's blocks are stored so many at a time: each put is three calls. Guessed."""

MAX_CHAINS = 1024
"""Chains that wait for their turn; more are given up."""

DROPPED = "dropped"
"""The problem of a chain that `drop` has ended; its blocks do not count as lost."""

MAX_RESTARTS = 2
"""How often a chain is put from its beginning: the store evicted what it follows."""


@dataclass(eq=False)
class WriteChain:
    """The full blocks of one sample, or of one prompt."""

    tenant: str
    hashes: list[bytes]
    """Of its full blocks so far, from block 0."""
    leg: Leg
    num_stored: int
    """Leading blocks that are in the store, or are taken to be."""
    num_reached: int
    """The most that `num_stored` ever was; blocks before it do not count as lost."""
    num_prompt_blocks: int = 0
    """Decode: full blocks of the prompt, which do not count as written."""
    client: KvStoreClient | None = None
    """Another node's store that the chain's beginning lies in; None: this node's."""
    release_later: ReleaseLater | None = None
    """Gives leases of `client` back."""
    num_bytes: int = 0
    """Written by now."""
    num_restarts: int = 0
    problem: str = ""
    ends_by: Deadline | None = None
    """Set when no further block will come."""
    span: Span = field(default_factory=spans.current_span)
    """Of the request."""

    @property
    def num_left(self) -> int:
        return len(self.hashes) - self.num_stored

    @property
    def is_due(self) -> bool:
        """A put would be worth its price."""
        if self.problem:
            return False
        return self.num_left >= (BATCH_BLOCKS if self.ends_by is None else 1)


@dataclass(eq=False)
class _Turn:
    """What of one chain is put in this turn."""

    chain: WriteChain
    first: int
    """The first block of it."""
    hashes: tuple[bytes, ...]
    """From block 0 to the last of it."""
    held: list[int] = field(default_factory=list)
    """Ids of the blocks from `first` that are quarantined; filled on the engine's thread."""
    num_over: int = 0
    """Of `held`, blocks whose put is over."""


class WriteBehind:
    """The chains of one worker, and what of them is being put."""

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
        max_put_bytes: int = BATCH_BYTES,
        max_chains: int = MAX_CHAINS,
    ) -> None:
        """
        Args:
            max_held_blocks: of one turn; what an engine step fills.
            on_room: called when blocks have been given back.
        """
        self._connector = connector
        self._thread = thread
        self._limits = limits
        self._counts = counts
        self._block_size = block_size
        self._max_held_blocks = max_held_blocks
        self._on_room = on_room
        self._max_put_bytes = max_put_bytes
        self._max_chains = max_chains
        # By the store that they go to, in the order of their turns.
        self._queues: dict[KvStoreClient | None, dict[WriteChain, None]] = {}
        self._tasks: dict[KvStoreClient | None, asyncio.Task[None]] = {}
        self._current: set[WriteChain] = set()
        self._deferred: dict[WriteChain, Callable[[], None]] = {}  # what ends each
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
        leg: Leg,
        *,
        num_stored: int,
        num_reached: int | None = None,
        num_prompt_blocks: int = 0,
        client: KvStoreClient | None = None,
        release_later: ReleaseLater | None = None,
    ) -> WriteChain:
        """A sample, or a prompt, begins to fill blocks.

        Args:
            hashes: of the leading full blocks that are there already.
            num_stored: those of them that are taken to be in the store, counted from the first.
            num_reached: leading blocks that do not count as lost; None: those that are stored.
            client, release_later: where the chain goes instead of to this node's store.
        """
        return WriteChain(
            tenant,
            list(hashes),
            leg,
            num_stored,
            num_stored if num_reached is None else num_reached,
            num_prompt_blocks,
            client,
            release_later,
        )

    def add(self, chain: WriteChain, blocks: Iterable[FilledBlock]) -> None:
        """Blocks were filled, in order."""
        for block in blocks:
            if block.index != len(chain.hashes):
                continue  # in the chain already, or after a block that was not added
            chain.hashes.append(block.chain_hash)
            if chain.problem:
                self._count_lost(chain, chain.problem, 1)
        self._put_in_line(chain)

    def end(self, chain: WriteChain) -> None:
        """No block comes any more. Idempotent."""
        if chain.ends_by is None:
            chain.ends_by = Deadline.after(self._limits.put_budget_s)
            self._put_in_line(chain)

    def end_after_reader(
        self,
        chain: WriteChain,
        last: Sequence[FilledBlock],
        when_read: Callable[[Callable[[], None]], None],
    ) -> None:
        """Add the last blocks and end the chain once their reader has them, at most `put_yield_s`
        from now: a put beside the copy would slow the reader's request down. `when_read` calls
        what it is given at that time."""

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
        """Put nothing more of it: its request failed, or hands over through the store."""
        chain.problem = chain.problem or DROPPED
        self._queues.get(chain.client, {}).pop(chain, None)

    @property
    def num_chains(self) -> int:
        """Chains that wait for their reader or for their turn, or are being put."""
        return len({*self._deferred, *itertools.chain(*self._queues.values()), *self._current})

    async def stop(self) -> None:
        """Store what has been added, for at most `put_budget_s`."""
        for end in list(self._deferred.values()):
            end()
        if self._tasks:
            await asyncio.wait(set(self._tasks.values()), timeout=self._limits.put_budget_s)

    @contextmanager
    def standing_back(self) -> Iterator[None]:
        """A request's load is under way."""
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
        if sum(map(len, self._queues.values())) >= self._max_chains:
            self._give_up(chain, NO_ROOM)
            return
        queue[chain] = None
        self._queues[to] = queue
        if to not in self._tasks or self._tasks[to].done():
            self._tasks[to] = self._connector.spawn(self._drain(to, queue))

    async def _drain(self, to: KvStoreClient | None, queue: dict[WriteChain, None]) -> None:
        while queue:
            await self._wait_for_quiet()
            turns = self._take(queue)
            self._current.update(turn.chain for turn in turns)
            try:
                await self._hold(turns)
                for turn in turns:
                    await self._store(turn)
            finally:
                self._current.difference_update(turn.chain for turn in turns)
                for turn in turns:
                    self._give_back(turn)
        del self._queues[to], self._tasks[to]

    def _take(self, queue: dict[WriteChain, None]) -> list[_Turn]:
        """Out of the queue, as much as may be held at once."""
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
        """Let loads go first, for a while: they might never end."""
        try:
            async with asyncio.timeout(self._limits.put_yield_s):
                await self._quiet.wait()
        except TimeoutError:
            return

    async def _hold(self, turns: Sequence[_Turn]) -> None:
        """Quarantine what the engine has of them."""

        def hold(engine: WorkerEngine) -> None:
            for turn in turns:
                turn.held.extend(engine.hold_cached(turn.hashes, turn.first))

        try:
            async with Deadline.after(self._limits.put_budget_s).timeout("holding blocks"):
                await self._thread.call(hold)
        except BatonError as error:  # the engine is gone, or in a very long step
            for turn in turns:
                self._give_up(turn.chain, reason_of(error))

    def _give_back(self, turn: _Turn, num_more: int | None = None) -> None:
        """The next `num_more` held blocks, or all; behind the hold, even where that has not run
        yet: it fills `held` on its own thread."""
        first = turn.num_over
        end = None if num_more is None else first + num_more
        turn.num_over = len(turn.held) if end is None else end
        self._thread.post(
            lambda engine: engine.unquarantine(tuple(turn.held[first:end])), self._on_room
        )

    async def _store(self, turn: _Turn) -> None:
        """Put the blocks of one chain that are held; then it waits for its next turn, if there is
        more of it."""
        chain, num_restarts = turn.chain, turn.chain.num_restarts
        while turn.num_over < len(turn.held) and not chain.problem:
            client = chain.client or self._connector.client
            if client is None or client.broken is not None:
                self._give_up(chain, STORE_UNAVAILABLE)
            elif chain.ends_by is not None and chain.ends_by.expired:
                self._give_up(chain, DEADLINE)
            elif not await self._put_next(client, turn):
                break
        has_moved = chain.num_stored > turn.first or chain.num_restarts > num_restarts
        if has_moved:
            self._put_in_line(chain)
        elif chain.ends_by is not None and not chain.problem:
            self._give_up(chain, MISSING)  # the engine has it no more

    async def _put_next(self, client: KvStoreClient, turn: _Turn) -> bool:
        """One put. Returns: whether the chain got further."""
        await self._wait_for_quiet()
        chain, first = turn.chain, turn.first + turn.num_over
        max_blocks = max(1, self._max_put_bytes // client.frame_bytes)
        block_ids = turn.held[turn.num_over : turn.num_over + max_blocks]
        hashes = turn.hashes[: first + len(block_ids)]
        try:
            result = await self._put(client, chain, hashes, first, block_ids)
        finally:
            self._give_back(turn, len(block_ids))
        if result is None:
            return False
        (chain.release_later or self._connector.release_later)(client, [result.lease_id])
        return self._book(chain, hashes[first:], len(block_ids), result, client.frame_bytes)

    async def _put(
        self,
        client: KvStoreClient,
        chain: WriteChain,
        hashes: tuple[bytes, ...],
        first: int,
        held: list[int],
    ) -> PutResult | None:
        """Returns: None when it came to nothing; the chain begins anew or has a problem."""
        puts_again = first > 0 and chain.num_restarts < MAX_RESTARTS
        deadline = Deadline.after(self._limits.put_budget_s)
        try:
            with chain.span.child("write_behind"):
                async with deadline.timeout("writing behind"):
                    return await client.put_blocks(
                        None,
                        hashes[first - 1] if first else b"",
                        list(zip(hashes[first:], held, strict=False)),
                        None,
                        self._limits.lease_ttl_s,
                        deadline,
                        num_tokens=self._block_size,
                        tenant=chain.tenant,
                        puts_again=puts_again,
                    )
        except FailedPrecondition:  # what it follows is not there (any more)
            if not puts_again:
                self._give_up(chain, MISSING)
            chain.num_restarts += 1
            chain.num_stored = 0
        except BatonError as error:
            self._connector.suspect(client, error)
            self._give_up(chain, reason_of(error))
        return None

    def _book(
        self,
        chain: WriteChain,
        asked: tuple[bytes, ...],
        num_held: int,
        result: PutResult,
        frame_bytes: int,
    ) -> bool:
        """Count what is stored now. Returns: whether the chain got further."""
        num_stored = 0
        for ref, chain_hash in zip(result.refs, asked, strict=False):
            if ref.chain_hash != chain_hash:  # fail closed: it names another block
                break
            num_stored += 1
        first, end = chain.num_stored, chain.num_stored + num_stored
        chain.num_stored = end
        chain.num_bytes += result.num_bytes
        # Of the blocks that are there now, those present before come first and cost no bytes.
        num_of_answer = max(0, end - max(first, chain.num_prompt_blocks))
        num_written = min(result.num_bytes // frame_bytes, num_of_answer)
        chain.num_reached = max(chain.num_reached, end)
        chain.leg.num_blocks_written_back += num_written
        self._counts.num_blocks_written_back += num_written
        if num_stored < min(num_held, len(asked)):
            self._give_up(chain, NO_ROOM)
        return num_stored > 0

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
