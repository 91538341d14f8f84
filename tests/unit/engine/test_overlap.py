"""Steps launched ahead: nobody can tell, but by time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.models.interface import DRAWN_BEFORE
from engine.outputs import RequestOutput
from engine.request import Beam, Request, Sampling
from engine.testing.ahead_model import AheadModel
from tests.harness.engines import (
    PROMPT,
    WINDOW,
    all_events,
    all_steps,
    arriving,
    fake_model,
    finish,
    hasher,
    make,
    make_request,
    recording_engine,
    tokens_of,
    without_ids,
    write_tokens,
)
from tests.harness.workloads import random_sampling

Make = Callable[..., Any]


def _requests(rng: random.Random, num: int) -> list[Request]:
    requests = []
    for index in range(num):
        prompt = tuple(rng.randrange(1, 97) for _ in range(rng.randint(1, 20)))
        requests.append(
            Request(f"r{index}", prompt, _sampling(rng), hasher(), num_samples=rng.choice([1, 2]))
        )
    return requests


def _sampling(rng: random.Random) -> Sampling:
    """Mostly what can be launched; half of them end by a token sooner or later."""
    if rng.random() < 0.1:
        return random_sampling(rng)
    stops = rng.sample(range(97), rng.choice([0, 10]))
    temperature = rng.choice([0.0, 1.0])
    return Sampling(
        rng.randint(1, 30), temperature, seed=rng.randrange(99), stop_token_ids=frozenset(stops)
    )


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("preemption", ["never", "recompute"])
def test_every_step_tells_what_a_plain_one_does(
    preemption: str, is_late: bool, seed: int, scale: Callable[[int], int]
) -> None:
    """100 workloads that begin together: outputs, levels and counts are the same after each
    step; with blocks on demand, but for those taken a step early."""
    num_launches = num_left_over = 0
    # The last ones are the same for every seed: of a few others none may leave a row over.
    names = [*(f"{seed} {index}" for index in range(scale(100))), "0 0", "0 1", "0 2"]
    for index, name in enumerate(names):
        rng = random.Random(name)
        requests = _requests(rng, 4)
        model = AheadModel(fake_model(), is_late=is_late)
        engines = [
            make(one, num_blocks=200, preemption=preemption, overlap_prompts=index % 2 == 0)
            for one in (fake_model(), model)
        ]
        for engine in engines:
            for request in requests:
                engine.submit(request)
        plain, ahead = engines
        while plain.has_work():
            outputs = [engine.step() for engine in engines]
            stats = [engine.stats() for engine in engines]
            if preemption == "never":
                assert outputs[0] == outputs[1] and stats[0] == stats[1]
            told = [without_ids(output.events) for output in outputs]
            assert told[0] == told[1]
            ahead.check_integrity()
        assert not ahead.has_work()
        assert ahead.stats() == plain.stats()
        names = ("num_prefill_tokens", "num_decode_tokens", "num_output_tokens", "finished")
        for name in names:
            assert getattr(ahead.metrics(), name) == getattr(plain.metrics(), name)
        assert ahead.metrics().itl_s.count == plain.metrics().itl_s.count
        num_launches += model.launches.num_launches
        num_left_over += ahead._in_flight.num_left_over
    assert num_launches > 0 and num_left_over > 0


@pytest.mark.parametrize("overlap_prompts", [False, True])
def test_a_prompt_gets_a_place_when_a_plain_step_would_give_it(overlap_prompts: bool) -> None:
    """One of two ends by its length, which is known before: nothing is launched without the one
    that waits."""
    told = []
    for model in (fake_model(), AheadModel(fake_model(), is_late=True)):
        engine = make(model, max_num_running=2, overlap_prompts=overlap_prompts)
        for name, max_tokens in (("a", 5), ("b", 20), ("c", 5)):
            engine.submit(make_request(name, PROMPT, max_tokens=max_tokens, root=name.encode()))
        told.append([without_ids(output.events) for output in all_steps(engine)])
    assert told[0] == told[1]


def test_each_samples_events_are_those_of_plain_steps(
    seed: int, scale: Callable[[int], int]
) -> None:
    """200 workloads with arrivals: tokens, filled blocks, lengths, reasons and the last event of
    each sample."""
    for index in range(scale(200)):
        rng = random.Random(f"arriving {seed} {index}")
        requests = _requests(rng, 5)
        told = [
            arriving(
                make(model, num_blocks=200, overlap_prompts=index % 2 == 0),
                requests,
                random.Random(index),
            )
            for model in (fake_model(), AheadModel(fake_model(), is_late=rng.random() < 0.5))
        ]
        assert {key: _merged(events) for key, events in told[0].items()} == {
            key: _merged(events) for key, events in told[1].items()
        }


def _merged(events: Sequence[RequestOutput]) -> list[Any]:
    """But that of several samples which ends last says that the request is over."""
    return [event._replace(is_request_over=False) for event in events]


# -- order


def test_a_step_is_launched_before_the_one_before_it_is_read() -> None:
    engine, ahead = recording_engine()
    engine.submit(make_request("a", PROMPT, max_tokens=6))
    engine.step()
    assert ahead.calls == []  # the prompt
    tokens = [tokens_of(engine.step().events) for _ in range(5)]
    assert tokens == [[token] for token in fake_model().generate(PROMPT, 6)[1:]]
    expected = "launch 0, launch 1, read 0, launch 2, read 1, launch 3, read 2, launch 4, read 3"
    assert ahead.calls == [*expected.split(", "), "read 4"]
    assert [rows[0].token_id == DRAWN_BEFORE for rows in ahead.launched] == [False] + [True] * 4
    assert [rows[0].position for rows in ahead.launched] == list(range(14, 19))
    assert len({id(rows[0].block_ids) for rows in ahead.launched}) == 1  # nothing to send


def test_no_row_goes_beyond_the_length() -> None:
    """The longest ends where the context window does."""
    engine, ahead = recording_engine(max_num_tokens_per_step=64)
    for index, num in enumerate((2, 5, 64)):
        engine.submit(make_request(str(index), PROMPT[index:], max_tokens=num))
    all_steps(engine)
    num_rows = sum(map(len, ahead.launched))
    assert num_rows == 1 + 4 + (WINDOW - 12 - 1)
    assert max(row.position for rows in ahead.launched for row in rows) == WINDOW - 2
    assert engine._in_flight.num_left_over == 0


def test_who_has_its_cache_joins_a_launch() -> None:
    """A decode worker's arrivals cost no plain step."""
    engine, ahead = recording_engine()
    forwards: list[int] = []
    plain_forward = engine._model.forward
    engine._model.forward = lambda batch: forwards.append(1) or plain_forward(batch)  # type: ignore
    engine.submit(make_request("a", PROMPT, max_tokens=20))
    events = [event for _ in range(3) for event in engine.step().events]
    assert len(forwards) == 1
    prompt = tuple(range(30, 40))
    for index, name in enumerate("bc"):
        request = make_request(name, prompt, max_tokens=6, root=name.encode())
        block_ids = engine.reserve(request).block_ids
        write_tokens(engine, block_ids, prompt)
        first = fake_model().next_token(prompt)
        engine.start(name, num_loaded_tokens=10, outputs=[[first]] if index else [])
    events += all_events(engine)
    assert len(forwards) == 1
    of = {name: tokens_of([one for one in events if one.request_id == name]) for name in "abc"}
    assert of["a"] == fake_model().generate(PROMPT, 20)
    assert of["b"] == fake_model().generate(prompt, 6)
    assert of["c"] == fake_model().generate(prompt, 6)[1:]
    assert max(map(len, ahead.launched)) == 3


