"""Registry: the router's view of the live workers, KV stores and routers, polled from their entries
and heartbeats in Redis.

A worker or store counts as live while its heartbeat key holds the incarnation of its entry. An
entry without a heartbeat, while Redis answers, is gone; the same id with another incarnation is a
restarted process. While Redis is away every known process stays known, and `is_redis_reachable` is
false.

An absence from Redis means nothing shortly after Redis has come back, if it was away for LAPSE_S,
so that heartbeats may have lapsed, or if it was replaced by another, empty one: processes need a
moment to register again. `Remembered` keeps the known processes for KEEP_S from then, each until
its heartbeat is seen. A replaced Redis is recognized by its mark, a random value that the first
router to look writes there. The mark is read last: if it is the known one, everything read before
it came from the same Redis.

`snapshot` is replaced as a whole, never changed. Polls may overlap; the result of a poll that began
before the last one taken is dropped. Does not talk to workers. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import redis.asyncio
from google.protobuf import json_format

from process import logs, registry
from process.background_tasks import end_tasks
from process.registry import BEAT_EVERY_S, BEAT_TTL_MS
from protos import common_pb2, inference_pb2
from services import adapter_wishes
from services.router.worker_views import (
    Snapshot,
    StartingWorker,
    StoreView,
    WorkerView,
    worker_view,
)

T = TypeVar("T")


class Remembered(Generic[T]):
    """Processes of one kind, by id, that stay known after a Redis outage without a heartbeat. Pure;
    the caller passes the time."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._until_s = 0.0
        self._unheard: dict[str, T] = {}

    def begin(self, known: Mapping[str, T], now_s: float) -> None:
        """Start to remember the `known` processes, because Redis is back after heartbeats could
        lapse or was replaced. Each is remembered until its heartbeat is seen or `keep_s` has
        passed."""
        self._unheard = dict(known)
        self._until_s = now_s + self._keep_s

    def without(self, heard: Collection[str], now_s: float) -> Mapping[str, T]:
        """Return the remembered processes that are not in `heard`, the ids with a heartbeat in
        Redis."""
        if now_s >= self._until_s:
            self._unheard = {}
        for name in heard:
            self._unheard.pop(name, None)
        return self._unheard


logger = logging.getLogger(__name__)

WORKERS_KEY = registry.entries_key("worker")
STORES_KEY = registry.entries_key("store")
ROUTERS_KEY = registry.entries_key("router")
STARTING_KEY = registry.entries_key(registry.STARTING_WORKER)
MARK_KEY = "baton:mark"
"""Key of the mark that identifies this Redis; one that lost its data has another mark, or none."""
KEEP_S = BEAT_TTL_MS / 1000
"""Seconds that a heartbeat counts; every process tries to send several in that time."""
LAPSE_S = KEEP_S - BEAT_EVERY_S
"""Seconds after which a heartbeat that was seen may have lapsed although its process lives."""
SAY_SILENT_S = 600.0
"""Seconds for which a worker or store that lost its heartbeat is reported. A process that was
killed, and whose name is not used again, leaves its entry behind."""
_INCARNATION_BYTES = 16
_SLICE = 16
"""Entries parsed before other tasks may run: about 2 ms."""


