"""The order in which candidates go."""

from __future__ import annotations

from operator import attrgetter

from kvstore.blocks import Block
from kvstore.catalog import Catalog, Entry
from kvstore.eviction import LruOrder


class _Builder:
    def __init__(self) -> None:
        self.order = LruOrder("frames", attrgetter("may_be_evicted"))
        self.catalog = Catalog(on_use=self.order.offer)

    def add(self, name: str, parent: Entry | None) -> Entry:
        chain_hash = name.encode().ljust(16, b"-")
        block = Block(chain_hash, len(self.catalog), 2, 0, 16)
        return self.catalog.insert(chain_hash, parent, block=block)

    def chain(self, name: str, length: int) -> list[Entry]:
        entries: list[Entry] = []
        for i in range(length):
            entries.append(self.add(f"{name}{i}", entries[-1] if entries else None))
        return entries

    def evict_all(self) -> list[str]:
        names: list[str] = []
        while (entry := self.order.first()) is not None:
            assert self.order.first() is entry  # looking changes nothing
            names.append(entry.chain_hash.rstrip(b"-").decode())
            self.catalog.remove(entry)
            self.catalog.set_block(entry, None)
            self.catalog.check_integrity()
            list(self.order.checks(self.catalog))
        return names


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
    assert build.catalog.longest_prefix([e.chain_hash for e in chain]) == chain[:2]
    build.catalog.unpin(chain[1])
    assert build.evict_all() == ["c1", "c0"]


def test_the_heap_stays_small_under_use() -> None:
    """10,000 uses of 100 entries must not leave 10,000 items behind."""
    build = _Builder()
    chain = build.chain("c", 100)
    for _ in range(10_000):
        build.catalog.touch(chain[-1:])
    assert len(build.order._heap) <= 64 + 4 * 100 + 1
    list(build.order.checks(build.catalog))
    assert build.evict_all() == [f"c{i}" for i in reversed(range(100))]
