"""What it costs to move KV between a worker and a store: by what the workers measured, else by a
guess. Pure.

A link is measured once, when the two meet, perhaps on a machine that is busy starting. So links
count in classes: those within a factor of the best healthy one of their kind (to a worker's own
store, to another one) are as good as that, and so are those that nobody has measured yet. Equal
workers then cost exactly the same, and where a request goes is decided by load, prefixes and
affinity, not by noise. Latencies are not counted at all: they are the noisiest, and small against
what they would decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from services.router.config import RouterCosts
from services.router.views import Link

_CLASS_FACTOR = 4
"""Guessed: above what one machine's measurements differ by, below what a wrong path costs."""

_FAILED_FACTOR = 100
"""A link that failed its measurement may still carry something: dear, not forbidden, since a worker
that was busy when it started must not stay idle for ever. Guessed.
"""


class Linked(Protocol):
    """A worker as far as this module cares."""

    @property
    def store_node_id(self) -> str:
        """Its own store; empty: none."""
        ...

    @property
    def links(self) -> Mapping[str, Link]:
        """What it measured, by store node."""
        ...


class LinkCosts:
    """For one choice among `workers`."""

    def __init__(self, workers: Iterable[Linked], costs: RouterCosts) -> None:
        self._guess_bytes_per_s = costs.link_bytes_per_s
        self._best = {True: 0.0, False: 0.0}  # by whether the store is the worker's own
        for worker in workers:
            for node_id, link in worker.links.items():
                if not link.is_degraded:
                    is_home = node_id == worker.store_node_id
                    self._best[is_home] = max(self._best[is_home], link.read_bytes_per_s)

    def move_s(self, worker: Linked, node_id: str, num_bytes: float) -> float:
        """Seconds that `num_bytes` take from a store into the worker."""
        link, is_home = worker.links.get(node_id), node_id == worker.store_node_id
        best = self._best[is_home] or self._guess(is_home)
        if link is None:
            return num_bytes / best
        rate = link.read_bytes_per_s or self._guess(is_home) / _FAILED_FACTOR
        return num_bytes / (best if rate * _CLASS_FACTOR >= best else rate)

    def _guess(self, is_home: bool) -> float:
        # From another node's store the bytes cross a link once more.
        return self._guess_bytes_per_s / (1 if is_home else 2)
