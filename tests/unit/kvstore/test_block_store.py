"""The store's promises, each by name; time is a number. Random sequences are in
test_store_machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore import block_store, invariants
from kvstore.block_refs import Block
from kvstore.block_store import NO_ROOM, PrefixMatch, Reserved
from kvstore.errors import LeaseLapsed, UnknownAttachment
from kvstore.slot_pool import SlotState
from process.rpc_errors import FailedPrecondition, InvalidArgument
from tests.unit.kvstore.store_driver import GRACE_S, StoreBench


def _hash(number: int) -> bytes:
    return number.to_bytes(16, "big")


CHAIN = [_hash(i) for i in range(1, 7)]


@pytest.fixture
def bench() -> Iterator[StoreBench]:
    made = StoreBench()
    yield made
    made.check()


@pytest.fixture
def other(bench: StoreBench) -> str:
    """Another worker."""
    return bench.attach("w2")


@pytest.fixture
def chunked(bench: StoreBench) -> str:
    """A worker whose bytes the store itself writes."""
    return bench.attach("w3", one_sided=False)


def test_a_block_is_visible_only_after_its_commit(bench: StoreBench) -> None:
    lease_id, answers, _ = bench.reserve(CHAIN[:3])
    assert bench.num_present(CHAIN) == 0
    blocks = bench.commit(lease_id, answers)
    assert bench.num_present(CHAIN) == 3
    assert [block.chain_hash for block in blocks] == CHAIN[:3]
    assert all(block.generation % 2 == 0 for block in blocks)
    assert bench.store.counters.num_bytes_written == 3000


def test_of_two_writers_the_first_to_commit_wins(bench: StoreBench, other: str) -> None:
    one, answers_one, _ = bench.reserve(CHAIN[:2])
    two, answers_two, _ = bench.reserve(CHAIN[:2], who=other)
    assert {a.frame for a in answers_one}.isdisjoint({a.frame for a in answers_two})
    won = bench.commit(two, answers_two, who=other)
    lost = bench.commit(one, answers_one)
    assert lost == won
    assert bench.count(SlotState.COMMITTED) == 2
    assert bench.count(SlotState.FREE) == 6
    bench.store.release([two], now_s=0.0)
    assert bench.store.num_pinned() == 2  # the loser's lease pins the winner
    assert bench.store.counters.num_bytes_written == 2000


def test_what_is_present_is_pinned_and_not_reserved_again(bench: StoreBench, other: str) -> None:
    first = bench.put(CHAIN[:2])
    _, answers, _ = bench.reserve(CHAIN[:3], who=other)
    assert [a.block for a in answers[:2]] == first
    assert answers[2].block is None and answers[2].has_room
    assert bench.store.num_pinned() == 2


def test_asking_twice_under_one_lease_gives_the_same_frames(bench: StoreBench) -> None:
    lease_id, first, _ = bench.reserve(CHAIN[:2])
    _, again, _ = bench.reserve(CHAIN[:3], lease_id=lease_id)
    assert again[:2] == first
    assert bench.count(SlotState.WRITING) == 3


def test_a_parent_must_be_there_or_be_written_under_the_same_lease(
    bench: StoreBench, other: str
) -> None:
    lease_id, _, _ = bench.reserve(CHAIN[:1])
    bench.reserve(CHAIN[1:2], parent=CHAIN[0], lease_id=lease_id)
    for own in ("", bench.reserve(CHAIN[4:5], who=other)[0]):
        before = len(bench.store.leases)
        with pytest.raises(FailedPrecondition, match="parent"):
            bench.reserve(CHAIN[1:2], parent=CHAIN[0], lease_id=own, who=other)
        assert len(bench.store.leases) == before


def test_a_child_cannot_be_committed_before_its_parent(bench: StoreBench) -> None:
    lease_id, answers, _ = bench.reserve(CHAIN[:2])
    with pytest.raises(FailedPrecondition, match="parent"):
        bench.commit(lease_id, answers[1:])
    assert bench.num_present(CHAIN) == 0
    bench.check()
    bench.commit(lease_id, answers)
    assert bench.num_present(CHAIN) == 2


def test_a_commit_is_all_or_nothing(bench: StoreBench, other: str) -> None:
    lease_id, answers, _ = bench.reserve(CHAIN[:2])
    wrong = Reserved(frame=answers[1].frame, generation=answers[1].generation + 2)
    with pytest.raises(LeaseLapsed):
        bench.commit(lease_id, [answers[0], wrong])
    with pytest.raises(InvalidArgument, match="twice"):
        bench.commit(lease_id, [answers[0], answers[0]])
    with pytest.raises(LeaseLapsed):  # another worker's reservation
        bench.commit(lease_id, answers, who=other)
    assert bench.num_present(CHAIN) == 0


def test_no_room_ends_the_chain_and_the_tail() -> None:
    bench = StoreBench(3)
    lease_id, answers, tail = bench.reserve(CHAIN[:5], tail="t")
    assert [a.has_room for a in answers] == [True, True, True, False, False]
    assert tail == NO_ROOM
    bench.commit(lease_id, answers)
    _, more, _ = bench.reserve([_hash(77)])  # everything is pinned
    assert more == [NO_ROOM]


def test_room_is_made_from_the_oldest_unpinned_tail_first() -> None:
    bench = StoreBench(4)
    bench.put(CHAIN[:3])
    bench.reserve([_hash(50), _hash(51)])
    assert bench.num_present(CHAIN[:3]) == 2
    assert bench.table.num_evictions == 1
    assert bench.changes()[-1] == (False, CHAIN[2])
    lease_id = bench.store.match(CHAIN, pin=True, ttl_s=5.0, now_s=0.0).lease_id
    assert bench.reserve([_hash(52)])[1] == [NO_ROOM]
    bench.store.release([lease_id], now_s=0.0)
    assert bench.reserve([_hash(52)])[1][0].has_room


def test_a_chain_being_extended_is_not_evicted_for_its_own_extension() -> None:
    bench = StoreBench(3)
    bench.put(CHAIN[:3])
    _, answers, _ = bench.reserve(CHAIN[:5])
    assert [a.block is not None for a in answers] == [True, True, True, False, False]
    assert not answers[3].has_room


def test_a_parent_stays_while_its_child_is_written() -> None:
    """Otherwise the child could not be committed: presence is prefix-closed."""
    bench = StoreBench(3)
    bench.put(CHAIN[:1])
    other = bench.attach("w2")
    lease_id, answers, _ = bench.reserve(CHAIN[1:2], parent=CHAIN[0], who=other)
    _, others, _ = bench.reserve([_hash(50), _hash(51)])
    assert [a.has_room for a in others] == [True, False]
    bench.commit(lease_id, answers, who=other)
    assert bench.num_present(CHAIN) == 2


def test_a_tail_is_private_leased_and_gone_with_its_last_lease(bench: StoreBench) -> None:
    lease_id, answers, tail = bench.reserve(CHAIN[:1], tail="r1")
    assert tail is not None
    *_, block = bench.commit(lease_id, [*answers, tail])
    assert block.chain_hash == b""
    assert bench.num_present(CHAIN) == 1
    assert bench.num_present([b"", CHAIN[0]]) == 0
    assert bench.store.num_tails == 1
    pinned, num_pinned = bench.store.pin([block], ttl_s=5.0, now_s=0.0)
    assert num_pinned == 1
    bench.store.release([lease_id], now_s=0.0)
    assert bench.store.num_tails == 1
    bench.store.release([pinned], now_s=0.0)
    assert bench.store.num_tails == 0
    assert bench.store.pin([block], ttl_s=5.0, now_s=0.0) == ("", 0)
    assert all(chain_hash for _, chain_hash in bench.changes())


def test_a_tail_is_never_evicted() -> None:
    bench = StoreBench(1)
    lease_id, _, tail = bench.reserve([], tail="r1")
    assert tail is not None
    bench.commit(lease_id, [tail])
    assert bench.reserve(CHAIN[:1])[1] == [NO_ROOM]


def test_two_tails_of_one_name_are_two_tails(bench: StoreBench) -> None:
    """A request served again must not meet its earlier attempt's tail."""
    first = bench.reserve([], tail="r1")[2]
    second = bench.reserve([], tail="r1")[2]
    assert first is not None and second is not None and first.frame != second.frame


