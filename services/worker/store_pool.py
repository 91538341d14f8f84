"""StoreConnector and RemoteStores: a worker's connections to KV stores, the home store of its node
and those of other nodes. A store may fail, return, or return empty; that never fails a request: the
request continues, and its missing blocks are counted as recomputed, by reason.

StoreConnector: the connection of one engine to its home store. A background task attaches, watches,
and attaches again when the connection or the store's incarnation is lost; requests use the client
that is attached at the time, or none. Invariant: a block that a transfer may still write into is
quarantined at the engine before any further call about its request, until the transfer is over.

RemoteStores: the connections to other nodes' stores, made on demand. Fencing: the caller names the
incarnation of the store. A client of another incarnation is checked: if the store really has that
other incarnation, the caller is refused with the reason `incarnation`; if the store has restarted,
the client is closed and the new incarnation attached. No bytes move before that. Invariant: at most
`max_stores` peers are attached or attaching (`check_integrity`; clients that are being closed do
not count), and a client that moves bytes is not closed to make room.

RemotePeer: one of these connections: unknown -> attaching (one attempt for all callers) -> attached
-> dropped, or failed. During a failure's back-off all callers are refused at once; then one caller
tries (half-open), and the others are refused until that attempt has ended.

CallBreaker: a circuit breaker with exponential back-off for calls to a peer. A failure opens it for
BACKOFF_MIN_S, doubled by each further failure up to BACKOFF_MAX_S; after that it is half-open. A
success closes it, but failures stay counted until none came for FORGIVE_S, so that a peer that
accepts connections and then fails is not tried at the shortest interval.

TransferMetrics: durations and sizes of KV transfers by direction, transport and place, failed
blocks by reason, and blocks that are put again. `watch` is called with each attached client; link
measurements are not counted. The metrics server's thread may read them at any time.

LoadedBlocks (the result of a load) and StoreTarget (address, identity, memory and transport of an
attachment) are values. Everything else is used on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics_core import Metric

from engine.errors import IntegrityError
from kvstore import errors
from kvstore.block_refs import Block
from kvstore.block_source import MatchResult
from kvstore.client import KvStoreClient, TransferStats
from kvstore.errors import (
    DEADLINE,
    INCARNATION,
    REASONS,
    STORE_UNAVAILABLE,
    TRANSPORT,
    Quarantine,
    TransferCancelled,
    TransferTimeout,
)
from kvstore.node_ids import is_lender
from kvstore.transport.base import BlockMemory, GetResult
from process import logs, rpc
from process.authorization import PeerRole
from process.background_tasks import end_tasks, start_task
from process.deadline import Clock, Deadline
from process.rpc import Dialer
from process.rpc_errors import BatonError, DeadlineExceeded, FailedPrecondition, Unavailable
from services.worker.config import WorkerLimits, WorkerSettings
from services.worker.device_memory import block_memory, check_transports
from services.worker.engine_port import WorkerEngine
from services.worker.engine_thread import EngineThread
from services.worker.provenance import FINGERPRINT


@dataclass(frozen=True)
class LoadedBlocks:
    """Leading blocks of a load that may be used, and the others by reason. checksums: checksum by
    index of each loaded block that was not sealed, for the caller to compare."""

    num_usable: int
    num_bytes: int
    not_usable: Counter[str] = field(default_factory=Counter)
    checksums: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, result: GetResult, num_items: int) -> LoadedBlocks:
        """Create from a transfer's result: blocks after a failed one cannot be used without it and
        get its reason, unless they have their own."""
        first_failed = min(result.failed, default=num_items)
        not_usable = Counter(
            result.failed.get(index, result.failed[first_failed])
            for index in range(first_failed, num_items)
        )
        return cls(first_failed, result.num_bytes, not_usable, result.checksums)


_BOUNDS_S = (
    *(0.000_25, 0.000_5, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Histogram buckets in seconds: from one small block over shared memory to a long prompt over a
slow network. Guessed."""

_BOUNDS_BYTES = tuple(float(1 << power) for power in range(12, 34, 2))
"""Histogram buckets in bytes: 4 KiB to 4 GiB, by factors of four."""

HOME, ELSEWHERE, LENDER = "home", "elsewhere", "lender"


