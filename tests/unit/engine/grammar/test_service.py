"""The service: the compiling process, its limits, the cache and the counts."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.errors import InvalidRequest
from engine.grammar import compiler
from engine.grammar.compile_server import _compile
from engine.grammar.compiler import CompileProcess, Compiler
from engine.grammar.config import GrammarLimits
from engine.grammar.errors import GrammarBusy, GrammarFailed, GrammarTooCostly
from engine.grammar.service import Compilation, GrammarService
from engine.grammar.state import CompiledGrammar
from engine.grammar.vocabulary import GrammarTokenizer, Vocabulary
from engine.request import GrammarSpec
from tests.harness.compile_process import SharedProcess
from tests.unit.engine.grammar.driver import (
    BUNDLED,
    END,
    VOCAB_SIZE,
    Grammars,
    choice_spec,
    ebnf_spec,
    random_regex,
    random_schema,
    regex_spec,
    schema_spec,
)
from tokens.tokenizer import Tokenizer

WAIT_S = 100.0
MakeService = Callable[..., GrammarService]


@pytest.fixture(scope="module")
def process() -> Iterator[SharedProcess]:
    made = SharedProcess(BUNDLED, VOCAB_SIZE)
    yield made
    made.end()


@pytest.fixture
def make_service(
    process: SharedProcess, grammars: Grammars
) -> Iterator[Callable[..., GrammarService]]:
    """`make_service(<limits>)`; checked and closed after the test."""
    made: list[GrammarService] = []

    def make(**limits: float) -> GrammarService:
        checked = GrammarLimits(**limits)  # type: ignore[arg-type]
        made.append(GrammarService(lambda: grammars.tokenizer, checked, process=process))
        return made[-1]

    yield make
    for service in made:
        service.close()
        service.check_integrity()


@pytest.fixture
def service(make_service: MakeService) -> GrammarService:
    return make_service()


def compiled(service: GrammarService, spec: GrammarSpec) -> Compilation:
    compilation = service.submit(spec)
    assert compilation.wait(WAIT_S)
    service.check_integrity()
    return compilation


def from_checkpoint(**limits: Any) -> GrammarService:
    return GrammarService.from_checkpoint(BUNDLED, VOCAB_SIZE, GrammarLimits(**limits))


def test_each_kind_compiles_to_what_it_compiles_to_here(
    service: GrammarService, grammars: Grammars, seed: int
) -> None:
    """Compiled by way of the process, masks are those of a grammar compiled in this one."""
    rng = random.Random(f"{seed} service")
    specs = [
        choice_spec("yes", "no"),
        ebnf_spec('root ::= "(" root ")" | "x"'),
        regex_spec(random_regex(rng)),
        schema_spec(random_schema(rng)),
    ]
    for spec in specs:
        theirs = compiled(service, spec).state(frozenset({END}))
        ours = grammars.state(spec)
        for _ in range(10):
            assert np.array_equal(theirs.mask(), ours.mask())
            allowed = grammars.allowed(theirs)
            if not allowed or allowed == [END]:
                break
            token_id = rng.choice(allowed)
            assert theirs.accept(token_id) and ours.accept(token_id)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (ebnf_spec("root ::= foo"), "Rule 'foo' not found"),
        (ebnf_spec("start: foo"), "foo"),
        (ebnf_spec('start ::= "a"'), "root"),
        (ebnf_spec('root ::= ("a"'), "Expected ')'"),
        (ebnf_spec('x: "a"\nstart: <[3]>'), "line 2: a special token"),
        (regex_spec("(unclosed"), "unclosed group"),
        (regex_spec("x[^\\s\\S]"), "no text of this model's tokens satisfies it"),
        (
            schema_spec({"type": "object", "properties": {"a": False}, "required": ["a"]}),
            "schema at $.properties",
        ),
    ],
)
def test_a_grammar_that_cannot_be_satisfied_or_read_is_an_error(
    service: GrammarService, spec: GrammarSpec, problem: str
) -> None:
    compilation = compiled(service, spec)
    assert isinstance(compilation.error, InvalidRequest)
    assert not isinstance(compilation.error, GrammarTooCostly)
    assert problem in str(compilation.error)
    with pytest.raises(InvalidRequest, match=r"^grammar: "):
        compilation.state(frozenset({END}))


def test_each_caller_gets_an_error_of_its_own(service: GrammarService) -> None:
    # A raised error holds the frames, and so the prompts, of those it was raised for.
    compilation = compiled(service, ebnf_spec('start ::= "a"'))
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            compilation.state(frozenset())
        assert caught.value is not compilation.error
    a, b = compilation.error, compilation.error
    assert a is not None and b is not None and a is not b
    assert (type(a), str(a), a.field) == (type(b), str(b), "grammar")  # type: ignore[attr-defined]
    assert a.__traceback__ is None and b.__traceback__ is None


def test_a_character_that_no_token_spells_is_an_error(
    vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    """As the child answers with a vocabulary in which no token has a "q"."""
    without = Vocabulary(tuple(b"" if b"q" in data else data for data in vocabulary.token_bytes))
    odd = GrammarTokenizer.of(without, tokenizer)
    answers = [_compile(odd, regex_spec(text), GrammarLimits()) for text in ("q+", "[a-p]q*")]
    assert [answer["ok"] for answer in answers] == [False, True]
    assert "no text of this model's tokens" in answers[0]["problem"]


def test_bombs_end_by_their_own_limits_while_others_go_on(
    make_service: MakeService, process: SharedProcess
) -> None:
    """As many bombs as may compile at one time, asked for before the others."""
    service = make_service(compile_timeout_s=2.0)
    warm = compiled(service, choice_spec("warm"))
    num_starts = process.num_starts
    bombs = [service.submit(regex_spec(f"{first}{BOMB}")) for first in "ab"]
    others = [service.submit(regex_spec(f"[a-c]{{{n}}}")) for n in range(1, 4)]
    assert all(one.wait(WAIT_S) for one in (*bombs, *others))
    assert all(isinstance(one.error, GrammarTooCostly) for one in bombs)
    assert "compiling it takes more than 2 s" in str(bombs[0].error)
    assert [one.error for one in (warm, *others)] == [None] * 4
    # Its failure is kept: the same bomb costs nothing again.
    assert service.submit(bombs[0].spec) is bombs[0]
    assert process.num_starts == num_starts, "the process itself lives on"


BOMB = "(((a{9,}){9,}){9,}){9,}"


def test_a_bomb_of_memory_ends_by_its_own_limit(make_service: MakeService) -> None:
    error = compiled(make_service(compile_bytes=1), regex_spec(BOMB)).error
    assert isinstance(error, GrammarTooCostly)
    assert "memory" in str(error)


def test_what_no_request_waits_for_is_ended(
    make_service: MakeService, process: SharedProcess
) -> None:
    service = make_service(max_num_compiling=1)
    assert compiled(service, choice_spec("warm")).error is None
    running = service.submit(regex_spec(f"c{BOMB}"))
    again = service.submit(regex_spec(f"c{BOMB}"))
    assert again is running
    queued = service.submit(regex_spec(f"d{BOMB}"))
    service.release(running)
    assert not running.is_done, "another request waits for it"
    service.release(queued)
    assert queued.is_done and isinstance(queued.error, GrammarFailed)
    while running.stream is None and not running.is_done:  # ends: the test has a time limit
        os.sched_yield()
    service.release(running)
    assert running.wait(WAIT_S)
    service.check_integrity()
    # Another request for the same begins anew, and the process is well.
    assert service.submit(regex_spec(f"c{BOMB}")) is not running
    assert compiled(service, choice_spec("after")).error is None
    assert process.is_alive


def test_a_process_that_was_killed_is_started_anew(
    service: GrammarService, process: SharedProcess
) -> None:
    """Its group is killed before it is reaped: until then its id is nobody else's."""
    assert compiled(service, choice_spec("a")).error is None
    num_starts, leader = process.num_starts, process._process
    assert leader is not None and leader.pid == process.process_id
    os.kill(leader.pid, signal.SIGKILL)
    while process.is_alive:  # ends: the test has a time limit
        os.sched_yield()
    assert leader.returncode is None, "not reaped by looking"
    assert compiled(service, choice_spec("b")).error is None
    assert process.num_starts == num_starts + 1
    assert leader.returncode == -signal.SIGKILL


