"""Quarantine: blocks that a transfer may still touch stay out of use until it is over
(engine/kv/block_pool.py), whatever becomes of the request that has them, or had. Decides nothing.
Engine thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Values

from engine.errors import WrongState
from engine.group import Group
from engine.holdings import Holdings
from engine.request import State
from engine.sequence import HOLE


def quarantine(group: Group, block_ids: tuple[int, ...], holdings: Holdings) -> None:
    """Blocks of one request (Engine.quarantine). Raises: WrongState for one that is not its own, or
    named twice; nothing was done."""
    is_reserved = group.state is State.RESERVED
    sequence = next(iter(group.samples.values()))
    first = sequence.num_local_tokens // holdings.block_size if is_reserved else 0
    own = {block_id: first + i for i, block_id in enumerate(sequence.block_ids[first:])}
    for sample in group.samples.values():
        if not is_reserved:
            own.update(dict.fromkeys(sample.block_ids, 0))
    for block_id, num_named in Counter(block_ids).items():
        if block_id == HOLE or block_id not in own or num_named > 1:
            name = group.request.request_id
            raise WrongState(f"block {block_id} is not {name}'s own, or was named twice")
    holdings.pool.hold(block_ids)
    if is_reserved:
        for block_id in block_ids:
            sequence.block_ids[own[block_id]] = HOLE
        holdings.pool.put_back(block_ids)


def quarantine_cached(
    chain_hashes: Values[bytes], first: int, holdings: Holdings
) -> tuple[int, ...]:
    """Hold the last block of a chain's longest cached prefix, which pins those before it, of
    whatever request. Returns: the ids of blocks [first, ..), in order; empty: nothing is held."""
    block_ids = holdings.tree.match(chain_hashes)[first:]
    last = block_ids[-1:]
    holdings.tree.share(last)
    holdings.pool.hold(last)
    holdings.pool.put_back(last)
    return block_ids
