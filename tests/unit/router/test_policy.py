"""The joint choice of a pair: pure, total, and for the reasons it gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from process.errors import Unavailable
from services.router.config import HandoverMode, RouterCosts
from services.router.policies import (
    Choice,
    Joint,
    PlacementQuery,
    Pools,
    TransferPath,
    WorkerLoad,
    blocks_needed,
)
from services.router.prefixes import FoundPrefixes, StoreRun
from services.router.worker_views import LinkView
from tests.unit.router.pools import COSTS, load

ASK = PlacementQuery(num_prompt_tokens=160, max_tokens=17, affinity=b"a")


def choose(
    prefill: Sequence[WorkerLoad],
    decode: Sequence[WorkerLoad],
    ask: PlacementQuery,
    costs: RouterCosts,
    mode: HandoverMode = "auto",
) -> Choice:
    return Joint(costs, mode).choose(Pools.of(prefill, decode, costs), ask)


def _holding(held: Mapping[str, int], fingerprint: str = "f") -> PlacementQuery:
    """The ask when stores hold so many blocks of it."""
    return replace(ASK, prefixes=FoundPrefixes({(fingerprint, 16): held}))


def test_the_shorter_queue() -> None:
    prefill = [load("p0", num_queued_tokens=500), load("p1")]
    choice = choose(prefill, [load("d0")], ASK, COSTS)
    assert (choice.prefill_id, choice.decode_id, choice.num_pairs) == ("p1", "d0", 2)
    assert choice.why["prefill_compute"] == pytest.approx(0.16)
    assert choice.why["prefill_queue"] == 0


def test_a_cached_prefix_is_worth_a_queue_but_not_any_queue() -> None:
    """The other worker could pull it too, over one link more."""
    costs = replace(COSTS, link_bytes_per_s=2e5)
    ask = _holding({"s1": 10})
    near = load("p1", store_node_id="s1")
    decode = [load("d0", store_node_id="s1")]
    choice = choose([load("p0"), replace(near, num_queued_tokens=100)], decode, ask, costs)
    assert choice.prefill_id == "p1"
    assert choice.why["prefill_compute"] == pytest.approx(0.001)  # the last token always
    choice = choose([load("p0"), replace(near, num_queued_tokens=300)], decode, ask, costs)
    assert choice.prefill_id == "p0"


def test_what_the_union_holds_is_cached() -> None:
    """Its own store's part over one link, the rest from where it is longest over two."""
    ask = _holding({"s": 2, "t": 7, "u": 5})
    choice = choose([load("p0")], [load("d0")], ask, COSTS)
    assert choice.runs == (StoreRun("s", 0, 2), StoreRun("t", 2, 5))
    assert choice.why["prefill_compute"] == pytest.approx((160 - 7 * 16) / 1000)
    assert choice.why["prefill_link"] == pytest.approx(2 * 1600 / 1e6)
    assert choice.why["prefill_pull"] == pytest.approx(2 * 5 * 1600 / 1e6)


def test_a_worker_without_a_store_has_no_prefix() -> None:
    choice = choose([load("p0", store_node_id="")], [load("d0")], _holding({"t": 7}), COSTS)
    assert choice.runs == () and choice.why["prefill_pull"] == 0


def test_who_never_reads_elsewhere_is_told_of_its_own_store_only() -> None:
    stays = load("p0", remote_transport="")
    choice = choose([stays], [load("d0")], _holding({"s": 2, "t": 7}), COSTS)
    assert choice.runs == (StoreRun("s", 0, 2),)
    assert choose([stays], [load("d0")], _holding({"t": 7}), COSTS).runs == ()


def test_a_decode_worker_that_cannot_read_the_prompt_costs_computing_it_again() -> None:
    far = load("far", store_node_id="t", remote_transport="")
    choice = choose([load("p0")], [far], ASK, COSTS)
    assert choice.why["decode_compute"] == pytest.approx(0.16)
    assert choice.why["decode_link"] == choice.why["handover_put"] == 0
    assert choose([load("p0")], [far, load("d0", num_requests=1)], ASK, COSTS).decode_id == "d0"


def test_the_choice_says_which_way_the_kv_goes() -> None:
    p = load("p0", transport="grpc", lender_node_id="p0/lent")
    for mode, path in (
        ("auto", TransferPath.DIRECT),
        ("direct", TransferPath.DIRECT),
        ("store", TransferPath.STORE),
    ):
        choice = choose([p], [load("d0")], ASK, COSTS, mode)
        assert choice.path is path
        assert (choice.why["handover_put"] > 0) == (path is TransferPath.STORE)
    alone = choose([p], [], replace(ASK, needs_decode=False), COSTS, "direct")
    assert alone.path is TransferPath.STORE  # nothing is handed over


