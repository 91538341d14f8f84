"""Tenants' guaranteed shares of a store's places (frames, pages), and who gives way to whom.

Tenants with a share of their own are a group each; all others together are the group POOL, whose
share is what is left. While there is room, anyone takes it. When there is none, a group gives way
only beyond its own share, the one that is relatively furthest beyond it first: so no tenant within
its share ever loses a block to another (source: ours; max-min fairness with guarantees).

Conservation law of an account: the places charged to all tenants are exactly those that are taken.

The policy is a pure function. Plain synchronous values, one thread.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.errors import IntegrityError

POOL = ""
"""The group of everyone without a share of their own."""
MAX_TENANT_BYTES = 128


@dataclass(frozen=True)
class TenantShares:
    """shares: tenant -> guaranteed part of every tier, above 0; together at most 1."""

    shares: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, items: Sequence[str]) -> TenantShares:
        """From "tenant=0.25" each. Raises: ValueError saying what is wrong."""
        shares: dict[str, float] = {}
        for item in items:
            tenant, equals, text = item.rpartition("=")
            if not equals or not tenant or len(tenant.encode()) > MAX_TENANT_BYTES:
                raise ValueError(f"write each as tenant=0.25, got {item!r}")
            if tenant in shares:
                raise ValueError(f"tenant {tenant!r} is named twice")
            try:
                share = float(text)
            except ValueError:
                share = math.nan
            if not 0 < share <= 1:
                raise ValueError(f"a share is above 0 and at most 1, got {item!r}")
            shares[tenant] = share
        if sum(shares.values()) > 1 + 1e-9:
            raise ValueError(f"together at most 1, got {sum(shares.values()):g}")
        return cls(shares)

    def group(self, tenant: str) -> str:
        return tenant if tenant in self.shares else POOL

    def guaranteed(self, num_places: int) -> dict[str, int]:
        """group -> places it never loses to others; they add up to `num_places`."""
        places = {tenant: int(share * num_places) for tenant, share in self.shares.items()}
        places[POOL] = num_places - sum(places.values())
        return places


def giving_way(used: Mapping[str, int], guaranteed: Mapping[str, int], asking: str) -> list[str]:
    """The groups that may lose a place to `asking`, in the order in which they are to be tried.

    The asking group itself is always among them (its own oldest goes), others only beyond their
    guarantee. Relatively furthest beyond first; among equals others first, then by name.
    """

    def beyond(group: str) -> float:
        num_guaranteed = guaranteed.get(group, 0)
        return used[group] / num_guaranteed if num_guaranteed else math.inf

    able = [
        group
        for group, num in used.items()
        if num > 0 and (group == asking or num > guaranteed.get(group, 0))
    ]
    if len(able) < 2:
        return able
    return sorted(able, key=lambda group: (-beyond(group), group == asking, group))


@dataclass(frozen=True, slots=True)
class Usage:
    """What one tenant holds and is guaranteed, in places of every tier: a block that lies in two
    counts twice."""

    tenant: str
    num_places: int
    num_guaranteed: int


def usage(accounts: Sequence[PlaceAccount]) -> list[Usage]:
    """Of every tenant that holds something or has a share: those with a share first, then by what
    they hold."""
    held: Counter[str] = Counter()
    guaranteed: Counter[str] = Counter()
    for account in accounts:
        held.update(account.used())
        guaranteed.update({t: n for t, n in account.guaranteed.items() if t != POOL})
    rows = [
        Usage(tenant, held[tenant], guaranteed[tenant])
        for tenant in held.keys() | guaranteed.keys()
    ]
    return sorted(rows, key=lambda row: (row.tenant not in guaranteed, -row.num_places, row.tenant))


class PlaceAccount:
    """Which tenant each taken place of one tier is charged to."""

    def __init__(self, num_places: int, shares: TenantShares) -> None:
        self.num_places = num_places
        self.guaranteed = shares.guaranteed(num_places)
        self._shares = shares
        self._tenants: dict[int, str] = {}  # place -> tenant
        self._used: Counter[str] = Counter()  # by tenant
        self._used_by_group: Counter[str] = Counter()

    def take(self, place: int, tenant: str) -> None:
        if place in self._tenants:
            raise IntegrityError(f"place {place} is charged already")
        self._tenants[place] = tenant
        self._count(tenant, 1)

    def give_back(self, place: int) -> None:
        self._count(self._tenants.pop(place), -1)

    def charge_to(self, place: int, tenant: str) -> None:
        """The place turns out to be another tenant's: who was first to store the block."""
        if self._tenants[place] != tenant:
            self.give_back(place)
            self.take(place, tenant)

    def tenant_of(self, place: int) -> str:
        return self._tenants[place]

    def used(self) -> Mapping[str, int]:
        """tenant -> places, of those that have any."""
        return self._used

    def giving_way(self, tenant: str) -> list[str]:
        """The groups that may lose a place to `tenant`, first to be tried first."""
        return giving_way(self._used_by_group, self.guaranteed, self._shares.group(tenant))

    def is_below_share(self, group: str) -> bool:
        """Whether the group holds less than it is guaranteed."""
        return self._used_by_group[group] < self.guaranteed[group]

    def checks(self, num_taken: int, is_taken: Callable[[int], bool]) -> Iterator[None]:
        """In steps. num_taken: places that are not free. Raises: IntegrityError."""
        used: Counter[str] = Counter()
        for place, tenant in self._tenants.items():
            used[tenant] += 1
            if not is_taken(place):
                raise IntegrityError("a place that is free is charged to a tenant")
            yield
        if len(self._tenants) != num_taken:
            raise IntegrityError("places charged to tenants are not those that are taken")
        if used != self._used:
            raise IntegrityError("tenants' places are miscounted")
        groups: Counter[str] = Counter()
        for tenant, num_places in used.items():
            groups[self._shares.group(tenant)] += num_places
        if groups != self._used_by_group:
            raise IntegrityError("groups' places are miscounted")
        if sum(self.guaranteed.values()) != self.num_places:
            raise IntegrityError("guaranteed places do not add up")

    def _count(self, tenant: str, by: int) -> None:
        group = self._shares.group(tenant)
        for counter, key in ((self._used, tenant), (self._used_by_group, group)):
            num = counter[key] + by
            if num:
                counter[key] = num
            else:
                del counter[key]
