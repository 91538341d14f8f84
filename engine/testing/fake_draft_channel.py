"""FakeDraftChannel: a draft worker in this process, for tests of a verifier: the sessions and the
proposer of a real one, without an RPC, and with faults on request. It has no thread: a call is
computed when it is made, or, with `withholds`, when `let_go` is called. One thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from engine.speculation.draft_protocol import DraftModelInfo, DraftRequest, DraftResponse
from engine.speculation.draft_sessions import DraftSessions

T = TypeVar("T")
Spoil = Callable[[Sequence[DraftResponse]], Sequence[DraftResponse]]


class FakeDraftChannel:
    """A DraftChannel to a worker in this process.

    Args: sessions: the worker's sessions; replaced by `restart`.
    """

    def __init__(self, address: str, info: DraftModelInfo, sessions: DraftSessions) -> None:
        self.address = address
        self.info = info
        self.sessions = sessions
        self.is_away = False
        """Whether every call fails at once."""
        self.withholds = False
        """Whether calls have no response before `let_go`."""
        self.spoil: Spoil | None = None
        """Changes responses before they arrive; None: unchanged."""
        self.num_calls = 0
        self.num_tokens_sent = 0
        self._withheld: list[Callable[[], None]] = []

    def describe(self, timeout_s: float) -> Future[DraftModelInfo]:
        """Return the description of the worker's model."""
        return self._begin(lambda: self.info)

    def propose(
        self, verifier: bytes, requests: Sequence[DraftRequest], timeout_s: float
    ) -> Future[Sequence[DraftResponse]]:
        """Return the responses of the worker's sessions."""
        self.num_calls += 1
        self.num_tokens_sent += sum(len(request.token_ids) for request in requests)

        def respond() -> Sequence[DraftResponse]:
            self.sessions.check(verifier, requests)
            responses = self.sessions.propose([(verifier, request) for request in requests])
            while self.sessions.catch_up():
                pass
            return responses if self.spoil is None else self.spoil(responses)

        return self._begin(respond)

    def forget(self, verifier: bytes, sessions: Sequence[int]) -> None:
        """Drop sessions of the worker."""
        if not self.is_away:
            self.sessions.forget(verifier, sessions)

    def restart(self, sessions: DraftSessions) -> None:
        """Restart the worker with other sessions."""
        self.sessions = sessions
        self._withheld.clear()

    def let_go(self) -> None:
        """Deliver all withheld responses."""
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
