"""Blocks on demand, taken away and brought back: nobody is lost, nothing is silent, all end."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import IntegrityError, NoBlocks, ParkingRefused, WrongState
from engine.outputs import RequestOutput
from engine.parking import Blocks, HostParking, choose_parking
from engine.request import Request, RequestState
from engine.testing.fake_model import FakeModel
from process.settings import SettingsError
from tests.harness.workloads import BadParking, disturbed, maybe_ahead, states, workload

Make = Callable[..., Any]
MODEL = FakeModel(context_window=256)


def _state(engine: LLMEngine, name: str) -> RequestState:
    return engine._groups[name].state


def test_blocks_are_taken_as_they_are_needed(make_engine: Make, make_request: Make) -> None:
    engine = make_engine(preemption="recompute")
    given = engine.reserve(make_request("a", range(1, 7), max_tokens=50))
    assert len(given.block_ids) == 2  # with "never": 14
    engine.start("a")
    for _ in range(4):
        engine.step()
    assert len(engine.block_ids("a")) == 3


def test_a_request_that_holds_is_never_preempted(make_engine: Make, make_request: Make) -> None:
    """Others read its blocks: they must not change hands under them."""
    engine = make_engine(preemption="swap")
    given = engine.reserve(make_request("a", range(1, 7), max_tokens=50, hold_after=9))
    assert len(given.block_ids) == 4
    engine.start("a")
    engine.step()
    with pytest.raises(WrongState, match="may be taken"):
        engine.preempt("a")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_preempted_request_goes_on_to_the_same_tokens(
    preemption: str, make_engine: Make, make_request: Make, tokens: Make
) -> None:
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
    assert tokens(events) == MODEL.generate(range(1, 15), 20)
    filled = [block.index for event in events for block in event.filled]
    assert filled == list(range(8))  # each is named once
    assert dict(engine.stats().num_preemptions)[preemption] > 3
    assert dict(engine.metrics().preemptions) == dict(engine.stats().num_preemptions)


def test_a_preempted_request_goes_before_new_ones(make_engine: Make, make_request: Make) -> None:
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


def test_who_matters_least_loses_its_blocks(make_engine: Make, make_request: Make) -> None:
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


def test_all_blocks_of_others_are_no_work(make_engine: Make, make_request: Make) -> None:
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
            _renamed(request, f"more {request.request_id}") for request in workload(rng)
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


def _renamed(request: Request, name: str) -> Request:
    return dataclasses.replace(request, request_id=name)


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


def test_a_parking_gets_the_hashes_of_the_full_blocks_and_the_owner(make_request: Make) -> None:
    """A store keeps blocks by their chain hash: full ones can be shared, the last one cannot."""
    parking = _Recording()
    config = EngineConfig(num_blocks=64, preemption="swap")
    engine = LLMEngine(config, FakeModel(context_window=256), parking=parking)
    request = dataclasses.replace(make_request("a", range(1, 15)), owner="acme")
    engine.submit(request)
    engine.step()
    engine.preempt("a")
    hashes: list[bytes] = []
    for start in range(0, 12, 4):
        parent = hashes[-1] if hashes else b""
        tokens = request.prompt_token_ids[start : start + 4]
        hashes.append(request.block_hasher(parent, tokens))
    assert parking.given == [("a/0", tuple(hashes), 4, "acme")]


def test_a_parking_that_refuses_or_loses_is_counted(make_engine: Make, make_request: Make) -> None:
    rng = random.Random(1)
    config = EngineConfig(num_blocks=64, max_num_running=4, preemption="swap")
    engine = LLMEngine(config, FakeModel(context_window=256), parking=BadParking(rng))
    requests = [make_request(str(i), range(1 + i, 20), max_tokens=20) for i in range(6)]
    for _ in range(10):
        disturbed(engine, requests, rng)
    causes = dict(engine.stats().num_preemptions)
    assert set(causes) == {"swap", "refused", "lost"} and causes["lost"] <= causes["swap"]


def test_what_is_parked_is_forgotten_with_its_request(
    make_engine: Make, make_request: Make
) -> None:
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
