"""Which store holds how much of a prompt's prefix, by the index in Redis. Hints only: workers
verify what they use.

One round trip a prompt, however long it is, however many stores and layouts there are. A tenant's
hashes are keyed by its salt, so that nobody meets what another tenant left. Redis slow or away: no
hints, the request goes on, and `problem` says so in the cluster status. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol, cast

import numpy as np

from kvstore import block_hash
from kvstore.block_hash import HashTurns
from process import logs
from process.errors import BatonError
from services.router.prefix_runs import NO_PREFIXES, Layout, Prefixes
from services.router.views import StoreView

logger = logging.getLogger(__name__)


class PrefixIndex(Protocol):
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
        index: PrefixIndex,
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
    ) -> Prefixes:
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
            return Prefixes(chains=chains)
        try:
            async with asyncio.timeout(self._timeout_s):
                lives = {node_id: store.incarnation for node_id, store in stores.items()}
                found = await self._index.lookup_all(list(chains.values()), lives)
            self.problem = None
        except (BatonError, TimeoutError) as error:
            if self.problem is None:
                logs.event(logger, "prefix_index_away", level=logging.WARNING, why=str(error))
            self.problem = f"prefix lookups fail: {str(error) or 'no answer in time'}"
            return Prefixes(chains=chains)
        return Prefixes(dict(zip(asked, found, strict=True)), stores, chains)
