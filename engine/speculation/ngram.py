"""Prompt lookup: what followed the newest tokens the last times they came up, in the prompt or in
the output (Saxena, Prompt Lookup Decoding, 2023; LLMA, Yang et al., arXiv 2304.04487). Costs no
forward pass; pays where answers repeat their prompt or themselves.

Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.schedule.order import Key
from engine.speculation.config import NgramConfig
from engine.speculation.drafter import Draft, Task
from engine.speculation.tree import EMPTY, TokenTree, chain, merge

MAX_INDEXED = 32_768
"""Newest tokens of a prompt that are looked up in: 20 MB, at most, for each sample."""
_PER_CALL = 2048
"""Tokens that a call indexes, 10 ms of the engine's thread: after a long prompt the first guesses
come some steps later."""


class PromptLookup:
    """A Drafter (drafter.py). See the module."""

    name = "ngram"

    def __init__(self, config: NgramConfig) -> None:
        self._config = config
        self._indices: dict[Key, NgramIndex] = {}

    def propose(self, tasks: Sequence[Task]) -> list[Draft]:
        """See Drafter."""
        drafts = []
        for task in tasks:
            if task.key not in self._indices:
                self._indices[task.key] = NgramIndex(self._config)
            tree = self._indices[task.key].propose(task.token_ids, task.num_nodes)
            drafts.append(Draft(tree.best(task.num_nodes), {}))
        return drafts

    def forget(self, key: Key) -> None:
        """See Drafter."""
        self._indices.pop(key, None)

    def check_integrity(self) -> None:
        """See Drafter. Each index stands for itself."""


class NgramIndex:
    """Where each n-gram of one sequence ended, kept up as the sequence grows.

    Args:
        settings: lengths to look for.
    """

    def __init__(self, settings: NgramConfig) -> None:
        self._settings = settings
        self._num_tokens = 0
        self._first = 0
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def propose(self, token_ids: Sequence[int], num_tokens: int) -> TokenTree:
        """What may follow `token_ids`: at most `num_tokens` of each continuation.

        Args:
            token_ids: all of the sequence; the calls before were given a prefix of it.
        Raises: ValueError where it has become shorter.
        """
        self._extend(token_ids)
        settings = self._settings
        if num_tokens < 1 or self._num_tokens < len(token_ids):
            return EMPTY
        for length in range(min(settings.max_length, len(token_ids)), settings.min_length - 1, -1):
            ends = self._ends.get(tuple(token_ids[-length:]), [])
            found = [
                token_ids[end : end + num_tokens]
                for end in reversed(ends[-settings.max_matches - 1 :])
                if end < len(token_ids)
            ][: settings.max_matches]
            if found:
                # The longer the match, and the nearer to it, the likelier. Replaced by what is
                # measured (expansion.py) as soon as there is something.
                sure = length / (length + 1)
                return merge(
                    [chain(one, [sure ** (1 + i) for i in range(len(one))]) for one in found]
                )
        return EMPTY

    def _extend(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) < self._num_tokens:
            raise ValueError(f"{len(token_ids)} tokens, {self._num_tokens} at the call before")
        settings = self._settings
        if not self._num_tokens:
            self._first = self._num_tokens = max(0, len(token_ids) - MAX_INDEXED)
        newest = min(len(token_ids), self._num_tokens + _PER_CALL)
        for end in range(self._num_tokens + 1, newest + 1):
            longest = min(settings.max_length, end - self._first)
            for length in range(settings.min_length, longest + 1):
                self._ends.setdefault(tuple(token_ids[end - length : end]), []).append(end)
        self._num_tokens = newest
