"""What every policy promises: the cheapest pair of all, reasons that add up, the same answer for
the same values, no suspect while there is another worker; and what the joint policy weighs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from process.rpc_errors import Unavailable
from services.router.config import HandoverMode, RouterCosts, RoutingPolicy
from services.router.policies import (
    DECODE,
    PARTS,
    PREFILL,
    Choice,
    Joint,
    PlacementQuery,
    Pools,
    ScoredPolicy,
    Scorer,
    TransferPath,
    WorkerLoad,
    fitting_workers,
    make,
)
from services.router.prefixes import FoundPrefixes, StoreRun
from services.router.worker_views import LinkView
from tests.unit.router.pools import COSTS, load, random_case, slow_case

NAMES = get_args(RoutingPolicy)
policies = pytest.mark.parametrize("name", NAMES)
ASK = PlacementQuery(num_prompt_tokens=160, max_tokens=17, affinity=b"0123456789abcdef")


def _policy(name: str) -> ScoredPolicy:
    policy = make(name, COSTS)  # type: ignore[arg-type]
    assert isinstance(policy, ScoredPolicy) and policy.name == name and policy.unit
    return policy


def _ways(scorer: Scorer) -> list[tuple[int, WorkerLoad | None, WorkerLoad | None]]:
    """Every way to serve the request, with its cost by its own terms."""
    pools, ask = scorer.pools, scorer.ask
    prefill = fitting_workers(pools.prefill, ask)
    decode = fitting_workers(pools.decode, ask)
    pairs: list[tuple[WorkerLoad | None, WorkerLoad | None]]
    if ask.needs_decode:
        pairs = [(p, d) for p in prefill for d in decode if p.layout == d.layout]
        if ask.max_own_tokens:
            pairs += [(None, d) for d in decode if scorer.num_own(d) <= ask.max_own_tokens]
    else:
        pairs = [(p, None) for p in prefill]
    return [(sum(scorer.terms(*pair).values()), *pair) for pair in pairs]


def _chosen(choice: Choice) -> tuple[str | None, str | None]:
    return choice.prefill_id, choice.decode_id


@policies
def test_no_pair_is_cheaper_than_the_chosen_one(
    name: str, seed: int, scale: Callable[[int], int]
) -> None:
    """Against trying all of them. The search leaves most out; none of those may be cheaper."""
    rng, policy = random.Random(seed), _policy(name)
    num_served = 0
    for _ in range(scale(1500)):
        pools, ask = random_case(rng)
        scorer = policy.scorer(pools, ask)
        ways = _ways(scorer)
        try:
            choice = policy.choose(pools, ask)
        except Unavailable:
            assert not ways, ask
            continue
        num_served += 1
        least = min(cost for cost, _, _ in ways)
        best = [(p and p.worker_id, d and d.worker_id) for cost, p, d in ways if cost == least]
        assert _chosen(choice) in best, (choice, best)
        assert choice.cost == pytest.approx(least / PARTS, abs=1e-6)
        assert all(value >= 0 for value in choice.why.values())
        assert choice.num_pairs == len(ways)
    assert num_served > scale(1500) / 3


@policies
def test_slow_links_decide_as_if_all_pairs_were_tried(
    name: str, seed: int, scale: Callable[[int], int]
) -> None:
    """What was measured as slow makes workers unequal that the search would take together."""
    rng, policy = random.Random(seed), _policy(name)
    for _ in range(scale(8000)):
        pools, ask = slow_case(rng)
        ways = _ways(policy.scorer(pools, ask))
        least = min(cost for cost, _, _ in ways)
        best = {(p and p.worker_id, d and d.worker_id) for cost, p, d in ways if cost == least}
        assert _chosen(policy.choose(pools, ask)) in best


@policies
def test_the_order_of_the_workers_means_nothing(
    name: str, seed: int, scale: Callable[[int], int]
) -> None:
    rng, policy = random.Random(seed), _policy(name)
    for _ in range(scale(300)):
        pools, ask = random_case(rng)
        try:
            choice = policy.choose(pools, ask)
        except Unavailable:
            continue
        prefill, decode = list(pools.prefill), list(pools.decode)
        rng.shuffle(prefill)
        rng.shuffle(decode)
        assert policy.choose(Pools.of(prefill, decode, COSTS), ask) == choice


@policies
def test_costs_of_the_search_are_the_sums_of_their_terms(
    name: str, seed: int, scale: Callable[[int], int]
) -> None:
    """Two forms of the same numbers: a quick one for every worker, and the one that is shown."""
    rng, policy = random.Random(seed), _policy(name)
    for _ in range(scale(200)):
        pools, ask = random_case(rng)
        scorer = policy.scorer(pools, ask)
        for p in pools.prefill:
            assert scorer.prefill_cost(p) == sum(scorer.terms(p, None).values())
            for d in pools.decode:
                if p.layout == d.layout:
                    whole = scorer.prefill_cost(p) + scorer.way_cost(p, d) + scorer.decode_cost(d)
                    assert whole == sum(scorer.terms(p, d).values())


@policies
def test_nobody_under_suspicion_while_there_is_another(name: str) -> None:
    policy = _policy(name)
    busy = {"num_queued_tokens": 50_000, "num_requests": 90}
    good = (load("p1", **busy), load("d1", **busy))
    bad = (load("p0", is_suspect=True), load("d0", is_suspect=True))
    for turn in range(4):
        ask = replace(ASK, turn=turn, local={bad[0].incarnation: 160, bad[1].incarnation: 160})
        pools = Pools.of([bad[0], good[0]], [bad[1], good[1]], COSTS)
        assert _chosen(policy.choose(pools, ask)) == ("p1", "d1")
        alone = Pools.of(bad[:1], bad[1:], COSTS)
        assert _chosen(policy.choose(alone, ask)) == ("p0", "d0")


@policies
def test_room_before_load(name: str) -> None:
    full, roomy = load("d0", num_free_blocks=10), load("d1", num_requests=90)
    for turn in range(2):
        choice = _policy(name).choose(
            Pools.of([load("p0")], [full, roomy], COSTS), replace(ASK, turn=turn)
        )
        assert choice.decode_id == "d1"


@policies
def test_workers_of_another_layout_never_meet(name: str) -> None:
    pools = Pools.of([load("p0")], [load("d0", fingerprint="g"), load("d1", block_size=32)], COSTS)
    with pytest.raises(Unavailable, match="same model"):
        _policy(name).choose(pools, ASK)


@policies
def test_what_is_missing_is_named(name: str) -> None:
    policy = _policy(name)
    with pytest.raises(Unavailable, match="no prefill worker is"):
        policy.choose(Pools.of([], [load("d0")], COSTS), ASK)
    with pytest.raises(Unavailable, match="no decode worker is"):
        policy.choose(Pools.of([load("p0")], [], COSTS), ASK)
    short = Pools.of([load("p0")], [load("d0", context_window=100)], COSTS)
    with pytest.raises(Unavailable, match="no decode worker with a window that long"):
        policy.choose(short, replace(ASK, window=177))


@policies
def test_a_window_that_is_too_short_is_passed_over(name: str) -> None:
    prefill = [load("p0", context_window=100), load("p1", context_window=400, num_requests=9)]
    decode = [load("d0", context_window=100), load("d1", context_window=400, num_requests=9)]
    for turn in range(2):
        ask = replace(ASK, window=177, turn=turn)
        assert _chosen(_policy(name).choose(Pools.of(prefill, decode, COSTS), ask)) == ("p1", "d1")


@policies
def test_a_decode_worker_computes_a_short_prompt_itself_only_if_it_may(name: str) -> None:
    policy, pools = _policy(name), Pools.of([load("p0")], [load("d0")], COSTS)
    for most, local, expected in (
        (0, 159, "p0"),
        (159, 0, "p0"),
        (160, 0, None),
        (10, 150, None),
        (9, 150, "p0"),
    ):
        local_of = {"life of d0": local}
        ask = replace(ASK, max_own_tokens=most, local=local_of)
        choice = policy.choose(pools, ask)
        if name != "joint" or expected is not None:  # joint weighs it: see below
            assert choice.prefill_id == expected, (most, local)
        assert choice.decode_id == "d0"
        if choice.prefill_id is None:
            assert choice.num_computed == 160 - local and choice.runs == ()


@policies
def test_what_was_weighed_adds_up(name: str, seed: int, scale: Callable[[int], int]) -> None:
    """The chosen worker of each role and the cheapest others, in order, none of them cheaper than
    the chosen pair."""
    rng, policy = random.Random(seed), _policy(name)
    for _ in range(scale(300)):
        pools, ask = random_case(rng)
        try:
            choice = policy.choose(pools, ask)
        except Unavailable:
            continue
        rows = policy.weigh(pools, ask, choice, limit=3)
        for role, chosen in ((PREFILL, choice.prefill_id), (DECODE, choice.decode_id)):
            of_role = [row for row in rows if row.role == role]
            assert len(of_role) <= 3
            assert [row.worker_id for row in of_role if row.is_chosen] == (
                [chosen] if chosen else []
            )
            for row in of_role:
                assert row.cost >= choice.cost - 1e-6
                if row.is_chosen:
                    assert row.why == choice.why
            rest = [row.cost for row in of_role if not row.is_chosen]
            assert rest == sorted(rest)


def test_round_robin_takes_turns_and_passes_over_who_cannot() -> None:
    policy = _policy("round_robin")
    prefill, decode = [load(f"p{i}") for i in range(3)], [load(f"d{i}") for i in range(2)]
    pools = Pools.of(prefill, decode, COSTS)
    chosen = [_chosen(policy.choose(pools, replace(ASK, turn=turn))) for turn in range(6)]
    assert [p for p, _ in chosen] == ["p0", "p1", "p2"] * 2
    assert [d for _, d in chosen] == ["d0", "d1"] * 3
    pools = Pools.of([replace(prefill[0], is_suspect=True), *prefill[1:]], decode, COSTS)
    assert policy.choose(pools, ASK).prefill_id == "p1"


def test_least_load_sees_no_prefix_and_prefix_aware_does() -> None:
    far = load("p0", store_node_id="s", remote_transport="")
    near = load("p1", store_node_id="t", num_queued_tokens=50)
    pools, ask = Pools.of([far, near], [load("d0")], COSTS), _holding({"t": 9})
    assert _policy("least_load").choose(pools, ask).prefill_id == "p0"
    assert _policy("prefix_aware").choose(pools, ask).prefill_id == "p1"


def test_joint_skips_prefill_where_that_is_cheaper() -> None:
    """160 tokens are 0.16 s anywhere; the handover of 16 kB is 16 ms; each stream that would wait
    counts as much as this one."""
    policy, ask = _policy("joint"), replace(ASK, max_own_tokens=1000)

    def choose(prefill: WorkerLoad, decode: WorkerLoad, ask: PlacementQuery = ask) -> Choice:
        return policy.choose(Pools.of([prefill], [decode], COSTS), ask)

    p, d = load("p0"), load("d0")
    choice = choose(p, d)
    assert choice.prefill_id is None
    assert choice.why["decode_compute"] == pytest.approx(0.16)
    assert choice.why["decode_disturb"] == 0
    busy = replace(d, num_requests=1)
    assert choose(p, busy).prefill_id == "p0"
    assert choose(replace(p, num_queued_tokens=500), busy).prefill_id is None
    near = replace(ask, local={"life of d0": 150})
    choice = choose(p, busy, near)
    assert choice.prefill_id is None
    assert choice.why["decode_disturb"] == pytest.approx(0.01)


def test_joint_goes_where_the_conversation_lies() -> None:
    """What lies at a worker is neither computed there nor moved there."""
    policy = _policy("joint")
    prefill, decode = [load("p0"), load("p1")], [load("d0"), load("d1")]
    for home in ("0", "1"):
        local = {f"life of p{home}": 128, f"life of d{home}": 128}
        for affinity in (b"a", b"b", b"c", b"d"):
            ask = replace(ASK, local=local, affinity=affinity)
            choice = policy.choose(Pools.of(prefill, decode, COSTS), ask)
            assert _chosen(choice) == (f"p{home}", f"d{home}")
            assert choice.num_computed == 32


def test_joint_keeps_long_windows_for_long_prompts() -> None:
    policy = _policy("joint")
    short, long = {"context_window": 512}, {"context_window": 8192}
    pools = Pools.of(
        [load("p0", **long), load("p1", **short)], [load("d0", **long), load("d1", **short)], COSTS
    )
    for affinity in (b"a", b"b", b"c", b"d"):
        ask = replace(ASK, affinity=affinity, window=177)
        assert _chosen(policy.choose(pools, ask)) == ("p1", "d1")
        ask = replace(ask, window=1000)
        assert _chosen(policy.choose(pools, ask)) == ("p0", "d0")
    # A queue is worse than a long window taken.
    busy = Pools.of(
        [pools.prefill[0], replace(pools.prefill[1], num_queued_tokens=100)], pools.decode, COSTS
    )
    assert policy.choose(busy, replace(ASK, window=177)).prefill_id == "p0"


def choose(
    prefill: Sequence[WorkerLoad],
    decode: Sequence[WorkerLoad],
    ask: PlacementQuery = ASK,
    costs: RouterCosts = COSTS,
    mode: HandoverMode = "auto",
) -> Choice:
    """The joint policy's choice."""
    return Joint(costs, mode).choose(Pools.of(prefill, decode, costs), ask)


