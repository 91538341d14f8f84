"""A store and two decode workers in one process, and requests that go from one to the other when a
worker is told to drain: what a router does, in small. Workers compute prompts themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from engine.engine import LLMEngine
from engine.testing.ahead_model import AheadModel
from kvstore import invariants, store_process
from kvstore.config import KvStoreSettings
from process import rpc
from process.deadline import Deadline
from protos import common_pb2, decode_pb2, decode_pb2_grpc
from services.decode.role import DecodeRole
from services.worker import main
from services.worker.config import WorkerLimits
from tests.harness.bundled_pair import alone as alone_engine
from tests.harness.gated_engine import SALT, GatedModel, Prompts, fake_engine
from tests.harness.prefill_decode_pair import (
    WAIT_S,
    RouterStream,
    Sample,
    keys_in,
    sampling_params,
    started,
)
from tests.harness.waiting import until
from tests.harness.worker_probe import WorkerProbe

LEAVE_S = 30.0
NEXT_S = 45.0
"""For the first grammar: the process that compiles it must start."""
_names = itertools.count(1)


@dataclass
class Told:
    """What came of one request, over all of its legs."""

    sample: Sample = field(default_factory=Sample)
    legs: list[common_pb2.KvLeg] = field(default_factory=list)
    moved: list[decode_pb2.DecodeMoved] = field(default_factory=list)
    num_refused: int = 0
    had_handle: list[bool] = field(default_factory=list)
    """Of each leg. A handle that crosses a refusal is spent."""


@dataclass
class Movers:
    """Everything of one test."""

    store: Any
    workers: list[main.Worker]
    stubs: list[Any]
    streams: list[RouterStream]

    _prompts: Prompts = field(default_factory=Prompts)

    def new_prompt(self, num_tokens: int) -> tuple[int, ...]:
        """One that shares no block with another one."""
        return self._prompts.new(num_tokens)

    def engine(self, index: int) -> Any:
        return self.workers[index].core.thread._engine

    def at(self, index: int) -> WorkerProbe:
        return WorkerProbe(self.workers[index], self.engine(index)._model)

    def states(self, index: int) -> list[str]:
        return self.at(index).states()

    def leave(self, index: int, by_s: float = LEAVE_S) -> None:
        """As a worker begins to drain."""
        self.workers[index].core.draining = True
        self.workers[index].role.leave(Deadline.after(by_s))

    def shorten(self, index: int, by_s: float) -> None:
        """The time in which its only request, which moves, must be gone."""
        (request,) = self.workers[index].role.worker._requests.values()
        request._departure._set_alarm(Deadline.after(by_s))

    def stay(self, index: int) -> None:
        """It drained enough."""
        self.workers[index].core.draining = False

    def reserve(
        self, prompt: Sequence[int], name: str, *, budget_ms: int = 60_000, **sampling: Any
    ) -> decode_pb2.ReserveDecode:
        return decode_pb2.ReserveDecode(
            request_id=name,
            tenant="t",
            tenant_salt=SALT,
            prompt_token_ids=prompt,
            sampling=sampling_params(**sampling),
            model_fingerprint=self.workers[0].core.model.fingerprint,
            budget_ms=budget_ms,
        )

    async def begin(
        self, index: int, prompt: Sequence[int], name: str = "r", **options: Any
    ) -> int:
        """A request that computes its own prompt. Returns: its key on that worker's stream."""
        stream = self.streams[index]
        key = await stream.begin(self.reserve(prompt, name, **options))
        await stream.generate_from(key, alone(options.get("n", 1)))
        return key

    async def begin_held(self, num_forwards: int, prompt: Sequence[int], **options: Any) -> int:
        """`begin` at worker 0, which stands in that forward pass of it."""
        self.at(0).model.hold_at(num_forwards)
        key = await self.begin(0, prompt, **options)
        await until(self.at(0).model.is_held.is_set)
        return key

    async def reopen(self, index: int) -> None:
        """A new stream to that worker."""
        await self.streams[index].close()
        self.streams[index] = RouterStream(self.stubs[index].Stream())

    async def last_word(self, index: int, key: int, sample: Sample) -> decode_pb2.DecodeEvent:
        """The event that ends the leg; tokens before it go to the sample."""
        while True:
            event = await self.streams[index].next(key)
            if not event.HasField("tokens") and not event.HasField("reserved"):
                return event
            if event.HasField("tokens"):
                sample.add(event.tokens)

    async def moved(
        self, prompt: Sequence[int], *, num_steps: int = 4, **sampling: Any
    ) -> tuple[decode_pb2.DecodeMoved, Sample]:
        """A request that worker 0 had to leave in the middle of its answer, and what it told."""
        sample = Sample()
        key = await self.begin_held(num_steps + 1, prompt, **sampling)
        release_when_taken_out(self, 0)
        self.leave(0)
        moved = (await self.last_word(0, key, sample)).moved
        self.stay(0)
        assert moved.HasField("handle")
        return moved, sample

    async def hand_over(
        self, index: int, key: int, moved: decode_pb2.DecodeMoved, samples: Sequence[Sample]
    ) -> None:
        """What came so far, and the handle, to a request that has its room there."""
        await self.streams[index].generate_from(key, going_on(moved, samples))

    def alone(self, prompt: Sequence[int], **sampling: Any) -> list[list[int]]:
        """The tokens of each sample of one engine that serves the whole request."""
        return [sample.token_ids for sample in alone_engine(fake_engine(), prompt, **sampling)]

    # ---- the store

    @property
    def node_id(self) -> str:
        return str(self.store.node.node_id)

    @property
    def is_store_draining(self) -> bool:
        return bool(self.store.node.is_draining)

    async def drain_store(self, by_s: float) -> bool:
        """As its signal begins it. Returns: whether all leases were given back by then."""
        return bool(await self.store.node.drain(Deadline.after(by_s)))

    async def pin_one(self, ttl_s: float) -> None:
        """A lease on one of its blocks that nothing gives back."""
        client = self.workers[0].core.connector.client
        assert client is not None
        hashes = next(self.store.node.present(1), [])
        assert hashes
        await client.match(hashes, pin=True, ttl_s=ttl_s, deadline=Deadline.after(WAIT_S))

    async def go_on(
        self,
        index: int,
        moved: decode_pb2.DecodeMoved,
        samples: Sequence[Sample],
        prompt: Sequence[int],
        **sampling: Any,
    ) -> decode_pb2.DecodeFinished:
        """There, to the end; what comes goes to the samples. Returns: the last word."""
        stream = self.streams[index]
        key = await stream.begin(self.reserve(prompt, "r", **sampling))
        await stream.generate_from(key, going_on(moved, samples))
        return await stream.finish(key, samples)

    async def follow(
        self, prompt: Sequence[int], on_tokens: Callable[[], None] = lambda: None, **sampling: Any
    ) -> Told:
        """One request of one sample to its end, wherever it goes."""
        told, name = Told(), f"r{next(_names)}"
        command = alone()
        while True:
            index = next(i for i, one in enumerate(self.workers) if not one.core.draining)
            stream = self.streams[index]
            key = await stream.reserve(self.reserve(prompt, name, **sampling))
            event = await stream.next(key, NEXT_S)
            has_handle = command.HasField("handle")
            if event.HasField("reserved"):
                await stream.generate_from(key, command)
                event = await stream.next(key, NEXT_S)
                if event.HasField("failed"):
                    command.ClearField("handle")
            while event.HasField("tokens"):
                told.sample.add(event.tokens)
                on_tokens()
                event = await stream.next(key, NEXT_S)
            if event.HasField("failed"):
                assert event.failed.code == grpc.StatusCode.UNAVAILABLE.value[0], event
                assert event.failed.retry_after_s == 0 and event.failed.HasField("retry_after_s")
                told.num_refused += 1
                await asyncio.sleep(0)
            elif event.HasField("moved"):
                assert list(event.moved.num_output_tokens) == [len(told.sample.token_ids)]
                told.moved.append(event.moved)
                told.legs.append(event.moved.leg)
                told.had_handle.append(has_handle)
                command = going_on(event.moved, [told.sample])
            else:
                told.sample.add(event.finished)
                told.legs.append(event.finished.leg)
                told.had_handle.append(has_handle)
                return told

    async def check(self) -> None:
        """Nothing is held any more, anywhere, and every law holds."""
        for worker, stub in zip(self.workers, self.stubs, strict=True):
            await worker.core.connector.settle()
            await until(lambda worker=worker: worker.core.num_live == 0)

            async def is_idle(stub: Any = stub) -> bool:
                status = await stub.GetWorkerStatus(
                    common_pb2.GetWorkerStatusRequest(), timeout=WAIT_S
                )
                assert status.integrity_error == ""
                num_held = status.num_blocks - status.num_free_blocks - status.num_cached_blocks
                return num_held == 0

            await until(is_idle)
        await until(self._is_store_idle)

    def _is_store_idle(self) -> bool:
        status = self.store.node.store
        if status is not None:
            invariants.check(status)
        return status is None or (len(status.leases) == 0 and status.num_pinned() == 0)


