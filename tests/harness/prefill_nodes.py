"""Several nodes in one process, each a real store and a prefill worker beside it: gRPC on port 0,
the engine over a fake model whose tokens say whether its KV is right. After each test every law is
checked at every node.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engine.engine import LLMEngine
from kvstore import store_process
from kvstore.block_refs import Block
from kvstore.client import KvStoreClient
from kvstore.config import KvStoreSettings
from kvstore.transport.base import BlockMemory
from process import rpc
from process.deadline import Deadline
from protos import common_pb2, kvstore_pb2, kvstore_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from services.prefill.role import PrefillRole
from services.prefill.worker import PrefillWorker
from services.worker import handle as handles
from services.worker import main
from services.worker.runtime import WorkerCore
from tests.harness.gated_engine import BLOCK_SIZE, SALT, GatedModel, Prompts, fake_engine
from tests.harness.prefill_decode_pair import (
    FRAME_BYTES,
    LEASE_TTL_S,
    WAIT_S,
    PrefillCall,
    keys_in,
    patient,
    sampling_params,
    started,
    whole,
)
from tests.harness.waiting import until
from tests.harness.worker_probe import StoreWay, WorkerProbe


def stepped_model() -> GatedModel:
    """One that makes a step only when it is allowed one."""
    return GatedModel(is_held=True)


@dataclass
class Node(WorkerProbe):
    """One store and the prefill worker that calls it home."""

    name: str
    settings: KvStoreSettings
    store: Any
    store_exit: contextlib.AsyncExitStack
    worker: main.Worker
    stub: prefill_pb2_grpc.PrefillStub
    model: Any

    @property
    def core(self) -> WorkerCore:
        return self.worker.core

    @property
    def block_bytes(self) -> int:
        return self.core.layout.block_bytes

    @property
    def prefills(self) -> PrefillWorker:
        assert isinstance(self.worker.role, PrefillRole)
        return self.worker.role.worker

    async def kill_store(self) -> None:
        """As a SIGKILL looks to the workers: no answer, no goodbye."""
        await self.store_exit.aclose()
        self.store = None

    async def start_store(self) -> None:
        """A new life on the old address; the worker beside it has met it."""
        self.store_exit = contextlib.AsyncExitStack()
        self.store = await self.store_exit.enter_async_context(store_process.running(self.settings))
        await self.core.connector.wait_attached(Deadline.after(WAIT_S))

    async def store_status(self) -> kvstore_pb2.GetStatusReply:
        async with rpc.channel(self.store.address) as channel:
            stub = kvstore_pb2_grpc.KvStoreStub(channel)
            return await stub.GetStatus(
                kvstore_pb2.GetStatusRequest(check_integrity=True), timeout=WAIT_S
            )

    def hint(self, first_block: int, num_blocks: int) -> common_pb2.PrefixRun:
        """That this node's store holds these blocks."""
        return common_pb2.PrefixRun(
            node_id=self.name,
            store_address=self.settings.listen,
            store_incarnation=self.store.node.incarnation if self.store else bytes(16),
            first_block=first_block,
            num_blocks=num_blocks,
        )

    def holds(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks lie in the store, from the first on."""
        found = [self.store.node.store.tree.find(each) is not None for each in hashes]
        num_held = found.index(False) if False in found else len(found)
        assert not any(found[num_held:]), "presence has a gap"
        return num_held

    def has_lease(self, lease_id: str) -> bool:
        """Of its store."""
        return self.store.node.store.leases.find(lease_id) is not None

    def end_leases(self) -> None:
        """Its store ends all of them, as where they were renewed too late."""
        truth = self.store.node.store
        truth.release([lease.lease_id for lease in truth.leases], now_s=0.0)

    async def renew_pins(self) -> int:
        """As its only request does from time to time. Returns: how many of its leases live."""
        (job,) = self.prefills._jobs.values()
        await job.pins.renew()
        return len(job.pins.held)

    def flip_bit(self, block: Block) -> None:
        """In a committed frame, as damage does."""
        self.store.node.slab.frames[block.frame, 3] ^= 1


@dataclass
class Nodes:
    """All of one test. `model`: for what is expected; the workers have their own."""

    model: GatedModel
    all: list[Node]
    _prompts: Prompts = field(default_factory=Prompts)

    def new_prompt(self, num_tokens: int) -> tuple[int, ...]:
        """One that shares no block with another one."""
        return self._prompts.new(num_tokens)

    def __getitem__(self, index: int) -> Node:
        return self.all[index]

    def request(
        self,
        prompt: Sequence[int],
        hints: Sequence[common_pb2.PrefixRun] = (),
        *,
        name: str = "r",
        wants_handle: bool = True,
        max_tokens: int = 8,
        tenant: str = "t",
    ) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(
            request_id=name,
            tenant=tenant,
            tenant_salt=SALT,
            prompt_token_ids=prompt,
            sampling=sampling_params(max_tokens=max_tokens),
            model_fingerprint=self.model.info.fingerprint,
            wants_handle=wants_handle,
            hints=hints,
        )

    async def run(
        self,
        node: Node,
        prompt: Sequence[int],
        hints: Sequence[common_pb2.PrefixRun] = (),
        *,
        partials: list[common_pb2.KvHandle] | None = None,
        **options: Any,
    ) -> prefill_pb2.PrefillReply:
        """One prompt, whose first token must be the right one; its account must add up. Without a
        handle its answer does not wait for the store: we do."""
        request = self.request(prompt, hints, **options)
        reply = await whole(PrefillCall(node.stub, request, timeout_s=LEASE_TTL_S), partials)
        if not request.wants_handle:
            await until(lambda: node.num_chains_behind == 0)
        assert list(reply.token_ids) == self.model.generate(prompt, 1)
        leg = reply.leg
        num_from_store = sum(count.num_tokens for count in leg.from_store)
        assert leg.num_tokens_computed + leg.num_tokens_local + num_from_store == len(prompt)
        num_lost = sum(count.num_blocks for count in leg.recomputed)
        assert num_lost * BLOCK_SIZE <= leg.num_tokens_computed
        return reply

    async def restart_store(self, node: Node) -> None:
        """A new life of a store that was killed, which all workers come to without a back-off."""
        await node.start_store()
        for each in self.all:
            await each.forget_ways()

    async def forget(self, node: Node) -> None:
        """Push everything out of a worker's device cache; its store keeps it."""
        num_tokens = node.core.model.num_blocks * BLOCK_SIZE - 8
        num_tokens = min(num_tokens, node.core.model.context_window - 8)
        for _ in range(-(-node.core.model.num_blocks * BLOCK_SIZE // num_tokens)):
            await self.run(node, self.new_prompt(num_tokens), name="filler", wants_handle=False)

    async def release(self, handle: common_pb2.KvHandle) -> None:
        """As whoever holds a handle gives it back, to the stores that are there."""
        alive = {node.settings.listen for node in self.all if node.store is not None}
        for run in (*handle.runs, handle.tail):
            if run.store_address not in alive:
                continue
            async with rpc.channel(run.store_address) as channel:
                stub = kvstore_pb2_grpc.KvStoreStub(channel)
                request = kvstore_pb2.ReleaseRequest(lease_ids=[run.lease_id])
                await stub.Release(request, timeout=WAIT_S)

    async def check(self, *handles: common_pb2.KvHandle) -> None:
        """Nothing is held any more, anywhere, and every law holds, once these are given back."""
        for handle in handles:
            await self.release(handle)
        for node in self.all:
            await node.core.connector.settle()
            await until(lambda node=node: node.core.num_live == 0)
            assert not node.prefills.states
            status = await node.core.checked_status()
            assert status.integrity_error == ""
            assert status.num_waiting == status.num_running == status.num_holding == 0
            assert status.num_quarantined_blocks == 0
            # Blocks may be lent for a while, to measure the way to a store that was just met.
            await until(lambda node=node: node.core.thread.stats.num_referenced_blocks == 0)
        for node in self.all:
            if node.store is not None:
                await self._check_store(node)

    async def _check_store(self, node: Node) -> None:
        async def is_settled() -> bool:
            status = await node.store_status()
            assert status.integrity_error == ""
            counts = (status.num_leases, status.num_writing, status.num_quarantined)
            return not any((*counts, status.num_pinned, status.num_tails))

        await until(is_settled)


async def way(node: Node, other: Node) -> StoreWay:
    """Of `node` to the store of `other`, made and measured if need be."""
    return await node.way_to(other.name, other.settings.listen, other.store.node.incarnation)


class Reader:
    """As a decode worker of that node: verifies handles, and fetches under their lease into its own
    memory."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def __aenter__(self) -> Reader:
        self._client = await KvStoreClient.attach(
            self._node.settings.listen,
            worker_id="decode-0",
            worker_incarnation=bytes(16),
            fingerprint=self._node.core.model.fingerprint,
            memory=BlockMemory.of(np.zeros((64, self._node.block_bytes), np.uint8)),
            transport="shm",
            timeout_s=WAIT_S,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def fetch(self, message: common_pb2.KvHandle) -> int:
        """Of a handle of one store. Returns: blocks that came and verified."""
        core = self._node.core
        handle = handles.from_proto(message, core.handle_keys)
        handles.check(
            handle,
            request_id="r",
            tenant="t",
            adapter="",
            model_fingerprint=core.model.fingerprint,
            block_size=BLOCK_SIZE,
        )
        (run,) = handle.runs
        got = await self._client.get_blocks(
            run.lease_id,
            [(block, index) for index, block in enumerate(run.blocks)],
            Deadline.after(WAIT_S),
            incarnation=run.store_incarnation,
        )
        return len(run.blocks) - len(got.failed)


@contextlib.asynccontextmanager
async def nodes(
    folder: Path,
    *,
    num_nodes: int = 2,
    num_frames: int = 512,
    num_blocks: int = 64,
    chunk: int = 16,
    remote_transport: str = "grpc",
    make_model: Callable[[], GatedModel] = GatedModel,
    **limits: Any,
) -> AsyncIterator[Nodes]:
    """Start all of them; at the end stop them."""
    made = Nodes(GatedModel(), [])
    workers = contextlib.AsyncExitStack()
    async with contextlib.AsyncExitStack() as stack:
        for index in range(num_nodes):
            store_exit = contextlib.AsyncExitStack()
            settings = KvStoreSettings(
                node_id=f"store-{index}",
                slab_dir=str(folder),
                capacity_bytes=num_frames * FRAME_BYTES,
                stop_timeout_s=0.0,
            )
            store = await store_exit.enter_async_context(store_process.running(settings))
            settings = dataclasses.replace(settings, listen=store.address)
            model = make_model()
            engine: LLMEngine = fake_engine(num_blocks=num_blocks, chunk=chunk, model=model)
            own = {"worker_id": f"prefill-{index}", "remote_transport": remote_transport}
            own |= {"handle_keys_file": keys_in(folder), "limits": patient(**limits)}
            worker = await workers.enter_async_context(
                started("prefill", engine, store.address, **own)
            )
            channel = await stack.enter_async_context(rpc.channel(worker.address))
            stub = prefill_pb2_grpc.PrefillStub(channel)
            made.all.append(
                Node(settings.node_id, settings, store, store_exit, worker, stub, model)
            )
        try:
            yield made
        finally:
            for node in made.all:
                node.model.release()
            await workers.aclose()
            for node in made.all:
                await node.store_exit.aclose()
