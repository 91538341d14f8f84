"""AdapterChanges: loads, replaces and unloads LoRA adapters on all workers of a model of a running
cluster, or on none.

A load has every worker prepare the new content beside what it serves, and hold it for a while. When
every live worker reports in the registry that it has the content, the adapter's wish in Redis
(`services.adapter_wishes`) is changed by compare-and-swap. From then on new requests get the new
content, whatever fails; until then all get the old content, and what was prepared lapses. Running
requests keep the content that they began with: it stays in the wish as an old version until no
router reports a use of it. An unload is the same change to no content.

States of a load: preparing -> committed -> served by every router | failed (with the name of the
worker that did not load it; nothing changed). One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import grpc.aio
import redis.asyncio
from google.protobuf import json_format

from process import logs, rpc
from process.authorization import PeerRole
from process.background_tasks import end_tasks, start_task
from process.deadline import Deadline
from process.registry import REDIS_FAILURES
from process.rpc import Dialer
from process.rpc_errors import (
    BatonError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from protos import (
    common_pb2,
    decode_pb2_grpc,
    inference_pb2,
    prefill_pb2_grpc,
    router_status_pb2,
)
from services import adapter_wishes
from services.router.config import RouterTimes
from services.router.policies import PREFILL
from services.router.registry import Registry
from services.router.served_models import OneModel, ServedModels
from services.router.service import AdapterUse
from services.router.worker_views import Snapshot, WorkerView

logger = logging.getLogger(__name__)

_LOOK_S = 0.1
"""Seconds between two polls of the registry while a change is waited for."""

_HOLD_MORE_S = 10.0
"""Seconds beyond the limit of a load for which workers hold what they prepared, so that they see
the wish first. Guessed: many heartbeats."""


class AdapterChanges:
    """Coordinator of adapter changes at one router."""

    def __init__(
        self,
        registry: Registry,
        client: redis.asyncio.Redis,
        use: AdapterUse,
        *,
        router_id: str,
        times: RouterTimes,
        models: Callable[[], ServedModels],
        beat_now: Callable[[], None],
        dial: Dialer = rpc.PLAIN,
    ) -> None:
        """client: is not closed by this object.
        beat_now: sends this router's heartbeat at once."""
        self._registry = registry
        self._redis = client
        self._use = use
        self._router_id = router_id
        self._times = times
        self._models = models
        self._beat_now = beat_now
        self._dial = dial
        self._seen: Mapping[str, int] = {}
        self._tidying: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """End the background task."""
        await end_tasks([self._tidying])

    # ---- changes

    async def load(
        self, request: inference_pb2.LoadClusterAdapterRequest
    ) -> inference_pb2.LoadClusterAdapterReply:
        """Have new requests for an adapter name use the content of a folder.

        Returns: when every router serves it.
        Raises: InvalidArgument for a wrong name or wrong files; NoCapacity; Unavailable or
            DeadlineExceeded naming the worker that does not answer; FailedPrecondition when another
            change of the name came first. Nothing has changed then, unless the message says so.
        """
        name, model = request.name, self._models().find(request.model)
        self._check_name(name, model)
        if not PurePath(request.folder).is_absolute():
            raise InvalidArgument("folder", f"{request.folder!r} is no absolute path")
        deadline = Deadline.after(self._times.adapter_s)
        snapshot = await self._look()
        model.candidates.bounds()  # there are workers of both roles
        before = snapshot.wishes.get(name)
        self._check_model(name, model, before)
        prepared: dict[str, str] = {}
        try:
            version = before.version if before is not None else 0
            digest = await self._prepare(request, model, prepared, deadline, version)
            current = common_pb2.AdapterVersion(digest=digest, folder=request.folder)
            if before is None or before.current != current:
                await self._commit(name, model, before, current, deadline)
        except BatonError:
            await self._release(name, model, prepared)
            raise
        served_by = Deadline.after(self._times.adapter_s)
        await self._until_routers(name, served_by, "loaded on every worker", needs_served=True)
        workers = sorted(worker.worker_id for worker in self._workers(model))
        logs.event(logger, "adapter_loaded", adapter=name, digest=digest, workers=workers)
        return inference_pb2.LoadClusterAdapterReply(digest=digest, worker_ids=workers)

    async def unload(
        self, request: inference_pb2.UnloadClusterAdapterRequest, left_s: float | None = None
    ) -> inference_pb2.UnloadClusterAdapterReply:
        """Refuse new requests for an adapter, and have every worker drop it.

        Args: left_s: seconds of the caller's deadline, for a wait.
        Raises: NotFound; FailedPrecondition while requests use it and `wait` is not set: nothing
            has changed then; DeadlineExceeded naming the workers that still have it: they drop it
            when the last request ends.
        """
        name = request.name
        snapshot = await self._look()
        model = self._model_of(name, snapshot)
        deadline = Deadline.after(self._times.adapter_s)
        if request.wait and left_s is not None:
            deadline = Deadline.after(max(0.0, left_s - 1.0))
        if not request.wait and (num := self._num_users(name, snapshot)):
            raise FailedPrecondition(
                f"adapter: {name!r} is in use by {num} requests; unload it when they have ended, "
                "or wait for them (--wait)"
            )
        before = snapshot.wishes.get(name)
        workers = sorted(w.worker_id for w in snapshot.workers if name in w.adapters)
        await self._commit(name, model, before, None, deadline)
        await self._until_routers(name, deadline, "unloaded", needs_served=False)
        while having := [w.worker_id for w in self._workers(model) if name in w.adapters]:
            if deadline.expired:
                raise DeadlineExceeded(
                    f"adapter: {name!r} takes no new requests, and is on "
                    f"{', '.join(sorted(having))} until the last one that uses it has ended"
                )
            await asyncio.sleep(_LOOK_S)
            await self._registry.poll()
        logs.event(logger, "adapter_unloaded", adapter=name, workers=workers)
        return inference_pb2.UnloadClusterAdapterReply(worker_ids=workers)

    # ---- what follows from the registry

    def to_proto(self) -> Iterator[router_status_pb2.RouterAdapter]:
        """Return this router's view of each adapter, for its registry entry."""
        wishes = self._registry.snapshot.wishes
        for name in sorted(wishes.keys() | self._use.names()):
            wish = wishes.get(name)
            yield router_status_pb2.RouterAdapter(
                name=name,
                version=wish.version if wish is not None else 0,
                is_served=self._is_served(name, wish),
                num_requests=self._use.of(name),
            )

    def note(self, snapshot: Snapshot) -> None:
        """React to a poll of the registry: publish a heartbeat when wishes changed, and tidy up the
        wishes."""
        seen = {name: wish.version for name, wish in snapshot.wishes.items()}
        if seen != self._seen:
            self._seen = seen
            self._beat_now()
        is_busy = self._tidying is not None and not self._tidying.done()
        if snapshot.is_redis_reachable and snapshot.wishes and not is_busy:
            self._tidying = start_task(self._tidy(snapshot), "adapter-wishes", is_for_many=True)

    async def _tidy(self, snapshot: Snapshot) -> None:
        """Drop old versions that no request uses, write back wishes that Redis lost, and delete
        wishes that are over."""
        others = self._others(snapshot)
        try:
            async with asyncio.timeout(self._times.redis_timeout_s):
                raw = await self._entries()
                read = adapter_wishes.parse(raw, [])
                for name, known in snapshot.wishes.items():
                    newest = adapter_wishes.merged({name: known}, read, time.time()).get(name)
                    if newest is None or newest.version != known.version:
                        # This router still follows the version before: it would go on using what
                        # is dropped here, and write back what is deleted. The next poll shows it.
                        continue
                    used = users(newest, self._use.of(name), others)
                    wanted = adapter_wishes.without_old(newest, used)
                    is_loaded = any(name in worker.adapters for worker in snapshot.workers)
                    is_over = adapter_wishes.is_forgotten(wanted, time.time()) and not is_loaded
                    after = "" if is_over else adapter_wishes.to_json(wanted)
                    before = raw.get(name.encode(), b"")
                    if is_over or wanted != read.get(name):
                        await adapter_wishes.swap(self._redis, name, before, after)
        except REDIS_FAILURES as error:
            logs.event(logger, "wishes_not_tidied", level=logging.WARNING, why=str(error))

    # ---- inside

    def _check_name(self, name: str, model: OneModel) -> None:
        """Raises: InvalidArgument or FailedPrecondition when the name is not free."""
        if problem := adapter_wishes.name_problem(name):
            raise InvalidArgument("adapter", problem)
        if name in self._models().all_names:
            raise InvalidArgument(
                "adapter", f"{name!r} is the name of a served model; choose another"
            )
        for other in self._models():
            if other is not model and name in other.candidates.adapter_names():
                raise FailedPrecondition(
                    f"adapter: {name!r} is one of model {other.name}; choose another name, or "
                    "unload it"
                )

    def _check_model(
        self, name: str, model: OneModel, before: common_pb2.AdapterWish | None
    ) -> None:
        """Raises: FailedPrecondition when the adapter belongs to another model."""
        digest = adapter_wishes.digest_of(before)
        if before is not None and digest and before.model not in model.served.names:
            raise FailedPrecondition(
                f"adapter: {name!r} is one of model {before.model}; choose another name, or unload "
                "it"
            )

    async def _look(self) -> Snapshot:
        """Poll the registry. Raises: Unavailable while Redis is away."""
        snapshot = await self._registry.poll()
        if not snapshot.is_redis_reachable:
            raise Unavailable("Redis is not reachable: adapters cannot change", retry_after_s=1.0)
        return snapshot

    def _workers(self, model: OneModel) -> list[WorkerView]:
        """Return the workers that must have the content of new requests."""
        return [
            worker
            for worker in self._registry.snapshot.workers
            if worker.model in model.served.names and not worker.is_draining
        ]

    def _model_of(self, name: str, snapshot: Snapshot) -> OneModel:
        """Return the model that an adapter belongs to. Raises: NotFound."""
        wish = snapshot.wishes.get(name)
        for model in self._models():
            if name in model.candidates.adapter_names():
                return model
            if wish is not None and wish.old and wish.model in model.served.names:
                return model
        names = {name for model in self._models() for name in model.candidates.adapter_names()}
        loaded = ", ".join(sorted(names)) or "none"
        raise NotFound(f"no adapter {name!r} is loaded; loaded are: {loaded}")

    async def _prepare(
        self,
        request: inference_pb2.LoadClusterAdapterRequest,
        model: OneModel,
        prepared: dict[str, str],
        deadline: Deadline,
        version: int,
    ) -> str:
        """Have every live worker load the content. Returns: its digest.

        Args:
            prepared: filled with the digest by worker incarnation.
            version: of the wish that will be changed.
        Raises: as `load`.
        """
        why: dict[str, str] = {}
        while True:
            workers = self._workers(model)
            left = [worker for worker in workers if worker.incarnation not in prepared]
            if not left:
                digests = {prepared[worker.incarnation] for worker in workers}
                if len(digests) > 1:
                    told = ", ".join(
                        f"{w.worker_id} {prepared[w.incarnation][:16]}" for w in workers
                    )
                    raise FailedPrecondition(
                        f"adapter: workers read different contents in {request.folder}: {told}"
                    )
                digest = next(iter(digests), "")
                left = [w for w in workers if digest not in w.adapters.get(request.name, ())]
                if digest and not left:
                    model.candidates.bounds()
                    return digest
            if deadline.expired:
                told = ", ".join(
                    f"{w.worker_id} ({why.get(w.worker_id, 'no answer')})" for w in left
                )
                raise Unavailable(
                    f"adapter: {request.name!r} was not loaded within {self._times.adapter_s:g} s "
                    f"(times.adapter_s) by {told or 'any worker'}; nothing changed",
                    retry_after_s=1.0,
                )
            await self._ask_to_load(request, left, prepared, why, deadline, version)
            snapshot = await self._registry.poll()
            wish = snapshot.wishes.get(request.name)
            if wish is not None and wish.version > version:  # workers drop contents not in the wish
                raise _changed_meanwhile(request.name)

    async def _ask_to_load(
        self,
        request: inference_pb2.LoadClusterAdapterRequest,
        workers: Sequence[WorkerView],
        prepared: dict[str, str],
        why: dict[str, str],
        deadline: Deadline,
        version: int,
    ) -> None:
        """Ask each worker once; the reason of a worker that cannot be reached goes into `why`.

        Raises: BatonError: a worker's refusal.
        """
        asked = common_pb2.LoadAdapterRequest(
            name=request.name,
            folder=request.folder,
            hold_ms=int(1000 * (deadline.left_s() + _HOLD_MORE_S)),
            version=version,
        )

        async def ask(worker: WorkerView) -> None:
            try:
                async with self._dial(worker.address, PeerRole(worker.role)) as channel:
                    reply = await _stub(worker, channel).LoadAdapter(
                        asked, timeout=max(0.001, deadline.left_s())
                    )
            except grpc.aio.AioRpcError as error:
                refusal = rpc.error_from_rpc(error)
                if not isinstance(refusal, Unavailable | DeadlineExceeded):
                    refusal.args = (f"{worker.worker_id}: {refusal}; nothing changed",)
                    raise refusal from error
                why[worker.worker_id] = str(refusal)
                return
            prepared[worker.incarnation] = reply.adapter.digest

        todo = [worker for worker in workers if worker.incarnation not in prepared]
        results = await asyncio.gather(*(ask(worker) for worker in todo), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        await asyncio.sleep(min(_LOOK_S, deadline.left_s()))

    async def _release(self, name: str, model: OneModel, prepared: Mapping[str, str]) -> None:
        """Have workers drop what they prepared for a failed load; where a worker is not reached, it
        lapses."""

        async def release(worker: WorkerView) -> None:
            asked = common_pb2.UnloadAdapterRequest(name=name, digest=prepared[worker.incarnation])
            try:
                async with self._dial(worker.address, PeerRole(worker.role)) as channel:
                    await _stub(worker, channel).UnloadAdapter(
                        asked, timeout=self._times.status_timeout_s
                    )
            except grpc.aio.AioRpcError as error:
                logs.event(
                    logger,
                    "adapter_not_released",
                    level=logging.WARNING,
                    worker_id=worker.worker_id,
                    why=str(error.details()),
                )

        snapshot = await self._registry.poll()
        wished = adapter_wishes.digest_of(snapshot.wishes.get(name))
        workers = [
            worker
            for worker in self._workers(model)
            if prepared.get(worker.incarnation, wished) != wished
        ]
        await asyncio.gather(*(release(worker) for worker in workers))

    async def _commit(
        self,
        name: str,
        model: OneModel,
        before: common_pb2.AdapterWish | None,
        current: common_pb2.AdapterVersion | None,
        deadline: Deadline,
    ) -> None:
        """Change the wish exactly once: when Redis fails meanwhile, read what it has and try again.

        Raises: FailedPrecondition when another change came first; Unavailable when Redis does not
            confirm in time whether the wish was changed.
        """
        loaded = {d for w in self._registry.snapshot.workers for d in w.adapters.get(name, ())}
        digest = current.digest if current is not None else ""
        wish = adapter_wishes.changed(
            before,
            name=name,
            model=model.name,
            current=current,
            loaded=loaded - {digest},
            now_unix_s=time.time(),
        )
        known = {} if before is None else {name: before}
        while True:
            try:
                async with asyncio.timeout(self._times.redis_timeout_s):
                    data = (await self._entries()).get(name.encode(), b"")
                    read = adapter_wishes.parse({name.encode(): data} if data else {}, [])
                    there = adapter_wishes.merged(known, read, time.time()).get(name)
                    if there is not None and _is_same_change(there, wish):
                        break
                    if (there.version if there else 0) != (before.version if before else 0):
                        raise _changed_meanwhile(name)
                    after = adapter_wishes.to_json(wish)
                    if await adapter_wishes.swap(self._redis, name, data, after):
                        break
            except REDIS_FAILURES as error:
                if deadline.expired:
                    raise Unavailable(
                        f"Redis does not say whether {name!r} was changed ({error}); "
                        "`baton adapter list` shows it when it is back"
                    ) from error
            await asyncio.sleep(_LOOK_S)
        await self._registry.poll()

    async def _entries(self) -> Mapping[bytes, bytes]:
        """Read all wishes from Redis, encoded, by name."""
        client: Any = self._redis
        entries: Mapping[bytes, bytes] = await client.hgetall(adapter_wishes.KEY)
        return entries

    async def _until_routers(
        self, name: str, deadline: Deadline, done: str, *, needs_served: bool
    ) -> None:
        """Wait until every router follows the wish.

        Args:
            done: what has been done by then, for the error.
            needs_served: whether routers must also serve the adapter.
        Raises: DeadlineExceeded naming the routers that do not follow it.
        """
        while True:
            wish = self._registry.snapshot.wishes.get(name)
            version = wish.version if wish is not None else 0
            others = self._others(self._registry.snapshot)
            behind = [
                router_id
                for router_id, adapters in others.items()
                if not _follows(adapters, name, version, needs_served)
            ]
            if needs_served and not self._is_served(name, wish):
                behind.append(self._router_id)
            if not behind:
                return
            if deadline.expired:
                raise DeadlineExceeded(
                    f"adapter: {name!r} is {done}, but these routers have not said that they know: "
                    f"{', '.join(sorted(behind))}"
                )
            await asyncio.sleep(_LOOK_S)
            await self._registry.poll()

    def _is_served(self, name: str, wish: common_pb2.AdapterWish | None) -> bool:
        """Return whether this router serves the wish's current content."""
        digest = adapter_wishes.digest_of(wish)
        if not digest:
            return False
        for model in self._models():
            try:
                if model.candidates.adapter(name).digest == digest:
                    return True
            except (InvalidArgument, Unavailable):
                continue
        return False

    def _others(self, snapshot: Snapshot) -> Mapping[str, RouterAdapters]:
        """Return the adapters of the other routers, by router id."""
        return {
            router_id: _adapters_of(entry)
            for router_id, entry in snapshot.routers.items()
            if router_id != self._router_id
        }

    def _num_users(self, name: str, snapshot: Snapshot) -> int:
        """Return the number of requests that use any content of the adapter, by each router's last
        heartbeat."""
        num = sum(self._use.of(name).values())
        for adapters in self._others(snapshot).values():
            entry = (adapters or {}).get(name)
            num += sum(entry.num_requests.values()) if entry is not None else 0
        return num


RouterAdapters = Mapping[str, router_status_pb2.RouterAdapter] | None
"""A router's view of adapters, by name; None: its entry cannot be parsed."""


def users(
    wish: common_pb2.AdapterWish, own: Mapping[str, int], others: Mapping[str, RouterAdapters]
) -> Collection[str]:
    """Return the digests of the wish that requests use or may still begin to use: all of them while
    a router does not follow the wish yet or its entry cannot be read."""
    used = {digest for digest, num in own.items() if num}
    for adapters in others.values():
        entry = adapters.get(wish.name) if adapters is not None else None
        if entry is None or entry.version < wish.version:
            return {version.digest for version in adapter_wishes.versions(wish)}
        used |= {digest for digest, num in entry.num_requests.items() if num}
    return used


def _follows(adapters: RouterAdapters, name: str, version: int, needs_served: bool) -> bool:
    """Return whether a router has seen a version of the wish, and serves it if `needs_served`."""
    entry = adapters.get(name) if adapters is not None else None
    return entry is not None and entry.version >= version and (entry.is_served or not needs_served)


def _changed_meanwhile(name: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"adapter: {name!r} was changed by another command meanwhile; try again"
    )


def _is_same_change(one: common_pb2.AdapterWish, other: common_pb2.AdapterWish) -> bool:
    """Return whether both wishes come from the same change; old versions may have been dropped
    since."""
    return (one.version, one.changed_unix_ms, adapter_wishes.digest_of(one)) == (
        other.version,
        other.changed_unix_ms,
        adapter_wishes.digest_of(other),
    )


def _adapters_of(entry: bytes) -> RouterAdapters:
    """Parse a router's entry; None: it cannot be parsed."""
    try:
        status = json_format.Parse(
            entry.decode(), router_status_pb2.RouterStatus(), ignore_unknown_fields=True
        )
    except (json_format.ParseError, UnicodeDecodeError):
        return None
    return {adapter.name: adapter for adapter in status.adapters}


def _stub(worker: WorkerView, channel: grpc.aio.Channel) -> Any:
    is_prefill = worker.role == PREFILL
    return (prefill_pb2_grpc.PrefillStub if is_prefill else decode_pb2_grpc.DecodeStub)(channel)
