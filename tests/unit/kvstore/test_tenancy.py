"""Tenants' shares: the policy, the account, and what it means for a store."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvstore import invariants
from kvstore.block_changes import ChangeLog
from kvstore.block_store import BlockStore, StoreLimits, WrittenFrame
from kvstore.errors import StoreIntegrityError
from kvstore.slot_pool import SlotPool
from kvstore.tenant_shares import POOL, SlotAccount, TenantShares, groups_to_evict, usage
from tests.conftest import examples

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


class _Bench:
    """A store of 8 frames, and who holds which."""

    def __init__(self) -> None:
        self.log = ChangeLog()
        self.store = BlockStore(8, 100, StoreLimits(shares=SHARES), changes=self.log)
        self.worker = self.store.attach("w", b"1", "grpc", False, 0.0).attachment_id

    def put(self, tenant: str, prompt: int, length: int) -> int:
        """Returns: how many blocks had room."""
        hashes = [f"{tenant}{prompt:03}{i:03}".ljust(16).encode() for i in range(length)]
        lease_id, answers, _ = self.store.reserve(
            self.worker, b"", hashes, tenant=tenant, ttl_s=10.0, now_s=0.0
        )
        written = [WrittenFrame(a.frame, a.generation, 0, 16) for a in answers if a.frame >= 0]
        self.store.commit(self.worker, lease_id, written, 0.0)
        self.store.release([lease_id], now_s=0.0)
        invariants.check(self.store)
        return sum(answer.has_room for answer in answers)

    def lost(self) -> list[bytes]:
        """What left since this was last asked, in order."""
        return [each.chain_hash for each in self.log.take(9999) if not each.is_present]

    def used(self, tenant: str) -> int:
        return self.store.table.frame_account.used.get(tenant, 0)


def test_a_noisy_tenant_evicts_itself() -> None:
    bench = _Bench()
    bench.put("a", 0, 4)
    bench.put("b", 0, 2)
    for prompt in range(50):
        assert bench.put("c", prompt, 2) == 2
    assert all(chain_hash.startswith(b"c") for chain_hash in bench.lost())
    assert (bench.used("a"), bench.used("b"), bench.used("c")) == (4, 2, 2)


def test_room_that_nobody_needs_is_anyones_until_its_owner_comes() -> None:
    bench = _Bench()
    for prompt in range(4):
        bench.put("d", prompt, 2)
    assert bench.used("d") == 8
    assert bench.put("a", 0, 4) == 4
    assert bench.lost() == [f"d{p:03}{i:03}".ljust(16).encode() for p in (0, 1) for i in (1, 0)]


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
    bench = _Bench()
    guaranteed = {"a": 4, "b": 2, POOL: 2}
    leases: list[str] = []
    for tenant, prompt, length, is_match in puts:
        group = SHARES.group(tenant)
        used = {t: bench.used(t) for t in TENANTS}
        pool = used["c"] + used["d"]
        before = {"a": used["a"], "b": used["b"], POOL: pool}
        bench.lost()
        if is_match:  # some leases stay, so that the oldest cannot always go
            hashes = [f"{tenant}{prompt:03}{i:03}".ljust(16).encode() for i in range(length)]
            leases.append(bench.store.match(hashes, pin=True, ttl_s=9.0, now_s=0.0).lease_id)
            leases[:-2], gone = [], leases[:-2]
            bench.store.release([lease for lease in gone if lease], now_s=0.0)
        else:
            bench.put(tenant, prompt, length)
        losses = {g: 0 for g in before}
        for chain_hash in bench.lost():
            losses[SHARES.group(chain_hash[:1].decode())] += 1
        for other, num_lost in losses.items():
            if other != group and num_lost:
                assert before[other] - num_lost >= guaranteed[other]
