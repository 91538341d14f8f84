"""The tokenizer reads what checkpoints hold, and says in one line what a broken one lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from tests.harness.small_tokenizers import KINDS, TEXTS, byte_fallback, byte_level
from tokens.errors import TokenizerError
from tokens.tokenizer import Tokenizer, TokenKind


def _save(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer._backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace"])
@pytest.mark.parametrize("text", TEXTS)
def test_encodes_and_decodes_as_transformers_does(kind: str, text: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(_save(KINDS[kind], tmp_path))
    reference = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == reference.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def test_a_saved_truncation_does_not_cut_prompts(tmp_path: Path) -> None:
    """Training scripts leave truncation and padding in tokenizer.json."""
    backend = byte_level()._backend
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.load(tmp_path).encode("abcdefghij")) == 10


def test_kinds() -> None:
    tokenizer = byte_fallback()
    byte_token, text_token = tokenizer.find_token_id("<0xE4>"), tokenizer.find_token_id("▁he")
    assert byte_token is not None and tokenizer.kind(byte_token) == TokenKind.BYTE
    assert text_token is not None and tokenizer.kind(text_token) == TokenKind.TEXT
    assert tokenizer.kind(2) == TokenKind.SPECIAL
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.kind(tokenizer.vocab_size) == TokenKind.UNKNOWN
    assert tokenizer.find_token_id("no such token") is None


def test_byte_tokens_are_plain_text_without_the_byte_fallback_decoder() -> None:
    tokenizer = byte_level()
    tokenizer._backend.add_tokens(["<0xE4>"])
    again = Tokenizer(tokenizer._backend)
    token_id = again.find_token_id("<0xE4>")
    assert token_id is not None and again.kind(token_id) == TokenKind.TEXT


def test_ids_beyond_the_vocabulary_have_no_text() -> None:
    """A model's vocabulary is often padded beyond the tokenizer's; such an id may be drawn."""
    tokenizer = byte_level()
    assert tokenizer.decode([tokenizer.vocab_size + 7]) == ""


def test_a_missing_file_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe", b'{"model": 3}'])
def test_a_broken_file_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: "):
        Tokenizer.load(tmp_path)


def test_a_decoder_that_takes_text_back_is_refused(tmp_path: Path) -> None:
    """CTC merges repeats: text that was shown could vanish with the next token."""
    backend = byte_level()._backend
    backend.decoder = decoders.CTC()
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(backend.to_str())))
    with pytest.raises(TokenizerError, match="CTC cannot be streamed"):
        Tokenizer.load(tmp_path)
