"""GrammarState: where one output is in its grammar. Made by Compilation.state, one per sequence.

The state is a function of the ids accepted so far: replaying them on a fresh state gives the same
masks, so a request can be resumed anywhere from its output ids alone. End tokens (EOS, stop ids)
are allowed where the text so far is complete, and nowhere else, whatever text they stand for.

A parser can run away: `((a{0,100}){0,100}){0,100}` compiles in a millisecond and takes seconds per
token after twenty. So every call is timed by its CPU; one that costs more than `token_cpu_s` breaks
the state (`error`), which fails its own request and no other. Calls are made in place while they
are cheap, and on a worker thread that is waited for with a deadline as soon as one was not: costs
grow from token to token, they do not jump from nothing. A call that raises breaks the state, too.

Engine thread, and the fill's thread between `begin_fill` and `Fill.result`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import xgrammar

from engine.errors import EngineError
from engine.grammar.config import GrammarLimits
from engine.grammar.errors import GrammarFailed, GrammarTooCostly
from engine.grammar.jump import Cutter
from engine.grammar.vocabulary import Vocabulary
from engine.grammar.workers import Workers

logger = logging.getLogger(__name__)

T = TypeVar("T")

_IN_PLACE_S = 0.001
"""CPU of the last call up to which the next is made on the caller's thread."""
_MOST_BYTES_PER_TOKEN = 16
"""How much forced text is cut for each token that a jump may have; four times a usual token's."""


@dataclass(frozen=True)
class Surroundings:
    """What all states of one service share."""

    vocabulary: Vocabulary
    limits: GrammarLimits
    workers: Workers
    cutter: Cutter | None
    """None: no jumps."""

    @property
    def spare_id(self) -> int:
        """The id beyond the model's that is the end token of a state that has no other."""
        return self.vocabulary.size

    @property
    def num_words(self) -> int:
        """int32 words of a mask, with the spare id."""
        return self.vocabulary.size // 32 + 1


