"""What a verifier knows of its draft workers and of the sequences that they guess for, and how much
of those one step brings them (remote.py).

Engine thread only, but for `DraftCounts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from enum import Enum

from engine.speculation.draft_port import (
    MAX_NEW_TOKENS,
    NEW_TOKENS,
    About,
    Answer,
    Ask,
    DraftPeer,
)
from engine.speculation.drafter import Task

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0


class State(Enum):
    """See remote.py."""

    AWAY = "away"
    MEETING = "meeting"
    READY = "ready"
    LATE = "late"
    RESTING = "resting"


class Worker:
    """One draft worker, as it was last seen."""

    def __init__(self, peer: DraftPeer) -> None:
        self.channel = peer.channel
        self.counts = peer.counts
        self.traces = peer.traces
        self.state = State.AWAY
        self.due_s = 0.0
        """When it may be met again, while it is away; when it has failed, while it is waited for:
        channels end calls before that, if they do what they should."""
        self.backoff_s = FIRST_BACKOFF_S
        self.num_late = 0
        """In a row."""
        self.num_sessions = 0
        self.over: list[int] = []
        """Sessions that it is still to be told to forget."""
        self.meeting: Future[About] | None = None
        self.late: Future[Sequence[Answer]] | None = None


class Session:
    """One sequence."""

    __slots__ = ("backoff_s", "due_s", "num_sent", "number", "worker")

    def __init__(self, number: int) -> None:
        self.number = number
        self.worker: Worker | None = None
        self.num_sent = 0
        """Its tokens, from the first, that its worker is known to have."""
        self.due_s = 0.0
        """Before that its worker, which did not keep it, is not asked for it."""
        self.backoff_s = FIRST_BACKOFF_S

    def took(self, num_tokens: int, *, is_whole: bool) -> None:
        """Its worker has so many tokens of it."""
        self.num_sent = num_tokens
        if is_whole:
            self.backoff_s = FIRST_BACKOFF_S

    def refused(self, now_s: float) -> None:
        """Its worker does not have it, be it new there or without room: all of it is sent again
        after a while that doubles."""
        self.num_sent = 0
        self.due_s = now_s + self.backoff_s
        self.backoff_s = min(2 * self.backoff_s, MAX_BACKOFF_S)

    def leave(self) -> None:
        """It has no worker. What the last one said is nothing to the next."""
        self.worker = None
        self.num_sent = 0
        self.due_s = 0.0
        self.backoff_s = FIRST_BACKOFF_S


def ask_of(session: Session, task: Task, num_tokens: int) -> Ask:
    """What its worker is sent of it: `num_tokens` that are new there. Of a text that does not
    arrive whole nothing is guessed. A task that is drawn asks for the likeliest tokens: no noise of
    the worker's is the target's there."""
    sampling = task.sampling
    start = session.num_sent
    end = start + num_tokens
    return Ask(
        session.number,
        start,
        task.token_ids[start:end],
        task.num_prompt_tokens,
        task.num_nodes if end == len(task.token_ids) else 0,
        0.0 if task.is_drawn else sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
        sampling.seed,
        task.sample_index,
    )


def shares(wanted: Iterable[tuple[Session, Task]]) -> list[int | None]:
    """Of each sequence, how many tokens this step brings its worker; None: it is not asked for.

    Together at most MAX_NEW_TOKENS (draft_port.py). Those with what a step adds come first: they
    are guessed for now; then whole texts, the oldest first.
    """
    missing: list[tuple[bool, int, int, int]] = []
    for place, (session, task) in enumerate(wanted):
        session.num_sent = min(session.num_sent, len(task.token_ids))
        num_new = len(task.token_ids) - session.num_sent
        missing.append((num_new > NEW_TOKENS, session.number, place, num_new))
    found: list[int | None] = [None] * len(missing)
    left = MAX_NEW_TOKENS
    for _, _, place, num_new in sorted(missing):
        if left < 1:
            break
        found[place] = min(num_new, left)
        left -= max(1, min(num_new, left))
    return found
