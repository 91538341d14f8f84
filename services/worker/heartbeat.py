"""Heartbeat: a worker's registry entry in Redis, with its WorkerStatus and role. It takes the
engine's state from the status only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from redis.asyncio.client import Pipeline

from process import registry
from process.registry import BEAT_EVERY_S, RedisAccess, RegistryHeartbeat
from protos import common_pb2
from services import adapter_wishes
from services.worker.status import status_to_json

KIND = "worker"
WORKERS_KEY = registry.entries_key(KIND)


def beat_key(worker_id: str) -> str:
    """Return the Redis key whose presence shows that the worker is alive."""
    return registry.beat_key(KIND, worker_id)


class Heartbeat(RegistryHeartbeat):
    """Publisher of `status()` to the registry until stopped."""

    def __init__(
        self,
        redis_url: str,
        *,
        worker_id: str,
        incarnation: str,
        status: Callable[[], common_pb2.WorkerStatus],
        every_s: float = BEAT_EVERY_S,
        access: RedisAccess = registry.NO_ACCESS,
        on_wishes: Callable[[Mapping[bytes, bytes]], None] | None = None,
    ) -> None:
        """Create a heartbeat. `on_wishes`: called with the cluster's desired adapters at each
        beat."""

        def beside(pipe: Pipeline) -> Callable[[list[Any]], None]:
            pipe.hgetall(adapter_wishes.KEY)
            return lambda answers: on_wishes(*answers) if on_wishes is not None else None

        super().__init__(
            redis_url,
            KIND,
            entry_id=worker_id,
            incarnation=incarnation,
            entry=lambda: status_to_json(status()),
            every_s=every_s,
            access=access,
            beside=None if on_wishes is None else beside,
        )
