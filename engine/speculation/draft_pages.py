"""DraftPages: where pages of a draft model's own KV lie that other workers may go on from, as a
Protocol. What `DraftShare` (draft_share.py) needs and nothing more.

A page is as many of a draft model's blocks, side by side, as fit in one block of its target, which
is what a store's frame holds; the rest is zeros. Its key binds the draft model's fingerprint and
the target's chain hash of the last block that it covers, and so tenant, adapter and all tokens. A
page follows another one, as blocks of a prompt do: where one is, those before it are.

What is put may be refused, lost or evicted, what is asked for may not come: all that costs is
computing it again. Called from the engine's thread only, never waits; an implementation that moves
bytes does so elsewhere, with deadlines of its own.

Conservation: rows of memory free + taken + quarantined == all (`check_integrity`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from engine.errors import EngineError
from engine.kv.layout import KvLayout

Pages = npt.NDArray[np.uint8]
"""[num_pages, page_bytes]."""

NO_ROWS = "no_rows"
STOPPED = "stopped"
MISSING = "missing"
SIZE = "size"
SLOW = "slow"
ENDED = "ended"
FAILED = "failed"
"""By a mistake of our own, which the log says."""


class PagesRefused(EngineError):
    """Nothing was taken. `reason`: NO_ROWS (others have the memory just now) or STOPPED."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"pages of a draft model's KV: {reason}")
        self.reason = reason


class Fetched(NamedTuple):
    """What came."""

    pages: Pages
    """The leading ones of those asked for; not to be used after `drop`."""
    reason: str
    """Why others did not; empty: all came."""
    seconds: float
    """From asking to having them."""


class Fetch(Protocol):
    """Pages on their way."""

    @property
    def num_asked(self) -> int:
        """Pages: the leading ones of those wanted, as far as there was room for them."""
        ...

    @property
    def is_done(self) -> bool:
        """Whether `result` answers at once."""
        ...

    def result(self) -> Fetched:
        """Called once `is_done`, before `drop`."""
        ...


class PagePut(Protocol):
    """Pages on their way out."""

    @property
    def is_lost(self) -> bool:
        """They are not there, and what follows them is of no use."""
        ...


@dataclass
class PageCounts:
    """Since start. What is missing is counted by any thread (`add_not_put`, `add_not_fetched`), the
    rest by one thread each; read by any."""

    num_put: int = 0
    """Pages that were written (those that were there already are not)."""
    num_fetched: int = 0
    not_put: Counter[str] = field(default_factory=Counter)
    """Pages that were to be written and were not, by reason."""
    not_fetched: Counter[str] = field(default_factory=Counter)
    """Pages that were asked for and did not come, by reason."""
    choices: Counter[str] = field(default_factory=Counter)
    """Texts that a draft model had not seen, by the way that was chosen."""
    num_recomputed_tokens: int = 0
    """Of texts that a draft model had not seen, and was a page or more behind with."""
    _lock: threading.Lock = field(
        default_factory=threading.Lock, init=False, repr=False, compare=False
    )

    def add_not_put(self, reason: str, num_pages: int) -> None:
        """Any thread."""
        with self._lock:
            self.not_put[reason] += num_pages

    def add_not_fetched(self, reason: str, num_pages: int) -> None:
        """Any thread."""
        with self._lock:
            self.not_fetched[reason] += num_pages


class DraftPages(Protocol):
    """See the module."""

    @property
    def page_bytes(self) -> int: ...

    @property
    def max_get_pages(self) -> int:
        """Of all fetches together, where nothing is put."""
        ...

    @property
    def num_free_get_pages(self) -> int:
        """That one `get` would ask for now. 0: it is refused."""
        ...

    @property
    def num_free_put_pages(self) -> int:
        """That one `put` may have now: more are refused."""
        ...

    @property
    def counts(self) -> PageCounts: ...

    def key(self, model_fingerprint: str, num_tokens: int, chain_hash: bytes) -> bytes:
        """Of the page of `num_tokens` tokens that ends with this block of the target's."""
        ...

    def put(
        self,
        keys: Sequence[bytes],
        parent: bytes,
        pages: Pages,
        num_tokens: int,
        *,
        owner: str = "",
    ) -> PagePut:
        """Store a copy of consecutive pages; they may change as soon as this returns.

        Args:
            parent: key of the page before the first; empty: there is none.
            num_tokens: of each page.
            owner: `Request.owner`.
        Raises: PagesRefused.
        """
        ...

    def get(self, keys: Sequence[bytes], num_tokens: int) -> Fetch:
        """Ask for the leading ones of these pages, as many as there is room for, at least one. Ends
        by itself.

        Raises: PagesRefused.
        """
        ...

    def drop(self, fetch: Fetch) -> None:
        """It is not wanted any more, come or not. Once for each `get`."""
        ...

    def check_integrity(self, fetches: Collection[Fetch]) -> None:
        """Exactly these were asked for and not dropped; see the module. Raises: IntegrityError."""
        ...


def page_blocks(page_bytes: int, layout: KvLayout) -> int:
    """Blocks of a draft model that a page holds; 0: none fits."""
    return page_bytes // layout.block_bytes
