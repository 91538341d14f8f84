"""A store's numbers reach each message that has a field for them."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.block_source import StoreStats
from kvstore.block_store import BlockStore
from kvstore.errors import GENERATION
from kvstore.store_status import fill
from protos import inference_pb2, kvstore_pb2
from tests.unit.kvstore.store_driver import StoreBench, hashes_of

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


def _busy_store() -> BlockStore:
    """One to which everything has happened that it counts, and in which there is one of all."""
    bench = StoreBench(6, 3)
    store, now_s = bench.store, 10.0
    first, second = (bench.put_prompt(name, 1)[0] for name in (1, 2))
    bench.demote_all()
    bench.put_prompt(3, 6)  # takes both frames
    bench.end_promotion(bench.begin_promotion(first), True)
    bench.end_promotion(bench.begin_promotion(second), False)
    lease_id, answers, _ = bench.reserve(hashes_of(4, 1))
    bench.commit(lease_id, answers)
    store.lapse(now_s)
    lease_id, answers, _ = bench.reserve(hashes_of(5, 1), now_s=now_s)
    bench.abort(lease_id, answers, quarantine=True, now_s=now_s)
    store.drop(store.match(hashes_of(4, 1), pin=False, now_s=now_s).blocks[:1])
    store.release([], num_bytes_read=5, now_s=now_s)
    store.refused[GENERATION] += 1
    lease_id, answers, tail = bench.reserve(hashes_of(6, 1), tail="tail", now_s=now_s)
    assert tail is not None
    bench.commit(lease_id, [*answers, tail], now_s=now_s)
    bench.reserve(hashes_of(7, 1), now_s=now_s)
    lease_id, answers, _ = bench.reserve(hashes_of(8, 1), now_s=now_s)
    bench.abort(lease_id, answers, quarantine=False, now_s=now_s)
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
