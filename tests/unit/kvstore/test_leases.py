"""Leases end when they should, and never earlier."""

from __future__ import annotations

import math

import pytest

from kvstore import invariants
from kvstore.errors import LeaseLapsed
from kvstore.leases import LeaseTable


def test_a_lease_lapses_at_its_end_and_a_renewal_moves_it() -> None:
    table = LeaseTable(max_ttl_s=100)
    early, late = table.create(0.0, 5.0), table.create(0.0, 7.0)
    assert table.pop_due(4.9) is None
    table.renew(early, 4.0, 10.0)
    assert table.pop_due(6.0) is None
    assert table.pop_due(7.0) is late
    assert table.pop_due(13.9) is None
    assert table.pop_due(14.0) is early
    assert len(table) == 0
    invariants.run(invariants.check_leases(table))


def test_a_renewal_never_shortens() -> None:
    """The router and a worker may both renew one handle's lease."""
    table = LeaseTable(max_ttl_s=100)
    lease = table.create(0.0, 50.0)
    table.renew(lease, 1.0, 2.0)
    assert table.pop_due(49.0) is None
    invariants.run(invariants.check_leases(table))


def test_no_lease_outlives_the_limit() -> None:
    table = LeaseTable(max_ttl_s=10)
    lease = table.create(0.0, 1e9)
    assert lease.expires_at_s == 10.0
    table.renew(lease, 5.0, math.inf)
    assert lease.expires_at_s == 15.0


def test_a_hold_never_lapses() -> None:
    table = LeaseTable(max_ttl_s=10)
    hold = table.create_endless()
    assert table.pop_due(1e12) is None
    assert table.remove(hold.lease_id) is hold
    invariants.run(invariants.check_leases(table))


def test_an_unknown_lease_is_named_by_the_error() -> None:
    table = LeaseTable(max_ttl_s=10)
    with pytest.raises(LeaseLapsed, match="never made"):
        table.get("nope")
    assert table.find("nope") is None
    assert table.remove("nope") is None