@pytest.mark.parametrize(
    ("what", "decodes_too"),
    [
        ({"repetition_penalty": 1.3}, True),
        ({"no_repeat_ngram": 2}, True),
        ({"hold_after": 20}, True),
        ({"beam": Beam(2)}, True),
        ({"overlap": False}, True),
        ({"stop_policy": lambda view: False}, True),
        ({"takes": lambda draw: False}, True),
        ({"max_rows": 1}, True),
        ({"num_samples": 2}, False),
        ({"overlap_prompts": False}, False),
        ({"takes_prompts": False}, False),
    ],
    ids=lambda what: next(iter(what)) if isinstance(what, dict) else "",
)
def test_what_only_a_plain_step_can(what: dict[str, Any], decodes_too: bool) -> None:
    """The whole step is plain then, beside whatever else is in it: each, or each with a prompt."""

    def taken(*names: str) -> dict[str, Any]:
        return {name: what[name] for name in names if name in what}

    model = AheadModel(fake_model(), **taken("takes", "max_rows", "takes_prompts"))
    config = {"num_blocks": 64, "overlap_prompts": True} | taken("overlap", "overlap_prompts")
    engine = LLMEngine(EngineConfig(**config), model, **taken("stop_policy"))
    names = ("repetition_penalty", "no_repeat_ngram", "hold_after", "beam", "num_samples")
    engine.submit(make_request("a", PROMPT, max_tokens=20, **taken(*names)))
    engine.submit(make_request("b", PROMPT, max_tokens=20))
    assert tokens_of(finish(engine)["b"]) == fake_model().generate(PROMPT, 20)
    assert model.launches.num_mixed == 0
    assert not (decodes_too and model.launches.num_launches)
