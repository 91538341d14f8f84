"""Grammars in the engine: the bundled model's answers are in their language, jumps or not;
they go on from their ids alone, and a request that waits for its grammar lets others pass. A
FakeModel draws noise, so only the grammar gives its outputs any form."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine import engine as engine_module
from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from engine.errors import EmptySupport, InvalidRequest
from engine.grammar.compiler import CompileProcess
from engine.grammar.config import GrammarLimits
from engine.grammar.errors import GrammarFailed, GrammarTooCostly, refuse
from engine.grammar.mask_filler import MaskFiller
from engine.grammar.service import Compilation, GrammarService
from engine.grammar.state import CompiledGrammar
from engine.grammar.vocabulary import GrammarTokenizer, Vocabulary
from engine.models.interface import LoadedModel
from engine.outputs import RequestOutput
from engine.request import FinishReason, GrammarSpec, RequestState
from engine.testing.fake_model import FakeModel
from tests.harness.compile_process import SharedProcess
from tests.harness.engines import finish, make_request
from tests.harness.quantized_fake import QuantizedFake
from tests.harness.waiting import block_until
from tests.harness.workloads import Outcome, outcomes
from tests.unit.engine.grammar.driver import (
    BUNDLED,
    VOCAB_SIZE,
    check_output,
    choice_spec,
    ebnf_spec,
    random_regex,
    random_schema,
    regex_spec,
    schema_spec,
)
from tokens.tokenizer import Tokenizer

pytestmark = pytest.mark.timeout(300)

TOKENIZER = Tokenizer.load(BUNDLED)
HELLO = "<|user|>Hello<|end|><|assistant|>"
DATE = regex_spec(r"(19|20)[0-9]{2}-[01][0-9] is the date, [a-c]{2,5}")
Make = Callable[..., LLMEngine]


@pytest.fixture(scope="module")
def process() -> Iterator[SharedProcess]:
    made = SharedProcess(BUNDLED, VOCAB_SIZE)
    yield made
    made.end()


def _service(
    process: SharedProcess, vocabulary: Vocabulary | None = None, **limits: Any
) -> GrammarService:
    known = vocabulary or Vocabulary.load(BUNDLED, VOCAB_SIZE)
    return GrammarService(
        lambda: GrammarTokenizer.of(known, TOKENIZER), GrammarLimits(**limits), process=process
    )


@pytest.fixture(scope="module")
def service(process: SharedProcess) -> Iterator[GrammarService]:
    made = _service(process)
    yield made
    made.close()


@pytest.fixture(scope="module")
def bundled() -> LoadedModel:
    """The bundled model as `load_engine` loads it."""
    config = EngineConfig(model="baton-5m", device="cpu", num_blocks=256)
    return load_engine(config)._model


def _fake() -> FakeModel:
    return FakeModel(vocab_size=VOCAB_SIZE, context_window=512, eos_token_ids=(1,))


@pytest.fixture
def make(service: GrammarService) -> Iterator[Make]:
    """`make(model=None: a fake one, grammars=None: the module's, <config>)`."""
    made: list[LLMEngine] = []

    def new(
        model: LoadedModel | None = None, grammars: GrammarService | None = None, **config: Any
    ) -> LLMEngine:
        checked = EngineConfig(**({"num_blocks": 256, "device": "cpu"} | config))
        own = grammars or service
        made.append(LLMEngine(checked, model or _fake(), make_grammars=lambda: own))
        return made[-1]

    yield new
    for engine in made:
        engine.check_integrity()


def ask(
    engine: LLMEngine, name: str, spec: GrammarSpec | None, prompt: str = HELLO, **fields: Any
) -> None:
    fields = {"max_tokens": 160, "temperature": 1.0, "seed": 7} | fields
    engine.reserve(make_request(name, TOKENIZER.encode(prompt), grammar=spec, **fields))
    engine.start(name)


def answers(engine: LLMEngine) -> dict[str, dict[int, Outcome]]:
    """Of all requests, by sample."""
    return {name: outcomes(events) for name, events in finish(engine).items()}


def text_of(token_ids: tuple[int, ...]) -> str:
    return TOKENIZER.decode([token_id for token_id in token_ids if token_id != 1])


def is_date(outcome: Outcome) -> bool:
    return re.fullmatch(DATE.text, text_of(outcome[0])) is not None


# -- what comes out


@pytest.mark.parametrize("kv_scale", ["", "tensor", "block"])
def test_late_masks_change_no_token(
    make: Make, monkeypatch: pytest.MonkeyPatch, kv_scale: str
) -> None:
    """Also where a step has filled a block of a quantized cache with several tokens (a prompt, or
    forced ones), so that their unquantized values lie nowhere."""
    wait, num_waits = MaskFiller.wait, 0
    spec = schema_spec({"type": "array", "items": {"enum": ["a", "bc"]}})

    def told(*, are_late: bool) -> dict[str, dict[int, Outcome]]:
        def late(filler: MaskFiller, states: Any, timeout_s: float | None) -> set[int]:
            nonlocal num_waits
            found = wait(filler, states, None)
            num_waits += 1
            return set(range(len(states))) if are_late and num_waits % 2 and timeout_s else found

        monkeypatch.setattr(MaskFiller, "wait", late)
        model: LoadedModel = _fake()
        if kv_scale:
            model = QuantizedFake(kv_scale, context_window=512, block_size=4, vocab_size=VOCAB_SIZE)
        engine = make(model)
        ask(engine, "plain", None, max_tokens=200, temperature=0.0)
        for number in range(6):  # prompts that end at each place of a block
            prompt, greedy = "<|user|>" + "Hello" * number, {"temperature": 0.0, "num_samples": 2}
            ask(engine, f"r{number}", spec, prompt, max_tokens=24, **greedy)
        return answers(engine)

    assert told(are_late=True) == told(are_late=False)
    assert num_waits > 10


@pytest.mark.timeout(1200)  # all of the stated count, on few cores
@pytest.mark.parametrize("jump_forward", ["off", "tokens", "retokenize"])
def test_every_answer_of_the_bundled_model_parses(
    make: Make, bundled: LoadedModel, seed: int, scale: Callable[[int], int], jump_forward: str
) -> None:
    """Random schemas and patterns in one batch with a request without grammar, greedy and
    sampled, several samples of some."""
    rng = random.Random(f"{seed} bundled {jump_forward}")
    alone = make(bundled)
    ask(alone, "free", None, max_tokens=40)
    undisturbed = answers(alone)
    engine = make(  # the model is its own from here on
        bundled,
        jump_forward=jump_forward,
        max_num_running=16,
        max_num_tokens_per_step=64,
        num_blocks=1024,  # ten at once, some of them three samples each
    )
    num_ended = num_all = 0
    for _ in range(max(1, scale(20))):
        ask(engine, "free", None, max_tokens=40)
        cases: dict[str, Any] = {"free": None}
        for number in range(10):
            case = random_schema(rng) if number % 2 else random_regex(rng)
            cases[f"{number}"] = case
            sampling = {"temperature": rng.choice((0.0, 1.0)), "seed": rng.randrange(1 << 64)}
            spec = schema_spec(case) if number % 2 else regex_spec(case)
            num_samples = rng.choice((1, 1, 3))
            ask(engine, f"{number}", spec, num_samples=num_samples, **sampling)
        found = answers(engine)
        assert {"free": found.pop("free")} == undisturbed
        for name, samples in found.items():
            for token_ids, reason, _, error in samples.values():
                assert not error, (cases[name], error)
                num_all += 1
                if reason is FinishReason.LENGTH:
                    continue
                num_ended += 1
                assert reason in (FinishReason.GRAMMAR, FinishReason.EOS)
                text = text_of(token_ids)
                if isinstance(cases[name], str):
                    assert re.fullmatch(cases[name], text, re.ASCII), (cases[name], text)
                else:
                    check_output(cases[name], text)
    assert num_ended > num_all / 6, f"only {num_ended} of {num_all} end within their length"


def test_jumps_save_steps(make: Make) -> None:
    num_forwards, found = {}, {}
    for jump_forward in ("tokens", "retokenize", "off"):
        engine = make(jump_forward=jump_forward)
        for index in range(3):
            ask(engine, f"{index}", DATE, seed=index, num_samples=1 + index, ignore_eos=False)
        events = finish(engine)
        found[jump_forward] = {name: outcomes(own) for name, own in events.items()}
        assert all(is_date(one) for own in found[jump_forward].values() for one in own.values())
        is_jumped = any(len(event.token_ids) > 1 for own in events.values() for event in own)
        assert is_jumped == (jump_forward != "off")
        num_forwards[jump_forward] = engine._model.num_forwards
    assert found["tokens"] == found["off"]
    assert num_forwards["tokens"] < num_forwards["off"]


def test_a_jump_is_traced_and_counted_and_a_grammar_named_in_its_own_traces_only(
    make: Make,
) -> None:
    engine = make()
    ask(engine, "a", DATE, trace=True)
    ask(engine, "b", None, max_tokens=40, trace=True)
    traces = {}
    for name, events in finish(engine).items():
        for event in events:
            assert [one.token_id for one in event.traces or ()] == list(event.token_ids)
        traces[name] = [one for event in events for one in event.traces or ()]
        first = len(TOKENIZER.encode(HELLO))
        assert [one.position - first for one in traces[name]] == list(range(len(traces[name])))
    assert {one.is_forced for one in traces["a"]} == {False, True}
    assert engine.stats().num_output_tokens == sum(map(len, traces.values()))
    drawn = {
        name: {one.processors for one in own if not one.is_forced} for name, own in traces.items()
    }
    assert all(names[0] == "grammar" for names in drawn["a"])
    assert not any("grammar" in names for names in drawn["b"])


def test_min_tokens_and_ends(make: Make, bundled: LoadedModel) -> None:
    """Below min_tokens no end is drawn while the text may go on; a text that may not go on ends all
    the same."""
    engine = make(bundled)
    stop = TOKENIZER.encode(".", add_special_tokens=False)[0]
    stops = {"stop_token_ids": frozenset({stop})}
    ask(engine, "short", choice_spec("yes"), min_tokens=30)
    ask(engine, "long", regex_spec("[a-z ]*"), min_tokens=12, max_tokens=40)
    ask(engine, "no eos", regex_spec("[0-9]{3}"), ignore_eos=True)
    ask(engine, "stop", regex_spec("[a-z]{2,}x"), max_tokens=150, **stops)
    found = {name: samples[0] for name, samples in answers(engine).items()}
    assert text_of(found["short"][0]) == "yes"
    assert found["short"][1] is found["no eos"][1] is FinishReason.GRAMMAR
    assert len(found["long"][0]) >= 12
    assert re.fullmatch("[0-9]{3}", text_of(found["no eos"][0]))
    token_ids, reason, _, error = found["stop"]
    assert not error
    if reason is not FinishReason.LENGTH:
        # The stop token may come where the text is complete, and is no part of the text.
        text = text_of(tuple(token_id for token_id in token_ids if token_id != stop))
        assert re.fullmatch("[a-z]{2,}x", text)


def test_the_prefix_cache_is_shared_across_grammars(make: Make) -> None:
    """A grammar changes what is drawn, not what is computed."""
    engine = make()
    prompt = "<|user|>" + "the cat sat on the mat " * 12
    ask(engine, "first", choice_spec("yes", "no"), prompt)
    finish(engine)
    before = engine.stats().num_local_prefix_tokens
    ask(engine, "second", regex_spec("[0-9]{4}"), prompt)
    assert re.fullmatch("[0-9]{4}", text_of(answers(engine)["second"][0][0]))
    assert engine.stats().num_local_prefix_tokens - before >= 16


# -- on its way


def test_a_request_goes_on_from_any_of_its_events(
    make: Make, bundled: LoadedModel, seed: int
) -> None:
    """Another engine that gets the tokens of the first events draws the same rest, jumps
    included."""
    rng = random.Random(f"{seed} resume")
    for number in range(3):
        properties = {"kind": {"enum": ["cat", "dog"]}, "inner": random_schema(rng, 2)}
        schema = {"type": "object", "properties": properties, "required": ["kind", "inner"]}
        request = make_request(
            f"r{number}", TOKENIZER.encode(HELLO), max_tokens=60, temperature=1.0, seed=7,
            grammar=schema_spec(schema),
        )  # fmt: skip
        engine = make(bundled)
        engine.submit(request)
        events = [event for event in finish(engine)[request.request_id] if event.token_ids]
        whole = outcomes(events)[0]
        cut = rng.randrange(1, max(2, len(events) - 1))
        before = outcomes(events[:cut])[0][0]
        if before != whole[0]:
            other = make(bundled, max_num_tokens_per_step=8, max_num_running=4)
            other.reserve(request)
            other.start(request.request_id, outputs=[before])
            rest = answers(other)[request.request_id][0]
            assert (before + rest[0], *rest[1:]) == whole


@pytest.mark.parametrize("num_drawn", [1, 3, 6])
@pytest.mark.parametrize("num_samples", [1, 2])
def test_a_constrained_request_is_resumed_from_its_ids(
    num_drawn: int, num_samples: int, make: Make
) -> None:
    request = make_request(
        "a", range(7, 13), max_tokens=60, grammar=DATE, temperature=1.5, seed=5,
        num_samples=num_samples, ignore_eos=False,
    )  # fmt: skip
    engine = make(jump_forward="off")
    engine.submit(request)
    whole = {i: one[0] for i, one in answers(engine)["a"].items()}
    other = make(jump_forward="off")
    other.reserve(request)
    other.start("a", outputs=[whole[i][:num_drawn] for i in range(num_samples)])
    rest = answers(other)["a"]
    assert {i: whole[i][:num_drawn] + rest[i][0] for i in rest} == whole


def test_a_preempted_request_keeps_its_place_in_the_grammar(make: Make) -> None:
    results = []
    for preemption in ("never", "recompute", "swap"):
        engine = make(preemption=preemption)
        ask(engine, "a", DATE, temperature=1.5, seed=6, ignore_eos=False)
        events: list[RequestOutput] = []
        while engine.has_work():
            events += engine.step().events
            if preemption != "never" and "a" in engine._groups and len(events) % 2:
                if engine._groups["a"].state in (RequestState.PREFILLING, RequestState.RUNNING):
                    engine.preempt("a")
        results.append(outcomes(events))
    assert results[0] == results[1] == results[2]


def test_others_pass_a_request_that_waits_for_its_grammar_and_it_may_leave(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an abort, or to wait elsewhere."""
    engine = make(policy="fcfs")
    names = ("slow", "aborted", "moved")
    with monkeypatch.context() as patch:
        patch.setattr(engine._constraints, "is_ready", lambda group: False)  # it takes its time
        for name in names:
            ask(engine, name, DATE, ignore_eos=False)
            assert engine._groups[name].state is RequestState.WAITING_FOR_GRAMMAR
        ask(engine, "quick", None, max_tokens=3)
        over: list[str] = []
        while not over:
            over += [e.request_id for e in engine.step().events if e.is_request_over]
        assert over == ["quick"] and engine.has_work()
        assert engine.step().events == ()
        engine.abort("aborted")
        held = engine.detach("moved")
    assert (held.token_ids, held.num_computed_tokens) == (tuple(TOKENIZER.encode(HELLO)), 0)
    found = answers(engine)
    assert list(found) == ["slow"] and is_date(found["slow"][0])
    engine.release("moved")
    assert engine.stats().num_referenced_blocks == 0


