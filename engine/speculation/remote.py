"""RemoteProposer: draft workers apart from the verifier run the draft models, on devices that are
too small or too far apart for the large one. Data-parallel: only token ids travel.

Each sequence is a session that stays with one worker, chosen by rendezvous hashing, so that the
worker has its KV and is sent only new tokens; a long text that is new there arrives in parts, in
several steps (MAX_NEW_TOKENS). A sequence that its worker does not know or has no room for is sent
again after a back-off that doubles. The engine's thread waits for responses `deadline_s` at most,
once a step; later ones are dropped, and a worker that has not responded receives no requests
meanwhile.
A worker that fails, or responds with something that is no tree, is left out: its sessions go to
others, and it is connected again after a back-off that doubles. One that is late several times in a
row, but responds, keeps its sessions and is not called for a back-off that doubles to a few
seconds: the texts may be new to it. Only drafts are lost: the verifier samples its own tokens.

    AWAY -> (back-off over) CONNECTING -> (describes a model that fits) READY
    READY -> (no response in time) LATE -> (responds after all) READY
    LATE -> (responds after all, several times in a row) RESTING -> (back-off over) READY
    any -> (an error, an invalid response, or none at all) AWAY

Engine thread only, but for `DraftCounts` and `DraftTraces`.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from enum import Enum
from itertools import count

from engine.errors import IntegrityError, LoadError
from engine.request import ModelInfo
from engine.sequence import Key
from engine.speculation.draft_protocol import (
    MAX_ENDED_SESSIONS,
    MAX_NEW_TOKENS,
    NEW_TOKENS,
    VERIFIER_BYTES,
    DraftChannel,
    DraftModelInfo,
    DraftRequest,
    DraftResponse,
)
from engine.speculation.proposer import Draft, DraftTask
from engine.speculation.token_tree import EMPTY, TokenTree

logger = logging.getLogger(__name__)

CONNECT_S = 2.0
"""Deadline in seconds for a worker's description. Only the start of an engine waits for it."""
GIVE_UP_S = 2.0
"""Time in seconds after a step's deadline at which a worker without a response counts as failed."""
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
MAX_LATE = 3
"""Number of consecutive late responses after which a worker rests after each further one;
guessed."""
MAX_LATE_REST_S = 4.0
"""Longest rest in seconds: a step that waits the usual 0.05 s in vain, once in 4 s, costs about 1
%."""
MAX_ADDRESSES = 8
"""Largest number of draft workers' addresses that are recorded for one request."""

NOTHING = Draft(EMPTY, {})


@dataclass(slots=True)
class DraftCalls:
    """Calls of draft workers for one request. Times are in seconds of the proposer's clock
    (time.monotonic)."""

    num_calls: int = 0
    num_late: int = 0
    num_failed: int = 0
    num_nodes: int = 0
    """Number of draft tokens that arrived for this request."""
    first_s: float = 0.0
    """Time at which the first call began."""
    last_s: float = 0.0
    """Time at which the last call ended."""
    waited_s: float = 0.0
    longest_s: float = 0.0
    addresses: list[str] = field(default_factory=list)


class DraftTraces:
    """Records of calls of draft workers for traced requests. A call is for several sequences and is
    recorded for each traced request among them. Memory per request does not grow with its calls;
    without traced requests nothing is recorded.

    `watch` and `take` belong to the event loop's thread, the rest to the engine's.
    """

    def __init__(self) -> None:
        self._calls: dict[str, DraftCalls] = {}

    def watch(self, request_id: str) -> None:
        """Start recording the calls for a request."""
        self._calls[request_id] = DraftCalls()

    def take(self, request_id: str) -> DraftCalls | None:
        """Stop recording, and return the calls for the request; None if there was none."""
        calls = self._calls.pop(request_id, None)
        return calls if calls is not None and calls.num_calls else None

    @property
    def is_on(self) -> bool:
        """Whether some request is traced."""
        return bool(self._calls)

    def note(
        self,
        address: str,
        began_s: float,
        ended_s: float,
        proposed: Iterable[tuple[Key, int]],
        *,
        is_late: bool,
        is_failed: bool,
    ) -> None:
        """Record one call for the traced requests among its sequences.

        Args:
            began_s, ended_s: times of the call.
            proposed: the sequences of the call, and the number of nodes for each.
        """
        num_nodes: dict[str, int] = {}
        for (request_id, _), num in proposed:
            if request_id in self._calls:
                num_nodes[request_id] = num_nodes.get(request_id, 0) + num
        for request_id, num in num_nodes.items():
            calls = self._calls.get(request_id)
            if calls is None:  # `take` was called meanwhile
                continue
            if not calls.num_calls:
                calls.first_s = began_s
            calls.num_calls += 1
            calls.num_late += is_late
            calls.num_failed += is_failed
            calls.num_nodes += num
            calls.last_s = ended_s
            calls.waited_s += ended_s - began_s
            calls.longest_s = max(calls.longest_s, ended_s - began_s)
            if address not in calls.addresses and len(calls.addresses) < MAX_ADDRESSES:
                calls.addresses.append(address)


