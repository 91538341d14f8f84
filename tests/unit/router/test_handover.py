"""The way of a prompt's KV between two workers: pure, possible, and the cheaper one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.config import HandoverMode, RouterCosts
from services.router.policies import LinkCosts, TransferPath, TransferPlan, can_read, plan_transfer
from services.router.worker_views import LinkView

COSTS = RouterCosts(prefill_tokens_per_s=1000, link_bytes_per_s=1e6, exposed_put_tokens=64)
TOKENS = 160
NUM_BYTES = TOKENS * 100
PUT_BYTES = 64 * 100


@dataclass(frozen=True)
class _Party:
    block_size: int = 16
    block_bytes: int = 1600
    store_node_id: str = "s"
    transport: str = "grpc"
    remote_transport: str = "grpc"
    lender_node_id: str = ""
    links: dict[str, LinkView] = field(default_factory=dict)


P, D = _Party(lender_node_id="p/lent"), _Party()


def _plan(p: _Party, d: _Party, mode: HandoverMode = "auto") -> TransferPlan:
    return plan_transfer(p, d, TOKENS, mode, COSTS, LinkCosts([p, d], COSTS))


def test_direct_spares_the_way_into_the_store() -> None:
    direct, by_store = _plan(P, D), _plan(P, D, "store")
    assert direct == TransferPlan(TransferPath.DIRECT, link_s=NUM_BYTES / 1e6)
    assert by_store == TransferPlan(
        TransferPath.STORE, link_s=NUM_BYTES / 1e6, put_s=PUT_BYTES / 1e6
    )


def test_a_short_prompt_has_no_more_to_put_than_itself() -> None:
    way = plan_transfer(P, D, 10, "store", COSTS, LinkCosts([P, D], COSTS))
    assert way.put_s == pytest.approx(10 * 100 / 1e6)


def test_a_worker_that_lends_nothing_hands_over_through_the_store() -> None:
    for mode in ("auto", "direct"):
        assert _plan(replace(P, lender_node_id=""), D, mode).path is TransferPath.STORE


def test_who_never_reads_elsewhere_reads_neither_a_lender_nor_another_store() -> None:
    stays = replace(D, remote_transport="")
    assert _plan(P, stays, "direct").path is TransferPath.STORE
    far = replace(stays, store_node_id="t")
    assert _plan(P, far, "direct") == TransferPlan(TransferPath.STORE, compute_s=0.16)
    assert can_read(stays, "s") and not can_read(far, "s") and not can_read(D, "")


def test_a_lender_whose_store_is_away_still_hands_over() -> None:
    alone = replace(P, store_node_id="")
    assert _plan(alone, D).path is TransferPath.DIRECT
    assert _plan(alone, D, "store") == TransferPlan(TransferPath.STORE, compute_s=0.16)


def test_memory_that_both_have_mapped_is_better_than_a_wire_unless_somebody_found_it_slow() -> None:
    p, d = replace(P, transport="shm"), replace(D, transport="shm")
    quick = {"p/lent": LinkView(1e12)}
    assert _plan(p, replace(d, links=quick)).path is TransferPath.STORE
    assert _plan(p, replace(d, links=quick), "direct").path is TransferPath.DIRECT
    # Decode has another store, or copies through a wire.
    for other in (replace(d, store_node_id="t"), replace(d, transport="nixl")):
        assert _plan(p, other).path is TransferPath.DIRECT
    slow = {"s": LinkView(1e3, is_degraded=True)}
    assert _plan(p, replace(d, links=slow)).path is TransferPath.DIRECT
    assert _plan(replace(p, links=slow), d).path is TransferPath.DIRECT


def test_a_lender_s_link_of_the_same_class_costs_what_the_store_s_costs() -> None:
    """A measurement is no better than its class: only a link that is far slower loses."""
    for rate, path in (
        (1e6, TransferPath.DIRECT),
        (2.6e5, TransferPath.DIRECT),
        (1e5, TransferPath.STORE),
    ):
        d = replace(D, links={"s": LinkView(1e6), "p/lent": LinkView(rate)})
        assert _plan(P, d).path is path
    same = replace(D, links={"s": LinkView(1e6), "p/lent": LinkView(2.6e5)})
    assert _plan(P, same).link_s == pytest.approx(NUM_BYTES / 1e6)


def test_lenders_are_a_kind_of_link_of_their_own() -> None:
    """What other stores are reached with says nothing of a lender that nobody has met."""
    d = replace(D, links={"t": LinkView(1e3)})
    assert _plan(P, d).link_s == pytest.approx(NUM_BYTES / 1e6)
    d = replace(D, links={"q/lent": LinkView(5e5)})
    assert _plan(replace(P, store_node_id=""), d).link_s == pytest.approx(NUM_BYTES / 5e5)


def test_a_lender_that_failed_its_measurement_is_dear() -> None:
    d = replace(D, links={"p/lent": LinkView(0.0, is_degraded=True)})
    assert _plan(P, d).path is TransferPath.STORE
    assert _plan(P, d, "direct").link_s == pytest.approx(100 * NUM_BYTES / 1e6)


nodes = st.sampled_from(["", "s", "t"])
links = st.dictionaries(
    st.sampled_from(["s", "t", "p/lent"]),
    st.builds(LinkView, st.just(0.0) | st.floats(1e3, 1e9), st.booleans()),
)
parties = st.builds(
    _Party,
    store_node_id=nodes,
    transport=st.sampled_from(["shm", "grpc"]),
    remote_transport=st.sampled_from(["", "grpc"]),
    lender_node_id=st.sampled_from(["", "p/lent"]),
    links=links,
)


@given(p=parties, d=parties, mode=st.sampled_from(["auto", "store", "direct"]))
def test_whatever_is_known_the_way_is_possible_and_its_cost_finite(
    p: _Party, d: _Party, mode: HandoverMode
) -> None:
    way = _plan(p, d, mode)
    assert 0 < way.seconds < math.inf
    if way.path is TransferPath.DIRECT:
        assert mode != "store" and can_read(d, p.lender_node_id)
    elif not way.compute_s:
        assert can_read(d, p.store_node_id)
    else:
        assert not can_read(d, p.store_node_id)
    if mode == "direct":
        assert (way.path is TransferPath.DIRECT) == can_read(d, p.lender_node_id)
