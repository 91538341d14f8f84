"""What a router's requests did of late, interval by interval: hit rates, tokens, latencies over
time.

Differences of the request log's totals, taken every interval and kept for NUM_POINTS of them: what
a page shows that was opened just now. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy

from process.background_tasks import end_tasks, start_task
from protos import inference_pb2
from services.router.request_log import Totals

INTERVAL_S = 2.0
NUM_POINTS = 300
"""Ten minutes."""


class UsageHistory:
    """See the module."""

    def __init__(
        self,
        totals: Callable[[], Totals],
        levels: Callable[[], tuple[int, int]],
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """levels: requests in flight here, and requests that wait at workers, now."""
        self._totals = totals
        self._levels = levels
        self._wall_ns = wall_ns
        self._interval_s = interval_s
        self._before = deepcopy(totals())
        self._points: deque[inference_pb2.UsagePoint] = deque(maxlen=NUM_POINTS)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Take a point every interval."""
        self._task = start_task(self._run(), "usage history")

    async def stop(self) -> None:
        """Take no more."""
        await end_tasks([self._task])
        self._task = None

    @property
    def points(self) -> Sequence[inference_pb2.UsagePoint]:
        """Oldest first."""
        return tuple(self._points)

    def take_point(self) -> None:
        """The interval since the last point is over."""
        now, before = deepcopy(self._totals()), self._before
        self._before = now
        num_first = now.num_first_tokens - before.num_first_tokens
        num_in_flight, num_waiting = self._levels()
        self._points.append(
            inference_pb2.UsagePoint(
                unix_ms=self._wall_ns() // 1_000_000,
                num_tokens_computed=now.sources["computed"] - before.sources["computed"],
                num_tokens_local=now.sources["local"] - before.sources["local"],
                num_tokens_from_store=now.sources["store"] - before.sources["store"],
                num_output_tokens=now.num_output_tokens - before.num_output_tokens,
                num_finished=now.num_finished - before.num_finished,
                num_failed=now.num_failed - before.num_failed,
                first_token_s=(
                    (now.first_token_s - before.first_token_s) / num_first if num_first else 0.0
                ),
                num_in_flight=num_in_flight,
                num_waiting=num_waiting,
            )
        )

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self.take_point()
