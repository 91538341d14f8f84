"""Beam search by hand and against exhaustive search; on the engine's blocks against the pure search
on the model's own logits. That it equals transformers: tests/parity/test_beam.py."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine import beam_search
from engine.beam_search import BeamState, Hypothesis
from engine.errors import InvalidLogits, InvalidRequest, NoBlocks, RequestTooLong
from engine.outputs import RequestOutput
from engine.request import Beam, FinishReason, Request
from engine.testing.fake_model import FakeModel
from tests.harness.engines import finish, hand_over, make_request

VOCAB = 16


def row(seed: int, token_ids: tuple[int, ...]) -> torch.Tensor:
    """A model: log probabilities after these tokens."""
    generator = torch.Generator().manual_seed(hash((seed, *token_ids)) % (1 << 62))
    return torch.log_softmax(torch.randn(VOCAB, generator=generator) * 2.0, dim=-1)


def search(
    seed: int, beam: Beam, max_tokens: int, ends: frozenset[int] = frozenset()
) -> tuple[Hypothesis, ...]:
    state = beam_search.start(beam, ends, max_tokens)
    while not state.is_over:
        rows = torch.stack([row(seed, path) for path in state.open_token_ids])
        before = state
        done = beam_search.step(state, rows)
        state = done.state
        for index, (parent, token_id) in enumerate(zip(done.parents, done.token_ids, strict=True)):
            assert state.open_token_ids[index] == (*before.open_token_ids[parent], token_id)
        assert list(state.open_scores) == sorted(state.open_scores, reverse=True)
    assert len(state.finished) == beam.num_beams
    return state.finished


def exhaustive(seed: int, length: int, ends: frozenset[int]) -> list[tuple[float, tuple[int, ...]]]:
    """(sum of log probabilities, tokens) of everything that ends within `length`, best first."""
    found = []
    paths: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(length):
        longer = []
        for total, path in paths:
            for token_id, logprob in enumerate(row(seed, path).tolist()):
                one = (total + logprob, (*path, token_id))
                (found if token_id in ends or len(one[1]) == length else longer).append(one)
        paths = longer
    return sorted(found, reverse=True)


def test_many_beams_are_an_exhaustive_search(seed: int) -> None:
    """8 beams over 16 tokens lose nothing in the first of two steps that could win in the second,
    as long as their best 8 hold the winner: checked, so that the test says what it means."""
    found = 0
    for number in range(40):
        best = exhaustive(seed + number, 2, frozenset())[:1]
        finished = search(seed + number, Beam(8, length_penalty=0.0), 2)
        first = sorted(range(VOCAB), key=row(seed + number, ()).tolist().__getitem__)[-8:]
        if best[0][1][0] in first:
            found += 1
            assert finished[0].token_ids == best[0][1]
            assert finished[0].score == pytest.approx(best[0][0], abs=1e-5)
    assert found > 20


def test_a_search_begun_from_candidates_is_the_same(seed: int, scale: Callable[[int], int]) -> None:
    """What the prefill leg hands over is enough, whatever the end tokens are."""
    rng = random.Random(seed)
    for number in range(scale(400)):
        ends = frozenset(rng.sample(range(VOCAB), rng.randint(0, 4)))
        beam = Beam(rng.randint(2, 3), rng.choice([-1.0, 0.0, 1.0, 2.0]), rng.random() < 0.5)
        state = beam_search.start(beam, ends, rng.randint(1, 6))
        prompt = row(seed + number, ())
        count = beam_search.num_candidates(beam.num_beams, len(ends))
        candidates = beam_search.first_candidates(prompt, count)
        assert beam_search.begin(state, candidates) == beam_search.step(state, prompt[None])
        more = beam_search.first_candidates(prompt, count + 5)
        assert beam_search.begin(state, more) == beam_search.begin(state, candidates)


def test_by_hand() -> None:
    """Two beams, end token 0: one beam ends, the next best takes its place; then no open beam can
    win any more."""
    logs = torch.tensor([[0.4, 0.3, 0.2, 0.05, 0.05]]).log()
    first = beam_search.step(beam_search.start(Beam(2), frozenset({0}), 9), logs)
    assert [h.token_ids for h in first.state.finished] == [(0,)]
    assert (first.parents, first.token_ids) == ((0, 0), (1, 2))
    logs = torch.tensor([[0.02, 0.4, 0.3, 0.2, 0.08], [0.9, 0.04, 0.03, 0.02, 0.01]]).log()
    second = beam_search.step(first.state, logs)
    assert second.state.is_over
    assert (second.parents, second.token_ids, second.state.open_token_ids) == ((), (), ())
    assert [h.token_ids for h in second.state.finished] == [(2, 0), (0,)]
    assert second.state.finished[0].score == pytest.approx(
        (torch.tensor(0.2).log() + torch.tensor(0.9).log()).item() / 2, abs=1e-6
    )


def test_early_stopping_ends_with_enough_hypotheses() -> None:
    """A score that grows with length keeps a search open unless early_stopping is set."""
    logs = torch.tensor([[0.5, 0.3, 0.1, 0.05, 0.05]]).log()
    after = torch.tensor([[0.3, 0.6, 0.05, 0.03, 0.02], [0.3, 0.6, 0.05, 0.03, 0.02]]).log()
    for early_stopping in (True, False):
        beam = Beam(2, length_penalty=4.0, early_stopping=early_stopping)
        state = beam_search.step(beam_search.start(beam, frozenset({0}), 9), logs).state
        state = beam_search.step(state, after).state
        assert len(state.finished) == 2
        assert state.is_over == early_stopping


def test_length_ends_every_beam() -> None:
    finished = search(7, Beam(3), 4)
    assert [len(one.token_ids) for one in finished] == [4] * 3
    assert list(finished) == sorted(finished, key=lambda one: -one.score)
    assert len({one.token_ids for one in finished}) == 3


def test_a_masked_token_is_never_in_a_hypothesis() -> None:
    state: BeamState = beam_search.start(Beam(2), frozenset({0}), 5)
    while not state.is_over:
        rows = torch.stack([row(3, path) for path in state.open_token_ids])
        rows[:, 5:] = -torch.inf
        state = beam_search.step(state, rows).state
    used = set(itertools.chain.from_iterable(h.token_ids for h in state.finished))
    assert used <= set(range(5))


def test_too_few_continuations_are_an_error_of_the_request() -> None:
    state = beam_search.start(Beam(2), frozenset({0}), 5)
    logprobs = torch.full((1, VOCAB), -torch.inf)
    logprobs[0, :2] = -0.7
    with pytest.raises(InvalidLogits, match="only 1"):
        beam_search.step(state, logprobs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error(bad: float) -> None:
    logprobs = row(0, ())[None].clone()
    logprobs[0, 3] = bad
    state = beam_search.start(Beam(2), frozenset(), 5)
    with pytest.raises(InvalidLogits):
        beam_search.step(state, logprobs)
    with pytest.raises(InvalidLogits):
        beam_search.first_candidates(logprobs[0], 4)


@pytest.mark.parametrize(
    ("field", "beam", "num_samples", "num_ends"),
    [
        ("beam.num_beams", Beam(1), 1, 1),
        ("num_samples", Beam(2), 3, 1),
        ("beam.length_penalty", Beam(2, length_penalty=float("nan")), 1, 1),
        ("beam.length_penalty", Beam(2, length_penalty=6.0), 1, 1),
        ("beam.num_beams", Beam(9), 1, 0),
        ("beam.num_beams", Beam(4), 1, 4),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(
    field: str, beam: Beam, num_samples: int, num_ends: int
) -> None:
    with pytest.raises(InvalidRequest, match=field):
        beam_search.check_beam(beam, num_samples, VOCAB, num_ends)
    beam_search.check_beam(Beam(2), 2, VOCAB, 3)


# -- on the engine's blocks


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


def _random_request(rng: random.Random, name: str) -> Request:
    num_beams = rng.randint(2, 4)
    prompt = [rng.randrange(1, 97) for _ in range(rng.randint(1, 14))]
    stops = frozenset(rng.sample(range(1, 97), rng.choice([0, 0, 3, 8])))
    return make_request(
        name,
        prompt,
        max_tokens=rng.randint(1, 14),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=stops,
        num_samples=rng.randint(1, num_beams),
        beam=Beam(num_beams, rng.choice([0.0, 1.0, 2.0]), rng.random() < 0.5),
    )


def test_random_searches_among_other_requests(
    make_engine: Make, seed: int, scale: Callable[[int], int]
) -> None:
    for index in range(scale(400)):
        rng = random.Random(f"{seed} {index}")
        preemption = rng.choice(["never", "recompute", "swap"])
        engine = make_engine(num_blocks=80, budget=rng.randint(8, 30), preemption=preemption)
        wanted = {name: _random_request(rng, name) for name in ("a", "b")[: rng.randint(1, 2)]}
        wanted["c"] = make_request("c", [rng.randrange(1, 97) for _ in range(9)])
        model = FakeModel(context_window=320)
        for request in wanted.values():
            engine.submit(request)
        events = finish(engine)
        for name in wanted.keys() - {"c"}:
            assert _found(events[name]) == _expected(model, wanted[name]), (index, name)
        assert engine.stats().num_referenced_blocks == 0


def test_random_searches_in_two_legs(
    make_engine: Make, seed: int, scale: Callable[[int], int]
) -> None:
    """Prefill computes the prompt and hands its best candidates over; decode goes on from them,
    with all, some or none of the prompt's KV."""
    for index in range(scale(200)):
        rng = random.Random(f"legs {seed} {index}")
        request = _random_request(rng, "a")
        prefill, decode = make_engine(budget=9), make_engine(num_blocks=80, budget=9)
        prefill.reserve(dataclasses.replace(request, hold_after=1))
        prefill.start("a")
        last = finish(prefill)["a"][-1]
        assert last.beam_start and last.is_request_over and not last.token_ids
        decode.reserve(request)
        num_loaded = rng.choice([0, len(request.prompt_token_ids)])
        hand_over(prefill, decode, "a", num_loaded)
        prefill.release("a")
        decode.start("a", num_loaded_tokens=num_loaded, beam_start=last.beam_start)
        decode.submit(make_request("b", range(1, 8)))
        events = finish(decode)
        expected = _expected(FakeModel(context_window=320), request)
        assert _found(events["a"]) == expected, (index, num_loaded)
        assert prefill.stats().num_referenced_blocks == decode.stats().num_referenced_blocks == 0


