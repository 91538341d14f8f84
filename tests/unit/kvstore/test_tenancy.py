"""Tenants' shares: the policy, the account, and what it means for a store."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvstore import invariants
from kvstore.errors import StoreIntegrityError
from kvstore.slot_pool import SlotPool
from kvstore.tenant_shares import POOL, SlotAccount, TenantShares, groups_to_evict, usage
from tests.conftest import examples
from tests.unit.kvstore.store_driver import StoreBench, hashes_of

TENANTS = ["a", "b", "c", "d"]  # c and d have no share: they are the pool
SHARES = TenantShares.parse(["a=0.5", "b=0.25"])


def test_shares_are_read_and_refused_by_what_is_wrong() -> None:
    assert TenantShares.parse(["x=y=0.5"]).shares == {"x=y": 0.5}
    for items, why in (
        (["a"], "write each as"),
        (["=0.1"], "write each as"),
        (["a=x"], "above 0"),
        (["a=0"], "above 0"),
        (["a=nan"], "above 0"),
        (["a=1.5"], "above 0"),
        (["a=0.5", "a=0.1"], "twice"),
        (["a=0.5", "b=0.6"], "at most 1"),
    ):
        with pytest.raises(ValueError, match=why):
            TenantShares.parse(items)


def test_what_is_not_promised_is_the_pools() -> None:
    assert SHARES.guaranteed(10) == {"a": 5, "b": 2, POOL: 3}
    assert TenantShares().guaranteed(10) == {POOL: 10}
    assert TenantShares.parse(["a=1"]).guaranteed(3) == {"a": 3, POOL: 0}


def test_who_is_furthest_beyond_gives_way_first() -> None:
    guaranteed = {"a": 50, "b": 25, POOL: 25}
    assert groups_to_evict({"a": 60, "b": 40}, guaranteed, POOL) == ["b", "a"]
    assert groups_to_evict({"a": 50, "b": 25, POOL: 25}, guaranteed, "b") == ["b"]
    assert groups_to_evict({"a": 50, "b": 20, POOL: 30}, guaranteed, "b") == [POOL, "b"]
    assert groups_to_evict({POOL: 1}, {POOL: 0, "a": 3}, "a") == [POOL]


@given(
    used=st.dictionaries(st.sampled_from(["a", "b", POOL]), st.integers(0, 40)),
    asking=st.sampled_from(["a", "b", POOL]),
)
def test_nobody_within_its_guarantee_gives_way_to_others(used: dict[str, int], asking: str) -> None:
    guaranteed = SHARES.guaranteed(40)
    groups = groups_to_evict(used, guaranteed, asking)
    assert all(used[group] > 0 for group in groups)
    assert all(used[group] > guaranteed[group] for group in groups if group != asking)
    # When everything is taken and the asking group has less than its share, somebody gives way.
    if sum(used.values()) >= 40 and used.get(asking, 0) < guaranteed[asking]:
        assert [group for group in groups if group != asking]


def test_the_account_notices_what_does_not_add_up() -> None:
    account = SlotAccount(8, SHARES)
    pool = SlotPool(8)
    for tenant in ("a", "c"):
        slot = pool.take()
        assert slot is not None
        account.take(slot, tenant)
    account.transfer_to(1, "a")
    invariants.run(invariants.check_account(account, pool))
    assert account.used == {"a": 2}
    with pytest.raises(StoreIntegrityError):
        account.take(1, "b")
    pool.free(1)
    with pytest.raises(StoreIntegrityError):
        invariants.run(invariants.check_account(account, pool))


def test_usage_names_those_with_a_share_even_if_they_hold_nothing() -> None:
    account = SlotAccount(8, SHARES)
    for slot, tenant in enumerate(["c", "c", "d", "b"]):
        account.take(slot, tenant)
    rows = [(row.tenant, row.num_slots, row.num_guaranteed) for row in usage([account, account])]
    assert rows == [("b", 2, 4), ("a", 0, 8), ("c", 4, 0), ("d", 2, 0)]


def _lost(bench: StoreBench) -> list[bytes]:
    """What left since this was last asked, in order."""
    return [chain_hash for is_present, chain_hash in bench.changes() if not is_present]


def _used(bench: StoreBench, *tenants: str) -> list[int]:
    return [bench.table.frame_account.used.get(tenant, 0) for tenant in tenants]


def test_a_noisy_tenant_evicts_itself() -> None:
    bench = StoreBench(shares=SHARES)
    bench.put_prompt(0, 4, "a")
    bench.put_prompt(0, 2, "b")
    for prompt in range(50):
        assert len(bench.put_prompt(prompt, 2, "c")) == 2
    assert all(chain_hash.startswith(b"c") for chain_hash in _lost(bench))
    assert _used(bench, "a", "b", "c") == [4, 2, 2]


def test_room_that_nobody_needs_is_anyones_until_its_owner_comes() -> None:
    bench = StoreBench(shares=SHARES)
    for prompt in range(4):
        bench.put_prompt(prompt, 2, "d")
    assert _used(bench, "d") == [8]
    assert len(bench.put_prompt(0, 4, "a")) == 4
    assert _lost(bench) == [hashes_of(p, 2, "d")[i] for p in (0, 1) for i in (1, 0)]


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.tuples(st.sampled_from(TENANTS), st.integers(0, 5), st.integers(1, 4), st.booleans()),
        max_size=40,
    )
)
def test_no_tenant_within_its_guarantee_ever_loses_a_block_to_another(
    puts: list[tuple[str, int, int, bool]],
) -> None:
    bench = StoreBench(shares=SHARES)
    guaranteed = {"a": 4, "b": 2, POOL: 2}
    leases: list[str] = []
    for tenant, prompt, length, is_match in puts:
        group = SHARES.group(tenant)
        before = dict.fromkeys(guaranteed, 0)
        for each, num_used in zip(TENANTS, _used(bench, *TENANTS), strict=True):
            before[SHARES.group(each)] += num_used
        _lost(bench)
        if is_match:  # some leases stay, so that the oldest cannot always go
            hashes = hashes_of(prompt, length, tenant)
            leases.append(bench.store.match(hashes, pin=True, ttl_s=9.0, now_s=0.0).lease_id)
            leases[:-2], gone = [], leases[:-2]
            bench.store.release([lease for lease in gone if lease], now_s=0.0)
        else:
            bench.put_prompt(prompt, length, tenant)
        losses = Counter(SHARES.group(chain_hash[:1].decode()) for chain_hash in _lost(bench))
        for other, num_lost in losses.items():
            if other != group:
                assert before[other] - num_lost >= guaranteed[other]