class Registry:
    """Poller of Redis that keeps `snapshot` fresh."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        *,
        poll_interval_s: float,
        timeout_s: float,
        on_change: Callable[[Snapshot], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """client: is not closed by this object.
        on_change: called in the loop after each poll whose result was taken."""
        self._client = client
        self._poll_interval_s = poll_interval_s
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._clock = clock
        self._mark = b""
        self._looked_at_s = -math.inf
        """When the last poll that reached Redis began, on the clock."""
        self._num_looks = 0
        self._last_taken = 0
        """Number of the newest poll whose result was taken."""
        self._workers: dict[str, _Worker] = {}
        self._stores: dict[str, _Store] = {}
        self._remembered_workers = Remembered[_Worker](KEEP_S)
        self._remembered_stores = Remembered[_Store](KEEP_S)
        self._remembered_routers = Remembered[bytes](KEEP_S)
        self._task: asyncio.Task[None] | None = None
        self._read_last: dict[bytes, _Entry] = {}
        self._heard_s: dict[str, float] = {}
        """Time of the last heartbeat of each worker and store, by name."""
        self.snapshot = Snapshot()

    async def start(self) -> None:
        """Poll once, then keep polling."""
        await self.poll()
        self._task = asyncio.create_task(self._poll_forever())

    async def stop(self) -> None:
        """Stop polling."""
        await end_tasks([self._task])
        self._task = None

    def statuses(self) -> Sequence[common_pb2.WorkerStatus]:
        """Return the last heartbeats of the workers in `snapshot`."""
        return tuple(worker.status for worker in self._workers.values())

    def store_statuses(self) -> Sequence[inference_pb2.StoreStatus]:
        """Return the last heartbeats of the stores in `snapshot`."""
        return tuple(store.status for store in self._stores.values())

    def find(self, worker_id: str) -> WorkerView | None:
        """Return the worker of this id in `snapshot`; None: it is gone."""
        worker = self._workers.get(worker_id)
        return None if worker is None else worker.view

    @property
    def has_met_redis(self) -> bool:
        """Whether a poll ever reached Redis; before that, an empty snapshot means nothing."""
        return self._looked_at_s > -math.inf

    async def poll(self) -> Snapshot:
        """Poll once. Returns: the new snapshot; a Redis that is away is shown in it, not raised."""
        self._num_looks += 1
        number = self._num_looks
        try:
            async with asyncio.timeout(self._timeout_s):
                take = await self._read()
        except registry.REDIS_FAILURES as error:
            take = partial(self._away, error)
        if number < self._last_taken:
            return self.snapshot
        self._last_taken = number
        self.snapshot = take()
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

    def _away(self, error: BaseException) -> Snapshot:
        """Return the last snapshot, marked as taken without Redis."""
        before = self.snapshot
        if before.is_redis_reachable:
            logs.event(logger, "redis_away", level=logging.WARNING, why=str(error))
        return replace(before, is_redis_reachable=False)

    async def _read(self) -> Callable[[], Snapshot]:
        """Read everything from Redis. Returns: a function that takes the result as the
        known state."""
        began_s = self._clock()
        async with self._client.pipeline(transaction=False) as pipe:
            # Before the workers, so that their entries show what they loaded for each wish.
            pipe.hgetall(adapter_wishes.KEY)
            pipe.hgetall(WORKERS_KEY)
            pipe.hgetall(STORES_KEY)
            pipe.hgetall(STARTING_KEY)
            pipe.hgetall(ROUTERS_KEY)
            found_entries = await pipe.execute()
        wish_entries, worker_entries, store_entries, starting_entries, routers = found_entries
        worker_ids, node_ids = sorted(worker_entries), sorted(store_entries)
        keys = [registry.beat_key("worker", i.decode(errors="replace")) for i in worker_ids]
        keys += [registry.beat_key("store", i.decode(errors="replace")) for i in node_ids]
        starting_ids = sorted(starting_entries)
        keys += [
            registry.beat_key(registry.STARTING_WORKER, i.decode(errors="replace"))
            for i in starting_ids
        ]
        router_ids = sorted(routers)
        router_beats = [registry.beat_key("router", i.decode(errors="replace")) for i in router_ids]
        async with self._client.pipeline(transaction=False) as pipe:
            if keys:
                pipe.mget(keys)
            if router_beats:
                pipe.mget(router_beats)
            pipe.set(MARK_KEY, secrets.token_bytes(16), nx=True)
            pipe.get(MARK_KEY)
            *found, _, mark = await pipe.execute()
        beats = found.pop(0) if keys else []
        live_routers = {
            name.decode(errors="replace"): routers[name]
            for name, beat in zip(router_ids, found[0] if router_beats else [], strict=True)
            if beat is not None
        }
        problems: list[str] = []
        workers: dict[str, _Worker] = {}
        entries = await self._parse_workers(worker_entries)
        for worker_id, beat in zip(worker_ids, beats, strict=False):
            entry = entries[worker_id]
            problems += [entry.problem] if entry.problem else []
            view = entry.view
            if view is not None and beat is not None and beat == view.incarnation.encode():
                workers[view.worker_id] = _Worker(view, entry.status)
        stores: dict[str, _Store] = {}
        for node_id, beat in zip(node_ids, beats[len(worker_ids) :], strict=False):
            store = _parse_store(node_id, store_entries[node_id], problems)
            if store is not None and beat is not None and beat == store.incarnation.encode():
                status = _store_status(store, store_entries[store.node_id.encode()])
                stores[store.node_id] = _Store(store, status)
        starting = tuple(
            worker
            for name, beat in zip(
                starting_ids, beats[len(beats) - len(starting_ids) :], strict=True
            )
            if beat is not None and (worker := _parse_starting(starting_entries[name], problems))
        )
        here = {worker.worker_id for worker in starting}
        silent = [
            _name_of(view)
            for worker_id, beat in zip(worker_ids, beats, strict=False)
            if beat is None and (view := entries[worker_id].view) and view.worker_id not in here
        ]
        silent += [
            _store_name(node_id.decode(errors="replace"))
            for node_id, beat in zip(node_ids, beats[len(worker_ids) :], strict=False)
            if beat is None
        ]
        read = Snapshot(
            is_redis_reachable=True,
            problems=tuple(problems),
            starting=starting,
            silent=tuple(silent),
            wishes=adapter_wishes.parse(wish_entries, problems),
            routers=live_routers,
        )
        return partial(self._found, mark, began_s, workers, stores, read)

    def _found(
        self,
        mark: bytes | None,
        began_s: float,
        workers: dict[str, _Worker],
        stores: dict[str, _Store],
        read: Snapshot,
    ) -> Snapshot:
        """Take the result of a poll.

        Args: read: everything read except workers and stores.
        """
        routers = self._remember(mark, began_s, workers, stores, read.routers)
        if not self.snapshot.is_redis_reachable:
            logs.event(logger, "redis_reached", num_workers=len(self._workers))
        return replace(
            read,
            silent=self._newly_silent(workers, stores, read.silent),
            workers=tuple(worker.view for worker in self._workers.values()),
            stores=tuple(store.view for store in self._stores.values()),
            wishes=adapter_wishes.merged(self.snapshot.wishes, read.wishes, time.time()),
            routers=routers,
        )

    def _newly_silent(
        self, workers: Mapping[str, _Worker], stores: Mapping[str, _Store], silent: Sequence[str]
    ) -> tuple[str, ...]:
        """Return those of `silent` that had a heartbeat within SAY_SILENT_S."""
        now_s = self._clock()
        names = [_name_of(worker.view) for worker in workers.values()]
        names += map(_store_name, stores)
        known = {**self._heard_s, **dict.fromkeys(names, now_s)}
        self._heard_s = {name: at_s for name, at_s in known.items() if now_s - at_s < SAY_SILENT_S}
        return tuple(name for name in silent if name in self._heard_s)

    def _remember(
        self,
        mark: bytes | None,
        began_s: float,
        workers: dict[str, _Worker],
        stores: dict[str, _Store],
        routers: Mapping[str, bytes],
    ) -> Mapping[str, bytes]:
        """Take the processes that were read as known, together with those remembered.

        Args: mark: of the Redis that was read; None: it was lost during the read.
        Returns: entries of the routers, with those remembered.
        """
        now_s = self._clock()
        is_away = not self.snapshot.is_redis_reachable
        # Not after every failed poll: if polls failed now and then, dead processes would stay
        # known.
        could_lapse = is_away and now_s - self._looked_at_s >= LAPSE_S
        if mark is None or mark != self._mark or could_lapse:
            self._remembered_workers.begin(self._workers, now_s)
            self._remembered_stores.begin(self._stores, now_s)
            self._remembered_routers.begin(self.snapshot.routers, now_s)
        self._mark = mark or b""
        self._looked_at_s = began_s
        kept_workers = self._remembered_workers.without(workers, now_s)
        kept_stores = self._remembered_stores.without(stores, now_s)
        self._workers = dict(sorted({**workers, **kept_workers}.items()))
        self._stores = dict(sorted({**stores, **kept_stores}.items()))
        return {**routers, **self._remembered_routers.without(routers, now_s)}

    async def _parse_workers(self, raw: Mapping[bytes, bytes]) -> Mapping[bytes, _Entry]:
        """Parse the entries that changed, in slices, so that a thousand workers do not delay
        tokens."""
        entries = {}
        for worker_id, data in raw.items():
            before = self._read_last.get(worker_id)
            if before is not None and before.data == data:
                entries[worker_id] = before
                continue
            entries[worker_id] = _parse_worker(worker_id, data, before.view if before else None)
            if not len(entries) % _SLICE:
                await asyncio.sleep(0)
        self._read_last = entries
        return entries


@dataclass(frozen=True)
class _Worker:
    view: WorkerView
    status: common_pb2.WorkerStatus


@dataclass(frozen=True)
class _Store:
    view: StoreView
    status: inference_pb2.StoreStatus


@dataclass(frozen=True)
class _Entry:
    """One worker's entry as read from Redis."""

    data: bytes
    status: common_pb2.WorkerStatus
    view: WorkerView | None = None
    """None: the entry cannot be parsed."""
    problem: str = ""