class TransferMetrics:
    """Prometheus histograms and counters of one worker's transfers."""

    def __init__(self, worker_id: str, role: str) -> None:
        self._who = (worker_id, role)
        self._registry = registry = CollectorRegistry()
        names = ("worker_id", "role", "direction", "transport", "place")
        self._seconds = Histogram(
            "baton_transfer_seconds",
            "One transfer of blocks, from the call until they are verified or committed.",
            names,
            registry=registry,
            buckets=_BOUNDS_S,
        )
        self._bytes = Histogram(
            "baton_transfer_bytes",
            "Moved by one transfer and of use.",
            names,
            registry=registry,
            buckets=_BOUNDS_BYTES,
        )
        self._failed = prometheus_client.Counter(
            "baton_transfer_failed_blocks",
            "Blocks that a transfer did not bring, or whose verification failed, by reason.",
            (*names, "reason"),
            registry=registry,
        )

        self._put_again = prometheus_client.Counter(
            "baton_transfer_put_again_blocks",
            "Blocks that the store did not take because it lacks what they follow; the worker puts "
            "them again with that, which is no failure.",
            ("worker_id", "role", "transport", "place"),
            registry=registry,
        )

    def watch(self, client: KvStoreClient, *, is_home: bool) -> None:
        """Count the transfers of a client. is_home: it is of the worker's own store."""
        place = HOME if is_home else LENDER if is_lender(client.node_id) else ELSEWHERE

        for reason in REASONS:  # from 0 on: the first failure is an increase, too
            self._failed.labels(*self._who, "read", client.transport_name, place, reason)

        self._put_again.labels(*self._who, client.transport_name, place)

        def on_transfer(stats: TransferStats) -> None:
            labels = (*self._who, stats.direction, stats.transport, place)
            if stats.num_bytes:
                self._seconds.labels(*labels).observe(stats.seconds)
                self._bytes.labels(*labels).observe(stats.num_bytes)
            for reason, num_blocks in stats.failed.items():
                self._failed.labels(*labels, reason).inc(num_blocks)
            if stats.num_put_again:
                again = self._put_again.labels(*self._who, stats.transport, place)
                again.inc(stats.num_put_again)

        client.on_transfer = on_transfer

    def collect(self) -> Iterable[Metric]:
        """Return all metrics as of now."""
        return self._registry.collect()


@dataclass(frozen=True)
class StoreTarget:
    """Connection parameters of one store."""

    address: str
    worker_id: str
    worker_incarnation: bytes
    fingerprint: str
    memory: BlockMemory
    transport: str
    nixl_net_devices: str = "lo"
    dial: Dialer = rpc.PLAIN
    """How the worker opens gRPC connections to its peers."""
    role: PeerRole = PeerRole.KVSTORE
    """Role of the peer at `address`: a store, or a prefill worker that lends."""


def store_target_of(
    engine: WorkerEngine,
    settings: WorkerSettings,
    worker_id: str,
    worker_incarnation: bytes,
    dial: Dialer,
    memory: BlockMemory | None = None,
) -> StoreTarget | None:
    """Return the target for the home store of this worker life; None without a store.

    Args:
        memory: block memory of the previous life, over the same engine; None: there was none.
    Raises: FailedPrecondition for a device or transport by which the engine's KV cannot be moved.
    """
    if not settings.store_address:
        return None
    check_transports(
        engine.kv, settings.transport, settings.remote_transport, settings.direct_transport
    )
    return StoreTarget(
        address=settings.store_address,
        worker_id=worker_id,
        worker_incarnation=worker_incarnation,
        fingerprint=engine.model_info.fingerprint,
        memory=memory or block_memory(engine.kv),
        transport=settings.transport,
        nixl_net_devices=settings.nixl_net_devices,
        dial=dial,
    )


async def attach_to_store(target: StoreTarget, timeout_s: float) -> KvStoreClient:
    """Attach this worker life to a store. Raises: the errors of KvStoreClient.attach."""
    return await KvStoreClient.attach(
        target.address,
        worker_id=target.worker_id,
        worker_incarnation=target.worker_incarnation,
        fingerprint=target.fingerprint,
        memory=target.memory,
        transport=target.transport,
        timeout_s=timeout_s,
        nixl_net_devices=target.nixl_net_devices,
        dial=target.dial,
        role=target.role,
    )


Attach = Callable[[StoreTarget, float], Awaitable[KvStoreClient]]
"""Function like `attach_to_store`, called with a target and a timeout in seconds."""


BACKOFF_MIN_S = 0.5
BACKOFF_MAX_S = 30.0
FORGIVE_S = 60.0


@dataclass(frozen=True)
class CallBreaker:
    """State of a circuit breaker. num_failures: number of consecutive failures, each within
    FORGIVE_S of the one before. retry_at_s: time on the caller's clock before which no attempt is
    made. is_closed: the last attempt succeeded, or there was none."""

    num_failures: int = 0
    failed_at_s: float = 0.0
    retry_at_s: float = 0.0
    is_closed: bool = True

    def refuses(self, now_s: float) -> bool:
        """Return whether attempts are refused at `now_s`."""
        return not self.is_closed and now_s < self.retry_at_s

    def is_half_open(self, now_s: float) -> bool:
        """Return whether one trial attempt is allowed, and no other until its outcome is known."""
        return not self.is_closed and now_s >= self.retry_at_s

    def succeeded(self) -> CallBreaker:
        """Return the state after a successful attempt."""
        return CallBreaker(self.num_failures, self.failed_at_s, 0.0, True)

    def failed(self, now_s: float, jitter: float) -> CallBreaker:
        """Return the state after a failed attempt. jitter: factor in [0.5, 1] that spreads the
        retries of many workers; the first wait is not shortened."""
        forgiven = now_s - self.failed_at_s > FORGIVE_S
        num_failures = 1 if forgiven else self.num_failures + 1
        doubled_s = BACKOFF_MIN_S * 2 ** min(num_failures - 1, 16)
        backoff_s = max(BACKOFF_MIN_S, min(BACKOFF_MAX_S, doubled_s) * jitter)
        return CallBreaker(num_failures, now_s, now_s + backoff_s, False)


