"""Corruption: what becomes of a reader's report that a block was bad. The store looks for itself.

A report by itself changes nothing: a worker that is wrong, or worse, would empty the store. Bytes
that do not have the checksum they were committed with are dropped, with all blocks below. A
generation word of the slab that is not the store's own count is written again: readers that map the
slab would refuse the block for ever. One asyncio loop; checksums are computed in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvstore import block_hash
from kvstore.block_store import BlockStore
from kvstore.blocks import Block
from kvstore.slab import Slab
from process import logs

logger = logging.getLogger(__name__)


async def mend(store: BlockStore, slab: Slab, blocks: Sequence[Block]) -> int:
    """Repair the generations and recompute the checksums of those frames that still are what they
    say, and drop what is bad with all below.

    Returns: how many blocks were dropped; 0 also when they were dropped before.
    """
    hold_id, is_held = store.hold(blocks)
    try:
        held = [block for block, holds in zip(blocks, is_held, strict=True) if holds]
        repaired = [each for each in held if int(slab.generations[each.frame]) != each.generation]
        for block in repaired:
            slab.publish(block.frame, block.generation)
        store.counters.num_damaged += len(repaired)
        expected = store.checksums_of(held)
        found = await asyncio.to_thread(_checksums, slab, held, expected)
        bad = [
            block for block, known, now in zip(held, expected, found, strict=True) if now != known
        ]
        num_dropped = store.drop(bad)
    finally:
        store.unhold(hold_id)
    if repaired or num_dropped:
        logs.event(
            logger,
            "blocks_damaged",
            level=logging.ERROR,
            frames=[block.frame for block in bad],
            num_dropped=num_dropped,
            generations_of_frames=[block.frame for block in repaired],
        )
    return num_dropped


def _checksums(
    slab: Slab, blocks: Sequence[Block], expected: Sequence[int | None]
) -> list[int | None]:
    """Of the frames' bytes as they are now; None where none is expected."""
    return [
        None if known is None else block_hash.checksum(slab.block(block.frame))
        for block, known in zip(blocks, expected, strict=True)
    ]
