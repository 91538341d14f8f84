"""Several nodes in one process, each a real store and a prefill worker beside it: gRPC on port 0,
the engine over a fake model whose tokens say whether its KV is right. After each test every law is
checked at every node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.batch import Batch
from engine.loop import Engine
from kvstore import serve
from kvstore.block import Block
from kvstore.client import StoreClient
from kvstore.config import KvStoreSettings
from process import keys, serving
from process.deadline import Deadline
from protos import common_pb2, kvstore_pb2, kvstore_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from services.prefill.role import PrefillRole
from services.prefill.worker import PrefillWorker
from services.worker import main
from services.worker.config import WorkerLimits, WorkerSettings
from services.worker.core import WorkerCore
from tests.harness.gated_engine import BLOCK_SIZE, GATE_S, SALT, GatedModel, fake_engine, prompt_of
from tests.harness.prefill_decode_pair import (
    FRAME_BYTES,
    LEASE_TTL_S,
    WAIT_S,
    PrefillCall,
    sampling_params,
    whole,
)
from tests.harness.waiting import until


class SteppedModel(GatedModel):
    """A fake model that makes a step only when it is allowed one; `release` allows all."""

    def __init__(self) -> None:
        super().__init__()
        self._permits = threading.Semaphore(0)
        self._is_free = False

    def allow(self) -> None:
        """One step."""
        self._permits.release()

    def release(self) -> None:
        super().release()
        self._is_free = True
        self.allow()

    def forward(self, batch: Batch) -> torch.Tensor:
        if not self._is_free:
            assert self._permits.acquire(timeout=GATE_S), "the test never allowed this step"
        return super().forward(batch)


@dataclass
class Node:
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
        self.store = await self.store_exit.enter_async_context(serve.running(self.settings))
        await self.core.connector.wait_attached(Deadline.after(WAIT_S))

    async def store_status(self) -> kvstore_pb2.GetStatusReply:
        async with serving.channel(self.store.address) as channel:
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
        found = [self.store.node.store.catalog.find(each) is not None for each in hashes]
        num_held = found.index(False) if False in found else len(found)
        assert not any(found[num_held:]), "presence has a gap"
        return num_held

    def flip_bit(self, block: Block) -> None:
        """In a committed frame, behind everybody's back."""
        self.store.node.slab.frames[block.frame, 3] ^= 1


@dataclass
class Nodes:
    """All of one test. `model`: for what is expected; the workers have their own."""

    model: GatedModel
    all: list[Node]

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
        """One prompt, whose first token must be the right one; its account must add up."""
        call = PrefillCall(node.stub, self.request(prompt, hints, **options), timeout_s=WAIT_S)
        reply = await whole(call, partials)
        assert list(reply.token_ids) == self.model.generate(prompt, 1)
        leg = reply.leg
        num_from_store = sum(count.num_tokens for count in leg.from_store)
        assert leg.num_tokens_computed + leg.num_tokens_local + num_from_store == len(prompt)
        num_lost = sum(count.num_blocks for count in leg.recomputed)
        assert num_lost * BLOCK_SIZE <= leg.num_tokens_computed
        return reply

    def hashes(self, node: Node, prompt: Sequence[int]) -> list[bytes]:
        """Of the prompt's full blocks."""
        return node.core.chain(SALT, "").hashes(tuple(prompt))

    async def forget(self, node: Node) -> None:
        """Push everything out of a worker's device cache; its store keeps it."""
        num_tokens = node.core.model.num_blocks * BLOCK_SIZE - 8
        num_tokens = min(num_tokens, node.core.model.context_window - 8)
        for start in range(60, 62 + node.core.model.num_blocks * BLOCK_SIZE // num_tokens):
            await self.run(
                node, prompt_of(num_tokens, start=start), name=f"f{start}", wants_handle=False
            )

    async def release(self, handle: common_pb2.KvHandle) -> None:
        """As whoever holds a handle gives it back, to the stores that are there."""
        alive = {node.settings.listen for node in self.all if node.store is not None}
        for run in (*handle.runs, handle.tail):
            if run.store_address not in alive:
                continue
            async with serving.channel(run.store_address) as channel:
                stub = kvstore_pb2_grpc.KvStoreStub(channel)
                request = kvstore_pb2.ReleaseRequest(lease_ids=[run.lease_id])
                await stub.Release(request, timeout=WAIT_S)

    async def check(self) -> None:
        """Nothing is held any more, anywhere, and every law holds."""
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


async def remote_client(node: Node, other: Node) -> StoreClient:
    """The way of `node` to the store of `other`, made and measured if need be."""
    client = await node.core.remote_stores.client(
        other.name,
        other.settings.listen,
        other.store.node.incarnation,
        Deadline.after(WAIT_S),
    )
    await node.core.links.settle()
    return client


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
    key_file = folder / "handle.keys"
    keys.create(key_file)
    limits = {
        "store_wait_s": WAIT_S,
        "lease_ttl_s": LEASE_TTL_S,
        "attach_budget_s": 5.0,
        "drain_s": 0.2,
        "stop_grace_s": 0.05,
        **limits,
    }
    made = Nodes(GatedModel(), [])
    async with contextlib.AsyncExitStack() as stack:
        for index in range(num_nodes):
            store_exit = contextlib.AsyncExitStack()
            settings = KvStoreSettings(
                node_id=f"store-{index}",
                slab_dir=str(folder),
                capacity_bytes=num_frames * FRAME_BYTES,
                stop_timeout_s=0.0,
            )
            store = await store_exit.enter_async_context(serve.running(settings))
            settings = dataclasses.replace(settings, listen=store.address)
            model = make_model()
            engine: Engine = fake_engine(num_blocks=num_blocks, chunk=chunk, model=model)
            worker = await main.start(
                engine,
                WorkerSettings(
                    worker_id=f"prefill-{index}",
                    redis_url="",
                    store_address=store.address,
                    remote_transport=remote_transport,
                    handle_keys_file=str(key_file),
                    limits=WorkerLimits(**limits),
                ),
                "prefill",
                PrefillRole,
            )
            channel = await stack.enter_async_context(serving.channel(worker.address))
            stub = prefill_pb2_grpc.PrefillStub(channel)
            made.all.append(
                Node(settings.node_id, settings, store, store_exit, worker, stub, model)
            )
        try:
            yield made
        finally:
            for node in made.all:
                node.model.release()
            for node in made.all:
                await node.worker.stop()
            for node in made.all:
                await node.store_exit.aclose()
