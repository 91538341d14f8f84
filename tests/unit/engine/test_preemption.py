"""Blocks on demand, taken away, lent and brought back, and what abort and quarantine do in each
state: no request is lost, nothing is silent, all end."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import (
    IntegrityError,
    InvalidRequest,
    NoBlocks,
    ParkingRefused,
    UnknownRequest,
    WrongState,
)
from engine.outputs import RequestOutput
from engine.parking import Blocks, HostParking, choose_parking
from engine.request import RequestState
from engine.testing.fake_model import FakeModel
from process.settings import SettingsError
from tests.harness.engines import finish, hasher, make_request, tokens_of
from tests.harness.workloads import BadParking, disturbed, maybe_ahead, states, workload

Make = Callable[..., Any]
MODEL = FakeModel(context_window=256)
PROMPT = tuple(range(1, 15))


def _state(engine: LLMEngine, name: str) -> RequestState:
    return engine._groups[name].state


def test_blocks_are_taken_as_they_are_needed(make_engine: Make) -> None:
    engine = make_engine(preemption="recompute")
    given = engine.reserve(make_request("a", range(1, 7), max_tokens=50))
    assert len(given.block_ids) == 2  # with "never": 14
    engine.start("a")
    for _ in range(4):
        engine.step()
    assert len(engine.block_ids("a")) == 3


def test_a_request_that_holds_is_never_preempted(make_engine: Make) -> None:
    """Others read its blocks: they must not change hands under them."""
    engine = make_engine(preemption="swap")
    given = engine.reserve(make_request("a", range(1, 7), max_tokens=50, hold_after=9))
    assert len(given.block_ids) == 4
    engine.start("a")
    engine.step()
    with pytest.raises(WrongState, match="may be taken"):
        engine.preempt("a")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_preempted_request_goes_on_to_the_same_tokens(preemption: str, make_engine: Make) -> None:
    engine = make_engine(preemption=preemption)
    engine.submit(make_request("a", range(1, 15), max_tokens=20))
    events: list[RequestOutput] = []
    while engine.has_work():
        events += engine.step().events
        if len(events) % 3 == 2 and "a" in engine._groups:
            num_computed = engine.stats().num_computed_tokens
            engine.preempt("a")
            expected = RequestState.PREEMPTED if preemption == "recompute" else RequestState.PARKED
            assert _state(engine, "a") is expected and engine.block_ids("a") == ()
            stats = engine.stats()
            assert (stats.num_preempted, stats.num_waiting, stats.num_running) == (1, 1, 0)
            engine.check_integrity()
            events += engine.step().events
            if preemption == "swap":  # nothing is computed twice
                assert engine.stats().num_computed_tokens == num_computed + 1
    assert tokens_of(events) == MODEL.generate(range(1, 15), 20)
    filled = [block.index for event in events for block in event.filled]
    assert filled == list(range(8))  # each is named once
    assert dict(engine.stats().num_preemptions)[preemption] > 3
    assert dict(engine.metrics().preemptions) == dict(engine.stats().num_preemptions)


def test_a_preempted_request_goes_before_new_ones(make_engine: Make) -> None:
    engine = make_engine(num_blocks=16, preemption="recompute", context_window=64)
    engine.submit(make_request("a", range(1, 40), max_tokens=3))
    for _ in range(3):
        engine.step()
    engine.preempt("a")
    with pytest.raises(NoBlocks, match="preempted"):
        engine.reserve(make_request("b", [1, 2]))
    engine.submit(make_request("b", [1, 2]))
    engine.step()
    assert _state(engine, "a") in (RequestState.PREFILLING, RequestState.RUNNING)


def test_who_matters_least_loses_its_blocks(make_engine: Make) -> None:
    engine = make_engine(num_blocks=16, preemption="recompute", context_window=64, budget=40)
    for name, priority in (("a", 0), ("low", -1), ("b", 0)):
        prompt = [ord(name[0]) % 90, *range(1, 15)]
        engine.submit(make_request(name, prompt, max_tokens=30, priority=priority))
    lost: list[str] = []
    while engine.has_work():
        engine.step()
        for name in engine._groups:
            if _state(engine, name) is RequestState.PREEMPTED and lost[-1:] != [name]:
                lost.append(name)
    assert lost[0] == "low" and "a" not in lost


def test_all_blocks_of_others_are_no_work(make_engine: Make) -> None:
    """Reserved blocks are nobody's to take; whoever waits for them must not be asked to step."""
    engine = make_engine(num_blocks=8, preemption="recompute", context_window=32)
    engine.submit(make_request("a", range(1, 9), max_tokens=20))
    engine.step()
    engine.reserve(make_request("b", range(50, 70)))
    while engine.has_work():
        engine.step()
    assert states(engine) == {RequestState.PREEMPTED, RequestState.RESERVED}
    engine.abort("b")
    assert engine.has_work()
    while engine.has_work():
        engine.step()
    assert engine.stats().num_waiting == 0


