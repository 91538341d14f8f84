"""The radix tree against a naive model of it: what is cached, in which runs, who is evicted next,
and the pool's conservation law after every operation."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import IntegrityError, NoBlocks
from engine.kv.block_pool import BlockPool
from engine.kv.radix_tree import RadixTree
from tests.conftest import examples

NUM_BLOCKS = 14
Path = tuple[int, ...]
PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


def key(path: Path) -> bytes:
    """The chain hash of a path's last block: it binds all before it."""
    return "/".join(map(str, path)).encode()


def chain(path: Path) -> list[bytes]:
    return [key(path[: length + 1]) for length in range(len(path))]


@dataclass
class Owner:
    """A request: the path that its blocks hold, and how many of them it offered to the tree."""

    path: Path
    block_ids: list[int]
    num_offered: int


@dataclass
class Naive:
    """What must be cached and who must go next, recomputed over everything every time."""

    cached: dict[Path, int] = field(default_factory=dict)
    idle_since: dict[Path, int] = field(default_factory=dict)
    num_events: int = 0

    def length(self, path: Path) -> int:
        return next((n for n in range(len(path), 0, -1) if path[:n] in self.cached), 0)

    def children(self, path: Path) -> list[Path]:
        return [p for p in self.cached if p[:-1] == path]

    def settle(self, busy: set[int]) -> None:
        """Note who is idle since now: not busy, nor any block after it."""
        for path in sorted(self.cached, key=len, reverse=True):
            below = [b for p, b in self.cached.items() if p[: len(path)] == path]
            if busy & set(below):
                self.idle_since.pop(path, None)
            elif path not in self.idle_since:
                self.num_events += 1
                self.idle_since[path] = self.num_events

    def evict(self) -> int:
        leaves = [path for path in self.idle_since if not self.children(path)]
        path = min(leaves, key=self.idle_since.__getitem__)
        del self.idle_since[path]
        return self.cached.pop(path)

    def drop(self, path: Path) -> None:
        for other in [p for p in self.cached if p[: len(path)] == path]:
            del self.cached[other]
            self.idle_since.pop(other, None)

    def num_runs(self) -> int:
        """A path begins a run if it is no only child."""
        return sum(1 for p in self.cached if len(p) == 1 or len(self.children(p[:-1])) > 1)


