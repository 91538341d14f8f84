"""Beam search on the engine's blocks, against the pure search on the model's own logits: forks,
copies and dropped beams must not show. Alone, among others, and in two legs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine import beam_search
from engine.errors import InvalidRequest, NoBlocks, RequestTooLong
from engine.outputs import RequestOutput
from engine.request import Beam, FinishReason, Request
from engine.testing.fake_model import FakeModel

Make = Callable[..., Any]
EOS = 0


def _expected(model: FakeModel, request: Request) -> list[tuple[tuple[int, ...], float]]:
    """The search on whole token lists: no cache, no blocks."""
    assert request.beam is not None
    prompt, sampling = list(request.prompt_token_ids), request.sampling
    ends = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else frozenset({EOS}))
    limit = min(sampling.max_tokens, model.info.context_window - len(prompt))
    state = beam_search.start(request.beam, ends, limit)
    while not state.is_over:
        rows = [model.logits([*prompt, *one]) for one in state.open_token_ids]
        state = beam_search.step(state, torch.log_softmax(torch.stack(rows), dim=-1)).state
    return [(one.token_ids, one.score) for one in state.finished[: request.num_samples]]


def _found(events: list[RequestOutput]) -> list[tuple[tuple[int, ...], float | None]]:
    told = [event for event in events if event.token_ids]
    assert [event.sample_index for event in told] == list(range(len(told)))
    assert [event.is_request_over for event in told] == [False] * (len(told) - 1) + [True]
    return [(event.token_ids, event.score) for event in told]


def _random_request(rng: random.Random, make_request: Make, name: str, **more: Any) -> Request:
    num_beams = rng.randint(2, 4)
    prompt = [rng.randrange(1, 97) for _ in range(rng.randint(1, 14))]
    stops = frozenset(rng.sample(range(1, 97), rng.choice([0, 0, 3, 8])))
    request: Request = make_request(
        name,
        prompt,
        max_tokens=rng.randint(1, 14),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=stops,
        **more,
    )
    return dataclasses.replace(
        request,
        num_samples=rng.randint(1, num_beams),
        beam=Beam(num_beams, rng.choice([0.0, 1.0, 2.0]), rng.random() < 0.5),
    )


def test_random_searches_among_other_requests(
    make_engine: Make, make_request: Make, finish: Make, seed: int, scale: Callable[[int], int]
) -> None:
    for index in range(scale(400)):
        rng = random.Random(f"{seed} {index}")
        preemption = rng.choice(["never", "recompute", "swap"])
        engine = make_engine(num_blocks=80, budget=rng.randint(8, 30), preemption=preemption)
        wanted = {
            name: _random_request(rng, make_request, name)
            for name in ("a", "b")[: rng.randint(1, 2)]
        }
        wanted["c"] = make_request("c", [rng.randrange(1, 97) for _ in range(9)])
        model = FakeModel(context_window=320)
        for request in wanted.values():
            engine.submit(request)
        events = finish(engine)
        for name in wanted.keys() - {"c"}:
            assert _found(events[name]) == _expected(model, wanted[name]), (index, name)
        assert engine.stats().num_referenced_blocks == 0


def test_random_searches_in_two_legs(
    make_engine: Make, make_request: Make, finish: Make, seed: int, scale: Callable[[int], int]
) -> None:
    """Prefill computes the prompt and hands its best candidates over; decode goes on from them,
    with all, some or none of the prompt's KV."""
    for index in range(scale(200)):
        rng = random.Random(f"legs {seed} {index}")
        request = _random_request(rng, make_request, "a")
        prefill, decode = make_engine(budget=9), make_engine(num_blocks=80, budget=9)
        first = dataclasses.replace(request, hold_after=1)
        taken = prefill.reserve(first)
        prefill.start("a")
        last = finish(prefill)["a"][-1]
        assert last.beam_start and last.is_request_over and not last.token_ids
        given = decode.reserve(request)
        num_loaded = rng.choice([0, len(request.prompt_token_ids)])
        for place in range(-(-num_loaded // 4)):
            block = prefill.kv.host_view[taken.block_ids[place]]
            decode.kv.host_view[given.block_ids[place]] = block
        prefill.release("a")
        decode.start("a", num_loaded_tokens=num_loaded, beam_start=last.beam_start)
        decode.submit(make_request("b", range(1, 8)))
        events = finish(decode)
        expected = _expected(FakeModel(context_window=320), request)
        assert _found(events["a"]) == expected, (index, num_loaded)
        assert prefill.stats().num_referenced_blocks == decode.stats().num_referenced_blocks == 0


def test_beams_share_the_prompt(make_engine: Make, make_request: Make) -> None:
    engine = make_engine(num_blocks=64)
    request = dataclasses.replace(make_request("a", range(1, 15), max_tokens=3), beam=Beam(4))
    engine.submit(request)
    engine.step()
    engine.step()
    tables = [engine.block_ids("a", index) for index in range(4)]
    assert len({table[:3] for table in tables}) == 1
    assert len({block_id for table in tables for block_id in table}) < 3 + 4


def test_a_search_waits_for_all_its_places_at_once(
    make_engine: Make, make_request: Make, finish: Make
) -> None:
    """Handed over whole, it needs four rows in its first step; others must not slip in for ever."""
    engine = make_engine(num_blocks=120, budget=16, running=4)
    request = dataclasses.replace(make_request("a", range(1, 9), max_tokens=4), beam=Beam(4))
    leg = make_engine()
    leg.reserve(dataclasses.replace(request, hold_after=1))
    leg.start("a")
    begun = finish(leg)["a"][-1].beam_start
    for index in range(3):
        engine.submit(make_request(f"b{index}", range(1, 5), max_tokens=5))
    engine.step()
    given = engine.reserve(request)
    for place in range(2):
        source = leg.kv.host_view[leg.block_ids("a")[place]]
        engine.kv.host_view[given.block_ids[place]] = source
    engine.start("a", num_loaded_tokens=8, beam_start=begun)
    engine.submit(make_request("late", range(1, 5)))
    order = []
    while engine.has_work():
        output = engine.step()
        assert output.num_running <= 4
        order += [event.request_id for event in output.events if event.is_request_over]
        engine.check_integrity()
    assert order.index("a") < order.index("late")


def test_why_a_hypothesis_ended(make_engine: Make, make_request: Make, finish: Make) -> None:
    engine = make_engine(num_blocks=80)
    stops = frozenset(range(60, 97, 2))
    request = make_request("a", [5], max_tokens=6, stop_token_ids=stops, ignore_eos=True)
    engine.submit(dataclasses.replace(request, beam=Beam(2), num_samples=2))
    for event in finish(engine)["a"]:
        if event.token_ids[-1:] and event.token_ids[-1] in stops:
            assert event.finish_reason is FinishReason.STOP_TOKEN
            assert event.stop_token_id == event.token_ids[-1]
        elif event.token_ids:
            assert event.finish_reason is FinishReason.LENGTH and len(event.token_ids) == 6


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"logprobs": 1}, "logprobs"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"trace": True}, "trace"),
        ({"hold_after": 2}, "hold_after"),
    ],
)
def test_what_a_search_cannot_do_is_refused_by_name(
    changes: dict[str, Any], field: str, make_engine: Make, make_request: Make
) -> None:
    request = dataclasses.replace(make_request("a", [1, 2], **changes), beam=Beam(2))
    with pytest.raises(InvalidRequest) as caught:
        make_engine().reserve(request)
    assert caught.value.field == field


