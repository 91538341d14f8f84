"""Tenants' guaranteed shares of a store's slots for KV blocks (frames, pages), and which tenant
loses a slot when there is no free one.

Each tenant with a share of its own is a group; all other tenants together are the group POOL, whose
share is the rest. Free slots are given to any tenant. When there is none, a group loses slots only
beyond its own share, the group that is relatively furthest beyond its share first: a tenant within
its share never loses a block to another (max-min fairness with guarantees).

Conservation law of an account: the slots charged to all tenants are exactly those that are taken.

The policy is a pure function. Plain and synchronous, one thread.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.errors import StoreIntegrityError

POOL = ""
"""The group of all tenants without a share of their own."""
MAX_TENANT_BYTES = 128
"""Longest name of a tenant."""


@dataclass(frozen=True)
class TenantShares:
    """Tenants' guaranteed parts of every tier. shares: tenant -> its part, above 0; together at
    most 1."""

    shares: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, items: Sequence[str]) -> TenantShares:
        """Parse items such as "tenant=0.25". Raises: ValueError saying what is wrong."""
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
        """The group that a tenant's slots count in: its own, or POOL."""
        return tenant if tenant in self.shares else POOL

    def guaranteed(self, num_slots: int) -> dict[str, int]:
        """The number of slots that each group never loses to others; together they are
        `num_slots`."""
        slots = {tenant: int(share * num_slots) for tenant, share in self.shares.items()}
        slots[POOL] = num_slots - sum(slots.values())
        return slots


def groups_to_evict(
    used: Mapping[str, int], guaranteed: Mapping[str, int], asking: str
) -> list[str]:
    """The groups that may lose a slot to `asking`, in the order in which they are to be tried.

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
class TenantSlots:
    """The slots that one tenant holds and is guaranteed, of all tiers together: a block that lies
    in a frame and a page counts twice."""

    tenant: str
    num_slots: int
    num_guaranteed: int


def usage(accounts: Sequence[SlotAccount]) -> list[TenantSlots]:
    """The slots of each tenant that holds something or has a share: those with a share first, then
    by the number of slots."""
    held: Counter[str] = Counter()
    guaranteed: Counter[str] = Counter()
    for account in accounts:
        held.update(account.used)
        guaranteed.update({t: n for t, n in account.guaranteed.items() if t != POOL})
    rows = [
        TenantSlots(tenant, held[tenant], guaranteed[tenant])
        for tenant in held.keys() | guaranteed.keys()
    ]
    return sorted(rows, key=lambda row: (row.tenant not in guaranteed, -row.num_slots, row.tenant))


class SlotAccount:
    """Charges each taken slot of one tier to a tenant."""

    def __init__(self, num_slots: int, shares: TenantShares) -> None:
        self.num_slots = num_slots
        self.guaranteed = shares.guaranteed(num_slots)
        self.shares = shares
        self.tenants: list[str | None] = [None] * num_slots
        """The tenant charged for each slot; None: it is free. A list, because a dict of a million
        slots that grows stops the loop for 40 ms."""
        self.used: Counter[str] = Counter()
        """The number of slots charged to each tenant that has any."""
        self.used_by_group: Counter[str] = Counter()
        """The number of slots charged to each group that has any."""

    def take(self, slot: int, tenant: str) -> None:
        """Charge a taken slot to a tenant. Raises: IntegrityError where it is charged already."""
        if self.tenants[slot] is not None:
            raise StoreIntegrityError(f"slot {slot} is charged already")
        self.tenants[slot] = tenant
        self._count(tenant, 1)

    def release(self, slot: int) -> None:
        """End the charge for a slot that is free again."""
        self._count(self.tenant_of(slot), -1)
        self.tenants[slot] = None

    def transfer_to(self, slot: int, tenant: str) -> None:
        """Charge a slot to another tenant: the one that stored the block first."""
        if self.tenants[slot] != tenant:
            self.release(slot)
            self.take(slot, tenant)

    def tenant_of(self, slot: int) -> str:
        """The tenant charged for a slot. Raises: IntegrityError where it is free."""
        tenant = self.tenants[slot]
        if tenant is None:
            raise StoreIntegrityError(f"slot {slot} is charged to no tenant")
        return tenant

    def groups_to_evict(self, tenant: str) -> list[str]:
        """The groups that may lose a slot to `tenant`, in the order in which they are tried."""
        return groups_to_evict(self.used_by_group, self.guaranteed, self.shares.group(tenant))

    def is_below_share(self, group: str) -> bool:
        """Whether a group holds fewer slots than it is guaranteed."""
        return self.used_by_group[group] < self.guaranteed[group]

    def _count(self, tenant: str, by: int) -> None:
        group = self.shares.group(tenant)
        for counter, key in ((self.used, tenant), (self.used_by_group, group)):
            num = counter[key] + by
            if num:
                counter[key] = num
            else:
                del counter[key]
