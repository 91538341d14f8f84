"""LentPrompt: the blocks of one prompt in this worker's own cache, lent to the decode worker.

`hold` on the engine's thread, in the job that starts the request: from then on all blocks of the
prompt stay in place -> `add` as blocks are filled -> `lend` the added blocks, any number of times:
they can be read at once, and handles name them (`refs`) when their checksums are known ->
`hand_over`: the lease belongs to the handle; or `close`, which returns all blocks. After either,
blocks that were never lent are returned.

The next blocks and their contents' hashes are known before they are computed. `look_ahead` enters
them during the step that computes them, so that after the step they only have to be marked as
computed; if the engine then reports other blocks, no block of the prompt is lent any more.

The first failure ends the lending (`problem`) and its lease: the request then hands over through
the store. Used on the event loop's thread, except `hold`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from engine.outputs import FilledBlock
from kvstore.block_refs import Block, PackedBlocks
from kvstore.exported_blocks import ExportOffer
from process.background_tasks import start_task
from process.rpc_errors import BatonError
from services.worker.engine_port import WorkerEngine
from services.worker.engine_thread import EngineThread
from services.worker.handle_builder import LeasedBlocks
from services.worker.lender import WorkerLender
from services.worker.store_pool import reason_of
from services.worker.store_writer import TailSource

NOT_HELD = "not_held"
"""Problem of a filled block that is not the expected one, or holds other tokens."""

_TAIL_HASH = b""


class LentPrompt:
    """Lending of one prompt's blocks under one lease."""

    def __init__(
        self,
        lender: WorkerLender,
        thread: EngineThread,
        engine_id: str,
        *,
        num_blocks: int,
        block_size: int,
        chain_hashes: Sequence[bytes],
        num_ahead: int,
    ) -> None:
        """Create; `hold` keeps the blocks. num_blocks: blocks of the prompt, including an unfilled
        last one. chain_hashes: of its full blocks. num_ahead: most full blocks that a step
        fills."""
        self.lender = lender
        self.problem: str | None = None
        self.lease_id = ""
        self.tail: Block | None = None
        self._thread = thread
        self._engine_id = engine_id
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._chain_hashes = chain_hashes
        self._num_ahead = num_ahead
        self._held: list[int] = []
        self._lent: set[int] = set()
        self._filled: list[FilledBlock] = []
        self._num_entered = 0  # full blocks
        self._num_told = 0  # of `_filled`: they can be read
        self._num_unsealed = 0  # blocks, the tail included
        self._refs = PackedBlocks()
        self._turn = asyncio.Lock()
        self._lending: asyncio.Task[None] | None = None
        self._is_handed_over = False
        self._is_closed = False
        lender.open_prompts.add(self)

    def hold(self, engine: WorkerEngine) -> None:
        """Quarantine the prompt's blocks, on the engine's thread right after the request's start.
        Raises: the errors of LLMEngine.quarantine; no block is held then."""
        block_ids = engine.block_ids(self._engine_id)[: self._num_blocks]
        engine.quarantine(self._engine_id, block_ids)
        self._held.extend(block_ids)

    @property
    def num_filled(self) -> int:
        """Return the number of leading full blocks that are lent, or can be."""
        return len(self._filled) if self.problem is None else 0

    @property
    def filled(self) -> Sequence[FilledBlock]:
        """Return the leading full blocks that were added, lent or not."""
        return self._filled

    @property
    def refs(self) -> PackedBlocks:
        """Return the references of the lent full blocks, from the first on."""
        return self._refs

    @property
    def part(self) -> LeasedBlocks:
        """Return the lent blocks as a part of a handle."""
        return LeasedBlocks(self.lender, self.lease_id, self.refs)

    def add(self, blocks: Iterable[FilledBlock]) -> None:
        """Add filled blocks in the order of the prompt; other blocks are ignored."""
        for block in blocks:
            if block.index == len(self._filled):
                self._filled.append(block)

    def lend_later(self) -> asyncio.Task[None]:
        """Run `lend` in the background, one at a time; `close` ends it."""
        if self._lending is None or self._lending.done():
            self._lending = start_task(self.lend(), "lending")
        return self._lending

    async def lend(self, tail: TailSource | None = None) -> None:
        """Lend the added blocks, and then the unfilled last block. Readers that wait for them are
        notified before their checksums are computed. A failure is recorded in `problem`. The caller
        bounds the wait."""
        self._tell()
        if tail is not None:
            self._lend_tail(tail)
        async with self._turn:
            await self._seal()

    def look_ahead(self) -> None:
        """Enter the blocks that the next step fills, so that they can be lent as soon as it ends.
        Does nothing where it is too late or too early."""
        if self._held and not (self._is_handed_over or self._is_closed):
            self._enter(min(len(self._filled) + self._num_ahead, len(self._chain_hashes)))

    def _enter(self, end: int) -> None:
        """Enter full blocks up to `end` with the lender; they cannot be read yet."""
        first = self._num_entered
        if self.problem is not None or end <= first:
            return
        block_ids, size = self._held[first:end], self._block_size
        new = [
            ExportOffer(block_id, chain_hash, None, size)
            for block_id, chain_hash in zip(block_ids, self._chain_hashes[first:end], strict=True)
        ]
        try:
            self.lease_id = self.lender.enter(new, self.lease_id, is_computed=False)
        except BatonError as error:
            self._fail(reason_of(error))
            return
        self._num_entered = end
        self._lent.update(block_ids)

    def _tell(self) -> None:
        """Make the added blocks readable."""
        first, end = self._num_told, len(self._filled)
        if self.problem is not None or end == first:
            return
        block_ids = [block.block_id for block in self._filled[first:]]
        chain_hashes = [block.chain_hash for block in self._filled[first:]]
        expected = self._held[first:end], list(self._chain_hashes[first:end])
        if (block_ids, chain_hashes) != expected:
            self._fail(NOT_HELD)
            return
        self._enter(end)
        if self.problem is not None:
            return
        try:
            self.lender.computed(self.lease_id, block_ids)
        except BatonError as error:
            self._fail(reason_of(error))
            return
        self._num_told = end
        self._num_unsealed += len(block_ids)

    def _lend_tail(self, tail: TailSource) -> None:
        if self.problem is not None:
            return
        if tail.block_id not in self._held:
            self._fail(NOT_HELD)
            return
        offer = ExportOffer(tail.block_id, _TAIL_HASH, None, tail.num_tokens)
        try:
            self.lease_id = self.lender.enter([offer], self.lease_id)
        except BatonError as error:
            self._fail(reason_of(error))
            return
        self._num_unsealed += 1
        self._lent.add(tail.block_id)

    async def _seal(self) -> None:
        if self.problem is not None or not self._num_unsealed:
            return
        try:
            refs = await self.lender.seal(self.lease_id)
        except BatonError as error:
            self._fail(reason_of(error))
            return
        self._num_unsealed -= len(refs)
        if refs[-1].chain_hash == _TAIL_HASH:
            refs, self.tail = refs[:-1], refs[-1]
        self._refs += refs

    def _fail(self, problem: str) -> None:
        """Record a problem and end the lease, so that readers and waiting callers fail."""
        self.problem = problem
        self.release()

    def hand_over(self, ttl_s: float) -> bool:
        """Hand the lease over to the holder of the handle for `ttl_s` seconds. Returns: whether
        that worked; else `problem` says why not."""
        if self.problem is None:
            try:
                self.lender.hand_over(self.lease_id, ttl_s)
            except BatonError as error:
                self._fail(reason_of(error))
        self._is_handed_over = self.problem is None
        return self._is_handed_over

    def release(self) -> None:
        """End the lease, handed over or not. Idempotent."""
        if self.lease_id:
            self.lender.release(self.lease_id)

    def close(self, *, is_handed_over: bool) -> None:
        """End the request's part: return the blocks that no reader can read. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.lender.open_prompts.discard(self)
        if self._lending is not None:
            self._lending.cancel()  # it has lent, or does not
        if not is_handed_over:
            self.release()
        # On the engine's thread: the job that holds may be under way.
        self._thread.post(
            lambda engine: engine.unquarantine(
                block_id for block_id in self._held if block_id not in self._lent
            )
        )
