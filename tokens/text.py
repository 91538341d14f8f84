"""One answer's visible text: ids in, text and the ids it accounts for out. Detokenizer and stop
strings, joined.

An id is accounted for once all of its text is visible, so ids never run ahead of text. A stop
string ends the answer at the token that completed it: that token counts, whatever came after it is
overshoot, neither shown nor counted.

Used where text is made: by the router, and by whoever runs an engine in process. It does NOT decide
on EOS, stop ids or length (the engine does); its caller says so. Life: feed*, then finish once; or
a stop string, after which all is ignored. One thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from tokens.detokenizer import Detokenizer
from tokens.stop_strings import StopStrings
from tokens.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What became visible, the ids it accounts for in their order, and the stop string that ended
    the answer.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    stop_string: str | None = None


class OutputText:
    """Visible text of one sequence of output ids."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_text: bool = False,
        tool_call_ends: Sequence[str] = (),
        skip_special_tokens: bool = True,
        context_ids: Sequence[int] = (),
    ) -> None:
        """`context_ids`: end of the prompt that the text continues; see `Detokenizer`.

        `tool_call_ends`: strings that end the answer like those of `stop`, and stay visible.
        """
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=skip_special_tokens, context_ids=context_ids
        )
        self._stops = StopStrings(
            (*stop, *tool_call_ends),
            include_stop_text=include_stop_text,
            visible=tool_call_ends,
        )
        self._include_stop_text = include_stop_text
        # Ids whose text is not all visible. `_ends` has the text position at which the first of
        # them are: the rest still waits for the detokenizer.
        self._pending: deque[int] = deque()
        self._ends: deque[int] = deque()
        self._num_text_chars = 0
        self._num_visible_chars = 0
        self._num_tokens = 0
        self._is_over = False

    @property
    def num_tokens(self) -> int:
        """Output tokens accounted for so far; after the end, all that count."""
        return self._num_tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return self._stops.found

    def feed(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> TextDelta:
        """Take the next output ids.

        Args:
            ends_with_stop_token: the last id ended the answer (EOS or a stop id): it counts, but
            its text is not shown
                unless stop text was asked for.
        """
        text: list[str] = []
        shown: list[int] = []
        for position, token_id in enumerate(token_ids):
            if self._is_over:
                break
            hidden = ends_with_stop_token and position == len(token_ids) - 1
            self._pending.append(token_id)
            if hidden and not self._include_stop_text:
                break  # it waits for `finish`
            self._take(self._detokenizer.feed((token_id,)), text, shown)
        return TextDelta("".join(text), tuple(shown), self._stops.found if shown else None)

    def finish(self) -> TextDelta:
        """No more ids will come: all that was held back, which may complete a stop string after
        all.
        """
        if self._is_over:
            return TextDelta()
        text: list[str] = []
        shown: list[int] = []
        self._take(self._detokenizer.finish(), text, shown)
        if not self._is_over:
            text.append(self._stops.finish())
            self._account_for_all(shown)
        return TextDelta("".join(text), tuple(shown), self._stops.found)

    def _take(self, fresh: str, text: list[str], shown: list[int]) -> None:
        self._num_text_chars += len(fresh)
        if not self._detokenizer.is_holding:
            settled = len(self._pending)
        else:
            # Text came although something is held: what is held belongs to the newest token.
            settled = len(self._pending) - 1 if fresh else len(self._ends)
        self._ends.extend([self._num_text_chars] * (settled - len(self._ends)))
        match = self._stops.feed(fresh)
        text.append(match.text)
        self._num_visible_chars += len(match.text)
        if match.stop is not None:
            self._account_for_all(shown)
            return
        while self._ends and self._ends[0] <= self._num_visible_chars:
            self._ends.popleft()
            shown.append(self._pending.popleft())
            self._num_tokens += 1

    def _account_for_all(self, shown: list[int]) -> None:
        shown.extend(self._pending)
        self._num_tokens += len(self._pending)
        self._pending.clear()
        self._ends.clear()
        self._is_over = True
