"""A request is taken out of one engine at any moment and goes on in another, to the same tokens:
its bytes stay as they are until it is released, and nothing of it is in flight."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.engine import LLMEngine
from engine.errors import UnknownRequest, WrongState
from engine.outputs import RequestOutput
from engine.request import Beam, DetachedRequest, Request, RequestState, Sampling
from engine.testing.fake_model import FakeModel
from tests.harness.engines import all_steps, hasher, late_engine, make_request, tokens_of
from tests.harness.workloads import SIZE, small_engine, undisturbed, workload

Make = Callable[..., Any]
MODEL = FakeModel(context_window=256)
MAX_MOVES = 30
"""Of one request: by each move it may lose half of what it has, and come no further for 40,000."""


def bytes_of(engine: LLMEngine, held: DetachedRequest) -> np.ndarray[Any, Any]:
    """The computed slots of its blocks: [tokens, ids and positions]."""
    cells = engine.kv.cache[list(held.block_ids), 0, 0, :, :, 0]  # [blocks, 2, SIZE]
    return cells.transpose(1, 2).reshape(-1, 2)[: held.num_computed_tokens].numpy().copy()


def expected_bytes(held: DetachedRequest) -> np.ndarray[Any, Any]:
    ids = held.token_ids[: held.num_computed_tokens]
    return np.array([[token, place] for place, token in enumerate(ids)], np.float32).reshape(-1, 2)


def go_on(
    engine: LLMEngine, request: Request, held: DetachedRequest, content: np.ndarray[Any, Any]
) -> None:
    """Load what was held, as far as there are places, and start."""
    engine.reserve(request)
    block_ids = engine.block_ids(request.request_id)
    num_loaded = min(len(content), len(block_ids) * SIZE)
    for place in range(num_loaded):
        engine.kv.cache[block_ids[place // SIZE], 0, 0, :, place % SIZE, 0] = (
            engine.kv.cache.new_tensor(content[place])
        )
    drawn = held.token_ids[len(request.prompt_token_ids) :]
    engine.start(request.request_id, num_loaded_tokens=num_loaded, outputs=[drawn])


def single(rng: random.Random) -> list[Request]:
    return [replace(one, num_samples=1, priority=0) for one in workload(rng)]


def test_requests_that_move_at_random_draw_what_they_would_have_drawn(
    seed: int, scale: Callable[[int], int]
) -> None:
    """200 workloads with every kind of parameter, on small engines that preempt, park and launch
    ahead; each request moves between two of them, some of them several times."""
    num_moves = num_with_blocks = 0
    for index in range(scale(200)):
        rng = random.Random(f"{seed} {index}")
        requests = {one.request_id: one for one in single(rng)}
        expected = undisturbed(list(requests.values()))
        for request in requests.values():
            engines = [small_engine(rng), small_engine(rng)]
            others = [
                replace(one, request_id=f"other{one.request_id}") for one in requests.values()
            ]
            for other in others[:2]:
                engines[0].submit(other)
            tokens: list[int] = []
            here = engines[0]
            here.submit(request)
            is_over, num_own_moves = False, 0
            while not is_over:
                for event in here.step().events:
                    if event.request_id == request.request_id:
                        tokens += event.token_ids
                        is_over = event.is_request_over
                here.check_integrity()
                if is_over or num_own_moves == MAX_MOVES or rng.random() < 0.6:
                    continue
                try:
                    held = here.detach(request.request_id)
                except WrongState:
                    continue  # it waits for its first blocks
                num_moves += 1
                num_own_moves += 1
                num_with_blocks += bool(held.block_ids)
                assert held.token_ids == (*request.prompt_token_ids, *tokens)
                assert len(held.block_ids) == -(-held.num_computed_tokens // SIZE)
                assert len(held.chain_hashes) == held.num_computed_tokens // SIZE
                content = bytes_of(here, held)
                assert (content == expected_bytes(held)).all()
                for _ in range(rng.randint(0, 3)):
                    events = here.step().events
                    assert request.request_id not in {event.request_id for event in events}
                    here.check_integrity()
                assert (bytes_of(here, held) == content).all()
                here.release(request.request_id)
                here.check_integrity()
                for live in [*here._groups]:
                    here.abort(live)
                here = engines[here is engines[0]]
                go_on(here, request, held, content[: rng.choice([len(content), len(content) // 2])])
            wanted = expected[request.request_id][0]
            assert tuple(tokens) == wanted[0] or wanted[3], request
            assert here.stats().num_holding == 0
    assert num_moves > scale(200) and num_with_blocks > num_moves / 2


@pytest.mark.parametrize(
    "state",
    [
        RequestState.WAITING,
        RequestState.PREFILLING,
        RequestState.RUNNING,
        RequestState.PREEMPTED,
        RequestState.PARKED,
    ],
)
def test_it_can_be_taken_out_in_each_state(state: RequestState, make_engine: Make) -> None:
    how = {RequestState.PREEMPTED: "recompute", RequestState.PARKED: "swap"}.get(state, "never")
    engine = make_engine(preemption=how, budget=8)
    prompt = range(1, 15)
    request = make_request("a", prompt, max_tokens=20)
    engine.reserve(request)
    engine.start("a")
    events: list[RequestOutput] = []
    while state is not RequestState.WAITING and engine._groups["a"].state is not state:
        events += engine.step().events
        if how != "never" and len(events) == 5:
            engine.preempt("a")
    held = engine.detach("a")
    assert engine._groups["a"].state is RequestState.HOLDING and engine.stats().num_holding == 1
    assert held.token_ids == (*prompt, *tokens_of(events))
    if state is RequestState.PARKED:
        assert engine._preemptor._parking.num_bytes == 0  # nobody brings it back
    if state is RequestState.RUNNING:
        assert held.num_computed_tokens == len(held.token_ids) - 1
    if how != "never":  # what the prefix cache kept
        assert held.num_computed_tokens == (len(held.token_ids) - 1) // SIZE * SIZE > 0
    assert not engine.has_work() and not engine.step().events
    assert (bytes_of(engine, held) == expected_bytes(held)).all()
    engine.check_integrity()
    engine.release("a")
    engine.check_integrity()
    assert engine.stats().num_referenced_blocks == 0
    assert dict(engine.metrics().ended) == {"moved": 1}


def test_what_was_launched_for_it_is_thrown_away_before_anybody_reads() -> None:
    """The launch would write into the very block that is read."""
    engine, model = late_engine()
    for name in ("a", "b"):
        engine.submit(Request(name, tuple(range(1, 15)), Sampling(20, ignore_eos=True), hasher()))
    for _ in range(5):
        engine.step()
    assert engine._in_flight.is_live
    num_left_over = engine._in_flight.num_left_over
    held = engine.detach("a")
    before = engine.kv.cache[list(held.block_ids)].clone()
    assert engine._in_flight.num_left_over == num_left_over + 1
    model.launches.compute_all()  # nothing is left to compute
    outputs = all_steps(engine)
    assert (engine.kv.cache[list(held.block_ids)] == before).all()
    assert {event.request_id for output in outputs for event in output.events} == {"b"}
    engine.release("a")
    engine.check_integrity()


@pytest.mark.parametrize("end", ["release", "abort"])
def test_its_blocks_are_nobody_elses_until_its_end(end: str, make_engine: Make) -> None:
    engine = make_engine(num_blocks=12, preemption="recompute", context_window=40)
    engine.submit(make_request("a", range(1, 15), max_tokens=9))
    for _ in range(4):
        engine.step()
    held = engine.detach("a")
    content = bytes_of(engine, held)
    engine.submit(make_request("b", range(50, 80), max_tokens=9))
    while engine.has_work():
        engine.step()
    assert (bytes_of(engine, held) == content).all()
    getattr(engine, end)("a")
    assert len(all_steps(engine)) > 0 or not engine._groups
    assert not engine._groups


def test_what_cannot_be_taken_out_says_why(make_engine: Make) -> None:
    engine = make_engine()
    with pytest.raises(UnknownRequest):
        engine.detach("unknown")
    engine.reserve(make_request("reserved", [1, 2, 3]))
    with pytest.raises(WrongState, match="reserved"):
        engine.detach("reserved")
    engine.submit(make_request("queued", [1, 2, 3]))
    with pytest.raises(WrongState, match="queued"):
        engine.detach("queued")
    engine.submit(replace(make_request("two", [1, 2, 3]), num_samples=2))
    engine.submit(replace(make_request("beams", [1, 2, 3]), beam=Beam(2)))
    engine.submit(make_request("bound", [1, 2, 3], hold_after=2))
    engine.step()
    for name in ("two", "beams"):
        with pytest.raises(WrongState, match="samples or beams"):
            engine.detach(name)
    with pytest.raises(WrongState):
        engine.detach("bound")  # it holds by itself, when it is time
    engine.detach("queued")
    with pytest.raises(WrongState, match="holding"):
        engine.detach("queued")
