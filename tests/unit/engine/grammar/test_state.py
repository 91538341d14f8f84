"""States: ends, completion, resumption, fork, masks that are late, and what costs too much."""

from __future__ import annotations

import codecs
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.config import GrammarLimits
from engine.grammar.errors import GrammarFailed, GrammarTooCostly
from engine.grammar.mask_filler import MaskFiller
from engine.grammar.state import CompiledGrammar, GrammarState
from engine.grammar.vocabulary import Vocabulary
from engine.grammar_constraints import Masks
from engine.request import Sampling
from engine.sampling.metadata import SamplingRequest
from tests.unit.engine.grammar.driver import (
    END,
    VOCAB_SIZE,
    Grammars,
    MakeGrammars,
    choice_spec,
    ebnf_spec,
    ids_of,
    random_regex,
    random_schema,
    regex_spec,
    run,
    schema_spec,
)
from tokens.tokenizer import Tokenizer, TokenKind


def token(grammars: Grammars, text: str) -> int:
    return grammars.token_bytes.index(text.encode())


def test_an_end_is_allowed_where_the_text_is_complete_and_nowhere_else(grammars: Grammars) -> None:
    a, b = token(grammars, "a"), token(grammars, "b")
    state = grammars.state(regex_spec("ab?"), frozenset({END, b}))
    assert not {END, b} & set(grammars.allowed(state))
    assert not state.accept(END)
    assert state.accept(a)
    # b is an end for this request: it ends the text, and no longer stands for a letter in it.
    assert grammars.allowed(state) == [END, b]
    assert state.is_complete
    assert state.accept(b)
    assert state.is_complete
    assert not state.accept(END)
    assert grammars.allowed(state) == []


def test_without_an_end_token_completion_is_still_known(grammars: Grammars) -> None:
    a, b = token(grammars, "a"), token(grammars, "b")
    state = grammars.state(regex_spec("ab?"), frozenset())
    assert state.accept(a)
    assert not state.is_complete
    assert grammars.allowed(state) == [b]
    assert state.accept(b)
    assert state.is_complete
    assert grammars.allowed(state) == []


def test_end_tokens_beyond_the_vocabulary_are_none(grammars: Grammars) -> None:
    state = grammars.state(regex_spec("a"), frozenset({-1, VOCAB_SIZE, 1 << 30}))
    assert state.accept(token(grammars, "a"))
    assert grammars.allowed(state) == []


