"""Cancel is a state: what abort and quarantine do in each state of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.errors import InvalidRequest, NoBlocks, UnknownRequest, WrongState
from engine.request import RequestState
from engine.testing.fake_model import FakeModel

Make = Callable[..., Any]
PROMPT = tuple(range(1, 15))


def _bring(engine: Any, request: Any, state: RequestState) -> Any:
    """A request in `state`, on an engine with a budget of 8."""
    reservation = engine.reserve(request)
    if state is not RequestState.RESERVED:
        engine.start(request.request_id)
    for _ in range(
        {RequestState.PREFILLING: 1, RequestState.RUNNING: 2, RequestState.HOLDING: 2}.get(state, 0)
    ):
        engine.step()
    assert engine._groups[request.request_id].state is state
    return reservation


LIVE = [
    RequestState.RESERVED,
    RequestState.WAITING,
    RequestState.PREFILLING,
    RequestState.RUNNING,
    RequestState.HOLDING,
]


def _request(make_request: Make, state: RequestState) -> Any:
    return make_request("a", PROMPT, hold_after=1 if state is RequestState.HOLDING else None)


@pytest.mark.parametrize("state", LIVE)
def test_abort_gives_every_block_back(
    state: RequestState, make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    engine = make_engine(budget=8)
    _bring(engine, _request(make_request, state), state)
    engine.abort("a")
    engine.check_integrity()
    stats = engine.stats()
    assert stats.num_referenced_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == 64
    engine.abort("a")  # idempotent
    with pytest.raises(UnknownRequest):
        engine.start("a")
    # The id may be used again, and cached blocks of the aborted one are right.
    engine.reserve(make_request("a", PROMPT))
    engine.start("a")
    assert tokens(finish(engine)["a"]) == FakeModel(context_window=256).generate(PROMPT, 8)


@pytest.mark.parametrize("state", LIVE)
def test_abort_of_one_leaves_its_batch_mates_alone(
    state: RequestState, make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    engine = make_engine(budget=8)
    _bring(engine, _request(make_request, state), state)
    engine.reserve(make_request("b", PROMPT))
    engine.start("b")
    engine.abort("a")
    assert tokens(finish(engine)["b"]) == FakeModel(context_window=256).generate(PROMPT, 8)


def test_abort_of_a_sharer_keeps_the_shared_blocks(
    make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    engine = make_engine()
    engine.reserve(make_request("a", PROMPT))
    engine.start("a")
    finish(engine)
    first, second = (engine.reserve(make_request(name, PROMPT)) for name in "bc")
    assert first.block_ids[:3] == second.block_ids[:3]
    engine.start("b")
    engine.abort("c")
    assert tokens(finish(engine)["b"]) == FakeModel(context_window=256).generate(PROMPT, 8)


@pytest.mark.parametrize("state", LIVE)
def test_quarantined_blocks_stay_out_of_use_until_the_transfer_is_over(
    state: RequestState, make_engine: Make, make_request: Make
) -> None:
    engine = make_engine(budget=8)
    reservation = _bring(engine, _request(make_request, state), state)
    held = reservation.block_ids[1:3]
    engine.quarantine("a", held)
    engine.check_integrity()
    engine.abort("a")
    engine.check_integrity()
    stats = engine.stats()
    assert stats.num_quarantined_blocks == 2
    # Nobody is given them, even when all others are taken. Where they are cached, the cached block
    # before them waits for them.
    num_left = stats.num_free_blocks + stats.num_cached_blocks
    assert num_left in (61, 62)
    rest = engine.reserve(make_request("b", range(20, 80), max_tokens=num_left * 4 - 59))
    assert len(rest.block_ids) == num_left
    assert not set(rest.block_ids) & set(held)
    engine.abort("b")
    engine.unquarantine(held)
    engine.check_integrity()
    assert engine.stats().num_quarantined_blocks == 0


def test_a_reserved_request_goes_on_with_other_blocks(
    make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    """A load timed out: its blocks may still be written, and the request must not notice."""
    engine = make_engine()
    reservation = engine.reserve(make_request("a", PROMPT))
    engine.quarantine("a", reservation.block_ids[1:3])
    engine.check_integrity()
    assert engine.block_ids("a")[1:3] == (-1, -1)
    with pytest.raises(InvalidRequest, match="num_loaded_tokens"):
        engine.start("a", num_loaded_tokens=5)
    engine.start("a")
    assert not set(engine.block_ids("a")) & set(reservation.block_ids[1:3])
    engine.step()
    engine.kv.host_view[list(reservation.block_ids[1:3])] = 0xAB  # the late write
    assert tokens(finish(engine)["a"]) == FakeModel(context_window=256).generate(PROMPT, 8)[1:]
    engine.unquarantine(reservation.block_ids[1:3])
    assert engine.stats().num_quarantined_blocks == 0


def test_start_without_replacement_blocks_can_be_tried_again(
    make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    engine = make_engine(num_blocks=6, context_window=24)
    reservation = engine.reserve(make_request("a", PROMPT, max_tokens=8))
    assert len(reservation.block_ids) == 6
    engine.quarantine("a", reservation.block_ids[:1])
    with pytest.raises(NoBlocks):
        engine.start("a")
    engine.check_integrity()
    engine.unquarantine(reservation.block_ids[:1])
    engine.start("a")
    assert tokens(finish(engine)["a"]) == FakeModel(context_window=24).generate(PROMPT, 8)


def test_a_running_request_goes_on_with_a_block_that_is_still_read(
    make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    """A put timed out: its reader may still be there after the request is gone."""
    engine = make_engine()
    reservation = engine.reserve(make_request("a", PROMPT))
    engine.start("a")
    first = engine.step().events[0].token_ids
    engine.quarantine("a", reservation.block_ids[:1])
    rest = tokens(finish(engine)["a"])
    assert [*first, *rest] == FakeModel(context_window=256).generate(PROMPT, 8)
    assert engine.stats().num_quarantined_blocks == 1
    # Its content is still the prefix, so it may be shared while it is held.
    assert engine.reserve(make_request("b", PROMPT)).block_ids[0] == reservation.block_ids[0]
    engine.abort("b")
    engine.unquarantine(reservation.block_ids[:1])


def test_quarantine_refuses_what_is_not_the_requests_own(
    make_engine: Make, make_request: Make, finish: Make
) -> None:
    engine = make_engine()
    engine.reserve(make_request("a", PROMPT))
    engine.start("a")
    finish(engine)
    reservation = engine.reserve(make_request("b", PROMPT))
    other = engine.reserve(make_request("c", range(40, 50)))
    with pytest.raises(WrongState):  # of the local prefix: shared, never written
        engine.quarantine("b", reservation.block_ids[:1])
    with pytest.raises(WrongState):
        engine.quarantine("b", (reservation.block_ids[3], other.block_ids[0]))
    with pytest.raises(WrongState):
        engine.quarantine("b", reservation.block_ids[3:4] * 2)
    with pytest.raises(UnknownRequest):
        engine.quarantine("x", reservation.block_ids[3:4])
    with pytest.raises(WrongState):
        engine.unquarantine(reservation.block_ids[3:4])
    engine.check_integrity()
    assert engine.stats().num_quarantined_blocks == 0


def test_what_is_read_stays_when_its_request_fails_and_others_need_every_block(
    make_engine: Make, make_request: Make, finish: Make
) -> None:
    """A request that fails is forgotten by the prefix cache: nothing of its chain pins the rest."""
    engine = make_engine()
    few = {"allowed_token_ids": (50, 51, 52, 53), "no_repeat_ngram": 1, "max_tokens": 12}
    prompt, size = tuple(range(1, 15)), 4
    request = make_request("a", prompt, **few)
    engine.reserve(request)
    engine.start("a")
    hashes: list[bytes] = []
    for start in range(0, len(prompt) - size + 1, size):
        before = hashes[-1] if hashes else b""
        hashes.append(request.block_hasher(before, prompt[start : start + size]))
    engine.step()  # the prompt, and its first token
    engine.step()
    block_ids = engine.hold_cached(hashes)
    assert len(block_ids) == len(hashes) == 3
    expected = engine.kv.host_view[list(block_ids)].copy()
    assert finish(engine)["a"][-1].error
    engine.check_integrity()
    assert engine.stats().num_quarantined_blocks == 3
    for name in "bcde":  # different prompts, of 19 blocks each
        others = tuple((40 + ord(name) + i) % 97 for i in range(64))
        engine.reserve(make_request(name, others, max_tokens=12))
        engine.start(name)
        finish(engine)
    assert (engine.kv.host_view[list(block_ids)] == expected).all()
    engine.unquarantine(block_ids)
    engine.check_integrity()
    assert engine.stats().num_quarantined_blocks == 0