def test_a_lapsed_lease_gives_everything_back(bench: StoreBench, chunked: str) -> None:
    lease_id, answers, tail = bench.reserve(CHAIN[:2], tail="t", who=chunked)
    assert tail is not None
    bench.commit(lease_id, [answers[0], tail], who=chunked)
    bench.store.lapse(9.9)
    assert bench.store.num_pinned() == 2
    bench.store.lapse(10.0)
    assert (bench.store.num_pinned(), bench.store.num_tails) == (0, 0)
    assert bench.count(SlotState.WRITING) == 0
    assert bench.count(SlotState.FREE) == 7
    assert bench.store.counters.num_leases_lapsed == 1
    with pytest.raises(LeaseLapsed):
        bench.commit(lease_id, [answers[1]], who=chunked, now_s=10.0)
    with pytest.raises(LeaseLapsed):
        bench.store.renew(lease_id, ttl_s=1.0, now_s=10.0)


def test_a_renewed_lease_lives_on(bench: StoreBench) -> None:
    lease_id, answers, _ = bench.reserve(CHAIN[:1])
    bench.store.renew(lease_id, ttl_s=10.0, num_bytes_read=5, now_s=9.0)
    bench.store.renew(lease_id, ttl_s=0.0, now_s=9.5)
    bench.commit(lease_id, answers, now_s=18.9)
    bench.store.lapse(19.0)
    assert bench.store.num_pinned() == 0
    assert bench.store.counters.num_bytes_read == 5


