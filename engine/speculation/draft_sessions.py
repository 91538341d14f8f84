"""DraftSessions: the sequences that verifiers sent to a draft worker, and the proposer that drafts
for them: a draft worker without its RPC. Sessions that were not used lately are evicted when
limits are reached; where all were used lately, a new session is not kept. The verifier of a
session that is not kept receives a response with `is_known` False.

Tokens that are new here (a long prompt, a sequence from another worker, one whose KV was evicted)
are computed piece by piece between calls (`catch_up`); the session has no drafts until then. One
thread only, except where a method says otherwise.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.errors import IntegrityError
from engine.request import Sampling
from engine.sequence import Key
from engine.speculation.draft_protocol import (
    MAX_ENDED_SESSIONS,
    MAX_NEW_TOKENS,
    NEW_TOKENS,
    UNKNOWN_SESSION,
    VERIFIER_BYTES,
    DraftRequest,
    DraftResponse,
)
from engine.speculation.proposer import DraftTask, Proposer

TOKEN_BYTES = array("I").itemsize
"""Bytes of one kept token id."""
SESSION_BYTES = 1024
"""Bytes that a session counts in addition to its tokens."""
BUSY_S = 5.0
"""Time in seconds after its last use during which a session is not evicted: verifiers that call in
turn would else evict each other's sessions forever. Longer than the time between two steps;
guessed."""


class CachingProposer(Proposer, Protocol):
    """A Proposer that tells which tokens it has computed."""

    def num_cached(self, key: Key) -> int:
        """Return the number of the sequence's first tokens that are computed."""
        ...

    def has_room(self, key: Key, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens has room in addition to all others."""
        ...


@dataclass(frozen=True)
class SessionLimits:
    """Limits of all sessions, and of one call."""

    max_num_sessions: int
    max_session_bytes: int
    max_num_nodes: int
    catch_up_tokens: int
    """Number of tokens that `catch_up` computes in one piece."""


@dataclass(slots=True)
class _Session:
    """One sequence of a verifier."""

    sampling: Sampling
    sample_index: int = 0
    num_prompt_tokens: int = 0
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    requested_s: float = 0.0
    """Time of its last request, in seconds."""

    @property
    def num_bytes(self) -> int:
        return SESSION_BYTES + TOKEN_BYTES * len(self.token_ids)


class DraftSessions:
    """The sessions of all verifiers. Every method raises what the proposer raises, and the sessions
    must not be used after that.

    Args: vocab_size: the proposer's; requests with larger token ids are rejected.
    """

    def __init__(
        self,
        proposer: CachingProposer,
        vocab_size: int,
        limits: SessionLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proposer = proposer
        self._clock = clock
        self._vocab_size = vocab_size
        self._limits = limits
        self._sessions: dict[Key, _Session] = {}  # the least recently used comes first
        self._behind: dict[Key, None] = {}
        self.num_bytes = 0
        self.num_requests = self.num_nodes = self.num_unknown = self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def is_behind(self) -> bool:
        """Whether some session has tokens to compute between calls."""
        return bool(self._behind)

    def check(self, verifier: bytes, requests: Iterable[DraftRequest]) -> None:
        """Check requests before `propose`. Any thread.

        Raises: ValueError with the field and what is wrong.
        """
        _check_verifier(verifier)
        sessions: set[int] = set()
        num_new = 0
        for request in requests:
            num_new += max(1, len(request.token_ids))
            if num_new > MAX_NEW_TOKENS:
                raise ValueError(f"token_ids: a call brings more than {MAX_NEW_TOKENS}")
            if request.session in sessions:
                raise ValueError(f"session: {request.session} has two requests")
            sessions.add(request.session)
            if request.start + len(request.token_ids) < 1:
                raise ValueError("token_ids: a sequence has none")
            if request.token_ids and max(request.token_ids) >= self._vocab_size:
                raise ValueError(
                    f"token_ids: {max(request.token_ids)} is not below {self._vocab_size}, the "
                    "size of the vocabulary"
                )
            if not (math.isfinite(request.temperature) and request.temperature >= 0.0):
                raise ValueError(f"temperature: {request.temperature} is no temperature")
            if not 0.0 < request.top_p <= 1.0:
                raise ValueError(f"top_p: {request.top_p} is not in (0, 1]")
            if not 0.0 <= request.min_p <= 1.0:
                raise ValueError(f"min_p: {request.min_p} is not in [0, 1]")

    def check_ended(self, verifier: bytes, sessions: Sequence[int]) -> None:
        """Check the arguments of `forget`. Any thread. Raises: ValueError with the field and what
        is wrong."""
        _check_verifier(verifier)
        if len(sessions) > MAX_ENDED_SESSIONS:
            raise ValueError(f"sessions: {len(sessions)}, above {MAX_ENDED_SESSIONS}")

    def propose(self, requests: Sequence[tuple[bytes, DraftRequest]]) -> list[DraftResponse]:
        """Return the response to each (verifier, request). The requests must have passed `check`
        and name no session twice."""
        keys = [(verifier.hex(), request.session) for verifier, request in requests]
        new_keys = {key for key in keys if key not in self._sessions}
        known = [
            self._extend(key, request) for key, (_, request) in zip(keys, requests, strict=True)
        ]
        num_new = {
            key: len(request.token_ids) for key, (_, request) in zip(keys, requests, strict=True)
        }
        self._make_room(num_new, new_keys)
        responses: list[DraftResponse] = []
        tasks: dict[int, DraftTask] = {}
        for place, (key, (_, request)) in enumerate(zip(keys, requests, strict=True)):
            session = self._sessions.get(key) if known[place] else None
            if session is None:
                responses.append(UNKNOWN_SESSION)
                continue
            responses.append(DraftResponse(True, (), (), ()))
            if len(session.token_ids) - self._proposer.num_cached(key) > NEW_TOKENS:
                self._behind[key] = None
            else:
                num_nodes = min(request.num_nodes, self._limits.max_num_nodes)
                tasks[place] = _task(key, session, session.token_ids, num_nodes)
                self._behind.pop(key, None)
        drafts = self._proposer.propose(list(tasks.values()))
        for place, draft in zip(tasks, drafts, strict=True):
            tree = draft.tree
            responses[place] = DraftResponse(True, tree.token_ids, tree.parents, tree.chances)
            self.num_nodes += len(tree)
        self.num_requests += len(requests)
        self.num_unknown += sum(not response.is_known for response in responses)
        return responses

    def catch_up(self) -> bool:
        """Compute the next piece of one session that has tokens to compute. Returns: whether any
        has more."""
        key = next(iter(self._behind), None)
        if key is None:
            return False
        # In turn: a long text does not keep short ones waiting.
        del self._behind[key]
        token_ids = self._sessions[key].token_ids
        if not self._has_kv_room(key):
            # Until its next request; its part is in the way of other sessions.
            self._proposer.forget(key)
            return self.is_behind
        before = self._proposer.num_cached(key)
        piece = token_ids[: before + self._limits.catch_up_tokens]
        self._proposer.propose([_task(key, self._sessions[key], piece, 0)])
        if before < self._proposer.num_cached(key) < len(token_ids):
            self._behind[key] = None
        return self.is_behind

    def _has_kv_room(self, key: Key) -> bool:
        """Whether all tokens of a session have room in the KV cache. Evicts the KV of sessions that
        were not used lately to make room."""
        num_tokens = len(self._sessions[key].token_ids)
        soon_s = self._clock() - BUSY_S
        for other, session in self._sessions.items():
            if session.requested_s > soon_s or self._proposer.has_room(key, num_tokens):
                break
            if other != key:
                self._proposer.forget(other)
        return self._proposer.has_room(key, num_tokens)

    def forget(self, verifier: bytes, sessions: Iterable[int]) -> None:
        """Drop sessions that have ended. Unknown ones are ignored."""
        for number in sessions:
            self._drop((verifier.hex(), number))

    def check_integrity(self) -> None:
        """Check sessions, counts and limits. Raises: IntegrityError where they are inconsistent."""
        num_bytes = sum(session.num_bytes for session in self._sessions.values())
        if num_bytes != self.num_bytes:
            raise IntegrityError(f"sessions: {self.num_bytes} bytes counted, {num_bytes} kept")
        if num_bytes > self._limits.max_session_bytes:
            raise IntegrityError(f"sessions: {num_bytes} bytes kept, above the bound")
        if len(self._sessions) > self._limits.max_num_sessions:
            raise IntegrityError(f"sessions: {len(self._sessions)} kept, above the bound")
        if not self._behind.keys() <= self._sessions.keys():
            raise IntegrityError("sessions: one is behind and not kept")
        for key, session in self._sessions.items():
            num_cached = self._proposer.num_cached(key)
            if num_cached > len(session.token_ids):
                raise IntegrityError(f"{key}: {num_cached} of {len(session.token_ids)} computed")
        self._proposer.check_integrity()

    def _extend(self, key: Key, request: DraftRequest) -> bool:
        """Add the request's tokens to its session. Returns: False if tokens before `start` are
        missing."""
        session = self._sessions.get(key)
        if request.start > (0 if session is None else len(session.token_ids)):
            self._drop(key)
            return False
        sampling = Sampling(
            max_tokens=1,  # not used: the request has num_nodes
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            seed=request.seed,
        )
        if session is None:
            session = _Session(sampling)
        else:
            del self._sessions[key]
            self.num_bytes -= session.num_bytes
        session.sampling = sampling
        session.requested_s = self._clock()
        session.sample_index = request.sample_index
        session.num_prompt_tokens = request.num_prompt_tokens
        sent = array("I", request.token_ids)
        if session.token_ids[request.start :] != sent[: len(session.token_ids) - request.start]:
            # Another text than was sent before: what was computed is of no use.
            self._proposer.forget(key)
        del session.token_ids[request.start :]
        session.token_ids.extend(sent)
        self._sessions[key] = session
        self.num_bytes += session.num_bytes
        return True

    def _make_room(self, num_new: Mapping[Key, int], new_keys: Collection[Key]) -> None:
        """Evict sessions until the new tokens fit: those that were not used lately; then new ones,
        then others of this call.

        Args:
            num_new: number of new tokens of each of the call's sessions.
            new_keys: the sessions that were created in this call.
        """
        if self._fits():
            return
        soon_s = self._clock() - BUSY_S
        for key in [
            key for key, session in self._sessions.items() if session.requested_s <= soon_s
        ]:
            if self._fits():
                return
            self._drop(key)
            self.num_evicted += 1
        # The session with the most new tokens goes first; among equals, the last.
        for key in sorted(
            reversed([*num_new]), key=lambda key: (key not in new_keys, -num_new[key])
        ):
            if self._fits():
                return
            if key in self._sessions:
                self._drop(key)
                self.num_evicted += key not in new_keys

    def _fits(self) -> bool:
        limits = self._limits
        return (
            len(self._sessions) <= limits.max_num_sessions
            and self.num_bytes <= limits.max_session_bytes
        )

    def _drop(self, key: Key) -> None:
        session = self._sessions.pop(key, None)
        if session is not None:
            self.num_bytes -= session.num_bytes
            self._behind.pop(key, None)
            self._proposer.forget(key)


def _check_verifier(verifier: bytes) -> None:
    if len(verifier) != VERIFIER_BYTES:
        raise ValueError(f"verifier: {len(verifier)} bytes, not {VERIFIER_BYTES}")


def _task(key: Key, session: _Session, token_ids: Sequence[int], num_nodes: int) -> DraftTask:
    return DraftTask(
        key,
        token_ids,
        session.num_prompt_tokens,
        session.sampling,
        session.sample_index,
        num_nodes,
    )
