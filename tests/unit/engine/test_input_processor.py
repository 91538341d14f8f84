"""What is refused at the engine's surface, each by the name of a field; and a bad request changes
nothing for its neighbours in the batch."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import EmptySupport, InvalidRequest
from engine.input_processor import (
    MAX_BAD_WORD_TOKENS,
    MAX_NGRAM_SIZE,
    CacheRootGuard,
    check_sampling,
)
from engine.models.loader import fingerprint, normalised_config
from engine.request import (
    ALLOWED,
    MAX_LOGPROBS,
    Beam,
    GrammarKind,
    GrammarSpec,
    Request,
    RequestState,
    Sampling,
)
from engine.testing.fake_model import FakeModel
from process.settings import SettingsError
from tests.conftest import LONG
from tests.harness.engines import finish, make_request
from tests.harness.workloads import VOCAB, outcomes, random_sampling, undisturbed
from tests.unit.engine.sampling.reference import make_draw, sample

NAN, INF = math.nan, math.inf
WRONG: dict[str, list[Any]] = {
    "max_tokens": [0, -1],
    "temperature": [-1.0, NAN, INF, -INF, 1e-5, 1e7],
    "top_p": [0.0, -0.1, 1.0001, NAN, INF],
    "top_k": [-1, 1 << 31],
    "min_p": [-0.1, 1.1, NAN, INF],
    "min_tokens": [-1, 101],
    "seed": [-1, 1 << 64],
    "sample_index": [-1, 1 << 31],
    "logprobs": [-1, MAX_LOGPROBS + 1],
    "repetition_penalty": [0.0, -1.0, NAN, INF, 1e-7, 1e7],
    "presence_penalty": [NAN, INF, -INF, 2e9, -2e9],
    "frequency_penalty": [NAN, INF, -INF, 2e9, -2e9],
    "stop_token_ids": [frozenset({-1}), frozenset({VOCAB})],
    "logit_bias": [
        *(((3, value),) for value in (NAN, INF, -INF, 2e9, -2e9)),
        *(((token_id, 1.0),) for token_id in (-1, VOCAB)),
        ((3, 1.0), (4, 1.0), (3, 1.0)),
    ],
    "bad_words": [
        *(((1,), word) for word in ((), (VOCAB,), (1, -1), (1, 2, VOCAB))),
        ((1,) * (MAX_BAD_WORD_TOKENS + 1),),
    ],
    "allowed_token_ids": [frozenset(ids) for ids in ((), (VOCAB,), (-1, 3))],
    "no_repeat_ngram": [-1, MAX_NGRAM_SIZE + 1],
}
NO_GRAMMAR = GrammarSpec(GrammarKind.REGEX, "a")
"""Wrong for an engine without grammars."""
BAD = WRONG | {"grammar": [NO_GRAMMAR]}
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
    {"allowed_token_ids": frozenset({0}), "ignore_eos": False, "min_tokens": 3},
    {"allowed_token_ids": frozenset({7}), "no_repeat_ngram": 1},
]


def _bad(rng: random.Random, name: str) -> tuple[Request, set[str]]:
    """A request, and the fields that are wrong: none where it is refused at its first token."""
    if rng.random() < 0.2:
        return make_request(name, (7, 8, 7), root=b"x", max_tokens=10, **rng.choice(EMPTY)), set()
    wrong = rng.sample([*BAD, *BAD_REQUEST], rng.randint(1, 4))
    fields = {"prompt_token_ids": (1, 2, 3)}
    fields |= {field: rng.choice((BAD | BAD_REQUEST)[field]) for field in wrong}
    prompt = fields.pop("prompt_token_ids")
    return make_request(name, prompt, root=b"x", **{"max_tokens": 10} | fields), set(wrong)


def test_bad_parameters_in_any_combination(seed: int, scale: Callable[[int], int]) -> None:
    """500 batches of good and bad ones; the good ones' tokens are those that they get alone."""
    num_refused = num_failed = 0
    for index in range(scale(500)):
        rng = random.Random(f"{seed} {index}")
        good = []
        for name in ("good 0", "good 1"):
            sampling = dataclasses.replace(random_sampling(rng), stop_token_ids=frozenset({3}))
            prompt = tuple(rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 9)))
            good.append(
                dataclasses.replace(make_request(name, prompt, root=b"x"), sampling=sampling)
            )
        expected = undisturbed(good)
        config = EngineConfig(num_blocks=64, max_num_tokens_per_step=9, max_num_running=4)
        engine = LLMEngine(config, FakeModel(context_window=48))
        failing: set[str] = set()
        for request in good:
            engine.submit(request)
        for name in ("bad 0", "bad 1", "bad 2"):
            request, wrong = _bad(rng, name)
            before = engine.stats()
            try:
                if rng.random() < 0.5:
                    engine.submit(request)
                else:
                    engine.reserve(request)
                    engine.start(name)
            except InvalidRequest as error:
                assert wrong and engine.stats() == before
                assert error.field.split(".")[0] in wrong | _related(wrong), (error.field, wrong)
                num_refused += 1
            else:
                assert not wrong, request
                failing.add(name)
        events = finish(engine)
        assert {name: outcomes(events[name]) for name in expected} == expected, (seed, index)
        errors = {name for name, own in events.items() if any(event.error for event in own)}
        assert errors == failing
        num_failed += len(errors)
        assert engine.stats().num_referenced_blocks == 0
    assert num_refused > 0 and num_failed > 0