def test_a_search_that_cannot_fit_is_refused(make_engine: Make, make_request: Make) -> None:
    engine = make_engine(num_blocks=30, running=8)
    wide = dataclasses.replace(make_request("a", [1], max_tokens=40), beam=Beam(8))
    with pytest.raises(RequestTooLong):
        engine.submit(wide)
    with pytest.raises(InvalidRequest, match="max_num_running"):
        engine.submit(dataclasses.replace(wide, beam=Beam(9)))
    fits = dataclasses.replace(make_request("a", [1], max_tokens=40), beam=Beam(2))
    engine.reserve(fits)
    with pytest.raises(NoBlocks):
        engine.reserve(dataclasses.replace(fits, request_id="b"))


@pytest.mark.parametrize(
    "begun", [((1, -0.1),), ((1, 0.5),) * 4, ((97, -1.0),) * 4, ((1, float("nan")),) * 4]
)
def test_a_wrong_beam_start_is_refused(
    begun: tuple[tuple[int, float], ...], make_engine: Make, make_request: Make
) -> None:
    engine = make_engine()
    engine.reserve(dataclasses.replace(make_request("a", [1, 2]), beam=Beam(2)))
    with pytest.raises(InvalidRequest, match="beam_start"):
        engine.start("a", beam_start=begun)
    engine.reserve(make_request("b", [1, 2]))
    with pytest.raises(InvalidRequest, match="beam_start"):
        engine.start("b", beam_start=((1, -0.1),))


def test_nan_ends_a_search_and_nobody_else(
    make_engine: Make, make_request: Make, finish: Make, tokens: Make
) -> None:
    engine = make_engine(num_blocks=80, poison=frozenset(range(1, 97)))
    engine.submit(dataclasses.replace(make_request("a", [1, 2]), beam=Beam(2)))
    assert finish(engine)["a"][-1].error is not None
    assert engine.stats().num_referenced_blocks == 0
