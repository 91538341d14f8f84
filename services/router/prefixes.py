"""`PrefixLookup` and `PrefixAffinity`: where a prompt's prefix has KV blocks, in stores and in the
workers' own caches.

- `PrefixLookup` asks the index in Redis how many leading blocks of a prompt each store holds: one
  round trip a prompt, for all stores and layouts. Hashes are keyed by the tenant's salt, so no
  tenant finds another tenant's blocks. When Redis is slow or away, there are no hits, the request
  goes on, and `problem` says so in the cluster status.
- `plan_runs` picks the stores that a prefill worker fetches from. Presence is prefix-closed at
  every store, so two runs are enough: what the worker's own store holds, then the rest of what the
  store with the longest prefix holds.
- `PrefixAffinity` remembers which workers this router had compute or decode which prompt, so that
  the next turn of a conversation can go to the same worker. It is keyed by chain hash, which binds
  the tenant, the model and all tokens before. An entry ends when the worker was sent so many blocks
  since that its cache must have turned over, or when `max_entries` others were noted later.

All results are hints: stores check under their own leases, and workers report what they have. One
asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

import numpy as np

from kvstore import block_hash
from kvstore.block_hash import HashTurns
from process import logs
from process.rpc_errors import BatonError, Internal
from protos import common_pb2
from services.router.worker_views import StoreView

Layout = tuple[str, int]
"""Model fingerprint and block size in tokens; equal tokens have other blocks in each layout."""


@dataclass(frozen=True)
class StoreRun:
    """Consecutive blocks of a prompt that one store holds, by the index. A value."""

    node_id: str
    first_block: int
    num_blocks: int


@dataclass(frozen=True)
class FoundPrefixes:
    """Result of a prefix lookup for one prompt, with the stores that were asked. A value."""

    held: Mapping[Layout, Mapping[str, int]] = field(default_factory=dict)
    """Number of leading blocks of the prompt that are held, by layout and store node id."""
    stores: Mapping[str, StoreView] = field(default_factory=dict)
    """Stores that the index was asked about, by node id."""
    chains: Mapping[Layout, Sequence[bytes]] = field(default_factory=dict)
    """Chain hashes of the prompt's full blocks, by layout."""

    def of(self, layout: Layout) -> Mapping[str, int]:
        """Return the number of leading blocks by store node id; empty when no store holds any."""
        return self.held.get(layout, {})


NO_PREFIXES = FoundPrefixes()


def plan_runs(
    held: Mapping[str, int], home: str, distance: Callable[[str], float]
) -> tuple[StoreRun, ...]:
    """Return the runs that cover the longest prefix, for a worker with the own store `home`.

    Args: held: number of leading blocks by node id. home: node id of the worker's store; empty: the
        worker has none and cannot fetch. distance: of a node; infinite: nothing is fetched there.
    Returns: at most two runs from block 0 on, without gaps: home first, then the node with the
        longest prefix beyond it. Of equal nodes the nearest, then the first by id.
    """
    if not home:
        return ()
    num_home = max(0, held.get(home, 0))
    runs = [StoreRun(home, 0, num_home)] if num_home > 0 else []
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
        runs.append(StoreRun(best[1], num_home, num_best - num_home))
    return tuple(runs)


def to_hints(
    runs: Sequence[StoreRun], stores: Mapping[str, StoreView]
) -> tuple[common_pb2.PrefixRun, ...]:
    """Return the runs as messages to a prefill worker.

    Args: stores: those that the index was asked about, by node id. A run of another store
        ends the list: hints have no gaps.
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


logger = logging.getLogger(__name__)


class PrefixIndexReader(Protocol):
    """Interface of the prefix index; `kvstore.index.PrefixIndex` in production."""

    async def lookup_all(
        self, chains: Sequence[Sequence[bytes]], nodes: Mapping[str, str]
    ) -> Sequence[Mapping[str, int]]:
        """Return, for each chain of hashes, the number of leading ones that each node holds.

        Args: nodes: incarnation (hex) by node id.
        Raises: Unavailable when Redis does not answer.
        """
        ...


class PrefixLookup:
    """Lookup of a prompt's prefix in the index, with a bounded time for the answer."""

    def __init__(
        self,
        index: PrefixIndexReader,
        stores: Callable[[], Collection[StoreView]],
        *,
        timeout_s: float,
    ) -> None:
        """Args: stores: returns the stores alive now. timeout_s: for the index's answer."""
        self._index = index
        self._stores = stores
        self._timeout_s = timeout_s
        self._hashing = HashTurns()
        self.problem: str | None = None
        """Why the latest lookup failed; None when it worked."""

    async def find(
        self,
        token_ids: Sequence[int],
        tenant_salt: bytes,
        layouts: Iterable[Layout],
        adapter_digest: str = "",
        *,
        drawn: Sequence[int] = (),
    ) -> FoundPrefixes:
        """Return the blocks that stores hold of a prompt, for each layout with this adapter.

        Never raises for a failing index: it then returns the chains without hits.

        Args:
            drawn: generated tokens after the prompt, where a request continues at other workers.
        """
        asked = sorted(layouts)
        if not self._stores() or not asked:
            return NO_PREFIXES
        column = np.asarray(token_ids, dtype=np.uint32)
        if drawn:
            column = np.concatenate([column, np.asarray(drawn, dtype=np.uint32)])
        chains: dict[Layout, Sequence[bytes]] = {}
        for fingerprint, block_size in asked:
            root = block_hash.root_key(tenant_salt, fingerprint, adapter_digest)
            # Not in a thread: it would hold the interpreter, and so the loop, for longer.
            chains[fingerprint, block_size] = await self._hashing.chain(
                root, cast("Sequence[int]", column), block_size
            )
        stores = {store.node_id: store for store in self._stores()}  # of now: hashing takes turns
        if not stores:
            return FoundPrefixes(chains=chains)
        try:
            async with asyncio.timeout(self._timeout_s):
                lives = {node_id: store.incarnation for node_id, store in stores.items()}
                found = await self._index.lookup_all(list(chains.values()), lives)
            self.problem = None
        except (BatonError, TimeoutError) as error:
            if self.problem is None:
                logs.event(logger, "prefix_index_away", level=logging.WARNING, why=str(error))
            self.problem = f"prefix lookups fail: {str(error) or 'no answer in time'}"
            return FoundPrefixes(chains=chains)
        return FoundPrefixes(dict(zip(asked, found, strict=True)), stores, chains)


