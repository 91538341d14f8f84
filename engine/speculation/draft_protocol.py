"""Messages between a verifier (an engine with draft workers) and a draft worker: requests by
session with new tokens, and responses with token trees. Values and a Protocol; the RPC is
implemented in services.

A session is one sequence of one verifier. The verifier numbers its sessions and never reuses a
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

VERIFIER_BYTES = 16
"""Length of a verifier's name in bytes; the name is random and new with each start."""
NEW_TOKENS = 16
"""Number of tokens not yet computed by the draft model above which a session is caught up with
between calls. It is above the number that a verifier's step adds, draft tokens included;
guessed."""
MAX_NEW_TOKENS = 8192
"""Largest number of tokens of one call, where a request counts as at least one, and of all calls of
a verifier in one step. It limits the time to build the calls to a few milliseconds, and the size
of a message. A longer new text is sent in several steps."""
MAX_ENDED_SESSIONS = 4096
"""Largest number of sessions in one call of `forget`."""


class DraftModelInfo(NamedTuple):
    """The draft model of a draft worker."""

    model: str
    tokenizer_digest: str
    vocab_size: int


class DraftRequest(NamedTuple):
    """One sequence to propose tokens for: a DraftTask on the wire."""

    session: int
    """Number of the session, unsigned 64 bits."""
    start: int
    """Number of the sequence's tokens that earlier requests contained."""
    token_ids: Sequence[int]
    """The sequence's tokens from `start` on: all of them, or, with `num_nodes` 0, the next part."""
    num_prompt_tokens: int
    num_nodes: int
    """Largest number of nodes that the step can use; 0: more tokens follow in the next request."""
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    sample_index: int


class DraftResponse(NamedTuple):
    """The draft tokens of one request: a token tree in depth-first order (TokenTree without tries).
    The receiver must check it."""

    is_known: bool
    """False: the worker lacks tokens before `start`, or has no room, and the response has no nodes.
    The verifier sends all tokens again later."""
    token_ids: Sequence[int]
    parents: Sequence[int]
    chances: Sequence[float]


UNKNOWN_SESSION = DraftResponse(False, (), (), ())


class DraftChannel(Protocol):
    """The connection to one draft worker. No method blocks, and each may be called from any thread.
    A future fails with an exception if the worker does not respond within `timeout_s` seconds."""

    @property
    def address(self) -> str:
        """Address of the worker, for metrics and errors."""
        ...

    def describe(self, timeout_s: float) -> Future[DraftModelInfo]:
        """Request a description of the worker's present model."""
        ...

    def propose(
        self, verifier: bytes, requests: Sequence[DraftRequest], timeout_s: float
    ) -> Future[Sequence[DraftResponse]]:
        """Request draft tokens. Returns: a future of one response per request.

        Args:
            verifier: name of the caller, VERIFIER_BYTES long.
            requests: with at most MAX_NEW_TOKENS tokens together.
        """
        ...

    def forget(self, verifier: bytes, sessions: Sequence[int]) -> None:
        """Report to the worker that sessions, at most MAX_ENDED_SESSIONS, have ended; their numbers
        are not used again. Delivery and order relative to requests are not guaranteed."""
        ...
