"""How many requests of this router use which content of which adapter.

It keeps an old content from being dropped, and an adapter from being unloaded. Law: idle, nothing
is counted. One asyncio loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from services.router.candidates import Adapter


class AdapterUse:
    """See the module."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def using(self, adapter: Adapter) -> Iterator[None]:
        """A request uses it while the body runs."""
        if not adapter.name:
            yield
            return
        key = (adapter.name, adapter.digest)
        self._counts[key] += 1
        try:
            yield
        finally:
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]

    def of(self, name: str) -> Mapping[str, int]:
        """Requests by digest."""
        return {digest: num for (own, digest), num in self._counts.items() if own == name}

    def names(self) -> set[str]:
        """Of the adapters that are in use."""
        return {name for name, _ in self._counts}

    @property
    def num_requests(self) -> int:
        """That use some adapter."""
        return self._counts.total()