def test_a_lapsed_one_sided_reservation_is_quarantined_until_its_writer_says_so(
    bench: StoreBench, other: str
) -> None:
    lease_id, answers, _ = bench.reserve(CHAIN[:2])
    bench.store.lapse(1000.0)
    bench.check()
    assert bench.count(SlotState.QUARANTINED) == 2
    bench.abort(lease_id, answers, quarantine=False, who=other, now_s=1000.0)
    assert bench.count(SlotState.QUARANTINED) == 2  # not its own
    bench.abort(lease_id, answers, quarantine=False, now_s=1000.0)
    assert bench.count(SlotState.FREE) == 8


def test_an_abort_with_quarantine_needs_a_second_one(bench: StoreBench) -> None:
    lease_id, answers, _ = bench.reserve(CHAIN[:1])
    for _ in range(2):
        bench.abort(lease_id, answers, quarantine=True)
        assert bench.count(SlotState.QUARANTINED) == 1
    for _ in range(2):
        bench.abort(lease_id, answers, quarantine=False)
        assert bench.count(SlotState.FREE) == 8


def test_an_aborted_block_can_be_reserved_again_under_the_same_lease(bench: StoreBench) -> None:
    lease_id, answers, _ = bench.reserve(CHAIN[:1])
    bench.abort(lease_id, answers, quarantine=True)
    _, again, _ = bench.reserve(CHAIN[:1], lease_id=lease_id)
    assert again[0].frame != answers[0].frame
    bench.commit(lease_id, again)
    assert bench.num_present(CHAIN) == 1


@pytest.mark.parametrize("by", ["detach", "next life", "dead process"])
def test_quarantine_ends_when_the_writer_is_gone(bench: StoreBench, by: str) -> None:
    bench.reserve(CHAIN[:2])
    free_at = 5.0 + GRACE_S
    if by == "detach":
        bench.store.detach(bench.worker, 5.0)
    elif by == "next life":
        bench.store.attach("w1", b"2", "shm", True, 5.0)
    else:
        bench.store.detach(bench.worker, 5.0, grace_s=0.0)
        free_at = 5.0
    bench.check()
    bench.store.lapse(free_at - 0.01)
    bench.check()
    assert bench.count(SlotState.QUARANTINED) == (0 if by == "dead process" else 2)
    bench.store.lapse(free_at)
    assert bench.count(SlotState.FREE) == 8
    bench.check()
    with pytest.raises(UnknownAttachment):
        bench.reserve(CHAIN[:1])


def test_one_life_of_a_worker_may_be_attached_twice(bench: StoreBench) -> None:
    """A worker's cache and the memory it parks in are two; the second does not end the first."""
    bench.reserve(CHAIN[:2])
    second = bench.attach("w1", one_sided=True)
    assert bench.count(SlotState.WRITING) == 2
    bench.reserve(CHAIN[2:3], who=second)
    bench.attach("w1", one_sided=True, life=b"2")
    assert bench.count(SlotState.QUARANTINED) == 3  # both were of the earlier life
    for gone in (bench.worker, second):
        with pytest.raises(UnknownAttachment):
            bench.reserve(CHAIN[:1], who=gone)


