"""PrefixIndexPublisher: writes one store's part of the prefix index in Redis: its entry in the
registry, and every KV block that comes or goes.

Changes are taken from the store's ChangeLog and applied in order, in batches. Each batch is atomic
and fenced by a sequence number that lies beside the entries: a batch whose predecessor Redis does
not have is refused, and each heartbeat compares the number. So a Redis that was flushed, restarted
or restored is noticed, and everything is published again. While Redis is away changes wait in the
log, until it overflows and everything is published again. The store itself never waits for Redis.
A full publication goes piece by piece, while the store changes, and the changes follow it.

A publisher that fails by an error of its own publishes everything again; until that succeeds it
does not extend the life of the index, which expires, while the store stays registered.

States: full (all must be published) -> synced <-> pending; any doubt -> full. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from google.protobuf import json_format
from redis.asyncio.client import Pipeline
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError

from kvstore import index
from kvstore.block_changes import BlockChange, ChangeLog
from process import logs, registry
from process.background_tasks import end_tasks, start_task
from process.registry import NO_ACCESS, REDIS_FAILURES, RedisAccess, RegistryHeartbeat
from protos import inference_pb2

logger = logging.getLogger(__name__)

BATCH = 2048
"""Most changes in one script call: about 1 ms of Redis (1.25 us per field, measured for 128)."""
_BACKOFF_S, _BACKOFF_MAX_S = 0.1, 1.0
_INDEX_TTL_S = 60.0  # of the index itself, renewed by each heartbeat: a dead store leaves nothing
_SCAN_KEYS = 10_000
"""Keys looked at in one step: some milliseconds of Redis."""

# 1: applied (or applied before, and its answer was lost); 0: the predecessor is not there.
_APPLY = """
local stored = redis.call('HGET', KEYS[1], 'sequence')
if stored == ARGV[2] then return 1 end
if stored ~= ARGV[1] then return 0 end
for at = 1, #ARGV[3], 16 do
  redis.call('HSET', KEYS[1], string.sub(ARGV[3], at, at + 15), ARGV[2])
