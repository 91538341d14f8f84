"""WorkerCore: the part of a worker that does not depend on its role: identity, engine thread, store
connector, limits, counters and status.

`start` -> serving -> `drain` (no new requests; the present ones may finish) -> `stop`. When the
engine fails, `failed` is set: the worker refuses every request and its process should end. A change
of role makes a new core, with a new incarnation, over the same engine. Its parts:

- Identity: role, id and incarnation of the worker.
- Chain: the chain-hash namespace of one tenant, model and adapter.
- OptionalStores: the lender of the worker's blocks and the parking of preempted requests' blocks,
  each only where role, settings and engine call for it.
- Heartbeat: the worker's registry entry in Redis, with its role and WorkerStatus.
- InvariantCheck: rate-limited checks of the engine's invariants. A check takes tens of milliseconds
  of the engine's thread with tens of thousands of blocks. While the engine works, checks get at
  most SHARE of its time, however many callers ask; callers in between get the last result. An idle
  worker runs one check for all requests that came before it began. At most one check runs at a
  time, and it ends even if its callers are cancelled. The InvariantCheck belongs to the engine and
  passes from role to role (`hand_over`).

Used on the event loop's thread; Identity and Chain on any.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from redis.asyncio.client import Pipeline

from engine.errors import UnknownRequest, WrongState
from engine.metrics import EngineStats, MetricsSnapshot
from engine.request import BlockHasher
from engine.speculation.remote import DraftTraces
from kvstore import block_hash
from kvstore.block_hash import HashTurns
from kvstore.client import KvStoreClient
from kvstore.transport.base import BlockMemory
from process import entrypoint, registry, tls
from process.authorization import PeerRole
from process.deadline import Deadline
from process.registry import BEAT_EVERY_S, RedisAccess, RegistryHeartbeat
from process.rpc import Dialer
from process.rpc_errors import (
    BatonError,
    FailedPrecondition,
    InvalidArgument,
    NoCapacity,
    Unavailable,
)
from process.trace_spans import Value
from process.tracing import Tracing
from protos import common_pb2
from services import adapter_wishes
from services.worker import provenance
from services.worker.adapters import WorkerAdapters
from services.worker.config import WorkerSettings
from services.worker.device_memory import kernel_wait
from services.worker.engine_port import WorkerEngine
from services.worker.engine_thread import EngineThread
from services.worker.handle import HandleKeys, HandleLedger
from services.worker.kv_swap import StoreParking
from services.worker.lender import WorkerLender
from services.worker.links import Links
from services.worker.provenance import LegProvenance, WorkerCounts, status_to_json
from services.worker.step_log import StepLog
from services.worker.store_pool import (
    RemoteStores,
    StoreConnector,
    StoreTarget,
    TransferMetrics,
    store_target_of,
)
from services.worker.store_writer import HELD_STEPS, WriteBehind
from services.worker.stream_servicer import Outbox


@dataclass(frozen=True)
class Identity:
    """Role, worker id and incarnation of one worker life."""

    role: str
    worker_id: str
    incarnation: bytes

    @classmethod
    def new(cls, role: str, worker_id: str) -> Identity:
        """Create the identity of a new life. An empty `worker_id` becomes the role and a random
        part."""
        return cls(
            role, worker_id or f"{role}-{secrets.token_hex(4)}", entrypoint.new_incarnation()
        )


@dataclass(frozen=True)
class Chain:
    """Chain-hash namespace of one tenant, model and adapter: blocks match only within one
    namespace."""

    root: bytes
    block_size: int
    adapter_digest: str = ""

    @property
    def hasher(self) -> BlockHasher:
        """Return the hash function that an engine request is created with."""
        return partial(block_hash.extend, self.root)

    def hashes(self, token_ids: tuple[int, ...]) -> list[bytes]:
        """Return the chain hashes of the full blocks of `token_ids`."""
        return block_hash.chain(self.root, token_ids, self.block_size)

    async def hashes_in_turns(self, token_ids: tuple[int, ...], turns: HashTurns) -> list[bytes]:
        """Return `hashes(token_ids)`, yielding to the event loop between pieces of work."""
        return await turns.chain(self.root, token_ids, self.block_size)


SHARE = 0.02
"""Share of the engine's time that checks may take while it works."""

Look = Callable[[], Awaitable[float]]
"""Function that checks all invariants and returns the seconds for which it held the engine. Raises:
BatonError naming the broken one; bounds its own time."""


