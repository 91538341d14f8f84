"""What is present is prefix-closed, in memory and on disk; what was used last goes last."""

from __future__ import annotations

import sys
from itertools import chain

import pytest

from kvstore import invariants
from kvstore.block_changes import ChangeLog
from kvstore.block_refs import Block, Page
from kvstore.errors import StoreIntegrityError
from kvstore.prefix_tree import PrefixTree, TreeNode
from kvstore.tenant_shares import POOL, TenantShares


def _tree(changes: ChangeLog | None = None) -> PrefixTree:
    return PrefixTree(TenantShares(), changes)


def _hash(name: str) -> bytes:
    return name.encode().ljust(16, b"-")


def _add(tree: PrefixTree, name: str, parent: TreeNode | None) -> TreeNode:
    frame = len(tree)
    return tree.insert(_hash(name), parent, block=Block(_hash(name), frame, 2, 0, 16))


def _chain(tree: PrefixTree, name: str, length: int) -> list[TreeNode]:
    entries: list[TreeNode] = []
    for i in range(length):
        entries.append(_add(tree, f"{name}{i}", entries[-1] if entries else None))
    return entries


def test_an_entry_needs_its_parent_and_comes_once() -> None:
    tree = _tree()
    a = _add(tree, "a", None)
    with pytest.raises(StoreIntegrityError):
        _add(tree, "a", None)
    tree.remove(a)
    with pytest.raises(StoreIntegrityError):
        _add(tree, "child", a)
    invariants.run(invariants.check_tree(tree))


def test_only_leaves_without_a_page_can_be_removed() -> None:
    tree = _tree()
    above, below = _chain(tree, "c", 2)
    with pytest.raises(StoreIntegrityError):
        tree.remove(above)
    tree.set_page(above, Page(0, 0, 16))
    tree.remove(below)
    with pytest.raises(StoreIntegrityError):
        tree.remove(above)
    tree.set_page(above, None)
    tree.remove(above)
    invariants.run(invariants.check_tree(tree))


def test_the_file_tier_is_prefix_closed_by_itself() -> None:
    tree = _tree()
    above, below = _chain(tree, "c", 2)
    with pytest.raises(StoreIntegrityError):
        tree.set_page(below, Page(0, 0, 16))
    tree.set_page(above, Page(0, 0, 16))
    tree.set_page(below, Page(1, 0, 16))
    invariants.run(invariants.check_tree(tree))
    assert not above.may_leave_page and below.may_leave_page
    assert above.is_clean  # its children do not matter: it stays present


def test_what_lies_in_a_page_only_keeps_its_prefix_and_its_pins() -> None:
    tree = _tree()
    above, below = _chain(tree, "c", 2)
    tree.set_page(above, Page(0, 0, 16))
    tree.set_block(above, None)
    assert not above.may_leave_page  # `below` needs it to be present
    tree.remove(below)
    assert above.may_leave_page
    tree.pin(above)
    assert not above.may_leave_page


def test_all_below_comes_before_what_it_is_below_of() -> None:
    tree = _tree()
    trunk = _chain(tree, "t", 3)
    branches = [_add(tree, f"b{at}", trunk[1]) for at in range(3)]
    other = _add(tree, "o", None)
    assert set(trunk[1].children()) == {trunk[2], *branches}
    tree.remove(branches[1])  # from the middle of its parent's children
    invariants.run(invariants.check_tree(tree))
    gone = []
    for node in tree.leaves_first(trunk[1]):
        gone.append(node)
        tree.remove(node)
        invariants.run(invariants.check_tree(tree))
    assert set(gone) == {trunk[1], trunk[2], branches[0], branches[2]} and gone[-1] is trunk[1]
    assert set(tree) == {trunk[0], other}
    assert list(tree.leaves_first(other)) == [other]


def test_a_removed_block_is_freed_without_the_garbage_collector() -> None:
    """A store hides its blocks from it."""
    tree = _tree()
    trunk = _chain(tree, "t", 2)
    left = [_add(tree, f"b{at}", trunk[1]) for at in range(3)]
    for at in (1, 1, 0):
        node = left.pop(at)
        tree.remove(node)
        tree.leaf_order[POOL].heap.clear()
        assert sys.getrefcount(node) == 2  # by its name here and by the call: no other block