logger = logging.getLogger(__name__)

WATCH_S = 1.0
"""Seconds between checks of an idle client. Guessed: well under the life of a heartbeat."""

RELEASE_BUDGET_S = 5.0
"""Seconds to release a lease; after that it expires by itself."""

DOUBT_S = 0.05
"""Seconds after which a store that has not answered a lookup is checked with a ping. Guessed; a
lookup takes 1 ms on a quiet machine."""

MAX_DOUBTING = 4
"""Most lookups that wait longer than DOUBT_S for a store that may have stalled. If it does not
answer a ping at once either, the others are given up: many waiting lookups would leave the engine
without prompts. Guessed."""

FAIR_PART = 0.5
"""Share of a call's configured budget that counts as a fair time to answer, where that is shorter
than the ping budget: a call rarely has the whole budget left when it begins."""

MIN_BACKOFF_S = 0.1

MAX_BACKOFF_S = 2.0

STEADY_S = 5.0
"""Seconds of use after which a client's failure starts a new back-off. Guessed."""


def reason_of(error: BatonError) -> str:
    """Return the metrics reason under which blocks that were lost to `error` are counted."""
    return error.reason if isinstance(error, StoreUnusable) else errors.reason_of(error)


class StoreConnector:
    """Connection of one engine to its KV store, with reconnection in the background. `target` None:
    this worker has no store."""

    def __init__(
        self,
        target: StoreTarget | None,
        thread: EngineThread,
        limits: WorkerLimits,
        *,
        on_room: Callable[[], None] = lambda: None,
        on_attached: Callable[[KvStoreClient], None] = lambda client: None,
        min_backoff_s: float = MIN_BACKOFF_S,
        clock: Clock = time.monotonic,
        attach: Attach = attach_to_store,
    ) -> None:
        """Create a connector; `start` attaches it. on_room: called when quarantined blocks may be
        used again. on_attached: called with every new client. min_backoff_s: seconds before the
        second attempt to attach. attach: creates a client."""
        self._target = target
        self._thread = thread
        self._limits = limits
        self._on_room = on_room
        self._on_attached = on_attached
        self._min_backoff_s = min_backoff_s
        self._clock = clock
        self._attach = attach
        self.on_other_suspect: Callable[[KvStoreClient, BatonError], None] = _nobody
        """Called for failed calls of clients that are not this connector's: other nodes' stores."""
        self._client: KvStoreClient | None = None
        self._stalled = asyncio.Event()
        self.num_doubting = 0
        """Lookups that wait for a store which has not answered within DOUBT_S."""
        self._answered = asyncio.Event()  # a ping, since the store was last doubted
        self._refusal: FailedPrecondition | None = None
        self._last_problem = ""
        self._attached = asyncio.Event()
        self._suspect = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._to_release: dict[KvStoreClient, list[str]] = {}
        self._releasing = asyncio.Lock()
        self.num_attached = 0
        self.num_in_quarantine = 0

    # ---- life

    async def start(self, *, wait_s: float) -> bool:
        """Attach to the store, waiting at most `wait_s` seconds; a background task continues to
        try. Returns: whether the store is attached.

        Raises: FailedPrecondition when the store rejects this worker's configuration.
        """
        if self._target is None:
            return False
        self._keeper = start_task(
            self._keep_attached(self._target), "store keeper", is_for_many=True
        )
        try:
            async with asyncio.timeout(wait_s):
                await self._attached.wait()
        except TimeoutError:
            logs.event(logger, "store_away", level=logging.WARNING, address=self._target.address)
        if self._client is None and self._refusal is not None:
            raise self._refusal
        return self._client is not None

    async def stop(self, *, timeout_s: float) -> None:
        """Stop: finish pending releases, then detach."""
        await end_tasks([self._keeper])
        await self.finish(Deadline.after(timeout_s))
        await end_tasks(self._background)
        if self._client is not None:
            await self._close(self._client)
            self._client = None

    @property
    def client(self) -> KvStoreClient | None:
        """Return the attached client; None while the store is away or does not answer."""
        if self._client is not None and self._client.broken is not None:
            self._suspect.set()
            return None
        return None if self._stalled.is_set() else self._client

    @property
    def transport(self) -> str:
        return self._target.transport if self._target is not None else ""

    @property
    def address(self) -> str:
        return self._target.address if self._target is not None else ""

    async def wait_attached(self, deadline: Deadline) -> None:
        """Wait until the store is attached. Raises: DeadlineExceeded."""
        async with deadline.timeout("attaching to the store"):
            while self.client is None:
                self._attached.clear()
                await self._attached.wait()

    # ---- bytes in

    async def load(
        self,
        client: KvStoreClient,
        engine_id: str,
        lease_id: str,
        items: Sequence[tuple[Block, int]],
        deadline: Deadline,
        *,
        incarnation: bytes | None = None,
        num_unsealed: int = 0,
        held_until_s: float = 0.0,
    ) -> LoadedBlocks:
        """Copy committed blocks from the store into blocks that `engine_id` has reserved and not
        started, verified by checksum. Never raises because of the store. A cancelled load
        quarantines the blocks that may still be written into.

        Never raises for the store's sake. A cancelled load quarantines what may still be written
        into.
        Args: items: (block, destination block id), in the order of the prompt. num_unsealed,
            held_until_s: see KvStoreClient.get_blocks.
        """
        if not items:
            return LoadedBlocks(0, 0)
        deadline = deadline.sooner(self._limits.transfer_budget_s)
        had_s = deadline.left_s()
        try:
            result = await client.get_blocks(
                lease_id,
                items,
                deadline,
                incarnation=incarnation,
                num_unsealed=num_unsealed,
                held_until_s=held_until_s,
            )
        except TransferCancelled as error:
            self._quarantine(engine_id, error.quarantine)
            # A plain one: asyncio.timeout of this Python recognises no subclass.
            raise asyncio.CancelledError(str(error)) from error
        except TransferTimeout as error:
            self._quarantine(engine_id, error.quarantine)
            self.suspect(client, error, had_s=had_s)
            return LoadedBlocks(0, 0, collections.Counter({DEADLINE: len(items)}))
        except BatonError as error:
            self.suspect(client, error, had_s=had_s)
            return LoadedBlocks(0, 0, collections.Counter({reason_of(error): len(items)}))
        if DEADLINE in result.failed.values():
            self.suspect(client, DeadlineExceeded("a transfer"), had_s=had_s)
        return LoadedBlocks.of(result, len(items))

    async def match(
        self,
        client: KvStoreClient,
        chain_hashes: Sequence[bytes],
        *,
        ttl_s: float,
        deadline: Deadline,
    ) -> MatchResult:
        """Look up and pin a prompt's blocks with `KvStoreClient.match`, giving up as soon as this
        node's store counts as stalled. A store that does not answer within DOUBT_S is pinged. Until
        it answers the ping, at most MAX_DOUBTING lookups wait for it, and the others are given up
        after another DOUBT_S.

        Raises: as `KvStoreClient.match`.
        """
        matching = client.match(chain_hashes, ttl_s=ttl_s, deadline=deadline)
        if client is not self._client:
            return await matching
        call, stalled = asyncio.create_task(matching), None
        call.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen
        try:
            await asyncio.wait([call], timeout=DOUBT_S)
            if not call.done():
                self._answered.clear()
                self._suspect.set()
                if await self._may_wait_on():
                    stalled = asyncio.create_task(self._stalled.wait())
                    self.num_doubting += 1
                    try:
                        await asyncio.wait([call, stalled], return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        self.num_doubting -= 1
            if call.done():
                return call.result()
            if self._stalled.is_set():
                raise DeadlineExceeded(f"store {client.address} has stalled")
            raise Unavailable(f"store {client.address} has not answered within {DOUBT_S} s")
        finally:
            await end_tasks([call, stalled])

    async def _may_wait_on(self) -> bool:
        """Return whether an unanswered lookup may continue to wait: only few may, unless the store
        answers a ping (a lookup that reads blocks from files takes long)."""
        if self.num_doubting < MAX_DOUBTING:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DOUBT_S):
                await self._answered.wait()
        return self._answered.is_set()

    def suspect(self, client: KvStoreClient, error: BatonError, *, had_s: float = math.inf) -> None:
        """Check the attachment now instead of at the next tick, after a call has failed.

        After a call that timed out, other requests do not wait for this store until it answers a
        ping. A timeout of a request that had hardly any time left has no such effect.

        Args: had_s: time that the call had when it began, where a request's own may be short.
        """
        is_late = isinstance(error, DeadlineExceeded | TransferTimeout)
        limits = self._limits
        budget_s = min(limits.transfer_budget_s, limits.put_budget_s)
        # A call that had less time than a ping gets says nothing about the store when it was late.
        fair_s = min(limits.ping_budget_s, FAIR_PART * budget_s)
        if is_late and had_s < fair_s and client.broken is None:
            return
        if client is not self._client:
            self.on_other_suspect(client, error)
            return
        if is_late:
            self._stalled.set()
            self._suspect.set()
        elif isinstance(error, Unavailable):
            self._suspect.set()

    def _quarantine(self, engine_id: str, quarantine: Quarantine) -> None:
        block_ids = quarantine.block_ids
        if not block_ids:
            return
        self.num_in_quarantine += len(block_ids)
        self._thread.post(lambda engine: engine.quarantine(engine_id, block_ids))

        def settled(_: object) -> None:
            self.num_in_quarantine -= len(block_ids)
            self._thread.post(lambda engine: engine.unquarantine(block_ids), self._on_room)

        quarantine.settled.add_done_callback(settled)

    # ---- leases

    def release_later(self, client: KvStoreClient | None, lease_ids: Iterable[str]) -> None:
        """Release leases in the background. A lease that cannot be released expires by itself."""
        lease_ids = [lease_id for lease_id in lease_ids if lease_id]
        if client is not None and lease_ids and client.broken is None:
            self.spawn(self._release(client, lease_ids))

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a bounded coroutine in the background; `stop` waits for it."""
        task = start_task(work, "store background", is_for_many=True)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def settle(self) -> None:
        """Wait for the background work and for the work that it starts (each piece has its own
        deadline)."""
        while self._background:
            await asyncio.wait(set(self._background))

    async def finish(self, deadline: Deadline) -> None:
        """Wait for the background work as `settle` does, until `deadline` at most."""
        while self._background and not deadline.expired:
            await asyncio.wait(set(self._background), timeout=deadline.left_s())

    async def _release(self, client: KvStoreClient, lease_ids: list[str]) -> None:
        self._to_release.setdefault(client, []).extend(lease_ids)
        async with self._releasing:  # what comes while one call is under way shares the next
            lease_ids = self._to_release.pop(client, [])
            if not lease_ids:
                return
            try:
                await client.release(lease_ids, deadline=Deadline.after(RELEASE_BUDGET_S))
            except BatonError as error:
                self.suspect(client, error)
                logs.event(logger, "lease_not_released", level=logging.WARNING, why=str(error))

    # ---- the keeper

    async def _keep_attached(self, target: StoreTarget) -> None:
        backoff_s = self._min_backoff_s
        while True:
            client = await self._try_attach(target)
            if client is not None:
                attached_at_s = self._clock()
                await self._use(client)
                if self._clock() - attached_at_s >= STEADY_S:
                    backoff_s = self._min_backoff_s
                    continue
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(MAX_BACKOFF_S, backoff_s * 2)

    async def _use(self, client: KvStoreClient) -> None:
        """Use a newly attached client for all requests until it fails."""
        self._client, self._last_problem = client, ""
        self._stalled.clear()
        self.num_attached += 1
        self._on_attached(client)
        self._attached.set()
        logs.event(
            logger,
            "store_attached",
            address=self.address,
            node_id=client.node_id,
            transport=self.transport,
            incarnation=client.incarnation.hex(),
        )
        why = await self._watch(client)
        self._client = None
        self._attached.clear()
        logs.event(logger, "store_lost", level=logging.WARNING, why=why)
        self.spawn(self._close(client))

    async def _try_attach(self, target: StoreTarget) -> KvStoreClient | None:
        try:
            return await self._attach(target, self._limits.attach_budget_s)
        except (BatonError, OSError) as error:
            if isinstance(error, FailedPrecondition):
                self._refusal = error
                self._attached.set()
            if str(error) != self._last_problem:
                self._last_problem = str(error)
                logs.event(logger, "store_not_attached", level=logging.WARNING, why=str(error))
            return None

    async def _watch(self, client: KvStoreClient) -> str:
        """Wait until the client fails. Returns: the reason."""
        while True:
            try:
                async with asyncio.timeout(WATCH_S):
                    await self._suspect.wait()
            except TimeoutError:
                pass
            self._suspect.clear()
            why = client.broken or await self._ping(client) or client.broken
            if why is not None:
                return why

    async def _ping(self, client: KvStoreClient) -> str | None:
        """Ping the store and compare its incarnation. Returns: why the client is unusable; None if
        it is not."""
        try:
            status = await client.status(deadline=Deadline.after(self._limits.ping_budget_s))
        except DeadlineExceeded:
            self._stalled.set()  # slow is not gone
            return None
        except BatonError as error:
            return str(error)
        if status.incarnation != client.incarnation:
            return "another life answers"
        self._stalled.clear()
        self._answered.set()
        self._attached.set()
        return None

    async def _close(self, client: KvStoreClient) -> None:
        try:
            async with asyncio.timeout(RELEASE_BUDGET_S):
                await client.close()
        except (BatonError, TimeoutError) as error:
            logs.event(logger, "store_not_closed", level=logging.WARNING, why=str(error))


def _nobody(client: KvStoreClient, error: BatonError) -> None:
    """Ignore a failed call of a client that is not this connector's."""