def test_beams_share_the_prompt(make_engine: Make) -> None:
    engine = make_engine(num_blocks=64)
    request = make_request("a", range(1, 15), max_tokens=3, beam=Beam(4))
    engine.submit(request)
    engine.step()
    engine.step()
    tables = [engine.block_ids("a", index) for index in range(4)]
    assert len({table[:3] for table in tables}) == 1
    assert len({block_id for table in tables for block_id in table}) < 3 + 4


def test_a_search_waits_for_all_its_places_at_once(make_engine: Make) -> None:
    """Handed over whole, it needs four rows in its first step; others must not slip in for ever."""
    engine = make_engine(num_blocks=120, budget=16, running=4)
    request = make_request("a", range(1, 9), max_tokens=4, beam=Beam(4))
    leg = make_engine()
    leg.reserve(dataclasses.replace(request, hold_after=1))
    leg.start("a")
    begun = finish(leg)["a"][-1].beam_start
    for index in range(3):
        engine.submit(make_request(f"b{index}", range(1, 5), max_tokens=5))
    engine.step()
    engine.reserve(request)
    hand_over(leg, engine, "a", 8)
    engine.start("a", num_loaded_tokens=8, beam_start=begun)
    engine.submit(make_request("late", range(1, 5)))
    order = []
    while engine.has_work():
        output = engine.step()
        assert output.num_running <= 4
        order += [event.request_id for event in output.events if event.is_request_over]
        engine.check_integrity()
    assert order.index("a") < order.index("late")