def _holding(held: Mapping[str, int]) -> PlacementQuery:
    """The ask when stores hold so many blocks of it."""
    return replace(ASK, prefixes=FoundPrefixes({("f", 16): held}))


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
    choice = choose([load("p0")], [load("d0")], ask)
    assert choice.runs == (StoreRun("s", 0, 2), StoreRun("t", 2, 5))
    assert choice.why["prefill_compute"] == pytest.approx((160 - 7 * 16) / 1000)
    assert choice.why["prefill_link"] == pytest.approx(2 * 1600 / 1e6)
    assert choice.why["prefill_pull"] == pytest.approx(2 * 5 * 1600 / 1e6)


def test_a_decode_worker_that_cannot_read_the_prompt_costs_computing_it_again() -> None:
    far = load("far", store_node_id="t", remote_transport="")
    choice = choose([load("p0")], [far])
    assert choice.why["decode_compute"] == pytest.approx(0.16)
    assert choice.why["decode_link"] == choice.why["handover_put"] == 0
    assert choose([load("p0")], [far, load("d0", num_requests=1)]).decode_id == "d0"


def test_the_choice_says_which_way_the_kv_goes() -> None:
    p = load("p0", transport="grpc", lender_node_id="p0/lent")
    for mode, path in (
        ("auto", TransferPath.DIRECT),
        ("direct", TransferPath.DIRECT),
        ("store", TransferPath.STORE),
    ):
        choice = choose([p], [load("d0")], ASK, mode=mode)
        assert choice.path is path
        assert (choice.why["handover_put"] > 0) == (path is TransferPath.STORE)
    alone = choose([p], [], replace(ASK, needs_decode=False), mode="direct")
    assert alone.path is TransferPath.STORE  # nothing is handed over


