"""A block's history: each thing that happens to it, once, in order, with who did it; bounded; and
linked to whoever wrote it.
"""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from kvstore import block_history
from kvstore.block_history import MAX_EVENTS, BlockHistory
from kvstore.block_refs import Block
from kvstore.prefix_tree import TreeNode
from process.trace_spans import RecordingSpan, TraceContext
from tests.unit.kvstore.store_driver import StoreBench, hashes_of

TRACE = TraceContext(0xA1, 0xB2, True)


def _hash(prompt: int, index: int) -> bytes:
    return hashes_of(prompt, index + 1)[index]


class _Bench(StoreBench):
    """It remembers, by a clock that goes on with each look; of what it is told in a trace, too."""

    def __init__(self, num_frames: int = 4, num_pages: int = 0, max_blocks: int = 64) -> None:
        ticks = itertools.count(1)
        past = BlockHistory(max_blocks, wall_clock=lambda: float(next(ticks)))
        super().__init__(num_frames, num_pages, history=past)
        self.spans: list[RecordingSpan] = []

    def put_traced(self, prompt: int, length: int) -> None:
        with RecordingSpan(self.spans.append, "commit", TRACE, None):
            self.put_prompt(prompt, length)

    def whats(self, prompt: int, index: int) -> list[str]:
        found = self.store.history.find(_hash(prompt, index), 1)
        return [event.what for event in found[0][1].events] if found else []


def _blocks(nodes: list[TreeNode]) -> list[Block]:
    return [node.block for node in nodes if node.block is not None]


def test_a_write_is_told_once_and_with_its_writer() -> None:
    bench = _Bench()
    bench.put_prompt(0, 2)
    bench.put_prompt(0, 2)  # there already: nothing happened to it
    ((_, past),) = bench.store.history.find(_hash(0, 1), 1)
    assert [(event.what, event.worker_id) for event in past.events] == [("written", "w1")]


def test_an_eviction_is_remembered_after_the_block_is_gone() -> None:
    bench = _Bench(num_frames=2)
    bench.put_prompt(0, 2)
    bench.put_prompt(1, 2)
    assert bench.store.tree.find(_hash(0, 0)) is None
    assert bench.whats(0, 0) == bench.whats(0, 1) == ["written", "evicted"]


def test_the_way_through_the_file_tier() -> None:
    bench = _Bench(num_frames=2, num_pages=8)
    nodes = bench.put_prompt(0, 2)
    bench.demote_all()
    bench.put_prompt(1, 2)
    assert bench.whats(0, 0) == ["written", "demoted", "left_memory"]
    bench.demote_all()
    bench.end_promotion(bench.begin_promotion(nodes[0]), True)
    assert bench.whats(0, 0) == ["written", "demoted", "left_memory", "promoted"]


def test_a_bad_page_is_damage_and_what_hangs_on_it_is_lost() -> None:
    bench = _Bench(num_frames=2, num_pages=8)
    nodes = bench.put_prompt(0, 2)
    bench.demote_all()
    bench.put_prompt(1, 2)
    bench.demote_all()
    bench.end_promotion(bench.begin_promotion(nodes[0]), False)
    assert bench.whats(0, 0)[-1] == "damaged" and bench.whats(0, 1)[-1] == "lost"


def test_bad_bytes_found_in_memory_are_damage_too() -> None:
    bench = _Bench()
    nodes = bench.put_prompt(0, 3)
    bench.store.note_read(block_history.REFUSED, _blocks(nodes[1:2]), "reader")
    bench.store.drop(_blocks(nodes[1:2]))
    assert bench.whats(0, 0) == ["written"]
    assert bench.whats(0, 1) == ["written", "refused", "damaged"]
    assert bench.whats(0, 2) == ["written", "lost"]


def test_only_what_still_is_the_block_counts_as_verified() -> None:
    bench = _Bench()
    blocks = _blocks(bench.put_prompt(0, 2))
    frames, generations = [b.frame for b in blocks], [b.generation for b in blocks]
    bench.store.note_verified(bench.worker, frames, [generations[0], generations[1] + 2], TRACE)
    bench.store.note_verified("nobody", frames, generations, TRACE)
    bench.store.note_verified(bench.worker, [9999, -1], [2, 2], None)
    bench.store.note_verified(bench.worker, frames, [], None)
    assert bench.whats(0, 0) == ["written", "verified"] and bench.whats(0, 1) == ["written"]
    ((_, past),) = bench.store.history.find(_hash(0, 0), 1)
    assert past.events[-1].trace == TRACE


def test_a_tail_has_no_history() -> None:
    bench = _Bench()
    lease_id, _, tail = bench.reserve([], tail="t")
    assert tail is not None
    bench.commit(lease_id, [tail])
    assert len(bench.store.history) == 0


def test_what_a_store_does_by_itself_is_in_the_history_and_in_no_trace() -> None:
    """Only what was written in a trace names it."""
    bench = _Bench(num_frames=2)
    bench.put_traced(0, 2)
    (write,) = bench.spans
    assert [(event.name, event.attributes["baton.num_blocks"]) for event in write.events] == [
        ("block written", 2)
    ]
    bench.put_prompt(1, 2)  # by a request that is not traced
    assert bench.spans == [write] and not write.links
    ((_, past),) = bench.store.history.find(_hash(0, 0), 1)
    assert [(event.what, event.trace) for event in past.events] == [
        (block_history.WRITTEN, TRACE),
        (block_history.EVICTED, None),
    ]


def test_an_eviction_by_a_traced_request_is_an_event_of_its_span() -> None:
    bench = _Bench(num_frames=2)
    bench.put_traced(0, 2)
    bench.put_traced(1, 2)
    last = bench.spans[-1]
    assert [event.name for event in last.events] == ["block evicted"] * 2 + ["block written"]
    assert [link.context for link in last.links] == [TRACE, TRACE]


def test_nothing_is_remembered_where_that_is_not_wanted() -> None:
    bench = _Bench(num_frames=2, max_blocks=0)
    bench.put_traced(0, 2)
    bench.put_prompt(1, 2)
    assert len(bench.store.history) == 0 and not bench.store.history.is_kept
    assert [span.name for span in bench.spans] == ["commit"]


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 12).map(lambda n: _hash(0, n)), max_size=5),
            st.sampled_from([block_history.WRITTEN, block_history.VERIFIED]),
        ),
        max_size=60,
    )
)
def test_it_is_bounded_and_keeps_the_latest(news: list[tuple[list[bytes], str]]) -> None:
    ticks = itertools.count()
    kept = BlockHistory(5, wall_clock=lambda: float(next(ticks)))
    order: dict[bytes, int] = {}
    for hashes, what in news:
        kept.note(what, hashes)
        for chain_hash in hashes:
            order.pop(chain_hash, None)
            order[chain_hash] = 0
    assert len(kept) <= 5
    found = kept.find(b"", 100)
    assert [chain_hash for chain_hash, _ in found] == list(reversed(order))[:5]
    for _, past in found:
        times = [event.unix_s for event in past.events]
        assert times == sorted(times) and len(times) <= MAX_EVENTS
        assert past.num_events >= len(times)
    assert kept.find(b"other", 100) == []
    assert len(kept.find(b"h", 2)) == min(2, len(found))


def test_the_oldest_events_of_one_block_are_forgotten() -> None:
    kept = BlockHistory(2)
    for _ in range(3 * MAX_EVENTS):
        kept.note(block_history.VERIFIED, [_hash(0, 0)])
    ((_, past),) = kept.find(_hash(0, 0), 1)
    assert len(past.events) == MAX_EVENTS and past.num_events == 3 * MAX_EVENTS
