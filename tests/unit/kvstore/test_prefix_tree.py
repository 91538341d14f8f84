"""What is present is prefix-closed, in memory and on disk; what was used last goes last. A
ShardedDict is a dict, and can be listed in pieces while it changes."""

from __future__ import annotations

import random
import sys
from itertools import chain

import pytest

from kvstore import invariants
from kvstore.block_changes import ChangeLog
from kvstore.block_refs import Block, Page
from kvstore.errors import StoreIntegrityError
from kvstore.prefix_tree import PrefixTree, ShardedDict, TreeNode
from kvstore.tenant_shares import POOL, TenantShares


class _Builder:
    """A tree without shares: all blocks are candidates of one group."""

    def __init__(self, changes: ChangeLog | None = None) -> None:
        self.tree = PrefixTree(TenantShares(), changes)
        self.order = self.tree.leaf_order[POOL]

    def add(self, name: str, parent: TreeNode | None = None) -> TreeNode:
        block = Block(_hash(name), len(self.tree), 2, 0, 16)
        return self.tree.insert(_hash(name), parent, block=block)

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


def _hash(name: str) -> bytes:
    return name.encode().ljust(16, b"-")


@pytest.fixture
def build() -> _Builder:
    return _Builder()


@pytest.fixture
def tree(build: _Builder) -> PrefixTree:
    return build.tree


def test_an_entry_needs_its_parent_and_comes_once(build: _Builder, tree: PrefixTree) -> None:
    a = build.add("a")
    with pytest.raises(StoreIntegrityError):
        build.add("a")
    tree.remove(a)
    with pytest.raises(StoreIntegrityError):
        build.add("child", a)
    build.check()


def test_only_leaves_without_a_page_can_be_removed(build: _Builder, tree: PrefixTree) -> None:
    above, below = build.chain("c", 2)
    with pytest.raises(StoreIntegrityError):
        tree.remove(above)
    tree.set_page(above, Page(0, 0, 16))
    tree.remove(below)
    with pytest.raises(StoreIntegrityError):
        tree.remove(above)
    tree.set_page(above, None)
    tree.remove(above)
    build.check()


def test_the_file_tier_is_prefix_closed_by_itself(build: _Builder, tree: PrefixTree) -> None:
    above, below = build.chain("c", 2)
    with pytest.raises(StoreIntegrityError):
        tree.set_page(below, Page(0, 0, 16))
    tree.set_page(above, Page(0, 0, 16))
    tree.set_page(below, Page(1, 0, 16))
    build.check()
    assert not above.may_leave_page and below.may_leave_page
    assert above.is_clean  # its children do not matter: it stays present


def test_what_lies_in_a_page_only_keeps_its_prefix_and_its_pins(
    build: _Builder, tree: PrefixTree
) -> None:
    above, below = build.chain("c", 2)
    tree.set_page(above, Page(0, 0, 16))
    tree.set_block(above, None)
    assert not above.may_leave_page  # `below` needs it to be present
    tree.remove(below)
    assert above.may_leave_page
    tree.pin(above)
    assert not above.may_leave_page


def test_all_below_comes_before_what_it_is_below_of(build: _Builder, tree: PrefixTree) -> None:
    trunk = build.chain("t", 3)
    branches = [build.add(f"b{at}", trunk[1]) for at in range(3)]
    other = build.add("o")
    assert set(trunk[1].children()) == {trunk[2], *branches}
    tree.remove(branches[1])  # from the middle of its parent's children
    build.check()
    gone = []
    for node in tree.leaves_first(trunk[1]):
        gone.append(node)
        tree.remove(node)
        build.check()
    assert set(gone) == {trunk[1], trunk[2], branches[0], branches[2]} and gone[-1] is trunk[1]
    assert set(tree) == {trunk[0], other}
    assert list(tree.leaves_first(other)) == [other]


def test_a_removed_block_is_freed_without_the_garbage_collector(
    build: _Builder, tree: PrefixTree
) -> None:
    """A store hides its blocks from it."""
    trunk = build.chain("t", 2)
    left = [build.add(f"b{at}", trunk[1]) for at in range(3)]
    for at in (1, 1, 0):
        node = left.pop(at)
        tree.remove(node)
        tree.leaf_order[POOL].heap.clear()
        assert sys.getrefcount(node) == 2  # by its name here and by the call: no other block


def test_unpinning_once_too_often_is_an_error(build: _Builder, tree: PrefixTree) -> None:
    a = build.add("a")
    with pytest.raises(StoreIntegrityError):
        tree.unpin(a)