def release_when_taken_out(m: Movers, index: int) -> None:
    """The step in which the model is held there ends when the engine has been asked for all that
    run and leave, and not before: they might go on to their last tokens meanwhile."""
    role, model = m.workers[index].role, m.engine(index)._model
    assert isinstance(role, DecodeRole)
    requests = list(role.worker._requests.values())
    num_left = len(requests)

    async def release_behind(take_out: Callable[[], Awaitable[Any]]) -> Any:
        nonlocal num_left
        taking = asyncio.ensure_future(take_out())
        await asyncio.sleep(0)  # the engine is told, and comes to it after this step
        num_left -= 1
        if not num_left:
            model.release()
        return await taking

    for request in requests:
        request._take_out = partial(release_behind, request._take_out)  # type: ignore[method-assign]


def alone(num_samples: int = 1) -> decode_pb2.GenerateFromHandle:
    """Nobody has computed the prompt."""
    command = decode_pb2.GenerateFromHandle(computes_prompt=True)
    for _ in range(num_samples if num_samples > 1 else 0):
        command.outputs.add()
    return command


def going_on(
    moved: decode_pb2.DecodeMoved, samples: Sequence[Sample]
) -> decode_pb2.GenerateFromHandle:
    """As the router makes it of what came so far."""
    command = decode_pb2.GenerateFromHandle(
        handle=moved.handle if moved.HasField("handle") else None
    )
    if len(samples) == 1:
        command.output_token_ids.extend(samples[0].token_ids)
        return command
    for sample in samples:
        command.outputs.add(token_ids=sample.token_ids, is_over=bool(sample.finish_reason))
    return command


