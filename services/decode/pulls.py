"""A pull: blocks of one prompt from wherever they lie into their places here, run by run, up to the
first that does not come. Belongs to the loop's thread."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.block import Block
from kvstore.lending.told import NO_WORD, Word
from process.deadline import Deadline
from process.errors import BatonError
from services.decode.leases import client_for
from services.worker import handle as handles
from services.worker.connector import reason_of
from services.worker.core import WorkerCore
from services.worker.loaded import Loaded


@dataclass(frozen=True)
class Batch:
    """Blocks and the places for them, all under one lease of one life of a store: the run says
    which. word: what is known of them where no handle names them."""

    run: handles.Run
    items: list[tuple[Block, int]]
    word: Word = NO_WORD

    def came(self, loaded: Loaded) -> list[Block]:
        """The leading blocks that came; those that were not sealed with the checksums of the bytes
        that lie here now."""
        blocks = [block for block, _ in self.items[: loaded.num_usable]]
        for index in range(len(self.items) - self.word.num_unsealed, len(blocks)):
            blocks[index] = dataclasses.replace(blocks[index], checksum=loaded.checksums[index])
        return blocks


@dataclass
class Pulled:
    """What came of one pull: blocks by the node that they came from, in order; those asked for that
    did not come, by reason."""

    loaded: list[tuple[str, list[Block]]] = field(default_factory=list)
    not_usable: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(block.num_tokens for _, blocks in self.loaded for block in blocks)


async def pull(
    core: WorkerCore, engine_id: str, wanted: Sequence[Batch], deadline: Deadline
) -> Pulled:
    """Copy and verify, run by run; the first block that does not come ends it. What is not sealed
    is only copied."""
    pulled = Pulled()
    num_left = sum(len(batch.items) for batch in wanted)
    for batch in wanted:
        run, items = batch.run, batch.items
        reason = ""
        try:
            budget = deadline.sooner(core.limits.transfer_budget_s)
            client = await client_for(core, run, budget)
        except BatonError as error:
            reason = reason_of(error)
        else:
            begun_s = time.monotonic()
            loaded = await core.connector.load(
                client,
                engine_id,
                run.lease_id,
                items,
                deadline,
                incarnation=run.store_incarnation,
                word=batch.word,
            )
            if core.step_log is not None:
                core.step_log.transfer(begun_s, loaded.num_usable)
            pulled.loaded.append((run.node_id, batch.came(loaded)))
            pulled.num_bytes += loaded.num_bytes
            pulled.not_usable.update(loaded.not_usable)
            num_left -= loaded.num_usable
            if loaded.num_usable < len(items):
                reason = next(iter(loaded.not_usable))
        if reason:  # what lies behind it cannot be used without it
            num_more = num_left - pulled.not_usable.total()
            if num_more:
                pulled.not_usable[reason] += num_more
            break
    return pulled
