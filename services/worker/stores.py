"""RemoteStores: a worker's connections to the stores of other nodes, made on demand.

Each store is a RemotePeer (services/worker/remote_peer.py): attached once for all callers, refused
during a back-off after a failure, then tried by one caller. This module limits the number of stores
and checks which incarnation of a store is meant.

Fencing: the caller names the incarnation of the store that it means. A client of another
incarnation is checked: if the store really has that other incarnation, the caller is refused with
the reason `incarnation`; if the store has restarted, the client is closed and the new incarnation
attached. No bytes move before that.

Invariant: at most `max_stores` peers are attached or attaching (`check_integrity`), and a client
that moves bytes is not closed to make room. Clients that are being closed do not count.

Knows no handles, no requests, no engine. Belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from engine.errors import IntegrityError
from kvstore.client import KvStoreClient
from kvstore.errors import DEADLINE, INCARNATION, STORE_UNAVAILABLE
from kvstore.node_ids import is_lender
from process import logs
from process.authorization import PeerRole
from process.background_tasks import end_tasks, start_task
from process.deadline import Clock, Deadline
from process.errors import BatonError, DeadlineExceeded
from services.worker.remote_peer import RemotePeer, close
from services.worker.remote_peer import StoreUnusable as StoreUnusable
from services.worker.store_target import Attach, StoreTarget, attach

logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""Seconds without use after which a client is closed. Guessed: a pause in a conversation."""

MIN_IDLE_S = 15.0
"""Seconds since its last use within which a client is not closed to make room: a request may be
using it."""

LEASE_SHARE = 1 / 2
"""Share of a lease's time within which a client is not closed to make room either: the holder of a
lease renews it through the client three times per lease time."""

SWEEP_S = 5.0

RELEASE_BUDGET_S = 5.0
"""Seconds to release a lease; after that it expires by itself."""


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
        attach: Attach = attach,
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
        self.refused: Counter[str] = Counter()
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
                # Who asks means another life than the client knows. One of them is old.
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
