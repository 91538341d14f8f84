"""Observer: makes the plan's observations from the registry in Redis and from the Scaler.

The registry has an entry for each worker and router. The age of an entry follows from its heartbeat
by Redis' clock. An entry without a heartbeat, or with the heartbeat of another incarnation of the
process, is left out; one that cannot be read is reported as a problem.

The counters of a process count since its start. The observer turns them into differences since the
last observation, separately for each incarnation: a router that started since then counts from 0;
a process that is older but was not seen before contributes nothing yet. While Redis does not
answer, the last observation stays and ages, and the traffic is unknown. The only state is the last
observation. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

import redis.asyncio
from google.protobuf import json_format

from process import registry
from process.rpc_errors import Internal, Unavailable
from protos import common_pb2, router_status_pb2
from services.autoscaler.scaler import PoolScale
from services.autoscaler.signals import (
    ByRole,
    DurationCounts,
    Observations,
    ObservedTraffic,
    ObservedWorker,
    Pool,
    Role,
    Work,
)

# ---- one look at the registry


class _Entry(Protocol):
    """Field that the registry entries of workers and routers share."""

    incarnation: str


_SLICE = 16
"""Entries parsed between two yields to the event loop; about 2 ms."""

Status = TypeVar("Status", bound=_Entry)


@dataclass(frozen=True)
class LiveEntry(Generic[Status]):
    """Registry entry of a worker or router with a heartbeat. `age_s`: seconds since it."""

    entry_id: str
    status: Status
    age_s: float


@dataclass(frozen=True)
class RegistryLook:
    """All live entries of the registry at one time."""

    workers: tuple[LiveEntry[common_pb2.WorkerStatus], ...] = ()
    routers: tuple[LiveEntry[router_status_pb2.RouterStatus], ...] = ()
    problems: tuple[str, ...] = ()


async def look_at_registry(
    client: redis.asyncio.Redis,
    timeout_s: float,
    *,
    beat_ttl_ms: int = registry.BEAT_TTL_MS,
) -> RegistryLook:
    """Read the live entries of all workers and routers from Redis.

    Args:
        timeout_s: of the whole call.
        beat_ttl_ms: lifetime of a heartbeat's key.

    Raises: Unavailable when Redis does not answer.
    """
    problems: list[str] = []
    try:
        async with asyncio.timeout(timeout_s):
            workers = await _read_entry(
                client, "worker", common_pb2.WorkerStatus, problems, beat_ttl_ms
            )
            routers = await _read_entry(
                client, "router", router_status_pb2.RouterStatus, problems, beat_ttl_ms
            )
    except registry.REDIS_FAILURES as error:
        raise Unavailable(f"Redis does not answer: {error or type(error).__name__}") from error
    return RegistryLook(workers, routers, tuple(problems))


async def _read_entry(
    client: redis.asyncio.Redis,
    kind: str,
    make: Callable[[], Any],
    problems: list[str],
    beat_ttl_ms: int,
) -> tuple[LiveEntry[Any], ...]:
    entries: Any = await client.hgetall(registry.entries_key(kind))
    ids = sorted(entries)
    async with client.pipeline(transaction=False) as pipe:
        for entry_id in ids:
            key = registry.beat_key(kind, entry_id.decode(errors="replace"))
            pipe.get(key)
            pipe.pttl(key)
        beats = await pipe.execute() if ids else []
    found = []
    for index, entry_id in enumerate(ids):
        if index % _SLICE == _SLICE - 1:
            await asyncio.sleep(0)  # let other tasks of the loop run
        beat, left_ms = beats[2 * index], beats[2 * index + 1]
        if beat is None or left_ms <= 0:
            continue
        try:
            status = json_format.Parse(
                entries[entry_id].decode(), make(), ignore_unknown_fields=True
            )
        except (json_format.ParseError, UnicodeDecodeError) as error:
            problems.append(f"the entry of {kind} {entry_id!r} cannot be read: {error}")
            continue
        if status.incarnation.encode() == beat:
            name = entry_id.decode(errors="replace")
            found.append(LiveEntry(name, status, registry.beat_age_s(left_ms, beat_ttl_ms)))
    return tuple(found)


# ---- observations from looks

Life = tuple[str, str]
"""Id and incarnation of a worker or router."""

_ROLE_KEPT_S = 15.0
"""Seconds for which a worker without a heartbeat keeps its role: longer than a step or a pause of
Redis may delay the heartbeat, shorter than a restart of the worker."""


@dataclass(frozen=True)
class ObservationInputs:
    """Inputs of one observation."""

    now_s: float
    registry: RegistryLook | None
    """None: Redis does not answer."""
    scale: ByRole[PoolScale] | None
    """None: the scaler does not answer."""
    flipping: Mapping[str, Role]
    """Workers that were told to take another role and have not yet taken it, by id."""


class Observer:
    """Maker of observations, with the last one as its state."""

    def __init__(self, model: str, can_flip: Callable[[common_pb2.WorkerStatus], bool]) -> None:
        """
        Args:
            model: the model whose workers and traffic are observed; empty: the only one that the
                routers serve.
            can_flip: whether a worker may be told to take the other role.
        """
        self._model = model
        self._can_flip = can_flip
        self._looked_s: float | None = None
        self._registry = RegistryLook()
        self._scale: ByRole[PoolScale] | None = None
        self._scale_s = -math.inf
        self._roles: dict[str, tuple[Role, float]] = {}
        """For each worker its role, and when its heartbeat was last seen."""
        self._work: dict[Life, Work] = {}
        self._traffic: dict[Life, router_status_pb2.ModelTraffic] | None = None
        self.problems: tuple[str, ...] = ()
        """Problems found by the last observation, in words."""

    @property
    def registry(self) -> RegistryLook:
        """The last successful read of the registry."""
        return self._registry

    def roles(self, flipping: Mapping[str, Role]) -> dict[str, Role]:
        """Return the role of each worker of the model that is registered or was so within the last
        15 seconds. Flips count as done."""
        return {name: flipping.get(name, role) for name, (role, _) in self._roles.items()}

    def leave_first(self) -> list[str]:
        """Return the ids of the workers by load, least first: the order in which they should be
        removed."""

        def load(beaten: LiveEntry[common_pb2.WorkerStatus]) -> tuple[int, int, int]:
            status = beaten.status
            used = status.num_blocks - status.num_free_blocks - status.num_cached_blocks
            return status.num_running + status.num_waiting, status.num_queued_tokens, used

        return [beaten.entry_id for beaten in sorted(self._workers(), key=load)]

    def take(self, registry: RegistryLook | None, now_s: float) -> None:
        """Update `roles` and `leave_first` from a read of the registry; None: they stay."""
        if registry is None:
            return
        self._registry = registry
        kept = {k: seen for k, seen in self._roles.items() if now_s - seen[1] < _ROLE_KEPT_S}
        for beaten in self._workers():
            role = _role(beaten.status)
            if role is not None:
                kept[beaten.entry_id] = (role, now_s)
        self._roles = kept

    def observe(self, seen: ObservationInputs) -> Observations:
        """Return the observations for the plan. The caller has passed `seen.registry` to `take`
        before."""
        problems: list[str] = list(self._registry.problems)
        if seen.scale is not None:
            self._scale, self._scale_s = seen.scale, seen.now_s
        since_s = 0.0
        traffic: ObservedTraffic | None = None
        if seen.registry is None:
            since_s = seen.now_s - self._looked_s if self._looked_s is not None else math.inf
        else:
            before_s, self._looked_s = self._looked_s, seen.now_s
            traffic = self._take_traffic(before_s, seen.now_s, problems)
        pools = self._pools(seen, since_s)
        self.problems = tuple(problems)
        ages = [beaten.age_s + since_s for beaten in self._registry.routers]
        return Observations(
            now_s=seen.now_s,
            pools=pools,
            traffic=traffic,
            routers_age_s=max(ages, default=math.inf),
            scale_age_s=seen.now_s - self._scale_s,
            num_flipping=len(seen.flipping),
        )

    def _workers(self) -> Sequence[LiveEntry[common_pb2.WorkerStatus]]:
        return [
            beaten
            for beaten in self._registry.workers
            if self._model in ("", beaten.status.model) and _role(beaten.status) is not None
        ]

    def _pools(self, seen: ObservationInputs, since_s: float) -> ByRole[Pool]:
        roles = self.roles(seen.flipping)
        workers: dict[Role, list[ObservedWorker]] = {role: [] for role in Role}
        work: dict[Life, Work] = {}
        for beaten in self._workers():
            status = beaten.status
            life = (beaten.entry_id, status.incarnation)
            total = _work(status)
            work[life] = total
            workers[roles[beaten.entry_id]].append(
                ObservedWorker(
                    worker_id=beaten.entry_id,
                    age_s=beaten.age_s + since_s,
                    is_draining=status.draining,
                    can_flip=not status.draining and self._can_flip(status),
                    num_running=status.num_running,
                    num_waiting=status.num_waiting,
                    num_queued_tokens=status.num_queued_tokens,
                    num_blocks=status.num_blocks,
                    num_free_blocks=status.num_free_blocks + status.num_cached_blocks,
                    work=_since(self._work.get(life, total), total),
                )
            )
        self._work = work
        scale = self._scale or ByRole(PoolScale(0, 0), PoolScale(0, 0))

        def pool(role: Role, told: PoolScale) -> Pool:
            num_coming = sum(to is role for to in seen.flipping.values())
            return Pool(
                wanted=told.wanted,
                num_ready=max(0, told.ready - num_coming),
                num_draining=told.num_leaving,
                workers=tuple(workers[role]),
            )

        return scale.map(pool)

    def _take_traffic(
        self, before_s: float | None, now_s: float, problems: list[str]
    ) -> ObservedTraffic | None:
        now: dict[Life, router_status_pb2.ModelTraffic] = {}
        lived_s: dict[Life, float] = {}
        for beaten in self._registry.routers:
            of_model = self._of_model(beaten, problems)
            if of_model is not None:
                life = (beaten.entry_id, beaten.status.incarnation)
                now[life] = of_model
                lived_s[life] = beaten.status.uptime_s + beaten.age_s
        before, self._traffic = self._traffic, now
        if not now or before is None or before_s is None or now_s <= before_s:
            return None
        elapsed_s = now_s - before_s
        began = router_status_pb2.ModelTraffic()
        parts = [
            _traffic_of(
                before.get(life, began if lived_s[life] <= elapsed_s else total), total, elapsed_s
            )
            for life, total in now.items()
        ]
        try:
            return _sum(parts)
        except ValueError as error:
            problems.append(f"routers measure latencies in different classes: {error}")
            return _sum(
                replace(part, ttft=DurationCounts(), tpot=DurationCounts()) for part in parts
            )

    def _of_model(
        self, beaten: LiveEntry[router_status_pb2.RouterStatus], problems: list[str]
    ) -> router_status_pb2.ModelTraffic | None:
        models = beaten.status.models
        if self._model:
            return next((each for each in models if each.model == self._model), None)
        if len(models) > 1:
            problems.append(
                f"router {beaten.entry_id} serves several models; set model to the one whose "
                f"workers are scaled: {', '.join(each.model for each in models)}"
            )
            return None
        return models[0] if models else None


def _role(status: common_pb2.WorkerStatus) -> Role | None:
    try:
        return Role(status.role)
    except ValueError:
        return None


def _work(status: common_pb2.WorkerStatus) -> Work:
    return Work(
        num_steps=status.num_steps,
        step_s=status.step_s,
        num_computed_tokens=status.num_computed_tokens,
        num_decode_tokens=status.num_decode_tokens,
    )


def _since(before: Work, now: Work) -> Work:
    return Work(
        num_steps=max(0, now.num_steps - before.num_steps),
        step_s=max(0.0, now.step_s - before.step_s),
        num_computed_tokens=max(0, now.num_computed_tokens - before.num_computed_tokens),
        num_decode_tokens=max(0, now.num_decode_tokens - before.num_decode_tokens),
    )


def _traffic_of(
    before: router_status_pb2.ModelTraffic, now: router_status_pb2.ModelTraffic, elapsed_s: float
) -> ObservedTraffic:
    return ObservedTraffic(
        elapsed_s=elapsed_s,
        num_arrived=max(0, _asked(now) - _asked(before)),
        num_refused=max(0, now.num_refused - before.num_refused),
        num_failed=max(0, now.num_failed - before.num_failed),
        num_finished=max(0, now.num_finished - before.num_finished),
        num_prompt_tokens=max(0, now.num_prompt_tokens - before.num_prompt_tokens),
        num_cached_tokens=max(0, now.num_cached_tokens - before.num_cached_tokens),
        num_output_tokens=max(0, now.num_output_tokens - before.num_output_tokens),
        ttft=_histogram(before.first_token, now.first_token),
        tpot=_histogram(before.per_token, now.per_token),
        queue_s=max(0.0, now.queue.total_s - before.queue.total_s),
        num_waiting=now.num_held,
        num_queued=now.num_queued,
        num_running=now.num_running,
    )


def _asked(traffic: router_status_pb2.ModelTraffic) -> int:
    """Return the number of requests that arrived, without the rejected ones (over a rate limit, or
    invalid), which more workers would not serve either."""
    return traffic.num_arrived - traffic.num_rejected


def _histogram(
    before: router_status_pb2.Durations, now: router_status_pb2.Durations
) -> DurationCounts:
    """Return the histogram of the durations since `before`; empty if a router reports an invalid
    one."""
    counts = list(now.counts)
    if list(before.bounds_s) == list(now.bounds_s) and len(before.counts) == len(counts):
        counts = [max(0, b - a) for a, b in zip(before.counts, counts, strict=True)]
    try:
        return DurationCounts(tuple(now.bounds_s), tuple(counts))
    except ValueError:
        return DurationCounts()


def _sum(parts: Iterable[ObservedTraffic]) -> ObservedTraffic:
    """Return the traffic of all routers together.

    Raises: ValueError when the bounds of their histograms differ.
    """
    total: ObservedTraffic | None = None
    for part in parts:
        if total is None:
            total = part
            continue
        total = ObservedTraffic(
            elapsed_s=total.elapsed_s,
            ttft=total.ttft.plus(part.ttft),
            tpot=total.tpot.plus(part.tpot),
            queue_s=total.queue_s + part.queue_s,
            **{name: getattr(total, name) + getattr(part, name) for name in _SUMMED},
        )
    if total is None:
        raise Internal("a sum over no router")
    return total


_SUMMED = (
    *("num_arrived", "num_refused", "num_failed", "num_finished"),
    *("num_prompt_tokens", "num_cached_tokens", "num_output_tokens"),
    *("num_waiting", "num_queued", "num_running"),
)