CLOSE_BUDGET_S = 5.0

AttachPeer = Callable[[], Awaitable[KvStoreClient]]
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class StoreUnusable(Unavailable):
    """Error of a store that cannot be used for this request; `reason` is the metrics reason under
    which its blocks are counted as computed."""

    def __init__(self, message: str, reason: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason


class RemotePeer:
    """Connection to one remote store, with its circuit breaker.

    Attributes:
        client: the attached client.
        is_stalled: a call timed out; the client is not given out until it answers a ping.
    """

    def __init__(
        self, node_id: str, address: str, clock: Clock, spawn: Spawn, ping_budget_s: float
    ) -> None:
        """Create without a connection. clock: seconds, for the back-off. spawn: runs a bounded
        coroutine in the background. ping_budget_s: see WorkerLimits."""
        self.node_id = node_id
        self.address = address
        self.client: KvStoreClient | None = None
        self.attaching: asyncio.Task[None] | None = None
        self.looking: asyncio.Task[None] | None = None
        self.is_stalled = False
        self._used_at_s = clock()
        self._num_uses = 0
        self._breaker = CallBreaker()
        self._problem = ""
        self._reason = STORE_UNAVAILABLE
        self._clock = clock
        self._spawn = spawn
        self._ping_budget_s = ping_budget_s

    @property
    def is_open(self) -> bool:
        """Return whether the peer is attached or attaching, and so counts towards the limit of
        stores."""
        return self.client is not None or self.attaching is not None

    def touch(self) -> None:
        """Record that a caller asks for the peer now."""
        self._used_at_s = self._clock()

    def idle_s(self) -> float:
        """Return the seconds since a caller asked for the peer or, as seen by this call, used its
        client (a lease is renewed through the client)."""
        client = self.client
        if client is not None and (client.is_busy or client.num_uses != self._num_uses):
            self._num_uses = client.num_uses
            self.touch()
        return self._clock() - self._used_at_s

    def may_begin(self) -> bool:
        """Return whether the caller should begin an attachment; else there is one, complete or in
        progress.

        Raises: StoreUnusable: the back-off lasts, or another caller tries.
        """
        now_s = self._clock()
        self.drop_if_gone()
        if not self.is_open:
            if self._breaker.refuses(now_s):
                raise self.refusal()
            return True
        if self.is_stalled or self._breaker.is_half_open(now_s):
            raise self.refusal()
        return False

    def begin(self, attach: AttachPeer, on_attached: Callable[[KvStoreClient], None]) -> None:
        """Attach for all callers; continues when they are cancelled. `attach` must be
        bounded."""
        self.attaching = start_task(self._attach(attach, on_attached), f"attach {self.address}")

    async def attached(self) -> KvStoreClient:
        """Wait for the attachment in progress; the caller bounds it. Raises: StoreUnusable."""
        if self.attaching is not None:
            await asyncio.wait([self.attaching])
        if self.client is None:
            raise self.refusal()
        return self.client

    async def look(self) -> None:
        """Ping the store. The client is dropped if the store has restarted or does not answer. A
        cancelled caller only stops waiting."""
        self._begin_look()
        if self.looking is not None:
            await asyncio.wait([self.looking])

    def suspect(self, error: BatonError) -> None:
        """Record the failure of a call: a transfer that timed out or a broken connection drops the
        client."""
        is_broken = self.client is not None and self.client.broken is not None
        if is_broken or isinstance(error, TransferTimeout | Unavailable):
            self._lose(str(error))
        elif isinstance(error, DeadlineExceeded):
            self.is_stalled, self._problem = True, "not answering"
            self._begin_look()

    def drop(self) -> None:
        """Close the client, if there is one; this does not count as a failure."""
        client, self.client = self.client, None
        if client is not None:
            self._spawn(close(client))

    def drop_if_gone(self) -> None:
        """Drop a client whose connection broke while idle; the store may be attached again at
        once."""
        if self.client is not None and self.client.broken is not None:
            self.drop()

    def refusal(self) -> StoreUnusable:
        """Return the error for callers that cannot be served."""
        return StoreUnusable(
            f"store {self.address} of node {self.node_id}: {self._problem or 'being tried'}",
            self._reason,
            retry_after_s=max(0.0, self._breaker.retry_at_s - self._clock()),
        )

    def check_integrity(self) -> None:
        """Check the peer's invariants. Raises: IntegrityError."""
        if self.client is not None and self.attaching is not None:
            raise IntegrityError(f"{self.node_id} is attached and attaching")
        if self.client is not None and not self._breaker.is_closed:
            raise IntegrityError(f"{self.node_id} failed and kept its client")

    # ---- inside

    async def _attach(
        self, attach: AttachPeer, on_attached: Callable[[KvStoreClient], None]
    ) -> None:
        try:
            client = await attach()
        except (BatonError, OSError) as error:
            self._fail(str(error), _why_not(error))
            return
        finally:
            self.attaching = None
        if client.node_id != self.node_id:
            self._spawn(close(client))
            self._fail(f"node {client.node_id} answers there", INCARNATION)
            return
        self.client, self._breaker = client, self._breaker.succeeded()
        self._num_uses = client.num_uses
        self._problem, self._reason = "", STORE_UNAVAILABLE
        logs.event(
            logger,
            "remote_store_attached",
            node_id=self.node_id,
            address=self.address,
            incarnation=client.incarnation.hex(),
        )
        on_attached(client)

    def _begin_look(self) -> None:
        if self.client is not None and self.looking is None:
            self.looking = self._spawn(self._ping(self.client))

    async def _ping(self, client: KvStoreClient) -> None:
        try:
            status = await client.status(deadline=Deadline.after(self._ping_budget_s))
        except BatonError as error:
            if self.client is client:
                self._lose(str(error))
            return
        finally:
            self.looking, self.is_stalled = None, False
        if self.client is client and status.incarnation != client.incarnation:
            self.drop()  # no failure: the new life may be met at once

    def _lose(self, problem: str) -> None:
        """Drop the client and count a failure of the store."""
        self.drop()
        self.is_stalled = False
        self._fail(problem, STORE_UNAVAILABLE)

    def _fail(self, problem: str, reason: str) -> None:
        now_s = self._clock()
        self._breaker = self._breaker.failed(now_s, random.uniform(0.5, 1.0))
        self._problem, self._reason = problem, reason
        logs.event(
            logger,
            "remote_store_failed",
            level=logging.WARNING,
            node_id=self.node_id,
            address=self.address,
            why=problem,
            retry_in_s=round(self._breaker.retry_at_s - now_s, 3),
        )


def _why_not(error: BatonError | OSError) -> str:
    """Return the metrics reason for a store that could not be attached to."""
    if isinstance(error, FailedPrecondition):
        return TRANSPORT if str(error).startswith("transport") else FINGERPRINT
    return STORE_UNAVAILABLE


async def close(client: KvStoreClient) -> None:
    """Detach from the store, within a bound."""
    try:
        async with asyncio.timeout(CLOSE_BUDGET_S):
            await client.close()
    except (BatonError, TimeoutError) as error:
        logs.event(logger, "store_not_closed", level=logging.WARNING, why=str(error))


IDLE_S = 60.0
"""Seconds without use after which a client is closed. Guessed: a pause in a conversation."""

MIN_IDLE_S = 15.0
"""Seconds since its last use within which a client is not closed to make room: a request may be
using it."""

LEASE_SHARE = 1 / 2
"""Share of a lease's time within which a client is not closed to make room either: the holder of a
lease renews it through the client three times per lease time."""

SWEEP_S = 5.0


class RemoteStores:
    """Connections to remote stores, at most `max_stores`. `target` None: this worker has no store,
    and uses no remote ones either; its `address` is not used."""

    def __init__(
        self,
        target: StoreTarget | None,
        *,
        direct_transport: str = "",
        max_stores: int,
        attach_budget_s: float,
        lease_ttl_s: float,
        ping_budget_s: float,
        on_attached: Callable[[KvStoreClient], None] = lambda client: None,
        clock: Clock = time.monotonic,
        attach: Attach = attach_to_store,
    ) -> None:
        """Create without connections.

        Args:
            target: identity and transport of this worker; an empty transport: blocks are never
                pulled from other nodes.
            direct_transport: transport to workers that lend; empty: the target's.
            lease_ttl_s: lease time at those stores.
            ping_budget_s: seconds for a ping.
            on_attached: called with every new client; must not raise.
            clock: seconds, for back-off and idleness.
            attach: makes a client.
        """
        self._target = target
        self._direct_transport = direct_transport
        self._max_stores = max_stores
        self._attach_budget_s = attach_budget_s
        self._ping_budget_s = ping_budget_s
        self._min_idle_s = max(MIN_IDLE_S, lease_ttl_s * LEASE_SHARE)
        self._idle_s = max(IDLE_S, lease_ttl_s * LEASE_SHARE)
        self._on_attached = on_attached
        self._clock = clock
        self._attach = attach
        self._peers: dict[tuple[str, str], RemotePeer] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._is_stopped = False
        self.num_attached = 0
        self.refused: collections.Counter[str] = collections.Counter()
        """How often a store could not be used, by reason."""

    # ---- what requests ask

    async def client(
        self, node_id: str, address: str, incarnation: bytes, deadline: Deadline
    ) -> KvStoreClient:
        """Return a client of that incarnation of that store, attaching if necessary.

        Raises: StoreUnusable (its `reason` says how to count it); DeadlineExceeded.
        """
        try:
            return await self._client(node_id, address, incarnation, deadline)
        except StoreUnusable as error:
            self.refused[error.reason] += 1
            raise
        except DeadlineExceeded:
            self.refused[DEADLINE] += 1
            raise

    def release_later(self, client: KvStoreClient | None, lease_ids: Iterable[str]) -> None:
        """Release leases in the background. A lease that cannot be released expires by itself."""
        lease_ids = [lease_id for lease_id in lease_ids if lease_id]
        if client is not None and lease_ids and client.broken is None:
            self._spawn(self._release(client, lease_ids))

    def suspect(self, client: KvStoreClient, error: BatonError) -> None:
        """Record the failure of a client's call. A transfer that timed out or a broken connection
        closes the client, and the next one is made after the back-off. After a call that timed out,
        the peer is refused until it answers a ping.

        A transfer that was not over in time, or a connection that is gone, ends the client: the
        next one is made afresh, after the back-off. After a call that was not answered in time the
        peer is refused until it answers a ping.
        """
        for peer in self._peers.values():
            if peer.client is client:
                peer.suspect(error)
                return

    # ---- life

    async def settle(self) -> None:
        """Wait for the current background work (each piece has its own bound)."""
        if self._background:
            await asyncio.wait(set(self._background))

    async def stop(self, *, timeout_s: float) -> None:
        """Stop: finish pending releases, then detach from all stores."""
        self._is_stopped = True
        await end_tasks([self._sweeper])
        patience = Deadline.after(timeout_s)
        while self._background and not patience.expired:
            await asyncio.wait(set(self._background), timeout=patience.left_s())
        attempts = [peer.attaching for peer in self._peers.values()]
        await end_tasks([*attempts, *self._background])
        clients = self.clients
        self._peers.clear()
        await asyncio.gather(*(close(client) for client in clients))

    @property
    def clients(self) -> list[KvStoreClient]:
        """Return the attached clients."""
        return [peer.client for peer in self._peers.values() if peer.client is not None]

    def check_integrity(self) -> None:
        """Check the invariants of the connections. Raises: IntegrityError."""
        num_open = sum(peer.is_open for peer in self._peers.values())
        if num_open > self._max_stores:
            raise IntegrityError(f"{num_open} remote stores are open, {self._max_stores} may be")
        for peer in self._peers.values():
            peer.check_integrity()

    # ---- inside

    async def _client(
        self, node_id: str, address: str, incarnation: bytes, deadline: Deadline
    ) -> KvStoreClient:
        if self._target is None or not self._target.transport or self._is_stopped:
            raise StoreUnusable(
                "remote_transport: this worker pulls no blocks from other nodes' stores",
                STORE_UNAVAILABLE,
            )
        peer = self._peers.get((node_id, address))
        if peer is None:
            peer = RemotePeer(node_id, address, self._clock, self._spawn, self._ping_budget_s)
            self._peers[node_id, address] = peer
        peer.touch()
        role, transport = PeerRole.KVSTORE, self._target.transport
        if is_lender(node_id):
            role, transport = PeerRole.PREFILL, self._direct_transport or transport
        target = replace(self._target, address=address, role=role, transport=transport)
        async with deadline.timeout(f"attaching to store {address}"):
            client = await self._attached(peer, target)
            if client.incarnation != incarnation:
                # The caller means another incarnation than the client knows. One of them is old.
                await peer.look()
                client = await self._attached(peer, target)
        if client.incarnation != incarnation:
            raise StoreUnusable(
                f"store {address} is in its life {client.incarnation.hex()[:8]}, not "
                f"{incarnation.hex()[:8]}",
                INCARNATION,
            )
        return client

    async def _attached(self, peer: RemotePeer, target: StoreTarget) -> KvStoreClient:
        """Return a client of whatever incarnation is running. The caller bounds the wait."""
        if peer.may_begin():
            if self._is_stopped:
                raise peer.refusal()
            self._make_room()
            if self._sweeper is None:
                self._sweeper = start_task(self._sweep(), "remote stores", is_for_many=True)
            peer.begin(partial(self._attach, target, self._attach_budget_s), self._note)
        return await peer.attached()

    def _note(self, client: KvStoreClient) -> None:
        self.num_attached += 1
        self._on_attached(client)

    def _make_room(self) -> None:
        """Close an idle client to make room. Raises: StoreUnusable when all are in use."""
        for peer in self._peers.values():
            peer.drop_if_gone()
        peers = [peer for peer in self._peers.values() if peer.is_open]
        if len(peers) < self._max_stores:
            return
        idle_s = {peer: peer.idle_s() for peer in peers if peer.client is not None}
        idlest = max(idle_s, key=lambda peer: idle_s[peer], default=None)
        if idlest is None or idle_s[idlest] < self._min_idle_s:
            raise StoreUnusable(
                f"max_remote_stores: all {self._max_stores} are in use", STORE_UNAVAILABLE
            )
        idlest.drop()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            self.sweep()

    def sweep(self) -> None:
        """Close broken clients, which may keep a dead worker's memory alive, and idle ones; forget
        idle peers."""
        for key, peer in list(self._peers.items()):
            peer.drop_if_gone()
            idle_s = peer.idle_s()
            if idle_s >= self._idle_s:
                peer.drop()
            if idle_s >= 2 * self._idle_s and not peer.is_open and peer.looking is None:
                del self._peers[key]

    async def _release(self, client: KvStoreClient, lease_ids: list[str]) -> None:
        try:
            await client.release(lease_ids, deadline=Deadline.after(RELEASE_BUDGET_S))
        except BatonError as error:
            self.suspect(client, error)
            logs.event(logger, "lease_not_released", level=logging.WARNING, why=str(error))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = start_task(work, "remote store background", is_for_many=True)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
