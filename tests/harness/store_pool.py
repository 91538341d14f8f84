"""A worker's ways to stores: to its home store, with an engine beside it, and to those of other
nodes, by a clock that a test drives."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.block_refs import Block
from kvstore.client import KvStoreClient
from kvstore.errors import Quarantine, TransferTimeout
from kvstore.transport.base import BlockMemory
from process.rpc_errors import BatonError
from services.worker.config import WorkerLimits
from services.worker.links import Links
from services.worker.store_pool import BACKOFF_MAX_S as BACKOFF_MAX_S
from services.worker.store_pool import IDLE_S as IDLE_S
from services.worker.store_pool import MIN_IDLE_S as MIN_IDLE_S
from services.worker.store_pool import (
    RemoteStores,
    StoreConnector,
    StoreTarget,
    StoreUnusable,
    attach_to_store,
)
from tests.harness.gated_engine import fake_engine, prompt_of, request, running
from tests.harness.store import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    FINGERPRINT,
    NUM_BLOCKS,
    LocalStore,
    StoreProcess,
)
from tests.harness.waiting import WAIT_S, Clock, until, within

View = npt.NDArray[np.uint8]
NUM_ITEMS = 5


@dataclass(frozen=True)
class Place:
    """A life of a store, as an index tells of it."""

    node_id: str
    address: str
    life: bytes

    def of_life(self, life: bytes) -> Place:
        return replace(self, life=life)


def place_of(store: LocalStore) -> Place:
    return Place(store.node.node_id, store.address, store.node.incarnation)


async def place_now(process: StoreProcess) -> Place:
    """The life that answers there now."""
    probe = await KvStoreClient.attach(
        process.address,
        worker_id="probe",
        worker_incarnation=secrets.token_bytes(16),
        fingerprint=FINGERPRINT,
        memory=BlockMemory.of(np.zeros((1, BLOCK_BYTES), dtype=np.uint8)),
        transport="grpc",
        timeout_s=WAIT_S,
    )
    await probe.close()
    return Place(probe.node_id, process.address, probe.incarnation)


class StorePool:
    """Ways to other nodes' stores.

    Attributes:
        num_tries: attachments that were begun.
    """

    def __init__(
        self,
        transport: str,
        view: View | None = None,
        *,
        has_store: bool = True,
        max_stores: int = 4,
        lease_ttl_s: float = 30.0,
        ping_budget_s: float = 1.0,
    ) -> None:
        """has_store: this worker has one of its own."""
        self.view = np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.uint8) if view is None else view
        self.num_tries = 0
        self._clock = Clock(1000.0)
        memory = BlockMemory.of(self.view)
        target = StoreTarget("", "worker", secrets.token_bytes(16), FINGERPRINT, memory, transport)
        self._stores = RemoteStores(
            target if has_store else None,
            max_stores=max_stores,
            attach_budget_s=10.0,
            lease_ttl_s=lease_ttl_s,
            ping_budget_s=ping_budget_s,
            clock=self._clock,
            attach=self._attach,
        )

    async def _attach(self, target: StoreTarget, timeout_s: float) -> KvStoreClient:
        self.num_tries += 1
        return await attach_to_store(target, timeout_s)

    @property
    def clients(self) -> list[KvStoreClient]:
        """Those that are attached."""
        return self._stores.clients

    @property
    def num_attached(self) -> int:
        """Attachments that were made."""
        return self._stores.num_attached

    @property
    def num_known(self) -> int:
        """Stores that it remembers."""
        return len(self._stores._peers)

    @property
    def refused(self) -> dict[str, int]:
        """How often it could give no client, by reason."""
        return dict(self._stores.refused)

    async def meet(self, place: Place, timeout_s: float = WAIT_S) -> KvStoreClient:
        """A client of that life."""
        return await self._stores.client(
            place.node_id, place.address, place.life, within(timeout_s)
        )

    async def refusal(self, place: Place, says: str = "") -> str:
        """Why there is none, as its error says. Returns: the reason under which it is counted."""
        try:
            client = await self.meet(place)
        except StoreUnusable as error:
            assert says in str(error), str(error)
            return error.reason
        raise AssertionError(f"{place.node_id} was met: {client.incarnation.hex()}")

    async def meet_or_none(self, place: Place) -> KvStoreClient | None:
        try:
            return await self.meet(place)
        except StoreUnusable:
            return None

    def pass_time(self, seconds: float) -> None:
        self._clock.now_s += seconds

    def look(self) -> None:
        """As it does every few seconds."""
        self._stores.sweep()

    def suspect(self, client: KvStoreClient, error: BatonError) -> None:
        """A call of it failed so."""
        self._stores.suspect(client, error)

    def suspect_hanging(self, client: KvStoreClient) -> None:
        """A transfer of it was not over in time."""
        settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        settled.set_result(None)
        self.suspect(client, TransferTimeout("hangs", Quarantine((1,), settled)))

    def lose(self, client: KvStoreClient) -> None:
        """Its connection breaks, and nobody asks."""
        client._connection.mark_broken("no heartbeat")

    @contextlib.contextmanager
    def moving(self, client: KvStoreClient) -> Any:
        """Bytes move."""
        with client._transferring():
            yield

    async def put(self, client: KvStoreClient, hashes: Sequence[bytes]) -> tuple[str, Any]:
        """The view's first blocks. Returns: their lease, and where they lie."""
        blocks = list(zip(hashes, range(len(hashes)), strict=True))
        put = await client.put_blocks(
            None, b"", blocks, None, 60.0, within(), num_tokens=BLOCK_SIZE
        )
        return put.lease_id, put.refs

    def release_later(self, client: KvStoreClient | None, *lease_ids: str) -> None:
        self._stores.release_later(client, lease_ids)

    async def settle(self) -> None:
        """Wait for what goes on in the background."""
        await self._stores.settle()

    def check(self) -> None:
        """Its laws."""
        self._stores.check_integrity()

    async def stop(self) -> None:
        await self._stores.stop(timeout_s=5.0)
        assert self.clients == []