def _related(wrong: set[str]) -> set[str]:
    """A field may be named for what it is beside another: bounds that depend on one another, and
    what a beam search cannot do."""
    related = {"min_tokens"} if "max_tokens" in wrong else set()
    return related | (set(BAD) if "beam" in wrong else set())


# -- sampling


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values]
)
def test_what_is_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    sampling = Sampling(**({"max_tokens": 100} | {field: value}))
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(sampling, VOCAB)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e-4, "top_p": 1e-300, "min_p": 1.0, "top_k": 10**9},
        {"min_tokens": 100, "seed": (1 << 64) - 1, "logprobs": MAX_LOGPROBS},
        {"logprobs": 0, "repetition_penalty": 1e-6, "presence_penalty": -1e9},
        {"repetition_penalty": 1e6, "frequency_penalty": 1e9, "stop_token_ids": {0, VOCAB - 1}},
        {"logit_bias": ((0, -1e9), (96, 1e9)), "bad_words": ((VOCAB - 1,), (0, 0, VOCAB - 1))},
        {"allowed_token_ids": {0, VOCAB - 1}, "no_repeat_ngram": MAX_NGRAM_SIZE},
    ],
)
def test_the_edges_of_the_ranges_are_in(fields: dict[str, Any]) -> None:
    check_sampling(Sampling(max_tokens=100, **fields), VOCAB)


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 2) | st.just(1.0)
ids = st.integers(0, 49) | st.integers(-2, 60)
junk = st.fixed_dictionaries(
    {"max_tokens": st.integers(-1, 50) | st.just(9)},
    optional={
        "temperature": numbers,
        "top_p": numbers,
        "top_k": st.integers(-1, 60),
        "min_p": numbers,
        "min_tokens": st.integers(-1, 10),
        "seed": st.integers(-1, 2**64),
        "sample_index": st.integers(-1, 3),
        "stop_token_ids": st.frozensets(ids, max_size=2),
        "logprobs": st.none() | st.integers(-1, MAX_LOGPROBS + 1),
        "repetition_penalty": numbers,
        "presence_penalty": numbers,
        "frequency_penalty": numbers,
        "logit_bias": st.lists(st.tuples(ids, numbers), max_size=3).map(tuple),
        "bad_words": st.lists(st.lists(ids, max_size=3).map(tuple), max_size=3).map(tuple),
        "allowed_token_ids": st.none() | st.frozensets(ids, max_size=5),
        "no_repeat_ngram": st.integers(-1, 5),
        "trace": st.booleans(),
    },
)