end
for at = 1, #ARGV[4], 16 do redis.call('HDEL', KEYS[1], string.sub(ARGV[4], at, at + 15)) end
redis.call('HSET', KEYS[1], 'sequence', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
return 1
"""
# A full publication is loaded beside the index (KEYS[2]) and takes its place at the end. Its pieces
# are batches, too: those of an earlier one that arrive late, and those on top of a Redis that was
# emptied meanwhile, are refused. Dropping a million entries takes a thread of Redis, not its loop.
_BEGIN = """
redis.call('UNLINK', KEYS[1])
redis.call('HSET', KEYS[1], 'sequence', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""
_FINISH = """
if redis.call('HGET', KEYS[1], 'sequence') ~= ARGV[1] then return 0 end
redis.call('UNLINK', KEYS[2])
redis.call('RENAME', KEYS[1], KEYS[2])
return 1
"""


class PrefixIndexPublisher:
    """Publishes one start of a store in Redis, from `start` to `stop`: its registry entry and its
    index."""

    def __init__(
        self,
        redis_url: str,
        *,
        node_id: str,
        incarnation: bytes,
        status: Callable[[], inference_pb2.StoreStatus],
        changes: ChangeLog,
        snapshot: Callable[[int], Iterable[list[bytes]]],
        heartbeat_s: float,
        heartbeat_ttl_s: float,
        timeout_s: float,
        access: RedisAccess = NO_ACCESS,
        batch_size: int = BATCH,
    ) -> None:
        """Args: status: makes the registry entry. changes: the log to follow. snapshot: lists every
        chain hash that is present, in lists of so many; clears `changes` when it is called.
        batch_size: most changes per script call."""
        self._client = client = registry.connect_redis(redis_url, timeout_s, access)
        self._node_id = node_id
        self._key = index.index_key(node_id, incarnation.hex())
        self._loading_key = index.loading_key(node_id, incarnation.hex())
        self.heartbeat = RegistryHeartbeat(
            redis_url,
            index.KIND,
            entry_id=node_id,
            incarnation=incarnation.hex(),
            entry=lambda: json_format.MessageToJson(
                status(), preserving_proto_field_name=True, indent=None
            ),
            every_s=heartbeat_s,
            ttl_ms=int(heartbeat_ttl_s * 1000),
            timeout_s=timeout_s,
            access=access,
            beside=self._look,
        )
        self._changes = changes
        self._snapshot = snapshot
        self._timeout_s = timeout_s
        self._batch_size = batch_size
        self._apply = client.register_script(_APPLY)
        self._begin = client.register_script(_BEGIN)
        self._finish = client.register_script(_FINISH)
        self._batch: list[BlockChange] = []  # taken from the log, not confirmed yet
        self._needs_full = True
        self._is_filling = False  # a full publication is under way
        self._is_first = True
        self._is_failing = False  # the last try ended with an error that is not Redis'
        self._task: asyncio.Task[None] | None = None
        # When the oldest change came that the full publication is to bring: of the one that is
        # due, and of the one under way.
        self._full_since_s = self._filling_since_s = time.monotonic()
        self.sequence = 0
        self.num_changes_published = 0
        self.num_full_publications = 0
        self._num_failures = 0

    @property
    def synced(self) -> bool:
        """Whether Redis has confirmed every change."""
        is_running = self._task is not None and not self._task.done()
        is_whole = not (self._needs_full or self._is_filling or self._changes.overflowed)
        return is_running and self.heartbeat.is_registered and is_whole and not self.num_pending

    @property
    def num_failures(self) -> int:
        """The number of publications and heartbeats that failed."""
        return self._num_failures + self.heartbeat.num_failures

    @property
    def num_pending(self) -> int:
        """The number of changes that Redis has not confirmed, without those that a full publication
        brings."""
        return len(self._changes) + len(self._batch)

    @property
    def lag_s(self) -> float:
        """Age in seconds of the oldest change that Redis has not confirmed; 0: Redis has confirmed
        all."""
        since = []
        if self._needs_full:
            since.append(self._full_since_s)
        if self._is_filling:
            since.append(self._filling_since_s)
        if self._batch:
            since.append(self._batch[0].since_s)
        if self._changes.since_s is not None:
            since.append(self._changes.since_s)
        return max(0.0, time.monotonic() - min(since)) if since else 0.0

    def start(self) -> None:
        """Start to send heartbeats, to publish all blocks, and then each change."""
        self.heartbeat.start()
        self._task = start_task(self._run(), "index publisher")

    async def stop(self) -> None:
        """Stop publishing and take this store's index and entry out of Redis, if Redis is there."""
        await end_tasks([self._task])
        await self.heartbeat.stop()
        try:
            await self._bounded(self._client.unlink(self._key, self._loading_key))
        except REDIS_FAILURES as error:  # they expire
            logs.event(logger, "index_not_removed", level=logging.WARNING, error=repr(error))
        await self._client.connection_pool.disconnect()

    # -- the task

    async def _run(self) -> None:
        pause_s = _BACKOFF_S
        while True:
            self._changes.appended.clear()
            try:
                if self._needs_full or self._changes.overflowed:
                    await self._publish_all()
                elif self.num_pending:
                    await self._publish_batch()
                else:
                    await self._changes.appended.wait()
                    continue
                pause_s = _BACKOFF_S
                self._is_failing = self._is_failing and self._needs_full
                continue
            except REDIS_FAILURES as error:
                if pause_s == _BACKOFF_S:  # the first in a row
                    logs.event(
                        logger, "index_not_published", level=logging.WARNING, error=repr(error)
                    )
            except Exception as error:
                if not self._is_failing:
                    logger.error("index_publisher_failed", exc_info=error)
                self._is_failing = True
                self._need_full()
            self._num_failures += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _BACKOFF_MAX_S)

    def _look(self, pipe: Pipeline) -> Callable[[list[Any]], None]:
        """Add to a heartbeat's commands: keep the index for another minute if it is being
        published, and see whether Redis still has what was published; a publication under way sees
        that by itself. Returns: what takes the answers."""
        if not self._is_failing:
            pipe.pexpire(self._key, int(_INDEX_TTL_S * 1000))
        pipe.hget(self._key, index.SEQUENCE_FIELD)
        is_whole, num_full = not (self._needs_full or self._is_filling), self.num_full_publications
        first = self.sequence

        def compare(answers: list[Any]) -> None:
            is_same = is_whole and not self._is_filling and num_full == self.num_full_publications
            # Of batches that went out meanwhile, or are not confirmed, any may be the last one.
            last = self.sequence + bool(self._batch)
            if is_same and answers[-1] not in {b"%d" % each for each in range(first, last + 1)}:
                self._need_full()
                self._changes.appended.set()

        return compare

    async def _bounded(self, call: Any) -> Any:
        async with asyncio.timeout(self._timeout_s):
            return await call

    async def _publish_all(self) -> None:
        """Load everything beside the index, a piece at a time, then what changed meanwhile, and put
        it in the index's place: it is right for one moment, and so prefix-closed, when it appears.

        Raises: what the calls raise; RedisError when Redis lost what came before."""
        if self._is_first:
            await self._drop_earlier_lives()
            self._is_first = False
        self._need_full()
        pieces = self._snapshot(self._batch_size)
        self._batch.clear()
        self._is_filling, self._filling_since_s = True, self._full_since_s
        self._needs_full = False  # from here on changes come on top of `pieces`
        num_blocks, done = 0, False
        try:
            self.sequence += 1
            await self._step(self._begin, self.sequence, int(_INDEX_TTL_S * 1000))
            for piece in filter(None, pieces):
                await self._load(dict.fromkeys(piece, True))
                num_blocks += len(piece)
            num_left = len(self._changes)  # those that come from here on do not have to be in it
            while num_left > 0 and (late := self._changes.take(min(num_left, self._batch_size))):
                await self._load({one.chain_hash: one.is_present for one in late})
                num_left -= len(late)
            if self._changes.overflowed:  # some were dropped
                return
            await self._step(self._finish, self.sequence)
            done = True
        finally:
            self._is_filling = False
            if not done:
                self._needs_full, self._full_since_s = True, self._filling_since_s
        self.num_full_publications += 1
        logs.event(logger, "index_published", num_blocks=num_blocks, sequence=self.sequence)

    async def _load(self, final: Mapping[bytes, bool]) -> None:
        """The next piece of a full publication. Raises: as `_step`."""
        numbers = (self.sequence, self.sequence + 1)
        await self._step(self._apply, *numbers, *_apply_args(final))
        self.sequence += 1

    async def _publish_batch(self) -> None:
        if not self._batch:
            self._batch = self._changes.take(self._batch_size)
        final = {one.chain_hash: one.is_present for one in self._batch}
        numbers = (self.sequence, self.sequence + 1)
        args: list[bytes | int] = [*numbers, *_apply_args(final)]
        applied = await self._bounded(self._apply(keys=[self._key], args=args))
        if applied != 1 or self._changes.overflowed:
            self._need_full()  # while the batch still counts for the lag
        if applied != 1:
            return
        self.sequence += 1
        self.num_changes_published += len(self._batch)
        self._batch = []

    async def _step(self, script: AsyncScript, *args: bytes | int) -> None:
        """Run one script of a full publication. Raises: RedisError when what came before it is not
        there any more."""
        keys = [self._loading_key, self._key]
        if await self._bounded(script(keys=keys, args=args)) != 1:
            raise RedisError("what was published so far is gone")

    async def _drop_earlier_lives(self) -> None:
        """Redis may be full of others' keys: many at once, and each step has its own time."""
        pattern = index.index_key(self._node_id, "*")
        cursor = 0
        while True:
            cursor, found = await self._bounded(
                self._client.scan(cursor, match=pattern, count=_SCAN_KEYS)
            )
            earlier = [key for key in found if key.decode() != self._key]
            if earlier:
                await self._bounded(self._client.unlink(*earlier))
            if cursor == 0:
                return

    def _need_full(self) -> None:
        """Publish everything next. Changes that wait keep their age for the lag."""
        if not self._needs_full:
            self._needs_full, self._full_since_s = True, time.monotonic() - self.lag_s


def _apply_args(final: Mapping[bytes, bool]) -> tuple[bytes, bytes, int]:
    """The arguments of _APPLY after the sequences. final: chain hash -> whether it is present."""
    came = b"".join(chain_hash for chain_hash, present in final.items() if present)
    went = b"".join(chain_hash for chain_hash, present in final.items() if not present)
    return came, went, int(_INDEX_TTL_S * 1000)
