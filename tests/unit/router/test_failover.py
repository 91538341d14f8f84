"""How often a request may lose its worker, and what its account says of those it lost."""

from __future__ import annotations

import pytest

from process.rpc_errors import FailedPrecondition, NoCapacity, Unavailable
from protos import common_pb2
from services.router.lifecycle import (
    HANDOVER_S,
    LAPSED,
    SHORT,
    FailoverBudget,
    Loss,
    handle_unusable_reason,
)
from services.router.request_stats import LOST, MOVED, KvAccount, StageTimes
from services.router.sealed_handle import Extent

NOW_S = 1_700_000_000.0


def _handle(num_tokens: int, left_s: float = 60.0) -> Extent:
    deadline_unix_ms = int((NOW_S + left_s) * 1000)
    return Extent(num_tokens=num_tokens, block_size=16, deadline_unix_ms=deadline_unix_ms)


@pytest.mark.parametrize(
    ("handle", "max_own_tokens", "why"),
    [
        (_handle(99), 0, ""),
        (_handle(84), 0, ""),  # the rest of a block: a cache that is quantized has no part of one
        (_handle(83), 0, SHORT),
        (_handle(0), 99, SHORT),
        (_handle(0), 100, ""),  # as of a new request
        (_handle(99, HANDOVER_S / 2), 100, LAPSED),
        (_handle(99, -5.0), 100, LAPSED),
        (Extent(num_tokens=99), 0, ""),  # its worker sees to its deadline
    ],
)
def test_a_handle_with_which_much_is_computed_alone_is_told(
    handle: Extent, max_own_tokens: int, why: str
) -> None:
    assert handle_unusable_reason(handle, 100, max_own_tokens, NOW_S) == why


def test_an_error_says_what_made_it_necessary_to_look() -> None:
    failover = FailoverBudget(StageTimes(), max_lost=1)
    failover.note(Loss("d0", "life", None))
    told = failover.explained(NoCapacity("full", retry_after_s=2.0))
    assert isinstance(told, Unavailable) and told.retry_after_s == 2.0
    assert str(told) == "decode worker d0 left, and no other worker took over: full"
    lacking = failover.explained(FailedPrecondition("adapter: unloaded"))
    assert isinstance(lacking, FailedPrecondition) and lacking.retry_after_s is None
    assert str(lacking) == "decode worker d0 left, and no other worker took over: adapter: unloaded"


def _leg(role: str, *, computed: int = 0, local: int = 0, stored: int = 0) -> common_pb2.KvLeg:
    leg = common_pb2.KvLeg(role=role, num_tokens_computed=computed, num_tokens_local=local)
    if stored:
        leg.from_store.add(num_tokens=stored)
    return leg


def test_what_is_cached_is_said_by_who_computed_the_prompt_first() -> None:
    account = KvAccount()
    assert account.num_cached_tokens == 0
    account.add(_leg("prefill", computed=30, local=10, stored=5), 16)
    account.add_silent("d0", "life", LOST)
    account.recompute_for(LOST)
    account.add(_leg("prefill", computed=17, local=28), 16)
    account.add(_leg("decode", stored=45), 16)
    assert account.num_cached_tokens == 15
    assert [leg.ended_by for leg in account.legs] == ["", LOST, "", ""]
    assert [
        {entry.reason: entry.num_blocks for entry in leg.recomputed} for leg in account.legs
    ] == [{}, {}, {LOST: 2}, {}]


def test_only_what_a_leg_had_is_computed_again() -> None:
    """One that left inside its prompt had not computed the rest of it; nor had one that never
    began."""
    account = KvAccount()
    account.add_silent("d0", "life", MOVED)
    account.recompute_for(MOVED)
    account.add(_leg("decode", computed=40, local=8), 16, MOVED)
    account.recompute_for(MOVED)
    account.add(_leg("prefill", computed=68, stored=32), 16)
    account.recompute_for(MOVED)
    account.add(_leg("prefill", computed=20, stored=80), 16)
    assert [
        {entry.reason: entry.num_blocks for entry in leg.recomputed} for leg in account.legs
    ] == [{}, {}, {MOVED: 1}, {MOVED: 2}]


def test_without_a_prefill_worker_the_one_that_told_counts() -> None:
    account = KvAccount()
    account.expect(7)
    assert account.num_cached_tokens == 7
    account.add_silent("d0", "life", LOST)
    assert account.num_cached_tokens == 7
    account.add(_leg("decode", computed=5, local=3), 16, MOVED)
    assert account.num_cached_tokens == 3
