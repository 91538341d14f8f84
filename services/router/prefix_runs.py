"""Where a prompt's prefix lies over all stores together, as runs: whose blocks a prefill worker
takes, in order and without gaps. Pure.

Presence is prefix-closed at every store, so two runs are always enough: what the worker's own store
holds, then the rest of what the store with the longest prefix holds. They are hints: each store
checks under its own lease. Knows no index, no RPC and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from protos import common_pb2
from services.router.views import StoreView

Layout = tuple[str, int]
"""Model fingerprint and block size: the same tokens have other blocks in another layout."""


@dataclass(frozen=True)
class Run:
    """Consecutive blocks of a prompt that one store holds, by the index."""

    node_id: str
    first_block: int
    num_blocks: int


@dataclass(frozen=True)
class Prefixes:
    """What the index knew of one prompt, and the very lives of the stores that were asked."""

    held: Mapping[Layout, Mapping[str, int]] = field(default_factory=dict)
    """Blocks of the prompt from its first on, by layout and store node."""
    stores: Mapping[str, StoreView] = field(default_factory=dict)
    """By node id."""
    chains: Mapping[Layout, Sequence[bytes]] = field(default_factory=dict)
    """The chain hashes of its full blocks, by layout."""

    def of(self, layout: Layout) -> Mapping[str, int]:
        """Blocks by store node; empty when nobody holds any."""
        return self.held.get(layout, {})


NO_PREFIXES = Prefixes()


def plan_runs(
    held: Mapping[str, int], home: str, distance: Callable[[str], float]
) -> tuple[Run, ...]:
    """The longest prefix over the union of all stores, for a worker whose own store is `home`.

    Args: held: blocks from the first on, by node. home: its node id; empty: the worker has no store
        and cannot fetch. distance: less is nearer; infinite: nothing is fetched from there.
    Returns: at most two runs, in order, without gaps, from block 0 on: home first, then the node
        with the longest prefix beyond it, the nearest of equals, by name where that is equal too.
    """
    if not home:
        return ()
    num_home = max(0, held.get(home, 0))
    runs = [Run(home, 0, num_home)] if num_home > 0 else []
    best: tuple[float, str] | None = None
    num_best = num_home
    for node_id, num_blocks in held.items():
        if node_id == home or num_blocks < num_best or num_blocks == num_home:
            continue
        away = distance(node_id)
        if not math.isinf(away) and (
            num_blocks > num_best or best is None or (away, node_id) < best
        ):
            best, num_best = (away, node_id), num_blocks
    if best is not None:
        runs.append(Run(best[1], num_home, num_best - num_home))
    return tuple(runs)


def to_hints(
    runs: Sequence[Run], stores: Mapping[str, StoreView]
) -> tuple[common_pb2.PrefixRun, ...]:
    """The runs as a prefill worker is told of them; `stores` are the lives that the index was asked
    about. A run whose store is not among them ends the list: hints have no gaps.
    """
    hints: list[common_pb2.PrefixRun] = []
    for run in runs:
        store = stores.get(run.node_id)
        if store is None:
            break
        hints.append(
            common_pb2.PrefixRun(
                node_id=run.node_id,
                store_address=store.address,
                store_incarnation=bytes.fromhex(store.incarnation),
                first_block=run.first_block,
                num_blocks=run.num_blocks,
            )
        )
    return tuple(hints)