class TreeMachine(RuleBasedStateMachine):
    """Requests reserve, fill, fork, write, end, are forgotten and held, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tree = RadixTree(self.pool)
        self.naive = Naive()
        self.owners: list[Owner] = []
        self.held: list[int] = []

    def references(self) -> Counter[int]:
        return Counter(b for owner in self.owners for b in owner.block_ids)

    def settle(self) -> None:
        self.naive.settle(set(self.references()) | set(self.held))

    def pick(self, data: st.DataObject) -> Owner:
        return self.owners[data.draw(st.integers(0, len(self.owners) - 1))]

    def put_back(self, owner: Owner, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self.pool.put_back([block_id])
            owner.block_ids.remove(block_id)
            self.settle()
        self.owners.remove(owner)

    def evicted(self, num_taken: int, num_free: int) -> set[int]:
        return {self.naive.evict() for _ in range(max(0, num_taken - num_free))}

    @rule(path=PATHS, num_extra=st.integers(0, 2))
    def reserve(self, path: Path, num_extra: int) -> None:
        num_blocks, expected = len(path) + num_extra, self.naive.length(path)
        before = (self.pool.num_free, self.pool.num_evictable, len(self.tree))
        shared = [self.naive.cached[path[: n + 1]] for n in range(expected)]
        num_left = self.pool.num_available - sum(map(self.pool.is_evictable, shared))
        try:
            block_ids, num_shared = self.tree.reserve(chain(path), num_blocks)
        except NoBlocks:
            assert num_blocks - expected > num_left
            assert before == (self.pool.num_free, self.pool.num_evictable, len(self.tree))
            return
        assert num_blocks - expected <= num_left
        assert (num_shared, list(block_ids[:num_shared])) == (expected, shared)
        fresh = block_ids[num_shared:]
        assert not set(fresh) & (set(self.references()) | set(self.held))
        owner = Owner(path, shared, num_shared)
        self.owners.append(owner)
        self.settle()  # the prefix is in use before anything is evicted
        assert self.evicted(num_blocks - num_shared, before[0]) <= set(fresh)
        owner.block_ids += fresh
        assert sum(self.pool.is_cached(b) for b in fresh) == 0

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        owner = self.pick(data)
        index = owner.num_offered
        if index == len(owner.path):
            return
        owner.num_offered += 1
        path, block_id = owner.path[: index + 1], owner.block_ids[index]
        if self.pool.is_cached(block_id):  # by the request that this one was forked from
            return
        expected = path not in self.naive.cached and (index == 0 or path[:-1] in self.naive.cached)
        parent = key(path[:-1]) if index else b""
        assert self.tree.insert(parent, key(path), block_id) == expected
        if expected:
            self.naive.cached[path] = block_id
            self.settle()

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def insert_chain(self, data: st.DataObject) -> None:
        """All that an owner has left to offer, as if block by block."""
        owner = self.pick(data)
        first, num_blocks = owner.num_offered, min(len(owner.path), len(owner.block_ids))
        if first >= num_blocks:
            return
        owner.num_offered = num_blocks
        paths = [owner.path[: index + 1] for index in range(first, num_blocks)]
        parent = key(owner.path[:first]) if first else b""
        block_ids = owner.block_ids[first:num_blocks]
        self.tree.insert_chain(parent, [key(path) for path in paths], block_ids)
        for path, block_id in zip(paths, block_ids, strict=True):
            if path not in self.naive.cached and (len(path) == 1 or path[:-1] in self.naive.cached):
                self.naive.cached[path] = block_id
        self.settle()

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), is_in_order=st.booleans())
    def end(self, data: st.DataObject, is_in_order: bool) -> None:
        owner = self.pick(data)
        block_ids = list(reversed(owner.block_ids))
        if not is_in_order:
            block_ids = data.draw(st.permutations(block_ids))
        self.put_back(owner, block_ids)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        owner = self.pick(data)
        self.tree.share(owner.block_ids)
        self.owners.append(Owner(owner.path, list(owner.block_ids), owner.num_offered))

    @precondition(lambda self: any(owner.block_ids for owner in self.owners))
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        owner = self.pick(data)
        if not owner.block_ids:
            return
        index = data.draw(st.integers(0, len(owner.block_ids) - 1))
        old = owner.block_ids[index]
        is_own = self.references()[old] == 1 and old not in self.naive.cached.values()
        num_free, num_available = self.pool.num_free, self.pool.num_available
        try:
            block_id, source = self.tree.writable(old)
        except NoBlocks:
            assert not is_own and num_available == 0
            return
        assert (source is None) == is_own == (block_id == old)
        if not is_own:
            assert source == old
            assert self.evicted(1, num_free) <= {block_id}
            owner.block_ids[index] = block_id
            self.settle()
        assert self.references()[block_id] == 1 and not self.pool.is_cached(block_id)

    @precondition(lambda self: len(self.tree))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block_id = data.draw(st.integers(0, NUM_BLOCKS - 1))
        path = next((p for p, b in self.naive.cached.items() if b == block_id), None)
        self.tree.forget(block_id)
        if path is not None:
            self.naive.drop(path)
            self.settle()

    @precondition(lambda self: self.references())
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.references())))
        self.pool.hold([block_id])
        self.held.append(block_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        self.pool.unhold([self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))])
        self.settle()

    @rule(path=PATHS)
    def match(self, path: Path) -> None:
        length = self.naive.length(path)
        assert self.tree.match_length(chain(path)) == length
        expected = tuple(self.naive.cached[path[: n + 1]] for n in range(length))
        assert self.tree.match(chain(path)) == expected
        num_evictable = sum(map(self.pool.is_evictable, expected))
        assert self.tree.match_counts(chain(path)) == (length, num_evictable)

    @invariant()
    def holds_its_law(self) -> None:
        references = self.references()
        self.pool.check_integrity(references)
        self.tree.check_integrity()
        assert len(self.tree) == len(self.naive.cached)
        assert self.tree.num_nodes == self.naive.num_runs()
        idle = {self.naive.cached[path] for path in self.naive.idle_since}
        assert idle == {b for b in range(NUM_BLOCKS) if self.pool.is_evictable(b)}
        assert self.tree.num_evictable == len(idle)
        quarantined = set(self.held) - set(references)
        assert self.pool.num_quarantined == len(quarantined)
        pinned = set(self.naive.cached.values()) - idle - set(references) - quarantined
        assert pinned == {b for b in range(NUM_BLOCKS) if self.pool.is_pinned(b)}
        assert self.pool.num_referenced == len(references) + len(pinned)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def fill(tree: RadixTree, path: Path) -> tuple[int, ...]:
    """A request that computes `path` and ends; its blocks."""
    block_ids, num_shared = tree.reserve(chain(path), len(path))
    for index in range(num_shared, len(path)):
        parent = key(path[:index]) if index else b""
        assert tree.insert(parent, key(path[: index + 1]), block_ids[index])
    tree.pool.put_back(reversed(block_ids))
    return block_ids


def test_a_run_is_split_where_a_chain_diverges_and_joined_when_it_no_longer_does() -> None:
    pool = BlockPool(12)
    tree = RadixTree(pool)
    trunk = fill(tree, (0, 1, 2, 3, 4, 5))
    assert tree.num_nodes == 1
    fill(tree, (0, 1, 9, 9))
    assert (tree.num_nodes, len(tree)) == (3, 8)
    fill(tree, (0, 1, 8))
    assert tree.num_nodes == 4
    assert tree.match(chain((0, 1, 2, 3, 4, 5, 6))) == trunk
    (first_of_branch,) = tree.match(chain((0, 1, 9)))[2:]
    tree.forget(first_of_branch)
    assert (tree.num_nodes, len(tree)) == (3, 7)
    tree.forget(tree.match(chain((0, 1, 8)))[2])
    assert (tree.num_nodes, len(tree)) == (1, 6)
    tree.check_integrity()
    pool.check_integrity({})


def test_a_block_is_not_evicted_before_those_that_follow_it() -> None:
    """Two requests compute one prompt at once: the second's copy stays private, but what it
    computes after it is cached behind the first's, and keeps it there."""
    pool = BlockPool(4)
    tree = RadixTree(pool)
    (first,), (copy, second) = tree.take(1), tree.take(2)
    assert tree.insert(b"", key((0,)), first)
    assert not tree.insert(b"", key((0,)), copy)
    assert tree.insert(key((0,)), key((0, 1)), second)
    pool.put_back([first])
    assert pool.is_pinned(first) and pool.num_available == 1
    with pytest.raises(NoBlocks):
        tree.take(2)
    pool.put_back([second, copy])
    assert (pool.num_free, pool.num_evictable) == (2, 2)
    tree.take(2)
    assert tree.take(1) == (second,)
    assert tree.take(1) == (first,)


