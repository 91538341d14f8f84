"""RemotePeer: one worker's connection to one store of another node: attached on demand, checked
when in doubt, dropped when it fails, and tried again by one caller.

Life: unknown -> attaching (one attempt for all callers) -> attached -> dropped, or failed. During a
failure's back-off all callers are refused at once; then ONE caller tries (half-open), and the
others are refused until that attempt has ended.

Knows nothing of other peers, the limit of stores, or leases. Belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from engine.errors import IntegrityError
from kvstore.client import KvStoreClient
from kvstore.errors import INCARNATION, STORE_UNAVAILABLE, TRANSPORT, TransferTimeout
from process import logs
from process.background_tasks import start_task
from process.deadline import Clock, Deadline
from process.errors import BatonError, DeadlineExceeded, FailedPrecondition, Unavailable
from services.worker.breaker import Breaker
from services.worker.provenance import FINGERPRINT

logger = logging.getLogger(__name__)

CLOSE_BUDGET_S = 5.0

Attach = Callable[[], Awaitable[KvStoreClient]]
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
        self._breaker = Breaker()
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

    def begin(self, attach: Attach, on_attached: Callable[[KvStoreClient], None]) -> None:
        """Attach for all callers; continues when they are cancelled. `attach` must be bounded."""
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

    async def _attach(self, attach: Attach, on_attached: Callable[[KvStoreClient], None]) -> None:
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
