"""Grammars end to end: the bundled model, whose every answer must be in its language, and a
FakeModel for what a model would rarely do."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from engine.errors import EmptySupport
from engine.grammar.compiler import CompileProcess
from engine.grammar.config import GrammarLimits
from engine.grammar.errors import GrammarTooCostly, refuse
from engine.grammar.mask_filler import MaskFiller
from engine.grammar.service import GrammarService
from engine.grammar.vocabulary import GrammarTokenizer, Vocabulary
from engine.models.interface import LoadedModel
from engine.outputs import RequestOutput
from engine.request import FinishReason, GrammarSpec, Request
from engine.testing.fake_model import FakeModel
from tests.harness.compile_process import SharedProcess
from tests.harness.quantized_fake import QuantizedFake
from tests.unit.engine.grammar.driver import (
    BUNDLED,
    VOCAB_SIZE,
    choice_spec,
    is_valid,
    random_regex,
    random_schema,
    regex_spec,
    schema_spec,
)
from tokens.tokenizer import Tokenizer

LIMIT_S = 90.0
TOKENIZER = Tokenizer.load(BUNDLED)
Make = Callable[..., LLMEngine]


@pytest.fixture(scope="module")
def process() -> Iterator[SharedProcess]:
    made = SharedProcess(BUNDLED, VOCAB_SIZE)
    yield made
    made.end()


@pytest.fixture(scope="module")
def bundled() -> LoadedModel:
    """The bundled model as `load_engine` loads it."""
    config = EngineConfig(model="baton-5m", device="cpu", num_blocks=256)
    return load_engine(config)._model


@pytest.fixture
def make(process: SharedProcess, bundled: LoadedModel) -> Iterator[Make]:
    """`make(limits={...}, is_fake=False, kv_scale="", vocabulary=None, <config>)`."""
    made: list[LLMEngine] = []

    def new(
        *,
        limits: dict[str, float] | None = None,
        is_fake: bool = False,
        kv_scale: str = "",
        vocabulary: Vocabulary | None = None,
        **config: Any,
    ) -> LLMEngine:
        known = vocabulary or Vocabulary.load(BUNDLED, VOCAB_SIZE)
        checked = GrammarLimits(**(limits or {}))  # type: ignore[arg-type]
        model = bundled
        if is_fake:
            model = FakeModel(vocab_size=VOCAB_SIZE, context_window=512, eos_token_ids=(1,))
        if kv_scale:
            model = QuantizedFake(kv_scale, context_window=512, block_size=4, vocab_size=VOCAB_SIZE)
        engine = LLMEngine(
            EngineConfig(**({"num_blocks": 256, "device": "cpu"} | config)),
            model,
            make_grammars=lambda: GrammarService(
                lambda: GrammarTokenizer.of(known, TOKENIZER), checked, process=process
            ),
        )
        made.append(engine)
        return engine

    yield new
    for engine in made:
        engine.check_integrity()
        engine.close()


Outcome = tuple[list[int], FinishReason | None, Exception | None]


def finish(engine: LLMEngine) -> dict[tuple[str, int], list[RequestOutput]]:
    deadline = time.monotonic() + LIMIT_S
    events: dict[tuple[str, int], list[RequestOutput]] = {}
    while engine.has_work():
        assert time.monotonic() < deadline
        for event in engine.step().events:
            events.setdefault((event.request_id, event.sample_index), []).append(event)
        engine.check_integrity()
    return events


def outcome(events: list[RequestOutput]) -> Outcome:
    token_ids = [token_id for event in events for token_id in event.token_ids]
    return token_ids, events[-1].finish_reason, events[-1].error


def ask(
    engine: LLMEngine,
    name: str,
    spec: GrammarSpec | None,
    make_request: Callable[..., Request],
    *,
    num_samples: int = 1,
    prompt: str = "<|user|>Hello<|end|><|assistant|>",
    **sampling: Any,
) -> None:

    request = make_request(
        name,
        TOKENIZER.encode(prompt),
        **({"max_tokens": 160, "temperature": 1.0, "seed": 7} | sampling),
        grammar=spec,
    )
    engine.reserve(dataclasses.replace(request, num_samples=num_samples))
    engine.start(name)


@pytest.mark.parametrize("kv_scale", ["", "tensor", "block"])
def test_late_masks_change_no_token(
    make: Make,
    make_request: Callable[..., Request],
    monkeypatch: pytest.MonkeyPatch,
    kv_scale: str,
) -> None:
    """Also where a step has filled a block of a quantized cache with several tokens (a prompt, or
    forced ones), so that their unquantized values lie nowhere."""
    wait, num_waits = MaskFiller.wait, 0
    spec = schema_spec({"type": "array", "items": {"enum": ["a", "bc"]}})

    def answers(*, are_late: bool) -> dict[tuple[str, int], Outcome]:
        def late(filler: MaskFiller, states: Any, timeout_s: float | None) -> set[int]:
            nonlocal num_waits
            found = wait(filler, states, None)
            num_waits += 1
            return set(range(len(states))) if are_late and num_waits % 2 and timeout_s else found

        monkeypatch.setattr(MaskFiller, "wait", late)
        engine = make(is_fake=True, kv_scale=kv_scale)
        ask(engine, "plain", None, make_request, max_tokens=200, temperature=0.0, ignore_eos=True)
        for number in range(6):  # prompts that end at each place of a block
            prompt = "<|user|>" + "Hello" * number
            asked = {"prompt": prompt, "max_tokens": 24, "temperature": 0.0, "num_samples": 2}
            ask(engine, f"r{number}", spec, make_request, **asked)
        return {key: outcome(events) for key, events in finish(engine).items()}

    assert answers(are_late=True) == answers(are_late=False)
    assert num_waits > 10


def text_of(token_ids: list[int]) -> str:
    return TOKENIZER.decode(token_ids)


def check(spec: GrammarSpec, schema: Any, pattern: str, found: Outcome) -> bool:
    """Whether it came to an end; then it must parse."""
    token_ids, reason, error = found
    assert error is None, (spec, error)
    if reason is FinishReason.LENGTH:
        return False
    assert reason in (FinishReason.GRAMMAR, FinishReason.EOS)
    text = text_of(token_ids)
    if schema is not None:
        assert is_valid(schema, json.loads(text), schema), (schema, text)
    else:
        assert re.fullmatch(pattern, text, re.ASCII), (pattern, text)
    return True


@pytest.mark.timeout(1200)  # all of the stated count, on few cores
@pytest.mark.parametrize("jump_forward", ["off", "tokens", "retokenize"])
def test_every_answer_of_the_bundled_model_parses(
    make: Make,
    make_request: Callable[..., Request],
    seed: int,
    scale: Callable[[int], int],
    jump_forward: str,
) -> None:
    """Random schemas and patterns in one batch with a request without grammar, greedy and
    sampled, several samples of some."""
    rng = random.Random(f"{seed} bundled {jump_forward}")
    alone = make()
    ask(alone, "free", None, make_request, max_tokens=40)
    undisturbed = outcome(finish(alone)["free", 0])
    engine = make(  # the model is its own from here on
        jump_forward=jump_forward,
        max_num_running=16,
        max_num_tokens_per_step=64,
        num_blocks=1024,  # ten at once, some of them three samples each
    )
    cases: dict[str, tuple[GrammarSpec, Any, str]] = {}
    for number in range(max(10, scale(200))):
        schema = random_schema(rng) if number % 2 else None
        pattern = random_regex(rng)
        spec = regex_spec(pattern) if schema is None else schema_spec(schema)
        cases[f"{number}"] = (spec, schema, pattern)
    num_ended = num_all = 0
    names = list(cases)
    for first in range(0, len(names), 10):
        ask(engine, "free", None, make_request, max_tokens=40)
        for name in names[first : first + 10]:
            ask(
                engine,
                name,
                cases[name][0],
                make_request,
                num_samples=rng.choice((1, 1, 3)),
                temperature=rng.choice((0.0, 1.0)),
                seed=rng.randrange(1 << 64),
            )
        for (name, _), events in finish(engine).items():
            if name == "free":
                assert outcome(events) == undisturbed
                continue
            num_all += 1
            num_ended += check(*cases[name], outcome(events))
    assert num_ended > num_all / 6, f"only {num_ended} of {num_all} end within their length"


def test_a_request_goes_on_from_any_of_its_events(
    make: Make, make_request: Callable[..., Request], seed: int
) -> None:
    """Another engine that gets the tokens of the first events draws the same rest, jumps
    included."""
    rng = random.Random(f"{seed} resume")
    for number in range(3):
        schema = {
            "type": "object",
            "properties": {"kind": {"enum": ["cat", "dog"]}, "inner": random_schema(rng, 2)},
            "required": ["kind", "inner"],
        }
        spec, name = schema_spec(schema), f"r{number}"
        engine = make()
        ask(engine, name, spec, make_request, max_tokens=60)
        events = finish(engine)[name, 0]
        whole = outcome(events)
        cut = rng.randrange(1, max(2, len([e for e in events if e.token_ids]) - 1))
        before = [i for e in [e for e in events if e.token_ids][:cut] for i in e.token_ids]
        if before == whole[0]:
            continue
        other = make(max_num_tokens_per_step=8, max_num_running=4)
        request = make_request(
            name,
            TOKENIZER.encode("<|user|>Hello<|end|><|assistant|>"),
            max_tokens=60,
            temperature=1.0,
            seed=7,
            grammar=spec,
        )
        other.reserve(request)
        other.start(name, outputs=[before])
        rest = outcome(finish(other)[name, 0])
        assert (before + rest[0], rest[1]) == whole[:2]


def test_min_tokens_and_ends(make: Make, make_request: Callable[..., Request]) -> None:
    """Below min_tokens no end is drawn while the text may go on; a text that may not go on ends all
    the same."""
    engine = make()
    ask(engine, "short", choice_spec("yes"), make_request, min_tokens=30)
    ask(engine, "long", regex_spec("[a-z ]*"), make_request, min_tokens=12, max_tokens=40)
    ask(engine, "no eos", regex_spec("[0-9]{3}"), make_request, ignore_eos=True)
    stop = TOKENIZER.encode(".", add_special_tokens=False)[0]
    ask(
        engine,
        "stop",
        regex_spec("[a-z]{2,}x"),
        make_request,
        stop_token_ids=frozenset({stop}),
        max_tokens=150,
    )
    found = {name: outcome(events) for (name, _), events in finish(engine).items()}
    assert text_of(found["short"][0]) == "yes"
    assert found["short"][1] is FinishReason.GRAMMAR
    assert len(found["long"][0]) >= 12
    assert found["no eos"][1] is FinishReason.GRAMMAR
    assert re.fullmatch("[0-9]{3}", text_of(found["no eos"][0]))
    token_ids, reason, error = found["stop"]
    assert error is None
    if reason is not FinishReason.LENGTH:
        # The stop token may come where the text is complete, and is no part of the text.
        text = text_of([token_id for token_id in token_ids if token_id != stop])
        assert re.fullmatch("[a-z]{2,}x", text)


def test_a_bomb_hurts_only_its_sender(make: Make, make_request: Callable[..., Request]) -> None:
    """One costs too much to compile, one while it is followed; those beside them answer as if they
    were alone."""
    alone = make(is_fake=True)
    ask(alone, "free", None, make_request, max_tokens=60)
    ask(alone, "bound", regex_spec("[ab]{60,}"), make_request, max_tokens=50)
    undisturbed = {key: outcome(events) for key, events in finish(alone).items()}
    engine = make(is_fake=True, limits={"max_num_token_fuel": 50})
    bombs = {
        "compile": regex_spec("(((a{99}){99}){99}){99}"),
        "run": regex_spec("x([ab]{0,60}[bc]{0,60}){0,40}d"),
    }
    for name, spec in bombs.items():
        ask(engine, name, spec, make_request, max_tokens=200, ignore_eos=True)
    ask(engine, "free", None, make_request, max_tokens=60)
    ask(engine, "bound", regex_spec("[ab]{60,}"), make_request, max_tokens=50)
    found = {key: outcome(events) for key, events in finish(engine).items()}
    assert isinstance(found["compile", 0][2], GrammarTooCostly)
    assert isinstance(found["run", 0][2], GrammarTooCostly)
    assert {key: found[key] for key in undisturbed} == undisturbed


def test_a_dead_end_is_an_error_of_its_own(
    make: Make, make_request: Callable[..., Request]
) -> None:
    """The vocabulary can begin the text and cannot end it: an error when it is met, no hang. (The
    compiling process knows the whole vocabulary, so it does not see it before.)"""
    whole = Vocabulary.load(BUNDLED, VOCAB_SIZE)
    without = Vocabulary(tuple(b"" if b"q" in data else data for data in whole.token_bytes))
    engine = make(is_fake=True, vocabulary=without)
    ask(engine, "dead", regex_spec("[ab]{3}q"), make_request)
    ask(engine, "well", regex_spec("[ab]{3}c"), make_request)
    found = {name: outcome(events) for (name, _), events in finish(engine).items()}
    assert isinstance(found["dead"][2], EmptySupport)
    assert found["well"][2] is None
    assert re.fullmatch("[ab]{3}c", text_of(found["well"][0]))


def test_the_prefix_cache_is_shared_across_grammars(
    make: Make, make_request: Callable[..., Request]
) -> None:
    """A grammar changes what is drawn, not what is computed."""
    engine = make()
    prompt = "<|user|>" + "the cat sat on the mat " * 12
    ask(engine, "first", choice_spec("yes", "no"), make_request, prompt=prompt)
    finish(engine)
    before = engine.stats().num_local_prefix_tokens
    ask(engine, "second", regex_spec("[0-9]{4}"), make_request, prompt=prompt)
    found = finish(engine)["second", 0]
    assert engine.stats().num_local_prefix_tokens - before >= 16
    assert re.fullmatch("[0-9]{4}", text_of(outcome(found)[0]))


class Counts:
    """How often a vocabulary was read and a compiling process was begun, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_vocabularies = 0
        self.num_processes = 0
        self._monkeypatch = monkeypatch
        self._count(Vocabulary, "load", "num_vocabularies")
        self._count(CompileProcess, "_start", "num_processes")

    def _count(self, owner: type, name: str, count: str) -> None:
        call = getattr(owner, name)

        def counted(*args: Any) -> Any:
            setattr(self, count, getattr(self, count) + 1)
            return call(*args)

        self._monkeypatch.setattr(owner, name, counted)

    def both(self) -> tuple[int, int]:
        return self.num_vocabularies, self.num_processes


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