class Held:
    """Compilers that wait until they are let go, then succeed, fail or break."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.let_go = threading.Event()
        self.is_in = threading.Event()
        self.failure: Exception | None = None
        self.order: list[str] = []
        monkeypatch.setattr(Compiler, "compile", self._compile)

    def _compile(self, spec: GrammarSpec, _: Any) -> tuple[CompiledGrammar, int]:
        self.order.append(spec.choices[0])
        self.is_in.set()
        assert self.let_go.wait(30)
        if self.failure is not None:
            raise self.failure
        matcher: Any = None
        tokenizer: Any = None
        return CompiledGrammar(matcher, tokenizer, GrammarLimits()), 1000


def test_one_spec_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    service = from_checkpoint()
    both = [service.submit(choice_spec("a")) for _ in range(2)]
    assert both[0] is both[1]
    assert not both[0].is_done
    with pytest.raises(GrammarFailed, match="before the grammar was compiled"):
        both[0].state(frozenset())
    service.check_integrity()
    held.let_go.set()
    assert both[0].wait(30)
    service.close()
    stats = service.stats()
    counts = stats.num_submitted, stats.num_hits, stats.num_misses, stats.num_compiled
    assert counts == (2, 1, 1, 1)


@pytest.mark.parametrize("is_broken", [True, False])
def test_what_broke_or_was_used_often_is_compiled_anew(
    is_broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    held.let_go.set()
    service = from_checkpoint(max_num_uses=3)
    first = compiled(service, choice_spec("a"))
    assert first.grammar is not None
    assert service.submit(choice_spec("a")) is first
    first.grammar.is_broken = is_broken
    first.grammar.num_states = 2 if is_broken else 3
    assert compiled(service, choice_spec("a")) is not first
    service.close()


def test_too_many_that_wait_are_refused_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    service = from_checkpoint(max_num_waiting=3)
    waiting = [service.submit(choice_spec(str(number))) for number in range(3)]
    with pytest.raises(GrammarBusy, match="3 grammars wait"):
        service.submit(choice_spec("one more"))
    assert service.submit(choice_spec("1")) is waiting[1]
    service.check_integrity()
    held.let_go.set()
    assert all(one.wait(30) for one in waiting)
    assert service.submit(choice_spec("one more")).wait(30)
    service.close()


def test_senders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that comes later waits for one of each other sender's, not for all of them."""
    held = Held(monkeypatch)
    service = from_checkpoint(max_num_compiling=1)
    many = [service.submit(choice_spec(f"a{number}"), b"a") for number in range(5)]
    assert held.is_in.wait(30)
    few = [service.submit(choice_spec(text), text[:1].encode()) for text in ("b0", "c0", "b1")]
    service.check_integrity()
    held.let_go.set()
    assert all(one.wait(30) for one in (*many, *few))
    service.close()
    assert held.order == ["a0", "a1", "b0", "c0", "a2", "b1", "a3", "a4"]


