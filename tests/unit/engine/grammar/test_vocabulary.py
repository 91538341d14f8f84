"""Bytes of tokens: what the tokenizer itself decodes, for the kinds of tokenizer that are taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.errors import InvalidRequest
from engine.grammar.vocabulary import Vocabulary
from tests.unit.engine.grammar.driver import VOCAB_SIZE
from tokens.tokenizer import Tokenizer, TokenKind


def test_the_bundled_tokenizer(vocabulary: Vocabulary, tokenizer: Tokenizer) -> None:
    assert vocabulary.size == VOCAB_SIZE
    for token_id, data in enumerate(vocabulary.token_bytes):
        if tokenizer.kind(token_id) == TokenKind.SPECIAL:
            assert data == b""
        else:
            assert data.decode(errors="replace") == tokenizer.decode([token_id])


def test_padding_has_no_bytes_and_a_smaller_model_cuts(bytes_only: Path) -> None:
    padded = Vocabulary.load(bytes_only, 300)
    assert padded.token_bytes[:256] == tuple(bytes([byte]) for byte in range(256))
    assert set(padded.token_bytes[256:]) == {b""}
    assert Vocabulary.load(bytes_only, 100).size == 100


def test_sentencepiece_with_byte_fallback(tmp_path: Path) -> None:
    pieces = ["<unk>", "<s>", "\u2581", "\u2581a", "b", "\u2581\u2581"]
    tokens = {token: index for index, token in enumerate(pieces)}
    tokens.update({f"<0x{byte:02X}>": len(pieces) + byte for byte in range(256)})
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=tokens, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>"])
    backend.add_tokens(["<think>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    found = Vocabulary.load(tmp_path, 300).token_bytes
    assert found[:6] == (b"", b"", b" ", b" a", b"b", b"  ")
    assert found[6:262] == tuple(bytes([byte]) for byte in range(256))
    assert found[262] == b"<think>"
    assert set(found[263:]) == {b""}


def test_metaspace_without_byte_tokens(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(
        models.Unigram([("<unk>", 0.0), ("\u2581a", -1.0), ("<0x41>", -2.0)], unk_id=0)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    assert Vocabulary.load(tmp_path, 3).token_bytes == (b"", b" a", b"<0x41>")


@pytest.mark.parametrize(
    ("decoder", "problem"),
    [
        (None, "joins with spaces"),
        (decoders.WordPiece(), "decoder WordPiece"),
        (decoders.BPEDecoder(), "decoder BPEDecoder"),
        (decoders.ByteFallback(), "joins with spaces"),
    ],
)
def test_a_tokenizer_whose_text_is_not_its_tokens_in_a_row_is_refused(
    tmp_path: Path, decoder: object, problem: str
) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidRequest, match=problem):
        Vocabulary.load(tmp_path, 1)


def test_a_missing_or_broken_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json cannot be read"):
        Vocabulary.load(tmp_path, 1)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"decoder": {"type": "ByteLevel"}}))
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json cannot be read"):
        Vocabulary.load(tmp_path, 1)