def test_what_a_gone_worker_pinned_lives_until_its_leases_end(bench: StoreBench) -> None:
    """The handle of a prefill worker that is scaled down is still good."""
    lease_id, answers, _ = bench.reserve(CHAIN[:2])
    bench.commit(lease_id, answers)
    bench.store.detach(bench.worker, 1.0)
    bench.check()
    assert bench.store.num_pinned() == 2
    bench.store.lapse(10.0)
    assert bench.store.num_pinned() == 0


def test_a_pin_is_refused_at_the_first_block_that_changed() -> None:
    bench = StoreBench(3)
    blocks = bench.put(CHAIN[:3])
    bench.reserve([_hash(50)])  # evicts the third
    lease_id, num_pinned = bench.store.pin(blocks, ttl_s=5.0, now_s=0.0)
    assert num_pinned == 2
    forged = Block(_hash(9), blocks[0].frame, blocks[0].generation, 0, 16)
    assert bench.store.pin([forged], ttl_s=5.0, now_s=0.0) == ("", 0)
    bench.store.release([lease_id], now_s=0.0)
    bench.check()


def test_a_hold_keeps_frames_while_the_store_copies() -> None:
    bench = StoreBench(1)
    (block,) = bench.put(CHAIN[:1])
    hold_id, held = bench.store.hold([block, Block(b"", 0, 6, 0, 1)])
    assert held == [True, False]
    bench.store.lapse(1e9)
    assert bench.reserve([_hash(50)])[1] == [NO_ROOM]
    bench.store.unhold(hold_id)
    assert bench.reserve([_hash(50)])[1][0].has_room
    assert bench.store.hold([block])[1] == [False]


@pytest.mark.parametrize(
    ("parent", "chain"),
    [(b"short", CHAIN[:1]), (b"", [b"short"]), (b"", [CHAIN[0], CHAIN[0]]), (CHAIN[0], [CHAIN[0]])],
)
def test_malformed_chains_are_refused_before_anything_is_taken(
    bench: StoreBench, parent: bytes, chain: list[bytes]
) -> None:
    with pytest.raises(InvalidArgument):
        bench.reserve(chain, parent=parent)
    assert len(bench.store.leases) == 0


def test_lookups_are_counted(bench: StoreBench) -> None:
    bench.put(CHAIN[:2])
    bench.store.match(CHAIN, pin=False, now_s=0.0)
    bench.store.match([], pin=False, now_s=0.0)  # a heartbeat is no lookup
    counters = bench.store.counters
    assert (counters.num_lookups, counters.num_blocks_asked, counters.num_blocks_matched) == (
        1,
        6,
        2,
    )


def test_an_empty_match_makes_no_lease(bench: StoreBench) -> None:
    assert bench.store.match(CHAIN, pin=True, ttl_s=5.0, now_s=0.0) == PrefixMatch([], "", 0)
    assert len(bench.store.leases) == 0


def test_a_bad_block_goes_with_all_below_it(bench: StoreBench) -> None:
    blocks = bench.put(CHAIN[:4])
    branch = bench.put([_hash(90)], parent=CHAIN[0])
    bench.changes()
    assert bench.store.drop([blocks[1], blocks[1], blocks[2]]) == 3
    bench.check()
    assert bench.changes() == [(False, CHAIN[3]), (False, CHAIN[2]), (False, CHAIN[1])]
    assert bench.num_present(CHAIN) == 1 and bench.count(SlotState.FREE) == 6
    assert bench.store.drop(blocks[1:2]) == 0  # it is not there any more
    assert bench.store.hold(branch)[1] == [True]


def test_blocks_below_a_bad_one_can_go_a_few_at_a_time(bench: StoreBench) -> None:
    """At each moment what is left is whole; the bad block goes last."""
    blocks = bench.put(CHAIN[:4])
    bench.put([_hash(90), _hash(91)], parent=CHAIN[1])
    nums = []
    while num := bench.store.drop_below(blocks[1:3], 2):
        nums.append(num)
        bench.check()
    assert nums == [2, 2] and bench.num_present(CHAIN) == 2
    assert bench.store.drop(blocks[1:2]) == 1
    assert bench.num_present(CHAIN) == 1 and bench.store.drop_below(blocks[1:2], 2) == 0