@pytest.mark.parametrize("is_prepared", [True, False])
def test_the_first_grammar_of_a_prepared_engine_begins_nothing_new(
    is_prepared: bool, counts: Counts, make_request: Callable[..., Request]
) -> None:
    config = EngineConfig(model="baton-5m", device="cpu", num_blocks=256)
    engine = load_engine(config, prepares_grammars=is_prepared)
    try:
        assert counts.num_vocabularies == is_prepared, "read before there are requests"
        assert "grammars" in dict(engine.model_info.seconds) or not is_prepared
        deadline = time.monotonic() + LIMIT_S
        while counts.num_processes < is_prepared:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert counts.both() == (is_prepared, is_prepared)
        ask(engine, "first", regex_spec("[ab]{3}"), make_request)
        (events,) = finish(engine).values()
        token_ids, _, error = outcome(events)
        assert error is None and re.fullmatch("[ab]{3}", TOKENIZER.decode(token_ids))
        assert counts.both() == (1, 1)
    finally:
        engine.close()


def test_a_model_that_no_grammar_fits_is_prepared_without_a_process(
    counts: Counts, make_request: Callable[..., Request]
) -> None:
    def refuses() -> GrammarTokenizer:
        raise refuse("not supported with the model's tokenizer")

    model = FakeModel(vocab_size=VOCAB_SIZE, context_window=512, eos_token_ids=(1,))
    process = CompileProcess(BUNDLED, VOCAB_SIZE)
    engine = LLMEngine(
        EngineConfig(num_blocks=256, device="cpu"),
        model,
        make_grammars=lambda: GrammarService(refuses, GrammarLimits(), process=process),
    )
    try:
        engine.prepare_grammars()
        ask(engine, "one", regex_spec("a"), make_request)
        (events,) = finish(engine).values()
        assert "not supported with the model's tokenizer" in str(outcome(events)[2])
        assert counts.num_processes == 0
    finally:
        engine.close()


def test_what_fails_while_it_is_prepared_is_told_to_who_asks_for_a_grammar(
    make_request: Callable[..., Request], caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> GrammarTokenizer:
        raise OSError("the disk is gone")

    engine = LLMEngine(
        EngineConfig(num_blocks=256, device="cpu"),
        FakeModel(vocab_size=VOCAB_SIZE, context_window=512, eos_token_ids=(1,)),
        make_grammars=lambda: GrammarService(
            fails, GrammarLimits(), process=CompileProcess(BUNDLED, VOCAB_SIZE)
        ),
    )
    try:
        engine.prepare_grammars()
        assert "the disk is gone" in caplog.text
        ask(engine, "one", regex_spec("a"), make_request)
        (events,) = finish(engine).values()
        assert "the disk is gone" in str(outcome(events)[2])
    finally:
        engine.close()


def test_an_engine_that_ends_while_it_is_prepared_leaves_no_process() -> None:
    process = CompileProcess(BUNDLED, VOCAB_SIZE)
    service = GrammarService(
        lambda: GrammarTokenizer.load(BUNDLED, VOCAB_SIZE),
        GrammarLimits(),
        process=process,
    )
    service.prepare()
    service.close()
    assert not process.is_alive
    service.check_integrity()
