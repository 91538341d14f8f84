"""A checkpoint's tokenizer: text to ids, ids to text, and what kind of token an id is.

Reads `tokenizer.json` alone, so it runs without torch and without transformers. Does NOT know chat
templates (`chat_template`) or streams of ids (`detokenizer`). Immutable once loaded; any thread may
call it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import tokenizers

from tokens.errors import TokenizerError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")

# Decoders for which text only grows when a token is appended; the detokenizer's proof leans on
# that.
_STREAMABLE_DECODERS = frozenset(
    {
        "BPEDecoder",
        "ByteFallback",
        "ByteLevel",
        "Fuse",
        "Metaspace",
        "Replace",
        "Sequence",
        "Strip",
        "WordPiece",
    }
)


class TokenKind(IntEnum):
    """What an id means for text."""

    UNKNOWN = 0
    """Not in the tokenizer (a model's vocabulary may be padded): no text."""
    TEXT = 1
    SPECIAL = 2
    """A control token such as end-of-text: text only if asked for."""
    BYTE = 3
    """One byte of a character that has no token (byte fallback); a run of them is decoded as a
    whole.
    """


_KINDS = tuple(TokenKind)
"""By number: for every token of every answer one is looked up."""


class Tokenizer:
    """Encode and decode with one checkpoint's `tokenizer.json`."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        # A file may carry the settings of somebody's training run; a silently cut prompt would be
        # wrong.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._kinds, self.is_byte_level = _kinds_of(backend)
        self._added = frozenset(backend.get_added_tokens_decoder())
        self.special_token_ids = frozenset(
            token_id for token_id, kind in enumerate(self._kinds) if kind == TokenKind.SPECIAL
        )

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read `folder/tokenizer.json`.

        Raises: TokenizerError naming the file, what is wrong with it, and the fix.
        """
        file = folder / "tokenizer.json"
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise TokenizerError(
                f"{folder}: no tokenizer.json; save the tokenizer in the fast format"
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{file}: cannot be read: {error}") from error
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception for whatever is wrong
            raise TokenizerError(
                f"{file}: broken tokenizer: {error}; fetch the checkpoint again"
            ) from error
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that has a token. A model's own vocabulary may be larger
        (padding).
        """
        return len(self._kinds)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` also those the tokenizer puts around a
        prompt (BOS).
        """
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids` as a whole; ids without a token add nothing; bytes that are no UTF-8
        become U+FFFD.
        """
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def kind(self, token_id: int) -> TokenKind:
        """What `token_id` means for text."""
        if 0 <= token_id < len(self._kinds):
            return _KINDS[self._kinds[token_id]]
        return TokenKind.UNKNOWN

    def is_added(self, token_id: int) -> bool:
        """Whether the token was added to the vocabulary, so that it is spelled as its text is."""
        return token_id in self._added

    def find_token(self, token_id: int) -> str | None:
        """How the token is spelled in the vocabulary, or None."""
        return self._backend.id_to_token(token_id)

    def find_token_id(self, token: str) -> int | None:
        """Id of the token spelled exactly so, or None."""
        return self._backend.token_to_id(token)


def _kinds_of(backend: tokenizers.Tokenizer) -> tuple[bytes, bool]:
    """One TokenKind per id, and whether the vocabulary spells bytes as characters of their own.

    Raises: TokenizerError for a decoder whose text does not just grow.
    """
    decoder: Mapping[str, Any] | None = json.loads(backend.to_str()).get("decoder")
    types = set(_decoder_types(decoder))
    if not types <= _STREAMABLE_DECODERS:
        odd = ", ".join(sorted(types - _STREAMABLE_DECODERS))
        raise TokenizerError(f"tokenizer.json: decoder {odd} cannot be streamed")
    vocabulary = backend.get_vocab(with_added_tokens=True)
    kinds = bytearray(max(vocabulary.values(), default=-1) + 1)
    has_byte_tokens = "ByteFallback" in types
    for token, token_id in vocabulary.items():
        is_byte = has_byte_tokens and _BYTE_TOKEN.fullmatch(token) is not None
        kinds[token_id] = TokenKind.BYTE if is_byte else TokenKind.TEXT
    for token_id, added in backend.get_added_tokens_decoder().items():
        if added.special:
            kinds[token_id] = TokenKind.SPECIAL
    return bytes(kinds), "ByteLevel" in types


def _decoder_types(decoder: Mapping[str, Any] | None) -> Iterator[str]:
    if decoder is None:
        return
    yield decoder["type"]
    for inner in decoder.get("decoders", ()):
        yield from _decoder_types(inner)
