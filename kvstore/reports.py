"""What becomes of a reader's report that bytes were bad: the store looks for itself.

A report by itself drops nothing: a worker that is wrong, or worse, would empty the store. Knows
nothing of stubs. One asyncio loop; checksums are computed in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from kvstore import block_hash
from kvstore.block import Block
from kvstore.slab import Slab
from kvstore.store import Store
from process import logs

logger = logging.getLogger(__name__)


async def drop_bad(store: Store, slab: Slab, blocks: Sequence[Block]) -> int:
    """Recompute the checksums of those frames that still are what they say, and drop what is bad
    with all below.

    Returns: how many blocks went; 0 when somebody else dropped them meanwhile.
    """
    hold_id, _ = store.hold(blocks)
    try:
        expected = store.checksums_of(blocks)
        found = await asyncio.to_thread(_checksums, slab, blocks, expected)
        bad = [
            block for block, known, now in zip(blocks, expected, found, strict=True) if now != known
        ]
        num_dropped = store.drop(bad)
    finally:
        store.unhold(hold_id)
    if num_dropped:
        logs.event(
            logger,
            "blocks_damaged",
            level=logging.ERROR,
            frames=[block.frame for block in bad],
            num_dropped=num_dropped,
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
