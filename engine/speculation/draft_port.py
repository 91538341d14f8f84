"""What a verifier and a draft worker say to each other: tasks by session and by the tokens that are
new, and guesses as token ids. Values and Protocols; what carries them is for whoever has an RPC.

A session is one sequence of one verifier. The verifier numbers its sessions, and never gives a
number twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.speculation.draft_traces import DraftTraces

VERIFIER_BYTES = 16
"""Of a verifier's name: random, of one life."""
NEW_TOKENS = 16
"""A session with more that the drafter has not computed is caught up with between calls. Above what
a step of a verifier brings, guesses included; guessed."""
MAX_NEW_TOKENS = 8192
"""That one call brings, an ask counted as one at least; to all its workers a verifier sends no more
in one step. So an engine's thread builds its calls in a few milliseconds, and none comes near what
one message may hold. A text that is new has no guesses until it is computed, so that its parts may
as well come in several steps."""
MAX_OVER = 4096
"""Sessions that one Forget names."""


class About(NamedTuple):
    """Who guesses at a draft worker."""

    model: str
    tokenizer_digest: str
    vocab_size: int


class Ask(NamedTuple):
    """One sequence to guess for (drafter.Task, as it travels)."""

    session: int
    """Unsigned 64 bits."""
    start: int
    """Tokens of the sequence that earlier asks brought."""
    token_ids: Sequence[int]
    """The sequence from there on: all of it, or, without guesses, the next part."""
    num_prompt_tokens: int
    num_nodes: int
    """Most nodes that are of use; 0: there is more to come."""
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    sample_index: int


class Answer(NamedTuple):
    """A token tree, depth-first (tree.TokenTree without tries). Not checked by anybody."""

    is_known: bool
    """False: the worker lacks tokens before `start`, or has no room. It wants all of them, later.
    There are no nodes."""
    token_ids: Sequence[int]
    parents: Sequence[int]
    chances: Sequence[float]


UNKNOWN = Answer(False, (), (), ())


class DraftChannel(Protocol):
    """The way to one draft worker. No method waits, and each may be called from any thread; futures
    fail with any exception when the worker does not do as asked within `timeout_s`."""

    @property
    def address(self) -> str:
        """For metrics and errors."""
        ...

    def describe(self, timeout_s: float) -> Future[About]:
        """Who guesses there now."""
        ...

    def propose(
        self, verifier: bytes, asks: Sequence[Ask], timeout_s: float
    ) -> Future[Sequence[Answer]]:
        """An answer to each. At most MAX_NEW_TOKENS."""
        ...

    def forget(self, verifier: bytes, sessions: Sequence[int]) -> None:
        """These, at most MAX_OVER, are over, and their numbers never come again. Nobody hears
        whether it was understood, or before or behind which asks."""
        ...


@dataclass(eq=False)
class DraftCounts:
    """What became of what one draft worker was asked; written by the engine's thread, read by any.
    Every call is answered, late or failed."""

    num_answered: int = 0
    """Calls."""
    num_late: int = 0
    """Calls whose answers came after the deadline, and were dropped."""
    num_failed: int = 0
    """Calls that failed in time, or whose answers were no such trees."""
    num_nodes: int = 0
    """Guesses that came in time."""
    num_resent: int = 0
    """Sequences of which the worker wanted all again."""
    is_ready: bool = False
    """It is asked."""


@dataclass(frozen=True, eq=False)
class DraftPeer:
    """One draft worker, as the verifier knows it."""

    channel: DraftChannel
    counts: DraftCounts = field(default_factory=DraftCounts)
    traces: DraftTraces = field(default_factory=DraftTraces)
    """Shared by all of a verifier's."""
