"""Who is alive: workers and KV stores as they register in Redis, polled.

A worker counts while its heartbeat key holds the incarnation of its entry. Redis away: everything
known stays known and `is_redis_reachable` says so. An entry without heartbeat while Redis answers
is gone; the same id with another incarnation is another life. Does not talk to workers. One asyncio
loop; `snapshot` is replaced as a whole, never changed.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import redis.asyncio
from google.protobuf import json_format

from process import logs, redis_client
from process.tasks import end_tasks
from protos import common_pb2
from services.router.views import Snapshot, StoreView, WorkerView, worker_view

logger = logging.getLogger(__name__)

WORKERS_KEY = "baton:workers"
STORES_KEY = "baton:stores"
_INCARNATION_BYTES = 16


class Registry:
    """Keeps `snapshot` fresh."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        *,
        poll_interval_s: float,
        timeout_s: float,
        on_change: Callable[[Snapshot], None] | None = None,
    ) -> None:
        """`client` stays its owner's. `on_change` is called in the loop after each poll."""
        self._client = client
        self._poll_interval_s = poll_interval_s
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self._statuses: dict[str, common_pb2.WorkerStatus] = {}
        self.snapshot = Snapshot()

    async def start(self) -> None:
        """Look once, then keep looking."""
        await self.poll()
        self._task = asyncio.create_task(self._poll_forever())

    async def stop(self) -> None:
        """Stop looking."""
        await end_tasks([self._task])
        self._task = None

    def statuses(self) -> Sequence[common_pb2.WorkerStatus]:
        """The last heartbeats of the workers in `snapshot`."""
        return tuple(self._statuses.values())

    async def poll(self) -> Snapshot:
        """Look once. Redis away is an answer, not an error."""
        before = self.snapshot
        try:
            async with asyncio.timeout(self._timeout_s):
                self.snapshot = await self._read()
        except redis_client.FAILURES as error:
            self.snapshot = Snapshot(before.workers, before.stores, False, before.problems)
            if before.is_redis_reachable:
                logs.event(logger, "redis_away", level=logging.WARNING, why=str(error))
        if self.snapshot.is_redis_reachable and not before.is_redis_reachable:
            logs.event(logger, "redis_reached", num_workers=len(self.snapshot.workers))
        if self._on_change is not None:
            self._on_change(self.snapshot)
        return self.snapshot

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self._poll_interval_s)
            try:
                await self.poll()
            except Exception:  # the last line of defence: a frozen view would serve dead workers
                logger.exception("registry_poll_failed")

    async def _read(self) -> Snapshot:
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.hgetall(WORKERS_KEY)
            pipe.hgetall(STORES_KEY)
            worker_entries, store_entries = await pipe.execute()
        worker_ids, node_ids = sorted(worker_entries), sorted(store_entries)
        keys = [f"baton:worker:{i.decode(errors='replace')}:beat" for i in worker_ids]
        keys += [f"baton:store:{i.decode(errors='replace')}:beat" for i in node_ids]
        beats: Any = await self._client.mget(keys) if keys else []
        problems: list[str] = []
        statuses = {}
        for worker_id, beat in zip(worker_ids, beats, strict=False):
            status = _parse_worker(worker_id, worker_entries[worker_id], problems)
            if status is not None and beat is not None and beat == status.incarnation.encode():
                statuses[status.worker_id] = status
        stores = []
        for node_id, beat in zip(node_ids, beats[len(worker_ids) :], strict=True):
            store = _parse_store(node_id, store_entries[node_id], problems)
            if store is not None and beat is not None and beat == store.incarnation.encode():
                stores.append(store)
        self._statuses = statuses
        workers: list[WorkerView] = [worker_view(status) for status in statuses.values()]
        return Snapshot(tuple(workers), tuple(stores), True, tuple(problems))


def _parse_worker(
    worker_id: bytes, entry: bytes, problems: list[str]
) -> common_pb2.WorkerStatus | None:
    try:
        status = json_format.Parse(
            entry.decode(), common_pb2.WorkerStatus(), ignore_unknown_fields=True
        )
    except (json_format.ParseError, UnicodeDecodeError) as error:
        problems.append(f"registry entry of worker {worker_id!r} cannot be read: {error}")
        return None
    if status.worker_id.encode() != worker_id:
        problems.append(f"registry entry {worker_id!r} names worker {status.worker_id!r}")
        return None
    return status


def _parse_store(node_id: bytes, entry: bytes, problems: list[str]) -> StoreView | None:
    try:
        values = json.loads(entry)
        if not isinstance(values, dict):
            raise ValueError("no JSON object")
        store = StoreView(
            _text(values, "node_id"), _text(values, "address"), _text(values, "incarnation")
        )
        # Workers refuse what names a store's life in another way.
        if len(bytes.fromhex(store.incarnation)) != _INCARNATION_BYTES or not store.address:
            raise ValueError("it has no address, or its incarnation is not 16 bytes of hex")
        return store
    except (ValueError, LookupError, TypeError) as error:
        problems.append(f"registry entry of store {node_id!r} cannot be read: {error}")
        return None


def _text(values: Mapping[str, Any], name: str) -> str:
    """A field of protobuf JSON, spelled as in the proto or in camel case."""
    head, *rest = name.split("_")
    value = values.get(name, values.get(head + "".join(part.title() for part in rest)))
    if not isinstance(value, str):
        raise LookupError(f"{name} is missing")
    return value
