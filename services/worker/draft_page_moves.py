"""Pages of draft models' KV that move between a worker and its store: what was asked for or put,
and where its bytes are. Values only: who changes them, and under which lock, is
services/worker/draft_pages.py's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.errors import IntegrityError
from engine.speculation.draft_pages import MISSING, SIZE, Fetched
from kvstore.block_refs import Block
from kvstore.transport.base import BlockMemory


class StoredFetch:
    """A Fetch (engine/speculation/draft_pages.py). What changes: under the lock."""

    def __init__(
        self, keys: Sequence[bytes], num_tokens: int, rows: tuple[int, ...], memory: BlockMemory
    ) -> None:
        self.keys = tuple(keys)
        self.num_tokens = num_tokens
        self.rows = rows
        self.began_s = time.monotonic()
        self.num_came = -1
        """Leading pages; -1: they move still."""
        self.reason = ""
        self.seconds = 0.0
        self.is_dropped = False
        self._memory = memory

    @property
    def num_asked(self) -> int:
        return len(self.keys)

    @property
    def is_done(self) -> bool:
        return self.num_came >= 0

    def result(self) -> Fetched:
        """See Fetch. Rows are its own until it is dropped, on this same thread."""
        if not self.is_done:
            raise IntegrityError("pages were asked for, and are not here yet")
        pages = self._memory.view[list(self.rows[: self.num_came])]
        return Fetched(pages, self.reason, self.seconds)


class StoredPut:
    """A PagePut (engine/speculation/draft_pages.py)."""

    def __init__(
        self,
        keys: Sequence[bytes],
        parent: bytes,
        num_tokens: int,
        rows: tuple[int, ...],
        tenant: str,
    ) -> None:
        self.keys = tuple(keys)
        self.tenant = tenant
        self.parent = parent
        self.num_tokens = num_tokens
        self.rows = rows
        self.is_lost = False


def usable(blocks: Sequence[Block], fetch: StoredFetch) -> tuple[list[Block], str]:
    """The leading pages that the store has as they were asked for, and why no more."""
    found: list[Block] = []
    for block, key in zip(blocks, fetch.keys, strict=False):
        if block.chain_hash != key or block.num_tokens != fetch.num_tokens:
            return found, SIZE
        found.append(block)
    return found, "" if len(found) == fetch.num_asked else MISSING
