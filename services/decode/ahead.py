"""Ahead: the rest of a prompt that its prefill worker lends while it still computes: asked for at
the lender itself, and copied before any handle names it, so that the bytes move while the handle is
on its way.

Life: `follow` with what a partial handle names -> a question waits at the lender, one at a time
(kvstore/lending/followers.py) -> all of the prompt is lent: `on_rest` is called -> `take` says
where it lies -> `keep` what was copied of it -> `confirm` with each handle: what that names just so
may be used -> `close`, from any state, ends the question and forgets the rest.

The lender's word is nobody's promise: not a block is used that no signed handle names with the same
frame, generation, checksum and lease. A question that fails costs nothing: the handle is as good
without. One whose lease has ended did not fail: its prompt was given up. Nor is it told that there
is no way to the lender: who copies what the partial handle names finds that out. One request, the
loop's thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from kvstore.block import Block
from kvstore.client import StoreClient
from kvstore.errors import LeaseLapsed
from kvstore.lending import is_lender
from kvstore.lending.followers import MAX_WAIT_S
from kvstore.packed import PackedBlocks
from process.deadline import Deadline
from process.errors import BatonError
from process.tasks import start_task
from services.decode.leases import client_for, place_of
from services.worker import handle as handles
from services.worker.connector import reason_of
from services.worker.core import WorkerCore

ANSWER_S = 1.0
"""For the answer of a lender whose wait is over. Guessed."""


@dataclass(frozen=True)
class Copied:
    """Blocks that lie in their places here, verified as `run` names them."""

    run: handles.Run
    blocks: tuple[Block, ...]

    @property
    def end(self) -> int:
        return self.run.first_block + len(self.blocks)

    def part(self, first: int, end: int) -> Copied:
        """Those of [first, end), counted in this."""
        refs = self.run.blocks[first:end]
        run = dataclasses.replace(self.run, first_block=self.run.first_block + first, blocks=refs)
        return Copied(run, self.blocks[first:end])


class Ahead:
    """See the module."""

    def __init__(
        self, core: WorkerCore, *, on_rest: Callable[[], None], on_failure: Callable[[str], None]
    ) -> None:
        """on_failure: told why a lender did not answer a question."""
        self._core = core
        self._on_rest = on_rest
        self._on_failure = on_failure
        self._asking: asyncio.Task[None] | None = None
        self._rest: handles.Run | None = None
        self._copied: Copied | None = None
        self._is_over = False

    @property
    def has_rest(self) -> bool:
        """`take` has something."""
        return self._rest is not None

    def follow(self, run: handles.Run, num_wanted: int, deadline: Deadline) -> None:
        """Ask for what lies behind a run of blocks from the prompt's first on. Nothing happens
        where it is no lender's, or all is known.

        Args: num_wanted: blocks of the whole prompt, a tail included.
        """
        if self._is_over or not is_lender(run.node_id) or run.first_block != 0:
            return
        if len(run.blocks) >= num_wanted:
            return
        if self._asking is not None:
            self._asking.cancel()  # it knew less
        self._asking = start_task(self._ask(run, num_wanted, deadline), "asking ahead")

    def take(self) -> handles.Run | None:
        """Where the rest lies by the lender's word, once."""
        rest, self._rest = self._rest, None
        return rest

    def keep(self, copied: Copied) -> None:
        """That much of it was copied, and is what the lender's word says."""
        self._copied = copied if copied.blocks else None

    def confirm(self, stretch: handles.Stretch) -> Copied | None:
        """What was copied and a handle names, as far as both say the same; it is not kept any
        more."""
        copied = self._copied
        if copied is None or place_of(copied.run) != place_of(stretch.run):
            return None
        first = copied.run.first_block
        if not stretch.first <= first < stretch.end:
            return None
        ours = PackedBlocks.of(copied.run.blocks)
        num_same = ours.num_same(PackedBlocks.of(stretch.blocks(first, copied.end)))
        if not num_same:
            return None
        self.keep(copied.part(num_same, len(copied.blocks)))
        return copied.part(0, num_same)

    def contradicts(self, num_named: int) -> bool:
        """Whether something is still kept although a handle names so many blocks, and that was
        confirmed. It is forgotten then."""
        if self._copied is None or self._copied.run.first_block >= num_named:
            return False
        self._copied = None
        return True

    def close(self) -> None:
        """Ask no more; what was copied waits for its handle. Idempotent."""
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
        blocks = await self._await_rest(client, run, num_wanted, deadline)
        if blocks is None:
            return
        self._is_over = True
        self._rest = dataclasses.replace(run, first_block=len(run.blocks), blocks=blocks)
        self._on_rest()

    async def _await_rest(
        self, client: StoreClient, run: handles.Run, num_wanted: int, deadline: Deadline
    ) -> PackedBlocks | None:
        """What is lent behind a run, once that is all; None: nobody said so."""
        if not client.tells_when_lent:
            return None
        for _ in range(1 + int(deadline.left_s() / MAX_WAIT_S)):
            left_s = deadline.left_s()
            wait_s = min(MAX_WAIT_S, left_s)
            try:
                blocks, is_all = await client.await_lent(
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
            if is_all:
                return blocks
        return None
