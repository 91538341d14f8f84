"""What may not happen to a block while it is on its way between a frame and a page."""

from __future__ import annotations

import pytest

from kvstore.prefix_tree import TreeNode
from kvstore.tenant_shares import TenantShares
from tests.unit.kvstore.store_driver import StoreBench, hashes_of


def _in_page_only(bench: StoreBench, prompt: int, length: int) -> list[TreeNode]:
    """In a store of four frames."""
    nodes = bench.put_prompt(prompt, length)
    bench.demote_all()
    assert all(node.is_clean for node in nodes)
    bench.put_prompt(99, 4)  # takes their frames; nothing of it can be demoted below
    assert all(node.block is None for node in nodes)
    return nodes


def test_a_block_dropped_while_it_is_written_gets_no_page() -> None:
    bench = StoreBench(4, 4)
    above, below = bench.put_prompt(0, 2)
    demotion = bench.begin_demotion()
    assert [w.node for w in demotion.writes] == [above, below]
    assert above.block is not None
    bench.store.drop([above.block])
    bench.check()
    bench.end_demotion(demotion, [True, True])
    assert above.page is None and bench.table.pages.num_taken == 0


def test_a_child_gets_no_page_when_its_parents_write_failed() -> None:
    bench = StoreBench(4, 4)
    above, below = bench.put_prompt(0, 2)
    demotion = bench.begin_demotion()
    bench.end_demotion(demotion, [False, True])
    assert (above.page, below.page) == (None, None)


def test_the_prefix_of_a_block_does_not_give_way_to_it() -> None:
    """One page, which the parent has: the child stays in memory."""
    bench = StoreBench(4, 1)
    above, below = bench.put_prompt(0, 2)
    bench.demote_all()
    assert above.page is not None and below.page is None
    bench.store.tree.touch([below])
    assert bench.table.begin_demotion(8) is None
    assert above.page is not None and above.num_page_uses == 0
    bench.check()


def test_a_pinned_block_in_a_page_only_does_not_give_way() -> None:
    bench = StoreBench(4, 1)
    (node,) = _in_page_only(bench, 0, 1)
    lease = bench.store.match(hashes_of(0, 1), pin=True, ttl_s=9.0, now_s=0.0).lease_id
    assert bench.table.begin_demotion(8) is None
    assert node.page is not None and bench.store.tree.is_present(node)
    bench.store.release([lease], now_s=0.0)
    bench.store.tree.touch(bench.store.tree.longest_prefix(hashes_of(99, 1)))
    demotion = bench.begin_demotion()
    assert not bench.store.tree.is_present(node)
    bench.end_demotion(demotion, [True])


@pytest.mark.parametrize("is_good", [True, False])
def test_a_block_dropped_while_it_is_read_leaves_its_frame_free(is_good: bool) -> None:
    bench = StoreBench(4, 4)
    above, below = _in_page_only(bench, 0, 2)
    promotion = bench.begin_promotion(below)
    bench.table.remove_subtrees([above])
    bench.check()
    assert bench.end_promotion(promotion, is_good) == 0
    assert below.block is None and bench.table.num_promoted == 0
    assert bench.table.num_pages_bad == 0  # its page was somebody else's by then


def test_whoever_stores_a_block_while_it_is_read_wins() -> None:
    bench = StoreBench(4, 4)
    (node,) = _in_page_only(bench, 0, 1)
    promotion = bench.begin_promotion(node)
    bench.put_prompt(0, 1)
    block = node.block
    assert block is not None and block.frame != promotion.frame
    assert bench.end_promotion(promotion, True) == 0
    assert node.block is block


def test_a_bad_page_takes_all_below_along() -> None:
    bench = StoreBench(4, 4)
    above, below = _in_page_only(bench, 0, 2)
    promotion = bench.begin_promotion(above)
    assert bench.end_promotion(promotion, False) == 2
    assert bench.table.num_pages_bad == 1
    assert not bench.store.tree.is_present(below)


def test_two_tenants_beyond_their_shares_do_not_take_pages_from_each_other_for_ever() -> None:
    """A file tier smaller than what memory would have: once the newest lie in it, nothing moves."""
    shares = TenantShares.parse(["a=0.3", "b=0.3", "c=0.4"])
    bench = StoreBench(40, 10, shares=shares)
    for prompt in range(15):
        for tenant in ("a", "b"):
            bench.put_prompt(prompt, 1, tenant)
    bench.demote_all(30)  # each block once
    used = bench.table.page_account.used
    assert min(used["a"], used["b"]) >= 3 and used["a"] + used["b"] == 10
    bench.put_prompt(20, 4, "c")  # who is below its share takes pages from both, whatever is older
    bench.demote_all(40)
    assert bench.table.page_account.used == {"a": 3, "b": 3, "c": 4}
