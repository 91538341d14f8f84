"""The pages of one file: which are free, being written, or hold a block.

A page is in one of three states: FREE -> (take) WRITING -> (use) USED -> (free) FREE; a write that
failed goes from WRITING to FREE. Conservation law: num_free + num_writing + num_used == num_pages.

Knows nothing of bytes or blocks. Plain synchronous values, one thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

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

    def taken(self) -> set[int]:
        """Every page that is not free."""
        return self._used | self._writing

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
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError("pages: a page is free twice")
        if free & self._used or free & self._writing or self._used & self._writing:
            raise IntegrityError("pages: a page is in two states")
        if free | self._used | self._writing != set(range(self.num_pages)):
            raise IntegrityError("pages: the three states do not add up to num_pages")
