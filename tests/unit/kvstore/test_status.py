"""A store's numbers reach each message that has a field for them."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.block_source import StoreStats
from kvstore.block_store import BlockStore, StoreLimits, WrittenFrame
from kvstore.errors import GENERATION
from kvstore.store_status import fill
from protos import inference_pb2, kvstore_pb2

FILLED_BY_OTHERS = {
    kvstore_pb2.GetStatusReply: {
        *("node_id", "incarnation", "index_sequence", "index_synced"),
        *("integrity_error", "file_tier_problem"),
    },
    inference_pb2.StoreStatus: {
        *("node_id", "address", "incarnation", "reachable"),
        *("integrity_error", "file_tier_problem"),
    },
}
"""Fields that are no numbers of a BlockStore: of the node, its index and its address."""


def _hashes(name: int, length: int) -> list[bytes]:
    return [bytes([name, at]).rjust(16, b"h") for at in range(length)]


class _Bench:
    """A store of 6 frames over 3 pages, whose bytes are never moved."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.store = BlockStore(6, 100, StoreLimits())
        self.store.table.open_pages(3, [])
        self.worker = self.store.attach("w", b"1", "shm", True, 0.0).attachment_id

    def reserve(self, name: int, length: int, tail: str = "") -> tuple[str, list[WrittenFrame]]:
        lease_id, answers, last = self.store.reserve(
            self.worker, b"", _hashes(name, length), tail_name=tail, ttl_s=9.0, now_s=self.now_s
        )
        answers += [last] if last is not None else []
        return lease_id, [WrittenFrame(a.frame, a.generation, 7, 16) for a in answers]

    def put(self, name: int, length: int, tail: str = "") -> str:
        """Returns: the lease, which still holds."""
        lease_id, written = self.reserve(name, length, tail)
        self.store.commit(self.worker, lease_id, written, self.now_s)
        return lease_id

    def demote_all(self) -> None:
        while (demotion := self.store.table.begin_demotion(8)) is not None:
            self.store.table.end_demotion(demotion, [True] * len(demotion.writes))

    def promote(self, name: int, is_good: bool) -> None:
        (node,) = self.store.tree.longest_prefix(_hashes(name, 1))
        promotion = self.store.table.begin_promotion(node)
        assert promotion is not None
        self.store.table.end_promotion(promotion, is_good)


def _busy_store() -> BlockStore:
    """One to which everything has happened that it counts, and in which there is one of all."""
    bench = _Bench()
    store = bench.store
    for name in (1, 2):
        store.release([bench.put(name, 1)], now_s=0.0)
    bench.demote_all()
    store.release([bench.put(3, 6)], now_s=0.0)  # takes both frames
    bench.promote(1, is_good=True)
    bench.promote(2, is_good=False)
    bench.put(4, 1)
    bench.now_s = 10.0
    store.lapse(10.0)
    lease_id, written = bench.reserve(5, 1)
    store.abort(bench.worker, lease_id, written, quarantine=True, now_s=10.0)
    block = store.match(_hashes(4, 1), pin=False, now_s=10.0).blocks[0]
    store.drop([block])
    store.release([], num_bytes_read=5, now_s=10.0)
    store.refused[GENERATION] += 1
    bench.put(6, 1, "tail")
    bench.reserve(7, 1)
    lease_id, written = bench.reserve(8, 1)
    store.abort(bench.worker, lease_id, written, quarantine=False, now_s=10.0)
    return store


@pytest.mark.parametrize("kind", list(FILLED_BY_OTHERS))
def test_each_field_of_a_message_is_filled(kind: Any) -> None:
    message = kind()
    fill(message, StoreStats.of(_busy_store()))
    filled = {field.name for field, _ in message.ListFields()}
    assert filled == set(kind.DESCRIPTOR.fields_by_name) - FILLED_BY_OTHERS[kind]


def test_the_numbers_are_those_of_the_store() -> None:
    stats = StoreStats.of(_busy_store())
    states = (stats.num_free, stats.num_writing, stats.num_committed, stats.num_quarantined)
    assert sum(states) == stats.num_frames == 6
    assert (stats.num_writing, stats.num_quarantined, stats.num_tails) == (1, 1, 1)
    assert (stats.num_demoted, stats.num_promoted, stats.num_pages_bad) == (2, 1, 1)
    assert (stats.num_pages, stats.num_pages_used) == (3, 1)
    assert (stats.num_bytes_read, stats.num_leases_lapsed, stats.num_damaged) == (5, 1, 1)
