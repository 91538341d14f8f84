"""GrammarState: the position of one output in its grammar. Created by Compilation.state, one per
sequence.

The state depends only on the tokens accepted so far: replaying them on a new state gives the same
masks, so that a request can be resumed anywhere from its output tokens alone. End tokens (EOS, stop
ids) are allowed where the text so far is complete, and nowhere else, whatever their text is. Where
the grammar allows one text only, the mask allows one token: the one with which the tokenizer would
continue; `forced` returns all of them at once.

The library bounds the work of every call (GrammarLimits). A call that reaches a bound breaks the
state (`error`), which fails its own request only. States of one CompiledGrammar share cached lexer
states under one lock, and the library holds Python's lock while it waits for that one. So while a
mask of the grammar is being filled, none of its states may be used (`is_busy`;
engine/grammar/mask_filler.py). Engine thread, and a fill thread from MaskFiller.submit until the
state `has_mask`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher

from engine.errors import EngineError
from engine.grammar.compile_server import first_line, is_limit
from engine.grammar.config import GrammarLimits
from engine.grammar.errors import GrammarFailed, GrammarTooCostly
from engine.grammar.vocabulary import GrammarTokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_BYTES_PER_TOKEN = 16
"""Number of bytes of forced text that are tokenized for each token that may be added at once; four
times a usual token's."""


class CompiledGrammar:
    """A compiled grammar, and what its states share."""

    def __init__(
        self, matcher: LLMatcher, tokenizer: GrammarTokenizer, limits: GrammarLimits
    ) -> None:
        """Create it from a matcher at the beginning of the grammar, which is only copied."""
        self._matcher = matcher
        self.tokenizer = tokenizer
        self.limits = limits
        self.num_states = 0
        """Number of states created."""
        self.num_filling = 0
        """Number of masks of the grammar that threads are filling, maintained by MaskFiller."""
        self.is_broken = False
        """Whether the library failed on the grammar, so that it must be compiled again."""

    def state(self, end_token_ids: frozenset[int]) -> GrammarState:
        """Create a state at the beginning. Ids in `end_token_ids` beyond the vocabulary are
        ignored."""
        self.num_states += 1
        size = self.tokenizer.vocabulary.size
        ends = frozenset(i for i in end_token_ids if 0 <= i < size)
        return GrammarState(self, self._matcher.deep_copy(), ends)