def test_specials_and_padding_are_never_inside_text(
    make_grammars: MakeGrammars, vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    padded = Vocabulary((*vocabulary.token_bytes, *[b""] * 75))
    wide = make_grammars(padded)
    state = wide.state(regex_spec("[\\s\\S]*"))
    mask = wide.masks([state])
    assert mask.shape == (1, -(-padded.size // 32))
    assert mask.dtype == torch.int32
    text = {i for i in range(VOCAB_SIZE) if tokenizer.kind(i) == TokenKind.TEXT}
    # A text begins with a character, so not with a byte from inside one.
    first = {i for i in text if _may_begin(vocabulary.token_bytes[i])}
    assert set(ids_of(mask[0])) == first | {END}
    for token_id in (0, 2, VOCAB_SIZE, padded.size - 1, padded.size, padded.size + 1, -1):
        assert not state.accept(token_id)


def _may_begin(data: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return True


def test_a_width_that_is_a_multiple_of_32(grammars: Grammars) -> None:
    assert VOCAB_SIZE % 32 == 0
    assert grammars.masks([grammars.state(regex_spec("a"))]).shape == (1, VOCAB_SIZE // 32)


def test_completion_means_that_only_an_end_may_follow(grammars: Grammars, seed: int) -> None:
    rng = random.Random(f"{seed} complete")
    for _ in range(20):
        state = grammars.state(regex_spec(random_regex(rng)))
        for _ in range(30):
            allowed = grammars.allowed(state)
            assert state.is_complete == (set(allowed) <= {END} and END in allowed)
            assert grammars.allowed(state) == allowed, "asking changes nothing"
            rest = [token_id for token_id in allowed if token_id != END]
            if not rest:
                break
            assert state.accept(rng.choice(rest))


def test_a_state_resumes_from_any_prefix_with_the_same_masks(
    grammars: Grammars, seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(f"{seed} resume")
    for round_number in range(scale(100)):
        spec = (
            schema_spec(random_schema(rng)) if round_number % 2 else regex_spec(random_regex(rng))
        )
        output = run(grammars, grammars.state(spec), rng, jump=True).token_ids[:40]
        walking = grammars.state(spec)
        for length in range(len(output) + 1):
            resumed = grammars.state(spec)
            assert all(resumed.accept(token_id) for token_id in output[:length])
            assert tuple(resumed.token_ids) == tuple(walking.token_ids)
            masks = grammars.masks([walking, resumed])
            assert torch.equal(masks[0], masks[1])
            assert resumed.is_complete == walking.is_complete
            if length < len(output):
                assert walking.accept(output[length])


@settings(max_examples=30)
@given(st.data())
def test_forks_are_replays(grammars: Grammars, data: st.DataObject) -> None:
    """Random steps on several states; each is at any time what a fresh one is after its ids."""
    spec = schema_spec(random_schema(random.Random(data.draw(st.integers(0, 1 << 30)))))
    states = [grammars.state(spec)]
    lengths = [0]
    for _ in range(data.draw(st.integers(1, 15))):
        index = data.draw(st.integers(0, len(states) - 1))
        state = states[index]
        action = data.draw(st.sampled_from(["accept", "accept", "fork", "look"]))
        if action == "accept":
            allowed = grammars.allowed(state)
            if allowed:
                assert state.accept(allowed[data.draw(st.integers(0, len(allowed) - 1))])
                lengths[index] += 1
        elif action == "fork":
            states.append(state.fork())
            lengths.append(lengths[index])
        else:
            assert state.is_complete in (True, False)
            allowed = [i for i in grammars.allowed(state) if i != END]
            if allowed:
                state.retokenized(allowed[0])
            state.forced()
    for state, length in zip(states, lengths, strict=True):
        assert len(state.token_ids) == length
        fresh = grammars.state(spec)
        assert all(fresh.accept(token_id) for token_id in state.token_ids)
        masks = grammars.masks([state, fresh])
        assert torch.equal(masks[0], masks[1])


def test_what_costs_too_much_breaks_its_own_state_only(make_grammars: MakeGrammars) -> None:
    grammars = make_grammars()
    compiled = grammars.compiled(regex_spec("a*"))
    compiled.limits = GrammarLimits(token_cpu_s=1e-9)
    bomb = compiled.state(frozenset({END}))
    neighbour = grammars.state(choice_spec("aa"))
    a = token(grammars, "a")
    masks = grammars.masks([bomb, neighbour])
    assert ids_of(masks[0]) == []
    assert isinstance(bomb.error, GrammarTooCostly)
    assert "token 0 of the output costs its parser too much" in str(bomb.error)
    assert ids_of(masks[1]) != [] and neighbour.error is None
    assert not bomb.accept(a)
    assert not bomb.is_complete
    assert bomb.retokenized(a) == () and bomb.forced() == ()
    assert bomb.fork().error is bomb.error
    assert bomb.grammar.is_broken, "the library's lexer stays at its limit for all states of it"
    grammars.filler.check_integrity()


class Hanging(GrammarState):
    """Its mask does not come until it is let go."""

    let_go: threading.Event
    is_in: threading.Event

    def mask(self) -> npt.NDArray[np.int32]:
        if threading.current_thread().name == "grammar-mask":
            self.is_in.set()
            assert self.let_go.wait(30)
        return super().mask()


def hanging(compiled: CompiledGrammar) -> Hanging:
    plain = compiled.state(frozenset({END}))
    made = Hanging(compiled, plain._matcher, frozenset({END}))
    made.let_go, made.is_in = threading.Event(), threading.Event()
    return made


class Service:
    """What Masks takes of a service."""

    def __init__(self, grammars: Grammars) -> None:
        self.filler = MaskFiller(2)
        self.limits = grammars.limits


def test_a_mask_that_is_late_delays_its_own_grammars_rows_only(make_grammars: MakeGrammars) -> None:
    grammars = make_grammars(mask_wait_s=0.01)
    service: Any = Service(grammars)
    a, other = token(grammars, "a"), grammars.compiled(choice_spec("ab", "b"))
    stuck = hanging(other)
    sibling, good = other.state(frozenset({END})), grammars.state(choice_spec("a"))
    rows = [good, stuck, None, sibling]
    masks = Masks(service, rows)
    assert stuck.is_in.wait(30)
    assert not service.filler.wait([good], None), "another grammar's mask is there"
    draws = [SamplingRequest(Sampling(max_tokens=1), position=5)] * 4
    masked = masks.masked(draws, [0, 1, 2, 3])
    assert [one is None for one in masked] == [False, True, False, True]
    assert masked[0] is not None and masked[0].bitmask is not None
    assert ids_of(masked[0].bitmask) == [a]
    assert masked[2] is not None and masked[2].bitmask is None
    assert service.filler.num_late == 2 and stuck.is_busy and sibling.is_busy
    # The next step asks for the mask that is on its way, and finds it when it has come.
    again = Masks(service, [None, stuck])
    stuck.let_go.set()
    again.wait()
    found = again.masked(draws[:2], [0, 1])
    assert found[1] is not None and found[1].bitmask is not None
    assert ids_of(found[1].bitmask) == sorted(
        {a, token(grammars, "b")} | set(ids_of(found[1].bitmask))
    )
    assert not stuck.is_busy and not sibling.is_busy
    service.filler.check_integrity()
    service.filler.close()


def test_a_step_without_any_other_draw_waits_for_its_masks(make_grammars: MakeGrammars) -> None:
    grammars = make_grammars(mask_wait_s=0.001)
    service: Any = Service(grammars)
    stuck = hanging(grammars.compiled(choice_spec("a")))
    masks = Masks(service, [stuck])
    assert stuck.is_in.wait(30)
    threading.Timer(0.05, stuck.let_go.set).start()
    (found,) = masks.masked([SamplingRequest(Sampling(max_tokens=1), position=5)], [0])
    assert found is not None and found.bitmask is not None
    assert ids_of(found.bitmask) == [token(grammars, "a")]
    service.filler.close()


class Broken:
    """A matcher that raises in one of its calls."""

    def __init__(self, matcher: Any, call: str) -> None:
        self._matcher = matcher
        self._call = call

    def __getattr__(self, name: str) -> Any:
        if name != self._call:
            return getattr(self._matcher, name)

        def fail(*arguments: object) -> None:
            raise RuntimeError("an odd grammar")

        return fail


@pytest.mark.parametrize(
    ("call", "use"),
    [
        ("try_consume_tokens", lambda state, a: state.accept(a)),
        ("is_accepting", lambda state, a: state.accept(END)),
        ("is_accepting", lambda state, a: state.is_complete),
        ("compute_ff_tokens", lambda state, a: state.forced()),
        ("validate_tokens", lambda state, a: state.retokenized(a)),
        ("unsafe_compute_mask_ptr", lambda state, a: state.mask().any()),
    ],
)
def test_a_failure_of_the_library_is_the_states_own_error(
    call: str, use: Callable[[GrammarState, int], object], grammars: Grammars
) -> None:
    a = token(grammars, "a")
    state = grammars.state(choice_spec("abc", "abd"))
    matcher: Any = Broken(state._matcher, call)
    state._matcher = matcher
    neighbour = grammars.state(choice_spec("a"))
    assert not use(state, a)
    assert isinstance(state.error, GrammarFailed)
    assert "the grammar library failed: RuntimeError('an odd grammar')" in str(state.error)
    assert state.grammar.is_broken, "the next request compiles it anew"
    masks = grammars.masks([state, neighbour])
    assert [ids_of(row) for row in masks] == [[], [a]]
    assert not state.accept(a) and not state.is_complete and state.forced() == ()
    assert isinstance(state.fork().error, GrammarFailed)


def test_a_mask_that_fails_on_its_thread_is_its_rows_own_error(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a mistake of ours, outside the library."""
    a = token(grammars, "a")
    states = [grammars.state(choice_spec("a")) for _ in range(3)]
    made = states[1]._made_mask

    def fail() -> npt.NDArray[np.int32]:
        if states[1].error is None:
            raise ValueError("odd")
        return made()

    monkeypatch.setattr(states[1], "_made_mask", fail)
    masks = grammars.masks(states)
    assert [ids_of(row) for row in masks] == [[a], [], [a]]
    assert isinstance(states[1].error, GrammarFailed)
    grammars.filler.check_integrity()


def test_a_dead_end_is_an_empty_mask(make_grammars: MakeGrammars) -> None:
    """The vocabulary has "ab" and "c" only: after "ab" nothing can spell "d"."""
    grammars = make_grammars(Vocabulary((b"ab", b"", b"c", b"d" * 2)))
    state = grammars.state(ebnf_spec('start: "abc" | "abd"'))
    assert grammars.allowed(state) == [0]
    assert state.accept(0)
    assert grammars.allowed(state) == [2]
    stuck = grammars.state(ebnf_spec('start: "abd"'))
    assert stuck.accept(0)
    assert grammars.allowed(stuck) == []
    assert not stuck.is_complete
