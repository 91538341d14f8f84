"""Eviction order and prefix-closed presence of the catalog."""

from __future__ import annotations

import pytest

from kvstore.block import Block
from kvstore.catalog import Catalog, Entry
from kvstore.errors import IntegrityError


def _hash(name: str) -> bytes:
    return name.encode().ljust(16, b"-")


class _Builder:
    def __init__(self) -> None:
        self.catalog = Catalog()
        self._frame = 0

    def add(self, name: str, parent: Entry | None) -> Entry:
        self._frame += 1
        return self.catalog.insert(Block(_hash(name), self._frame, 2, 0, 16), parent)

    def chain(self, name: str, length: int) -> list[Entry]:
        entries: list[Entry] = []
        for i in range(length):
            entries.append(self.add(f"{name}{i}", entries[-1] if entries else None))
        return entries

    def evict_all(self) -> list[str]:
        order: list[str] = []
        while (entry := self.catalog.evict()) is not None:
            order.append(entry.block.chain_hash.rstrip(b"-").decode())
            self.catalog.check_integrity()
        return order


def test_the_oldest_chain_goes_first_and_each_chain_tail_first() -> None:
    build = _Builder()
    a, b = build.chain("a", 3), build.chain("b", 2)
    build.catalog.touch(b)
    build.catalog.touch(a)  # a was used last
    assert build.evict_all() == ["b1", "b0", "a2", "a1", "a0"]


def test_equally_old_branches_go_deepest_first() -> None:
    build = _Builder()
    trunk = build.chain("t", 2)
    long = build.add("l", trunk[-1])
    leaf = build.add("x", long)
    short = build.add("s", trunk[-1])
    build.catalog.touch([*trunk, long, leaf, short])
    order = build.evict_all()
    assert (order[0], set(order[1:3]), order[3:]) == ("x", {"l", "s"}, ["t1", "t0"])


def test_pinned_entries_and_their_ancestors_stay() -> None:
    build = _Builder()
    chain = build.chain("c", 4)
    build.catalog.pin(chain[1])
    assert build.evict_all() == ["c3", "c2"]
    assert build.catalog.longest_prefix([e.block.chain_hash for e in chain]) == chain[:2]
    build.catalog.unpin(chain[1])
    assert build.evict_all() == ["c1", "c0"]


def test_an_entry_needs_its_parent_and_comes_once() -> None:
    build = _Builder()
    (a,) = build.chain("a", 1)
    with pytest.raises(IntegrityError):
        build.add("a0", None)
    assert build.catalog.evict() is a
    with pytest.raises(IntegrityError):
        build.add("child", a)
    build.catalog.check_integrity()


def test_unpinning_once_too_often_is_an_error() -> None:
    build = _Builder()
    (a,) = build.chain("a", 1)
    with pytest.raises(IntegrityError):
        build.catalog.unpin(a)


def test_the_heap_stays_small_under_use_and_eviction_is_not_linear() -> None:
    """10,000 uses of 100 entries must not leave 10,000 items behind."""
    build = _Builder()
    chain = build.chain("c", 100)
    for _ in range(10_000):
        build.catalog.touch(chain[-1:])
    assert len(build.catalog._heap) <= 64 + 4 * 100 + 1
    build.catalog.check_integrity()
    assert build.evict_all() == [f"c{i}" for i in reversed(range(100))]


def test_changes_are_told_in_order() -> None:
    told: list[tuple[bool, bytes]] = []
    catalog = Catalog(on_change=lambda present, chain_hash: told.append((present, chain_hash)))
    a = catalog.insert(Block(_hash("a"), 0, 2, 0, 16), None)
    catalog.insert(Block(_hash("b"), 1, 2, 0, 16), a)
    catalog.evict()
    catalog.evict()
    assert told == [
        (True, _hash("a")),
        (True, _hash("b")),
        (False, _hash("b")),
        (False, _hash("a")),
    ]