@dataclass(eq=False)
class DraftCounts:
    """Counts of one draft worker, written by the engine's thread and read by any. Every call is
    counted as one of answered, late or failed."""

    num_answered: int = 0
    """Number of calls whose responses came in time."""
    num_late: int = 0
    """Number of calls whose responses came after the deadline and were dropped."""
    num_failed: int = 0
    """Number of calls that failed before the deadline, or had invalid responses."""
    num_nodes: int = 0
    """Number of draft tokens that came in time."""
    num_resent: int = 0
    """Number of sequences that were sent again as a whole because the worker did not have them."""
    is_ready: bool = False
    """Whether the worker receives requests."""


@dataclass(frozen=True, eq=False)
class DraftPeer:
    """The channel, counts and traces of one draft worker."""

    channel: DraftChannel
    counts: DraftCounts = field(default_factory=DraftCounts)
    traces: DraftTraces = field(default_factory=DraftTraces)
    """Traces, which all draft workers of a verifier share."""


class EndpointState(Enum):
    """The state of a draft worker; the transitions are listed in the module's docstring."""

    AWAY = "away"
    CONNECTING = "connecting"
    READY = "ready"
    LATE = "late"
    RESTING = "resting"


class DraftEndpoint:
    """The state that the verifier keeps of one draft worker."""

    def __init__(self, peer: DraftPeer) -> None:
        self.channel = peer.channel
        self.counts = peer.counts
        self.traces = peer.traces
        self.state = EndpointState.AWAY
        self.due_s = 0.0
        """Time of the next change of state: for a worker that is away or rests, the end of its
        back-off; while a response is missing, the time at which the worker counts as failed (a
        channel should end its calls before that)."""
        self.backoff_s = FIRST_BACKOFF_S
        self.num_late = 0
        """Number of consecutive late responses."""
        self.num_sessions = 0
        self.ended: list[int] = []
        """Sessions that the next call of `forget` reports to the worker as ended."""
        self.description: Future[DraftModelInfo] | None = None
        self.late: Future[Sequence[DraftResponse]] | None = None


