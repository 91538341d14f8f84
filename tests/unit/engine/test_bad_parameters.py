"""Bad parameters in any combination are an error of that request, by the name of a field, and
change nothing for its neighbours in the batch."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import EngineError, InvalidRequest
from engine.outputs import RequestOutput
from engine.request import Beam, GrammarKind, GrammarSpec, Request, Sampling
from engine.testing.fake_model import FakeModel
from tests.harness.engines import all_events, hasher
from tests.harness.workloads import VOCAB, Outcome, outcomes, random_sampling, undisturbed

NAN, INF = float("nan"), float("inf")

BAD: dict[str, list[Any]] = {
    "max_tokens": [0, -1],
    "temperature": [-0.1, NAN, INF, 1e-9],
    "top_p": [0.0, -1.0, 1.5, NAN],
    "top_k": [-1],
    "min_p": [-0.1, 1.1, NAN],
    "min_tokens": [-1, 10_000],
    "seed": [-1, 1 << 64],
    "stop_token_ids": [frozenset({-1}), frozenset({VOCAB})],
    "logprobs": [-1, 1000],
    "repetition_penalty": [0.0, -1.0, NAN, INF],
    "presence_penalty": [NAN, INF],
    "frequency_penalty": [NAN, -INF],
    "logit_bias": [((VOCAB, 1.0),), ((1, NAN),), ((1, 1.0), (1, 2.0))],
    "bad_words": [((),), ((-1,),), ((VOCAB,),)],
    "allowed_token_ids": [frozenset(), frozenset({VOCAB})],
    "no_repeat_ngram": [-1, 10_000],
    "grammar": [GrammarSpec(GrammarKind.REGEX, "a")],
}
BAD_REQUEST: dict[str, list[Any]] = {
    "prompt_token_ids": [(), (-1,), (VOCAB,), tuple([1] * 48)],
    "hold_after": [0, -3],
    "num_samples": [0, -1, 100, 1000],
    "beam": [Beam(1), Beam(0), Beam(4, NAN), Beam(90)],
    "adapter": ["nobody"],
}
# Each is allowed, but all tokens are masked: an error when the first token is drawn.
EMPTY: list[dict[str, Any]] = [
    {"allowed_token_ids": frozenset({5}), "bad_words": ((5,),)},
    {"allowed_token_ids": frozenset({0}), "ignore_eos": False, "min_tokens": 3, "max_tokens": 9},
    {"allowed_token_ids": frozenset({7}), "no_repeat_ngram": 1},
]


def _bad(rng: random.Random, name: str) -> tuple[Request, set[str], bool]:
    """A request, the fields that are wrong, and whether it is refused at once."""
    fields: dict[str, Any] = {"max_tokens": 10}
    request: dict[str, Any] = {}
    if rng.random() < 0.2:
        fields |= rng.choice(EMPTY)
        return _request(name, Sampling(**fields), prompt_token_ids=(7, 8, 7)), set(), False
    wrong = rng.sample([*BAD, *BAD_REQUEST], rng.randint(1, 4))
    for field in wrong:
        if field in BAD:
            fields[field] = rng.choice(BAD[field])
        else:
            request[field] = rng.choice(BAD_REQUEST[field])
    return _request(name, Sampling(**fields), **request), set(wrong), True


def _request(name: str, sampling: Sampling, **fields: Any) -> Request:
    fields = {"prompt_token_ids": (1, 2, 3)} | fields
    return Request(
        request_id=name, sampling=sampling, block_hasher=hasher(b"x"), cache_root=b"x", **fields
    )


def test_bad_parameters_in_any_combination(seed: int, scale: Callable[[int], int]) -> None:
    """500 batches of good and bad ones; the good ones' tokens are those that they get alone."""
    num_refused = num_failed = 0
    for index in range(scale(500)):
        rng = random.Random(f"{seed} {index}")
        good = [
            _request(
                f"good {i}",
                dataclasses.replace(random_sampling(rng), stop_token_ids=frozenset({3})),
                prompt_token_ids=tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 9))),
            )
            for i in range(2)
        ]
        expected = undisturbed(good)
        config = EngineConfig(num_blocks=64, max_num_tokens_per_step=9, max_num_running=4)
        engine = LLMEngine(config, FakeModel(context_window=48))
        failing: set[str] = set()
        for request in good:
            engine.submit(request)
        for number in range(3):
            name = f"bad {number}"
            request, wrong, is_refused = _bad(rng, name)
            before = engine.stats()
            try:
                engine.submit(request) if rng.random() < 0.5 else _start(engine, request)
            except InvalidRequest as error:
                assert is_refused and engine.stats() == before
                assert error.field.split(".")[0] in wrong | _related(wrong), (error.field, wrong)
                num_refused += 1
            else:
                assert not is_refused, (wrong, request)
                failing.add(name)
        found, errors = _finish(engine)
        assert {name: found[name] for name in expected} == expected, (seed, index)
        assert set(errors) == failing
        num_failed += len(errors)
        assert engine.stats().num_referenced_blocks == 0
    assert num_refused > 0 and num_failed > 0


def _related(wrong: set[str]) -> set[str]:
    """A field may be named for what it is beside another: bounds that depend on one another, and
    what a beam search cannot do."""
    related = {"min_tokens"} if "max_tokens" in wrong else set()
    return related | (set(BAD) if "beam" in wrong else set())


def _start(engine: LLMEngine, request: Request) -> None:
    engine.reserve(request)
    engine.start(request.request_id)


def _finish(engine: LLMEngine) -> tuple[dict[str, dict[int, Outcome]], dict[str, EngineError]]:
    events: dict[str, list[RequestOutput]] = {}
    errors: dict[str, EngineError] = {}
    for event in all_events(engine):
        events.setdefault(event.request_id, []).append(event)
        if event.error is not None:
            errors[event.request_id] = event.error
    return {name: outcomes(one) for name, one in events.items()}, errors
