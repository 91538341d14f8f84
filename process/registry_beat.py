"""A process's entry in the registry in Redis: what it says of itself (a field of a HASH) and that
it lives (a key that expires).

Keys: `baton:<kind>s` HASH id -> status as JSON; `baton:<kind>:{id}:beat` = incarnation, PX
BEAT_TTL_MS, every BEAT_EVERY_S. An entry counts while its beat holds the incarnation that the entry
names; what is left of the beat's time says, by Redis' own clock, how old the entry is.

Redis may be away: the process serves on, tries again in a beat's time, and is registered again with
the first beat that gets through: well before who knew it gives it up (`BEAT_TTL_MS` after Redis is
back). A clean `stop` removes the entry, if it is still ours. Belongs to the loop's thread; knows
nothing of what the entry says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping

from process import logs, redis_client
from process.redis_client import RedisAccess
from process.tasks import end_tasks, start_task

logger = logging.getLogger(__name__)

BEAT_TTL_MS = 3000
BEAT_EVERY_S = 0.7
REDIS_TIMEOUT_S = 1.0
STARTING = "starting-worker"
"""Kind of the entries of workers that load their model and serve nothing yet."""

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


# What killed processes have left. An entry that lives is written again with its next beat, whoever
# removes it.
_REAP = """
local num = 0
for _, id in ipairs(redis.call('HKEYS', KEYS[1])) do
  if redis.call('EXISTS', ARGV[1] .. id .. ARGV[2]) == 0 then
    num = num + redis.call('HDEL', KEYS[1], id)
  end
end
return num
"""


def entries_key(kind: str) -> str:
    """The HASH of all entries of a kind: worker, router."""
    return f"baton:{kind}s"


def beat_key(kind: str, entry_id: str) -> str:
    """The key whose presence says that the process lives."""
    return f"baton:{kind}:{entry_id}:beat"


def age_s(ttl_left_ms: int, beat_ttl_ms: int = BEAT_TTL_MS) -> float:
    """How long ago a beat was written of which so many milliseconds are left (what PTTL says)."""
    return max(0.0, (beat_ttl_ms - ttl_left_ms) / 1000)


class RegistryBeat:
    """Registers `entry()` until stopped."""

    def __init__(
        self,
        redis_url: str,
        kind: str,
        *,
        entry_id: str,
        incarnation: str,
        entry: Callable[[], str],
        every_s: float = BEAT_EVERY_S,
        access: RedisAccess = redis_client.NO_ACCESS,
        follows: tuple[str, Callable[[Mapping[bytes, bytes]], None]] | None = None,
    ) -> None:
        """`entry`: the JSON to write, asked for at each beat; it must not raise. `follows`: a HASH
        that is read with each beat, and a callback that gets its content; it must not raise.
        """
        self._redis = redis_client.connect(redis_url, REDIS_TIMEOUT_S, access)
        self._kind = kind
        self._entry_id = entry_id
        self._incarnation = incarnation
        self._entry = entry
        self._every_s = every_s
        self._follows = follows
        self._task: asyncio.Task[None] | None = None
        self._now = asyncio.Event()
        self.is_registered = False
        self.num_beats = 0

    def start(self) -> None:
        """Begin to beat; the first beat is under way at once."""
        self._task = start_task(self._beat_forever(), "heartbeat")

    def beat_now(self) -> None:
        """The entry changed in a way that others should know at once."""
        self._now.set()

    async def stop(self) -> None:
        """Stop beating and remove our entry; bounded by Redis' timeouts."""
        await end_tasks([self._task])
        try:
            remove = self._redis.register_script(_REMOVE)
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                await remove(
                    keys=[entries_key(self._kind), beat_key(self._kind, self._entry_id)],
                    args=[self._entry_id, self._incarnation],
                )
        except redis_client.FAILURES as error:
            logs.event(logger, "not_deregistered", level=logging.WARNING, why=str(error))
        await self._redis.connection_pool.disconnect()

    async def _beat_forever(self) -> None:
        while True:
            self._now.clear()
            try:
                async with asyncio.timeout(REDIS_TIMEOUT_S):
                    await self._beat()
            except redis_client.FAILURES as error:
                if self.is_registered:
                    logs.event(logger, "redis_away", level=logging.WARNING, why=str(error))
                    # It may be there again: then only the connection was lost.
                    self.is_registered = False
                    continue
                # As often as it beats: a Redis that comes back has no more to do than before it
                # went. Jittered, for all of them lost it at once.
                await asyncio.sleep(self._every_s * random.uniform(0.5, 1.0))
                continue
            if not self.num_beats:
                await self._reap()
            if not self.is_registered:
                logs.event(logger, "registered", kind=self._kind, entry_id=self._entry_id)
            self.is_registered = True
            self.num_beats += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._now.wait()

    async def _reap(self) -> None:
        """Once in a life: where pods have names of their own, nobody else takes over the entries of
        those that were killed."""
        before, after = beat_key(self._kind, "|").split("|")
        try:
            reap = self._redis.register_script(_REAP)
            async with asyncio.timeout(REDIS_TIMEOUT_S):
                num = await reap(keys=[entries_key(self._kind)], args=[before, after])
        except redis_client.FAILURES as error:
            logs.event(logger, "not_reaped", level=logging.WARNING, why=str(error))
            return
        if num:
            logs.event(logger, "reaped", kind=self._kind, num=num)

    async def _beat(self) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(entries_key(self._kind), self._entry_id, self._entry())
            key = beat_key(self._kind, self._entry_id)
            pipe.set(key, self._incarnation, px=BEAT_TTL_MS)
            if self._follows is not None:
                pipe.hgetall(self._follows[0])
            *_, last = await pipe.execute()
        if self._follows is not None:
            self._follows[1](last)
