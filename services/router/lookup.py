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
from kvstore.hash_turns import TURN_TOKENS, chain_in_turns
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
        self._long = asyncio.Lock()
        """Long prompts are hashed one after the other: each in its turns, many at once would make
        one turn of the loop as long as all of theirs, and all would be done as late as the last."""
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
        stores = {store.node_id: store for store in self._stores()}
        asked = sorted(layouts)
        if not stores or not asked:
            return NO_PREFIXES
        roots = [block_hash.root_key(tenant_salt, name, adapter_digest) for name, _ in asked]
        if len(token_ids) + len(drawn) > TURN_TOKENS:
            await asyncio.sleep(0)  # what came before was a turn of its own
            async with self._long:
                hashes = await _hashes(roots, asked, token_ids, drawn)
        else:
            hashes = await _hashes(roots, asked, token_ids, drawn)
        chains: dict[Layout, Sequence[bytes]] = dict(zip(asked, hashes, strict=True))
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


async def _hashes(
    roots: Sequence[bytes],
    layouts: Sequence[Layout],
    token_ids: Sequence[int],
    drawn: Sequence[int],
) -> list[list[bytes]]:
    """By layout."""
    column = np.asarray(token_ids, dtype=np.uint32)
    if drawn:
        column = np.concatenate([column, np.asarray(drawn, dtype=np.uint32)])
    # Not in a thread, which would hold the interpreter, and so the loop, for longer.
    return [
        await chain_in_turns(root, cast("Sequence[int]", column), block_size)
        for root, (_, block_size) in zip(roots, layouts, strict=True)
    ]
