"""Send a load, open-loop: each request goes out at its time, whether or not others have ended, and
what becomes of it is written down. One event loop.

There is exactly one outcome for each request planned: failures have theirs, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from baton.load.outcome import Arrival, Outcome
from baton.load.planned import Planned
from baton.load.senders import News, Sender
from process import errors

OnProgress = Callable[[int, int, int], None]
"""(planned, sent, ended)"""

_GRACE_S = 5.0
"""A sender ends by itself at the request's time; what has not by then is given up here."""


async def run(
    load: Sequence[Planned],
    sender: Sender,
    *,
    timeout_s: float,
    max_concurrency: int | None = None,
    on_progress: OnProgress | None = None,
) -> list[Outcome]:
    """Send all of `load`.

    Args:
        timeout_s: of each request, from its sending.
        max_concurrency: so many under way at once; the rest wait, which makes the loop a closed
            one, and shows as lag. None: no bound.
    Returns: outcomes in the order of `load`.
    """
    if max_concurrency is not None and max_concurrency < 1:
        raise errors.InvalidArgument("--max-concurrency", f"{max_concurrency} is less than 1")
    run = _Run(sender, timeout_s, len(load), on_progress)
    gate = asyncio.Semaphore(max_concurrency or len(load) or 1)
    tasks = []
    async with asyncio.TaskGroup() as group:
        for planned in load:
            await asyncio.sleep(max(0.0, planned.at_s - run.now_s()))
            await gate.acquire()
            task = group.create_task(run.one(planned))
            task.add_done_callback(lambda _: gate.release())
            tasks.append(task)
    return [task.result() for task in tasks]


class _Run:
    """What the requests of one load share."""

    def __init__(
        self, sender: Sender, timeout_s: float, num_planned: int, on_progress: OnProgress | None
    ) -> None:
        self._sender = sender
        self._timeout_s = timeout_s
        self._begin_s = time.monotonic()
        self._num_planned = num_planned
        self._num_sent = self._num_ended = 0
        self._on_progress = on_progress

    def now_s(self) -> float:
        """Since the load began."""
        return time.monotonic() - self._begin_s

    async def one(self, planned: Planned) -> Outcome:
        """Send one, and see it to its end."""
        self._num_sent += 1
        self._tell()
        read = _Reading(planned, self.now_s())
        try:
            async with asyncio.timeout(self._timeout_s + _GRACE_S):
                messages = self._sender.send(planned, self._timeout_s)
                try:
                    async for news in messages:
                        read.take(news, self.now_s())
                finally:
                    await messages.aclose()
        except errors.BatonError as error:
            return read.outcome(self.now_s(), error)
        except TimeoutError:
            late = errors.DeadlineExceeded(f"no end within {self._timeout_s:g} s")
            return read.outcome(self.now_s(), late)
        finally:
            self._num_ended += 1
            self._tell()
        return read.outcome(self.now_s(), None)

    def _tell(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._num_planned, self._num_sent, self._num_ended)


class _Reading:
    """One answer as it comes."""

    def __init__(self, planned: Planned, sent_s: float) -> None:
        self._planned = planned
        self._sent_s = sent_s
        self._arrivals: list[Arrival] = []
        self._num_cached = 0
        self._num_output: int | None = None
        self._stages: tuple[tuple[str, float], ...] = ()

    def take(self, news: News, at_s: float) -> None:
        if news.num_tokens:
            self._arrivals.append(Arrival(at_s, news.num_tokens))
        if news.num_cached_tokens is not None:
            self._num_cached = news.num_cached_tokens
        if news.num_output_tokens is not None:
            self._num_output = news.num_output_tokens
        self._stages = news.stages or self._stages

    def outcome(self, end_s: float, error: errors.BatonError | None) -> Outcome:
        return Outcome(
            planned_s=self._planned.at_s,
            sent_s=self._sent_s,
            end_s=end_s,
            arrivals=self._settled(),
            num_input_tokens=len(self._planned.prompt_token_ids),
            num_cached_tokens=self._num_cached,
            error=type(error).__name__ if error is not None else "",
            error_text=str(error) if error is not None else "",
            retry_after_s=error.retry_after_s if error is not None else None,
            stages=self._stages,
        )

    def _settled(self) -> tuple[Arrival, ...]:
        """Arrivals whose counts sum to what the account at the end says. An API that does not say
        how many tokens a chunk has leaves the rest to its last chunks, evenly from the back."""
        arrivals = self._arrivals
        missing = (self._num_output or 0) - sum(arrival.num_tokens for arrival in arrivals)
        if missing <= 0 or not arrivals:
            return tuple(arrivals)
        each, more = divmod(missing, len(arrivals))
        first_with_more = len(arrivals) - more
        return tuple(
            Arrival(arrival.at_s, arrival.num_tokens + each + (index >= first_with_more))
            for index, arrival in enumerate(arrivals)
        )