def _name_of(worker: WorkerView) -> str:
    return f"{worker.role} worker {worker.worker_id}"


def _store_name(node_id: str) -> str:
    return f"store {node_id}"


def _parse_worker(worker_id: bytes, entry: bytes, before: WorkerView | None) -> _Entry:
    """Parse a worker's entry; an entry that cannot be parsed has a `problem` and no view."""
    unread = common_pb2.WorkerStatus()
    try:
        status = json_format.Parse(
            entry.decode(), common_pb2.WorkerStatus(), ignore_unknown_fields=True
        )
    except (json_format.ParseError, UnicodeDecodeError) as error:
        problem = f"registry entry of worker {worker_id!r} cannot be read: {error}"
        return _Entry(entry, unread, problem=problem)
    if status.worker_id.encode() != worker_id:
        problem = f"registry entry {worker_id!r} names worker {status.worker_id!r}"
        return _Entry(entry, unread, problem=problem)
    return _Entry(entry, status, worker_view(status, before))


def _parse_store(node_id: bytes, entry: bytes, problems: list[str]) -> StoreView | None:
    """Return the store of an entry; None, with a line in `problems`: it cannot be parsed."""
    try:
        values = json.loads(entry)
        if not isinstance(values, dict):
            raise ValueError("no JSON object")
        store = StoreView(
            _text(values, "node_id"), _text(values, "address"), _text(values, "incarnation")
        )
        if store.node_id.encode() != node_id:
            problems.append(f"registry entry {node_id!r} names store {store.node_id!r}")
            return None
        # Workers refuse a store incarnation of any other form.
        if len(bytes.fromhex(store.incarnation)) != _INCARNATION_BYTES or not store.address:
            raise ValueError("it has no address, or its incarnation is not 16 bytes of hex")
        return store
    except (ValueError, LookupError, TypeError) as error:
        problems.append(f"registry entry of store {node_id!r} cannot be read: {error}")
        return None


def _parse_starting(entry: bytes, problems: list[str]) -> StartingWorker | None:
    """Return the starting worker of an entry; None, with a line in `problems`: it cannot be
    parsed."""
    try:
        values = json.loads(entry)
        return StartingWorker(*(_text(values, name) for name in ("worker_id", "role", "model")))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problems.append(f"registry entry of a starting worker cannot be read: {error}")
        return None


def _store_status(store: StoreView, entry: bytes) -> inference_pb2.StoreStatus:
    """Return the status in the entry; if it cannot be parsed, only the store's identity."""
    try:
        return json_format.Parse(
            entry.decode(), inference_pb2.StoreStatus(), ignore_unknown_fields=True
        )
    except (json_format.ParseError, UnicodeDecodeError):
        return inference_pb2.StoreStatus(
            node_id=store.node_id, address=store.address, incarnation=store.incarnation
        )


def _text(values: Mapping[str, Any], name: str) -> str:
    """Return a field of protobuf JSON, spelled as in the .proto file or in camel case. Raises:
    LookupError."""
    head, *rest = name.split("_")
    value = values.get(name, values.get(head + "".join(part.title() for part in rest)))
    if not isinstance(value, str):
        raise LookupError(f"{name} is missing")
    return value