def test_unpinning_once_too_often_is_an_error() -> None:
    tree = _tree()
    a = _add(tree, "a", None)
    with pytest.raises(StoreIntegrityError):
        tree.unpin(a)


def test_changes_are_logged_in_order_until_a_snapshot() -> None:
    log = ChangeLog()
    tree = _tree(log)
    a, b = _chain(tree, "c", 2)
    tree.remove(b)
    tree.remove(a)
    names = [_hash("c0"), _hash("c1")]
    logged = [(change.is_present, change.chain_hash) for change in log.take(9)]
    assert logged == [(True, names[0]), (True, names[1]), (False, names[1]), (False, names[0])]
    again = _chain(tree, "c", 2)
    assert sorted(chain(*tree.snapshot(1))) == names and len(log) == 0
    tree.remove(again[1])
    assert [change.is_present for change in log.take(9)] == [False]


class _Builder:
    """A tree without shares: all blocks are candidates of one group."""

    def __init__(self) -> None:
        self.tree = _tree()
        self.order = self.tree.leaf_order[POOL]

    def add(self, name: str, parent: TreeNode | None) -> TreeNode:
        chain_hash = name.encode().ljust(16, b"-")
        block = Block(chain_hash, len(self.tree), 2, 0, 16)
        return self.tree.insert(chain_hash, parent, block=block)

    def chain(self, name: str, length: int) -> list[TreeNode]:
        entries: list[TreeNode] = []
        for i in range(length):
            entries.append(self.add(f"{name}{i}", entries[-1] if entries else None))
        return entries

    def evict_all(self) -> list[str]:
        names: list[str] = []
        while (entry := self.order.first()) is not None:
            assert self.order.first() is entry  # looking changes nothing
            names.append(entry.chain_hash.rstrip(b"-").decode())
            self.tree.remove(entry)
            self.tree.set_block(entry, None)
            self.check()
        return names

    def check(self) -> None:
        invariants.run(invariants.check_tree(self.tree))
        orders = self.tree.leaf_order
        invariants.run(invariants.check_order(self.tree, orders, 1000, invariants.FRAME))


def test_the_oldest_chain_goes_first_and_each_chain_tail_first() -> None:
    build = _Builder()
    a, b = build.chain("a", 3), build.chain("b", 2)
    build.tree.touch(b)
    build.tree.touch(a)  # a was used last
    assert build.evict_all() == ["b1", "b0", "a2", "a1", "a0"]


def test_equally_old_branches_go_deepest_first() -> None:
    build = _Builder()
    trunk = build.chain("t", 2)
    long = build.add("l", trunk[-1])
    leaf = build.add("x", long)
    short = build.add("s", trunk[-1])
    build.tree.touch([*trunk, long, leaf, short])
    order = build.evict_all()
    assert (order[0], set(order[1:3]), order[3:]) == ("x", {"l", "s"}, ["t1", "t0"])


def test_pinned_entries_and_their_ancestors_stay() -> None:
    build = _Builder()
    chain = build.chain("c", 4)
    build.tree.pin(chain[1])
    assert build.evict_all() == ["c3", "c2"]
    assert build.tree.longest_prefix([e.chain_hash for e in chain]) == chain[:2]
    build.tree.unpin(chain[1])
    assert build.evict_all() == ["c1", "c0"]


def test_the_heap_stays_small_under_use() -> None:
    """10,000 uses of 100 blocks must not leave 10,000 items behind."""
    build = _Builder()
    chain = build.chain("c", 100)
    for _ in range(10_000):
        build.tree.touch(chain[-1:])
    assert len(build.order.heap) <= 100
    build.check()
    assert build.evict_all() == [f"c{i}" for i in reversed(range(100))]


def test_blocks_that_left_stay_in_no_order() -> None:
    """Each was a leaf that could be evicted once, then lay in a page only, then left."""
    tree = _tree()
    tree.has_pages = True
    for index in range(1000):
        node = _add(tree, f"b{index}", None)
        tree.pin(node)
        tree.unpin(node)
        tree.set_page(node, Page(0, 0, 16))
        tree.set_block(node, None)
        tree.set_page(node, None)
        tree.remove(node)
    orders = [tree.clean_order, tree.leaf_order, tree.page_order, tree.demotion_order]
    assert max(len(order.heap) for each in orders for order in each.values()) <= 4