def test_a_model_that_fails_while_masks_are_filled_can_be_asked_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, calm = make(), make()
    for each in (engine, calm):
        ask(each, "a", DATE)

    def fail(batch: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "forward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            while True:
                engine.step()
    assert answers(engine) == answers(calm)


# -- errors


@pytest.mark.parametrize(
    "spec", [regex_spec("(unclosed"), schema_spec("{no json"), ebnf_spec('nothing ::= "a"')]
)
def test_a_wrong_grammar_is_an_error_of_each_request_by_name(spec: GrammarSpec, make: Make) -> None:
    engine = make()
    for name in "ab":
        ask(engine, name, spec)
    a, b = (events[-1].error for events in finish(engine).values())
    assert isinstance(a, InvalidRequest) and isinstance(b, InvalidRequest) and a is not b
    assert a.field == "grammar" and str(a) == str(b)
    assert engine.stats().num_waiting == 0


def test_a_failure_of_the_library_ends_its_own_request_alone(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("odd")

    engine = make()
    ask(engine, "b", None, max_tokens=8)
    with monkeypatch.context() as patch:
        patch.setattr(CompiledGrammar, "state", fail)
        ask(engine, "a", DATE)
        events = finish(engine)
    (event,) = events["a"]
    assert isinstance(event.error, GrammarFailed) and event.is_request_over
    assert "the grammar library failed: RuntimeError('odd')" in str(event.error)
    assert len(outcomes(events["b"])[0][0]) == 8
    # Nor does one in the middle of an output.
    ask(engine, "a", DATE)
    ask(engine, "b", None, max_tokens=8)
    while "a" not in engine._groups or not engine._groups["a"].prompt.output_token_ids:
        engine.step()
    monkeypatch.setattr(engine._groups["a"].prompt.grammar, "_matcher", None)
    events = finish(engine)
    assert isinstance(events["a"][-1].error, GrammarFailed) and events["a"][-1].is_request_over
    assert outcomes(events["b"])[0][3] == ""


@pytest.mark.parametrize("num_samples", [1, 2])
def test_outputs_that_are_not_in_the_grammar_end_the_request_alone(
    num_samples: int, make: Make
) -> None:
    engine = make()
    engine.reserve(make_request("a", [7, 8], num_samples=num_samples, grammar=DATE))
    engine.start("a", outputs=[(1500,)] * num_samples)
    ask(engine, "b", None, max_tokens=8)
    events = finish(engine)
    assert events["a"][-1].error is not None and events["a"][-1].is_request_over
    assert len(outcomes(events["b"])[0][0]) == 8


def test_a_bomb_hurts_only_its_sender(make: Make, process: SharedProcess) -> None:
    """One costs too much to compile, one while it is followed; those beside them answer as if they
    were alone."""

    def ask_others(engine: LLMEngine) -> None:
        ask(engine, "free", None, max_tokens=60)
        ask(engine, "bound", regex_spec("[ab]{60,}"), max_tokens=50)

    alone = make()
    ask_others(alone)
    engine = make(grammars=_service(process, max_num_token_fuel=50))
    ask(engine, "compile", regex_spec("(((a{99}){99}){99}){99}"), max_tokens=200)
    ask(engine, "run", regex_spec("x([ab]{0,60}[bc]{0,60}){0,40}d"), max_tokens=200)
    ask_others(engine)
    found = finish(engine)
    for name in ("compile", "run"):
        assert isinstance(found.pop(name)[-1].error, GrammarTooCostly)
    assert {name: outcomes(events) for name, events in found.items()} == answers(alone)
    engine.close()


def test_a_dead_end_is_an_error_of_its_own(make: Make, process: SharedProcess) -> None:
    """The vocabulary can begin the text and cannot end it: an error when it is met, no hang. (The
    compiling process knows the whole vocabulary, so it does not see it before.)"""
    whole = Vocabulary.load(BUNDLED, VOCAB_SIZE)
    without = Vocabulary(tuple(b"" if b"q" in data else data for data in whole.token_bytes))
    engine = make(grammars=_service(process, without))
    ask(engine, "dead", regex_spec("[ab]{3}q"))
    ask(engine, "well", regex_spec("[ab]{3}c"))
    found = finish(engine)
    assert isinstance(found["dead"][-1].error, EmptySupport)
    assert re.fullmatch("[ab]{3}c", text_of(outcomes(found["well"])[0][0]))
    engine.close()


def test_an_engine_without_a_tokenizer_refuses_grammars_by_name() -> None:
    with pytest.raises(InvalidRequest, match="tokenizer"):
        ask(LLMEngine(EngineConfig(num_blocks=256), _fake()), "a", DATE)


# -- who makes it, and when


def test_a_grammar_takes_its_tenants_turn(
    make: Make, service: GrammarService, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders: list[bytes] = []
    submit = service.submit

    def noted(spec: GrammarSpec, sender: bytes = b"") -> Compilation:
        senders.append(sender)
        return submit(spec, sender)

    monkeypatch.setattr(service, "submit", noted)
    engine = make()
    ask(engine, "a", DATE, root=b"t" * 32)
    assert senders == [b"t" * 32]
    finish(engine)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Each vocabulary ("load") and compiling process ("_start") that was begun, and its thread."""
    told: list[tuple[str, int]] = []

    def note(owner: type, name: str) -> None:
        call = getattr(owner, name)

        def noted(*args: Any) -> Any:
            told.append((name, threading.get_ident()))
            return call(*args)

        monkeypatch.setattr(owner, name, noted)

    note(Vocabulary, "load")
    note(CompileProcess, "_start")
    return told


@pytest.mark.parametrize("is_prepared", [True, False])
def test_the_first_grammar_of_a_prepared_engine_begins_nothing_new(
    is_prepared: bool, begun: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the engine's thread read a file for it, where it is not prepared."""
    config = EngineConfig(model="baton-5m", device="cpu", num_blocks=256)
    engine = load_engine(config, prepares_grammars=is_prepared)
    monkeypatch.setattr(engine_module, "resolve", lambda *_, **__: pytest.fail("resolved again"))
    try:
        assert [name for name, _ in begun].count("load") == is_prepared
        assert "grammars" in dict(engine.model_info.seconds) or not is_prepared
        if is_prepared:
            block_until(lambda: len(begun) == 2)
        ask(engine, "first", regex_spec("[ab]{3}"))
        token_ids, _, _, error = answers(engine)["first"][0]
        assert not error and re.fullmatch("[ab]{3}", text_of(token_ids))
        assert sorted(name for name, _ in begun) == ["_start", "load"]
        here = threading.get_ident()
        assert is_prepared or here not in [thread for name, thread in begun if name == "load"]
    finally:
        engine.close()


@pytest.mark.parametrize(
    "failure", [refuse("not supported with the model's tokenizer"), OSError("the disk is gone")]
)
def test_what_fails_while_it_is_prepared_is_told_to_who_asks_for_a_grammar(
    failure: Exception,
    begun: list[tuple[str, int]],
    make: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails() -> GrammarTokenizer:
        raise failure

    process = CompileProcess(BUNDLED, VOCAB_SIZE)
    engine = make(grammars=GrammarService(fails, GrammarLimits(), process=process))
    try:
        engine.prepare_grammars()
        assert isinstance(failure, InvalidRequest) or str(failure) in caplog.text
        ask(engine, "one", regex_spec("a"))
        assert str(failure) in answers(engine)["one"][0][3]
        assert isinstance(failure, OSError) or not begun
    finally:
        engine.close()


def test_an_engine_that_ends_while_it_is_prepared_leaves_no_process() -> None:
    process = CompileProcess(BUNDLED, VOCAB_SIZE)
    service = GrammarService(
        lambda: GrammarTokenizer.load(BUNDLED, VOCAB_SIZE), GrammarLimits(), process=process
    )
    service.prepare()
    service.close()
    assert not process.is_alive
    service.check_integrity()