def test_a_sender_has_some_of_the_places_only(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    service = from_checkpoint(max_num_compiling=1, max_num_waiting=8, max_num_waiting_per_sender=3)
    waiting = [service.submit(choice_spec("first"), b"a")]
    assert held.is_in.wait(30)  # it no longer waits
    waiting += [service.submit(choice_spec(str(number)), b"a") for number in range(3)]
    with pytest.raises(GrammarBusy, match="3 grammars of this sender wait"):
        service.submit(choice_spec("one more"), b"a")
    assert service.submit(choice_spec("1"), b"a") is waiting[2]
    waiting.append(service.submit(choice_spec("one more"), b"b"))
    service.check_integrity()
    held.let_go.set()
    assert all(one.wait(30) for one in waiting)
    assert service.submit(choice_spec("at last"), b"a").wait(30)
    service.close()
    service.check_integrity()


def test_what_blocks_is_done_on_the_compile_threads(
    make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = make_service()
    threads: list[int] = []
    load = service._load

    def noted() -> GrammarTokenizer:
        threads.append(threading.get_ident())
        return load()

    monkeypatch.setattr(service, "_load", noted)
    both = [service.submit(regex_spec(text)) for text in ("a", "(")]
    assert all(one.wait(WAIT_S) for one in both)
    assert both[0].error is None and isinstance(both[1].error, InvalidRequest)
    assert len(threads) == 1 and threading.get_ident() not in threads
    # A refusal is kept.
    assert service.submit(regex_spec("(")) is both[1]


def test_a_tokenizer_that_cannot_be_served_is_each_requests_error(process: SharedProcess) -> None:
    loads: list[int] = []

    def load() -> GrammarTokenizer:
        loads.append(1)
        raise InvalidRequest("grammar", "an odd tokenizer")

    service = GrammarService(load, GrammarLimits(), process=process)
    service.prepare()
    for text in "ab":
        error = compiled(service, choice_spec(text)).error
        assert isinstance(error, InvalidRequest) and "an odd tokenizer" in str(error)
    assert len(loads) == 1
    service.close()


def test_closing_does_not_wait_for_a_process_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In its place is one that never says that it is ready."""
    is_started = threading.Event()
    popen = subprocess.Popen

    def start(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        made = popen(["sleep", "1000"], **how)
        is_started.set()
        return made

    monkeypatch.setattr(compiler.subprocess, "Popen", start)
    process = CompileProcess(tmp_path, 10)
    errors: list[Exception] = []

    def ask() -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                process.hand_over(theirs)
            except GrammarFailed as error:
                errors.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    assert is_started.wait(30)
    closing = threading.Thread(target=process.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive(), "its start has 120 s"
    asking.join(30)
    assert not asking.is_alive() and len(errors) == 1


def test_our_own_failures_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    held.let_go.set()
    service = from_checkpoint()
    for failure, is_kept in ((GrammarFailed("broken"), False), (ValueError("odd"), False)):
        held.failure = failure
        first = compiled(service, choice_spec("a"))
        assert isinstance(first.error, GrammarFailed)
        assert (service.submit(choice_spec("a")) is first) is is_kept
    service.close()


def test_after_close_what_waits_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)
    service = from_checkpoint(max_num_compiling=1)
    waiting = [service.submit(choice_spec(str(number))) for number in range(3)]
    service.close()
    assert all(one.wait(30) for one in waiting)
    assert all(isinstance(one.error, GrammarFailed) for one in waiting)
    held.let_go.set()
    service.check_integrity()


def test_a_model_without_a_fitting_tokenizer_refuses_grammars_by_name(tmp_path: Path) -> None:
    service = GrammarService.from_checkpoint(tmp_path, 10, GrammarLimits())
    refusals = [compiled(service, choice_spec(text)).error for text in "ab"]
    for refusal in refusals:
        assert isinstance(refusal, InvalidRequest)
        assert re.search(r"^grammar: .*tokenizer\.json cannot be read", str(refusal))
    assert refusals[0] is not refusals[1]
    service.check_integrity()
    service.close()


class CacheMachine(RuleBasedStateMachine):
    """Random specs in random order under small bounds: the laws hold after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.held = Held(self.patch)
        self.held.let_go.set()
        self.service = from_checkpoint(max_num_cached=4, cache_bytes=3000)

    @rule(number=st.integers(0, 7))
    def submit(self, number: int) -> None:
        self.held.failure = None
        assert self.service.submit(choice_spec(str(number))).wait(30)

    @rule(number=st.integers(8, 11))
    def fail(self, number: int) -> None:
        self.held.failure = InvalidRequest("grammar", "bad")
        assert self.service.submit(choice_spec(str(number))).wait(30)

    @rule()
    def refuse(self) -> None:
        with pytest.raises(InvalidRequest):
            self.service.submit(choice_spec("a" * 70_000))

    @invariant()
    def the_laws_hold(self) -> None:
        self.service.check_integrity()
        stats = self.service.stats()
        assert stats.num_cached <= 4
        assert stats.cached_bytes <= 3000

    def teardown(self) -> None:
        self.service.close()
        self.service.check_integrity()
        self.patch.undo()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=8, stateful_step_count=20, deadline=None)