@settings(max_examples=4000 if LONG else 200)
@given(fields=junk, logits_seed=st.integers(0, 1000))
def test_what_is_let_through_can_be_drawn_with(fields: dict[str, Any], logits_seed: int) -> None:
    """Any combination is refused by name, or gives a token, or empties its own support; and the
    row beside it is drawn as if it were alone."""
    sampling = Sampling(**fields)
    try:
        check_sampling(sampling, 50)
    except InvalidRequest as error:
        assert error.field in fields
        return
    generator = torch.Generator().manual_seed(logits_seed)
    logits = torch.randn(2, 50, generator=generator) * 10
    one = make_draw((1, 2, 1), (3, 3), ends=sorted(sampling.stop_token_ids), **fields)
    calm = make_draw((1,), (), temperature=1.0, top_p=0.9, repetition_penalty=1.2)
    drawn = sample(logits, [one, calm])
    assert drawn[1] == sample(logits[1:], [calm])[0]
    if drawn[0].error is not None:
        assert isinstance(drawn[0].error, EmptySupport)
        return
    assert 0 <= drawn[0].token_id < 50
    if drawn[0].trace is not None:
        assert drawn[0].trace.support_size >= 1
        assert not math.isnan(drawn[0].trace.processed_logprob)


# -- values, settings, fingerprints


def test_every_state_can_be_aborted_and_the_ends_are_ends() -> None:
    ends = {RequestState.FINISHED, RequestState.ABORTED}
    assert set(ALLOWED) == set(RequestState)
    for state, after in ALLOWED.items():
        assert (state in ends) == (after == frozenset())
        assert state in ends or RequestState.ABORTED in after


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [((7, 3, 96, 5), (3, 96)), ((-1,), (-1, -1)), ((2**40, 1), (1, 2**40)), ((), (0, 0))],
)
def test_a_request_knows_the_range_of_its_tokens(
    prompt: tuple[int, ...], expected: tuple[int, int]
) -> None:
    assert make_request("r", prompt).token_id_range == expected


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"device": "tpu"}, "device: 'tpu'"),
        ({"dtype": "float16"}, "dtype: 'float16'"),
        ({"block_size": 0}, "block_size: .* 0"),
        ({"num_blocks": -1}, "num_blocks: .*-1"),
        ({"num_threads": -2}, "num_threads: .*-2"),
        ({"max_num_running": 65, "max_num_tokens_per_step": 64}, "max_num_running: 65"),
    ],
)
def test_settings_out_of_range_are_named(fields: dict[str, int], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        EngineConfig(**fields)  # type: ignore[arg-type]


PARTS: dict[str, Any] = {
    "weights_digest": "aa", "config": {"hidden_size": 8}, "tokenizer_digest": "bb", "layout": "cc",
}  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {"weights_digest": "ab"},
        {"config": {"hidden_size": 9}},
        {"tokenizer_digest": "bc"},
        {"layout": "cd"},
        {"weights_digest": "aab", "tokenizer_digest": "b"},  # parts do not run into one another
    ],
)
def test_each_part_changes_the_fingerprint(other: dict[str, Any]) -> None:
    assert fingerprint(**(PARTS | other)) != fingerprint(**PARTS)


def test_who_saved_a_config_and_in_which_order_does_not_count() -> None:
    one = {"a": 1, "b": [1, 2], "transformers_version": "5.0", "_name_or_path": "x"}
    two = {"b": [1, 2], "a": 1, "transformers_version": "5.9"}
    assert normalised_config(one) == normalised_config(two)
    assert normalised_config(one) != normalised_config(two | {"b": [2, 1]})


# -- one cache root, one adapter


def test_a_root_belongs_to_the_content_it_was_used_with() -> None:
    roots = CacheRootGuard()
    roots.check(b"base", "")
    roots.check(b"one", "d1")
    roots.check(b"one", "d1")
    for root, digest in ((b"one", "d2"), (b"one", ""), (b"base", "d1")):
        with pytest.raises(InvalidRequest, match=r"^cache_root: was used with") as raised:
            roots.check(root, digest)
        assert raised.value.field == "cache_root"
    roots.check(b"one", "d1")


def test_the_least_recently_used_is_forgotten() -> None:
    roots = CacheRootGuard(max_num_roots=2)
    for root in (b"a", b"b", b"a", b"c"):
        roots.check(root, "d1")
        roots.check_integrity()
    assert len(roots) == 2
    roots.check(b"b", "d2")  # forgotten; a is not
    with pytest.raises(InvalidRequest):
        roots.check(b"c", "d2")
