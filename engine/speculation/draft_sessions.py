"""DraftSessions: the sequences that verifiers have guessed for here, by what they sent of them, and
the drafter that guesses. A draft worker without its RPC.

Bounded: who was not asked for lately gives way, and its verifier is told with its next ask; where
there is nobody like that, who comes is not kept. A text that is new here (a long prompt, a sequence
that comes from another worker, one whose KV has given way) is computed piece by piece between calls
(`catch_up`), and has no guesses until then: no call computes it.

One thread. Token ids that are kept are counted (`check_integrity`).
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
from engine.speculation.draft_port import (
    MAX_NEW_TOKENS,
    MAX_OVER,
    NEW_TOKENS,
    UNKNOWN,
    VERIFIER_BYTES,
    Answer,
    Ask,
)
from engine.speculation.drafter import Drafter, Task

TOKEN_BYTES = array("I").itemsize
"""Of a token that is kept."""
SESSION_BYTES = 1024
"""What a session is counted with beside its tokens."""
BUSY_S = 5.0
"""Who was asked for in the last so many seconds does not give way: verifiers that ask in turn would
have each other's sessions sent anew for ever. Above the seconds between two steps; guessed."""


class CachingDrafter(Drafter, Protocol):
    """A Drafter that says what it has computed."""

    def num_cached(self, key: Key) -> int:
        """Tokens of this sequence, from its first, that it need not compute again."""
        ...

    def has_room(self, key: Key, num_tokens: int) -> bool:
        """Whether it can keep a sequence of so many tokens beside all others."""
        ...


@dataclass(frozen=True)
class SessionLimits:
    """Bounds of what is kept, and of one call."""

    max_num_sessions: int
    max_session_bytes: int
    max_num_nodes: int
    catch_up_tokens: int
    """Computed at once between two calls."""


@dataclass(slots=True)
class _Held:
    """One sequence."""

    sampling: Sampling
    sample_index: int = 0
    num_prompt_tokens: int = 0
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    asked_s: float = 0.0
    """When it was last asked for."""

    @property
    def num_bytes(self) -> int:
        return SESSION_BYTES + TOKEN_BYTES * len(self.token_ids)