def test_of_two_equal_prefill_workers_the_one_that_lends() -> None:
    lends = load("p1", transport="grpc", lender_node_id="p1/lent")
    for affinity in (b"a", b"b", b"c", b"d"):
        ask = replace(ASK, affinity=affinity)
        choice = choose([load("p0", transport="grpc"), lends], [load("d0")], ask, COSTS)
        assert choice.prefill_id == "p1"


def test_measured_links_count_instead_of_the_guess() -> None:
    p = load("p0", links={"s": LinkView(1e5), "t": LinkView(5e5)})
    d = load("d0", links={"s": LinkView(2e4)})
    choice = choose([p], [d], _holding({"s": 2, "t": 7}), COSTS)
    assert choice.why["prefill_link"] == pytest.approx(2 * 1600 / 1e5)
    assert choice.why["prefill_pull"] == pytest.approx(5 * 1600 / 5e5)
    assert choice.why["decode_link"] == pytest.approx(160 * 100 / 2e4)


@given(
    rates=st.lists(st.floats(2.5e5, 1e6), min_size=8, max_size=8),
    affinity=st.binary(min_size=1, max_size=8),
)
def test_noise_of_measurements_moves_no_choice(rates: list[float], affinity: bytes) -> None:
    """Equal workers whose links were measured at one and at four times a rate cost the same, so
    that affinity decides as if nothing had been measured."""
    names = ("p0", "p1", "d0", "d1")
    loads = [
        load(name, links={"s": LinkView(home), "t": LinkView(far)})
        for name, home, far in zip(names, rates[:4], rates[4:], strict=True)
    ]
    loads[0] = replace(loads[0], links={"s": LinkView(rates[0])})  # it has not met the other store
    ask = replace(_holding({"s": 2, "t": 7}), affinity=affinity)
    measured = choose(loads[:2], loads[2:], ask, COSTS)
    plain = choose([load("p0"), load("p1")], [load("d0"), load("d1")], ask, COSTS)
    assert (measured.prefill_id, measured.decode_id) == (plain.prefill_id, plain.decode_id)


def test_a_link_that_failed_its_measurement_is_dear_and_not_pulled_over() -> None:
    """It gave wrong bytes, or too few. A busy start must not idle a worker for ever."""
    failed = {"t": LinkView(0.0, is_degraded=True)}
    ask, quick = _holding({"t": 7}), replace(COSTS, link_bytes_per_s=1e12)
    assert choose([load("p0", links=failed)], [load("d0")], ask, quick).runs == ()
    p, d = load("p0"), load("d0", links={"s": LinkView(0.0, is_degraded=True)})
    choice = choose([p], [d, load("d1", num_requests=15)], ASK, COSTS)
    assert choice.decode_id == "d1"
    choice = choose([p], [d, load("d1", num_requests=17)], ASK, COSTS)
    assert choice.why["decode_link"] == pytest.approx(100 * 16_000 / 1e6)


def test_of_two_equal_prefixes_the_nearer_one_is_pulled() -> None:
    ask = _holding({"t": 7, "u": 7})
    for near, far in (("t", "u"), ("u", "t")):
        links = {near: LinkView(1e6), far: LinkView(2e5)}
        assert choose([load("p0", links=links)], [load("d0")], ask, COSTS).runs == (
            StoreRun(near, 0, 7),
        )


def test_a_degraded_link_is_used_only_where_it_beats_computing() -> None:
    """A block of 1,600 bytes takes 16 ms to compute: at 1e5 bytes/s as long to fetch."""
    ask = _holding({"t": 7, "u": 5})
    for rate, node in ((9e4, "u"), (2e5, "t")):
        links = {"t": LinkView(rate, is_degraded=True)}
        (run,) = choose([load("p0", links=links)], [load("d0")], ask, COSTS).runs
        assert run.node_id == node
    healthy = {"t": LinkView(9e4)}
    (run,) = choose([load("p0", links=healthy)], [load("d0")], ask, COSTS).runs
    assert run.node_id == "t"  # slow for its kind of link, or computing is slower than we guess


def test_a_prefix_of_another_model_is_worth_nothing() -> None:
    ask = _holding({"s": 10}, "other")
    choice = choose([load("p0")], [load("d0")], ask, COSTS)
    assert choice.why["prefill_compute"] == pytest.approx(0.16)


def test_bytes_over_the_link_count() -> None:
    """Of two pairs the one that shares a store, although its decode worker is a little busier."""
    decode = [load("far", store_node_id="t"), load("near", num_requests=0)]
    assert choose([load("p0")], decode, ASK, COSTS).decode_id == "near"


def test_the_less_loaded_decode_worker() -> None:
    decode = [load("d0", num_requests=3), load("d1", num_requests=2)]
    assert choose([load("p0")], decode, ASK, COSTS).decode_id == "d1"


