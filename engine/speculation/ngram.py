"""NgramProposer: prompt lookup, which proposes the tokens that followed earlier occurrences of the
newest tokens in the prompt or the output (Saxena, Prompt Lookup Decoding, 2023; LLMA, Yang et
al., arXiv 2304.04487). It needs no forward pass, and pays where answers repeat their prompt or
themselves.

Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.sequence import Key
from engine.speculation.config import NgramConfig
from engine.speculation.proposer import Draft, DraftTask
from engine.speculation.token_tree import EMPTY, TokenTree, chain, merge

MAX_INDEXED = 32_768
"""Largest number of newest prompt tokens that are indexed: at most 20 MB for each sample."""
_PER_CALL = 2048
"""Number of tokens that one call indexes, which takes 10 ms of the engine's thread. After a longer
prompt the first drafts come some steps later."""


class NgramProposer:
    """A Proposer with an n-gram index of each sequence."""

    name = "ngram"

    def __init__(self, config: NgramConfig) -> None:
        self._config = config
        self._indices: dict[Key, NgramIndex] = {}

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Propose the tokens after earlier occurrences of each task's newest tokens; an empty draft
        where there are none, or where the sequence is not indexed yet."""
        drafts = []
        for task in tasks:
            if task.key not in self._indices:
                self._indices[task.key] = NgramIndex(self._config)
            tree = self._indices[task.key].propose(task.token_ids, task.num_nodes)
            drafts.append(Draft(tree.best(task.num_nodes), {}))
        return drafts

    def forget(self, key: Key) -> None:
        """Drop the index of a sequence."""
        self._indices.pop(key, None)

    def check_integrity(self) -> None:
        """Check nothing: indices of sequences do not depend on one another."""


class NgramIndex:
    """The positions of each n-gram of one sequence, extended as the sequence grows."""

    def __init__(self, settings: NgramConfig) -> None:
        self._settings = settings
        self._num_tokens = 0
        self._first = 0
        self._newest: dict[tuple[int, ...], int] = {}
        """End position (exclusive) of the last occurrence of each n-gram."""
        self._lengths = range(settings.min_length, settings.max_length + 1)
        self._before: list[list[int]] = [[] for _ in self._lengths]
        """The previous occurrence of each n-gram: by n-gram length, then by end position - `_first`
        - 1, the end position of the same n-gram's occurrence before; 0: none."""

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> TokenTree:
        """Propose continuations of `token_ids`, of at most `num_tokens` tokens each, as a tree of
        paths.

        Args: token_ids: all tokens of the sequence, an extension of those of earlier calls.
        Raises: ValueError if the sequence has become shorter.
        """
        self._extend(token_ids)
        settings = self._settings
        if num_tokens < 1 or not token_ids or self._num_tokens < len(token_ids):
            return EMPTY
        if not self._before[0][-1]:
            return EMPTY  # most often so: what followed a longer n-gram followed a shorter one, too
        for length, before in zip(reversed(self._lengths), reversed(self._before), strict=True):
            found: list[Sequence[int]] = []
            end = before[-1]
            while end and len(found) < settings.max_matches:
                found.append(token_ids[end : end + num_tokens])
                end = before[end - self._first - 1]
            if found:
                # The longer the match, and the nearer to it, the likelier. Corrected by measured
                # acceptance (controller.py) as soon as there is some.
                sure = length / (length + 1)
                return merge(
                    [chain(one, [sure ** (1 + i) for i in range(len(one))]) for one in found]
                )
        return EMPTY

    def _extend(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) < self._num_tokens:
            raise ValueError(f"{len(token_ids)} tokens, {self._num_tokens} at the call before")
        if not self._num_tokens:
            self._first = self._num_tokens = max(0, len(token_ids) - MAX_INDEXED)
        newest = min(len(token_ids), self._num_tokens + _PER_CALL)
        first, known = self._first, self._newest
        for length, before in zip(self._lengths, self._before, strict=True):
            for end in range(self._num_tokens + 1, newest + 1):
                if end - first < length:
                    before.append(0)
                    continue
                gram = tuple(token_ids[end - length : end])
                before.append(known.get(gram, 0))
                known[gram] = end
        self._num_tokens = newest
