"""Token ids to text as they come: any split of the ids gives the same text as decoding all of them
at once.

What makes that hard is that text does not belong to one token: a character may span several
(byte-level BPE, byte fallback), and some decoders treat the first token of a sequence specially
(they drop its leading space). So a short window of the last tokens is decoded each time, and only
what is new in its text is given out.

Held back: a trailing U+FFFD (it may be a character whose bytes are not all there), and a run of
byte-fallback tokens until it ends (the library decodes such a run as a whole: one wrong byte makes
all of it U+FFFD).

Does NOT know stop strings (`stop_strings`). Invariant: text given out == decode(all ids so far),
less what is held back.
Cost: O(window) per token, whatever the length. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokens.tokenizer import Tokenizer, TokenKind

_REPLACEMENT = "\ufffd"
# An incomplete character has at most 3 bytes, so at most 3 tokens; 2 more for context. Derived.
_KEPT_TOKENS = 5
_MAX_WINDOW_TOKENS = 10


class Detokenizer:
    """One sequence's ids to text, incrementally."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        context_ids: Sequence[int] = (),
    ) -> None:
        """`context_ids`: tokens before the first one (the end of a prompt that the text continues),
        never given out.

        With context, text is decode(context + ids) after decode(context), so a word-initial space
        survives.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = [i for i in context_ids[-_KEPT_TOKENS:] if self._has_text(i)]
        text = self._decode(self._window)
        if text.endswith(_REPLACEMENT) or self._ends_in_byte_run():
            # The prompt ends inside a character: what completes it is no continuation one could
            # show.
            self._window, text = [], ""
        self._num_shown_chars = len(text)
        self._is_holding = False

    @property
    def is_holding(self) -> bool:
        """Whether some token fed so far has text that was not given out yet."""
        return self._is_holding

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take the next ids; returns the text that is final now."""
        new = [token_id for token_id in token_ids if self._has_text(token_id)]
        if not new:
            return ""
        self._window += new
        if self._ends_in_byte_run():
            self._is_holding = True
            return ""
        text = self._decode(self._window)
        # More than one trailing U+FFFD: all but the last are final, for an incomplete character
        # shows as one.
        self._is_holding = text.endswith(_REPLACEMENT)
        end = max(self._num_shown_chars, len(text) - self._is_holding)
        fresh = text[self._num_shown_chars : end]
        self._num_shown_chars = end
        self._trim()
        return fresh

    def finish(self) -> str:
        """No more ids will come; returns what was held back."""
        if not self._is_holding:
            return ""
        text = self._decode(self._window)
        fresh = text[self._num_shown_chars :]
        self._num_shown_chars = len(text)
        self._is_holding = False
        return fresh

    def _trim(self) -> None:
        """Drop tokens that the text of later ones cannot depend on any more."""
        if len(self._window) <= _MAX_WINDOW_TOKENS:
            return
        # Empty text would let a decoder that strips leading spaces strip the next token's as well.
        for start in range(len(self._window) - _KEPT_TOKENS, 0, -1):
            text = self._decode(self._window[start:])
            if text:
                self._window = self._window[start:]
                self._num_shown_chars = len(text) - self._is_holding
                return

    def _has_text(self, token_id: int) -> bool:
        # What the library would leave out never enters the window, so that the window holds context
        # only.
        kind = self._tokenizer.kind(token_id)
        if kind == TokenKind.SPECIAL:
            return not self._skip_special_tokens
        return kind != TokenKind.UNKNOWN

    def _ends_in_byte_run(self) -> bool:
        return bool(self._window) and self._tokenizer.kind(self._window[-1]) == TokenKind.BYTE

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