class GrammarState:
    """See the module."""

    def __init__(
        self, matcher: Any, surroundings: Surroundings, end_token_ids: frozenset[int]
    ) -> None:
        """`matcher`: of the compiled grammar, with these end tokens (the spare id if none)."""
        self._matcher = matcher
        self._surroundings = surroundings
        self._end_token_ids = end_token_ids
        self._token_ids: list[int] = []
        self._has_ended = False
        self._cpu_s = 0.0
        self._is_going_on: int | None = None
        self._mask: torch.Tensor | None = None
        self.error: EngineError | None = None
        """Set once this grammar cost too much, or the library failed on it: nothing is allowed any
        more, the request must end with it."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The ids accepted so far: all that the state depends on."""
        return self._token_ids

    @property
    def is_complete(self) -> bool:
        """Nothing but an end may follow. False for a broken state."""
        if self._has_ended:
            return True
        if not self._try(lambda: self._matcher.is_completed()):
            return False
        # Most texts that are complete and may go on, may go on as they just did; looking is far
        # cheaper than a mask.
        for token_id in {self._is_going_on, *self._token_ids[-1:]} - {None}:
            if token_id is not None and self._can_follow(token_id):
                self._is_going_on = token_id
                return False
        mask = self._whole_mask()
        return mask is not None and not self._has_text(mask)

    def accept(self, token_id: int) -> bool:
        """Move on by one token. False: it is not allowed (or the state is broken); nothing
        changed."""
        if self.error is not None or self._has_ended:
            return False
        if token_id in self._end_token_ids:
            if not self._try(lambda: self._matcher.is_completed()):
                return False
            self._has_ended = True
        elif not self._move(token_id):
            return False
        self._token_ids.append(token_id)
        return True

    def forced_after(self, token_id: int) -> tuple[int, ...]:
        """What to publish instead of `token_id`, which was drawn and not accepted yet, because the
        grammar forces text after it: more than one token, each to be accepted. Empty: nothing.

        The text of the returned tokens begins with the token's own and is in the language as far as
        the token itself is. Changes nothing.
        """
        cutter = self._surroundings.cutter
        if cutter is None or token_id in self._end_token_ids or not self._move(token_id):
            return ()
        try:
            forced: bytes = self._run(lambda: _forced_text(self._matcher)) or b""
        finally:
            self._back(1)
        if not forced or self.error is not None:
            return ()
        text = self._surroundings.vocabulary.token_bytes[token_id] + forced
        most = self._surroundings.limits.max_num_forced_tokens
        head = _head(text, len(text) - len(forced) + most * _MOST_BYTES_PER_TOKEN)
        token_ids = cutter.cut(head)
        is_cut_short = len(token_ids) > most
        if len(head) < len(text) and not is_cut_short:
            token_ids, is_cut_short = token_ids[:-1], True  # the cut may lie inside the last one
        return self._checked(token_ids[:most], cutter, may_drop_last=not is_cut_short)

    def fork(self) -> GrammarState:
        """An independent state at the same place: another sample of the same prompt."""
        matcher = self._try(lambda: self._matcher.fork())
        other = GrammarState(matcher, self._surroundings, self._end_token_ids)
        other._token_ids = list(self._token_ids)
        other._has_ended = self._has_ended
        other._cpu_s = self._cpu_s
        other.error = self.error
        return other

    def rollback(self, num_tokens: int) -> None:
        """Take back the newest accepted tokens. Raises: ValueError for more than there are."""
        if not 0 <= num_tokens <= len(self._token_ids):
            raise ValueError(f"{num_tokens} of {len(self._token_ids)} tokens cannot be taken back")
        if num_tokens == 0:
            return
        del self._token_ids[-num_tokens:]
        self._back(num_tokens - self._has_ended)
        self._has_ended = False

    # -- for the fill

    def fill(self, rows: torch.Tensor, index: int) -> None:
        """Write the mask of what may follow to rows[index], [num_words] int32; zero if the state is
        broken. Times itself. Fill thread."""
        row = rows[index]
        if self.error is not None or self._has_ended:
            row.zero_()
            return
        if self._mask is not None:
            row.copy_(self._mask)
            return
        began = time.thread_time()
        self._try(lambda: self._matcher.fill_next_token_bitmask(rows, index))
        self._clear_spare(row)
        if time.thread_time() - began > self._surroundings.limits.token_cpu_s:
            self.break_off()
        if self.error is not None:
            row.zero_()

    def break_off(self) -> None:
        """Give up on it: the matcher may be in use by a thread that does not come back."""
        limits = self._surroundings.limits
        self.error = GrammarTooCostly(
            "grammar",
            f"token {len(self._token_ids)} of the output takes its parser more than "
            f"{limits.token_cpu_s:g} s; make it less ambiguous, or its repetitions less nested",
        )

    def fail(self, failure: Exception) -> None:
        """Give up on it: the library raised what nothing here expects."""
        logger.error("the grammar library failed", exc_info=failure)
        self.error = GrammarFailed(f"the grammar library failed: {failure!r}")

    # -- the matcher

    def _move(self, token_id: int) -> bool:
        """Accept one token with text."""
        vocabulary = self._surroundings.vocabulary
        if not (0 <= token_id < vocabulary.size and vocabulary.token_bytes[token_id]):
            return False
        if not self._run(lambda: bool(self._matcher.accept_token(token_id))):
            return False
        self._mask = None
        return True

    def _back(self, num_tokens: int) -> None:
        self._try(lambda: self._matcher.rollback(num_tokens))
        self._mask = None

    def _can_follow(self, token_id: int) -> bool:
        mask = self._mask
        if not self._move(token_id):
            return False
        self._back(1)
        self._mask = mask
        return self.error is None

    def _whole_mask(self) -> torch.Tensor | None:
        """[num_words] of the present place, kept for the next fill. None: broken."""
        if self._mask is None:
            rows = torch.empty(1, self._surroundings.num_words, dtype=torch.int32)
            if self._run(lambda: self._matcher.fill_next_token_bitmask(rows) is not None):
                self._clear_spare(rows[0])
                self._mask = rows[0]
        return self._mask

    def _clear_spare(self, row: torch.Tensor) -> None:
        """Nothing beyond the model's ids: the spare one, and bits that the library leaves set."""
        num_ids = self._surroundings.vocabulary.size
        row[num_ids // 32] &= (1 << (num_ids % 32)) - 1

    def _has_text(self, mask: torch.Tensor) -> bool:
        """Some token is allowed that is no end."""
        words = mask.numpy().copy()
        for token_id in self._end_token_ids:
            words[token_id // 32] &= np.int32(~np.int64(1 << (token_id % 32)).astype(np.int32))
        return bool(words.any())

    def _checked(
        self, token_ids: tuple[int, ...], cutter: Cutter, *, may_drop_last: bool
    ) -> tuple[int, ...]:
        """`token_ids` if the matcher takes all of them, without the last one where a longer token
        may stand in its place; empty if that leaves one or none. Changes nothing."""
        if len(token_ids) < 2 or self._end_token_ids.intersection(token_ids):
            return ()
        num_moved = 0
        try:
            for token_id in token_ids[:-1]:
                if not self._move(token_id):
                    return ()
                num_moved += 1
            last = token_ids[-1]
            mask = self._whole_mask() if may_drop_last else None
            if mask is not None and _any_set(mask, cutter.longer(last)):
                token_ids = token_ids[:-1]
            elif not self._can_follow(last):
                return ()
        finally:
            self._back(num_moved)
        return token_ids if len(token_ids) > 1 and self.error is None else ()

    def _try(self, call: Callable[[], T]) -> T | None:
        """Call the matcher for what is always cheap. None if the state is broken, or is now."""
        if self.error is not None:
            return None
        try:
            return call()
        except Exception as failure:
            self.fail(failure)
            return None

    def _run(self, call: Callable[[], T]) -> T | None:
        """Call the matcher, in time. None if the state is broken, or is now."""
        if self.error is not None:
            return None
        found: list[T] = []
        raised: list[Exception] = []

        def timed() -> None:
            began = time.thread_time()
            try:
                found.append(call())
            except Exception as error:
                raised.append(error)
            self._cpu_s = time.thread_time() - began

        if self._cpu_s <= _IN_PLACE_S:
            timed()
        else:
            task = self._surroundings.workers.submit(timed)
            if not task.wait(self._surroundings.limits.token_timeout_s):
                self._surroundings.workers.give_up(task)
                self.break_off()
                return None
        if raised:
            self.fail(raised[0])
            return None
        if self._cpu_s > self._surroundings.limits.token_cpu_s:
            self.break_off()
            return None
        return found[0]


def new_state(
    compiled: Any, surroundings: Surroundings, end_token_ids: frozenset[int]
) -> GrammarState:
    """At the beginning of the grammar. `end_token_ids` beyond the vocabulary are no tokens."""
    ends = frozenset(i for i in end_token_ids if 0 <= i < surroundings.vocabulary.size)
    stops = sorted(ends) or [surroundings.spare_id]
    matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=stops)
    return GrammarState(matcher, surroundings, ends)


def _forced_text(matcher: Any) -> bytes:
    """The text that must come; empty where it would begin or end inside a character."""
    try:
        text: str = matcher.find_jump_forward_string()
    except UnicodeDecodeError:
        return b""
    return text.encode()


def _head(text: bytes, most: int) -> bytes:
    """The first bytes, at most so many; a character is kept whole or left out."""
    if len(text) <= most:
        return text
    while most > 0 and text[most] & 0xC0 == 0x80:
        most -= 1
    return text[:most]


def _any_set(mask: torch.Tensor, token_ids: npt.NDArray[np.int64]) -> bool:
    """Whether any of these bits is set in a mask of int32 words."""
    words = mask.numpy()[token_ids // 32]
    return bool(((words >> (token_ids % 32)) & 1).any())
