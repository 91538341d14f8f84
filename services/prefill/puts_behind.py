"""PutsBehind: the store is written after the handle went out, where a request hands over its own
blocks.

Life of one: `follow` a writer whose request is over -> the blocks are read by whoever has the
handle, or `yield_s` is over, or there are no last puts -> they begin -> they end, or `put_budget_s`
is over, which cancels them -> its lease is given back, and the blocks that it read may go. What was
not stored then is counted, and computed again by somebody some day.

Invariant: blocks that a put reads are lent, by a hold of ours, until it is over. Belongs to the
loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from engine.step_output import FilledBlock
from kvstore.errors import DEADLINE, GENERATION
from process import logs
from process.tasks import end_tasks, start_task
from services.prefill.lent_prompt import LentPrompt
from services.worker.block_writer import BlockWriter

logger = logging.getLogger(__name__)


class PutsBehind:
    """See the module."""

    def __init__(self, put_budget_s: float, yield_s: float) -> None:
        """yield_s: the last puts wait no longer for the reader."""
        self._yield_s = yield_s
        self._put_budget_s = put_budget_s
        self._tasks: set[asyncio.Task[None]] = set()
        self.not_stored: Counter[str] = Counter()
        """Blocks that did not get into the store after all, by reason."""

    @property
    def num_writers(self) -> int:
        """Requests that are over and whose puts are not."""
        return len(self._tasks)

    def follow(
        self, writer: BlockWriter, lent: LentPrompt, last_filled: Sequence[FilledBlock]
    ) -> None:
        """See a writer to its end, whose prompt is lent and handed over. last_filled: what it is
        still to be given."""
        num_blocks, loans = len(lent.refs), lent.lender.loans
        left = tuple(lent.refs[writer.num_stored :])
        hold_id, is_held = loans.hold(left)
        if not all(is_held):  # given back already: their bytes may be another's soon
            loans.unhold(hold_id)
            self.not_stored[GENERATION] += len(left)
            writer.cancel()
            return
        is_read = asyncio.Event()
        if writer.problem is None and any(each.index >= writer.num_stored for each in last_filled):
            loans.when_over(lent.lease_id, is_read.set)
        else:  # no put begins that would be in the reader's way
            is_read.set()
        task = start_task(
            self._follow(writer, last_filled, num_blocks, is_read, lambda: loans.unhold(hold_id)),
            "put behind",
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Wait for those that there are now (each bounded)."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def stop(self) -> None:
        """Let them end, within the budget of a put."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self._put_budget_s)
        await end_tasks(set(self._tasks))

    async def _follow(
        self,
        writer: BlockWriter,
        last_filled: Sequence[FilledBlock],
        num_blocks: int,
        is_read: asyncio.Event,
        unhold: Callable[[], None],
    ) -> None:
        problem: str | None = DEADLINE
        try:
            async with asyncio.timeout(self._put_budget_s):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(self._yield_s, self._put_budget_s / 4)):
                        await is_read.wait()
                writer.add(last_filled)
                problem = (await writer.finish(None)).problem
        except TimeoutError:
            pass  # cancelled below
        finally:
            writer.cancel()  # gives its lease back, whatever it came to
            unhold()  # a cancelled put never commits
            num_lost = num_blocks - writer.num_stored
            if problem is not None and num_lost:
                self.not_stored[problem] += num_lost
                logs.event(
                    logger,
                    "not_stored_behind",
                    level=logging.WARNING,
                    num_blocks=num_lost,
                    why=problem,
                )
