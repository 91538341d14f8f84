"""Jumps over forced text: by default they change nothing but time; cut anew, they are the
tokenizer's own cut."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.vocabulary import GrammarTokenizer, TextTokenizer, Vocabulary
from tests.unit.engine.grammar.driver import (
    END,
    Grammars,
    MakeGrammars,
    choice_spec,
    ebnf_spec,
    random_regex,
    random_schema,
    regex_spec,
    run,
    schema_spec,
)
from tokens.tokenizer import Tokenizer

OBJECT = schema_spec(
    {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
)


def token(grammars: Grammars, text: str) -> int:
    return grammars.token_bytes.index(text.encode())


# -- tokens that the model would be made to draw


@pytest.mark.parametrize("kind", ["schema", "pattern"])
def test_forced_tokens_are_those_that_masks_allow_one_by_one(
    grammars: Grammars, seed: int, scale: Callable[[int], int], kind: str
) -> None:
    rng = random.Random(f"{seed} forced {kind}")
    num_forced = 0
    specs = {
        "schema": OBJECT,  # one that forces text whatever is drawn, since few random patterns do
        "pattern": regex_spec("(cat|dog) and then some more of the same"),
    }
    for index in range(scale(200)):
        if index == 0:
            spec = specs[kind]
        elif kind == "schema":
            spec = schema_spec(random_schema(rng))
        else:
            spec = regex_spec(random_regex(rng))
        state = grammars.state(spec)
        for _ in range(12):
            before = grammars.masks([state])
            forced = state.forced()
            assert torch.equal(grammars.masks([state.fork()]), before), "it changes nothing"
            plain = state.fork()
            for token_id in forced:
                assert grammars.allowed(plain) == [token_id]
                assert plain.accept(token_id)
            num_forced += len(forced)
            allowed = [token_id for token_id in grammars.allowed(state) if token_id != END]
            if not allowed:
                break
            assert state.accept(rng.choice(allowed))
    assert num_forced > 0


def test_with_jumps_an_output_is_that_of_drawing_each_token(
    grammars: Grammars, seed: int, scale: Callable[[int], int]
) -> None:
    """For the same draws where there is a choice. Few schemas force nothing."""
    rng = random.Random(f"{seed} same")
    num_forced = 0
    for _ in range(max(8, scale(100))):
        spec = schema_spec(random_schema(rng))
        outputs = []
        for jump in (False, True):
            state, output = grammars.state(spec), []
            while not state.is_complete and len(output) < 60:
                token_id = max(grammars.allowed(state), key=lambda one: hash((one, len(output))))
                for taken in (token_id, *((None,) if jump else ())):
                    if taken is None:
                        break
                    assert state.accept(taken)
                    output.append(taken)
                for forced in state.forced() if jump else ():
                    assert state.accept(forced)
                    output.append(forced)
                    num_forced += 1
            outputs.append(output[:60])
        assert outputs[0] == outputs[1]
    assert num_forced > 0


def test_forced_tokens_are_bounded(make_grammars: MakeGrammars) -> None:
    grammars = make_grammars(max_num_forced_tokens=7)
    state = grammars.state(regex_spec("x(ya){900}"))
    assert len(state.forced()) == 7


def test_an_end_token_is_never_forced(grammars: Grammars) -> None:
    quote = token(grammars, '"')
    state = grammars.state(choice_spec('x"'), frozenset({END, quote}))
    assert state.accept(token(grammars, "x"))
    assert state.forced() == ()


def test_text_that_spells_a_special_token_is_cut_into_others(grammars: Grammars) -> None:
    """The tokenizer would make `<|end|>` of it, which is no text."""
    state = grammars.state(choice_spec("a<|end|>b"))
    output: list[int] = []
    while not state.is_complete:
        (token_id,) = grammars.allowed(state)
        assert state.accept(token_id)
        output.append(token_id)
    assert END not in output and grammars.text(output) == "a<|end|>b"


def test_grammars_of_clients_force_nothing(grammars: Grammars) -> None:
    """llguidance 1.9.1 follows text that goes on for ever."""
    for text in ('start: "a" start', 'root ::= "a" root', 'start: /x+/ "x"'):
        state = grammars.state(ebnf_spec(text))
        for _ in range(3):
            assert state.forced() == ()
            assert state.retokenized(grammars.allowed(state)[0]) == ()
            assert state.accept(grammars.allowed(state)[0])


# -- cut anew


def test_the_seam_is_cut_as_the_tokenizer_cuts_it(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """`{` alone was drawn; with what must follow it belongs into one token with the quote."""
    state = grammars.state(OBJECT)
    cut = state.retokenized(token(grammars, "{"))
    whole = tokenizer.encode('{"name": "', add_special_tokens=False)
    assert cut[0] != token(grammars, "{")
    assert list(cut) == whole[: len(cut)]
    assert len(cut) >= len(whole) - 1
    assert all(state.accept(token_id) for token_id in cut)


def test_nothing_is_cut_anew_where_there_is_a_choice(grammars: Grammars) -> None:
    state = grammars.state(choice_spec("ab", "ac"))
    assert state.retokenized(token(grammars, "a")) == ()
    assert state.retokenized(END) == ()
    assert state.retokenized(token(grammars, "z")) == (), "not allowed at all"
    assert state.accept(token(grammars, "a"))


@pytest.mark.parametrize("character", ["b", "é", "日"])
def test_a_long_cut_is_bounded(character: str, make_grammars: MakeGrammars) -> None:
    grammars = make_grammars(max_num_forced_tokens=5)
    text = "x" + character * 9000
    cut = grammars.state(choice_spec(text)).retokenized(token(grammars, "x"))
    assert len(cut) == 5
    assert text.encode().startswith(b"".join(grammars.token_bytes[i] for i in cut))


def test_what_is_cut_anew_is_the_forced_text_and_changes_nothing(
    grammars: Grammars, seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(f"{seed} anew")
    num_cut = 0
    for index in range(scale(200)):
        state = grammars.state(OBJECT if index == 0 else schema_spec(random_schema(rng)))
        for _ in range(12):
            allowed = [token_id for token_id in grammars.allowed(state) if token_id != END]
            if not allowed:
                break
            before = grammars.masks([state.fork()])
            for token_id in rng.sample(allowed, min(5, len(allowed))):
                cut = state.retokenized(token_id)
                assert torch.equal(grammars.masks([state.fork()]), before), "it changes nothing"
                if not cut:
                    continue
                num_cut += 1
                text = b"".join(grammars.token_bytes[i] for i in cut)
                own = grammars.token_bytes[token_id]
                ahead = state.fork()
                assert ahead.accept(token_id)
                must = bytes(ahead._matcher.compute_ff_bytes())
                assert len(cut) > 1 and (own + must).startswith(text)
                jumped, spelled = state.fork(), state.fork()
                assert all(jumped.accept(i) for i in cut)
                ids = grammars.token_bytes.index
                assert all(spelled.accept(ids(bytes([byte]))) for byte in text)
                masks = grammars.masks([jumped, spelled])
                if not (jumped.forced() or spelled.forced()):
                    assert torch.equal(masks[0], masks[1]), "the same place"
            assert state.accept(rng.choice(allowed))
    assert num_cut > 0


def test_with_and_without_jumps_outputs_are_in_the_language(grammars: Grammars, seed: int) -> None:
    rng = random.Random(f"{seed} both")
    for jump in (False, True):
        for _ in range(5):
            output = run(grammars, grammars.state(OBJECT), rng, jump=jump)
            value = json.loads(grammars.text(output.token_ids))
            assert list(value) == ["name", "age"]
            assert value["name"] in ("Ada", "Bob")
            assert isinstance(value["age"], int)
            assert bool(output.num_forced) == jump


# -- the tokenizer


@settings(max_examples=50)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20))
def test_cutting_gives_the_text_back(
    vocabulary: Vocabulary, tokenizer: Tokenizer, text: str
) -> None:
    cutter = TextTokenizer(tokenizer, vocabulary)
    for cut in (cutter(text), cutter.cut(text) or cutter(text)):
        assert b"".join(vocabulary.token_bytes[i] for i in cut) == text.encode()


def test_a_tokenizer_that_fails_costs_its_cut_only(
    tokenizer: Tokenizer,
    make_grammars: MakeGrammars,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    grammars = make_grammars()
    state = grammars.state(OBJECT)

    def fail(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise RuntimeError("odd text")

    monkeypatch.setattr(Tokenizer, "encode", fail)
    for _ in range(2):
        assert state.retokenized(token(grammars, "{")) == ()
    assert state.error is None
    assert state.accept(grammars.allowed(state)[0])
    assert [record.message for record in caplog.records] == [
        "the tokenizer failed on text that a grammar forces"
    ]


def test_a_text_that_only_bytes_spell(bytes_only: Path, make_grammars: MakeGrammars) -> None:
    loaded = GrammarTokenizer.load(bytes_only, 257)
    grammars = make_grammars(loaded.vocabulary, Tokenizer.load(bytes_only))
    state = grammars.state(choice_spec("日本"), frozenset({256}))
    assert bytes(state.forced()) == "日本".encode()