class DraftSessions:
    """See the module. Raises: what the drafter raises; it should not be used any more then.

    Args:
        vocab_size: of the drafter; no other token id gets to it.
    """

    def __init__(
        self,
        drafter: CachingDrafter,
        vocab_size: int,
        limits: SessionLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._drafter = drafter
        self._clock = clock
        self._vocab_size = vocab_size
        self._limits = limits
        self._held: dict[Key, _Held] = {}  # who was asked for longest ago comes first
        self._behind: dict[Key, None] = {}
        self.num_bytes = 0
        self.num_asked = self.num_nodes = self.num_unknown = self.num_evicted = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def is_behind(self) -> bool:
        """There is something to catch up with."""
        return bool(self._behind)

    def check(self, verifier: bytes, asks: Iterable[Ask]) -> None:
        """Any thread. Raises: ValueError `field: what is wrong` for what must not get to the
        drafter."""
        _check_verifier(verifier)
        sessions: set[int] = set()
        num_new = 0
        for ask in asks:
            num_new += max(1, len(ask.token_ids))
            if num_new > MAX_NEW_TOKENS:
                raise ValueError(f"token_ids: a call brings more than {MAX_NEW_TOKENS}")
            if ask.session in sessions:
                raise ValueError(f"session: {ask.session} is asked for twice")
            sessions.add(ask.session)
            if ask.start + len(ask.token_ids) < 1:
                raise ValueError("token_ids: a sequence has none")
            if ask.token_ids and max(ask.token_ids) >= self._vocab_size:
                raise ValueError(
                    f"token_ids: {max(ask.token_ids)} is not below {self._vocab_size}, the size of "
                    "the vocabulary"
                )
            if not (math.isfinite(ask.temperature) and ask.temperature >= 0.0):
                raise ValueError(f"temperature: {ask.temperature} is no temperature")
            if not 0.0 < ask.top_p <= 1.0:
                raise ValueError(f"top_p: {ask.top_p} is not in (0, 1]")
            if not 0.0 <= ask.min_p <= 1.0:
                raise ValueError(f"min_p: {ask.min_p} is not in [0, 1]")

    def check_over(self, verifier: bytes, sessions: Sequence[int]) -> None:
        """Any thread. Raises: ValueError as `check`."""
        _check_verifier(verifier)
        if len(sessions) > MAX_OVER:
            raise ValueError(f"sessions: {len(sessions)}, above {MAX_OVER}")

    def propose(self, asked: Sequence[tuple[bytes, Ask]]) -> list[Answer]:
        """An answer to each (verifier, ask) that `check` has let pass, of whichever verifiers; none
        is asked for twice."""
        keys = [(verifier.hex(), ask.session) for verifier, ask in asked]
        newcomers = {key for key in keys if key not in self._held}
        known = [self._take(key, ask) for key, (_, ask) in zip(keys, asked, strict=True)]
        brought = {key: len(ask.token_ids) for key, (_, ask) in zip(keys, asked, strict=True)}
        self._make_room(brought, newcomers)
        answers: list[Answer] = []
        tasks: dict[int, Task] = {}
        for place, (key, (_, ask)) in enumerate(zip(keys, asked, strict=True)):
            held = self._held.get(key) if known[place] else None
            if held is None:
                answers.append(UNKNOWN)
                continue
            answers.append(Answer(True, (), (), ()))
            if len(held.token_ids) - self._drafter.num_cached(key) > NEW_TOKENS:
                self._behind[key] = None
            else:
                num_nodes = min(ask.num_nodes, self._limits.max_num_nodes)
                tasks[place] = _task(key, held, held.token_ids, num_nodes)
                self._behind.pop(key, None)
        drafts = self._drafter.propose(list(tasks.values()))
        for place, draft in zip(tasks, drafts, strict=True):
            tree = draft.tree
            answers[place] = Answer(True, tree.token_ids, tree.parents, tree.chances)
            self.num_nodes += len(tree)
        self.num_asked += len(asked)
        self.num_unknown += sum(not answer.is_known for answer in answers)
        return answers

    def catch_up(self) -> bool:
        """Compute a piece of what is new, if anything is. Returns: whether there is more."""
        key = next(iter(self._behind), None)
        if key is None:
            return False
        # In turn: a long text does not keep short ones waiting.
        del self._behind[key]
        token_ids = self._held[key].token_ids
        if not self._has_kv_room(key):
            # Until it is asked for again; what there is of it is in others' way.
            self._drafter.forget(key)
            return self.is_behind
        before = self._drafter.num_cached(key)
        piece = token_ids[: before + self._limits.catch_up_tokens]
        self._drafter.propose([_task(key, self._held[key], piece, 0)])
        if before < self._drafter.num_cached(key) < len(token_ids):
            self._behind[key] = None
        return self.is_behind

    def _has_kv_room(self, key: Key) -> bool:
        """For all of it; who was not asked for lately loses what was computed, if that helps."""
        num_tokens = len(self._held[key].token_ids)
        soon_s = self._clock() - BUSY_S
        for other, held in self._held.items():
            if held.asked_s > soon_s or self._drafter.has_room(key, num_tokens):
                break
            if other != key:
                self._drafter.forget(other)
        return self._drafter.has_room(key, num_tokens)

    def forget(self, verifier: bytes, sessions: Iterable[int]) -> None:
        """These are over; does nothing for one that is not known."""
        for session in sessions:
            self._drop((verifier.hex(), session))

    def check_integrity(self) -> None:
        """Raises: IntegrityError where what is kept does not add up."""
        num_bytes = sum(held.num_bytes for held in self._held.values())
        if num_bytes != self.num_bytes:
            raise IntegrityError(f"sessions: {self.num_bytes} bytes counted, {num_bytes} kept")
        if num_bytes > self._limits.max_session_bytes:
            raise IntegrityError(f"sessions: {num_bytes} bytes kept, above the bound")
        if len(self._held) > self._limits.max_num_sessions:
            raise IntegrityError(f"sessions: {len(self._held)} kept, above the bound")
        if not self._behind.keys() <= self._held.keys():
            raise IntegrityError("sessions: one that is not kept is caught up with")
        for key, held in self._held.items():
            num_cached = self._drafter.num_cached(key)
            if num_cached > len(held.token_ids):
                raise IntegrityError(f"{key}: {num_cached} of {len(held.token_ids)} computed")
        self._drafter.check_integrity()

    def _take(self, key: Key, ask: Ask) -> bool:
        """Have its tokens. Returns: False where some before `start` are not here."""
        held = self._held.get(key)
        if ask.start > (0 if held is None else len(held.token_ids)):
            self._drop(key)
            return False
        sampling = Sampling(
            max_tokens=1,  # of no account: how many nodes are of use is said besides
            temperature=ask.temperature,
            top_p=ask.top_p,
            top_k=ask.top_k,
            min_p=ask.min_p,
            seed=ask.seed,
        )
        if held is None:
            held = _Held(sampling)
        else:
            del self._held[key]
            self.num_bytes -= held.num_bytes
        held.sampling = sampling
        held.asked_s = self._clock()
        held.sample_index = ask.sample_index
        held.num_prompt_tokens = ask.num_prompt_tokens
        told = array("I", ask.token_ids)
        if held.token_ids[ask.start :] != told[: len(held.token_ids) - ask.start]:
            # Another text than was sent before: what the drafter has computed is of no use.
            self._drafter.forget(key)
        del held.token_ids[ask.start :]
        held.token_ids.extend(told)
        self._held[key] = held
        self.num_bytes += held.num_bytes
        return True

    def _make_room(self, asked: Mapping[Key, int], newcomers: Collection[Key]) -> None:
        """Whoever was not asked for lately gives way first, then newcomers, then who else asks.

        Args:
            asked: the call's, with how many tokens it brings.
        """
        if self._fits():
            return
        soon_s = self._clock() - BUSY_S
        for key in [key for key, held in self._held.items() if held.asked_s <= soon_s]:
            if self._fits():
                return
            self._drop(key)
            self.num_evicted += 1
        # Who brings most goes first; of equals, the last.
        for key in sorted(reversed([*asked]), key=lambda key: (key not in newcomers, -asked[key])):
            if self._fits():
                return
            if key in self._held:
                self._drop(key)
                self.num_evicted += key not in newcomers

    def _fits(self) -> bool:
        limits = self._limits
        return (
            len(self._held) <= limits.max_num_sessions
            and self.num_bytes <= limits.max_session_bytes
        )

    def _drop(self, key: Key) -> None:
        held = self._held.pop(key, None)
        if held is not None:
            self.num_bytes -= held.num_bytes
            self._behind.pop(key, None)
            self._drafter.forget(key)


def _check_verifier(verifier: bytes) -> None:
    if len(verifier) != VERIFIER_BYTES:
        raise ValueError(f"verifier: {len(verifier)} bytes, not {VERIFIER_BYTES}")


def _task(key: Key, held: _Held, token_ids: Sequence[int], num_nodes: int) -> Task:
    return Task(
        key,
        token_ids,
        held.num_prompt_tokens,
        held.sampling,
        held.sample_index,
        num_nodes,
    )
