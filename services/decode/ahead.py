"""Ahead: copies the rest of a prompt from the prefill worker that lends it while it still computes,
before a handle names it, so that the bytes move while the handle is on its way.

Life: `follow` with what a partial handle names -> a question waits at the lender, one at a time
(kvstore/block_lender.py) -> all of the prompt is lent: `on_rest` is called -> `take` says
where it lies -> `keep` what was copied of it -> `confirm` with each handle: what that names just so
may be used -> `close`, from any state, ends the question and forgets the rest.

The lender's answer is not a handle: no block is used that no signed handle names with the same
frame, generation, checksum and lease. So the lender need not wait for checksums: unsealed blocks
are kept with the checksums of the bytes that came, which are compared with the handle's. A question
that fails costs nothing, since the handle suffices. It does not count as a failure if its lease has
ended (the prompt was given up) or if the lender cannot be reached (the copy of what the partial
handle names reports that). One request, the loop's thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.block_lender import LENDER_LIMITS
from kvstore.block_refs import PackedBlocks
from kvstore.client import KvStoreClient
from kvstore.errors import CHECKSUM, LeaseLapsed
from kvstore.node_ids import is_lender
from process.background_tasks import start_task
from process.deadline import Deadline
from process.errors import BatonError
from services.decode.leases import client_for, place_of
from services.decode.pulls import PullBatch
from services.worker import handle as handles
from services.worker.connector import reason_of
from services.worker.core import WorkerCore
from services.worker.provenance import FINGERPRINT

MAX_WAIT_S = LENDER_LIMITS.max_wait_s
"""Most seconds that one question waits at the lender; no lender waits longer."""

ANSWER_S = 1.0
"""Seconds for the answer of a lender whose wait is over. Guessed."""


@dataclass(frozen=True)
class Rest:
    """Location of a prompt's remaining blocks at their lender. num_unsealed: number of blocks at
    the end that have no checksum yet. held_until_s: time until which the lender keeps all of them
    (KvStoreClient.await_lent)."""

    run: handles.Run
    num_unsealed: int = 0
    held_until_s: float = 0.0

    def of(self, batch: PullBatch, first: int) -> PullBatch:
        """Return `batch`, whose blocks begin at the prompt's block `first`, with what is known here
        of its unsealed blocks."""
        num_left_out = self.run.first_block + len(self.run.blocks) - first - len(batch.items)
        num_unsealed = max(0, min(len(batch.items), self.num_unsealed - num_left_out))
        return dataclasses.replace(batch, num_unsealed=num_unsealed, held_until_s=self.held_until_s)


@dataclass(frozen=True)
class Copied:
    """Blocks that were copied to their places here, with the checksums that `run` names."""

    run: handles.Run

    @property
    def blocks(self) -> PackedBlocks:
        return PackedBlocks.of(self.run.blocks)

    @property
    def end(self) -> int:
        return self.run.first_block + len(self.run.blocks)

    def part(self, first: int, end: int) -> Copied:
        """Return the blocks [first, end), counted from the first block of `run`."""
        refs = self.run.blocks[first:end]
        run = dataclasses.replace(self.run, first_block=self.run.first_block + first, blocks=refs)
        return Copied(run)


class Ahead:
    """Early copy of one request's remaining blocks from their lender."""

    def __init__(
        self, core: WorkerCore, *, on_rest: Callable[[], None], on_failure: Callable[[str], None]
    ) -> None:
        """Create without a question. on_failure: called with the reason why a lender did not answer
        a question."""
        self._core = core
        self._on_rest = on_rest
        self._on_failure = on_failure
        self._asking: asyncio.Task[None] | None = None
        self._rest: Rest | None = None
        self._copied: Copied | None = None
        self._why_not = FINGERPRINT
        self._is_over = False

    @property
    def has_rest(self) -> bool:
        """Return whether `take` has a result."""
        return self._rest is not None

    def follow(self, run: handles.Run, num_wanted: int, deadline: Deadline) -> None:
        """Ask the lender for the blocks after a run from the prompt's first block on. Does nothing
        where the run is not a lender's, or all blocks are known.

        Args: num_wanted: number of blocks of the whole prompt, including an unfilled tail.
        """
        if self._is_over or not is_lender(run.node_id) or run.first_block != 0:
            return
        if len(run.blocks) >= num_wanted:
            return
        if self._asking is not None:
            self._asking.cancel()  # it knew less
        self._asking = start_task(self._ask(run, num_wanted, deadline), "asking ahead")

    def take(self) -> Rest | None:
        """Return where the remaining blocks are, once."""
        rest, self._rest = self._rest, None
        return rest

    def keep(self, copied: Copied) -> None:
        """Keep copied blocks, as the lender described them, until a handle confirms them."""
        self._why_not = FINGERPRINT
        self._copied = copied if copied.blocks else None

    def confirm(self, stretch: handles.Stretch) -> Copied | None:
        """Return the copied blocks that a handle names with the same contents; they are no longer
        kept here."""
        copied = self._copied
        if copied is None or place_of(copied.run) != place_of(stretch.run):
            return None
        first = copied.run.first_block
        if not stretch.first <= first < stretch.end:
            return None
        ours = copied.blocks
        named = PackedBlocks.of(stretch.blocks(first, copied.end))
        num_same = ours.num_same(named)
        if num_same == len(ours):
            self._copied = None
            return copied
        if num_same:
            self.keep(copied.part(num_same, len(copied.blocks)))
        if num_same < len(named):
            with_checksum = dataclasses.replace(ours[num_same], checksum=named[num_same].checksum)
            self._why_not = CHECKSUM if with_checksum == named[num_same] else FINGERPRINT
        return copied.part(0, num_same) if num_same else None

    def contradiction(self, num_named: int) -> str | None:
        """Return why copied blocks are left although a handle names `num_named` blocks and was
        confirmed: they have other bytes or belong to other blocks. They are dropped then."""
        if self._copied is None or self._copied.run.first_block >= num_named:
            return None
        self._copied = None
        return self._why_not

    def close(self) -> None:
        """Stop asking; copied blocks wait for their handle. Idempotent."""
        self._is_over = True
        self._rest = None
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self, run: handles.Run, num_wanted: int, deadline: Deadline) -> None:
        budget = deadline.sooner(self._core.limits.transfer_budget_s)
        try:
            client = await client_for(self._core, run, budget)
        except BatonError:
            return  # see the module
        rest = await self._await_rest(client, run, num_wanted, deadline)
        if rest is None:
            return
        self._is_over = True
        self._rest = rest
        self._on_rest()

    async def _await_rest(
        self, client: KvStoreClient, run: handles.Run, num_wanted: int, deadline: Deadline
    ) -> Rest | None:
        """Return the lent blocks after a run, once these are all; None: the lender did not say
        so."""
        for _ in range(1 + int(deadline.left_s() / MAX_WAIT_S)):
            left_s = deadline.left_s()
            wait_s = min(MAX_WAIT_S, left_s)
            try:
                update, held_until_s = await client.await_lent(
                    run.lease_id,
                    num_known=len(run.blocks),
                    num_wanted=num_wanted,
                    wait_s=wait_s,
                    deadline=deadline.sooner(MAX_WAIT_S + ANSWER_S),
                )
            except LeaseLapsed:
                return None
            except BatonError as error:
                # It waits as it was told to: to answer it had no more than what is behind that.
                had_s = min(ANSWER_S, left_s - wait_s)
                self._core.connector.suspect(client, error, had_s=had_s)
                self._on_failure(reason_of(error))
                return None
            if update.is_all:
                rest = dataclasses.replace(run, first_block=len(run.blocks), blocks=update.blocks)
                return Rest(rest, update.num_unsealed, held_until_s)
        return None
