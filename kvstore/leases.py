"""Leases: pins on KV blocks with a time limit, which keep the blocks in place for a worker; in a
store, and in a worker that lends its cache (exported_blocks.py).

A store's lease owns pins (on committed blocks, tails among them) and reservations (frames being
written). It ends by release or by lapsing; then all it owns is let go, so that a client that dies
leaks nothing. Times are seconds on the caller's clock; no clock is read here.

A store's holds are leases without an end, which it takes for itself while it copies out of frames.

Plain and synchronous, one thread.
"""

from __future__ import annotations

import heapq
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from kvstore.errors import LeaseLapsed
from kvstore.prefix_tree import PrefixTree, TreeNode


class FrameReservation(NamedTuple):
    """A frame that a worker is writing at (odd) `generation`. `chain_hash` is empty for a tail
    block, whose name is `tail_name`; `parent` is empty at the start of a prompt."""

    frame: int
    generation: int
    attachment_id: str
    chain_hash: bytes
    parent: bytes
    tail_name: str = ""
    tenant: str = ""


@dataclass(slots=True, eq=False)
class TimedLease:
    """A lease with its end. expires_at_s: infinite where it never lapses."""

    lease_id: str
    expires_at_s: float


@dataclass(slots=True, eq=False)
class Lease(TimedLease):
    """A lease of a store: what it pins, and the frames reserved under it (`reservations`, by
    frame). It pins a node once, whatever tier the node lies in. is_probe: a worker measures its
    link under it, so that its bytes are not counted."""

    is_probe: bool = False
    pins: dict[TreeNode, None] = field(default_factory=dict)
    reservations: dict[int, FrameReservation] = field(default_factory=dict)
    writing: dict[bytes, int] = field(default_factory=dict)  # chain hash -> frame, of reservations

    def pin_all(self, tree: PrefixTree, nodes: Iterable[TreeNode]) -> list[TreeNode]:
        """Pin nodes of the tree under this lease. Returns: those that it did not pin yet."""
        newly: list[TreeNode] = []
        for node in nodes:
            if node not in self.pins:
                self.pins[node] = None
                tree.pin(node)
                newly.append(node)
        return newly

    def add_reservation(self, reservation: FrameReservation) -> None:
        """Enter a frame that is being written under this lease."""
        self.reservations[reservation.frame] = reservation
        if reservation.chain_hash:
            self.writing[reservation.chain_hash] = reservation.frame

    def drop_reservation(self, frame: int) -> FrameReservation:
        """Take a reservation out of this lease. Returns: the reservation; the caller commits or
        frees its frame."""
        reservation = self.reservations.pop(frame)
        if reservation.chain_hash:
            del self.writing[reservation.chain_hash]
        return reservation


def _random_id() -> str:
    return secrets.token_hex(16)


Kind = TypeVar("Kind", bound=TimedLease)


class Leases(Generic[Kind]):
    """The live leases of one kind, by id and by which lapses next."""

    def __init__(
        self,
        make: Callable[[str, float], Kind],
        max_ttl_s: float,
        new_id: Callable[[], str] = _random_id,
    ) -> None:
        """Args: make: makes a lease of its id and its end. max_ttl_s: longest time for which a
        lease is given or renewed."""
        self.max_ttl_s = max_ttl_s
        self._make = make
        self._new_id = new_id
        self._leases: dict[str, Kind] = {}
        self.due: list[tuple[float, str]] = []
        """A heap of (end, lease id); an item is outdated after a renewal."""

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._leases.values())

    def create(self, now_s: float, ttl_s: float) -> Kind:
        """Make a lease for `ttl_s`, at most `max_ttl_s`."""
        lease = self.create_endless()
        self.end_within(lease, now_s, ttl_s)
        return lease

    def create_endless(self) -> Kind:
        """Make a lease that does not lapse."""
        lease = self._make(self._new_id(), math.inf)
        self._leases[lease.lease_id] = lease
        return lease

    def find(self, lease_id: str) -> Kind | None:
        """The lease with this id; None when it is over or was never made."""
        return self._leases.get(lease_id)

    def get(self, lease_id: str) -> Kind:
        """The lease with this id. Raises: LeaseLapsed when it is over or was never made."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseLapsed(f"lease {lease_id or '(empty)'}: released, lapsed or never made")
        return lease

    def renew(self, lease: Kind, now_s: float, ttl_s: float) -> None:
        """Let a lease lapse `ttl_s` from now, if that is later than its end: another holder of the
        lease may rely on the later one."""
        if now_s + min(ttl_s, self.max_ttl_s) > lease.expires_at_s:
            self.end_within(lease, now_s, ttl_s)

    def end_within(self, lease: Kind, now_s: float, ttl_s: float) -> None:
        """Let a lease lapse `ttl_s` from now, at most `max_ttl_s`, whatever its end was."""
        lease.expires_at_s = now_s + min(ttl_s, self.max_ttl_s)
        heapq.heappush(self.due, (lease.expires_at_s, lease.lease_id))

    def remove(self, lease_id: str) -> Kind | None:
        """Take a lease out of the table; the caller lets go of what it owns. Returns: None when it
        is not there."""
        return self._leases.pop(lease_id, None)

    def pop_due(self, now_s: float) -> Kind | None:
        """Take out one lease that has lapsed by `now_s`; None when there is none."""
        while self.due and self.due[0][0] <= now_s:
            expires_at_s, lease_id = heapq.heappop(self.due)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires_at_s <= expires_at_s:
                return self._leases.pop(lease_id)
        return None


class LeaseTable(Leases[Lease]):
    """The live leases of a store."""

    def __init__(self, max_ttl_s: float, new_id: Callable[[], str] = _random_id) -> None:
        super().__init__(Lease, max_ttl_s, new_id)
        self.ending: deque[Lease] = deque()
        """Leases that are over, of which blocks are still pinned: BlockStore.let_go unpins them."""
