"""States: ends, completion, resumption, fork, rollback, and parsers that run away."""

from __future__ import annotations

import codecs
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.errors import GrammarFailed, GrammarTooCostly
from engine.grammar.fill import Fill
from engine.grammar.state import GrammarState
from engine.grammar.vocabulary import Vocabulary
from tests.unit.engine.grammar.driver import (
    END,
    VOCAB_SIZE,
    Grammars,
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

RUNAWAY = regex_spec("((a{0,100}){0,100}){0,100}")
"""Compiles in a millisecond; each token costs about twice the one before it."""


def token(grammars: Grammars, text: str) -> int:
    return grammars.surroundings.vocabulary.token_bytes.index(text.encode())


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
    make_grammars: Callable[..., Grammars], vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    padded = Vocabulary((*vocabulary.token_bytes, *[b""] * 75))
    wide = make_grammars(padded, tokenizer)
    state = wide.state(regex_spec("[\\s\\S]*"))
    mask = wide.masks([state, None])
    assert mask.shape == (2, -(-padded.size // 32))
    assert mask.dtype == torch.int32
    text = {i for i in range(VOCAB_SIZE) if tokenizer.kind(i) == TokenKind.TEXT}
    # A text begins with a character, so not with a byte from inside one; NUL is not supported.
    first = {i for i in text if _may_begin(vocabulary.token_bytes[i])}
    assert set(ids_of(mask[0])) == first | {END}
    assert bool((mask[1] == -1).all())
    for token_id in (0, 2, VOCAB_SIZE, padded.size - 1, padded.size, padded.size + 1, -1):
        assert not state.accept(token_id)


def _may_begin(data: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


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
def test_fork_and_rollback_are_replays(grammars: Grammars, data: st.DataObject) -> None:
    """Random steps on several states; each is at any time what a fresh one is after its ids."""
    spec = schema_spec(random_schema(random.Random(data.draw(st.integers(0, 1 << 30)))))
    states = [grammars.state(spec)]
    lengths = [0]
    for _ in range(data.draw(st.integers(1, 15))):
        index = data.draw(st.integers(0, len(states) - 1))
        state = states[index]
        action = data.draw(st.sampled_from(["accept", "accept", "fork", "rollback", "look"]))
        if action == "accept":
            allowed = grammars.allowed(state)
            if allowed:
                assert state.accept(allowed[data.draw(st.integers(0, len(allowed) - 1))])
                lengths[index] += 1
        elif action == "fork":
            states.append(state.fork())
            lengths.append(lengths[index])
        elif action == "rollback":
            num_tokens = data.draw(st.integers(0, lengths[index]))
            state.rollback(num_tokens)
            lengths[index] -= num_tokens
        else:
            assert state.is_complete in (True, False)
            allowed = [i for i in grammars.allowed(state) if i != END]
            if allowed:
                state.forced_after(allowed[0])
    for state, length in zip(states, lengths, strict=True):
        assert len(state.token_ids) == length
        fresh = grammars.state(spec)
        assert all(fresh.accept(token_id) for token_id in state.token_ids)
        masks = grammars.masks([state, fresh])
        assert torch.equal(masks[0], masks[1])


def test_more_than_there_is_cannot_be_taken_back(grammars: Grammars) -> None:
    state = grammars.state(regex_spec("a*"))
    assert state.accept(token(grammars, "a"))
    with pytest.raises(ValueError, match="2 of 1"):
        state.rollback(2)


def test_a_parser_that_runs_away_breaks_its_own_state_only(
    make_grammars: Callable[..., Grammars], vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    grammars = make_grammars(vocabulary, tokenizer, token_cpu_s=0.02)
    bomb = grammars.state(RUNAWAY)
    neighbour = grammars.state(regex_spec("[ab]{5,}"))
    a = token(grammars, "a")
    for _ in range(60):
        masks = grammars.masks([bomb, neighbour])
        assert a in ids_of(masks[1])
        if bomb.error is not None:
            break
        neighbour.accept(a)
        if not bomb.accept(a):
            break
    assert isinstance(bomb.error, GrammarTooCostly)
    assert "of the output takes its parser more than 0.02 s" in str(bomb.error)
    assert neighbour.error is None
    assert not bomb.accept(a)
    assert not bomb.is_complete
    assert bomb.forced_after(a) == ()
    assert ids_of(grammars.masks([bomb])[0]) == []
    assert bomb.fork().error is bomb.error
    grammars.surroundings.workers.check_integrity()


class Hanging(GrammarState):
    """Its mask does not come until it is let go."""

    let_go: threading.Event
    is_in: threading.Event

    def fill(self, rows: torch.Tensor, index: int) -> None:
        self.is_in.set()
        self.let_go.wait(30)
        rows[index].fill_(-1)


def test_a_mask_that_does_not_come_costs_its_row_only(
    make_grammars: Callable[..., Grammars], vocabulary: Vocabulary
) -> None:
    grammars = make_grammars(vocabulary, token_timeout_s=0.5)
    good = [grammars.state(choice_spec("a")) for _ in range(3)]
    stuck = grammars.state(choice_spec("a"))
    hanging = Hanging(stuck._matcher, grammars.surroundings, frozenset({END}))
    hanging.let_go, hanging.is_in = threading.Event(), threading.Event()
    fill = Fill(grammars.surroundings, [good[0], hanging, good[1], None, good[2]])
    assert hanging.is_in.wait(30)
    masks = fill.result()
    a = token(grammars, "a")
    assert [ids_of(masks[row]) for row in (0, 2, 4)] == [[a], [a], [a]]
    assert bool((masks[3] == -1).all())
    assert ids_of(masks[1]) == []
    assert isinstance(hanging.error, GrammarTooCostly)
    assert all(state.error is None for state in good)
    workers = grammars.surroundings.workers
    assert workers.num_stuck == 1
    # Those who come later find a thread that works.
    assert ids_of(grammars.masks([good[0]])[0]) == [a]
    hanging.let_go.set()
    for helper in fill._helpers:
        assert helper.task is not None and helper.task.wait(30)
    assert workers.num_stuck == 0
    assert ids_of(masks[1]) == [], "what came late is not seen"
    workers.check_integrity()


def test_rows_that_nobody_began_are_not_charged_for_those_that_hang(
    make_grammars: Callable[..., Grammars], vocabulary: Vocabulary
) -> None:
    """More rows hang than there are threads, and all of them come before the others."""
    grammars = make_grammars(vocabulary, token_timeout_s=0.5)
    let_go = threading.Event()
    hanging = []
    for _ in range(6):
        stuck = grammars.state(choice_spec("a"))
        hanging.append(Hanging(stuck._matcher, grammars.surroundings, frozenset({END})))
        hanging[-1].let_go, hanging[-1].is_in = let_go, threading.Event()
    good = [grammars.state(choice_spec("a")) for _ in range(3)]
    fill = Fill(grammars.surroundings, [*hanging, *good])
    masks = fill.result()
    assert fill.is_over
    a = token(grammars, "a")
    assert [ids_of(masks[row]) for row in range(9)] == [[]] * 6 + [[a]] * 3
    assert all(isinstance(state.error, GrammarTooCostly) for state in hanging)
    assert all(state.error is None for state in good)
    workers = grammars.surroundings.workers
    assert workers.num_stuck == 6
    let_go.set()
    for helper in fill._helpers:
        assert helper.task is not None and helper.task.wait(30)
    assert workers.num_stuck == 0
    workers.check_integrity()


class Slow(GrammarState):
    """Its mask takes a while."""

    def fill(self, rows: torch.Tensor, index: int) -> None:
        threading.Event().wait(0.1)
        super().fill(rows, index)


def test_many_rows_may_take_longer_together_than_one_may(
    make_grammars: Callable[..., Grammars], vocabulary: Vocabulary
) -> None:
    grammars = make_grammars(vocabulary, token_timeout_s=1.0)
    rows = []
    for _ in range(60):  # 1.5 s for four threads
        state = grammars.state(choice_spec("a"))
        rows.append(Slow(state._matcher, grammars.surroundings, frozenset({END})))
    masks = grammars.masks(rows)
    a = token(grammars, "a")
    assert [ids_of(row) for row in masks] == [[a]] * 60
    assert [state.error for state in rows] == [None] * 60


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
        ("accept_token", lambda state, a: state.accept(a)),
        ("is_completed", lambda state, a: state.accept(END)),
        ("is_completed", lambda state, a: state.is_complete),
        ("find_jump_forward_string", lambda state, a: state.forced_after(a)),
        ("rollback", lambda state, a: state.forced_after(a)),
        ("rollback", lambda state, a: state.accept(a) and state.rollback(1)),
        ("fork", lambda state, a: state.fork().accept(a)),
    ],
)
def test_a_failure_of_the_library_is_the_states_own_error(
    call: str, use: Callable[[GrammarState, int], object], grammars: Grammars
) -> None:
    a = token(grammars, "a")
    state = grammars.state(choice_spec("abc", "abd"))
    state._matcher = Broken(state._matcher, call)
    neighbour = grammars.state(choice_spec("a"))
    assert not use(state, a)
    assert isinstance(state.error, GrammarFailed)
    assert "the grammar library failed: RuntimeError('an odd grammar')" in str(state.error)
    masks = grammars.masks([state, neighbour])
    assert [ids_of(row) for row in masks] == [[], [a]]
    assert not state.accept(a) and not state.is_complete and state.forced_after(a) == ()
    assert isinstance(state.fork().error, GrammarFailed)


def test_a_mask_that_fails_is_its_rows_own_error(grammars: Grammars) -> None:
    a = token(grammars, "a")
    states = [grammars.state(choice_spec("a")) for _ in range(3)]
    states[1]._matcher = Broken(states[1]._matcher, "fill_next_token_bitmask")
    masks = grammars.masks(states)
    assert [ids_of(row) for row in masks] == [[a], [], [a]]
    assert isinstance(states[1].error, GrammarFailed)
    grammars.surroundings.workers.check_integrity()


def test_a_fill_that_fails_is_its_rows_own_error(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a mistake of ours, outside the library."""
    a = token(grammars, "a")
    states = [grammars.state(choice_spec("a")) for _ in range(3)]

    def fail(row: torch.Tensor) -> None:
        row.fill_(-1)
        raise ValueError("odd")

    monkeypatch.setattr(states[1], "_clear_spare", fail)
    masks = grammars.masks(states)
    assert [ids_of(row) for row in masks] == [[a], [], [a]]
    assert isinstance(states[1].error, GrammarFailed)
    grammars.surroundings.workers.check_integrity()


def test_a_dead_end_is_an_empty_mask(make_grammars: Callable[..., Grammars]) -> None:
    """The vocabulary has "ab" and "c" only: after "ab" nothing can spell "d"."""
    grammars = make_grammars(Vocabulary((b"ab", b"", b"c", b"d" * 2)))
    state = grammars.state(ebnf_spec('root ::= "abc" | "abd"'))
    assert grammars.allowed(state) == [0]
    assert state.accept(0)
    assert grammars.allowed(state) == [2]
    stuck = grammars.state(ebnf_spec('root ::= "abd"'))
    assert stuck.accept(0)
    assert grammars.allowed(stuck) == []
    assert not stuck.is_complete
