"""A router, a store, a prefill worker, decode workers that guess, and their draft workers, in one
process on real gRPC and a real Redis: for what clients get of guesses."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.grammar.config import GrammarLimits
from engine.grammar.service import GrammarService
from engine.grammar.vocabulary import GrammarTokenizer
from engine.models.interface import LoadedModel
from engine.speculation.config import SpeculationConfig
from kvstore import invariants, store_process
from kvstore.config import KvStoreSettings
from process import rpc
from process.background_tasks import end_tasks
from process.deadline import Deadline
from process.rpc import PLAIN
from process.rpc_errors import BatonError
from protos import common_pb2, decode_pb2_grpc, inference_pb2, inference_pb2_grpc, prefill_pb2_grpc
from services.decode.role import DecodeRole
from services.draft.config import DraftLimits, DraftSettings
from services.draft.server import serving_drafts
from services.router.app import Router, load_model
from services.router.config import RouterSettings, RouterTimes
from services.worker import main
from services.worker.config import WorkerLimits
from services.worker.draft_channel import DraftPeers
from tests.harness.compile_process import SharedProcess
from tests.harness.guessing_models import VOCAB, Maker
from tests.harness.prefill_decode_pair import LEASE_TTL_S, Sample, keys_in, started
from tests.harness.redis_server import RedisServer
from tests.harness.waiting import until
from tests.harness.workloads import WINDOW, maybe_ahead

WAIT_S = 60.0
"""No wait of a test may take longer; far above what any should take."""
NUM_DRAFT_WORKERS = 2


@dataclass
class Site:
    """What clusters come and go on: Redis, a store and a router of one model."""

    maker: Maker
    redis_url: str
    router: Router
    stub: Any
    store: Any
    key_file: str
    process: SharedProcess
    num_clusters: int = 0

    def make_grammars(self) -> GrammarService:
        folder = self.maker.folder

        def load() -> GrammarTokenizer:
            return GrammarTokenizer.load(folder, VOCAB)

        return GrammarService(load, GrammarLimits(), process=self.process)

    def reference(self, model: LoadedModel | None = None) -> LLMEngine:
        """An engine with room for everything, that guesses nothing."""
        config = self.maker.config(num_blocks=200, max_num_tokens_per_step=64, max_num_running=8)
        engine = self.engine(config, model or self.maker.model("reference"))
        for one in self.maker.adapters:
            name, _, folder = one.partition("=")
            engine.load_adapter(name, Path(folder))
        return engine

    def engine(self, config: EngineConfig, model: LoadedModel, **parts: Any) -> LLMEngine:
        return LLMEngine(config, model, make_grammars=self.make_grammars, **parts)

    async def knows(self, worker_ids: set[str]) -> None:
        """Until these workers, and no others, are those of the router."""

        async def are_known() -> bool:
            snapshot = await self.router._registry.poll()
            return {worker.worker_id for worker in snapshot.workers} == worker_ids

        await until(are_known, WAIT_S)

    async def check(self) -> None:
        """Nothing is held for anybody in the router and in the store."""

        def is_idle() -> bool:
            try:
                self.router.check_integrity(is_idle=True)
            except BatonError:
                return False
            status = self.store.node.store
            if status is not None:
                invariants.check(status)
            return status is None or (len(status.leases) == 0 and status.num_pinned() == 0)

        await until(is_idle, WAIT_S)


@contextlib.asynccontextmanager
async def site(
    maker: Maker, folder: Path, redis: RedisServer, handover: str
) -> AsyncIterator[Site]:
    """Start it; at the end check its laws and stop it."""
    # All share a loop and its interpreter: late is not away.
    redis_waits = "redis_timeout_s", "lookup_timeout_s"
    worker_waits = "connect_timeout_s", "reserve_answer_s", "reserve_wait_s", "failover_wait_s"
    times = dict.fromkeys((*redis_waits, *worker_waits, "finish_wait_s"), WAIT_S)
    settings = RouterSettings(
        model=str(maker.folder),
        redis_url=redis.url,
        handover=handover,  # type: ignore[arg-type]
        times=RouterTimes(drain_s=0.2, **times),
    )
    async with contextlib.AsyncExitStack() as stack:
        process = SharedProcess(maker.folder, VOCAB)
        stack.callback(process.end)
        store = await stack.enter_async_context(
            store_process.running(
                KvStoreSettings(
                    slab_dir=str(folder), capacity_bytes=4 * 1024 * 1024, stop_timeout_s=0.0
                )
            )
        )
        model = await asyncio.to_thread(load_model, str(maker.folder))
        router = Router(settings, model)
        await router.start()
        stack.push_async_callback(router.stop)
        channel = await stack.enter_async_context(rpc.channel(router.address))
        stub = inference_pb2_grpc.InferenceStub(channel)
        made = Site(maker, redis.url, router, stub, store, keys_in(folder), process)
        yield made
        await made.check()


@dataclass
class Answers:
    """What a client was told of one request: by sample."""

    samples: dict[int, Sample] = field(default_factory=dict)
    legs: list[Any] = field(default_factory=list)


@dataclass
class Cluster:
    """The workers of some workloads."""

    site: Site
    prefill: main.Worker
    decodes: list[main.Worker]
    on_tokens: Callable[[], None] = lambda: None

    async def ask(self, request: inference_pb2.GenerateRequest) -> Answers:
        """One request to its end."""
        answers = Answers()
        async for message in self.site.stub.Generate(request, timeout=2 * WAIT_S):
            answers.samples.setdefault(message.sample_index, Sample()).add(message)
            if message.HasField("provenance"):
                answers.legs += message.provenance.legs
            self.on_tokens()
        return answers

    def leave(self, index: int) -> None:
        """A decode worker sends its requests elsewhere, for good."""
        worker = self.decodes[index]
        assert isinstance(worker.role, DecodeRole) and worker.heartbeat is not None
        worker.core.draining = True
        worker.heartbeat.beat_now()
        worker.role.leave(Deadline.after(WAIT_S))

    def engine(self, index: int) -> LLMEngine:
        """Of a decode worker."""
        return self.decodes[index].core.thread._engine  # type: ignore[return-value]

    async def check(self) -> None:
        """Nothing is held any more, every law holds, and no proposer has failed."""
        for worker in (self.prefill, *self.decodes):
            await worker.core.connector.settle()
            await until(lambda worker=worker: worker.core.num_live == 0, WAIT_S)
            async with rpc.channel(worker.address) as channel:
                is_prefill = worker is self.prefill
                stubs = prefill_pb2_grpc.PrefillStub, decode_pb2_grpc.DecodeStub
                stub = stubs[0](channel) if is_prefill else stubs[1](channel)

                async def is_idle(stub: Any = stub) -> bool:
                    status = await stub.GetWorkerStatus(
                        common_pb2.GetWorkerStatusRequest(), timeout=WAIT_S
                    )
                    assert status.integrity_error == ""
                    num_held = status.num_blocks - status.num_free_blocks
                    return num_held - status.num_cached_blocks == 0

                await until(is_idle, WAIT_S)
        for index in range(len(self.decodes)):
            speculation = self.engine(index)._speculation
            assert speculation is not None and not speculation.failed_proposers


@contextlib.asynccontextmanager
async def cluster(
    site: Site, speculation: SpeculationConfig, rng: random.Random, *, with_draft_workers: bool
) -> AsyncIterator[Cluster]:
    """One prefill worker and two decode workers, small ones with any settings; at the end their
    laws are checked."""
    maker = site.maker
    site.num_clusters += 1
    names = [f"{role}-{site.num_clusters}" for role in ("p", "d", "e")]
    async with contextlib.AsyncExitStack() as stack:
        drafts = DraftPeers([], PLAIN)
        if with_draft_workers:
            drafts = await _draft_workers(maker, speculation, stack)
            addresses = tuple(peer.channel.address for peer in drafts.peers)
            speculation = replace(speculation, draft_workers=addresses)
        chunk = rng.randint(4, 20)
        prefill = await _start(
            site,
            names[0],
            site.engine(
                maker.config(
                    num_blocks=256, max_num_tokens_per_step=chunk, max_num_running=min(8, chunk)
                ),
                maker.model("reference"),
            ),
            stack,
        )
        decodes = []
        for name in names[1:]:
            config = _decode_config(maker, speculation, rng)
            seed = rng.random()
            engine = await asyncio.to_thread(
                _guessing_engine, site, config, name[0], seed, drafts.peers
            )
            decodes.append(await _start(site, name, engine, stack))
        made = Cluster(site, prefill, decodes)
        await site.knows(set(names))
        yield made
        await made.check()
    await site.knows(set())


def _decode_config(
    maker: Maker, speculation: SpeculationConfig, rng: random.Random
) -> EngineConfig:
    """Hardly room for one request, and any setting of what may disturb."""
    running = rng.randint(3, 6)
    preemption = rng.choice(["never", "recompute", "recompute", "swap", "swap"])
    # All that three samples may need, or of one.
    layout = maker.model("reference").layout
    least = (4 if preemption == "never" else 1) * layout.num_blocks_for(WINDOW)
    return maker.config(
        num_blocks=rng.randint(least, 4 * least),
        max_num_tokens_per_step=rng.randint(running + 1, 40),
        max_num_running=running,
        max_num_tokens_per_request_step=rng.choice([0, 0, 1, 5]),
        policy=rng.choice(["fcfs", "priority", "cache_aware"]),
        max_passes=rng.choice([0, 1, 5]),
        preemption=preemption,
        park_bytes=rng.choice([0, 3 * layout.block_bytes]),
        speculation=speculation,
    )


def _guessing_engine(
    site: Site, config: EngineConfig, place: str, seed: float, peers: Sequence[Any]
) -> LLMEngine:
    """Not on the loop: draft workers are met."""
    rng = random.Random(seed)
    model = site.maker.model(place)
    proposers = site.maker.proposers(config, model, peers)
    engine = site.engine(config, maybe_ahead(model, rng), proposers=proposers)
    speculation = engine._speculation
    assert speculation is not None
    # Launches begin and end anywhere among guesses, for longer or shorter.
    share = rng.choice([0.0, 0.0, 0.1, 0.6])
    speculation._controller.is_idle = (  # type: ignore[method-assign]
        lambda num_sequences: rng.random() < share
    )
    return engine


async def _start(
    site: Site, name: str, engine: LLMEngine, stack: contextlib.AsyncExitStack
) -> main.Worker:
    limits = WorkerLimits(
        store_wait_s=WAIT_S,
        lease_ttl_s=LEASE_TTL_S,
        attach_budget_s=WAIT_S,
        ping_budget_s=WAIT_S,  # they share a loop and its interpreter: late is not away
        drain_s=0.2,
        stop_grace_s=0.05,
    )
    worker = started(
        "prefill" if name.startswith("p") else "decode",
        engine,
        site.store.address,
        worker_id=name,
        redis_url=site.redis_url,
        handle_keys_file=site.key_file,
        adapters=site.maker.adapters,
        limits=limits,
    )
    return await stack.enter_async_context(worker)


async def _draft_workers(
    maker: Maker, speculation: SpeculationConfig, stack: contextlib.AsyncExitStack
) -> DraftPeers:
    own = SpeculationConfig(
        expansion=speculation.expansion, max_num_nodes=speculation.max_num_nodes
    )
    config = maker.config(speculation=own)
    settings = DraftSettings(
        engine=config, limits=DraftLimits(catch_up_tokens=8, max_call_s=WAIT_S, drain_s=0.0)
    )
    addresses = []
    for index in range(NUM_DRAFT_WORKERS):
        name = maker.draft_names[index % len(maker.draft_names)]
        proposer, about = await asyncio.to_thread(maker.served, name, config)
        worker = await stack.enter_async_context(serving_drafts(proposer, about, settings))
        addresses.append(worker.address)
    drafts = DraftPeers(addresses, PLAIN)
    stack.push_async_callback(drafts.close)
    return drafts


@contextlib.asynccontextmanager
async def leaving_at_times(cluster: Cluster, rng: random.Random) -> AsyncIterator[None]:
    """In most clusters one of the decode workers leaves, after some messages."""
    news = asyncio.Event()
    cluster.on_tokens = news.set
    index, num_messages = rng.randrange(len(cluster.decodes)), rng.randint(1, 20)

    async def leave_later() -> None:
        for _ in range(num_messages):
            news.clear()
            await news.wait()
        cluster.leave(index)

    leaving = asyncio.create_task(leave_later()) if rng.random() < 0.7 else None
    try:
        yield
        if leaving is not None and leaving.done():
            leaving.result()  # its error
    finally:
        await end_tasks([leaving])
