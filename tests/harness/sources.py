"""What readers take blocks from: a store that a writer has put them into, and a worker that lends
its own. Both give them under a lease, and are asked the same way."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvstore.block_lender import LENDER_LIMITS, BlockLender, LenderLimits
from kvstore.block_refs import Block
from kvstore.errors import TransferFailed
from kvstore.exported_blocks import ExportedBlocks, ExportOffer
from kvstore.node_ids import PROBE_HASH, lender_node_id
from kvstore.service import KvStoreServicer
from kvstore.transport.base import BlockMemory
from process import grpc_server
from tests.harness.fake_device import FakeDevice
from tests.harness.store import (
    BLOCK_BYTES,
    FINGERPRINT,
    NUM_BLOCKS,
    SETTINGS,
    LocalStore,
    OnDevice,
    Worker,
    chain_of,
    local_store,
)

MAPPED = OnDevice("cuda_ipc")
LENDING = ("grpc", "nixl", OnDevice("grpc"), OnDevice("nixl"), MAPPED)
TTL_S = 30.0
Given = tuple[str, Sequence[Block]]
"""A lease and blocks."""


class Stored:
    """A store and a worker that puts its blocks there."""

    def __init__(self, store: LocalStore, writer: Worker) -> None:
        self.store, self.writer = store, writer
        self.address = store.address
        self.view = writer.view

    async def give(self, block_ids: Sequence[int], name: str = "a") -> Given:
        """Blocks of the writer, as those of a prompt of this name."""
        put = await self.writer.put(chain_of(name, len(block_ids)), block_ids)
        assert put.num_bytes == len(block_ids) * self.view.shape[1] and put.not_stored == 0
        return put.lease_id, put.refs

    def flip_bit(self, block: Block) -> None:
        self.store.flip_bit(block)

    async def use_again(self, given: Given) -> None:
        """The lease is over, and the memory of the blocks is another prompt's."""
        await self.writer.release(given[0])
        num_frames = self.writer.client.num_frames
        ids = [i % len(self.view) for i in range(num_frames)]
        await self.writer.release((await self.give(ids, "another"))[0])


