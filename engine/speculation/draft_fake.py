"""FakeDraftChannel: a draft worker in this process, for who tests a verifier: the same sessions and
the same drafters as a real one, without an RPC, and faults on request.

It has no thread of its own: a call is computed when it is made, or, where answers are withheld,
when `let_go` is called. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from engine.speculation.draft_port import About, Answer, Ask
from engine.speculation.draft_sessions import DraftSessions

T = TypeVar("T")
Spoil = Callable[[Sequence[Answer]], Sequence[Answer]]


class FakeDraftChannel:
    """A DraftChannel (draft_port.py). See the module.

    Args:
        sessions: what the worker keeps; replaced by `restart`.
    """

    def __init__(self, address: str, about: About, sessions: DraftSessions) -> None:
        self.address = address
        self.about = about
        self.sessions = sessions
        self.is_away = False
        """Every call fails at once."""
        self.withholds = False
        """No call has an answer before `let_go`."""
        self.spoil: Spoil | None = None
        """What becomes of answers on their way."""
        self.num_calls = 0
        self.num_tokens_sent = 0
        self._withheld: list[Callable[[], None]] = []

    def describe(self, timeout_s: float) -> Future[About]:
        """See DraftChannel."""
        return self._begin(lambda: self.about)

    def propose(
        self, verifier: bytes, asks: Sequence[Ask], timeout_s: float
    ) -> Future[Sequence[Answer]]:
        """See DraftChannel."""
        self.num_calls += 1
        self.num_tokens_sent += sum(len(ask.token_ids) for ask in asks)

        def answer() -> Sequence[Answer]:
            self.sessions.check(verifier, asks)
            answers = self.sessions.propose([(verifier, ask) for ask in asks])
            while self.sessions.catch_up():
                pass
            return answers if self.spoil is None else self.spoil(answers)

        return self._begin(answer)

    def forget(self, verifier: bytes, sessions: Sequence[int]) -> None:
        """See DraftChannel."""
        if not self.is_away:
            self.sessions.forget(verifier, sessions)

    def restart(self, sessions: DraftSessions) -> None:
        """Another life: what was kept is gone."""
        self.sessions = sessions
        self._withheld.clear()

    def let_go(self) -> None:
        """Answers that were withheld come now."""
        withheld, self._withheld = self._withheld, []
        for settle in withheld:
            settle()

    def _begin(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def settle() -> None:
            try:
                if self.is_away:
                    raise ConnectionError(f"{self.address} is away")
                future.set_result(work())
            except Exception as error:
                future.set_exception(error)

        if self.withholds:
            self._withheld.append(settle)
        else:
            settle()
        return future
