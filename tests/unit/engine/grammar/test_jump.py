"""Jumps over forced text: same text, same language, tokens cut as the tokenizer cuts them."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.config import GrammarLimits
from engine.grammar.jump import Cutter
from engine.grammar.state import GrammarState
from engine.grammar.vocabulary import Vocabulary
from tests.unit.engine.grammar.driver import (
    END,
    Grammars,
    choice_spec,
    ebnf_spec,
    random_regex,
    random_schema,
    regex_spec,
    run,
    schema_spec,
)
from tokens.tokenizer import Tokenizer

WORD = "abcdefghijklmnopqrstuvwxyzABCD"
OBJECT = schema_spec(
    {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
)


def pieces(grammars: Grammars, token_ids: tuple[int, ...]) -> list[str]:
    return [grammars.surroundings.vocabulary.token_bytes[i].decode() for i in token_ids]


def token(grammars: Grammars, text: str) -> int:
    return grammars.surroundings.vocabulary.token_bytes.index(text.encode())


def test_the_seam_is_cut_as_the_tokenizer_cuts_it(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """`{` alone was drawn; with what must follow it belongs into one token with the quote."""
    state = grammars.state(OBJECT)
    forced = state.forced_after(token(grammars, "{"))
    whole = tokenizer.encode('{"name": "', add_special_tokens=False)
    assert forced[0] != token(grammars, "{")
    assert list(forced) == whole[: len(forced)]
    assert len(forced) >= len(whole) - 1
    assert all(state.accept(token_id) for token_id in forced)


def test_the_last_token_is_left_where_a_longer_one_could_come(grammars: Grammars) -> None:
    """After `xyz re` the text goes on with letters: "re" could be the beginning of a longer
    token."""
    state = grammars.state(regex_spec("xyz re[a-z]+"))
    assert "".join(pieces(grammars, state.forced_after(token(grammars, "x")))) == "xyz"
    ends = grammars.state(regex_spec("xyz re"))
    assert "".join(pieces(grammars, ends.forced_after(token(grammars, "x")))) == "xyz re"


def test_nothing_is_forced_where_there_is_a_choice(grammars: Grammars) -> None:
    state = grammars.state(choice_spec("ab", "ac"))
    assert state.forced_after(token(grammars, "a")) == ()
    assert state.forced_after(END) == ()
    assert state.forced_after(token(grammars, "z")) == (), "not allowed at all"
    assert state.accept(token(grammars, "a"))


def test_a_token_inside_a_character_forces_nothing(grammars: Grammars) -> None:
    state = grammars.state(choice_spec("日本語"))
    first = grammars.surroundings.vocabulary.token_bytes.index("日".encode()[:1])
    assert state.forced_after(first) == ()


def test_a_jump_is_bounded(
    make_grammars: Callable[..., Grammars], vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    grammars = make_grammars(vocabulary, tokenizer, max_num_forced_tokens=7)
    state = grammars.state(regex_spec("x(ya){900}"))
    forced = state.forced_after(token(grammars, "x"))
    assert len(forced) == 7
    assert (
        "".join(pieces(grammars, forced))
        == ("x" + "ya" * 900)[: len("".join(pieces(grammars, forced)))]
    )


@pytest.mark.parametrize("character", ["b", "é", "日"])
def test_only_the_head_of_a_long_forced_text_is_cut(
    character: str,
    make_grammars: Callable[..., Grammars],
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars = make_grammars(vocabulary, tokenizer, max_num_forced_tokens=5)
    text = "x" + character * 9000
    state = grammars.state(choice_spec(text))
    lengths = []
    cut = Cutter.cut

    def counted(self: Cutter, data: bytes) -> tuple[int, ...]:
        lengths.append(len(data))
        return cut(self, data)

    monkeypatch.setattr(Cutter, "cut", counted)
    forced = state.forced_after(token(grammars, "x"))
    assert 75 < max(lengths) <= 81, "16 bytes for each token, and the one that was drawn"
    assert len(forced) == 5
    token_bytes = grammars.surroundings.vocabulary.token_bytes
    assert text.encode().startswith(b"".join(token_bytes[i] for i in forced))


def test_where_the_cut_may_lie_inside_a_token_that_token_is_dropped(
    make_grammars: Callable[..., Grammars],
) -> None:
    """64 bytes of forced text hold two words of 30 bytes and the beginning of a third."""
    spelled = (*(bytes([byte]) for byte in range(256)), WORD.encode(), WORD[:4].encode(), b"")
    wide = make_grammars(Vocabulary(spelled))
    surroundings = dataclasses.replace(
        wide.surroundings,
        limits=GrammarLimits(max_num_forced_tokens=4),
        cutter=Cutter(cast("Tokenizer", Words()), wide.surroundings.vocabulary),
    )
    plain = wide.state(choice_spec("x" + WORD * 9), frozenset({258}))
    state = GrammarState(plain._matcher, surroundings, frozenset({258}))
    assert state.forced_after(ord("x")) == (ord("x"), 256, 256)


class Words:
    """A tokenizer of letters, WORD (256) and its beginning (257)."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        pieces = re.findall(f"{WORD}|{WORD[:4]}|(?s:.)", text)
        return [{WORD: 256, WORD[:4]: 257}.get(piece) or ord(piece) for piece in pieces]


