"""LentPrompt: one prompt's blocks in this worker's own cache, lent to whoever decodes it.

Life: `hold` on the engine's thread, in the job that starts the request: all blocks of the prompt
stay in place from then on -> `add` as they are filled -> `lend` what was added, any number of
times -> `hand_over`: the lease is the handle's; or `close`, which gives all back. After either,
blocks that were never lent are given back.

The first trouble ends it (`problem`): the request then hands over through the store. Belongs to the
loop's thread but for `hold`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from engine.step_output import FilledBlock
from kvstore.block import Block
from kvstore.packed import PackedBlocks
from process.errors import BatonError
from process.tasks import start_task
from services.worker.block_writer import TailSource
from services.worker.connector import reason_of
from services.worker.engine_port import WorkerEngine
from services.worker.engine_thread import EngineThread
from services.worker.lender import WorkerLender
from services.worker.parts import Part

NOT_HELD = "not_held"
"""A block that was filled is none of those that the request began with."""


class LentPrompt:
    """See the module."""

    def __init__(
        self,
        lender: WorkerLender,
        thread: EngineThread,
        engine_id: str,
        *,
        num_blocks: int,
        block_size: int,
    ) -> None:
        """num_blocks: of the prompt, an unfilled last one included."""
        self.lender = lender
        self.problem: str | None = None
        self.lease_id = ""
        self.tail: Block | None = None
        self._thread = thread
        self._engine_id = engine_id
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._held: list[int] = []
        self._lent: set[int] = set()
        self._filled: list[FilledBlock] = []
        self._refs = PackedBlocks()
        self._turn = asyncio.Lock()
        self._lending: asyncio.Task[None] | None = None
        self._is_closed = False
        lender.open_prompts.add(self)

    def hold(self, engine: WorkerEngine) -> None:
        """On the engine's thread, right after the request's start. Raises: what
        Engine.quarantine raises; nothing is held then."""
        block_ids = engine.block_ids(self._engine_id)[: self._num_blocks]
        engine.quarantine(self._engine_id, block_ids)
        self._held.extend(block_ids)

    @property
    def num_filled(self) -> int:
        """Leading full blocks that are lent, or can be."""
        return len(self._filled) if self.problem is None else 0

    @property
    def refs(self) -> PackedBlocks:
        """Full blocks from the first on, as they are lent."""
        return self._refs

    @property
    def part(self) -> Part:
        """For a handle."""
        return Part(self.lender, self.lease_id, self.refs)

    def add(self, blocks: Iterable[FilledBlock]) -> None:
        """Blocks that are filled, in the order of the prompt; others are passed over."""
        for block in blocks:
            if block.index == len(self._filled):
                self._filled.append(block)

    def lend_later(self) -> asyncio.Task[None]:
        """`lend` in the background, once at a time; `close` ends it."""
        if self._lending is None or self._lending.done():
            self._lending = start_task(self.lend(), "lending")
        return self._lending

    async def lend(self, tail: TailSource | None = None) -> None:
        """Lend what was added, and then the unfilled last block. What keeps it from that is
        `problem`. Bounded by the caller."""
        async with self._turn:
            await self._lend(tail)

    async def _lend(self, tail: TailSource | None) -> None:
        new = [
            (block.block_id, block.chain_hash, self._block_size)
            for block in self._filled[len(self._refs) :]
        ]
        num_full = len(new)
        if tail is not None:
            new.append((tail.block_id, b"", tail.num_tokens))
        block_ids = {block_id for block_id, _, _ in new}
        if self.problem is not None or not new:
            return
        if not block_ids.issubset(self._held):
            self.problem = NOT_HELD
            return
        try:
            self.lease_id, refs = await self.lender.lend(new, self.lease_id)
        except BatonError as error:
            self.problem = reason_of(error)
            return
        self._lent |= block_ids
        self._refs += PackedBlocks.of(refs[:num_full])
        self.tail = refs[-1] if tail is not None else None

    def hand_over(self, ttl_s: float) -> bool:
        """What is lent belongs to whoever gets the handle now, for `ttl_s`. Returns: whether it
        does; else see `problem`."""
        if self.problem is None:
            try:
                self.lender.hand_over(self.lease_id, ttl_s)
            except BatonError as error:
                self.problem = reason_of(error)
        return self.problem is None

    def release(self) -> None:
        """End the lease, handed over or not. Idempotent."""
        if self.lease_id:
            self.lender.release(self.lease_id)

    def close(self, *, is_handed_over: bool) -> None:
        """The request is over: give back what nobody can read. Idempotent."""
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
