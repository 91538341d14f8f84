"""Pull: copies blocks of one prompt from stores and lenders into their places here, run by run, up
to the first that fails. Belongs to the loop's thread."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.block_refs import InTier, PackedBlocks, PackedItems
from process.deadline import Deadline
from process.errors import BatonError
from services.decode.leases import client_for
from services.worker import handle as handles
from services.worker.connector import reason_of
from services.worker.core import WorkerCore
from services.worker.loaded import Loaded


@dataclass(frozen=True)
class PullBatch:
    """Blocks and their places, all under one lease of one store incarnation, given by the run.
    num_unsealed, held_until_s: as in KvStoreClient.get_blocks."""

    run: handles.Run
    items: PackedItems
    num_unsealed: int = 0
    held_until_s: float = 0.0

    def came(self, loaded: Loaded) -> PackedBlocks:
        """Return the leading blocks that were loaded; unsealed ones with the checksums of the bytes
        that are here now."""
        blocks = self.items.blocks[: loaded.num_usable]
        first = len(self.items) - self.num_unsealed
        if first >= len(blocks):
            return blocks
        found = [loaded.checksums[index] for index in range(first, len(blocks))]
        return blocks.with_checksums(first, found)


@dataclass
class Pulled:
    """Result of one pull: loaded blocks by the node they came from, in order; missing ones by
    reason."""

    loaded: list[tuple[str, PackedBlocks]] = field(default_factory=list)
    not_usable: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Bytes by node that was read and transport."""

    @functools.cached_property
    def tiers(self) -> list[tuple[str, list[InTier]]]:
        """Return the number of blocks of each tier in `loaded`, computed once it is complete."""
        return [(node_id, blocks.tiers()) for node_id, blocks in self.loaded]

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for _, tiers in self.tiers for each in tiers)


async def pull(
    core: WorkerCore, engine_id: str, wanted: Sequence[PullBatch], deadline: Deadline
) -> Pulled:
    """Copy and verify blocks, run by run, up to the first that fails. Unsealed blocks are copied
    without verification."""
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
                num_unsealed=batch.num_unsealed,
                held_until_s=batch.held_until_s,
            )
            if core.step_log is not None:
                core.step_log.transfer(begun_s, loaded.num_usable)
            pulled.loaded.append((run.node_id, batch.came(loaded)))
            pulled.num_bytes[run.node_id, client.transport_name] += loaded.num_bytes
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
