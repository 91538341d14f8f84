"""Leases: who keeps what alive, and until when.

A lease owns pins (on committed entries, tail blocks among them) and reservations (frames being
written). It ends by release or by lapsing; then all it owns is let go, so a client that dies leaks
nothing. Times are seconds on the clock of whoever calls; no clock is read here.

Holds are leases without an end, which the store takes for itself while it copies out of frames.

Plain synchronous values, one thread.
"""

from __future__ import annotations

import heapq
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.catalog import Catalog, Entry
from kvstore.errors import IntegrityError, LeaseLapsed


class Reservation(NamedTuple):
    """One frame being written at (odd) `generation`. chain_hash is empty for a tail block, whose
    label is `tail_name`; `parent` is empty at the start of a prompt."""

    frame: int
    generation: int
    attachment_id: str
    chain_hash: bytes
    parent: bytes
    tail_name: str = ""
    tenant: str = ""


@dataclass(slots=True, eq=False)
class Lease:
    """See the module. `reservations` is keyed by frame; a lease pins an entry once, wherever it
    lies. is_probe: a worker measures its link under it, so that its bytes are not counted."""

    lease_id: str
    expires_at_s: float
    is_probe: bool = False
    pins: dict[Entry, None] = field(default_factory=dict)
    reservations: dict[int, Reservation] = field(default_factory=dict)
    writing: dict[bytes, int] = field(default_factory=dict)  # chain hash -> frame, of reservations

    def pin_all(self, catalog: Catalog, entries: Iterable[Entry]) -> list[Entry]:
        """Returns: those that this lease did not pin yet."""
        newly: list[Entry] = []
        for entry in entries:
            if entry not in self.pins:
                self.pins[entry] = None
                catalog.pin(entry)
                newly.append(entry)
        return newly

    def add_reservation(self, reservation: Reservation) -> None:
        self.reservations[reservation.frame] = reservation
        if reservation.chain_hash:
            self.writing[reservation.chain_hash] = reservation.frame

    def drop_reservation(self, frame: int) -> Reservation:
        reservation = self.reservations.pop(frame)
        if reservation.chain_hash:
            del self.writing[reservation.chain_hash]
        return reservation


def _random_id() -> str:
    return secrets.token_hex(16)


class LeaseTable:
    """All live leases, found by id and by who lapses next."""

    def __init__(self, max_ttl_s: float, new_id: Callable[[], str] = _random_id) -> None:
        self.max_ttl_s = max_ttl_s
        self._new_id = new_id
        self._leases: dict[str, Lease] = {}
        self._due: list[tuple[float, str]] = []  # a heap; an item is outdated after a renewal

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
        """Never shortens: somebody else may rely on the later end."""
        expires_at_s = now_s + min(ttl_s, self.max_ttl_s)
        if expires_at_s > lease.expires_at_s:
            lease.expires_at_s = expires_at_s
            heapq.heappush(self._due, (expires_at_s, lease.lease_id))

    def remove(self, lease_id: str) -> Lease | None:
        """Take the lease out; its pins and reservations are the caller's to let go."""
        return self._leases.pop(lease_id, None)

    def pop_due(self, now_s: float) -> Lease | None:
        """Take out one lease that has lapsed by `now_s`; None when there is none."""
        while self._due and self._due[0][0] <= now_s:
            expires_at_s, lease_id = heapq.heappop(self._due)
            lease = self._leases.get(lease_id)
            if lease is not None and lease.expires_at_s <= expires_at_s:
                return self._leases.pop(lease_id)
        return None

    def check_integrity(self) -> None:
        """Every lease must be due at its own end, and hold a frame in one way only."""
        deque(self.checks(), maxlen=0)

    def checks(self) -> Iterator[None]:
        """The same in steps; the caller may do other things between two (kvstore/watch.py)."""
        due = set(self._due)
        for lease in self._leases.values():
            held = math.isinf(lease.expires_at_s)
            if not held and (lease.expires_at_s, lease.lease_id) not in due:
                raise IntegrityError(f"lease {lease.lease_id} would never lapse")
            for entry in lease.pins:
                if entry.block is not None and entry.block.frame in lease.reservations:
                    raise IntegrityError(f"lease {lease.lease_id} pins a frame that it is writing")
                yield
            writing = {r.chain_hash: f for f, r in lease.reservations.items() if r.chain_hash}
            if writing != lease.writing:
                raise IntegrityError(f"lease {lease.lease_id} miscounts what it is writing")
            yield

    def _add(self, expires_at_s: float) -> Lease:
        lease = Lease(self._new_id(), expires_at_s)
        self._leases[lease.lease_id] = lease
        if not math.isinf(expires_at_s):
            heapq.heappush(self._due, (expires_at_s, lease.lease_id))
        return lease