def test_changes_are_logged_in_order_until_a_snapshot() -> None:
    log = ChangeLog()
    build = _Builder(log)
    tree = build.tree
    a, b = build.chain("c", 2)
    tree.remove(b)
    tree.remove(a)
    names = [_hash("c0"), _hash("c1")]
    logged = [(change.is_present, change.chain_hash) for change in log.take(9)]
    assert logged == [(True, names[0]), (True, names[1]), (False, names[1]), (False, names[0])]
    again = build.chain("c", 2)
    assert sorted(chain(*tree.snapshot(1))) == names and len(log) == 0
    tree.remove(again[1])
    assert [change.is_present for change in log.take(9)] == [False]


def test_the_oldest_chain_goes_first_and_each_chain_tail_first(build: _Builder) -> None:
    a, b = build.chain("a", 3), build.chain("b", 2)
    build.tree.touch(b)
    build.tree.touch(a)  # a was used last
    assert build.evict_all() == ["b1", "b0", "a2", "a1", "a0"]


def test_equally_old_branches_go_deepest_first(build: _Builder) -> None:
    trunk = build.chain("t", 2)
    long = build.add("l", trunk[-1])
    leaf = build.add("x", long)
    short = build.add("s", trunk[-1])
    build.tree.touch([*trunk, long, leaf, short])
    order = build.evict_all()
    assert (order[0], set(order[1:3]), order[3:]) == ("x", {"l", "s"}, ["t1", "t0"])


def test_pinned_entries_and_their_ancestors_stay(build: _Builder) -> None:
    chain = build.chain("c", 4)
    build.tree.pin(chain[1])
    assert build.evict_all() == ["c3", "c2"]
    assert build.tree.longest_prefix([e.chain_hash for e in chain]) == chain[:2]
    build.tree.unpin(chain[1])
    assert build.evict_all() == ["c1", "c0"]


def test_the_heap_stays_small_under_use(build: _Builder) -> None:
    """10,000 uses of 100 blocks must not leave 10,000 items behind."""
    chain = build.chain("c", 100)
    for _ in range(10_000):
        build.tree.touch(chain[-1:])
    assert len(build.order.heap) <= 100
    build.check()
    assert build.evict_all() == [f"c{i}" for i in reversed(range(100))]


def test_blocks_that_left_stay_in_no_order(build: _Builder, tree: PrefixTree) -> None:
    """Each was a leaf that could be evicted once, then lay in a page only, then left."""
    tree.has_pages = True
    for index in range(1000):
        node = build.add(f"b{index}")
        tree.pin(node)
        tree.unpin(node)
        tree.set_page(node, Page(0, 0, 16))
        tree.set_block(node, None)
        tree.set_page(node, None)
        tree.remove(node)
    orders = [tree.clean_order, tree.leaf_order, tree.page_order, tree.demotion_order]
    assert max(len(order.heap) for each in orders for order in each.values()) <= 4


def test_it_holds_what_a_dict_holds(seed: int) -> None:
    draw = random.Random(seed)
    sharded, plain = ShardedDict[int, int](), dict[int, int]()
    for _ in range(20_000):
        key = draw.randrange(5000)
        if draw.random() < 0.6:
            assert sharded.add(key, key + 1) == (key not in plain)
            plain.setdefault(key, key + 1)
        elif key in plain:
            sharded.remove(key)
            del plain[key]
        else:
            with pytest.raises(KeyError):
                sharded.remove(key)
        assert (sharded.get(key), key in sharded) == (plain.get(key), key in plain)
    assert dict(sharded.items()) == plain and len(sharded) == len(plain)


@pytest.mark.parametrize("num_keys", [1, 7, 100, 5000])
def test_a_key_that_stays_is_in_one_piece(seed: int, num_keys: int) -> None:
    draw = random.Random(seed)
    sharded = ShardedDict[int, None]()
    for key in range(2000):
        sharded.add(key, None)
    stay, found, pieces = set(range(1000)), list[int](), list[int]()
    for piece in sharded.keys_in_pieces(num_keys):
        pieces.append(len(piece))
        found += piece
        key = draw.randrange(1000, 3000)
        if not sharded.add(key, None):
            sharded.remove(key)
    assert [key for key in sorted(found) if key in stay] == sorted(stay)
    assert set(pieces[:-1]) <= {num_keys} and pieces[-1] < num_keys


def test_an_empty_one_is_one_empty_piece() -> None:
    assert list(ShardedDict[int, int]().keys_in_pieces(4)) == [[]]