@contextlib.asynccontextmanager
async def store_pool(
    transport: str, view: View | None = None, **options: Any
) -> AsyncIterator[StorePool]:
    """See StorePool. Its laws hold at the end."""
    pool = StorePool(transport, view, **options)
    try:
        yield pool
        pool.check()
    finally:
        await pool.stop()


class HomeStore:
    """A worker's way to its home store, which it measures; an engine is beside it."""

    def __init__(self, engine: Any, thread: Any, connector: StoreConnector, links: Links) -> None:
        self._engine, self._thread, self._connector, self._links = engine, thread, connector, links

    @property
    def client(self) -> KvStoreClient | None:
        """None: the store is away."""
        return self._connector.client

    @property
    def num_attached(self) -> int:
        """Attachments that were made."""
        return self._connector.num_attached

    async def met_anew(self, *former: KvStoreClient) -> KvStoreClient:
        """A client that is none of these."""
        await until(lambda: self.client is not None and self.client not in former)
        assert self.client is not None
        return self.client

    async def store_and_load(self, hashes: list[bytes]) -> list[tuple[Block, int]]:
        """Put blocks of a request, and fetch them into others of it. Returns: what was fetched."""
        client = self.client
        assert client is not None
        wanted = request(self._engine, prompt_of(42))
        block_ids = (await self._thread.call(lambda e: e.reserve(wanted))).block_ids
        view = self._engine.kv.host_view
        view[list(block_ids[:NUM_ITEMS])] = 7
        sources = list(zip(hashes, block_ids[:NUM_ITEMS], strict=True))
        put = await client.put_blocks(None, b"", sources, None, 30.0, within(), num_tokens=4)
        items = list(zip(put.refs, block_ids[NUM_ITEMS : 2 * NUM_ITEMS], strict=True))
        loaded = await self._connector.load(
            client, "r", put.lease_id, items, within(), incarnation=client.incarnation
        )
        assert (loaded.num_usable, loaded.not_usable) == (NUM_ITEMS, {})
        assert (view[[block_id for _, block_id in items]] == 7).all()
        self._connector.release_later(client, [put.lease_id])
        await self._connector.settle()
        self._thread.post(lambda e: e.abort("r"))
        return items

    async def load(
        self, client: KvStoreClient, items: Sequence[tuple[Block, int]], life: bytes, seconds: float
    ) -> dict[str, int]:
        """As a request does that was told of them. Returns: why how many are of no use."""
        loaded = await self._connector.load(
            client, "r", "no lease", items, within(seconds), incarnation=life
        )
        return dict(loaded.not_usable)

    async def measured(self) -> Any:
        """The one link that it has, and whether it is degraded."""
        await self._links.settle()
        ((link, verdict),) = self._links.links
        return link, verdict.degraded


@contextlib.asynccontextmanager
async def home_store(process: StoreProcess, transport: str) -> AsyncIterator[HomeStore]:
    """See HomeStore. At the end no block is in use."""
    engine = fake_engine(num_blocks=128)
    memory = BlockMemory.of(engine.kv.host_view)
    target = StoreTarget(
        process.address, "w", b"i" * 16, engine.model_info.fingerprint, memory, transport
    )
    async with running(engine) as thread:
        links = Links(thread, memory.block_bytes, 0.0, second_budget_s=WAIT_S)
        connector = StoreConnector(target, thread, WorkerLimits(), on_attached=links.measure_later)
        assert await connector.start(wait_s=WAIT_S)
        try:
            yield HomeStore(engine, thread, connector, links)
        finally:
            await links.stop()
            await connector.stop(timeout_s=5)
        assert await thread.call(lambda e: e.stats().num_referenced_blocks) == 0