class RemoteSession:
    """One sequence, and its state at its draft worker."""

    __slots__ = ("backoff_s", "due_s", "endpoint", "num_sent", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.endpoint: DraftEndpoint | None = None
        self.num_sent = 0
        """Number of the sequence's first tokens that its worker has."""
        self.due_s = 0.0
        """End of the back-off after the worker lacked the sequence or had no room."""
        self.backoff_s = FIRST_BACKOFF_S

    def on_kept(self, num_tokens: int, *, is_whole: bool) -> None:
        """Record that the worker has the sequence's first `num_tokens` tokens. Args: is_whole:
        these are all of them."""
        self.num_sent = num_tokens
        if is_whole:
            self.backoff_s = FIRST_BACKOFF_S

    def on_unknown(self, now_s: float) -> None:
        """Record that the worker lacks the sequence or has no room: all tokens are sent again after
        a back-off that doubles."""
        self.num_sent = 0
        self.due_s = now_s + self.backoff_s
        self.backoff_s = min(2 * self.backoff_s, MAX_BACKOFF_S)

    def leave(self) -> None:
        """Detach the session from its worker, and reset the state that it had with it."""
        self.endpoint = None
        self.num_sent = 0
        self.due_s = 0.0
        self.backoff_s = FIRST_BACKOFF_S


class RemoteProposer:
    """A Proposer that calls draft workers.

    Args:
        target: the model that tokens are proposed for.
        deadline_s: longest time that a step waits for responses.
        give_up_s: time after that deadline at which a worker without a response counts as failed.
        verifier: the name of this verifier at the workers; None: a random one.
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
        self._endpoints = [DraftEndpoint(peer) for peer in peers]
        self._sessions: dict[Key, RemoteSession] = {}
        self._numbers = count()

    def connect(self) -> None:
        """Request the description of all workers' models, and wait for it. Called at the start,
        before requests are served; workers that are away are connected later. Raises: LoadError
        for a worker with another tokenizer."""
        for endpoint in self._endpoints:
            if endpoint.state is EndpointState.AWAY:
                self._begin_connecting(endpoint)
        wait([one.description for one in self._endpoints if one.description is not None], CONNECT_S)
        for endpoint in self._endpoints:
            description = endpoint.description
            if description is not None and description.done() and description.exception() is None:
                problem = self._misfit(endpoint, description.result())
                if problem:
                    raise LoadError(problem)
            self._update(endpoint)

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Send the tasks' new tokens to their workers, wait for responses until the deadline, and
        return their drafts; empty drafts for tasks without a response in time."""
        for endpoint in self._endpoints:
            self._update(endpoint)
        began_s = self._clock()
        ends_s = began_s + self._deadline_s
        requests = self._requests(tasks)
        calls = {
            endpoint: call
            for endpoint, own in requests.items()
            if (call := self._call(endpoint, list(own.values()))) is not None
        }
        wait(calls.values(), max(0.0, ends_s - self._clock()))
        drafts = [NOTHING] * len(tasks)
        for endpoint, call in calls.items():
            sent = [(tasks[place], request) for place, request in requests[endpoint].items()]
            found = self._collect(endpoint, call, sent)
            if endpoint.traces.is_on:
                self._trace(endpoint, call, began_s, sent, found)
            for place, draft in zip(requests[endpoint], found, strict=False):
                drafts[place] = draft
        return drafts

    def forget(self, key: Key) -> None:
        """Drop the session of a sequence; its worker learns of it with the next calls."""
        session = self._sessions.pop(key, None)
        if session is not None and session.endpoint is not None:
            session.endpoint.num_sessions -= 1
            session.endpoint.ended.append(session.number)
        if not self._sessions:  # there may be no further step that sends it
            for endpoint in self._endpoints:
                self._send_ended(endpoint)

    def check_integrity(self) -> None:
        """Check the sessions. Raises: IntegrityError where a worker's count is wrong, a worker that
        is left out has sessions, or two sequences share one."""
        for endpoint in self._endpoints:
            own = [one for one in self._sessions.values() if one.endpoint is endpoint]
            if len(own) != endpoint.num_sessions:
                raise IntegrityError(
                    f"{endpoint.channel.address}: {endpoint.num_sessions} sessions counted, "
                    f"{len(own)}"
                )
            if own and endpoint.state in (EndpointState.AWAY, EndpointState.CONNECTING):
                raise IntegrityError(f"{endpoint.channel.address}: has sessions, and is left out")
        numbers = {one.number for one in self._sessions.values()}
        if len(numbers) < len(self._sessions):
            raise IntegrityError("two sequences are one session")

    # ---- sessions

    def _session(self, key: Key) -> RemoteSession:
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = RemoteSession(next(self._numbers))
        return session

    def _endpoint_of(self, session: RemoteSession) -> DraftEndpoint | None:
        """Return the worker of a session, and assign one if it has none; None if no worker is
        ready."""
        if session.endpoint is None:
            ready = [one for one in self._endpoints if one.state is EndpointState.READY]
            if not ready:
                return None
            session.endpoint = max(ready, key=lambda one: self._weight(session.number, one))
            session.endpoint.num_sessions += 1
        return session.endpoint

    def _weight(self, number: int, endpoint: DraftEndpoint) -> bytes:
        """Return the weight of a worker for a session in rendezvous hashing: a worker that comes or
        goes moves no sessions but its own."""
        name = f"{number} {endpoint.channel.address}".encode()
        return hashlib.blake2b(name, digest_size=8, key=self._verifier).digest()

    # ---- one call

    def _requests(self, tasks: Sequence[DraftTask]) -> dict[DraftEndpoint, dict[int, DraftRequest]]:
        """Build the requests of this step, by worker and index of the task."""
        wanted: list[tuple[int, DraftEndpoint, RemoteSession]] = []
        now_s = self._clock()
        for place, task in enumerate(tasks):
            session = self._session(task.key)
            endpoint = self._endpoint_of(session)
            is_ready = endpoint is not None and endpoint.state is EndpointState.READY
            if endpoint is not None and is_ready and now_s >= session.due_s:
                wanted.append((place, endpoint, session))
        found: dict[DraftEndpoint, dict[int, DraftRequest]] = {}
        counts = num_tokens_to_send((session, tasks[place]) for place, _, session in wanted)
        for (place, endpoint, session), num_tokens in zip(wanted, counts, strict=True):
            if num_tokens is not None:
                request = make_request(session, tasks[place], num_tokens)
                found.setdefault(endpoint, {})[place] = request
        return found

    def _call(
        self, endpoint: DraftEndpoint, requests: Sequence[DraftRequest]
    ) -> Future[Sequence[DraftResponse]] | None:
        """Start a call. Returns: None if it failed at once."""
        self._send_ended(endpoint)
        try:
            return endpoint.channel.propose(
                self._verifier, requests, self._deadline_s + self._give_up_s
            )
        except Exception as error:
            endpoint.counts.num_failed += 1
            self._leave_out(endpoint, error)
            return None

    def _collect(
        self,
        endpoint: DraftEndpoint,
        call: Future[Sequence[DraftResponse]],
        sent: Sequence[tuple[DraftTask, DraftRequest]],
    ) -> list[Draft]:
        """Read the result of a call. Returns: a draft for each task; an empty list if there is no
        result."""
        if not call.done():
            endpoint.counts.num_late += 1
            endpoint.num_late += 1
            endpoint.state = EndpointState.LATE
            endpoint.late = call
            endpoint.due_s = self._clock() + 2 * self._give_up_s
            return []
        try:
            responses = call.result()
            if len(responses) != len(sent):
                raise ValueError(f"{len(responses)} responses to {len(sent)} requests")
            trees = [
                self._tree(response, request.num_nodes)
                for response, (_, request) in zip(responses, sent, strict=True)
            ]
        except Exception as error:
            endpoint.counts.num_failed += 1
            self._leave_out(endpoint, error)
            return []
        endpoint.num_late = 0
        endpoint.backoff_s = FIRST_BACKOFF_S
        endpoint.counts.num_answered += 1
        for (task, request), response, tree in zip(sent, responses, trees, strict=True):
            session = self._sessions[task.key]
            if response.is_known:
                num_tokens = request.start + len(request.token_ids)
                session.on_kept(num_tokens, is_whole=num_tokens == len(task.token_ids))
            else:
                endpoint.counts.num_resent += request.start > 0
                session.on_unknown(self._clock())
            endpoint.counts.num_nodes += len(tree)
        return [Draft(tree, {}) for tree in trees]

    def _trace(
        self,
        endpoint: DraftEndpoint,
        call: Future[Sequence[DraftResponse]],
        began_s: float,
        sent: Sequence[tuple[DraftTask, DraftRequest]],
        found: Sequence[Draft],
    ) -> None:
        """Record a call for traced requests."""
        is_late = endpoint.late is call
        nums = [len(draft.tree) for draft in found] or [0] * len(sent)
        endpoint.traces.note(
            endpoint.channel.address,
            began_s,
            self._clock(),
            [(task.key, num) for (task, _), num in zip(sent, nums, strict=True)],
            is_late=is_late,
            is_failed=not found and not is_late,
        )

    def _tree(self, response: DraftResponse, most: int) -> TokenTree:
        """Build the token tree of a response. Raises: ValueError if it is not a tree of the
        target's tokens, or has more than `most` nodes."""
        num_nodes = len(response.token_ids)
        if num_nodes > most or (num_nodes and not response.is_known):
            raise ValueError(f"{num_nodes} nodes, {most} at most were requested")
        if any(not 0 <= token_id < self._target.vocab_size for token_id in response.token_ids):
            raise ValueError("a token that is not in the vocabulary")
        return TokenTree(
            tuple(response.token_ids),
            tuple(response.parents),
            tuple(response.chances),
            ((),) * num_nodes,
        )

    def _send_ended(self, endpoint: DraftEndpoint) -> None:
        if endpoint.ended:
            ended, endpoint.ended = endpoint.ended, []
            try:
                for first in range(0, len(ended), MAX_ENDED_SESSIONS):
                    endpoint.channel.forget(
                        self._verifier, ended[first : first + MAX_ENDED_SESSIONS]
                    )
            except Exception as error:  # it evicts them by itself
                logger.debug("draft worker %s: %s", endpoint.channel.address, error)

    # ---- state of workers

    def _update(self, endpoint: DraftEndpoint) -> None:
        """Update the state of a worker from the responses since the last step."""
        is_due = self._clock() >= endpoint.due_s
        if endpoint.state is EndpointState.AWAY:
            if is_due:
                self._begin_connecting(endpoint)
        elif endpoint.state is EndpointState.LATE:
            self._update_late(endpoint, is_due)
        elif endpoint.state is EndpointState.RESTING and is_due:
            endpoint.state = EndpointState.READY
        if endpoint.state is EndpointState.CONNECTING:
            self._update_connecting(endpoint, is_due)

    def _update_late(self, endpoint: DraftEndpoint, is_due: bool) -> None:
        late = endpoint.late
        if late is not None and late.done():
            error = None if late.cancelled() else late.exception()
            endpoint.late = None
            if error is not None:
                self._leave_out(endpoint, error)
            elif endpoint.num_late < MAX_LATE:
                endpoint.state = EndpointState.READY
            else:
                self._begin_rest(endpoint)
        elif is_due:
            self._leave_out(endpoint, "no response")

    def _begin_rest(self, endpoint: DraftEndpoint) -> None:
        seconds = min(endpoint.backoff_s, MAX_LATE_REST_S)
        logger.info(
            "draft worker %s responds, but later than draft_deadline_s (%g s), %d times in a row: "
            "it receives no requests for %.1f s",
            endpoint.channel.address,
            self._deadline_s,
            endpoint.num_late,
            seconds,
        )
        endpoint.state = EndpointState.RESTING
        endpoint.due_s = self._clock() + seconds
        endpoint.backoff_s = min(2 * endpoint.backoff_s, MAX_LATE_REST_S)

    def _update_connecting(self, endpoint: DraftEndpoint, is_due: bool) -> None:
        description = endpoint.description
        if description is None or not description.done():
            if is_due:
                self._leave_out(endpoint, "no response")
            return
        try:
            problem: object = self._misfit(endpoint, description.result())
        except Exception as error:
            problem = error
        if problem:
            self._leave_out(endpoint, problem)
            return
        endpoint.description = None
        endpoint.state = EndpointState.READY
        endpoint.num_late = 0
        endpoint.counts.is_ready = True
        logger.info("draft worker %s is ready", endpoint.channel.address)

    def _begin_connecting(self, endpoint: DraftEndpoint) -> None:
        try:
            endpoint.description = endpoint.channel.describe(CONNECT_S)
            endpoint.state = EndpointState.CONNECTING
            endpoint.due_s = self._clock() + 2 * CONNECT_S
        except Exception as error:
            self._leave_out(endpoint, error)

    def _misfit(self, endpoint: DraftEndpoint, info: DraftModelInfo) -> str:
        """Return the reason why a worker's draft tokens cannot be used; empty if they can."""
        target = self._target
        if (info.vocab_size, info.tokenizer_digest) == (
            target.vocab_size,
            target.tokenizer_digest,
        ):
            return ""
        return (
            f"speculation.draft_workers: {endpoint.channel.address} serves {info.model}, which has "
            f"another tokenizer than {target.model}; its tokens mean other texts. Name a worker "
            "with a model of the same family"
        )

    def _leave_out(self, endpoint: DraftEndpoint, why: object) -> None:
        """Send a worker no requests until its back-off is over. Its sessions move to other
        workers."""
        if endpoint.state in (EndpointState.READY, EndpointState.LATE, EndpointState.RESTING):
            logger.warning(
                "draft worker %s is left out for %.1f s: %s",
                endpoint.channel.address,
                endpoint.backoff_s,
                str(why)[:200],
            )
        elif endpoint.backoff_s == FIRST_BACKOFF_S:
            logger.warning("draft worker %s: %s", endpoint.channel.address, str(why)[:200])
        endpoint.state = EndpointState.AWAY
        endpoint.counts.is_ready = False
        endpoint.due_s = self._clock() + endpoint.backoff_s
        endpoint.backoff_s = min(2 * endpoint.backoff_s, MAX_BACKOFF_S)
        endpoint.description = endpoint.late = None
        endpoint.num_sessions = 0
        endpoint.ended.clear()
        for session in self._sessions.values():
            if session.endpoint is endpoint:
                session.leave()


def make_request(session: RemoteSession, task: DraftTask, num_tokens: int) -> DraftRequest:
    """Build the request with the next `num_tokens` tokens of a sequence. It asks for no nodes if
    more tokens follow. A drawn task asks for the likeliest tokens (temperature 0), since the
    worker does not have the target's noise."""
    sampling = task.sampling
    start = session.num_sent
    end = start + num_tokens
    return DraftRequest(
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


def num_tokens_to_send(wanted: Iterable[tuple[RemoteSession, DraftTask]]) -> list[int | None]:
    """Choose the number of tokens of each sequence that this step sends to its worker, together at
    most MAX_NEW_TOKENS; None: no request.

    Sequences with a step's few new tokens come first, since they get drafts now; then whole texts,
    the oldest first.
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
