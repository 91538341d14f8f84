"""The bytes of each token id, read from the checkpoint's tokenizer.json, and the same vocabulary as
llguidance takes it: what grammar masks are made of.

Read from the file itself and not through transformers: the file says exactly how ids become text
(model, added tokens, decoder), needs no model code, and is what engine, router and client decode
with. Taken are decoders under which text is the tokens' bytes one after the other: byte-level BPE,
and sentencepiece-like ones (U+2581 for a space, <0xNN> for a byte where ByteFallback is among the
decoders). Others (WordPiece, no decoder at all: text is joined with spaces) are refused by name.

An id has no bytes, and so is never allowed inside text, if it is special, the unknown token, or
padding: the model's vocabulary may be larger than the tokenizer's. Immutable; any thread.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from llguidance import LLTokenizer

from engine.grammar.errors import refuse
from tokens.errors import TokenizerError
from tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import TokenizerWrapper

logger = logging.getLogger(__name__)

_SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

# Tokens whose masks are known at once where a grammar allows all texts of such characters, beside
# the library's own: names in emails and addresses.
_SLICES = ("[a-zA-Z0-9]{1,10}", "[a-zA-Z0-9]{1,30}")

# A tokenizer of sentencepiece's kind puts a space before a text, but not after an anchor.
_ANCHORS = ("", "\n", "a")


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of each token id: `token_bytes[id]`, b"" for an id that is not part of text. Its
    length is the model's vocabulary size."""

    token_bytes: tuple[bytes, ...]

    @property
    def size(self) -> int:
        """Number of the model's token ids."""
        return len(self.token_bytes)

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> Vocabulary:
        """Read `folder/tokenizer.json`, for a model of `vocab_size` ids. Raises: InvalidRequest
        with the reason if grammars cannot be used with this tokenizer."""
        try:
            parsed = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
            return cls(_token_bytes(parsed, vocab_size))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise refuse(f"the model's tokenizer.json cannot be read: {error!r}") from error


class TextTokenizer:
    """Splits text inside an output into tokens with the checkpoint's tokenizer, without the special
    tokens that it adds to a prompt. It is also the wrapper that `LLTokenizer` needs.

    Text that the tokenizer does not reproduce byte for byte (it normalises, or finds a special
    token), or on which it fails, is split greedily, longest token first. Any thread.
    """

    is_tokenizer_wrapper = True
    eos_token_id = None
    """Always None: LLTokenizer then appends an id of its own, `Vocabulary.size`, for the end of
    every grammar."""
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self.tokens = vocabulary.token_bytes
        self.special_token_ids = [i for i, data in enumerate(self.tokens) if not data]
        self._id_of = {data: token_id for token_id, data in enumerate(self.tokens) if data}
        self._max_num_bytes = max(map(len, self._id_of), default=1)
        self._has_failed = False
        self._anchors = [
            (anchor, tokenizer.encode(anchor, add_special_tokens=False) if anchor else [])
            for anchor in _ANCHORS
        ]

    def __call__(self, text: str) -> list[int]:
        """Return the token ids of `text`, for llguidance; from a byte that no token contains on,
        text is left out."""
        return self.cut(text) or self._greedy(text.encode())

    def cut(self, text: str) -> list[int]:
        """Return the token ids of `text` from the tokenizer; empty if their bytes are not the
        text's, or if the tokenizer fails (logged once)."""
        data = text.encode()
        try:
            for anchor, before in self._anchors:
                token_ids = self._tokenizer.encode(anchor + text, add_special_tokens=False)
                if token_ids[: len(before)] == before:
                    rest = token_ids[len(before) :]
                    if self._bytes(rest) == data:
                        return rest
        except Exception:
            if not self._has_failed:
                logger.exception("the tokenizer failed on text that a grammar forces")
            self._has_failed = True
        return []

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(self.tokens[i] if i < len(self.tokens) else b"" for i in token_ids)

    def _greedy(self, data: bytes) -> list[int]:
        found: list[int] = []
        start = 0
        while start < len(data):
            for end in range(min(len(data), start + self._max_num_bytes), start, -1):
                token_id = self._id_of.get(data[start:end])
                if token_id is not None:
                    found.append(token_id)
                    start = end
                    break
            else:
                return found
        return found


