"""WorkerLender: lends a worker's own KV blocks to other workers; the engine's side of
`BlockLender`.

Lent blocks stay in place at the engine: the caller quarantines a request's blocks before they are
lent; blocks for link measurements are the engine's own loans. Each block is returned accordingly
when no reader is left. Used on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc.aio

from kvstore.block_lender import BlockLender
from kvstore.block_refs import PackedBlocks
from kvstore.exported_blocks import ExportedBlocks, ExportOffer
from kvstore.node_ids import lender_node_id
from kvstore.service import KvStoreServicer
from process.rpc_errors import BatonError, Internal
from services.worker.engine_thread import EngineThread
from services.worker.store_pool import StoreTarget


class WorkerLender:
    """Lender of one worker's blocks; `lender` is the BlockLender that readers connect to."""

    def __init__(
        self,
        target: StoreTarget,
        thread: EngineThread,
        max_ttl_s: float,
        *,
        lets_map: bool = False,
        address: Callable[[], str],
        on_room: Callable[[], None],
    ) -> None:
        """Create a lender; `start` runs it.

        Args:
            target: identity and memory of this worker.
            max_ttl_s: longest lease time.
            lets_map: whether readers on this host may map the whole cache.
            address: returns the address for readers, once the worker listens.
            on_room: called when the engine has got blocks back.
        """
        self.node_id = lender_node_id(target.worker_id)
        self.incarnation = target.worker_incarnation
        self.is_draining = False
        self.open_prompts: set[object] = set()
        """Of requests that are live; but for probes, nobody else keeps a lease without an end."""
        self._thread = thread
        self._address = address
        self._on_room = on_room
        self._probe_ids: set[int] = set()
        memory = target.memory
        self.loans = ExportedBlocks(memory.num_blocks, memory.block_bytes, max_ttl_s, self._on_free)
        self.lender = BlockLender(
            self.node_id,
            self.incarnation,
            memory,
            self.loans,
            self._find_free,
            fingerprint=bytes.fromhex(target.fingerprint),
            nixl_net_devices=target.nixl_net_devices,
            lets_map=lets_map,
        )

    @property
    def address(self) -> str:
        return self._address()

    @property
    def num_lent_blocks(self) -> int:
        return self.loans.num_lent

    def add_service(self, server: grpc.aio.Server) -> None:
        """Register the service with a gRPC server that has not been started yet."""
        KvStoreServicer(self.lender).add_to(server)

    # -- lending

    def enter(
        self, offers: Sequence[ExportOffer], lease_id: str, *, is_computed: bool = True
    ) -> str:
        """Lend blocks that the caller has quarantined for it; where not `is_computed`, they are
        entered but unreadable until `computed`."""
        return self.lender.enter(offers, lease_id, is_computed=is_computed)

    def computed(self, lease_id: str, block_ids: Sequence[int]) -> None:
        """Mark entered blocks as computed, so that readers may copy them."""
        self.loans.computed(lease_id, block_ids)

    async def seal(self, lease_id: str) -> PackedBlocks:
        """Seal the lease's blocks: compute their checksums, so that handles can name them."""
        return await self.lender.seal(lease_id)

    def hand_over(self, lease_id: str, ttl_s: float) -> None:
        """Hand the lease over to a handle for `ttl_s` seconds. Raises: LeaseLapsed."""
        self.loans.hand_over(lease_id, ttl_s, self.lender.now_s())

    def release(self, lease_id: str) -> None:
        """End a lease and return its blocks; readers in progress finish first. Idempotent."""
        self.loans.release([lease_id], self.lender.now_s())

    # -- life

    def start(self) -> None:
        """Start the lender; called once, on the event loop."""
        self.lender.start()

    async def quiet(self) -> None:
        """Stop lending blocks for link measurements, and wait until all are back; the caller bounds
        the wait."""
        self.is_draining = True
        await self.lender.quiet()

    async def stop(self, *, timeout_s: float) -> None:
        """End all leases; the engine gets its blocks back when no transfer touches them any
        more."""
        self.is_draining = True
        await self.lender.stop(timeout_s)

    def check_integrity(self) -> None:
        """Check the invariants. Raises: Internal when one does not hold."""
        problem = self.lender.check_integrity()
        if problem:
            raise Internal(problem)
        if len(self.loans.kept - self.lender.unsealed_probes) > len(self.open_prompts):
            raise Internal("a lease without an end, and its request is over")

    # -- inside

    async def _find_free(self, num_blocks: int, budget_s: float) -> Sequence[int]:
        if self.is_draining:
            return ()
        lent: list[int] = []
        try:
            async with asyncio.timeout(budget_s):
                await self._thread.call(lambda engine: lent.extend(engine.lend_blocks(num_blocks)))
        except BaseException as error:
            # Behind the job that lends, which may still run.
            self._thread.post(lambda engine: engine.return_blocks(lent), self._on_room)
            if isinstance(error, TimeoutError | BatonError):
                return ()
            raise
        self._probe_ids.update(lent)
        return lent

    def _on_free(self, block_ids: Sequence[int]) -> None:
        probes = tuple(block_id for block_id in block_ids if block_id in self._probe_ids)
        others = tuple(block_id for block_id in block_ids if block_id not in self._probe_ids)
        self._probe_ids.difference_update(probes)
        if probes:
            self._thread.post(lambda engine: engine.return_blocks(probes), self._on_room)
        if others:
            self._thread.post(lambda engine: engine.unquarantine(others), self._on_room)