def test_room_beats_load() -> None:
    assert blocks_needed(160, 17, 16) == 11
    decode = [load("d0", num_free_blocks=10), load("d1", num_free_blocks=11, num_requests=9)]
    assert choose([load("p0")], decode, ASK, COSTS).decode_id == "d1"


def test_a_suspect_is_the_last_choice_but_a_choice() -> None:
    prefill = [load("p0", is_suspect=True), load("p1", num_queued_tokens=10_000)]
    decode = [load("d0", is_suspect=True)]
    choice = choose(prefill, decode, ASK, COSTS)
    assert (choice.prefill_id, choice.decode_id) == ("p1", "d0")


def test_one_token_needs_no_decode_worker() -> None:
    choice = choose([load("p0")], [], replace(ASK, needs_decode=False), COSTS)
    assert choice.decode_id is None


def test_missing_roles_are_named() -> None:
    with pytest.raises(Unavailable, match="no prefill worker"):
        choose([], [load("d0")], ASK, COSTS)
    with pytest.raises(Unavailable, match="no decode worker"):
        choose([load("p0")], [], ASK, COSTS)
    with pytest.raises(Unavailable, match="same model"):
        choose([load("p0")], [load("d0", fingerprint="g")], ASK, COSTS)
    with pytest.raises(Unavailable, match="same model"):
        choose([load("p0")], [load("d0", block_size=32)], ASK, COSTS)


def test_ties_follow_affinity_and_spread() -> None:
    prefill = [load(f"p{i}") for i in range(4)]
    decode = [load(f"d{i}") for i in range(4)]
    pairs = set()
    for number in range(200):
        ask = replace(ASK, affinity=number.to_bytes(2, "big"))
        first = choose(prefill, decode, ask, COSTS)
        again = choose(prefill[::-1], decode[::-1], ask, COSTS)
        assert (first.prefill_id, first.decode_id) == (again.prefill_id, again.decode_id)
        pairs.add((first.prefill_id, first.decode_id))
    assert len(pairs) == 16


loads = st.builds(
    load,
    st.sampled_from(["a", "b", "c", "d"]),
    fingerprint=st.sampled_from(["f", "g"]),
    num_requests=st.integers(0, 50),
    num_queued_tokens=st.integers(0, 10_000),
    num_free_blocks=st.integers(0, 100),
    store_node_id=st.sampled_from(["s", "t"]),
    is_suspect=st.booleans(),
    remote_transport=st.sampled_from(["", "grpc"]),
    lender_node_id=st.sampled_from(["", "a/lent"]),
)
links = st.dictionaries(
    st.sampled_from(["s", "t", "a/lent"]),
    st.builds(LinkView, st.just(0.0) | st.floats(1e3, 1e9), st.booleans()),
)


@given(prefill=st.lists(loads, max_size=4), decode=st.lists(loads, max_size=4))
def test_the_choice_is_a_valid_pair_of_least_cost(
    prefill: list[WorkerLoad], decode: list[WorkerLoad]
) -> None:
    ask = _holding({"s": 2, "t": 4})
    pairs = [(p, d) for p in prefill for d in decode if p.fingerprint == d.fingerprint]
    try:
        choice = choose(prefill, decode, ask, COSTS)
    except Unavailable:
        assert not pairs
        return
    cost = sum(choice.why.values())
    alone = [sum(choose([p], [d], ask, COSTS).why.values()) for p, d in pairs]
    assert cost == pytest.approx(min(alone))
    assert (choice.prefill_id, choice.decode_id) in {(p.worker_id, d.worker_id) for p, d in pairs}


@given(
    prefill=st.lists(st.tuples(loads, links), min_size=1, max_size=4),
    decode=st.lists(st.tuples(loads, links), min_size=1, max_size=4),
)
def test_whatever_was_measured_the_choice_is_a_valid_pair_of_finite_cost(
    prefill: list[tuple[WorkerLoad, dict[str, LinkView]]],
    decode: list[tuple[WorkerLoad, dict[str, LinkView]]],
) -> None:
    p_loads, d_loads = (
        [replace(load, links=links) for load, links in loads] for loads in (prefill, decode)
    )
    pairs = {(p.worker_id, d.worker_id) for p in p_loads for d in d_loads if p.layout == d.layout}
    try:
        choice = choose(p_loads, d_loads, _holding({"s": 2, "t": 4}), COSTS)
    except Unavailable:
        assert not pairs
        return
    assert (choice.prefill_id, choice.decode_id) in pairs
    assert all(0 <= seconds < math.inf for seconds in choice.why.values())
    assert sum(run.num_blocks for run in choice.runs) in (0, 2, 4)