@dataclass(frozen=True)
class GrammarTokenizer:
    """A vocabulary in llguidance's form. Immutable; any thread."""

    vocabulary: Vocabulary
    text: TextTokenizer
    library: LLTokenizer
    """llguidance's tokenizer, with one id more than the model, `vocabulary.size`, for the end of
    every grammar."""

    @classmethod
    def load(cls, folder: Path, vocab_size: int) -> GrammarTokenizer:
        """Read `folder/tokenizer.json`, for a model of `vocab_size` ids, which takes a second for
        150,000 ids. Raises: InvalidRequest with the reason if grammars cannot be used with this
        tokenizer."""
        vocabulary = Vocabulary.load(folder, vocab_size)
        try:
            return cls.of(vocabulary, Tokenizer.load(folder))
        except TokenizerError as error:
            raise refuse(str(error)) from error

    @classmethod
    def of(cls, vocabulary: Vocabulary, tokenizer: Tokenizer) -> GrammarTokenizer:
        """Create it from a vocabulary and the tokenizer that splits text."""
        text = TextTokenizer(tokenizer, vocabulary)
        first, *others = LLTokenizer.general_slices()
        slices = [first, *_SLICES, *others]
        library = LLTokenizer(cast("TokenizerWrapper", text), slices=slices)
        return cls(vocabulary, text, library)


def _token_bytes(parsed: Mapping[str, Any], vocab_size: int) -> tuple[bytes, ...]:
    decoders = list(_decoders(parsed.get("decoder")))
    kinds = {decoder["type"] for decoder in decoders}
    is_byte_level = kinds == {"ByteLevel"}
    if not is_byte_level:
        _check_sentencepiece(decoders)
    model = parsed["model"]
    found: list[bytes] = [b""] * vocab_size
    unknown = model.get("unk_token")
    if unknown is None and isinstance(model.get("unk_id"), int):
        unknown = model["vocab"][model["unk_id"]][0]
    for token, token_id in _tokens(model["vocab"]):
        if token_id < vocab_size and token != unknown:
            if is_byte_level:
                found[token_id] = _byte_level(token)
            else:
                found[token_id] = _sentencepiece(token, "ByteFallback" in kinds)
    for added in parsed.get("added_tokens", ()):
        if added["id"] < vocab_size:
            hidden = added["special"] or added["content"] == unknown
            text = added["content"]
            if not is_byte_level:
                text = text.replace(_SPACE_MARK, " ")
            found[added["id"]] = b"" if hidden else text.encode()
    return tuple(found)


def _tokens(vocab: Mapping[str, int] | Sequence[Sequence[Any]]) -> Iterator[tuple[str, int]]:
    if isinstance(vocab, Mapping):
        yield from vocab.items()
    else:  # Unigram: [[token, score], ...]
        yield from ((entry[0], token_id) for token_id, entry in enumerate(vocab))


def _decoders(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for inner in decoder["decoders"]:
            yield from _decoders(inner)
    else:
        yield decoder


def _check_sentencepiece(decoders: list[Mapping[str, Any]]) -> None:
    """Check a sentencepiece decoder. Raises: InvalidRequest for one that does not simply join the
    tokens' texts."""
    has_spaces = False
    for decoder in decoders:
        kind = decoder["type"]
        if kind == "Metaspace" and decoder["replacement"] == _SPACE_MARK:
            has_spaces = True
        elif kind == "Replace" and decoder["pattern"] == {"String": _SPACE_MARK}:
            has_spaces = decoder["content"] == " "
        elif kind == "Strip" and decoder["content"] == " " and decoder["stop"] == 0:
            pass  # of a text's first space: an output goes on from its prompt
        elif kind not in ("ByteFallback", "Fuse"):
            raise refuse(f"not supported with the model's tokenizer (decoder {kind})")
    if not has_spaces:
        raise refuse("not supported with the model's tokenizer (its decoder joins with spaces)")


def _sentencepiece(token: str, has_byte_tokens: bool) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token) if has_byte_tokens else None
    if byte is not None:
        return bytes([int(byte.group(1), 16)])
    return token.replace(_SPACE_MARK, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary (GPT-2's): printable bytes are
    themselves, others are characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    if all(character in _BYTE_OF for character in token):
        return bytes(_BYTE_OF[character] for character in token)
    return token.encode()
