"""Grammars in the engine: who waits for one lets others pass, what comes out is in the language,
with jumps and without, and can be resumed from its ids alone. A FakeModel behind the bundled
model's tokenizer: it draws noise, so only the grammar gives its outputs any form."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints.resolve import resolve
from engine import engine as engine_module
from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from engine.errors import InvalidRequest
from engine.grammar.config import GrammarLimits
from engine.grammar.errors import GrammarFailed
from engine.grammar.service import Compilation, GrammarService
from engine.grammar.state import CompiledGrammar
from engine.grammar.vocabulary import Vocabulary
from engine.outputs import RequestOutput
from engine.request import FinishReason, GrammarKind, GrammarSpec, Request, RequestState
from engine.testing.fake_model import FakeModel
from tests.harness.workloads import outcomes
from tokens.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_compile_process")

FOLDER = resolve("baton-5m", files="tokenizer").path
TOKENIZER = Tokenizer.load(FOLDER)
VOCAB = 4096
Make = Callable[..., Any]
DATE = GrammarSpec(GrammarKind.REGEX, r"(19|20)[0-9]{2}-[01][0-9] is the date, [a-c]{2,5}")
PROMPT = (7, 8, 9, 10, 11, 12)
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def service() -> Iterator[GrammarService]:
    made = GrammarService.from_checkpoint(FOLDER, VOCAB, GrammarLimits())
    yield made
    made.close()


@pytest.fixture
def make(service: GrammarService) -> Iterator[Make]:
    made: list[LLMEngine] = []

    def new(**config: Any) -> LLMEngine:
        config = {"num_blocks": 64, "max_num_tokens_per_step": 16, "max_num_running": 8} | config
        model = FakeModel(vocab_size=VOCAB, context_window=128, eos_token_ids=(0,))
        engine = LLMEngine(EngineConfig(**config), model, make_grammars=lambda: service)
        made.append(engine)
        return engine

    yield new
    for engine in made:
        engine.check_integrity()


def _finish(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    deadline = time.monotonic() + LIMIT_S
    events: dict[str, list[RequestOutput]] = {}
    while engine.has_work():
        assert time.monotonic() < deadline
        for event in engine.step().events:
            events.setdefault(event.request_id, []).append(event)
        engine.check_integrity()
    return events


def _text(token_ids: tuple[int, ...]) -> str:
    return TOKENIZER.decode([token_id for token_id in token_ids if token_id != 0])


def _ask(make_request: Make, name: str, spec: GrammarSpec, **fields: Any) -> Request:
    fields = {"max_tokens": 60, "ignore_eos": False, "grammar": spec} | fields
    request: Request = make_request(name, PROMPT, **fields)
    return request


@pytest.mark.parametrize("jump_forward", ["tokens", "retokenize", "off"])
def test_outputs_are_in_the_language(
    jump_forward: str, make: Make, make_request: Make, seed: int, scale: Callable[[int], int]
) -> None:
    engine = make(jump_forward=jump_forward)
    for index in range(scale(100)):
        request = _ask(make_request, f"{index}", DATE, temperature=2.0, seed=seed + index)
        engine.reserve(dataclasses.replace(request, num_samples=1 + index % 3))
        engine.start(request.request_id)
        events = _finish(engine)[request.request_id]
        for token_ids, reason, _, error in outcomes(events).values():
            assert not error and re.fullmatch(DATE.text, _text(token_ids)), _text(token_ids)
            assert reason in (FinishReason.GRAMMAR, FinishReason.EOS)
        assert any(len(event.token_ids) > 1 for event in events) == (jump_forward != "off")


def test_jumps_save_steps(make: Make, make_request: Make) -> None:
    steps = {}
    for jumps in ("tokens", "off"):
        engine = make(jump_forward=jumps)
        engine.submit(_ask(make_request, "a", DATE))
        _finish(engine)
        steps[jumps] = engine._model.num_forwards
    assert steps["tokens"] < steps["off"]


def test_a_jump_is_traced_and_counted(make: Make, make_request: Make) -> None:
    engine = make()
    engine.submit(_ask(make_request, "a", DATE, trace=True))
    events = _finish(engine)["a"]
    for event in events:
        assert [one.token_id for one in event.traces or ()] == list(event.token_ids)
    traces = [one for event in events for one in event.traces or ()]
    assert [one.position for one in traces] == [len(PROMPT) + i for i in range(len(traces))]
    assert any(one.is_forced for one in traces) and not all(one.is_forced for one in traces)
    assert engine.stats().num_output_tokens == len(traces)


def test_a_grammar_is_named_in_its_own_traces_only(make: Make, make_request: Make) -> None:
    engine = make()
    engine.submit(_ask(make_request, "a", DATE, trace=True))
    engine.submit(make_request("b", PROMPT, max_tokens=40, trace=True))
    events = _finish(engine)
    for name, expected in (("a", ("grammar",)), ("b", ())):
        traces = [one for event in events[name] for one in event.traces or ()]
        drawn = [one.processors for one in traces if not one.is_forced]
        assert drawn and set(drawn) == {expected}


def test_others_pass_a_request_that_waits_for_its_grammar(
    make: Make, make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(policy="fcfs")
    spec = GrammarSpec(GrammarKind.REGEX, "waiting [a-z]{3} " + "(x|y)" * 20)
    engine.submit(_ask(make_request, "slow", spec))
    assert engine._groups["slow"].state is RequestState.WAITING_FOR_GRAMMAR
    engine.submit(make_request("quick", PROMPT, max_tokens=3))
    over: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(engine._constraints, "is_ready", lambda group: False)  # it takes its time
        while not over:
            over += [e.request_id for e in engine.step().events if e.is_request_over]
        assert over == ["quick"] and engine.has_work()
        assert engine.step().events == ()
    events = _finish(engine)
    assert re.fullmatch(spec.text, _text(outcomes(events["slow"])[0][0]))


def test_a_request_that_waits_can_be_aborted(make: Make, make_request: Make) -> None:
    engine = make()
    spec = GrammarSpec(GrammarKind.CHOICE, choices=("never", "mind"))
    engine.reserve(_ask(make_request, "a", spec))
    engine.start("a")
    engine.abort("a")
    assert not engine.has_work() and engine.stats().num_referenced_blocks == 0


def test_a_request_that_waits_can_be_taken_out_to_wait_elsewhere(
    make: Make, make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    spec = GrammarSpec(GrammarKind.CHOICE, choices=("later", "elsewhere"))
    engine.reserve(_ask(make_request, "a", spec))
    with monkeypatch.context() as patch:
        patch.setattr(engine._constraints, "is_ready", lambda group: False)  # it takes its time
        engine.start("a")
        engine.step()
        assert engine._groups["a"].state is RequestState.WAITING_FOR_GRAMMAR
        held = engine.detach("a")
    assert (held.token_ids, held.num_computed_tokens) == (PROMPT, 0)
    assert not engine.has_work() and engine.step().events == ()  # ready now, and nobody waits
    engine.release("a")


@pytest.mark.parametrize(
    "spec",
    [GrammarSpec(GrammarKind.REGEX, "(unclosed"), GrammarSpec(GrammarKind.JSON_SCHEMA, "{no json")],
)
def test_a_wrong_grammar_is_refused_by_name(
    spec: GrammarSpec, make: Make, make_request: Make
) -> None:
    engine = make()
    engine.submit(_ask(make_request, "a", spec))
    (event,) = _finish(engine)["a"]
    assert isinstance(event.error, InvalidRequest) and event.error.field == "grammar"
    assert event.is_request_over and engine.stats().num_waiting == 0


def test_a_failure_of_the_library_ends_its_own_request_alone(
    make: Make, make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("odd")

    engine = make()
    engine.submit(make_request("b", PROMPT))
    with monkeypatch.context() as patch:
        patch.setattr(CompiledGrammar, "state", fail)
        engine.submit(_ask(make_request, "a", DATE))
        events = _finish(engine)
    (event,) = events["a"]
    assert isinstance(event.error, GrammarFailed) and event.is_request_over
    assert len(outcomes(events["b"])[0][0]) == 8
    # Nor does one in the middle of an output.
    engine.submit(_ask(make_request, "a", DATE))
    engine.submit(make_request("b", PROMPT))
    while "a" not in engine._groups or not engine._groups["a"].prompt.output_token_ids:
        engine.step()
    state = engine._groups["a"].prompt.grammar
    monkeypatch.setattr(state, "_matcher", None)
    events = _finish(engine)
    assert isinstance(events["a"][-1].error, GrammarFailed) and events["a"][-1].is_request_over
    assert outcomes(events["b"])[0][3] == ""


def test_a_grammar_takes_its_tenants_turn(
    make: Make, make_request: Make, service: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders: list[bytes] = []
    submit = service.submit

    def noted(spec: GrammarSpec, sender: bytes = b"") -> Compilation:
        senders.append(sender)
        return submit(spec, sender)

    monkeypatch.setattr(service, "submit", noted)
    engine = make()
    request = _ask(make_request, "a", DATE)
    engine.submit(dataclasses.replace(request, cache_root=b"t" * 32))
    assert senders == [b"t" * 32]
    _finish(engine)


def test_the_engines_thread_reads_no_file_for_the_first_grammar(
    make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(EngineConfig(model="baton-5m", device="cpu", num_blocks=128))
    loads: list[int] = []
    load = Vocabulary.load

    def noted(folder: Path, vocab_size: int) -> Vocabulary:
        loads.append(threading.get_ident())
        return load(folder, vocab_size)

    monkeypatch.setattr(engine_module, "resolve", lambda *_, **__: pytest.fail("resolved again"))
    monkeypatch.setattr(Vocabulary, "load", noted)
    spec = GrammarSpec(GrammarKind.CHOICE, choices=("yes", "no"))
    engine.submit(_ask(make_request, "a", spec))
    events = _finish(engine)["a"]
    engine.close()
    assert _text(outcomes(events)[0][0]).removesuffix("<|end|>") in spec.choices
    assert len(loads) == 1 and loads[0] != threading.get_ident()


def test_an_engine_without_a_tokenizer_refuses_grammars_by_name(
    make_engine: Make, make_request: Make
) -> None:
    with pytest.raises(InvalidRequest, match="tokenizer"):
        make_engine().reserve(_ask(make_request, "a", DATE))


@pytest.mark.parametrize("num_drawn", [1, 3, 6])
@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_constrained_request_is_resumed_from_its_ids(
    num_drawn: int, num_samples: int, make: Make, make_request: Make
) -> None:
    request = _ask(make_request, "a", DATE, temperature=1.5, seed=5)
    request = dataclasses.replace(request, num_samples=num_samples)
    engine = make(jump_forward="off")
    engine.submit(request)
    whole = {i: one[0] for i, one in outcomes(_finish(engine)["a"]).items()}
    other = make(jump_forward="off")
    other.reserve(request)
    other.start("a", outputs=[whole[i][:num_drawn] for i in range(num_samples)])
    rest = outcomes(_finish(other)["a"])
    for index in range(num_samples):
        assert whole[index][:num_drawn] + rest[index][0] == whole[index]


@pytest.mark.parametrize("num_samples", [1, 2])
def test_outputs_that_are_not_in_the_grammar_end_the_request_alone(
    num_samples: int, make: Make, make_request: Make
) -> None:
    engine = make()
    request = dataclasses.replace(_ask(make_request, "a", DATE), num_samples=num_samples)
    engine.reserve(request)
    engine.start("a", outputs=[(1500,)] * num_samples)
    engine.submit(make_request("b", PROMPT))
    events = _finish(engine)
    assert events["a"][-1].error is not None and events["a"][-1].is_request_over
    assert len(outcomes(events["b"])[0][0]) == 8


def test_requests_with_one_bad_grammar_get_an_error_each(make: Make, make_request: Make) -> None:
    engine = make()
    spec = GrammarSpec(GrammarKind.EBNF, 'nothing ::= "a"')
    for name in "ab":
        engine.submit(_ask(make_request, name, spec))
    events = _finish(engine)
    a, b = (events[name][-1].error for name in "ab")
    assert isinstance(a, InvalidRequest) and str(a) == str(b) and a is not b


def test_a_preempted_request_keeps_its_place_in_the_grammar(make: Make, make_request: Make) -> None:
    request = _ask(make_request, "a", DATE, temperature=1.5, seed=6)
    results = []
    for preemption in ("never", "recompute", "swap"):
        engine = make(preemption=preemption)
        engine.submit(request)
        events: list[RequestOutput] = []
        while engine.has_work():
            events += engine.step().events
            if preemption != "never" and "a" in engine._groups and len(events) % 2:
                if engine._groups["a"].state in (RequestState.PREFILLING, RequestState.RUNNING):
                    engine.preempt("a")
        results.append(outcomes(events))
    assert results[0] == results[1] == results[2]


def test_a_model_that_fails_while_masks_are_filled_can_be_asked_again(
    make: Make, make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calm = make(), make()
    request = _ask(make_request, "a", DATE)
    for each in (engine, calm):
        each.submit(request)

    def fail(batch: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            while True:
                engine.step()
    assert outcomes(_finish(engine)["a"]) == outcomes(_finish(calm)["a"])
