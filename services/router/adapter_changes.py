"""Adapters of a running cluster: loaded, replaced, unloaded on all workers of a model or on none.

A load prepares the content beside what the workers have: each is asked, and holds it for a while.
When every worker that lives says in the registry that it has it, the wish in Redis
(`services.adapter_wishes`) is changed, by comparison with what it was: from then on new requests
get the new content, whatever dies; before, all have the old, and what was prepared lapses. Requests
that began keep their content: it stays in the wish as an old one until no router says that it uses
it. An unload is the same change to no content.

States of a load: preparing -> committed -> served by every router | failed (the name of the worker
that did not load it; nothing changed). One asyncio loop.
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
"""Between two looks at the registry while a change is waited for."""

_HOLD_MORE_S = 10.0
"""How much longer than a load may take workers hold what they prepared: until they have seen the
wish. Guessed: many beats."""


class AdapterChanges:
    """See the module."""

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
        """`client` stays its owner's. beat_now: others should hear of this router at once."""
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
        """End what is under way by itself."""
        await end_tasks([self._tidying])

    # ---- changes

    async def load(
        self, request: inference_pb2.LoadClusterAdapterRequest
    ) -> inference_pb2.LoadClusterAdapterReply:
        """Have new requests use the content of a folder under a name.

        Returns: when every router serves it.
        Raises: InvalidArgument for a name or files that are wrong; NoCapacity; Unavailable or
            DeadlineExceeded naming the worker that does not answer; FailedPrecondition when another
            change of the name came first. Nothing changed then, except where the message says so.
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
        """Refuse new requests for it, and have every worker drop it.

        Args: left_s: of the caller's time, for a wait.
        Raises: NotFound; FailedPrecondition while requests use it and `wait` is not set: nothing
            changed then; DeadlineExceeded naming the workers that have it still: it goes when the
            last request ends.
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
        """What this router says of adapters in its own entry."""
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
        """The registry was looked at: say what is new, and have the wishes follow their use."""
        seen = {name: wish.version for name, wish in snapshot.wishes.items()}
        if seen != self._seen:
            self._seen = seen
            self._beat_now()
        is_busy = self._tidying is not None and not self._tidying.done()
        if snapshot.is_redis_reachable and snapshot.wishes and not is_busy:
            self._tidying = start_task(self._tidy(snapshot), "adapter-wishes", is_for_many=True)

    async def _tidy(self, snapshot: Snapshot) -> None:
        """Drop old contents that no request uses, write back what Redis lost, forget."""
        others = self._others(snapshot)
        try:
            async with asyncio.timeout(self._times.redis_timeout_s):
                raw = await self._entries()
                read = adapter_wishes.parse(raw, [])
                for name, known in snapshot.wishes.items():
                    newest = adapter_wishes.merged({name: known}, read, time.time()).get(name)
                    if newest is None or newest.version != known.version:
                        # This router follows the one before still: it would go on using what is
                        # dropped here, and write back what is forgotten. The next look knows it.
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
        digest = adapter_wishes.digest_of(before)
        if before is not None and digest and before.model not in model.served.names:
            raise FailedPrecondition(
                f"adapter: {name!r} is one of model {before.model}; choose another name, or unload "
                "it"
            )

    async def _look(self) -> Snapshot:
        snapshot = await self._registry.poll()
        if not snapshot.is_redis_reachable:
            raise Unavailable("Redis is not reachable: adapters cannot change", retry_after_s=1.0)
        return snapshot

    def _workers(self, model: OneModel) -> list[WorkerView]:
        """That must have what new requests get."""
        return [
            worker
            for worker in self._registry.snapshot.workers
            if worker.model in model.served.names and not worker.is_draining
        ]

    def _model_of(self, name: str, snapshot: Snapshot) -> OneModel:
        """Whose adapter it is. Raises: NotFound."""
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
        """Have every worker that lives load it. Returns: its digest.

        Args: prepared: filled with the digest by each worker's life. version: of the wish that is
            to be changed.
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
            if wish is not None and wish.version > version:  # workers drop what is not wished
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
        """Once; a worker that cannot be reached is named in `why`. Raises: a worker's refusal."""
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
        """What was prepared for nothing goes at once where the worker can be told; else it
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
        """Change the wish, once and for all: a Redis that dies meanwhile is asked again what it
        has.

        Raises: FailedPrecondition when another change came first; Unavailable when Redis does not
            say within the time whether it was changed.
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
        client: Any = self._redis
        entries: Mapping[bytes, bytes] = await client.hgetall(adapter_wishes.KEY)
        return entries

    async def _until_routers(
        self, name: str, deadline: Deadline, done: str, *, needs_served: bool
    ) -> None:
        """Until every router follows the wish. Raises: DeadlineExceeded naming those that do
        not."""
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
        return {
            router_id: _adapters_of(entry)
            for router_id, entry in snapshot.routers.items()
            if router_id != self._router_id
        }

    def _num_users(self, name: str, snapshot: Snapshot) -> int:
        """Requests that use some content of it, by what all routers last said."""
        num = sum(self._use.of(name).values())
        for adapters in self._others(snapshot).values():
            entry = (adapters or {}).get(name)
            num += sum(entry.num_requests.values()) if entry is not None else 0
        return num


RouterAdapters = Mapping[str, router_status_pb2.RouterAdapter] | None
"""What a router says of adapters, by name; None: its entry cannot be read."""


def users(
    wish: common_pb2.AdapterWish, own: Mapping[str, int], others: Mapping[str, RouterAdapters]
) -> Collection[str]:
    """Digests of the wish that requests use or may yet begin to use: all, while some router does
    not follow the wish yet or does not say."""
    used = {digest for digest, num in own.items() if num}
    for adapters in others.values():
        entry = adapters.get(wish.name) if adapters is not None else None
        if entry is None or entry.version < wish.version:
            return {version.digest for version in adapter_wishes.versions(wish)}
        used |= {digest for digest, num in entry.num_requests.items() if num}
    return used


def _follows(adapters: RouterAdapters, name: str, version: int, needs_served: bool) -> bool:
    entry = adapters.get(name) if adapters is not None else None
    return entry is not None and entry.version >= version and (entry.is_served or not needs_served)


def _changed_meanwhile(name: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"adapter: {name!r} was changed by another command meanwhile; try again"
    )


def _is_same_change(one: common_pb2.AdapterWish, other: common_pb2.AdapterWish) -> bool:
    """Whether it is ours: old contents may have gone since."""
    return (one.version, one.changed_unix_ms, adapter_wishes.digest_of(one)) == (
        other.version,
        other.changed_unix_ms,
        adapter_wishes.digest_of(other),
    )


def _adapters_of(entry: bytes) -> RouterAdapters:
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
