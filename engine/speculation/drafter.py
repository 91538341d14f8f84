"""Drafter: who guesses what a sequence goes on with. One seam for lookups, small models and heads;
several together are merged (tree.py).

Engine thread only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.request import Sampling
from engine.schedule.order import Key
from engine.speculation.tree import TokenTree

if TYPE_CHECKING:
    from engine.grammar.state import GrammarState

Distribution = NDArray[np.float64]
"""[V], sums to 1."""

Place = tuple[tuple[int, ...], int]
"""(tokens from the root's child down to a parent, index of a drafter): whose distribution after
which guesses. By tokens, so that it stays when trees are merged."""


class Task(NamedTuple):
    """One sequence to guess for."""

    key: Key
    token_ids: Sequence[int]
    """All of it, the newest included. Not kept: it grows."""
    num_prompt_tokens: int
    sampling: Sampling
    sample_index: int
    """Which sample of the request: part of the key of the noise."""
    num_nodes: int
    """Most nodes that are of use."""


class Draft(NamedTuple):
    """What was guessed."""

    tree: TokenTree
    distributions: Mapping[Place, Distribution]
    """What each `Try` was drawn from. A place that has none: its token was certain to be
    proposed."""


class Guess(NamedTuple):
    """What of all drafts one step computes for one sequence."""

    tree: TokenTree
    """Not empty."""
    grammars: tuple[GrammarState | None, ...]
    """Where each node is in the sequence's grammar, if it has one."""


class Drafter(Protocol):
    """See the module."""

    @property
    def name(self) -> str:
        """For metrics and errors."""
        ...

    def propose(self, tasks: Sequence[Task]) -> list[Draft]:
        """A guess for each task, maybe an empty one, of at most `num_nodes` nodes."""
        ...

    def forget(self, key: Key) -> None:
        """This sequence is over, or has lost its blocks. Does nothing for one that is not known."""
        ...

    def check_integrity(self) -> None:
        """Raises: IntegrityError where what is kept for sequences does not add up."""
        ...
