"""What a router in this process knows, for tests that wait for it or hold it there. Its parts are
known here alone."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from typing import Any

from process.memory_budget import MemoryBudget
from process.rpc_errors import BatonError
from services.router.app import Router
from services.router.http_server import HttpConnections
from services.router.policies import WorkerLoad
from services.router.testing.fake_workers import FakePrefill, FakeWorker
from tests.harness.waiting import Gate


class RouterProbe:
    """Of one router."""

    def __init__(self, router: Router) -> None:
        self.router = router

    async def look(self) -> set[str]:
        """It reads the registry now. Returns: ids of the workers that it knows then."""
        await self.router._registry.poll()
        return self.worker_ids

    @property
    def worker_ids(self) -> set[str]:
        """That it knew when it last read the registry."""
        return {worker.worker_id for worker in self.router._registry.snapshot.workers}

    @property
    def is_redis_reachable(self) -> bool:
        return self.router._registry.snapshot.is_redis_reachable

    @property
    def num_starting(self) -> int:
        """Workers that have said that they start."""
        return len(self.router._registry.snapshot.starting)

    def remember(self, for_s: float) -> None:
        """What Redis does not name any more is known for so long after its return."""
        registry = self.router._registry
        for kept in (registry._remembered_workers, registry._remembered_stores):
            kept._keep_s = for_s

    @property
    def num_requests(self) -> int:
        """In flight."""
        return self.router._in_flight.num_attempts

    @property
    def num_held(self) -> int:
        """Requests that are held until there is a worker."""
        return self.router._holding.num_held

    @property
    def num_asked(self) -> int:
        """Requests that have asked to be admitted, ever."""
        return self.router.desk.admission.counts.num_asked

    @property
    def num_waiting(self) -> int:
        """Requests that wait to be admitted."""
        return self.router.desk.admission.num_waiting

    @property
    def num_waited(self) -> int:
        """Requests that had to wait before they were admitted, ever."""
        return self.router.desk.admission.counts.num_waited

    def has_decode_place(self, model: str) -> bool:
        """Its decode workers say that one sample more would run."""
        return self.router.desk.models.find(model).candidates.has_decode_place(0)

    @property
    def num_open_legs(self) -> int:
        """Of requests, on streams to decode workers."""
        return self.router._streams.num_open_legs

    @property
    def states(self) -> list[str]:
        """What each request under way is doing, oldest first."""
        return [record.to_proto().state for record in self.router._log._live]

    @property
    def num_shown(self) -> int:
        """Tokens that its only request's client was sent."""
        (record,) = self.router._log._live
        return record.num_output_tokens

    def age_requests(self, by_s: float) -> None:
        """What each request under way does now has lasted so much longer."""
        for record in self.router._log._live:
            record._times._clock = lambda: time.monotonic() + by_s  # type: ignore[union-attr]

    def num_heard(self, index: int = 0) -> int:
        """Tokens that it has of this sample of its only request."""
        (record,) = self.router._log._live
        assert record.flow is not None
        return len(record.flow._samples._drawn[index])  # type: ignore[attr-defined]

    def num_unsent(self, decode_id: str) -> int:
        """Commands that wait to be written to this decode worker."""
        return self._decode(decode_id)._outgoing.qsize()

    def num_tokens_announced(self, decode_id: str) -> int:
        """That the partial handle covers which the only leg there was given last."""
        (leg,) = self._decode(decode_id)._legs.values()
        handle = leg._early.handle if leg._early is not None else None
        return handle.opened().num_tokens if handle is not None else 0

    def has_met(self, worker: FakeWorker) -> bool:
        """Its stream to this life of the worker is up."""
        role = self.router._prefills if isinstance(worker, FakePrefill) else self.router._streams
        stream = role._streams.find(worker.worker_id)
        return stream is not None and stream.incarnation == worker.incarnation and stream.is_up

    def is_up(self, worker_id: str) -> bool:
        """Its stream to that worker is, of either role."""
        return self.router._prefills.is_up(worker_id) or self.router._streams.is_up(worker_id)

    def standing(self, worker: FakeWorker) -> str:
        """In words: "trusted", "paused", "being probed", "may be tried" or "being tried"."""
        probation = self.router._probation
        return probation.standing(worker.worker_id, worker.incarnation).value

    def num_failures(self, worker: FakeWorker) -> int:
        """Since it last served a request."""
        record = self.router._probation._records.get(worker.worker_id)
        return record.num_failures if record is not None else 0

    def loads(self) -> dict[str, WorkerLoad]:
        """What it takes each worker of its only model to be loaded with, by id."""
        (model,) = self.router.desk.models
        pools = model.candidates.pools()
        return {load.worker_id: load for load in (*pools.prefill, *pools.decode)}

    def usable(self, role: str) -> list[str]:
        """Workers of its only model that get new requests."""
        (model,) = self.router.desk.models
        return [worker.worker_id for worker in model.candidates.usable(role)]

    @property
    def is_registered(self) -> bool:
        """Other routers can see it."""
        return self.router._beat.is_registered

    def knows_adapter(self, name: str) -> bool:
        """Requests of its only model may name it."""
        (model,) = self.router.desk.models
        return name in model.candidates.adapter_names()

    def hurry_adapters(self, within_s: float) -> None:
        """The next change of an adapter has so much time."""
        changes = self.router._changes
        changes._times = replace(changes._times, adapter_s=within_s)

    @property
    def is_tidying(self) -> bool:
        """It looks which wishes for adapters can be forgotten."""
        tidying = self.router._changes._tidying
        return tidying is not None and not tidying.done()

    def hold_tidying(self) -> Gate:
        """The next time it has seen the registry, and reads the wishes again."""
        return Gate(self.router._changes, "_entries")

    def watch_releases(self) -> list[Any]:
        """Handles whose leases it gives back from here on, instead of giving them back."""
        released: list[Any] = []
        self.router._prefills._give_back = released.append
        return released

    @property
    def intake(self) -> MemoryBudget:
        """What it reads of clients' messages."""
        return self.router._clients.memory_budget

    @property
    def num_stalled(self) -> int:
        """gRPC calls that ended because their client read nothing."""
        return self.router._clients.readers.num_stalled

    def look_at_readers(self) -> None:
        """As it does now and then."""
        self.router._clients.readers._look()

    @property
    def http_paths(self) -> set[tuple[str, str]]:
        """Method and path of all that is served over HTTP."""
        routes = self.router._http.routes
        return {(r.method, r.resource.canonical) for r in routes if r.resource is not None}

    @property
    def connections(self) -> HttpConnections:
        """To its HTTP port."""
        assert self.router._http.connections is not None
        return self.router._http.connections

    @property
    def num_connections(self) -> int:
        """That are open to its HTTP port."""
        return len(self.connections._open_now())

    def narrow_connection(self) -> None:
        """The system keeps little of what is written to the only connection of its HTTP port."""
        (protocol,) = self.connections._open_now()
        theirs = protocol.transport.get_extra_info("socket")  # type: ignore[attr-defined]
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    def is_idle(self) -> bool:
        """Nothing is under way, and its laws hold."""
        try:
            self.router.check_integrity(is_idle=True)
        except BatonError:
            return False
        return True

    def _decode(self, worker_id: str) -> Any:
        stream = self.router._streams._streams.find(worker_id)
        assert stream is not None
        return stream