def fake_engines(*, preemption: str, is_ahead: bool) -> Callable[[int], LLMEngine]:
    """Small ones, for `movers`. is_ahead: they launch ahead, and compute as late as may be."""

    def make(index: int) -> LLMEngine:
        model: Any = GatedModel()
        if is_ahead:
            model = AheadModel(model, is_late=True)
        return fake_engine(model=model, preemption=preemption, num_blocks=120)

    return make


@contextlib.asynccontextmanager
async def movers(
    slab_dir: Path,
    *,
    make_engine: Callable[[int], LLMEngine] = lambda index: fake_engine(),
    limits: WorkerLimits | None = None,
    store_bytes: int = 16 * 1024 * 1024,
    has_two_nodes: bool = False,
    **settings: Any,
) -> AsyncIterator[Movers]:
    """Start all; at the end stop them. With two nodes the second worker has a store of its own.

    However busy the machine is, an engine hears of all that waits between two steps: tests count
    the steps that are made.
    """
    async with contextlib.AsyncExitStack() as stack:
        store_settings = KvStoreSettings(
            slab_dir=str(slab_dir), capacity_bytes=store_bytes, stop_timeout_s=0.0
        )
        store = await stack.enter_async_context(store_process.running(store_settings))
        homes = [store, store]
        if has_two_nodes:
            other = dataclasses.replace(store_settings, node_id="other")
            homes[1] = await stack.enter_async_context(store_process.running(other))
        workers = []
        for index, home in enumerate(homes):
            engine = await asyncio.to_thread(make_engine, index)
            own = {"worker_id": f"decode-{index}", "handle_keys_file": keys_in(slab_dir)}
            own |= {"limits": limits, **settings}
            made = started("decode", engine, home.address, **own)
            worker = await stack.enter_async_context(made)
            worker.core.thread.jobs_s = WAIT_S
            workers.append(worker)
        stubs, streams = [], []
        for worker in workers:
            channel = await stack.enter_async_context(rpc.channel(worker.address))
            stubs.append(decode_pb2_grpc.DecodeStub(channel))
            streams.append(RouterStream(stubs[-1].Stream()))
            stack.push_async_callback(streams[-1].close)
        yield Movers(store, workers, stubs, streams)


@contextlib.asynccontextmanager
async def lone_decode() -> AsyncIterator[WorkerProbe]:
    """A decode worker without a store."""
    async with started("decode", fake_engine(), worker_id="w") as worker:
        yield WorkerProbe(worker)
