"""Who is alive: workers and KV stores as they register in Redis, polled.

A worker counts while its heartbeat key holds the incarnation of its entry. Redis away: everything
known stays known and `is_redis_reachable` says so; and for `KEEP_S` from when it is back, where it
is another one or was away for `LAPSE_S`, for it may be empty, or have let all heartbeats lapse.
After that an entry without heartbeat while Redis answers is gone; the same id with another
incarnation is another life. Does not talk to workers. One asyncio loop; `snapshot` is replaced as a
whole, never changed. Looks may overlap: what one saw that began earlier than the last one taken is
dropped.

A Redis that was replaced is told by its mark: a random value which the first router that looks
leaves there. It is read last: where it is the known one, so was all that was read before it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import redis.asyncio
from google.protobuf import json_format

from process import logs, registry
from process.background_tasks import end_tasks
from process.registry import BEAT_EVERY_S, BEAT_TTL_MS
from protos import common_pb2, inference_pb2
from services import adapter_wishes
from services.router.remembered import Remembered
from services.router.views import (
    Snapshot,
    StartingWorker,
    StoreView,
    WorkerView,
    worker_view,
)

logger = logging.getLogger(__name__)

WORKERS_KEY = registry.entries_key("worker")
STORES_KEY = registry.entries_key("store")
ROUTERS_KEY = registry.entries_key("router")
STARTING_KEY = registry.entries_key(registry.STARTING_WORKER)
MARK_KEY = "baton:mark"
"""Which Redis this is: one that lost everything has another mark, or none."""
KEEP_S = BEAT_TTL_MS / 1000
"""As long as a beat counts: each process tries to beat several times meanwhile."""
LAPSE_S = KEEP_S - BEAT_EVERY_S
"""A beat that was there so long ago may have lapsed since, although its process lives."""
SAY_SILENT_S = 600.0
"""For so long a worker or store that fell silent is named. One that was killed for good, and whose
name does not come back, leaves its entry behind."""
_INCARNATION_BYTES = 16
_SLICE = 16
"""Entries parsed at a time: about 2 ms."""


class Registry:
    """Keeps `snapshot` fresh."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        *,
        poll_interval_s: float,
        timeout_s: float,
        on_change: Callable[[Snapshot], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`client` stays its owner's. `on_change` is called in the loop after each poll
        that told something new."""
        self._client = client
        self._poll_interval_s = poll_interval_s
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._clock = clock
        self._mark = b""
        self._looked_at_s = -math.inf
        """When the last look that got through began."""
        self._num_looks = 0
        self._last_taken = 0
        """Number of the newest look that told something."""
        self._workers: dict[str, _Worker] = {}
        self._stores: dict[str, _Store] = {}
        self._remembered_workers = Remembered[_Worker](KEEP_S)
        self._remembered_stores = Remembered[_Store](KEEP_S)
        self._remembered_routers = Remembered[bytes](KEEP_S)
        self._task: asyncio.Task[None] | None = None
        self._read_last: dict[bytes, _Entry] = {}
        self._heard_s: dict[str, float] = {}
        """When each worker and store last had a heartbeat, by name."""
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
        return tuple(worker.status for worker in self._workers.values())

    def store_statuses(self) -> Sequence[inference_pb2.StoreStatus]:
        """The last heartbeats of the stores in `snapshot`."""
        return tuple(store.status for store in self._stores.values())

    def find(self, worker_id: str) -> WorkerView | None:
        """The worker of this id in `snapshot`; None: it is gone."""
        worker = self._workers.get(worker_id)
        return None if worker is None else worker.view

    @property
    def has_met_redis(self) -> bool:
        """Whether a look ever got through: before, that no worker is known says nothing."""
        return self._looked_at_s > -math.inf

    async def poll(self) -> Snapshot:
        """Look once. Redis away is an answer, not an error."""
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
        before = self.snapshot
        if before.is_redis_reachable:
            logs.event(logger, "redis_away", level=logging.WARNING, why=str(error))
        return replace(before, is_redis_reachable=False)

    async def _read(self) -> Callable[[], Snapshot]:
        """Returns: what takes what was read as known."""
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
        """read: all but workers and stores, as it was read."""
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
        """Those of `silent` that were heard of not long ago."""
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
        """Take these as known, with those whose absence means nothing yet. `mark` None: it was lost
        while it was read. Returns: the routers' entries, of those, too.
        """
        now_s = self._clock()
        is_away = not self.snapshot.is_redis_reachable
        # Not for every look that failed: where some fail now and then, the dead would stay known.
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
        """What changed is parsed, in slices: a thousand workers must not hold tokens up."""
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
    """One worker's entry as it was read."""

    data: bytes
    status: common_pb2.WorkerStatus
    view: WorkerView | None = None
    """None: it cannot be read."""
    problem: str = ""


def _name_of(worker: WorkerView) -> str:
    return f"{worker.role} worker {worker.worker_id}"


def _store_name(node_id: str) -> str:
    return f"store {node_id}"


def _parse_worker(worker_id: bytes, entry: bytes, before: WorkerView | None) -> _Entry:
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


def _parse_starting(entry: bytes, problems: list[str]) -> StartingWorker | None:
    try:
        values = json.loads(entry)
        return StartingWorker(*(_text(values, name) for name in ("worker_id", "role", "model")))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problems.append(f"registry entry of a starting worker cannot be read: {error}")
        return None


def _store_status(store: StoreView, entry: bytes) -> inference_pb2.StoreStatus:
    """All that the entry says; of one that says it in another way, who it is."""
    try:
        return json_format.Parse(
            entry.decode(), inference_pb2.StoreStatus(), ignore_unknown_fields=True
        )
    except (json_format.ParseError, UnicodeDecodeError):
        return inference_pb2.StoreStatus(
            node_id=store.node_id, address=store.address, incarnation=store.incarnation
        )


def _text(values: Mapping[str, Any], name: str) -> str:
    """A field of protobuf JSON, spelled as in the proto or in camel case."""
    head, *rest = name.split("_")
    value = values.get(name, values.get(head + "".join(part.title() for part in rest)))
    if not isinstance(value, str):
        raise LookupError(f"{name} is missing")
    return value