def test_why_a_hypothesis_ended(make_engine: Make) -> None:
    engine = make_engine(num_blocks=80)
    stops = frozenset(range(60, 97, 2))
    fields = {"max_tokens": 6, "stop_token_ids": stops, "num_samples": 2, "beam": Beam(2)}
    engine.submit(make_request("a", [5], **fields))
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
    changes: dict[str, Any], field: str, make_engine: Make
) -> None:
    request = make_request("a", [1, 2], **changes, beam=Beam(2))
    with pytest.raises(InvalidRequest) as caught:
        make_engine().reserve(request)
    assert caught.value.field == field


def test_a_search_that_cannot_fit_is_refused(make_engine: Make) -> None:
    engine = make_engine(num_blocks=30, running=8)
    wide = make_request("a", [1], max_tokens=40, beam=Beam(8))
    with pytest.raises(RequestTooLong):
        engine.submit(wide)
    with pytest.raises(InvalidRequest, match="max_num_running"):
        engine.submit(dataclasses.replace(wide, beam=Beam(9)))
    fits = make_request("a", [1], max_tokens=40, beam=Beam(2))
    engine.reserve(fits)
    with pytest.raises(NoBlocks):
        engine.reserve(dataclasses.replace(fits, request_id="b"))


@pytest.mark.parametrize(
    "begun", [((1, -0.1),), ((1, 0.5),) * 4, ((97, -1.0),) * 4, ((1, float("nan")),) * 4]
)
def test_a_wrong_beam_start_is_refused(
    begun: tuple[tuple[int, float], ...], make_engine: Make
) -> None:
    engine = make_engine()
    engine.reserve(make_request("a", [1, 2], beam=Beam(2)))
    with pytest.raises(InvalidRequest, match="beam_start"):
        engine.start("a", beam_start=begun)
    engine.reserve(make_request("b", [1, 2]))
    with pytest.raises(InvalidRequest, match="beam_start"):
        engine.start("b", beam_start=((1, -0.1),))


def test_nan_ends_a_search_and_nobody_else(make_engine: Make) -> None:
    engine = make_engine(num_blocks=80, poison=frozenset(range(1, 97)))
    engine.submit(make_request("a", [1, 2], beam=Beam(2)))
    assert finish(engine)["a"][-1].error is not None
    assert engine.stats().num_referenced_blocks == 0
