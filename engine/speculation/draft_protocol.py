"""Messages between a verifier (an engine with draft workers) and a draft worker: requests by
session and by the tokens that are new, and responses with token trees. Values and a Protocol; the
RPC is the services'.

A session is one sequence of one verifier. The verifier numbers its sessions, and never uses a
number twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

VERIFIER_BYTES = 16
"""Length of a verifier's name, which is random and new with each start."""
NEW_TOKENS = 16
"""A session with more tokens than these that the draft model has not computed is caught up with
between calls. Above what a step of a verifier brings, draft tokens included; guessed."""
MAX_NEW_TOKENS = 8192
"""Largest number of tokens of one call, a request counted as one at least; a verifier sends no more
to all its workers in one step. So an engine's thread builds its calls in a few milliseconds, and no
call comes near the size limit of a message. A new text has no drafts until it is computed, so that
its parts may as well come in several steps."""
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
    """Unsigned 64 bits."""
    start: int
    """Number of the sequence's tokens that earlier requests brought."""
    token_ids: Sequence[int]
    """The sequence from `start` on: all of it, or, with `num_nodes` 0, the next part."""
    num_prompt_tokens: int
    num_nodes: int
    """Largest useful number of nodes; 0: more tokens follow in the next request."""
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    sample_index: int


class DraftResponse(NamedTuple):
    """A token tree, depth-first (TokenTree without tries). The receiver must check it."""

    is_known: bool
    """False: the worker lacks tokens before `start`, or has no room. The verifier sends all of them
    again later. There are no nodes."""
    token_ids: Sequence[int]
    parents: Sequence[int]
    chances: Sequence[float]


UNKNOWN_SESSION = DraftResponse(False, (), (), ())


class DraftChannel(Protocol):
    """The connection to one draft worker. No method waits, and each may be called from any thread.
    A future fails with some exception when the worker does not respond within `timeout_s`."""

    @property
    def address(self) -> str:
        """Address of the worker, for metrics and errors."""
        ...

    def describe(self, timeout_s: float) -> Future[DraftModelInfo]:
        """Ask which model the worker has now."""
        ...

    def propose(
        self, verifier: bytes, requests: Sequence[DraftRequest], timeout_s: float
    ) -> Future[Sequence[DraftResponse]]:
        """Ask for a response to each request; together at most MAX_NEW_TOKENS."""
        ...

    def forget(self, verifier: bytes, sessions: Sequence[int]) -> None:
        """Tell the worker that these sessions, at most MAX_ENDED_SESSIONS, have ended; their
        numbers are not used again. The caller does not learn whether the worker received it, or in
        which order with requests."""
        ...