def test_of_two_equal_prefill_workers_the_one_that_lends() -> None:
    lends = load("p1", transport="grpc", lender_node_id="p1/lent")
    for affinity in (b"a", b"b", b"c", b"d"):
        ask = replace(ASK, affinity=affinity)
        choice = choose([load("p0", transport="grpc"), lends], [load("d0")], ask)
        assert choice.prefill_id == "p1"


def test_measured_links_count_instead_of_the_guess() -> None:
    p = load("p0", links={"s": LinkView(1e5), "t": LinkView(5e5)})
    d = load("d0", links={"s": LinkView(2e4)})
    choice = choose([p], [d], _holding({"s": 2, "t": 7}))
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
    measured = choose(loads[:2], loads[2:], ask)
    plain = choose([load("p0"), load("p1")], [load("d0"), load("d1")], ask)
    assert (measured.prefill_id, measured.decode_id) == (plain.prefill_id, plain.decode_id)


def test_a_link_that_failed_its_measurement_is_dear_and_not_pulled_over() -> None:
    """It gave wrong bytes, or too few. A busy start must not idle a worker for ever."""
    failed = {"t": LinkView(0.0, is_degraded=True)}
    ask, quick = _holding({"t": 7}), replace(COSTS, link_bytes_per_s=1e12)
    assert choose([load("p0", links=failed)], [load("d0")], ask, quick).runs == ()
    p, d = load("p0"), load("d0", links={"s": LinkView(0.0, is_degraded=True)})
    choice = choose([p], [d, load("d1", num_requests=15)])
    assert choice.decode_id == "d1"
    choice = choose([p], [d, load("d1", num_requests=17)])
    assert choice.why["decode_link"] == pytest.approx(100 * 16_000 / 1e6)


