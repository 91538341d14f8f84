"""RemoteDrafter: draft workers apart from the verifier guess: small models on devices that are too
small or too scattered for the large one, data-parallel; nothing travels but token ids.

Each sequence is a session that stays with one worker, chosen by rendezvous hashing, so that a
worker has its KV and is sent what is new alone; a long text that is new there arrives in parts, in
several steps (draft_port.MAX_NEW_TOKENS). A sequence that its worker does not know or has no room
for is sent again after a while that doubles. The engine's thread waits for answers `deadline_s` at
most, once a step; what comes later is dropped, and who has not answered is not asked meanwhile.
A worker that fails, or answers with what is no tree, is left out: its sessions go to others, and it
is met again after a while that doubles. One that is late several times in a row, but answers, keeps
its sessions and is not asked for a while that doubles to a few seconds: it may be new to its texts.
Guesses are all that is lost: whatever arrives, the verifier draws its own tokens.

    AWAY -> (its time has come) MEETING -> (it says who it is, and fits) READY
    READY -> (no answer in time) LATE -> (it came after all) READY
    LATE -> (it came after all, several times in a row) RESTING -> (its time has come) READY
    any -> (an error, an answer that is none, or none at all) AWAY

Engine thread only, but for `DraftCounts`.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from itertools import count

from engine.errors import IntegrityError, LoadError
from engine.request import ModelInfo
from engine.sequence import Key
from engine.speculation.draft_port import (
    MAX_OVER,
    VERIFIER_BYTES,
    About,
    Answer,
    Ask,
    DraftPeer,
)
from engine.speculation.drafter import Draft, Task
from engine.speculation.remote_state import (
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    Session,
    State,
    Worker,
    ask_of,
    shares,
)
from engine.speculation.tree import EMPTY, TokenTree

logger = logging.getLogger(__name__)

MEET_S = 2.0
"""For a worker to say who it is. Only the start of an engine waits for it."""
GIVE_UP_S = 2.0
"""From a deadline until who is late is not waited for any more: the worker has failed."""
MAX_LATE = 3
"""Late answers in a row from which on a worker rests after each; guessed."""
MAX_LATE_REST_S = 4.0
"""A step that waits the usual 0.05 s for nothing, once in so long, costs about 1 %."""

NOTHING = Draft(EMPTY, {})


class RemoteDrafter:
    """A Drafter (drafter.py). See the module.

    Args:
        target: whose tokens are guessed.
        deadline_s: for one step's answers.
        give_up_s: from a deadline until who is late is not waited for any more.
        verifier: its name at the workers; None: a random one.
    """

    name = "draft workers"

    def __init__(
        self,
        peers: Sequence[DraftPeer],
        target: ModelInfo,
        *,
        deadline_s: float,
        give_up_s: float = GIVE_UP_S,
        clock: Callable[[], float] = time.monotonic,
        verifier: bytes | None = None,
    ) -> None:
        self._target = target
        self._deadline_s = deadline_s
        self._give_up_s = give_up_s
        self._clock = clock
        self._verifier = secrets.token_bytes(VERIFIER_BYTES) if verifier is None else verifier
        self._workers = [Worker(peer) for peer in peers]
        self._sessions: dict[Key, Session] = {}
        self._numbers = count()

    def meet(self) -> None:
        """Ask all workers who they are, and wait for it; for the start, when nobody is served yet.
        Who is away is met later.

        Raises: LoadError for one with another tokenizer.
        """
        for worker in self._workers:
            if worker.state is State.AWAY:
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
        began_s = self._clock()
        ends_s = began_s + self._deadline_s
        asked = self._asks(tasks)
        calls = {
            worker: call
            for worker, asks in asked.items()
            if (call := self._ask(worker, list(asks.values()))) is not None
        }
        wait(calls.values(), max(0.0, ends_s - self._clock()))
        drafts = [NOTHING] * len(tasks)
        for worker, call in calls.items():
            own = [(tasks[place], ask) for place, ask in asked[worker].items()]
            found = self._collect(worker, call, own)
            if worker.traces.is_on:
                self._trace(worker, call, began_s, own, found)
            for place, draft in zip(asked[worker], found, strict=False):
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
            if own and worker.state in (State.AWAY, State.MEETING):
                raise IntegrityError(f"{worker.channel.address}: has sessions, and is left out")
        numbers = {one.number for one in self._sessions.values()}
        if len(numbers) < len(self._sessions):
            raise IntegrityError("two sequences are one session")

    # ---- sessions

    def _session(self, key: Key) -> Session:
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(next(self._numbers))
        return session

    def _place(self, session: Session) -> Worker | None:
        """Where it is, or from now on is; None: there is nobody."""
        if session.worker is None:
            ready = [one for one in self._workers if one.state is State.READY]
            if not ready:
                return None
            session.worker = max(ready, key=lambda one: self._weight(session.number, one))
            session.worker.num_sessions += 1
        return session.worker

    def _weight(self, number: int, worker: Worker) -> bytes:
        """Rendezvous hashing: a worker that comes or goes moves no sessions but its own."""
        name = f"{number} {worker.channel.address}".encode()
        return hashlib.blake2b(name, digest_size=8, key=self._verifier).digest()

    # ---- one call

    def _asks(self, tasks: Sequence[Task]) -> dict[Worker, dict[int, Ask]]:
        """Of this step, by worker and place among the tasks."""
        wanted: list[tuple[int, Worker, Session]] = []
        now_s = self._clock()
        for place, task in enumerate(tasks):
            session = self._session(task.key)
            worker = self._place(session)
            if worker is not None and worker.state is State.READY and now_s >= session.due_s:
                wanted.append((place, worker, session))
        found: dict[Worker, dict[int, Ask]] = {}
        counts = shares((session, tasks[place]) for place, _, session in wanted)
        for (place, worker, session), num_tokens in zip(wanted, counts, strict=True):
            if num_tokens is not None:
                ask = ask_of(session, tasks[place], num_tokens)
                found.setdefault(worker, {})[place] = ask
        return found

    def _ask(self, worker: Worker, asks: Sequence[Ask]) -> Future[Sequence[Answer]] | None:
        """The call on its way; None: it could not even begin."""
        self._tell_over(worker)
        try:
            return worker.channel.propose(self._verifier, asks, self._deadline_s + self._give_up_s)
        except Exception as error:
            worker.counts.num_failed += 1
            self._leave_out(worker, error)
            return None

    def _collect(
        self,
        worker: Worker,
        call: Future[Sequence[Answer]],
        asked: Sequence[tuple[Task, Ask]],
    ) -> list[Draft]:
        """What came of a call: a draft for each task, or none at all."""
        if not call.done():
            worker.counts.num_late += 1
            worker.num_late += 1
            worker.state = State.LATE
            worker.late = call
            worker.due_s = self._clock() + 2 * self._give_up_s
            return []
        try:
            answers = call.result()
            if len(answers) != len(asked):
                raise ValueError(f"{len(answers)} answers to {len(asked)} tasks")
            trees = [
                self._tree(answer, ask.num_nodes)
                for answer, (_, ask) in zip(answers, asked, strict=True)
            ]
        except Exception as error:
            worker.counts.num_failed += 1
            self._leave_out(worker, error)
            return []
        worker.num_late = 0
        worker.backoff_s = FIRST_BACKOFF_S
        worker.counts.num_answered += 1
        for (task, ask), answer, tree in zip(asked, answers, trees, strict=True):
            session = self._sessions[task.key]
            if answer.is_known:
                num_tokens = ask.start + len(ask.token_ids)
                session.took(num_tokens, is_whole=num_tokens == len(task.token_ids))
            else:
                worker.counts.num_resent += ask.start > 0
                session.refused(self._clock())
            worker.counts.num_nodes += len(tree)
        return [Draft(tree, {}) for tree in trees]

    def _trace(
        self,
        worker: Worker,
        call: Future[Sequence[Answer]],
        began_s: float,
        asked: Sequence[tuple[Task, Ask]],
        found: Sequence[Draft],
    ) -> None:
        """What a call took that is collected."""
        is_late = worker.late is call
        nums = [len(draft.tree) for draft in found] or [0] * len(asked)
        worker.traces.note(
            worker.channel.address,
            began_s,
            self._clock(),
            [(task.key, num) for (task, _), num in zip(asked, nums, strict=True)],
            is_late=is_late,
            is_failed=not found and not is_late,
        )

    def _tree(self, answer: Answer, most: int) -> TokenTree:
        """Raises: ValueError for what is no tree of such tokens, or a larger one than was of
        use."""
        num_nodes = len(answer.token_ids)
        if num_nodes > most or (num_nodes and not answer.is_known):
            raise ValueError(f"{num_nodes} nodes, {most} at most were asked for")
        if any(not 0 <= token_id < self._target.vocab_size for token_id in answer.token_ids):
            raise ValueError("a token that is not in the vocabulary")
        return TokenTree(
            tuple(answer.token_ids), tuple(answer.parents), tuple(answer.chances), ((),) * num_nodes
        )

    def _tell_over(self, worker: Worker) -> None:
        if worker.over:
            over, worker.over = worker.over, []
            try:
                for first in range(0, len(over), MAX_OVER):
                    worker.channel.forget(self._verifier, over[first : first + MAX_OVER])
            except Exception as error:  # it will find out by itself
                logger.debug("draft worker %s: %s", worker.channel.address, error)

    # ---- who is there

    def _look_at(self, worker: Worker) -> None:
        """Whatever has become of it since the last step."""
        is_due = self._clock() >= worker.due_s
        if worker.state is State.AWAY:
            if is_due:
                self._begin_meeting(worker)
        elif worker.state is State.LATE:
            self._look_at_late(worker, is_due)
        elif worker.state is State.RESTING and is_due:
            worker.state = State.READY
        if worker.state is State.MEETING:
            self._look_at_meeting(worker, is_due)

    def _look_at_late(self, worker: Worker, is_due: bool) -> None:
        late = worker.late
        if late is not None and late.done():
            error = None if late.cancelled() else late.exception()
            worker.late = None
            if error is not None:
                self._leave_out(worker, error)
            elif worker.num_late < MAX_LATE:
                worker.state = State.READY
            else:
                self._rest(worker)
        elif is_due:
            self._leave_out(worker, "no answer")

    def _rest(self, worker: Worker) -> None:
        seconds = min(worker.backoff_s, MAX_LATE_REST_S)
        logger.info(
            "draft worker %s answers, but later than draft_deadline_s (%g s), %d times in a row: "
            "it is not asked for %.1f s",
            worker.channel.address,
            self._deadline_s,
            worker.num_late,
            seconds,
        )
        worker.state = State.RESTING
        worker.due_s = self._clock() + seconds
        worker.backoff_s = min(2 * worker.backoff_s, MAX_LATE_REST_S)

    def _look_at_meeting(self, worker: Worker, is_due: bool) -> None:
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
        worker.state = State.READY
        worker.num_late = 0
        worker.counts.is_ready = True
        logger.info("draft worker %s guesses", worker.channel.address)

    def _begin_meeting(self, worker: Worker) -> None:
        try:
            worker.meeting = worker.channel.describe(MEET_S)
            worker.state = State.MEETING
            worker.due_s = self._clock() + 2 * MEET_S
        except Exception as error:
            self._leave_out(worker, error)

    def _misfit(self, worker: Worker, about: About) -> str:
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

    def _leave_out(self, worker: Worker, why: object) -> None:
        """Until its back-off is over; its sessions go elsewhere."""
        if worker.state in (State.READY, State.LATE, State.RESTING):
            logger.warning(
                "draft worker %s is left out for %.1f s: %s",
                worker.channel.address,
                worker.backoff_s,
                str(why)[:200],
            )
        elif worker.backoff_s == FIRST_BACKOFF_S:
            logger.warning("draft worker %s: %s", worker.channel.address, str(why)[:200])
        worker.state = State.AWAY
        worker.counts.is_ready = False
        worker.due_s = self._clock() + worker.backoff_s
        worker.backoff_s = min(2 * worker.backoff_s, MAX_BACKOFF_S)
        worker.meeting = worker.late = None
        worker.num_sessions = 0
        worker.over.clear()
        for session in self._sessions.values():
            if session.worker is worker:
                session.leave()
