"""TokenHistory: the tokens of one sequence as penalties and bans need them, updated token by token,
so that a step's cost does not grow with the length of the sequence.

It is built from prompt and output ids alone, so that a sequence that is resumed on another worker
has the same history. Prompt and output are kept apart, because presence and frequency penalties
count the output only.

It knows no logits, and of the parameters only which are active. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.request import Sampling


def needs_history(sampling: Sampling) -> bool:
    """Return whether the sampling of a row depends on which tokens come before it."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or sampling.no_repeat_ngram > 0
        or any(len(word) > 1 for word in sampling.bad_words)
    )


class TokenHistory:
    """The tokens of one sequence, counted and indexed as the active parameters need.

    Args: prompt_token_ids, output_token_ids: all tokens of the sequence so far, each a valid id.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
    ) -> None:
        tokens = [*prompt_token_ids, *output_token_ids]
        counts_output = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self._seen = _Counter(tokens) if sampling.repetition_penalty != 1.0 else None
        self._output = _Counter(output_token_ids) if counts_output else None
        words = tuple(dict.fromkeys(word for word in sampling.bad_words if len(word) > 1))
        self._bad_words = _by_prefix_end(words)
        self._ngrams = _NgramIndex(sampling.no_repeat_ngram) if sampling.no_repeat_ngram else None
        self._tail_length = max(
            [sampling.no_repeat_ngram - 1, 0, *(len(word) - 1 for word in words)]
        )
        self._tail: list[int] = []
        """The last `_tail_length` tokens, or all if there are fewer."""
        if self._ngrams is not None:
            self._ngrams.add_all(tokens)
        if self._tail_length:
            self._tail = tokens[-self._tail_length :]

    def append(self, token_id: int) -> None:
        """Add one output token."""
        if self._seen is not None:
            self._seen.add(token_id)
        if self._output is not None:
            self._output.add(token_id)
        if self._ngrams is not None:
            self._ngrams.add(self._tail, token_id)
        if self._tail_length:
            self._tail.append(token_id)
            del self._tail[: -self._tail_length]

    def fork(self) -> TokenHistory:
        """Return a copy that can be changed independently."""
        twin = object.__new__(TokenHistory)
        twin.__dict__.update(self.__dict__)
        twin._seen = None if self._seen is None else self._seen.fork()
        twin._output = None if self._output is None else self._output.fork()
        twin._ngrams = None if self._ngrams is None else self._ngrams.fork()
        twin._tail = self._tail.copy()
        return twin

    @property
    def seen_ids(self) -> NDArray[np.int64]:
        """The distinct tokens of prompt and output; available with a repetition penalty only, and
        valid until the next `append`."""
        assert self._seen is not None
        return self._seen.ids

    @property
    def output_ids(self) -> NDArray[np.int64]:
        """The distinct tokens of the output; available with a presence or frequency penalty only,
        and valid until the next `append`."""
        assert self._output is not None
        return self._output.ids

    @property
    def output_counts(self) -> NDArray[np.float32]:
        """The number of occurrences of each of `output_ids` in the output."""
        assert self._output is not None
        return self._output.counts

    def banned_ids(self) -> list[int]:
        """Return the tokens that would complete a bad word of several tokens, or repeat an n-gram;
        a token may be in the list twice."""
        banned: list[int] = []
        if self._bad_words and self._tail:
            for prefix, last in self._bad_words.get(self._tail[-1], ()):
                if tuple(self._tail[-len(prefix) :]) == prefix:
                    banned.append(last)
        if self._ngrams is not None:
            banned += self._ngrams.followers(self._tail)
        return banned


def _by_prefix_end(
    words: Sequence[tuple[int, ...]],
) -> dict[int, tuple[tuple[tuple[int, ...], int], ...]]:
    """Group words by their last token but one, each as (all tokens but the last, last token), so
    that a step checks only words that its newest token could continue."""
    found: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for word in words:
        found.setdefault(word[-2], []).append((word[:-1], word[-1]))
    return {token_id: tuple(entries) for token_id, entries in found.items()}


class _NgramIndex:
    """The tokens that have followed each sequence of n - 1 tokens.

    Followers are linked pairs (token, the pairs before it): adding one costs O(1), and forks share
    them, since none changes.
    """

    def __init__(self, size: int) -> None:
        self._num_before = size - 1
        self._followers: dict[tuple[int, ...], _Link] = {}
        self._known: set[tuple[tuple[int, ...], int]] = set()

    def add(self, tail: list[int], token_id: int) -> None:
        """Record that `token_id` follows `tail`, if that has at least n - 1 tokens."""
        if len(tail) >= self._num_before:
            self._follow(tuple(tail[len(tail) - self._num_before :]), token_id)

    def add_all(self, tokens: list[int]) -> None:
        """Record all n-grams of `tokens`."""
        for index in range(self._num_before, len(tokens)):
            self._follow(tuple(tokens[index - self._num_before : index]), tokens[index])

    def followers(self, tail: list[int]) -> list[int]:
        """Return the tokens that have followed the last n - 1 tokens of `tail`."""
        found: list[int] = []
        if len(tail) >= self._num_before:
            link = self._followers.get(tuple(tail[len(tail) - self._num_before :]))
            while link is not None:
                token_id, link = link
                found.append(token_id)
        return found

    def fork(self) -> _NgramIndex:
        twin = object.__new__(_NgramIndex)
        twin._num_before = self._num_before
        twin._followers, twin._known = self._followers.copy(), self._known.copy()
        return twin

    def _follow(self, prefix: tuple[int, ...], token_id: int) -> None:
        ngram = (prefix, token_id)
        if ngram not in self._known:
            self._known.add(ngram)
            self._followers[prefix] = (token_id, self._followers.get(prefix))


_Link = tuple[int, "_Link | None"]


class _Counter:
    """Distinct token ids and their counts, as numpy arrays."""

    def __init__(self, tokens: Sequence[int]) -> None:
        ids, counts = np.unique(np.asarray(tokens, dtype=np.int64), return_counts=True)
        self._size = len(ids)
        self._ids = ids
        self._counts = counts.astype(np.float32)
        self._slots = {token_id: slot for slot, token_id in enumerate(ids.tolist())}

    def add(self, token_id: int) -> None:
        slot = self._slots.get(token_id)
        if slot is not None:
            self._counts[slot] += 1.0
            return
        if self._size == len(self._ids):
            room = max(16, 2 * self._size)
            self._ids, self._counts = np.resize(self._ids, room), np.resize(self._counts, room)
        self._slots[token_id] = self._size
        self._ids[self._size] = token_id
        self._counts[self._size] = 1.0
        self._size += 1

    def fork(self) -> _Counter:
        twin = object.__new__(_Counter)
        twin._size = self._size
        twin._ids, twin._counts = self._ids.copy(), self._counts.copy()
        twin._slots = self._slots.copy()
        return twin

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: self._size]