class Lending:
    """A worker that lends, without an engine: what it kept in place is counted here.

    Attributes:
        num_probes_free: blocks that it has for a reader to measure the way with.
        ahead_s: how far its clock is before everybody's.
    """

    def __init__(
        self,
        seed: int,
        block_bytes: int,
        num_blocks: int,
        *,
        is_on_device: bool,
        lets_map: bool = True,
        limits: LenderLimits = LENDER_LIMITS,
    ) -> None:
        draw = np.random.default_rng(seed)
        self.view = draw.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
        memory = BlockMemory.of(self.view)
        self.device = FakeDevice()
        if is_on_device:
            address = self.device.holding(self.view)
            memory = BlockMemory.on_device(self.device, address, block_bytes, num_blocks)
        self.num_kept: dict[int, int] = {}
        self.num_probes_free = 0
        self.ahead_s = 0.0
        self.loans = ExportedBlocks(num_blocks, block_bytes, TTL_S, self.on_free)
        self.lender = BlockLender(
            lender_node_id("lending"),
            secrets.token_bytes(16),
            memory,
            self.loans,
            self.find_free,
            fingerprint=bytes.fromhex(FINGERPRINT),
            lets_map=lets_map,
            limits=limits,
            clock=lambda: time.monotonic() + self.ahead_s,
        )
        self.address = ""

    @property
    def num_lent(self) -> int:
        return self.loans.num_lent

    def on_free(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.num_kept[block_id] -= 1

    async def find_free(self, num_blocks: int, budget_s: float) -> Sequence[int]:
        end = len(self.view)
        block_ids = range(end - min(num_blocks, self.num_probes_free), end)
        self.keep(block_ids)
        return block_ids

    def keep(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.num_kept[block_id] = self.num_kept.get(block_id, 0) + 1

    async def lend(
        self, block_ids: Sequence[int], lease_id: str = "", ttl_s: float = TTL_S
    ) -> tuple[str, tuple[Block, ...]]:
        """Under a lease that is handed over. Raises: NotFound once it has stopped."""
        offers = [ExportOffer(block_id, b"%16d" % block_id, None, 16) for block_id in block_ids]
        self.keep(block_ids)
        try:
            lease_id = self.lender.enter(offers, lease_id)
        except BaseException:
            self.on_free(block_ids)
            raise
        blocks = await self.lender.seal(lease_id)
        self.loans.hand_over(lease_id, ttl_s, self.lender.now_s())
        return lease_id, tuple(blocks)

    async def give(self, block_ids: Sequence[int], name: str = "a") -> Given:
        return await self.lend(block_ids)

    def tell(self, block_ids: Sequence[int]) -> str:
        """Lend blocks that have no checksum yet. Returns: their lease."""
        self.keep(block_ids)
        return self.lender.enter(
            [ExportOffer(each, b"%16d" % each, None, 16) for each in block_ids]
        )

    @property
    def num_attached(self) -> int:
        """Readers."""
        return len(self.lender.attachments)

    @property
    def is_shared(self) -> bool:
        """Whether its memory was made ready to be mapped."""
        return self.lender.shared is not None

    @property
    def num_bytes_read(self) -> int:
        return self.loans.counters.num_bytes_read

    @property
    def refused(self) -> Mapping[str, int]:
        """Blocks, by reason."""
        return self.loans.refused

    @property
    def num_moved_bytes(self) -> int:
        """That its own device copied."""
        return self.device.num_moved_bytes

    def end_promises(self) -> None:
        """The time of all is over."""
        end_promises(self.loans)

    def break_promises(self) -> None:
        """The blocks of all are let go before their time."""
        for hold_id in self.loans._pins:
            self.loans.unhold(hold_id)

    def end_leases(self) -> None:
        """Those that were told of and not handed over, too."""
        self.loans.end_all()

    def bound(self, **changes: Any) -> None:
        """Other limits for what readers ask from now on."""
        self.lender.limits = dataclasses.replace(self.lender.limits, **changes)

    def flip_bit(self, block: Block) -> None:
        self.view[block.frame, -1] ^= 1

    def take_back(self, *lease_ids: str) -> None:
        """As the request that they were lent for ends."""
        self.loans.release(lease_ids, self.lender.now_s())

    async def use_again(self, given: Given) -> None:
        self.take_back(given[0])
        self.take_back((await self.lend([block.frame for block in given[1]]))[0])

    async def stop(self) -> None:
        await self.lender.stop(5.0)

    async def probe(self, reader: Worker, num_blocks: int) -> int:
        """As a reader asks for blocks to measure with. Returns: how many it has."""
        return len((await reader.match([PROBE_HASH] * num_blocks, 5.0)).blocks)

    def refuse_pushes(self) -> None:
        """As an agent that is closed."""
        agent: Any = self.lender.peers._agent

        def closed(*arguments: Any, **options: Any) -> Any:
            raise TransferFailed("the agent is closed")

        agent.write = closed

    def check(self) -> None:
        """Every law; and kept in place is what is lent, and nothing else."""
        assert self.lender.check_integrity() == ""
        kept = {block_id for block_id, num in self.num_kept.items() if num}
        assert set(self.num_kept.values()) <= {0, 1}
        assert len(kept) == self.loans.num_lent


def end_promises(loans: ExportedBlocks) -> None:
    """The time of every hold of a reader is over."""
    loans._pins = dict.fromkeys(loans._pins, 0.0)
    loans.lapse(0.0)


@contextlib.asynccontextmanager
async def lending(
    seed: int,
    block_bytes: int = BLOCK_BYTES,
    num_blocks: int = NUM_BLOCKS,
    *,
    is_on_device: bool = False,
    lets_map: bool = True,
    limits: LenderLimits = LENDER_LIMITS,
) -> AsyncIterator[Lending]:
    made = Lending(
        seed,
        block_bytes,
        num_blocks,
        is_on_device=is_on_device,
        lets_map=lets_map,
        limits=limits,
    )
    server, made.address = await grpc_server.listen(
        "127.0.0.1:0", [KvStoreServicer(made.lender).add_to]
    )
    made.lender.start()
    try:
        yield made
        made.check()
    finally:
        await server.stop(0)
        await made.lender.stop(5.0)
        made.check()
        assert made.loans.num_lent == 0


@contextlib.asynccontextmanager
async def stored(
    transport: str, seed: int, block_bytes: int = BLOCK_BYTES, num_blocks: int = NUM_BLOCKS
) -> AsyncIterator[Stored]:
    """The writer's transport is `transport`."""
    capacity_bytes = max(SETTINGS.capacity_bytes, 5 * block_bytes)
    settings = dataclasses.replace(SETTINGS, capacity_bytes=capacity_bytes)
    async with local_store(settings) as store:
        writer = Worker(transport, block_bytes, num_blocks, seed)
        await writer.attach(store.address)
        try:
            yield Stored(store, writer)
        finally:
            await writer.client.close()
