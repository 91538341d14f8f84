"""Drafter: who guesses what a sequence goes on with. One seam for lookups, small models and heads;
several together are merged (tree.py).

Engine thread only.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from engine.request import Sampling
from engine.sequence import Key
from engine.speculation.acceptance import Distribution as Distribution
from engine.speculation.acceptance import Place as Place
from engine.speculation.acceptance import Proposals
from engine.speculation.tree import TokenTree

if TYPE_CHECKING:
    from engine.grammar.state import GrammarState


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
    max_depth: int = sys.maxsize
    """Those deeper are of none: the text ends before."""
    is_drawn: bool = False
    """Children are draws, each with a `Try`, and none is left out: by random numbers that depend on
    the sampling's seed, which is another for each step, and on the path to their parent. Who does
    not draw so may choose, without tries. The target's noise is of another seed."""


class Draft(NamedTuple):
    """What was guessed."""

    tree: TokenTree
    distributions: Mapping[Place, Distribution]
    """What each `Try` was drawn from, under the number that it names. A place that has none: its
    token was certain to be proposed."""


class Guess(NamedTuple):
    """What of all drafts one step computes for one sequence."""

    tree: TokenTree
    """Empty only where there are `proposals`."""
    grammars: tuple[GrammarState | None, ...]
    """Where each node is in the sequence's grammar, if it has one."""
    proposals: tuple[Proposals | None, ...] = ()
    """Under the multi-step rule (acceptance.py): what is tried after the newest token, and after
    each node."""


class Drafter(Protocol):
    """See the module."""

    @property
    def name(self) -> str:
        """For metrics and errors."""
        ...

    def propose(self, tasks: Sequence[Task]) -> list[Draft]:
        """A guess for each task, maybe an empty one, of at most `num_nodes` nodes if it is not
        `is_drawn`."""
        ...

    def forget(self, key: Key) -> None:
        """This sequence is over, or has lost its blocks. Does nothing for one that is not known."""
        ...

    def check_integrity(self) -> None:
        """Raises: IntegrityError where what is kept for sequences does not add up."""
        ...


@runtime_checkable
class Closes(Protocol):
    """A Drafter that holds more than Python gives back: whoever closes the engine closes it."""

    def close(self) -> None:
        """No call after it. Idempotent."""
        ...


def close_all(drafters: Iterable[Drafter]) -> None:
    """Those that are to be closed, each whatever befalls another."""
    with ExitStack() as stack:
        for drafter in drafters:
            if isinstance(drafter, Closes):
                stack.callback(drafter.close)