def test_a_tokenizer_that_fails_costs_the_jump_only(
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    make_grammars: Callable[..., Grammars],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    grammars = make_grammars(vocabulary, tokenizer)
    state = grammars.state(OBJECT)

    def fail(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        raise RuntimeError("odd text")

    monkeypatch.setattr(Tokenizer, "encode", fail)
    for _ in range(2):
        assert state.forced_after(token(grammars, "{")) == ()
    assert state.error is None and state.accept(token(grammars, "{"))
    assert [record.message for record in caplog.records] == [
        "the tokenizer failed on forced text: no jump"
    ]


def test_text_that_spells_a_special_token_is_not_cut_into_it(grammars: Grammars) -> None:
    """The tokenizer would make `<|end|>` of it, which is no text: no jump."""
    state = grammars.state(choice_spec("a<|end|>b"))
    forced = state.forced_after(token(grammars, "a"))
    assert END not in forced
    assert "".join(pieces(grammars, forced)) in ("", "a<|end|>b")


def test_an_end_token_is_never_forced(grammars: Grammars) -> None:
    quote = token(grammars, '"')
    state = grammars.state(choice_spec('x"'), frozenset({END, quote}))
    assert quote not in state.forced_after(token(grammars, "x"))


@pytest.mark.parametrize("kind", ["schema", "pattern"])
def test_every_jump_is_the_forced_text_and_changes_nothing(
    grammars: Grammars, seed: int, scale: Callable[[int], int], kind: str
) -> None:
    """For every token that may be drawn anywhere on a random walk: the jump's text begins with the
    token's, what follows it is what must follow, and the state afterwards is that of the text."""
    rng = random.Random(f"{seed} jumps {kind}")
    token_bytes = grammars.surroundings.vocabulary.token_bytes
    num_jumps = 0
    # One that forces text whatever is drawn, since few random patterns do; then random ones.
    specs = {
        "schema": schema_spec({"type": "object", "properties": {"a": {"enum": ["cat", "dog"]}}}),
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
            allowed = [token_id for token_id in grammars.allowed(state) if token_id != END]
            if not allowed:
                break
            before = grammars.masks([state])
            for token_id in rng.sample(allowed, min(5, len(allowed))):
                forced = state.forced_after(token_id)
                assert torch.equal(grammars.masks([state]), before), "it changes nothing"
                if not forced:
                    continue
                num_jumps += 1
                assert len(forced) > 1
                plain = state.fork()
                assert plain.accept(token_id)
                must = plain._matcher.find_jump_forward_string().encode()
                text = b"".join(token_bytes[i] for i in forced)
                own = token_bytes[token_id]
                assert (own + must).startswith(text)
                # The same text byte by byte leads to the same place.
                jumped, spelled = state.fork(), state.fork()
                assert all(jumped.accept(i) for i in forced)
                assert all(spelled.accept(token_bytes.index(bytes([byte]))) for byte in text)
                masks = grammars.masks([jumped, spelled])
                assert torch.equal(masks[0], masks[1])
            state.accept(rng.choice(allowed))
    assert num_jumps > 0


def test_without_merges_a_jump_is_plain_decoding(
    bytes_only: Path, make_grammars: Callable[..., Grammars], seed: int
) -> None:
    """Where a text has one token sequence only, outputs with and without jumps are equal, token for
    token, for the same draws where there is a choice."""
    vocabulary = Vocabulary.load(bytes_only, 257)
    grammars = make_grammars(vocabulary, Tokenizer.load(bytes_only))
    rng = random.Random(f"{seed} bytes")
    num_forced = 0
    for _ in range(20):
        names = rng.sample(["name", "some key", "é", "x"], 3)
        value = {name: rng.choice(["fixed text", 12, [1, None]]) for name in names}
        spec = ebnf_spec(f"root ::= {json.dumps(json.dumps(value, ensure_ascii=False))} [ab]")
        outputs = []
        for jump in (False, True):
            state = grammars.state(spec, frozenset({256}))
            output: list[int] = []
            while not state.is_complete:
                token_id = min(grammars.allowed(state))
                taken = (state.forced_after(token_id) if jump else ()) or (token_id,)
                num_forced += len(taken) - 1
                assert all(state.accept(i) for i in taken)
                output += taken
            outputs.append(output)
        assert outputs[0] == outputs[1]
    assert num_forced > 100


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


@settings(max_examples=50)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20))
def test_cutting_gives_the_text_back(
    vocabulary: Vocabulary, tokenizer: Tokenizer, text: str
) -> None:
    cut = Cutter(tokenizer, vocabulary).cut(text.encode())
    assert b"".join(vocabulary.token_bytes[i] for i in cut) == (text.encode() if cut else b"")
    if "<|" not in text:
        assert bool(cut) == bool(text)


def test_longer_tokens_are_those_that_begin_with_it(
    vocabulary: Vocabulary, tokenizer: Tokenizer, seed: int
) -> None:
    cutter = Cutter(tokenizer, vocabulary)
    rng = random.Random(f"{seed} longer")
    for token_id in rng.sample(range(5, vocabulary.size), 50):
        own = vocabulary.token_bytes[token_id]
        expected = {
            i
            for i, data in enumerate(vocabulary.token_bytes)
            if data.startswith(own) and len(data) > len(own)
        }
        assert set(cutter.longer(token_id).tolist()) == expected
