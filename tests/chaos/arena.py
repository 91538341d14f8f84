"""A real cluster under attack: its processes, the proxies on its control links, its slab's file,
and the streams whose tokens must be exact all the same.

An `Arena` lives as long as its cluster; a `Round` is some streams, what disturbed them, and what
came of them. Everything random is drawn from the seed before anything starts, so that
`BATON_TEST_SEED` replays the same prompts, actions and pauses; how they meet is the machine's
affair.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from baton import errors
from baton.answers import Completion, KvLeg
from baton.client import Client, SyncClient
from baton.cluster.local_cluster import ClusterConfig, ClusterEvent, LocalCluster
from engine.request import Sampling
from kvstore.page_file import SUFFIX as PAGES_SUFFIX
from kvstore.slab import SUFFIX, Slab
from process import rpc
from protos import inference_pb2, kvstore_pb2, kvstore_pb2_grpc
from tests.harness.cluster import (
    STORE_SIZE,
    assert_idle,
    oracle,
    prompts,
    run_engine,
    single_engine,
    streamed,
)
from tests.harness.control_proxy import ControlProxy

logger = logging.getLogger(__name__)

MODEL = ClusterConfig().model
BUDGET_S = 30.0
"""Of each stream."""
OVERRUN_S = 5.0
MAX_TOKENS = 32
OPTIONS: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "timeout_s": BUDGET_S}
READY_S = 60.0
IDLE_S = 90.0
"""Until nothing is held for anybody. What a lost message left behind ends with an attachment that
nobody hears of, and the transfers of its life."""

TIMING = frozenset(
    {
        "store_unavailable",
        "missing",
        "lease_lapsed",
        "generation",
        "incarnation",
        "deadline",
        "transport",
        "no_room",
        "moved",
        "worker_lost",
    }
)
"""Reasons that any disturbance may bring about. All others say that bytes or messages were wrong:
only who spoils those may cause them."""


@dataclass(frozen=True)
class Shape:
    """What a cluster under attack consists of."""

    name: str
    transport: str = "shm"
    num_prefill: int = 2
    num_decode: int = 2
    num_stores: int = 1
    """2: prefill and decode workers have one each, so that every handover crosses nodes."""
    handover: str = "auto"
    """As in ClusterConfig."""
    file_tier_bytes: int = 0
    """Of a file tier under each store; 0: none."""
    overrides: tuple[str, ...] = ()
    is_roomy: bool = True
    """False: its store is smaller than what the streams of a round store."""


@dataclass(frozen=True)
class Ask:
    """One stream of a round."""

    prompt: tuple[int, ...]
    sampling: Mapping[str, float | int]


@dataclass
class Round:
    """What a round asked, and what came of it."""

    name: str
    asks: Sequence[Ask]
    answers: list[Completion | BaseException] = field(default_factory=list)
    before: inference_pb2.GetClusterStatusReply | None = None
    after: inference_pb2.GetClusterStatusReply | None = None
    began: list[asyncio.Event] = field(default_factory=list)

    @property
    def completed(self) -> list[Completion]:
        return [answer for answer in self.answers if isinstance(answer, Completion)]

    @property
    def failed(self) -> list[BaseException]:
        return [answer for answer in self.answers if isinstance(answer, BaseException)]

    @property
    def reasons(self) -> Counter[str]:
        """Blocks by the reason for which they were computed again or not stored."""
        counted: Counter[str] = Counter()
        for answer in self.completed:
            for leg in answer.provenance.legs:
                counted.update(leg.recomputed)
                counted.update(leg.not_stored)
        return counted

    async def first_token(self) -> None:
        """Until one of the streams has begun."""
        waits = [asyncio.create_task(event.wait()) for event in self.began]
        try:
            async with asyncio.timeout(BUDGET_S):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


Disturb = Callable[[Round], Coroutine[Any, Any, None]]


class Arena:
    """See the module."""

    def __init__(self, shape: Shape, seed: str) -> None:
        self.shape = shape
        self.seed = seed
        self.rng = random.Random(seed)
        self.cluster: LocalCluster
        self.links: dict[str, ControlProxy] = {}
        """By who speaks over it: prefill, decode (to their store), redis (the router's)."""
        self.pages_dir: Path | None = None
        """Where the file tiers lie, if there are any."""
        self.tolerated: set[str] = set(TIMING)
        """Reasons that an earlier round has brought into the store for good."""
        self.past: list[tuple[int, ...]] = []
        """Prompts of earlier rounds: the prefixes that may be hit."""
        self.counted: Counter[str] = Counter()
        self.num_tokens_direct = 0
        """Read out of prefill workers' own caches."""
        self._slabs: dict[Path, Slab] = {}
        self._num_asked = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[Arena]:
        """From the start of the cluster to its end."""
        with contextlib.ExitStack() as stack:
            for name in ("prefill", "decode", "redis"):
                proxy = ControlProxy(f"{self.seed}-{name}")
                self.links[name] = stack.enter_context(proxy)
            files: tuple[str, ...] = ()
            if self.shape.file_tier_bytes:
                self.pages_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                files = (
                    f'store.file_tier_dir="{self.pages_dir}"',
                    f"store.file_tier_bytes={self.shape.file_tier_bytes}",
                )
            config = ClusterConfig(
                model=MODEL,
                port=0,
                transport=self.shape.transport,
                num_prefill=self.shape.num_prefill,
                num_decode=self.shape.num_decode,
                num_stores=self.shape.num_stores,
                handover=self.shape.handover,
                overrides=(
                    STORE_SIZE,
                    f'prefill.store_address="{self.links["prefill"].address}"',
                    f'decode.store_address="{self.links["decode"].address}"',
                    f'router.redis_url="redis://{self.links["redis"].address}/0"',
                    # Handles that nobody comes for are soon forgotten.
                    "worker.limits.lease_ttl_s=3.0",
                    # A worker that met its store again leaves its former attachment behind, and
                    # what that may still write into: gone before a round's leaks are counted.
                    "store.attachment_ttl_s=12.0",
                    "store.quarantine_grace_s=6.0",
                    *files,
                    *self.shape.overrides,
                ),
            )
            self.cluster = LocalCluster(config, self._on_event)
            stack.enter_context(self.cluster)
            yield self

    def _on_event(self, event: ClusterEvent) -> None:
        if event.what != "ready":
            return
        if event.name == "redis":
            self.links["redis"].upstream = self.cluster.redis_url.removeprefix("unix://")
        elif event.name.startswith("store"):
            for role in ("prefill", "decode"):
                if not self.links[role].upstream or event.name == _home_of(role):
                    self.links[role].upstream = event.detail.removeprefix("unix:")

    # -- what actions act on

    @property
    def stores(self) -> list[str]:
        return [name for name, info in self.cluster.processes.items() if info.kind == "store"]

    def workers(self, role: str) -> list[str]:
        return [name for name, info in self.cluster.processes.items() if info.kind == role]

    def send(self, name: str, number: signal.Signals) -> None:
        """A signal to one part, if it lives."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.cluster.processes[name].pid, number)

    def slabs(self) -> list[Slab]:
        """The stores' memory as it is mapped now, behind their back."""
        assert self.cluster._folder is not None
        paths = sorted(Path(self.cluster._folder.memory).rglob(f"*{SUFFIX}"))
        for path in paths:
            incarnation = bytes.fromhex(path.name.removesuffix(SUFFIX).rpartition("-")[2])
            with contextlib.suppress(errors.BatonError):  # gone this moment
                if path not in self._slabs:
                    self._slabs[path] = Slab.open(path, incarnation)
        return [slab for path, slab in self._slabs.items() if path in paths]

    def page_files(self) -> list[Path]:
        """Of the file tiers, as they lie on disk now."""
        assert self.pages_dir is not None
        return sorted(self.pages_dir.rglob(f"*{PAGES_SUFFIX}"))

    # -- rounds

    def right(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What one engine alone draws, greedily."""
        sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
        self._num_asked += 1
        cache = f"{self.seed}-right-{self._num_asked}"
        (tokens,) = run_engine(single_engine(MODEL), [(prompt, sampling)], prefix_cache=cache)
        return tokens

    def plan(self, num_streams: int) -> list[Ask]:
        """Prompts of a round: new ones, and turns that go on from earlier rounds' prompts. Some are
        greedy, some sampled with a seed."""
        fresh = prompts(oracle(MODEL), self.rng, num_streams)
        asks = []
        for prompt in fresh:
            if self.past and self.rng.random() < 0.5:
                start = self.rng.choice(self.past)
                prompt = [*start, *prompt[:40]][:900]
            asks.append(Ask(tuple(prompt), self._sampling()))
        self.past = [*self.past, *(ask.prompt for ask in asks)][-24:]
        return asks

    def _sampling(self) -> dict[str, float | int]:
        if self.rng.random() < 0.5:
            return {"temperature": 0.0}
        return {
            "temperature": self.rng.choice([0.5, 1.0]),
            "top_p": self.rng.choice([0.9, 1.0]),
            "seed": self.rng.randrange(2**63),
        }

    async def run(self, made: Round, disturb: Disturb) -> None:
        """All streams at once, and `disturb(made)` beside them; ends when all of them have."""
        made.before = await asyncio.to_thread(self.status)
        made.began = [asyncio.Event() for _ in made.asks]
        started_s = time.monotonic()
        async with Client(self.cluster.address) as client:
            streams = [
                asyncio.create_task(streamed(client, ask.prompt, event, **OPTIONS, **ask.sampling))
                for ask, event in zip(made.asks, made.began, strict=True)
            ]
            try:
                await disturb(made)
                made.answers = list(await asyncio.gather(*streams, return_exceptions=True))
            finally:
                for stream in streams:
                    stream.cancel()
        assert time.monotonic() - started_s < BUDGET_S + OVERRUN_S, "a stream outlived its deadline"

    def status(self) -> inference_pb2.GetClusterStatusReply:
        with SyncClient(self.cluster.address) as client:
            return client.status()

    async def own_status(self, store: str) -> kvstore_pb2.GetStatusReply:
        """What a store says of itself, asked directly."""
        async with rpc.channel(self.cluster.processes[store].address) as channel:
            reply: kvstore_pb2.GetStatusReply = await kvstore_pb2_grpc.KvStoreStub(
                channel
            ).GetStatus(kvstore_pb2.GetStatusRequest(check_integrity=True), timeout=READY_S)
        assert reply.integrity_error == ""
        return reply

    async def settle(self, made: Round) -> None:
        """Everything is ready again, every worker has its store, nothing is held for anybody."""
        await asyncio.to_thread(self.cluster.wait_ready, READY_S)
        async with asyncio.timeout(READY_S):
            while lost := self._without_store(await asyncio.to_thread(self.status)):
                await asyncio.sleep(0.1)
                logger.debug("without a store: %s", lost)
        made.after = await asyncio.to_thread(assert_idle, self.cluster, IDLE_S)

    @staticmethod
    def _without_store(status: inference_pb2.GetClusterStatusReply) -> list[str]:
        return [worker.worker_id for worker in status.workers if not worker.store_node_id]

    def check(self, made: Round, *, may_cause: frozenset[str]) -> None:
        """No stream failed, tokens are exact, accounts sum up, reasons possible."""
        assert not made.failed, made.failed
        engine = single_engine(MODEL)
        wanted = [(ask.prompt, _engine_sampling(ask)) for ask in made.asks]
        right = run_engine(engine, wanted, prefix_cache=f"{self.seed}-{made.name}")
        for ask, answer, tokens in zip(made.asks, made.completed, right, strict=True):
            assert list(answer.token_ids) == tokens, (len(ask.prompt), ask.sampling)
            check_account(answer.provenance.legs, len(ask.prompt))
        self.counted.update(made.reasons)
        legs = [leg for answer in made.completed for leg in answer.provenance.legs]
        self.num_tokens_direct += sum(leg.num_tokens_direct for leg in legs)
        strange = made.reasons.keys() - self.tolerated - may_cause
        assert not strange, f"{strange} cannot come of what was done"


def _engine_sampling(ask: Ask) -> Sampling:
    return Sampling(max_tokens=MAX_TOKENS, ignore_eos=True, **ask.sampling)  # type: ignore[arg-type]


def check_account(legs: Sequence[KvLeg], num_prompt_tokens: int) -> None:
    """Each leg's tokens by source sum up to the prompt; of one whose worker left before it had all
    of the prompt, to what it reached."""
    for leg in legs:
        if leg.ended_by and not leg.transport:
            continue  # its worker went without an account
        total = leg.num_tokens_computed + leg.num_tokens_local + leg.num_tokens_from_store
        if _had_all(leg):
            assert total == num_prompt_tokens, leg
        else:
            assert total <= num_prompt_tokens, leg


def _had_all(leg: KvLeg) -> bool:
    """Whether it certainly had the whole prompt: nobody took it away, or it filled blocks of the
    answer. A leg does not say how much it drew; where a test sees that, `test_drain_exact` holds
    every leg that drew to the same law."""
    return not leg.ended_by or leg.num_blocks_written_back > 0


def _home_of(role: str) -> str:
    """With two stores each role has one of its own, so that every handover goes from one to the
    other."""
    return {"prefill": "store-0", "decode": "store-1"}[role]


def committed_frames(slab: Slab) -> np.ndarray:
    """Frames that are complete now: their generation is even and not that of one never used."""
    generations = np.array(slab.generations)
    return np.flatnonzero((generations % 2 == 0) & (generations > 0))
