"""Where a prompt's prefix lies over all stores together, as runs: whose blocks a prefill worker
takes, in order and without gaps. Pure.

Presence is prefix-closed at every store, so two runs are always enough: what the worker's own store
holds, then the rest of what the store with the longest prefix holds. They are hints: each store
checks under its own lease. Knows no index, no RPC and no clock.

Which store holds how much of a prompt's prefix, by the index in Redis. Hints only: workers
verify what they use.

One round trip a prompt, however long it is, however many stores and layouts there are. A tenant's
hashes are keyed by its salt, so that nobody meets what another tenant left. Redis slow or away: no
hints, the request goes on, and `problem` says so in the cluster status. One asyncio loop.

Which workers should still have which prompt's KV in their own caches, since this router had them
compute or decode it: so that the next turn of a conversation can go where the last one was.

Keyed by chain hash, which binds all tokens before it, the tenant and the model: nothing is found
for other tokens, or for somebody else. Hints, never truth: what a worker really has it says when it
is asked. A hint ends when so much was sent to its worker since that its cache must have turned
over, and when others were used later. No I/O. One asyncio loop.
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
"""Model fingerprint and block size: the same tokens have other blocks in another layout."""


@dataclass(frozen=True)
class StoreRun:
    """Consecutive blocks of a prompt that one store holds, by the index."""

    node_id: str
    first_block: int
    num_blocks: int


@dataclass(frozen=True)
class FoundPrefixes:
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


NO_PREFIXES = FoundPrefixes()


def plan_runs(
    held: Mapping[str, int], home: str, distance: Callable[[str], float]
) -> tuple[StoreRun, ...]:
    """The longest prefix over the union of all stores, for a worker whose own store is `home`.

    Args: held: blocks from the first on, by node. home: its node id; empty: the worker has no store
        and cannot fetch. distance: less is nearer; infinite: nothing is fetched from there.
    Returns: at most two runs, in order, without gaps, from block 0 on: home first, then the node
        with the longest prefix beyond it, the nearest of equals, by name where that is equal too.
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


logger = logging.getLogger(__name__)


class PrefixIndexReader(Protocol):
    """What the router needs of the index; `kvstore.index.PrefixIndex` in production."""

    async def lookup_all(
        self, chains: Sequence[Sequence[bytes]], nodes: Mapping[str, str]
    ) -> Sequence[Mapping[str, int]]:
        """`nodes`: node id -> incarnation (hex). Returns: for each chain of hashes how many leading
        ones each node holds.

        Raises: Unavailable when Redis does not answer.
        """
        ...


class PrefixLookup:
    """Prefix hints for one prompt; the index has a bounded time for its answer."""

    def __init__(
        self,
        index: PrefixIndexReader,
        stores: Callable[[], Collection[StoreView]],
        *,
        timeout_s: float,
    ) -> None:
        """`stores`: those alive now."""
        self._index = index
        self._stores = stores
        self._timeout_s = timeout_s
        self._hashing = HashTurns()
        self.problem: str | None = None
        """Why the last lookup found nothing it could trust; None when it worked."""

    async def find(
        self,
        token_ids: Sequence[int],
        tenant_salt: bytes,
        layouts: Iterable[Layout],
        adapter_digest: str = "",
        *,
        drawn: Sequence[int] = (),
    ) -> FoundPrefixes:
        """Blocks held, by layout and store node, for each layout with this adapter.

        Args:
            drawn: tokens behind these, where a request goes on elsewhere.
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
            # Not in a thread, which would hold the interpreter, and so the loop, for longer.
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
"""Of a prompt's blocks each eighth is noted, and its last one: a prompt that branches off in the
middle is found within 8 blocks of the branch."""

_MAX_WORKERS = 4
"""Workers known for one prefix, the latest."""

MAX_LIVES = 10_000
"""Incarnations of workers that are kept; the one that was longest without a request goes first."""

_Hint = tuple[str, int]
"""Incarnation, and how many blocks it had been sent by then."""


class PrefixAffinity:
    """See the module."""

    def __init__(self, max_entries: int, max_lives: int = MAX_LIVES) -> None:
        self._max_entries = max_entries
        self._max_lives = max_lives
        self._places: OrderedDict[bytes, tuple[_Hint, ...]] = OrderedDict()
        self._num_sent: OrderedDict[str, int] = OrderedDict()

    def note(self, chain_hashes: Sequence[bytes], incarnations: Sequence[str]) -> None:
        """These lives have the blocks of `chain_hashes`, from the first one on."""
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
        """By incarnation: leading blocks of `chain_hashes` that it should have.

        Args: num_blocks: what the cache of each life holds; who is not in it has nothing.
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
        """Raises: Internal when more is kept than may be."""
        if len(self._places) > self._max_entries or len(self._num_sent) > self._max_lives:
            raise Internal(
                f"{len(self._places)} prefixes and {len(self._num_sent)} lives are remembered"
            )

    def _known(self, chain_hashes: Sequence[bytes]) -> dict[str, int]:
        """By incarnation: leading blocks that were noted of it, however long ago."""
        known: dict[str, int] = {}
        for index in range(len(chain_hashes) - 1, -1, -1):
            hints = self._places.get(chain_hashes[index], ())
            for life, _ in hints:
                known.setdefault(life, index + 1)
            if hints:
                break
        return known