def test_a_block_whose_parent_is_gone_stays_private() -> None:
    pool = BlockPool(4)
    tree = RadixTree(pool)
    first, second = tree.take(2)
    assert tree.insert(b"", key((0,)), first)
    tree.forget(first)
    assert not tree.insert(key((0,)), key((0, 1)), second)
    pool.put_back([second, first])
    assert (pool.num_free, len(tree)) == (4, 0)


def test_what_follows_a_forgotten_block_is_forgotten_with_it() -> None:
    pool = BlockPool(8)
    tree = RadixTree(pool)
    block_ids = fill(tree, (0, 1, 2, 3))
    fill(tree, (0, 1, 7))
    tree.forget(block_ids[1])
    assert tree.match(chain((0, 1, 2))) == block_ids[:1]
    assert (pool.num_free, len(tree)) == (7, 1)
    tree.check_integrity()


def test_copy_on_write() -> None:
    pool = BlockPool(4)
    tree = RadixTree(pool)
    (block_id,) = tree.take(1)
    assert tree.writable(block_id) == (block_id, None)
    tree.share([block_id])
    fresh, source = tree.writable(block_id)
    assert source == block_id != fresh
    assert tree.writable(block_id) == (block_id, None)  # the other's alone again
    tree.insert(b"", key((0,)), block_id)
    assert tree.writable(block_id)[1] == block_id  # cached: others may find it
    assert tree.match(chain((0,))) == (block_id,)
    tree.take(2)  # the last free one, and the cached one that nobody references any more
    with pytest.raises(NoBlocks):
        tree.share([fresh])
        tree.writable(fresh)
    assert pool.num_references(fresh) == 2


def test_a_chain_that_breaks_the_law_spoils_nothing() -> None:
    """A hash that comes twice, or behind another block already, is passed over."""
    for hashes in (["a", "b", "b", "c"], ["a", "x", "b"], ["x", "a", "b"]):
        tree = RadixTree(BlockPool(8))
        (other,) = tree.take(1)
        tree.insert(b"", b"x", other)
        block_ids = tree.take(len(hashes))
        tree.insert_chain(b"", [name.encode() for name in hashes], block_ids)
        tree.check_integrity()
        assert tree.match([b"x"]) == (other,)


def test_hashes_that_are_no_chain_are_noticed() -> None:
    tree = RadixTree(BlockPool(4))
    fill(tree, (0, 1, 2))
    with pytest.raises(IntegrityError, match="do not bind"):
        tree.match_length([key((0,)), key((0, 1, 2))])


def test_integrity_notices_a_run_in_the_wrong_place() -> None:
    """check_integrity must be able to fail."""
    for breakage in (
        lambda tree: tree._depth_of.__setitem__(1, 5),
        lambda tree: tree._block_of.pop(key((0,))),
        lambda tree: next(iter(tree._root.children.values())).block_ids.reverse(),
        lambda tree: setattr(tree, "_num_nodes", 2),
        lambda tree: tree.pool.unmark_cached(2),
    ):
        tree = RadixTree(BlockPool(4))
        fill(tree, (0, 1, 2))
        tree.check_integrity()
        breakage(tree)
        with pytest.raises(IntegrityError):
            tree.check_integrity()


def test_order_of_arrival_leaves_the_same_tree(seed: int, scale: Callable[[int], int]) -> None:
    """The shape depends on what is cached alone."""
    rng = random.Random(seed)
    for _ in range(scale(400)):
        paths = [tuple(rng.randrange(2) for _ in range(rng.randint(1, 8))) for _ in range(12)]
        shapes = set()
        for _ in range(3):
            rng.shuffle(paths)
            tree = RadixTree(BlockPool(100))
            for path in paths:
                fill(tree, path)
            tree.check_integrity()
            prefixes = {path[:n] for path in paths for n in range(1, len(path) + 1)}
            assert len(tree) == len(prefixes)
            shapes.add(tree.num_nodes)
        assert len(shapes) == 1