def test_pins_on_dropped_blocks_end_with_their_leases(bench: StoreBench) -> None:
    """Bad bytes are stale to every reader at once; good ones below stay readable for who leased
    them, and both frames stay out of use until then."""
    bench.put(CHAIN[:3])
    match = bench.store.match(CHAIN, pin=True, ttl_s=5.0, now_s=0.0)
    bench.store.drop(match.blocks[1:2])
    bench.check()
    assert [bench.count(s) for s in (SlotState.COMMITTED, SlotState.QUARANTINED)] == [2, 1]
    assert bench.generations[match.blocks[1].frame] == match.blocks[1].generation + 1
    assert bench.store.hold(match.blocks)[1] == [True, False, True]
    again = bench.put(CHAIN[1:2], parent=CHAIN[0])  # a good copy may come while the bad one is read
    assert bench.num_present(CHAIN) == 2 and again[0].frame != match.blocks[1].frame
    for lease in list(bench.store.leases):
        bench.store.release([lease.lease_id], now_s=0.0)
    bench.check()
    assert bench.count(SlotState.QUARANTINED) == 0 and bench.count(SlotState.COMMITTED) == 2


def test_a_bad_tail_is_stale_at_once_and_free_with_its_lease(bench: StoreBench) -> None:
    lease_id, _, tail = bench.reserve([], tail="t")
    assert tail is not None
    blocks = bench.commit(lease_id, [tail])
    assert bench.store.drop(blocks) == 1
    bench.check()
    assert bench.store.hold(blocks)[1] == [False]
    bench.store.release([lease_id], now_s=0.0)
    assert bench.count(SlotState.FREE) == 8


def test_a_put_below_a_dropped_block_is_refused_and_leaves_nothing(bench: StoreBench) -> None:
    (first,) = bench.put(CHAIN[:1])
    lease_id, answers, _ = bench.reserve(CHAIN[1:2], parent=CHAIN[0])
    bench.store.drop([first])
    with pytest.raises(FailedPrecondition, match="parent"):
        bench.commit(lease_id, answers)
    bench.abort(lease_id, answers, quarantine=False)
    bench.store.release([lease_id], now_s=0.0)
    assert bench.count(SlotState.FREE) == 8


def test_hits_are_those_of_the_last_block_before_this_one(bench: StoreBench) -> None:
    bench.put(CHAIN[:2])
    hits = [bench.store.match(CHAIN[:n], pin=False, now_s=0.0).num_hits for n in (1, 1, 2, 2, 1, 0)]
    assert hits == [0, 1, 0, 1, 4, 0]


def test_a_long_lease_that_is_over_lets_its_blocks_go_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is over at once, for everything that asks for it."""
    monkeypatch.setattr(block_store, "LET_GO_AT_ONCE", 2)
    bench = StoreBench()
    lease_id, answers, _ = bench.reserve(CHAIN[:5])
    bench.commit(lease_id, answers)
    assert bench.store.release([lease_id], now_s=0.0) == 1
    left = [bench.store.num_pinned()]
    with pytest.raises(LeaseLapsed):
        bench.store.renew(lease_id, ttl_s=1.0, now_s=0.0)
    while bench.store.num_pinned():
        invariants.check(bench.store)
        left.append(bench.store.num_pinned())
        bench.store.lapse(0.0)
    assert left[0] == 3 and max(left) == 3
    invariants.check(bench.store)


def test_what_an_ended_lease_still_pins_is_room_for_a_writer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_store, "LET_GO_AT_ONCE", 1)
    bench = StoreBench(num_frames=6)
    lease_id, answers, _ = bench.reserve(CHAIN[:6])
    bench.commit(lease_id, answers)
    bench.store.release([lease_id], now_s=0.0)
    _, answers, _ = bench.reserve([_hash(each) for each in range(100, 106)])
    assert all(answer.has_room for answer in answers)
    assert bench.store.table.num_evictions == 6