class InvariantCheck:
    """Rate-limited invariant checks of one engine, shared by all callers."""

    def __init__(
        self,
        look: Look,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_looks = 0
        """That were begun."""
        self._look = look
        self._clock = clock
        self._problem = ""
        self.due_s = clock()
        """On the clock: when a working engine may be held again."""
        self._looking: asyncio.Task[None] | None = None

    def hand_over(self, look: Look) -> InvariantCheck:
        """Replace the check function because the engine has a new role. Time spent and a running
        check still count; the last result belongs to the previous role and is dropped."""
        self._look, self._problem = look, ""
        return self

    async def settle(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for the check that is running, if there is one."""
        if self._looking is not None:
            await asyncio.wait({self._looking}, timeout=timeout_s)

    async def problem(self, *, is_busy: bool) -> str:
        """Return the broken invariant; empty: none. Never raises."""
        num_before = self.num_looks
        while not (is_busy and self._clock() < self.due_s):
            if self._looking is None:
                self.num_looks += 1
                self._looking = asyncio.create_task(self._find())
            number = self.num_looks
            await asyncio.shield(self._looking)  # a caller that leaves does not end the check
            if is_busy or number > num_before:
                break
        return self._problem

    async def _find(self) -> None:
        held_s, look = 0.0, self._look
        try:
            held_s = await look()
            problem = ""
        except BatonError as error:
            problem = str(error)
        finally:
            self.due_s = self._clock() + held_s / SHARE
            self._looking = None
        if self._look is look:
            self._problem = problem


@dataclass(frozen=True)
class OptionalStores:
    """Lender and parking of one worker life, each where role, settings and engine call for it."""

    lender: WorkerLender | None = None
    """Lender of this worker's blocks; None: it lends none."""
    parking: StoreParking | None = None
    """Parking of preempted requests' blocks in the store; None: the engine's own."""

    @classmethod
    def make(
        cls,
        target: StoreTarget | None,
        engine: WorkerEngine,
        thread: EngineThread,
        settings: WorkerSettings,
        role: str,
        *,
        address: Callable[[], str],
        on_room: Callable[[], None],
    ) -> OptionalStores:
        """Create the lender and the parking of a role that begins; the engine gets the parking.

        Args:
            target: the store of this worker life; None: it has none.
            address: returns the address of this worker's lender, once it listens.
            on_room: called when the engine has got blocks back.
        Raises: SettingsError for a bound without room for a block.
        """
        if target is None:
            return cls()
        limits = settings.limits
        lender = parking = None

        def make_connector(memory: BlockMemory) -> StoreConnector:
            return StoreConnector(replace(target, memory=memory), thread, limits)

        if _lends(engine, settings, role):
            lender = WorkerLender(
                target,
                thread,
                limits.lease_ttl_s,
                lets_map=settings.lend_mapped,
                address=address,
                on_room=on_room,
            )
        if engine.park_bytes:
            parking = StoreParking(
                engine.kv.layout,
                engine.park_bytes,
                limits,
                worker_incarnation=target.worker_incarnation,
                make_connector=make_connector,
            )
            engine.use_parking(parking)
        return cls(lender, parking)

    async def attach(self, wait_s: float) -> None:
        """Attach the parking to the store, waiting at most `wait_s` seconds. Raises: as
        StoreConnector.start."""
        if self.parking is not None:
            await self.parking.start(wait_s=wait_s)

    async def detach(self, timeout_s: float) -> None:
        """Stop the parking's transfers; lent blocks stay lent."""
        if self.parking is not None:
            await self.parking.stop(timeout_s=timeout_s)


def _lends(engine: WorkerEngine, settings: WorkerSettings, role: str) -> bool:
    """Return whether the worker lends blocks. Only prefill workers do, and only where the engine
    never preempts: it might wait for the blocks of a preempted request that readers keep in place.
    Blocks spread over several devices cannot be lent."""
    is_wanted = settings.limits.lend_blocks and role == "prefill"
    return is_wanted and engine.kv.is_whole and settings.engine.preemption == "never"


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


INTEGRITY_BUDGET_S = 5.0

LOOK_S = 0.005

RETRY_AFTER_S = 1.0
"""Seconds after which a refused client should try again. Guessed: about one prompt's time."""


class WorkerCore:
    """Engine thread, store connections, limits and counters of one worker life."""

    def __init__(
        self,
        engine: WorkerEngine,
        settings: WorkerSettings,
        identity: Identity,
        *,
        idle_check_s: float = 0.25,
        draft_traces: DraftTraces | None = None,
        before: WorkerCore | None = None,
    ) -> None:
        """Create the core of one worker life; `attach` connects it to the store.

        Args:
            draft_traces: spans of draft worker calls; None: there are no draft workers.
            before: core of this worker's previous life, over the same engine; its traces continue.
        """
        self.settings = settings
        self.limits = settings.limits
        self.identity = identity
        self.model = engine.model_info
        self.layout = engine.kv.layout
        self.tls = tls.TlsIdentity.of(settings.tls, PeerRole(identity.role))
        """Who this worker is to its peers; None: no TLS."""
        self._dial = Dialer(self.tls)
        target = store_target_of(
            engine,
            settings,
            identity.worker_id,
            identity.incarnation,
            self._dial,
            None if before is None else before.memory,
        )
        self.memory: BlockMemory | None = None if target is None else target.memory
        """The engine's cache as transports see it, in every life; None without a store."""
        self.step_log = StepLog() if settings.step_log else None
        if before is not None:
            self.step_log = before.step_log
        """What the engine did when; None: nobody wants to know."""
        if draft_traces is None:
            draft_traces = DraftTraces() if before is None else before.draft_traces
        self.draft_traces: DraftTraces = draft_traces
        """What draft workers' calls for traced requests took; noted by whoever asks them."""
        self.hashing = HashTurns()
        """Of all prompts."""
        self.thread = EngineThread(
            engine,
            log=self.step_log,
            idle_check_s=idle_check_s,
            step_timeout_s=settings.limits.step_timeout_s,
            wait_for_kernels=kernel_wait(self.memory, engine.kv.settle),
        )
        self.on_room: Callable[[], None] = lambda: None
        """Called when the engine may have room again; nobody waits for it yet."""
        self.num_queued_tokens: Callable[[], int] = lambda: 0
        """Prompt tokens yet to be computed here; what a prefill worker says of itself."""
        self.num_free_places: Callable[[], int | None] = lambda: None
        """Places for samples of further requests; what a decode worker says of itself."""
        self.links = Links(
            self.thread,
            self.layout.block_bytes,
            settings.link_floor_bytes_per_s,
            second_budget_s=settings.limits.link_budget_s,
            on_room=lambda: self.on_room(),
        )
        """What was measured of the ways to stores."""
        self.transfers = TransferMetrics(identity.worker_id, identity.role)
        self.connector = StoreConnector(
            target,
            self.thread,
            settings.limits,
            on_room=lambda: self.on_room(),
            on_attached=lambda client: self._attached(client, is_home=True),
        )
        self.remote_stores = RemoteStores(
            None if target is None else replace(target, transport=settings.remote_transport),
            direct_transport=settings.direct_transport,
            max_stores=settings.limits.max_remote_stores,
            attach_budget_s=settings.limits.attach_budget_s,
            lease_ttl_s=settings.limits.lease_ttl_s,
            ping_budget_s=settings.limits.ping_budget_s,
            on_attached=lambda client: self._attached(client, is_home=False),
        )
        """The ways to other nodes' stores."""
        self.connector.on_other_suspect = self.remote_stores.suspect
        self._side_ways = OptionalStores.make(
            target,
            engine,
            self.thread,
            settings,
            identity.role,
            address=lambda: self.address,
            on_room=lambda: self.on_room(),
        )
        self.lender = self._side_ways.lender
        self.parking = self._side_ways.parking
        self.adapters: WorkerAdapters = WorkerAdapters(
            self.thread,
            engine.adapters(),
            model_names=(self.model.model, settings.engine.model),
            known=None if before is None else before.adapters.known,
        )
        self.counts = WorkerCounts()
        self.write_behind = WriteBehind(
            self.connector,
            self.thread,
            self.limits,
            self.counts,
            block_size=self.model.block_size,
            max_held_blocks=max(
                1, HELD_STEPS * settings.engine.max_num_tokens_per_step // self.model.block_size
            ),
            on_room=lambda: self.on_room(),
        )
        self.laws: InvariantCheck = (
            InvariantCheck(self._check_laws)
            if before is None
            else before.laws.hand_over(self._check_laws)
        )
        self.handle_keys = HandleKeys.of(settings.handle_keys_file)
        """Without a file, so without a store: none; every handle is refused."""
        self.handle_ledger = HandleLedger()
        self.tracing = Tracing.of(settings.tracing, identity.role, identity.worker_id)
        self.address = settings.advertised or settings.listen
        self.metrics_address = ""
        """Where /metrics is served; empty: nowhere."""
        self.draining = False
        self.failed: asyncio.Event = asyncio.Event() if before is None else before.failed
        """Of the worker, in whatever role."""
        self.num_live = 0
        self.outboxes: set[Outbox[Any]] = set()
        """Of the routers' streams."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._numbers = itertools.count(1)

    def _attached(self, client: KvStoreClient, *, is_home: bool) -> None:
        """Start metrics and link measurement of a new client of a store or lender."""
        self.transfers.watch(client, is_home=is_home)
        self.links.measure_later(client)

    @property
    def about(self) -> dict[str, Value]:
        """Return the span attributes that describe this worker."""
        return {"baton.worker_id": self.identity.worker_id, "baton.role": self.identity.role}

    # ---- requests

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count a request as live while the body runs. Raises: Unavailable when the worker accepts
        none."""
        if self.draining:
            raise Unavailable(f"{self.identity.worker_id} is draining", retry_after_s=0.0)
        if self.thread.failure is not None:
            raise Unavailable(str(self.thread.failure))
        self.num_live += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.num_live -= 1
            if self.num_live == 0:
                self._idle.set()

    def engine_id(self, request_id: str) -> str:
        """Return an engine request id that no other attempt of this request has."""
        return f"{request_id}#{next(self._numbers)}"

    def check_model(self, model_fingerprint: str, adapter: str, adapter_digest: str) -> None:
        """Check the model and the adapter of a request. Raises: FailedPrecondition for another
        model, or an adapter content that is not loaded; another worker may have it."""
        if model_fingerprint.lower() != self.model.fingerprint.lower():
            raise FailedPrecondition(
                f"model_fingerprint: {self.identity.worker_id} serves "
                f"{self.model.fingerprint[:16]}, not {model_fingerprint[:16]}"
            )
        if adapter_digest and not adapter:
            raise InvalidArgument("adapter_digest", "goes with adapter")
        self.adapters.check(adapter, adapter_digest)

    def chain(self, tenant_salt: bytes, digest: str) -> Chain:
        """Return the chain-hash namespace of one tenant and adapter content: a reload under the
        same name never matches old KV.

        Raises: InvalidArgument without a salt, since tenants would share blocks.
        """
        if not tenant_salt:
            raise InvalidArgument("tenant_salt", "is empty; the router sets it")
        root = block_hash.root_key(tenant_salt, self.model.fingerprint, digest)
        return Chain(root, self.model.block_size, digest)

    def refuse_when_full(self, num_waiting: int) -> None:
        """Refuse a request when the queue is full. Raises: NoCapacity."""
        if num_waiting >= self.limits.max_waiting_requests:
            raise NoCapacity(
                f"{num_waiting} requests wait at {self.identity.worker_id}",
                retry_after_s=RETRY_AFTER_S,
            )

    def deadline(self, budget_s: float | None) -> Deadline:
        """Return the deadline for a request's own time budget, within the worker's limit; the
        default budget if it has none."""
        if budget_s is None:
            budget_s = self.limits.default_budget_s
        return Deadline.after(min(budget_s, self.limits.max_budget_s))

    def drop(self, engine_id: str) -> None:
        """Abort a request in any state and free all that the engine holds for it."""
        self.thread.post(lambda engine: engine.abort(engine_id), lambda: self.on_room())

    def finish(self, engine_id: str) -> None:
        """Free all that the engine holds for a request that has drawn its last token; it counts as
        finished."""
        self.thread.post(lambda engine: _finish(engine, engine_id), lambda: self.on_room())

    def leg_to_proto(self, leg: LegProvenance) -> common_pb2.KvLeg:
        """Convert a leg of this worker to its protobuf message."""
        return provenance.leg_to_proto(
            leg,
            role=self.identity.role,
            worker_id=self.identity.worker_id,
            incarnation=self.identity.incarnation.hex(),
            dtype=self.model.dtype,
        )

    # ---- life

    async def attach(self, wait_s: float) -> None:
        """Attach to the store, waiting at most `wait_s` seconds, then measure the link to it for a
        bounded time.

        Raises: FailedPrecondition when the store rejects this worker's configuration.
        """
        await asyncio.gather(self.connector.start(wait_s=wait_s), self._side_ways.attach(wait_s))
        await self.links.settle()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, wait for the live ones, then for readers of lent blocks. Returns:
        whether all ended in time."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                if self.lender is not None:
                    await self.lender.quiet()
        except TimeoutError:
            return False
        return True

    async def say_last_words(self, timeout_s: float) -> None:
        """Wait until pending messages were written to routers, for at most `timeout_s` seconds,
        since a router may not read."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(outbox.num_unwritten for outbox in self.outboxes):
                    await asyncio.sleep(LOOK_S)

    async def stop(self, timeout_s: float = 5.0, *, closes_engine: bool = True) -> None:
        """Stop the store connections and the engine's thread; close the engine unless another life
        takes it over.

        Requests must have ended or been cancelled before.
        """
        await self.adapters.stop()
        await self._side_ways.detach(timeout_s)
        await self.links.stop()
        # Whoever still gives back what lies elsewhere needs the ways there.
        await self.connector.finish(Deadline.after(timeout_s))
        await self.remote_stores.stop(timeout_s=timeout_s)
        await self.connector.stop(timeout_s=timeout_s)
        if self.lender is not None:
            await self.lender.stop(timeout_s=timeout_s)
        if not closes_engine:
            await self._have_blocks_back(Deadline.after(timeout_s))
        try:
            await self.thread.stop(timeout_s, closes_engine=closes_engine)
        finally:
            await self.laws.settle(timeout_s)  # its job has run, or never will
        await asyncio.to_thread(self.tracing.stop)

    async def _have_blocks_back(self, deadline: Deadline) -> None:
        """Wait until blocks that are still being copied into are back at the engine; after this
        life's thread has ended they could not be freed."""
        while not deadline.expired:
            stats = self.thread.stats
            if not stats.num_quarantined_blocks and not stats.num_referenced_blocks:
                return
            await asyncio.sleep(LOOK_S)

    # ---- our own account

    def status(self) -> common_pb2.WorkerStatus:
        """Return the worker's status as of the engine's last step or job; never waits."""
        client, failure = self.connector.client, self.thread.failure
        remote = self.settings.remote_transport if self.settings.store_address else ""
        reply = common_pb2.WorkerStatus(
            worker_id=self.identity.worker_id,
            role=self.identity.role,
            address=self.address,
            incarnation=self.identity.incarnation.hex(),
            block_bytes=self.layout.block_bytes,
            num_queued_tokens=self.num_queued_tokens(),
            num_step_tokens=self.settings.engine.max_num_tokens_per_step,
            transport=self.connector.transport,
            store_node_id=client.node_id if client is not None else "",
            store_address=self.connector.address,
            draining=self.draining,
            integrity_error="" if failure is None else str(failure),
            adapters=self.adapters.to_proto(),
            metrics_address=self.metrics_address,
            links=provenance.links_to_proto(self.links.links),
            remote_transport=remote,
            direct_transport=remote and (self.settings.direct_transport or remote),
            lender_node_id=self.lender.node_id if self.lender is not None else "",
            num_lent_blocks=self.lender.num_lent_blocks if self.lender is not None else 0,
            step_age_s=self.thread.step_age_s,
            num_free_places=self.num_free_places(),
        )
        reply.MergeFrom(provenance.model_to_proto(self.model))
        reply.MergeFrom(provenance.stats_to_proto(self.thread.stats))
        reply.MergeFrom(provenance.counts_to_proto(self.counts))
        return reply

    async def _check_laws(self) -> float:
        """Check all invariants of the worker. Returns: seconds for which the engine was held."""

        def checked(engine: WorkerEngine) -> float:
            begun_s = time.perf_counter()
            engine.check_integrity()
            return time.perf_counter() - begun_s

        async with Deadline.after(INTEGRITY_BUDGET_S).timeout("checking integrity"):
            held_s = await self.thread.call(checked)
        self.remote_stores.check_integrity()
        if self.lender is not None:
            self.lender.check_integrity()
        self.handle_ledger.check_integrity()
        return held_s

    async def checked_status(self) -> common_pb2.WorkerStatus:
        """Return `status` with the result of the invariant checks, which run while the engine works
        only as often as `InvariantCheck` allows."""
        metrics: MetricsSnapshot | None = None
        stats: EngineStats = self.thread.stats
        problem = await self.laws.problem(is_busy=stats.num_running > 0)
        try:
            async with Deadline.after(INTEGRITY_BUDGET_S).timeout("reading metrics"):
                metrics = await self.thread.call(lambda engine: engine.metrics())
        except BatonError as error:
            problem = problem or str(error)
        reply = self.status()
        if metrics is not None:
            reply.num_prefix_tokens_asked = metrics.num_prompt_tokens
            reply.num_prefix_tokens_cached = metrics.num_cached_tokens
        if problem and not reply.integrity_error:
            reply.integrity_error = problem
        return reply


def _finish(engine: WorkerEngine, engine_id: str) -> None:
    try:
        engine.release(engine_id)
    except UnknownRequest:
        return  # it has nothing any more
    except WrongState:
        engine.abort(engine_id)
