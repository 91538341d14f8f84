"""One prompt's part of a prefill stream: its state, and an inbox of what its reader has not taken.

States: RUNNING -> OVER with the worker's account or its no; `close` leads from RUNNING to
CANCELLING, and the worker's last word from there to OVER; a broken stream leads to OVER from
everywhere. Nothing here waits on the network.

Law: a handle that came with an account is its reader's once it is taken; one that nobody takes is
given back. Partial handles go to whoever wants them as they come and are never kept. One asyncio
loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import Enum

from process import rpc
from process.errors import BatonError, Cancelled, Internal, Unavailable
from protos import prefill_pb2
from services.router.sealed_handle import PrefillNews, PrefillWord, SealedHandle

GiveBack = Callable[[SealedHandle], None]


class CallState(Enum):
    """See the module."""

    RUNNING = "running"
    CANCELLING = "cancelling"
    OVER = "over"


ALLOWED: dict[CallState, frozenset[CallState]] = {
    CallState.RUNNING: frozenset({CallState.CANCELLING, CallState.OVER}),
    CallState.CANCELLING: frozenset({CallState.OVER}),
    CallState.OVER: frozenset(),
}


class PrefillCall:
    """One key of one stream."""

    def __init__(
        self,
        key: int,
        who: str,
        *,
        send: Callable[[prefill_pb2.PrefillCommand], None],
        on_partial: Callable[[SealedHandle], None],
        give_back: GiveBack,
    ) -> None:
        """`who`: the worker, as errors name it. `on_partial`: told each partial handle, until the
        account is there or the call is closed."""
        self.key = key
        self.state = CallState.RUNNING
        self._who = who
        self._send = send
        self._on_partial = on_partial
        self._give_back = give_back
        self._inbox: deque[PrefillNews] = deque()
        self._error: BatonError | None = None
        self._changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self.state is CallState.OVER

    @property
    def has_news(self) -> bool:
        """Whether `next` has something without waiting."""
        return bool(self._inbox) or self._error is not None

    async def next(self) -> PrefillNews:
        """The next message that is no partial handle. The caller bounds the wait.

        Raises: what the worker or the broken stream says, behind what came before it; Internal
            behind the account.
        """
        while not self._inbox:
            if self._error is not None:
                raise self._error
            if self.is_over:
                raise Internal(f"{self._who} has said its last word")
            self._changed.clear()
            await self._changed.wait()
        return self._inbox.popleft()

    def close(self) -> None:
        """Nobody reads any more: ask for the end, and give back what was not taken. Any state,
        idempotent, never waits."""
        for news in self._inbox:
            self._drop(news)
        self._inbox.clear()
        if self.state is CallState.RUNNING:
            self._move(CallState.CANCELLING)
            cancel = prefill_pb2.CancelPrefill()
            self._send(prefill_pb2.PrefillCommand(key=self.key, cancel=cancel))

    def on_word(self, word: PrefillWord) -> None:
        """The stream's reader: something came for this key."""
        if word.failed is not None:
            self._fail(_error_of(word.failed, self._who))
            return
        news = word.news
        assert news is not None, "a word is news or a failure"
        is_closed = self.state is CallState.CANCELLING
        if word.is_last:
            self._move(CallState.OVER)
        if is_closed:
            self._drop(news)
        elif news.handle is not None and news.is_only_partial:
            self._on_partial(news.handle)
        else:
            self._inbox.append(news)
            self._changed.set()

    def fail(self, error: BatonError) -> None:
        """The end, by the stream's fault."""
        self._fail(error)

    def _fail(self, error: BatonError) -> None:
        self._error = error
        self._move(CallState.OVER)
        self._changed.set()

    def _drop(self, news: PrefillNews) -> None:
        if news.handle is not None and not news.handle.is_partial:
            self._give_back(news.handle)

    def _move(self, state: CallState) -> None:
        if state not in ALLOWED[self.state]:
            raise Internal(f"prefill call {self.key}: {self.state.value} -> {state.value}")
        self.state = state


def _error_of(failed: prefill_pb2.PrefillFailed, who: str) -> BatonError:
    retry_after_s = failed.retry_after_s if failed.HasField("retry_after_s") else None
    error = rpc.error_of_code(failed.code, failed.message, retry_after_s)
    if isinstance(error, Cancelled):
        # A stopping worker says so of prompts under way; nobody here cancelled.
        return Unavailable(f"{who} is stopping")
    return error
