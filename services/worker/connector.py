"""StoreConnector: one engine's connection to one KV store, which may fail, return, or return empty.

Life: a background task attaches, watches, and attaches again when the store's connection or
incarnation is lost; requests use the client that is attached at the moment, or none. The store's
absence never fails a request: the request continues and its blocks are counted as recomputed, by
reason.

Invariant: a block that a transfer may still write into is quarantined at the engine before any
further call about its request, until the transfer is over.

Knows no request life and no gRPC service. Belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from kvstore import errors
from kvstore.block_refs import Block
from kvstore.block_source import MatchResult
from kvstore.client import KvStoreClient
from kvstore.errors import (
    DEADLINE,
    Quarantine,
    TransferCancelled,
    TransferTimeout,
)
from process import logs
from process.background_tasks import end_tasks, start_task
from process.deadline import Clock, Deadline
from process.errors import (
    BatonError,
    DeadlineExceeded,
    FailedPrecondition,
    Unavailable,
)
from services.worker.config import WorkerLimits
from services.worker.engine_thread import EngineThread
from services.worker.loaded import Loaded
from services.worker.store_target import Attach, StoreTarget, attach
from services.worker.stores import StoreUnusable

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
        attach: Attach = attach,
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
    ) -> Loaded:
        """Copy committed blocks from the store into blocks that `engine_id` has reserved and not
        started, verified by checksum. Never raises because of the store. A cancelled load
        quarantines the blocks that may still be written into.

        Never raises for the store's sake. A cancelled load quarantines what may still be written
        into.
        Args: items: (block, destination block id), in the order of the prompt. num_unsealed,
            held_until_s: see KvStoreClient.get_blocks.
        """
        if not items:
            return Loaded(0, 0)
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
            return Loaded(0, 0, Counter({DEADLINE: len(items)}))
        except BatonError as error:
            self.suspect(client, error, had_s=had_s)
            return Loaded(0, 0, Counter({reason_of(error): len(items)}))
        if DEADLINE in result.failed.values():
            self.suspect(client, DeadlineExceeded("a transfer"), had_s=had_s)
        return Loaded.of(result, len(items))

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
