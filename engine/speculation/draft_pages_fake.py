"""FakeDraftPages: DraftPages in this process' memory, for tests: the same law and the same ends as
the real one's, with faults on request. It has no thread: what is put is there at once, and what is
asked for comes at once, or when `let_go` is called.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from engine.errors import IntegrityError
from engine.speculation.draft_pages import (
    MISSING,
    NO_ROWS,
    SIZE,
    STOPPED,
    Fetch,
    Fetched,
    PageCounts,
    Pages,
    PagesRefused,
)


class _Put:
    """See PagePut."""

    def __init__(self, *, is_lost: bool) -> None:
        self.is_lost = is_lost


class _Get:
    """See Fetch."""

    def __init__(self, keys: Sequence[bytes], num_tokens: int) -> None:
        self.keys = tuple(keys)
        self.num_tokens = num_tokens
        self.answer: Fetched | None = None

    @property
    def num_asked(self) -> int:
        return len(self.keys)

    @property
    def is_done(self) -> bool:
        return self.answer is not None

    def result(self) -> Fetched:
        assert self.answer is not None, "not done"
        return self.answer


class FakeDraftPages:
    """See the module.

    Args:
        num_rows: pages that may be on their way back at once, and stay until they are dropped.
    Attributes:
        kept: (tokens, bytes) of what is there, by key; tests take away what they like.
        parents: by key, of all that was ever there.
        withholds: what is asked for comes with `let_go`.
        loses: what is put is lost.
        seconds: that each fetch says it took.
    """

    def __init__(self, page_bytes: int, num_rows: int) -> None:
        self.page_bytes = page_bytes
        self.num_rows = num_rows
        self.counts = PageCounts()
        self.kept: dict[bytes, tuple[int, Pages]] = {}
        self.parents: dict[bytes, bytes] = {}
        self.withholds = False
        self.loses = False
        self.is_stopped = False
        self.seconds = 0.001
        self.num_gets = 0
        self._gets: list[_Get] = []
        self._withheld: deque[_Get] = deque()

    @property
    def max_get_pages(self) -> int:
        """See DraftPages."""
        return self.num_rows

    @property
    def num_free_get_pages(self) -> int:
        """See DraftPages."""
        if self.is_stopped:
            return 0
        return self.num_rows - sum(get.num_asked for get in self._gets)

    @property
    def num_free_put_pages(self) -> int:
        """See DraftPages."""
        return min(self.num_free_get_pages, max(1, self.num_rows // 2))

    def key(self, model_fingerprint: str, num_tokens: int, chain_hash: bytes) -> bytes:
        """See DraftPages."""
        named = f"{model_fingerprint} {num_tokens} ".encode() + chain_hash
        return hashlib.blake2b(named, digest_size=16).digest()

    def put(
        self,
        keys: Sequence[bytes],
        parent: bytes,
        pages: Pages,
        num_tokens: int,
        *,
        owner: str = "",
    ) -> _Put:
        """See DraftPages."""
        if pages.shape != (len(keys), self.page_bytes):
            raise IntegrityError(f"{len(keys)} pages of {self.page_bytes} bytes, not {pages.shape}")
        if self.is_stopped:
            raise PagesRefused(STOPPED)
        if len(keys) > self.num_free_put_pages:
            raise PagesRefused(NO_ROWS)
        if self.loses or (parent and parent not in self.kept):
            self.counts.add_not_put(MISSING, len(keys))
            return _Put(is_lost=True)
        for key, page in zip(keys, pages, strict=True):
            self.parents[key], parent = parent, key
            if key not in self.kept:
                self.kept[key] = (num_tokens, page.copy())
                self.counts.num_put += 1
        return _Put(is_lost=False)

    def get(self, keys: Sequence[bytes], num_tokens: int) -> _Get:
        """See DraftPages."""
        if self.is_stopped:
            raise PagesRefused(STOPPED)
        if self.num_free_get_pages < 1:
            raise PagesRefused(NO_ROWS)
        get = _Get(keys[: self.num_free_get_pages], num_tokens)
        self.num_gets += 1
        self._gets.append(get)
        if self.withholds:
            self._withheld.append(get)
        else:
            self._answer(get)
        return get

    def drop(self, fetch: Fetch) -> None:
        """See DraftPages."""
        self._gets = [get for get in self._gets if get is not fetch]

    def check_integrity(self, fetches: Collection[Fetch]) -> None:
        """See DraftPages."""
        if {id(one) for one in fetches} != {id(one) for one in self._gets}:
            raise IntegrityError(f"{len(self._gets)} fetches are kept, not {len(fetches)}")
        num_taken = sum(get.num_asked for get in self._gets)
        if num_taken > self.num_rows:
            raise IntegrityError(f"{num_taken} rows of {self.num_rows} are taken")

    def let_go(self) -> None:
        """What was withheld comes now."""
        while self._withheld:
            self._answer(self._withheld.popleft())

    def _answer(self, get: _Get) -> None:
        found: list[Pages] = []
        reason = ""
        for key in get.keys:
            if key not in self.kept:
                reason = MISSING
                break
            num_tokens, page = self.kept[key]
            if num_tokens != get.num_tokens:
                reason = SIZE
                break
            found.append(page)
        pages = np.array(found, dtype=np.uint8).reshape(len(found), self.page_bytes)
        if any(get is one for one in self._gets):
            self._count(get, len(found), reason)
        get.answer = Fetched(pages, reason, self.seconds)

    def _count(self, get: _Get, num_found: int, reason: str) -> None:
        self.counts.num_fetched += num_found
        if reason:
            self.counts.add_not_fetched(reason, get.num_asked - num_found)