def test_a_degraded_link_is_used_only_where_it_beats_computing() -> None:
    """A block of 1,600 bytes takes 16 ms to compute: at 1e5 bytes/s as long to fetch."""
    ask = _holding({"t": 7, "u": 5})
    for rate, node in ((9e4, "u"), (2e5, "t")):
        links = {"t": LinkView(rate, is_degraded=True)}
        (run,) = choose([load("p0", links=links)], [load("d0")], ask).runs
        assert run.node_id == node
    healthy = {"t": LinkView(9e4)}
    (run,) = choose([load("p0", links=healthy)], [load("d0")], ask).runs
    assert run.node_id == "t"  # slow for its kind of link, or computing is slower than we guess


def test_ties_follow_affinity_and_spread() -> None:
    prefill = [load(f"p{i}") for i in range(4)]
    decode = [load(f"d{i}") for i in range(4)]
    pairs = set()
    for number in range(200):
        ask = replace(ASK, affinity=number.to_bytes(2, "big"))
        first = choose(prefill, decode, ask)
        again = choose(prefill[::-1], decode[::-1], ask)
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
        choice = choose(p_loads, d_loads, _holding({"s": 2, "t": 4}))
    except Unavailable:
        assert not pairs
        return
    assert (choice.prefill_id, choice.decode_id) in pairs
    assert all(0 <= seconds < math.inf for seconds in choice.why.values())
    assert sum(run.num_blocks for run in choice.runs) in (0, 2, 4)
