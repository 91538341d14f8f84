"""The pages of one file: which are free, being written, or hold a block.

A page is in one of three states: FREE -> (take) WRITING -> (use) USED -> (free) FREE; a write that
failed goes from WRITING to FREE. Conservation law: num_free + num_writing + num_used == num_pages.

Knows nothing of bytes or blocks. Plain synchronous values, one thread.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Iterator

from kvstore.errors import IntegrityError


class PagePool:
    """See the module. Lowest free page first, so that a file fills from its beginning."""

    def __init__(self, num_pages: int, used: Iterable[int] = ()) -> None:
        """used: pages that hold a block already."""
        self.num_pages = num_pages
        self._used = set(used)
        self._writing: set[int] = set()
        self._free = [page for page in range(num_pages) if page not in self._used]

    @property
    def num_used(self) -> int:
        return len(self._used)

    @property
    def num_writing(self) -> int:
        return len(self._writing)

    @property
    def num_taken(self) -> int:
        """Pages that are not free."""
        return len(self._used) + len(self._writing)

    def is_taken(self, page: int) -> bool:
        """Whether it is not free."""
        return page in self._used or page in self._writing

    def take(self) -> int | None:
        """FREE -> WRITING; None when there is none."""
        if not self._free:
            return None
        page = heapq.heappop(self._free)
        self._writing.add(page)
        return page

    def use(self, page: int) -> None:
        """WRITING -> USED."""
        if page not in self._writing:
            raise IntegrityError(f"page {page}: is not being written")
        self._writing.remove(page)
        self._used.add(page)

    def free(self, page: int) -> None:
        """WRITING or USED -> FREE."""
        for pages in (self._writing, self._used):
            if page in pages:
                pages.remove(page)
                heapq.heappush(self._free, page)
                return
        raise IntegrityError(f"page {page}: is free already")

    def check_integrity(self) -> None:
        """Recount everything. Raises: IntegrityError."""
        deque(self.checks(), maxlen=0)

    def checks(self) -> Iterator[None]:
        """The same in steps; the caller may do other things between two (kvstore/watch.py)."""
        found: set[int] = set()
        for pages in (self._free, self._used, self._writing):
            for page in pages:
                if page in found:
                    raise IntegrityError(f"pages: page {page} is in two states, or free twice")
                if not 0 <= page < self.num_pages:
                    raise IntegrityError(f"pages: page {page}: there are {self.num_pages}")
                found.add(page)
                yield
        if len(found) != self.num_pages:
            raise IntegrityError("pages: the three states do not add up to num_pages")
