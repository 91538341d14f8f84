"""What may not happen to a block while it is on its way between a frame and a page."""

from __future__ import annotations

import pytest

from kvstore import invariants
from kvstore.block_store import BlockStore, StoreLimits, WrittenFrame
from kvstore.prefix_tree import TreeNode
from kvstore.tenant_shares import TenantShares


def _hash(prompt: int, index: int, tenant: str = "") -> bytes:
    return tenant.encode() + bytes([prompt, index]).rjust(16 - len(tenant), b"h")


class _Bench:
    """A store over a file tier, whose bytes nobody moves."""

    def __init__(
        self, num_frames: int = 4, num_pages: int = 4, shares: TenantShares | None = None
    ) -> None:
        self.store = BlockStore(num_frames, 100, StoreLimits(shares=shares or TenantShares()))
        self.store.table.open_pages(num_pages, [])
        self.worker = self.store.attach("w", b"1", "grpc", False, 0.0).attachment_id

    def put(self, prompt: int, length: int, tenant: str = "") -> list[TreeNode]:
        hashes = [_hash(prompt, i, tenant) for i in range(length)]
        lease_id, answers, _ = self.store.reserve(
            self.worker, b"", hashes, tenant=tenant, ttl_s=9.0, now_s=0.0
        )
        written = [WrittenFrame(a.frame, a.generation, 7, 16) for a in answers if a.frame >= 0]
        self.store.commit(self.worker, lease_id, written, 0.0)
        self.store.release([lease_id], now_s=0.0)
        invariants.check(self.store)
        return self.store.tree.longest_prefix(hashes)

    def demote_all(self) -> None:
        while (demotion := self.store.table.begin_demotion(8)) is not None:
            self.store.table.end_demotion(demotion, [True] * len(demotion.writes))
            invariants.check(self.store)

    def in_page_only(self, prompt: int, length: int) -> list[TreeNode]:
        nodes = self.put(prompt, length)
        self.demote_all()
        for node in nodes:
            assert node.is_clean
        self.put(99, 4)  # takes their frames; nothing of it can be demoted below
        assert all(node.block is None for node in nodes)
        return nodes


def test_a_block_dropped_while_it_is_written_gets_no_page() -> None:
    bench = _Bench()
    above, below = bench.put(0, 2)
    demotion = bench.store.table.begin_demotion(8)
    assert demotion is not None and [w.node for w in demotion.writes] == [above, below]
    assert above.block is not None
    bench.store.drop([above.block])
    invariants.check(bench.store)
    bench.store.table.end_demotion(demotion, [True, True])
    invariants.check(bench.store)
    assert above.page is None and bench.store.table.pages.num_taken == 0


def test_a_child_gets_no_page_when_its_parents_write_failed() -> None:
    bench = _Bench()
    above, below = bench.put(0, 2)
    demotion = bench.store.table.begin_demotion(8)
    assert demotion is not None
    bench.store.table.end_demotion(demotion, [False, True])
    invariants.check(bench.store)
    assert (above.page, below.page) == (None, None)


def test_the_prefix_of_a_block_does_not_give_way_to_it() -> None:
    """One page, which the parent has: the child stays in memory."""
    bench = _Bench(num_pages=1)
    above, below = bench.put(0, 2)
    bench.demote_all()
    assert above.page is not None and below.page is None
    bench.store.tree.touch([below])
    assert bench.store.table.begin_demotion(8) is None
    assert above.page is not None and above.num_page_uses == 0
    invariants.check(bench.store)


def test_a_pinned_block_in_a_page_only_does_not_give_way() -> None:
    bench = _Bench(num_pages=1)
    (node,) = bench.in_page_only(0, 1)
    lease = bench.store.match([_hash(0, 0)], pin=True, ttl_s=9.0, now_s=0.0).lease_id
    assert bench.store.table.begin_demotion(8) is None
    assert node.page is not None and bench.store.tree.is_present(node)
    bench.store.release([lease], now_s=0.0)
    bench.store.tree.touch(bench.store.tree.longest_prefix([_hash(99, 0)]))
    demotion = bench.store.table.begin_demotion(8)
    assert demotion is not None and not bench.store.tree.is_present(node)
    bench.store.table.end_demotion(demotion, [True])
    invariants.check(bench.store)


@pytest.mark.parametrize("is_good", [True, False])
def test_a_block_dropped_while_it_is_read_leaves_its_frame_free(is_good: bool) -> None:
    bench = _Bench()
    above, below = bench.in_page_only(0, 2)
    promotion = bench.store.table.begin_promotion(below)
    assert promotion is not None
    bench.store.table.remove_subtrees([above])
    invariants.check(bench.store)
    assert bench.store.table.end_promotion(promotion, is_good) == 0
    invariants.check(bench.store)
    assert below.block is None and bench.store.table.num_promoted == 0
    assert bench.store.table.num_pages_bad == 0  # its page was somebody else's by then


def test_whoever_stores_a_block_while_it_is_read_wins() -> None:
    bench = _Bench()
    (node,) = bench.in_page_only(0, 1)
    promotion = bench.store.table.begin_promotion(node)
    assert promotion is not None
    bench.put(0, 1)
    block = node.block
    assert block is not None and block.frame != promotion.frame
    assert bench.store.table.end_promotion(promotion, True) == 0
    invariants.check(bench.store)
    assert node.block is block


def test_a_bad_page_takes_all_below_along() -> None:
    bench = _Bench()
    above, below = bench.in_page_only(0, 2)
    promotion = bench.store.table.begin_promotion(above)
    assert promotion is not None
    assert bench.store.table.end_promotion(promotion, False) == 2
    invariants.check(bench.store)
    assert bench.store.table.num_pages_bad == 1
    assert not bench.store.tree.is_present(below)


def test_two_tenants_beyond_their_shares_do_not_take_pages_from_each_other_for_ever() -> None:
    """A file tier smaller than what memory would have: once the newest lie in it, nothing moves."""
    shares = TenantShares.parse(["a=0.3", "b=0.3", "c=0.4"])
    bench = _Bench(num_frames=40, num_pages=10, shares=shares)
    for prompt in range(15):
        for tenant in ("a", "b"):
            bench.put(prompt, 1, tenant)
    num_writes = 0
    while (demotion := bench.store.table.begin_demotion(8)) is not None:
        bench.store.table.end_demotion(demotion, [True] * len(demotion.writes))
        invariants.check(bench.store)
        num_writes += len(demotion.writes)
        assert num_writes <= 30  # each block once
    used = bench.store.table.page_account.used
    assert min(used["a"], used["b"]) >= 3 and used["a"] + used["b"] == 10
    bench.put(20, 4, "c")  # who is below its share takes pages from both, whatever is older
    while (demotion := bench.store.table.begin_demotion(8)) is not None:
        bench.store.table.end_demotion(demotion, [True] * len(demotion.writes))
        num_writes += len(demotion.writes)
        assert num_writes <= 70
    assert bench.store.table.page_account.used == {"a": 3, "b": 3, "c": 4}
