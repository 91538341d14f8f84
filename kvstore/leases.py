"""Leases: what keeps blocks in place for a worker, and until when.

A lease owns pins (on committed blocks, tails among them) and reservations (frames being written).
It ends by release or by lapsing; then all it owns is let go, so that a client that dies leaks
nothing. Times are seconds on the caller's clock; no clock is read here.

Holds are leases without an end, which the store takes for itself while it copies out of frames.

Plain and synchronous, one thread.
"""

from __future__ import annotations

import heapq
import math
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.errors import LeaseLapsed
from kvstore.prefix_tree import PrefixTree, TreeNode


class FrameReservation(NamedTuple):
    """A frame being written at (odd) `generation`. `chain_hash` is empty for a tail block, whose
    name is `tail_name`; `parent` is empty at the start of a prompt."""

    frame: int
    generation: int
    attachment_id: str
    chain_hash: bytes
    parent: bytes
    tail_name: str = ""
    tenant: str = ""


@dataclass(slots=True, eq=False)
class Lease:
    """`reservations` is keyed by frame. A lease pins a node once, whatever tier it lies in.
    is_probe: a worker measures its link under it, so that its bytes are not counted."""

    lease_id: str
    expires_at_s: float
    is_probe: bool = False
    pins: dict[TreeNode, None] = field(default_factory=dict)
    reservations: dict[int, FrameReservation] = field(default_factory=dict)
    writing: dict[bytes, int] = field(default_factory=dict)  # chain hash -> frame, of reservations

    def pin_all(self, tree: PrefixTree, nodes: Iterable[TreeNode]) -> list[TreeNode]:
        """Returns: those that this lease did not pin yet."""
        newly: list[TreeNode] = []
        for node in nodes:
            if node not in self.pins:
                self.pins[node] = None
                tree.pin(node)
                newly.append(node)
        return newly

    def add_reservation(self, reservation: FrameReservation) -> None:
        self.reservations[reservation.frame] = reservation
        if reservation.chain_hash:
            self.writing[reservation.chain_hash] = reservation.frame

    def drop_reservation(self, frame: int) -> FrameReservation:
        reservation = self.reservations.pop(frame)
        if reservation.chain_hash:
            del self.writing[reservation.chain_hash]
        return reservation


def _random_id() -> str:
    return secrets.token_hex(16)


class LeaseTable:
    """All live leases, by id and by which lapses next."""

    def __init__(self, max_ttl_s: float, new_id: Callable[[], str] = _random_id) -> None:
        self.max_ttl_s = max_ttl_s
        self._new_id = new_id
        self._leases: dict[str, Lease] = {}
        self.due: list[tuple[float, str]] = []
        """A heap of (end, lease id); an item is outdated after a renewal."""

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def create(self, now_s: float, ttl_s: float) -> Lease:
        """A new lease for `ttl_s`, at most the table's own limit."""
        return self._add(now_s + min(ttl_s, self.max_ttl_s))

    def create_hold(self) -> Lease:
        """A lease that never lapses."""
        return self._add(math.inf)

    def find(self, lease_id: str) -> Lease | None:
        return self._leases.get(lease_id)

    def get(self, lease_id: str) -> Lease:
        """Raises: LeaseLapsed when it is not there (any more)."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseLapsed(f"lease {lease_id or '(empty)'}: released, lapsed or never made")
        return lease

    def renew(self, lease: Lease, now_s: float, ttl_s: float) -> None:
        """Never shortens: another holder of the lease may rely on the later end."""
        expires_at_s = now_s + min(ttl_s, self.max_ttl_s)
        if expires_at_s > lease.expires_at_s:
            lease.expires_at_s = expires_at_s
            heapq.heappush(self.due, (expires_at_s, lease.lease_id))

    def remove(self, lease_id: str) -> Lease | None:
        """Take the lease out; the caller lets go of its pins and reservations."""
        return self._leases.pop(lease_id, None)

    def pop_due(self, now_s: float) -> Lease | None:
        """Take out one lease that has lapsed by `now_s`; None when there is none."""
        while self.due and self.due[0][0] <= now_s:
            expires_at_s, lease_id = heapq.heappop(self.due)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires_at_s <= expires_at_s:
                return self._leases.pop(lease_id)
        return None

    def _add(self, expires_at_s: float) -> Lease:
        lease = Lease(self._new_id(), expires_at_s)
        self._leases[lease.lease_id] = lease
        if not math.isinf(expires_at_s):
            heapq.heappush(self.due, (expires_at_s, lease.lease_id))
        return lease
