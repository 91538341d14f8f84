"""What it costs to move KV between a worker and a store, or a worker that lends its blocks: by what
the workers measured, else by a guess. Pure.

A link is measured once, when the two meet, perhaps on a machine that is busy starting. So links
count in classes: those within a factor of the best healthy one of their kind (to a worker's own
store, to another one, to a lender) are as good as that, and so are those that nobody has measured
yet. Equal workers then cost exactly the same, and where a request goes is decided by load, prefixes
and affinity, not by noise. Latencies are not counted at all: they are the noisiest, and small
against what they would decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Protocol

from kvstore.node_ids import is_lender
from services.router.config import RouterCosts
from services.router.views import Link

_CLASS_FACTOR = 4
"""Guessed: above what one machine's measurements differ by, below what a wrong path costs."""

_FAILED_FACTOR = 100
"""A link that failed its measurement may still carry something: dear, not forbidden, since a worker
that was busy when it started must not stay idle for ever. Guessed.
"""


SlowLink = tuple[float, bool]
"""What a link counts as, in bytes per second, and whether it is degraded."""


class Linked(Protocol):
    """A worker as far as this module cares."""

    @property
    def store_node_id(self) -> str:
        """Its own store; empty: none."""
        ...

    @property
    def links(self) -> Mapping[str, Link]:
        """What it measured, by node."""
        ...


class _Kind(Enum):
    """Of a link, by what is at its other end."""

    HOME = "the worker's own store"
    ELSEWHERE = "another node's store"
    LENDER = "another worker"


class LinkCosts:
    """For one choice among `workers`."""

    def __init__(self, workers: Iterable[Linked], costs: RouterCosts) -> None:
        self._guess_bytes_per_s = costs.link_bytes_per_s
        self._best = dict.fromkeys(_Kind, 0.0)
        for worker in workers:
            for node_id, link in worker.links.items():
                if not link.is_degraded:
                    kind = _kind(worker, node_id)
                    self._best[kind] = max(self._best[kind], link.read_bytes_per_s)

    def move_s(
        self, worker: Linked, node_id: str, num_bytes: float, as_good_as: str | None = None
    ) -> float:
        """Seconds that `num_bytes` take from a store or lender into the worker.

        Args: as_good_as: another node, whose link this one is weighed against: in the same class it
            costs no more than that.
        """
        rate = self._rate(worker, node_id)
        if as_good_as is not None:
            rate = _levelled(rate, max(rate, self._rate(worker, as_good_as)))
        return num_bytes / rate

    def slow(self, worker: Linked) -> Mapping[str, SlowLink]:
        """Those of its links that do not count like the best of their kind, by node."""
        found = {}
        for node_id, link in worker.links.items():
            rate, kind = self._rate(worker, node_id), _kind(worker, node_id)
            if link.is_degraded or rate != (self._best[kind] or self._guess(kind)):
                found[node_id] = (rate, link.is_degraded)
        return found

    def _rate(self, worker: Linked, node_id: str) -> float:
        """Bytes per second, above 0."""
        link, kind = worker.links.get(node_id), _kind(worker, node_id)
        best = self._best[kind] or self._guess(kind)
        if link is None:
            return best
        return _levelled(link.read_bytes_per_s or self._guess(kind) / _FAILED_FACTOR, best)

    def _guess(self, kind: _Kind) -> float:
        # From another node's store the bytes cross a link once more.
        return self._guess_bytes_per_s / (2 if kind is _Kind.ELSEWHERE else 1)


def _kind(worker: Linked, node_id: str) -> _Kind:
    if node_id == worker.store_node_id:
        return _Kind.HOME
    return _Kind.LENDER if is_lender(node_id) else _Kind.ELSEWHERE


def _levelled(rate: float, best: float) -> float:
    return best if rate * _CLASS_FACTOR >= best else rate
