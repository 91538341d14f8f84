"""Sends a load and records the outcome of each request.

Each request is sent at its time, whether or not earlier ones have ended (an open loop). Every
planned request has exactly one outcome; a request that failed has one, too. One event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.load.senders import Sender, Update
from baton.load.workload import Planned
from process import rpc_errors

OnProgress = Callable[[int, int, int], None]
"""A function that is called with the numbers of requests planned, sent and ended."""

_GRACE_S = 5.0
"""A sender itself ends a request that takes too long; this much later it is cancelled here."""


@dataclass(frozen=True)
class MessageArrival:
    """The tokens of an answer that arrived in one message."""

    at_s: float
    """Time of the arrival in seconds since the load began, as all times of an `RequestOutcome`."""
    num_tokens: int


@dataclass(frozen=True)
class RequestOutcome:
    """The outcome of one request, as its sender saw it."""

    planned_s: float
    sent_s: float
    end_s: float
    arrivals: tuple[MessageArrival, ...] = ()
    """The messages of the answer that had tokens, in order."""
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    error: str = ""
    """Class of the error, such as NoCapacity; empty: the request was served."""
    error_text: str = ""
    retry_after_s: float | None = None
    stages: tuple[tuple[str, float], ...] = field(default=(), repr=False)
    """Stages of the request as the router accounts for it: (stage, seconds); empty: the server
    sends none."""

    @property
    def is_served(self) -> bool:
        return not self.error

    @property
    def num_output_tokens(self) -> int:
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def lag_s(self) -> float:
        """Time by which the request was sent later than planned: the load generator's own delay."""
        return self.sent_s - self.planned_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, from the sending; None: no token arrived."""
        return self.arrivals[0].at_s - self.sent_s if self.arrivals else None

    @property
    def e2e_s(self) -> float:
        """Time from the sending to the end of the answer."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first: (E2E - TTFT) / (output tokens - 1); None with
        fewer than two tokens."""
        ttft_s, num_tokens = self.ttft_s, self.num_output_tokens
        return (
            None if ttft_s is None or num_tokens < 2 else (self.e2e_s - ttft_s) / (num_tokens - 1)
        )

    @property
    def gaps_s(self) -> list[float]:
        """Times between one message with tokens and the next, in seconds."""
        times = [arrival.at_s for arrival in self.arrivals]
        return [after - before for before, after in itertools.pairwise(times)]


async def run(
    load: Sequence[Planned],
    sender: Sender,
    *,
    timeout_s: float,
    max_concurrency: int | None = None,
    on_progress: OnProgress | None = None,
) -> list[RequestOutcome]:
    """Send all requests of `load`, each at its time.

    Args: timeout_s: limit of each request, from its sending. max_concurrency: at most this many are
        in flight; the others wait, which closes the loop and shows as `lag_s`. None: no limit.
    Returns: outcomes in the order of `load`.
    """
    if max_concurrency is not None and max_concurrency < 1:
        raise rpc_errors.InvalidArgument("--max-concurrency", f"{max_concurrency} is less than 1")
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
    """The state that the requests of one load share: the sender, the clock and the progress."""

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
        """Seconds since the load began."""
        return time.monotonic() - self._begin_s

    async def one(self, planned: Planned) -> RequestOutcome:
        """Send one request, and wait for its end."""
        self._num_sent += 1
        self._report()
        read = _Reading(planned, self.now_s())
        try:
            async with asyncio.timeout(self._timeout_s + _GRACE_S):
                messages = self._sender.send(planned, self._timeout_s)
                try:
                    async for update in messages:
                        read.take(update, self.now_s())
                finally:
                    await messages.aclose()
        except rpc_errors.BatonError as error:
            return read.outcome(self.now_s(), error)
        except TimeoutError:
            late = rpc_errors.DeadlineExceeded(f"no end within {self._timeout_s:g} s")
            return read.outcome(self.now_s(), late)
        finally:
            self._num_ended += 1
            self._report()
        return read.outcome(self.now_s(), None)

    def _report(self) -> None:
        if self._on_progress is not None:
            self._on_progress(self._num_planned, self._num_sent, self._num_ended)


class _Reading:
    """The answer to one request while it arrives."""

    def __init__(self, planned: Planned, sent_s: float) -> None:
        self._planned = planned
        self._sent_s = sent_s
        self._arrivals: list[MessageArrival] = []
        self._num_cached = 0
        self._num_output: int | None = None
        self._stages: tuple[tuple[str, float], ...] = ()

    def take(self, update: Update, at_s: float) -> None:
        if update.num_tokens:
            self._arrivals.append(MessageArrival(at_s, update.num_tokens))
        if update.num_cached_tokens is not None:
            self._num_cached = update.num_cached_tokens
        if update.num_output_tokens is not None:
            self._num_output = update.num_output_tokens
        self._stages = update.stages or self._stages

    def outcome(self, end_s: float, error: rpc_errors.BatonError | None) -> RequestOutcome:
        return RequestOutcome(
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

    def _settled(self) -> tuple[MessageArrival, ...]:
        """The arrivals, with counts that sum to the server's own count of output tokens.

        The OpenAI API does not say how many tokens a chunk has. What is missing is spread evenly
        over all chunks, the remainder over the last ones.
        """
        arrivals = self._arrivals
        missing = (self._num_output or 0) - sum(arrival.num_tokens for arrival in arrivals)
        if missing <= 0 or not arrivals:
            return tuple(arrivals)
        each, more = divmod(missing, len(arrivals))
        first_with_more = len(arrivals) - more
        return tuple(
            MessageArrival(arrival.at_s, arrival.num_tokens + each + (index >= first_with_more))
            for index, arrival in enumerate(arrivals)
        )