def test_no_livelock(seed: int, scale: Callable[[int], int]) -> None:
    """Whatever is asked at once, all end if each fits alone: 400 workloads on the smallest cache
    that holds one request, with no disturbance but the lack of blocks."""
    num_preemptions = 0
    for index in range(scale(400)):
        rng = random.Random(f"{seed} {index}")
        config = EngineConfig(
            num_blocks=12,
            max_num_tokens_per_step=rng.randint(4, 12),
            max_num_running=4,
            policy=rng.choice(["fcfs", "priority", "cache_aware"]),
            preemption=rng.choice(["recompute", "swap"]),
        )
        engine = LLMEngine(config, maybe_ahead(FakeModel(context_window=48), rng))
        requests = workload(rng) + [
            dataclasses.replace(one, request_id=f"more {one.request_id}") for one in workload(rng)
        ]
        for request in requests:
            engine.submit(request)
        over = 0
        for _ in range(3000):
            over += sum(event.is_request_over for event in engine.step().events)
            if not engine.has_work():
                break
        assert over == len(requests), index
        num_preemptions += sum(n for _, n in engine.stats().num_preemptions)
    assert num_preemptions > 0


class _Recording(HostParking):
    """Remembers what it was given."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.given: list[tuple[str, tuple[bytes, ...], int, str]] = []

    def put(
        self, key: str, chain_hashes: Sequence[bytes], blocks: Blocks, *, owner: str = ""
    ) -> None:
        self.given.append((key, tuple(chain_hashes), len(blocks), owner))
        super().put(key, chain_hashes, blocks, owner=owner)


def test_a_parking_gets_the_hashes_of_the_full_blocks_and_the_owner() -> None:
    """A store keeps blocks by their chain hash: full ones can be shared, the last one cannot."""
    parking = _Recording()
    config = EngineConfig(num_blocks=64, preemption="swap")
    engine = LLMEngine(config, FakeModel(context_window=256), parking=parking)
    engine.submit(make_request("a", PROMPT, owner="acme"))
    engine.step()
    engine.preempt("a")
    assert parking.given == [("a/0", _hashes(PROMPT), 4, "acme")]


def _hashes(token_ids: Sequence[int]) -> tuple[bytes, ...]:
    """Of the full blocks."""
    found: list[bytes] = []
    for end in range(4, len(token_ids) + 1, 4):
        found.append(hasher()(found[-1] if found else b"", token_ids[end - 4 : end]))
    return tuple(found)


def test_a_parking_that_refuses_or_loses_is_counted(make_engine: Make) -> None:
    rng = random.Random(1)
    config = EngineConfig(num_blocks=64, max_num_running=4, preemption="swap")
    engine = LLMEngine(config, FakeModel(context_window=256), parking=BadParking(rng))
    requests = [make_request(str(i), range(1 + i, 20), max_tokens=20) for i in range(6)]
    for _ in range(10):
        disturbed(engine, requests, rng)
    causes = dict(engine.stats().num_preemptions)
    assert set(causes) == {"swap", "refused", "lost"} and causes["lost"] <= causes["swap"]


def test_what_is_parked_is_forgotten_with_its_request(make_engine: Make) -> None:
    engine = make_engine(preemption="swap")
    engine.submit(make_request("a", range(1, 15)))
    engine.step()
    engine.preempt("a")
    parking = engine._preemptor._parking
    assert parking.num_bytes > 0
    engine.abort("a")
    assert parking.num_bytes == 0
    engine.check_integrity()


def test_host_parking_keeps_its_bound_and_its_law() -> None:
    parking = HostParking(64)
    blocks = np.arange(48, dtype=np.uint8).reshape(3, 16)
    parking.put("a", (), blocks.copy())
    with pytest.raises(ParkingRefused, match="park_bytes"):
        parking.put("b", (), blocks.copy())
    with pytest.raises(IntegrityError, match="already"):
        parking.put("a", (), blocks.copy())
    parking.check_integrity({"a"})
    with pytest.raises(IntegrityError):
        parking.check_integrity({"a", "b"})
    found = parking.get("a")
    assert found.is_done and np.array_equal(found.result(), blocks)
    assert parking.get("b").result() is None
    parking.drop("b")
    parking.drop("a")
    parking.check_integrity(())


def test_kv_that_is_not_in_host_memory_cannot_be_swapped() -> None:
    with pytest.raises(SettingsError, match="recompute"):
        choose_parking(EngineConfig(preemption="swap"), "cuda:0", 1 << 20, None)


# -- blocks lent to somebody who is no request


def test_half_of_the_free_ones_at_most_and_nothing_is_evicted(make_engine: Make) -> None:
    engine = make_engine()
    engine.submit(make_request("a", PROMPT))
    finish(engine)
    before = engine.stats()
    assert before.num_cached_blocks > 0
    first = engine.lend_blocks(10)
    assert len(set(first)) == 10
    second = engine.lend_blocks(1000)
    assert len(second) == (before.num_free_blocks - 10) // 2
    assert not set(first) & set(second)
    stats = engine.stats()
    assert (stats.num_cached_blocks, stats.num_evicted_blocks) == (before.num_cached_blocks, 0)
    assert stats.num_referenced_blocks == len(first) + len(second)
    engine.check_integrity()
    engine.return_blocks(first)
    engine.return_blocks(second)
    assert engine.stats() == before


def test_what_is_not_lent_is_not_taken_back(make_engine: Make) -> None:
    engine = make_engine()
    lent = engine.lend_blocks(3)
    reserved = engine.reserve(make_request("a", PROMPT)).block_ids
    for wrong in ([*lent, lent[0]], [lent[0], reserved[0]], [reserved[0]]):
        with pytest.raises(WrongState):
            engine.return_blocks(wrong)
    engine.check_integrity()
    engine.return_blocks(lent)
    engine.return_blocks(())
    engine.abort("a")
    engine.check_integrity()
    assert engine.stats().num_referenced_blocks == 0


def test_a_lent_block_that_nobody_remembers_breaks_the_law(make_engine: Make) -> None:
    engine = make_engine()
    (block_id,) = engine.lend_blocks(1)
    engine._cache_manager.lent.clear()
    with pytest.raises(IntegrityError, match=f"block {block_id} has 1 references"):
        engine.check_integrity()
    engine._cache_manager.lent.add(block_id)


def test_an_engine_with_one_free_block_lends_none(make_engine: Make) -> None:
    engine = make_engine(num_blocks=8)
    while engine.stats().num_free_blocks > 1:
        engine.lend_blocks(8)
    assert engine.lend_blocks(8) == ()


# -- cancel is a state


def _bring(engine: Any, state: RequestState) -> Any:
    """Request "a" in `state`, on an engine with a budget of 8."""
    hold_after = 1 if state is RequestState.HOLDING else None
    reservation = engine.reserve(make_request("a", PROMPT, hold_after=hold_after))
    if state is not RequestState.RESERVED:
        engine.start("a")
    for _ in range(
        {RequestState.PREFILLING: 1, RequestState.RUNNING: 2, RequestState.HOLDING: 2}.get(state, 0)
    ):
        engine.step()
    assert _state(engine, "a") is state
    return reservation


LIVE = [
    RequestState.RESERVED,
    RequestState.WAITING,
    RequestState.PREFILLING,
    RequestState.RUNNING,
    RequestState.HOLDING,
]


@pytest.mark.parametrize("has_company", [False, True])
@pytest.mark.parametrize("state", LIVE)
def test_abort_gives_every_block_back_and_leaves_batch_mates_alone(
    state: RequestState, has_company: bool, make_engine: Make
) -> None:
    engine = make_engine(budget=8)
    _bring(engine, state)
    if has_company:
        engine.submit(make_request("b", PROMPT))
    engine.abort("a")
    if has_company:
        assert tokens_of(finish(engine)["b"]) == MODEL.generate(PROMPT, 8)
    engine.check_integrity()
    stats = engine.stats()
    assert stats.num_referenced_blocks == 0
    assert stats.num_free_blocks + stats.num_cached_blocks == 64
    engine.abort("a")  # idempotent
    with pytest.raises(UnknownRequest):
        engine.start("a")
    # The id may be used again, and cached blocks of the aborted one are right.
    engine.submit(make_request("a", PROMPT))
    assert tokens_of(finish(engine)["a"]) == MODEL.generate(PROMPT, 8)


def test_abort_of_a_sharer_keeps_the_shared_blocks(make_engine: Make) -> None:
    engine = make_engine()
    engine.reserve(make_request("a", PROMPT))
    engine.start("a")
    finish(engine)
    first, second = (engine.reserve(make_request(name, PROMPT)) for name in "bc")
    assert first.block_ids[:3] == second.block_ids[:3]
    engine.start("b")
    engine.abort("c")
    assert tokens_of(finish(engine)["b"]) == MODEL.generate(PROMPT, 8)


@pytest.mark.parametrize("state", LIVE)
def test_quarantined_blocks_stay_out_of_use_until_the_transfer_is_over(
    state: RequestState, make_engine: Make
) -> None:
    engine = make_engine(budget=8)
    reservation = _bring(engine, state)
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


def test_a_reserved_request_goes_on_with_other_blocks(make_engine: Make) -> None:
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
    assert tokens_of(finish(engine)["a"]) == MODEL.generate(PROMPT, 8)[1:]
    engine.unquarantine(reservation.block_ids[1:3])
    assert engine.stats().num_quarantined_blocks == 0


def test_start_without_replacement_blocks_can_be_tried_again(make_engine: Make) -> None:
    engine = make_engine(num_blocks=6, context_window=24)
    reservation = engine.reserve(make_request("a", PROMPT, max_tokens=8))
    assert len(reservation.block_ids) == 6
    engine.quarantine("a", reservation.block_ids[:1])
    with pytest.raises(NoBlocks):
        engine.start("a")
    engine.check_integrity()
    engine.unquarantine(reservation.block_ids[:1])
    engine.start("a")
    assert tokens_of(finish(engine)["a"]) == FakeModel(context_window=24).generate(PROMPT, 8)


def test_a_running_request_goes_on_with_a_block_that_is_still_read(make_engine: Make) -> None:
    """A put timed out: its reader may still be there after the request is gone."""
    engine = make_engine()
    reservation = engine.reserve(make_request("a", PROMPT))
    engine.start("a")
    first = engine.step().events[0].token_ids
    engine.quarantine("a", reservation.block_ids[:1])
    rest = tokens_of(finish(engine)["a"])
    assert [*first, *rest] == MODEL.generate(PROMPT, 8)
    assert engine.stats().num_quarantined_blocks == 1
    # Its content is still the prefix, so it may be shared while it is held.
    assert engine.reserve(make_request("b", PROMPT)).block_ids[0] == reservation.block_ids[0]
    engine.abort("b")
    engine.unquarantine(reservation.block_ids[:1])


def test_quarantine_refuses_what_is_not_the_requests_own(make_engine: Make) -> None:
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
    make_engine: Make,
) -> None:
    """A request that fails is forgotten by the prefix cache: nothing of its chain pins the rest."""
    engine = make_engine()
    few = {"allowed_token_ids": (50, 51, 52, 53), "no_repeat_ngram": 1, "max_tokens": 12}
    engine.submit(make_request("a", PROMPT, **few))
    engine.step()  # the prompt, and its first token
    engine.step()
    block_ids = engine.hold_cached(_hashes(PROMPT))
    assert len(block_ids) == 3
    expected = engine.kv.host_view[list(block_ids)].copy()
    assert finish(engine)["a"][-1].error
    engine.check_integrity()
    assert engine.stats().num_quarantined_blocks == 3
    for name in "bcde":  # different prompts, of 19 blocks each
        engine.submit(
            make_request(name, [(40 + ord(name) + i) % 97 for i in range(64)], max_tokens=12)
        )
        finish(engine)
    assert (engine.kv.host_view[list(block_ids)] == expected).all()
    engine.unquarantine(block_ids)
    engine.check_integrity()
    assert engine.stats().num_quarantined_blocks == 0