class GrammarState:
    """The position of one output in its grammar."""

    def __init__(
        self, grammar: CompiledGrammar, matcher: LLMatcher, end_token_ids: frozenset[int]
    ) -> None:
        self.grammar = grammar
        self._matcher = matcher
        self._tokens = grammar.tokenizer.vocabulary.token_bytes
        self._end_token_ids = end_token_ids
        self._token_ids: list[int] = []
        self._has_ended = False
        self._mask: npt.NDArray[np.int32] | None = None
        self.is_filling = False
        """Whether a thread is filling its mask. Set and cleared by MaskFiller."""
        self.error: EngineError | None = None
        """The error of an output that cost too much, or on which the library failed: no token is
        allowed any more, and the request must end with it."""

    @property
    def is_busy(self) -> bool:
        """Whether a thread is filling a mask of its grammar, so that the state must not be used."""
        return self.grammar.num_filling > 0

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens accepted so far, on which alone the state depends."""
        return self._token_ids

    @property
    def is_complete(self) -> bool:
        """Whether only an end may follow. False for a broken state."""
        if self._has_ended or self.error is not None:
            return self._has_ended
        if self._matcher.is_stopped():
            return not self._matcher.is_error()
        may_be = not self._token_ids or any(self._tokens[i] for i in self._end_token_ids)
        if not may_be or not self._try(self._matcher.is_accepting):
            return False
        mask = self.mask().copy()
        _clear(mask, self._end_token_ids)
        return self.error is None and not mask.any()

    def accept(self, token_id: int) -> bool:
        """Advance by one token. Returns: False if it is not allowed (or the state is broken);
        nothing changes then."""
        if self.error is not None or self._has_ended:
            return False
        if token_id in self._end_token_ids:
            if not self._try(self._matcher.is_accepting):
                return False
            self._has_ended = True
        elif not self._move([token_id]):
            return False
        self._token_ids.append(token_id)
        self._mask = None
        return True

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that must come next, each the only one that its mask would allow.
        Changes nothing."""
        if self.error is not None or self._has_ended:
            return ()
        token_ids = self._try(self._matcher.compute_ff_tokens) or []
        for index, token_id in enumerate(token_ids):
            if token_id in self._end_token_ids or not self._is_text(token_id):
                token_ids = token_ids[:index]  # its mask is empty
                break
        return tuple(token_ids[: self.grammar.limits.max_num_forced_tokens])

    def retokenized(self, token_id: int) -> tuple[int, ...]:
        """Return the tokens that replace `token_id`, which was sampled and not accepted yet, if the
        grammar forces text after it: both texts as the tokenizer splits them together, each
        token to be accepted; empty if there is no forced text. Changes nothing.

        The last token is left to the model, since the text after the forced one may be a part of
        it.
        """
        if token_id in self._end_token_ids or self.error is not None:
            return ()
        if not self._is_text(token_id) or not self._try(
            lambda: self._matcher.validate_tokens([token_id])
        ):
            return ()
        ahead = self._matcher.deep_copy()
        ahead.consume_token(token_id)
        if not ahead.compute_ff_tokens():
            return ()  # also where nothing may be forced: the bytes would be followed for ever
        forced = ahead.compute_ff_bytes()
        most = self.grammar.limits.max_num_forced_tokens
        own = self._tokens[token_id]
        text = (own + forced)[: len(own) + most * _MOST_BYTES_PER_TOKEN].decode(errors="ignore")
        if ahead.is_error() or not forced or not text.encode().startswith(own):
            return ()
        cut = self.grammar.tokenizer.text.cut(text)
        token_ids = tuple(cut if ahead.is_stopped() else cut[:-1])[:most]
        is_new = len(token_ids) > 1 and not self._end_token_ids.intersection(token_ids)
        if is_new and self._try(lambda: self._matcher.validate_tokens(list(token_ids))) == len(
            token_ids
        ):
            return token_ids
        return ()

    def fork(self) -> GrammarState:
        """Create an independent state at the same position, for another sample of the same prompt,
        or for a draft token."""
        other = GrammarState(self.grammar, self._matcher.deep_copy(), self._end_token_ids)
        other._token_ids = list(self._token_ids)
        other._has_ended = self._has_ended
        other._mask = self._mask
        other.error = self.error
        return other

    # -- masks

    @property
    def has_mask(self) -> bool:
        """Whether `mask` is filled already."""
        return self._mask is not None

    def mask(self) -> npt.NDArray[np.int32]:
        """Return the tokens that may come next, [ceil(V / 32)] int32, bit i of word w set for token
        32 * w + i; all zero if no token may, or if the state is broken. Computed once for each
        position. Any one thread."""
        if self._mask is None:
            self._mask = self._made_mask()
        return self._mask

    def _made_mask(self) -> npt.NDArray[np.int32]:
        size = self.grammar.tokenizer.vocabulary.size
        words = np.zeros(size // 32 + 1, dtype=np.int32)
        if self.error is None and not self._has_ended:
            self._try(
                lambda: self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
            )
            if self.error is not None or self._matcher.is_error():
                words[:] = 0
            may_end = bool(words[size // 32] & _bit(size))
            words[size // 32] &= (1 << (size % 32)) - 1  # nothing beyond the model's ids
            _clear(words, self._end_token_ids)
            if may_end:
                for token_id in self._end_token_ids:
                    words[token_id // 32] |= _bit(token_id)
        return words[: (size + 31) // 32]

    # -- the matcher

    def _is_text(self, token_id: int) -> bool:
        return 0 <= token_id < len(self._tokens) and bool(self._tokens[token_id])

    def _move(self, token_ids: list[int]) -> bool:
        """Advance by tokens that have text. Returns: whether all are allowed."""
        if not all(map(self._is_text, token_ids)):
            return False
        return self._try(lambda: self._matcher.try_consume_tokens(token_ids)) == len(token_ids)

    def _try(self, call: Callable[[], T]) -> T | None:
        """Call the matcher. Returns: None if the state is broken, or the call breaks it."""
        if self.error is not None:
            return None
        began = time.thread_time()
        try:
            found = call()
        except Exception as failure:
            self.fail(repr(failure))
            return None
        cost = time.thread_time() - began
        if cost > self.grammar.limits.token_cpu_s:
            self._break(f"{cost:.2f} s, the limit is {self.grammar.limits.token_cpu_s:g} s")
            return None
        if self._matcher.is_error() and not self._is_dead_end():
            message = first_line(self._matcher.get_error())
            if is_limit(message):
                self._break(message)
            else:
                self.fail(message)
            return None
        return found

    def _is_dead_end(self) -> bool:
        """Whether neither a token nor an end may come; sampling then reports the error."""
        return bool(self._matcher.get_error().startswith("NoExtensionBias"))

    def _break(self, problem: str) -> None:
        """Break the state because it costs too much. Limits of the lexer hold for all states of the
        grammar from then on, so that the next request compiles it again."""
        self.grammar.is_broken = True
        self.error = GrammarTooCostly(
            "grammar",
            f"token {len(self._token_ids)} of the output costs its parser too much ({problem}); "
            "make it less ambiguous, or its repetitions smaller",
        )

    def fail(self, problem: str) -> None:
        """Break the state because the library failed unexpectedly."""
        logger.error("the grammar library failed: %s", problem)
        self.grammar.is_broken = True
        self.error = GrammarFailed(f"the grammar library failed: {problem}")


def mask_matrix(rows: Sequence[GrammarState | None], size: int) -> torch.Tensor:
    """Collect the masks of states that have them, [R, ceil(V / 32)] int32; all ones in a row of
    None."""
    found = np.full((len(rows), (size + 31) // 32), -1, dtype=np.int32)
    for index, state in enumerate(rows):
        if state is not None:
            found[index] = state.mask()
    return torch.from_numpy(found)


def _bit(token_id: int) -> np.int32:
    return np.uint32(1 << (token_id % 32)).view(np.int32)


def _clear(words: npt.NDArray[np.int32], token_ids: frozenset[int]) -> None:
    for token_id in token_ids:
        words[token_id // 32] &= ~_bit(token_id)
