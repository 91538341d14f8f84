"""RemoteDrafter: draft workers apart from the verifier guess: small models on devices that are too
small or too scattered for the large one, data-parallel; nothing travels but token ids.

Each sequence is a session that stays with one worker, chosen by rendezvous hashing, so that a
worker has its KV and is sent what is new alone. The engine's thread waits for answers `deadline_s`
at most, once a step; what comes later is dropped, and who has not answered is not asked meanwhile.
A worker that fails, is late several times in a row, or answers with what is no tree, is left out:
its sessions go to others, and it is met again after a while that doubles. Guesses are all that is
lost: whatever arrives, the verifier draws its own tokens.

    AWAY -> (its time has come) MEETING -> (it says who it is, and fits) READY
    READY -> (no answer in time) LATE -> (it came after all) READY
    any -> (an error, an answer that is none, too often late) AWAY

Engine thread only, but for `DraftCounts`.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from enum import Enum
from itertools import count

from engine.errors import IntegrityError, LoadError
from engine.request import ModelInfo
from engine.schedule.order import Key
from engine.speculation.draft_port import (
    VERIFIER_BYTES,
    About,
    Answer,
    Ask,
    DraftPeer,
)
from engine.speculation.drafter import Draft, Task
from engine.speculation.tree import EMPTY, TokenTree

logger = logging.getLogger(__name__)

MEET_S = 2.0
"""For a worker to say who it is. Only the start of an engine waits for it."""
GIVE_UP_S = 2.0
"""From a deadline until who is late is not waited for any more: the worker has failed."""
MAX_LATE = 3
"""Late answers in a row after which a worker is left out; guessed."""
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0

NOTHING = Draft(EMPTY, {})


class _State(Enum):
    """See the module."""

    AWAY = "away"
    MEETING = "meeting"
    READY = "ready"
    LATE = "late"


class _Worker:
    """One draft worker, as it was last seen."""

    def __init__(self, peer: DraftPeer) -> None:
        self.channel = peer.channel
        self.counts = peer.counts
        self.state = _State.AWAY
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


class _Session:
    """One sequence."""

    __slots__ = ("is_refused", "num_sent", "number", "worker")

    def __init__(self, number: int) -> None:
        self.number = number
        self.worker: _Worker | None = None
        self.num_sent = 0
        """Its tokens, from the first, that its worker is known to have."""
        self.is_refused = False
        """Its worker has no room for all of it."""


class RemoteDrafter:
    """A Drafter (drafter.py). See the module.

    Args:
        target: whose tokens are guessed.
        deadline_s: for one step's answers.
        verifier: its name at the workers; None: a random one.
    """

    name = "draft workers"

    def __init__(
        self,
        peers: Sequence[DraftPeer],
        target: ModelInfo,
        *,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
        verifier: bytes | None = None,
    ) -> None:
        self._target = target
        self._deadline_s = deadline_s
        self._clock = clock
        self._verifier = secrets.token_bytes(VERIFIER_BYTES) if verifier is None else verifier
        self._workers = [_Worker(peer) for peer in peers]
        self._sessions: dict[Key, _Session] = {}
        self._numbers = count()

    def meet(self) -> None:
        """Ask all workers who they are, and wait for it; for the start, when nobody is served yet.
        Who is away is met later.

        Raises: LoadError for one with another tokenizer.
        """
        for worker in self._workers:
            if worker.state is _State.AWAY:
                self._begin_meeting(worker)
        wait([one.meeting for one in self._workers if one.meeting is not None], MEET_S)
        for worker in self._workers:
            meeting = worker.meeting
            if meeting is not None and meeting.done() and meeting.exception() is None:
                problem = self._misfit(worker, meeting.result())
                if problem:
                    raise LoadError(problem)
            self._look_at(worker)

    def propose(self, tasks: Sequence[Task]) -> list[Draft]:
        """See Drafter."""
        for worker in self._workers:
            self._look_at(worker)
        asked: dict[_Worker, list[int]] = {}
        for place, task in enumerate(tasks):
            session = self._session(task.key)
            chosen = self._place(session)
            if chosen is not None and chosen.state is _State.READY and not session.is_refused:
                asked.setdefault(chosen, []).append(place)
        ends_s = self._clock() + self._deadline_s
        calls = {
            worker: call
            for worker, places in asked.items()
            if (call := self._ask(worker, [tasks[place] for place in places])) is not None
        }
        wait(calls.values(), max(0.0, ends_s - self._clock()))
        drafts = [NOTHING] * len(tasks)
        for worker, call in calls.items():
            places = asked[worker]
            found = self._collect(worker, call, [tasks[place] for place in places])
            for place, draft in zip(places, found, strict=False):
                drafts[place] = draft
        return drafts

    def forget(self, key: Key) -> None:
        """See Drafter."""
        session = self._sessions.pop(key, None)
        if session is not None and session.worker is not None:
            session.worker.num_sessions -= 1
            session.worker.over.append(session.number)
        if not self._sessions:  # there may be no further step to tell it with
            for worker in self._workers:
                self._tell_over(worker)

    def check_integrity(self) -> None:
        """See Drafter. Each session has one worker at most, and one that is not left out."""
        for worker in self._workers:
            own = [one for one in self._sessions.values() if one.worker is worker]
            if len(own) != worker.num_sessions:
                raise IntegrityError(
                    f"{worker.channel.address}: {worker.num_sessions} sessions counted, {len(own)}"
                )
            if own and worker.state in (_State.AWAY, _State.MEETING):
                raise IntegrityError(f"{worker.channel.address}: has sessions, and is left out")
        numbers = {one.number for one in self._sessions.values()}
        if len(numbers) < len(self._sessions):
            raise IntegrityError("two sequences are one session")

    # ---- sessions

    def _session(self, key: Key) -> _Session:
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = _Session(next(self._numbers))
        return session

    def _place(self, session: _Session) -> _Worker | None:
        """Where it is, or from now on is; None: there is nobody."""
        if session.worker is None:
            ready = [one for one in self._workers if one.state is _State.READY]
            if not ready:
                return None
            session.worker = max(ready, key=lambda one: self._weight(session.number, one))
            session.worker.num_sessions += 1
        return session.worker

    def _weight(self, number: int, worker: _Worker) -> bytes:
        """Rendezvous hashing: a worker that comes or goes moves no sessions but its own."""
        name = f"{number} {worker.channel.address}".encode()
        return hashlib.blake2b(name, digest_size=8, key=self._verifier).digest()

    # ---- one call

    def _ask(self, worker: _Worker, tasks: Sequence[Task]) -> Future[Sequence[Answer]] | None:
        """The call on its way; None: it could not even begin."""
        self._tell_over(worker)
        asks = [self._ask_of(task) for task in tasks]
        try:
            return worker.channel.propose(self._verifier, asks, self._deadline_s + GIVE_UP_S)
        except Exception as error:
            worker.counts.num_failed += 1
            self._leave_out(worker, error)
            return None

    def _ask_of(self, task: Task) -> Ask:
        sampling = task.sampling
        session = self._sessions[task.key]
        session.num_sent = start = min(session.num_sent, len(task.token_ids))
        return Ask(
            session.number,
            start,
            task.token_ids[start:],
            task.num_prompt_tokens,
            task.num_nodes,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.min_p,
            sampling.seed,
            task.sample_index,
        )

    def _collect(
        self, worker: _Worker, call: Future[Sequence[Answer]], tasks: Sequence[Task]
    ) -> list[Draft]:
        """What came of a call: a draft for each task, or none at all."""
        if not call.done():
            worker.counts.num_late += 1
            worker.num_late += 1
            worker.state = _State.LATE
            worker.late = call
            worker.due_s = self._clock() + 2 * GIVE_UP_S
            return []
        try:
            answers = call.result()
            if len(answers) != len(tasks):
                raise ValueError(f"{len(answers)} answers to {len(tasks)} tasks")
            trees = [self._tree(answer, task) for answer, task in zip(answers, tasks, strict=True)]
        except Exception as error:
            worker.counts.num_failed += 1
            self._leave_out(worker, error)
            return []
        worker.num_late = 0
        worker.backoff_s = FIRST_BACKOFF_S
        worker.counts.num_answered += 1
        for task, answer, tree in zip(tasks, answers, trees, strict=True):
            session = self._sessions[task.key]
            if answer.is_known:
                session.num_sent = len(task.token_ids)
            else:
                # Of a text that it was sent whole: there is no room for it.
                session.is_refused = session.num_sent == 0
                session.num_sent = 0
                worker.counts.num_resent += not session.is_refused
            worker.counts.num_nodes += len(tree)
        return [Draft(tree, {}) for tree in trees]

    def _tree(self, answer: Answer, task: Task) -> TokenTree:
        """Raises: ValueError for what is no tree of such tokens, or a larger one than was of
        use."""
        num_nodes = len(answer.token_ids)
        if num_nodes > task.num_nodes or (num_nodes and not answer.is_known):
            raise ValueError(f"{num_nodes} nodes, {task.num_nodes} at most were asked for")
        if any(not 0 <= token_id < self._target.vocab_size for token_id in answer.token_ids):
            raise ValueError("a token that is not in the vocabulary")
        return TokenTree(
            tuple(answer.token_ids), tuple(answer.parents), tuple(answer.chances), ((),) * num_nodes
        )

    def _tell_over(self, worker: _Worker) -> None:
        if worker.over:
            over, worker.over = worker.over, []
            try:
                worker.channel.forget(self._verifier, over)
            except Exception as error:  # it will find out by itself
                logger.debug("draft worker %s: %s", worker.channel.address, error)

    # ---- who is there

    def _look_at(self, worker: _Worker) -> None:
        """Whatever has become of it since the last step."""
        is_due = self._clock() >= worker.due_s
        if worker.state is _State.AWAY:
            if is_due:
                self._begin_meeting(worker)
        elif worker.state is _State.LATE:
            self._look_at_late(worker, is_due)
        if worker.state is _State.MEETING:
            self._look_at_meeting(worker, is_due)

    def _look_at_late(self, worker: _Worker, is_due: bool) -> None:
        late = worker.late
        if late is not None and late.done():
            error = None if late.cancelled() else late.exception()
            if error is not None or worker.num_late >= MAX_LATE:
                self._leave_out(worker, error or f"late {worker.num_late} times in a row")
            else:
                worker.late = None
                worker.state = _State.READY
        elif is_due:
            self._leave_out(worker, "no answer")

    def _look_at_meeting(self, worker: _Worker, is_due: bool) -> None:
        meeting = worker.meeting
        if meeting is None or not meeting.done():
            if is_due:
                self._leave_out(worker, "no answer")
            return
        try:
            problem: object = self._misfit(worker, meeting.result())
        except Exception as error:
            problem = error
        if problem:
            self._leave_out(worker, problem)
            return
        worker.meeting = None
        worker.state = _State.READY
        worker.num_late = 0
        worker.counts.is_ready = True
        logger.info("draft worker %s guesses", worker.channel.address)

    def _begin_meeting(self, worker: _Worker) -> None:
        try:
            worker.meeting = worker.channel.describe(MEET_S)
            worker.state = _State.MEETING
            worker.due_s = self._clock() + 2 * MEET_S
        except Exception as error:
            self._leave_out(worker, error)

    def _misfit(self, worker: _Worker, about: About) -> str:
        """Why its tokens would be of no use; empty: they are."""
        target = self._target
        if (about.vocab_size, about.tokenizer_digest) == (
            target.vocab_size,
            target.tokenizer_digest,
        ):
            return ""
        return (
            f"speculation.draft_workers: {worker.channel.address} serves {about.model}, which has "
            f"another tokenizer than {target.model}; its tokens mean other texts. Name a worker "
            "with a model of the same family"
        )

    def _leave_out(self, worker: _Worker, why: object) -> None:
        """Until its back-off is over; its sessions go elsewhere."""
        if worker.state in (_State.READY, _State.LATE):
            logger.warning(
                "draft worker %s is left out for %.1f s: %s",
                worker.channel.address,
                worker.backoff_s,
                str(why)[:200],
            )
        elif worker.backoff_s == FIRST_BACKOFF_S:
            logger.warning("draft worker %s: %s", worker.channel.address, str(why)[:200])
        worker.state = _State.AWAY
        worker.counts.is_ready = False
        worker.due_s = self._clock() + worker.backoff_s
        worker.backoff_s = min(2 * worker.backoff_s, MAX_BACKOFF_S)
        worker.meeting = worker.late = None
        worker.num_sessions = 0
        worker.over.clear()
        for session in self._sessions.values():
            if session.worker is worker:
                session.worker = None
                session.num_sent = 0
                session.is_refused = False