_EVERY = 8
"""Interval of the blocks that are noted, beside the last one: a prompt that branches off in the
middle is found within 8 blocks of the branch."""

_MAX_WORKERS = 4
"""Most workers that are kept for one prefix: the latest ones."""

MAX_LIVES = 10_000
"""Most worker incarnations that are kept; the one longest without a request goes first."""

_Hint = tuple[str, int]
"""Incarnation, and the number of blocks that it had been sent by then."""


class PrefixAffinity:
    """Bounded memory of which worker incarnations should have the KV of which prefixes."""

    def __init__(self, max_entries: int, max_lives: int = MAX_LIVES) -> None:
        self._max_entries = max_entries
        self._max_lives = max_lives
        self._places: OrderedDict[bytes, tuple[_Hint, ...]] = OrderedDict()
        self._num_sent: OrderedDict[str, int] = OrderedDict()

    def note(self, chain_hashes: Sequence[bytes], incarnations: Sequence[str]) -> None:
        """Record that these incarnations have all blocks of `chain_hashes`."""
        if not (incarnations and chain_hashes):
            return
        known = self._known(chain_hashes)
        hints: list[_Hint] = []
        for life in incarnations:
            num_sent = self._num_sent.pop(life, 0) + len(chain_hashes) - known.get(life, 0)
            self._num_sent[life] = num_sent
            hints.append((life, num_sent))
        while len(self._num_sent) > self._max_lives:
            self._num_sent.popitem(last=False)
        last = len(chain_hashes) - 1
        noted = list(chain_hashes[_EVERY - 1 :: _EVERY])
        if (last + 1) % _EVERY:
            noted.append(chain_hashes[last])
        for chain_hash in noted:
            before = self._places.pop(chain_hash, ())
            others = (hint for hint in before if hint[0] not in incarnations)
            self._places[chain_hash] = (*hints, *others)[:_MAX_WORKERS]
        while len(self._places) > self._max_entries:
            self._places.popitem(last=False)

    def find(self, chain_hashes: Sequence[bytes], num_blocks: Mapping[str, int]) -> dict[str, int]:
        """Return the number of leading blocks of `chain_hashes` that workers should have, by
        incarnation.

        Args: num_blocks: cache size in blocks by incarnation; one that is missing has nothing.
        """
        found: dict[str, int] = {}
        places = self._places
        for index in range(len(chain_hashes) - 1, -1, -1):
            hints = places.get(chain_hashes[index])
            if hints is None:
                continue
            for life, num_sent in hints:
                if self._num_sent.get(life, num_sent) - num_sent <= num_blocks.get(life, -1):
                    found.setdefault(life, index + 1)
            if len(found) >= _MAX_WORKERS:
                break
        return found

    def check_integrity(self) -> None:
        """Check the bounds. Raises: Internal when more is kept than allowed."""
        if len(self._places) > self._max_entries or len(self._num_sent) > self._max_lives:
            raise Internal(
                f"{len(self._places)} prefixes and {len(self._num_sent)} lives are remembered"
            )

    def _known(self, chain_hashes: Sequence[bytes]) -> dict[str, int]:
        """Return the number of leading blocks ever noted, by incarnation."""
        known: dict[str, int] = {}
        for index in range(len(chain_hashes) - 1, -1, -1):
            hints = self._places.get(chain_hashes[index], ())
            for life, _ in hints:
                known.setdefault(life, index + 1)
            if hints:
                break
        return known
