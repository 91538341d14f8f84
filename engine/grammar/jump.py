"""Forced text cut into tokens: what a jump over it puts in place of the token just drawn.

Where the grammar allows one text only, the model need not be asked. The token just drawn is not
published yet, so it and the forced text after it are cut anew, together: the seam between them then
has the tokens that the tokenizer itself would make, which is what the model knows (a token drawn
before it knew that `{` is followed by `"name"` would else force an odd cut). Tokens before it are
published and stay.

The last token is left to the model if a longer one that begins with it is allowed in its place: the
text after the forced one may belong into it.

Immutable but for the tokenizer's own caches and what was logged; any thread.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.grammar.vocabulary import Vocabulary
from tokens.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Tokenizers of sentencepiece's kind put a space before a text: what follows an anchor has none.
_ANCHORS = ("", "\n", "a")


class Cutter:
    """Text to tokens inside an output, for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
        self._tokenizer = tokenizer
        self._has_failed = False
        self._bytes = vocabulary.token_bytes
        order = sorted(range(vocabulary.size), key=self._bytes.__getitem__)
        self._order = np.array(order, dtype=np.int64)
        self._sorted = [self._bytes[token_id] for token_id in order]
        self._anchors = [
            (anchor, tokenizer.encode(anchor, add_special_tokens=False) if anchor else [])
            for anchor in _ANCHORS
        ]

    def cut(self, data: bytes) -> tuple[int, ...]:
        """Tokens whose bytes are `data`, as the tokenizer cuts it; empty if `data` is no whole
        UTF-8 text, or is a text that the tokenizer does not give back, or fails on (logged once):
        a jump is never needed."""
        try:
            return self._cut(data, data.decode())
        except UnicodeDecodeError:
            return ()
        except Exception:
            if not self._has_failed:
                logger.exception("the tokenizer failed on forced text: no jump")
            self._has_failed = True
            return ()

    def _cut(self, data: bytes, text: str) -> tuple[int, ...]:
        for anchor, before in self._anchors:
            token_ids = self._tokenizer.encode(anchor + text, add_special_tokens=False)
            if token_ids[: len(before)] == before:
                rest = token_ids[len(before) :]
                if self._text(rest) == data:
                    return tuple(rest)
        return ()

    def longer(self, token_id: int) -> npt.NDArray[np.int64]:
        """Ids of tokens whose bytes begin with this one's and go on. O(log vocabulary)."""
        prefix = self._bytes[token_id]
        first = bisect.bisect_right(self._sorted, prefix)
        # No byte string with this prefix is above it filled up with the highest byte.
        last = bisect.bisect_left(
            self._sorted, True, lo=first, key=lambda other: not other.startswith(prefix)
        )
        return self._order[first:last]

    def _text(self, token_ids: Sequence[int]) -> bytes | None:
        pieces = [
            self._bytes[token_id] if token_id < len(self._bytes) else b"" for token_id in token_ids
        ]
        return b"".join(pieces) if all(pieces) else None
