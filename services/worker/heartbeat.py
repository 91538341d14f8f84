"""A worker's entry in the registry: who it is (a hash field) and that it lives (a key that
expires).

Keys: `baton:workers` HASH worker_id -> WorkerStatus as JSON; `baton:worker:{id}:beat` =
incarnation, PX 3000, every 0.7 s.
Redis may be away: the worker serves on, and is registered again with the first beat that gets
through. A clean `stop` removes the entry, if it is still ours. Belongs to the loop's thread; knows
nothing of the engine but the status it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable

from process import logs, redis_client
from process.tasks import end_tasks, start_task
from protos import common_pb2
from services.worker.status import status_to_json

logger = logging.getLogger(__name__)

WORKERS_KEY = "baton:workers"
BEAT_TTL_MS = 3000
BEAT_EVERY_S = 0.7
REDIS_TIMEOUT_S = 1.0
MAX_BACKOFF_S = 3.0

# Only the life that wrote the beat removes the entry: a successor with the same id may be there by
# now.
_REMOVE = """
if redis.call('GET', KEYS[2]) == ARGV[2] then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('DEL', KEYS[2])
  return 1
end
return 0
"""


def beat_key(worker_id: str) -> str:
    """The key whose presence says that the worker lives."""
    return f"baton:worker:{worker_id}:beat"


class Heartbeat:
    """Registers `status()` until stopped."""

    def __init__(
        self,
        redis_url: str,
        *,
        worker_id: str,
        incarnation: str,
        status: Callable[[], common_pb2.WorkerStatus],
        every_s: float = BEAT_EVERY_S,
    ) -> None:
        self._redis = redis_client.connect(redis_url, REDIS_TIMEOUT_S)
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._status = status
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None
        self._now = asyncio.Event()
        self.is_registered = False
        self.num_beats = 0

    def start(self) -> None:
        """Begin to beat; the first beat is under way at once."""
        self._task = start_task(self._beat_forever(), "heartbeat")

    def beat_now(self) -> None:
        """The status changed in a way that routers should know at once."""
        self._now.set()

    async def stop(self) -> None:
        """Stop beating and remove our entry; bounded by Redis' timeouts."""
        await end_tasks([self._task])
        try:
            remove = self._redis.register_script(_REMOVE)
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                await remove(
                    keys=[WORKERS_KEY, beat_key(self._worker_id)],
                    args=[self._worker_id, self._incarnation],
                )
        except redis_client.FAILURES as error:
            logs.event(logger, "not_deregistered", level=logging.WARNING, why=str(error))
        await self._redis.connection_pool.disconnect()

    async def _beat_forever(self) -> None:
        backoff_s = 0.1
        while True:
            self._now.clear()
            try:
                async with asyncio.timeout(REDIS_TIMEOUT_S):
                    await self._beat()
            except redis_client.FAILURES as error:
                if self.is_registered:
                    logs.event(logger, "redis_away", level=logging.WARNING, why=str(error))
                self.is_registered = False
                await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
                backoff_s = min(MAX_BACKOFF_S, backoff_s * 2)
                continue
            if not self.is_registered:
                logs.event(logger, "registered", worker_id=self._worker_id)
            self.is_registered = True
            self.num_beats += 1
            backoff_s = 0.1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._now.wait()

    async def _beat(self) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(WORKERS_KEY, self._worker_id, status_to_json(self._status()))
            pipe.set(beat_key(self._worker_id), self._incarnation, px=BEAT_TTL_MS)
            await pipe.execute()
