"""A real store, a real prefill and a real decode worker in one process: gRPC on port 0, the engine
over a fake model, and a small router's worth of calls; or one prompt at a prefill
worker alone. After each test every law is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.request import Request
from engine.testing.fake_model import FakeModel
from kvstore import block_hash, store_process
from kvstore.block_refs import Block
from kvstore.config import KvStoreSettings
from process import rpc, signing_keys
from process.rpc_errors import BatonError
from process.tracing import TracingSettings
from protos import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    kvstore_pb2,
    kvstore_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from services.decode.role import DecodeRole
from services.prefill.role import PrefillRole
from services.worker import main
from services.worker.config import WorkerLimits, WorkerSettings
from services.worker.provenance import FINISH_REASONS, logprobs_to_proto, traces_to_proto
from services.worker.stream_servicer import beam_from_proto, num_samples_of, sampling_from_proto
from tests.harness.gated_engine import SALT, GatedModel, Prompts, fake_engine
from tests.harness.waiting import WAIT_S as WAIT_S
from tests.harness.waiting import until
from tests.harness.worker_probe import WorkerProbe

LEASE_TTL_S = 2 * WAIT_S
"""A lease that is lost does not lapse while `check` waits for it; nor does a request end, whose
time bounds its leases."""
FRAME_BYTES = 4096
"""A frame of the fake model's tiny blocks takes a page."""
_keys = itertools.count(1)


async def whole(
    call: Any, partials: list[common_pb2.KvHandle] | None = None
) -> prefill_pb2.PrefillReply:
    """All messages of a Prefill call as one, but its partial handles, which go to `partials`."""
    reply = prefill_pb2.PrefillReply()
    async for message in call:
        if not message.handle.is_partial:
            reply.MergeFrom(message)
        elif partials is not None:
            partials.append(message.handle)
    return reply


@dataclass
class Pair:
    """Everything of one test."""

    model: GatedModel
    """For what is expected; the workers have their own."""
    prefill_model: GatedModel
    decode_model: GatedModel
    store_settings: KvStoreSettings
    store: Any
    store_exit: contextlib.AsyncExitStack
    prefill: main.Worker
    decode: main.Worker
    prefill_stub: prefill_pb2_grpc.PrefillStub
    decode_stub: decode_pb2_grpc.DecodeStub
    decode_store: Any
    """The decode worker's home: `store`, or one of its own."""
    has_two_nodes: bool
    _prompts: Prompts = field(default_factory=Prompts)

    @property
    def at_prefill(self) -> WorkerProbe:
        return WorkerProbe(self.prefill, self.prefill_model)

    @property
    def at_decode(self) -> WorkerProbe:
        return WorkerProbe(self.decode, self.decode_model)

    @property
    def node_id(self) -> str:
        """Of the prefill worker's store."""
        return str(self.store.node.node_id)

    @property
    def prefill_role(self) -> PrefillRole:
        assert isinstance(self.prefill.role, PrefillRole)
        return self.prefill.role

    @property
    def decode_role(self) -> DecodeRole:
        assert isinstance(self.decode.role, DecodeRole)
        return self.decode.role

    # ---- the store

    async def kill_store(self) -> None:
        """As a SIGKILL looks to the workers: no answer, no goodbye."""
        await self.store_exit.aclose()
        self.store = None

    async def start_store(self) -> None:
        """A new life on the old address."""
        self.store_exit = contextlib.AsyncExitStack()
        self.store = await self.store_exit.enter_async_context(
            store_process.running(self.store_settings)
        )

    async def reattached(self) -> None:
        """Until both workers have the store again, in the life that it is in now."""
        life = self.store.node.incarnation

        def has_met(worker: main.Worker) -> bool:
            client = worker.core.connector.client
            return client is not None and client.incarnation == life

        for worker in (self.prefill, self.decode):
            await until(lambda worker=worker: has_met(worker))

    def flip_bit(self, block: Block) -> None:
        """In a committed frame, as damage does."""
        self.store.node.slab.frames[block.frame, 3] ^= 1

    def lose_chain(self, tokens: Sequence[int], store: Any) -> None:
        """That store forgets all blocks of this text."""
        found = store.node.store.tree.find(self.at_decode.hashes(tokens)[0])
        store.node.store.table.remove_subtrees([found])

    def num_stored(self, tokens: Sequence[int], store: Any = None) -> int:
        """Full blocks of this text that the store has; no gaps."""
        catalog = (store or self.store).node.store.tree
        found = [catalog.find(each) is not None for each in self.at_decode.hashes(tokens)]
        assert found == sorted(found, reverse=True), "presence has a gap"
        return sum(found)

    async def store_status(self, store: Any = None) -> kvstore_pb2.GetStatusReply:
        async with rpc.channel((store or self.store).address) as channel:
            stub = kvstore_pb2_grpc.KvStoreStub(channel)
            return await stub.GetStatus(
                kvstore_pb2.GetStatusRequest(check_integrity=True), timeout=WAIT_S
            )

    async def start_misfit(self) -> None:
        """One more worker at the store, whose blocks are of another size. Raises: BatonError."""
        engine = LLMEngine(EngineConfig(block_size=8, num_blocks=64), FakeModel(block_size=8))
        settings = WorkerSettings(
            redis_url="",
            store_address=self.store.address,
            handle_keys_file=self.prefill.core.settings.handle_keys_file,
        )
        await main.start(engine, settings, "prefill", PrefillRole)

    @contextlib.asynccontextmanager
    async def swapped(self) -> AsyncIterator[None]:
        """Each worker is called by the role that it has now, after both changed theirs."""
        self.prefill, self.decode = self.decode, self.prefill
        self.prefill_model, self.decode_model = self.decode_model, self.prefill_model
        async with (
            rpc.channel(self.prefill.address) as one,
            rpc.channel(self.decode.address) as two,
        ):
            self.prefill_stub = prefill_pb2_grpc.PrefillStub(one)
            self.decode_stub = decode_pb2_grpc.DecodeStub(two)
            yield

    @contextlib.asynccontextmanager
    async def next_prefill_life(self) -> AsyncIterator[None]:
        """A prefill worker of the same name at the same address; the first one was stopped."""
        settings = dataclasses.replace(self.prefill.core.settings, listen=self.prefill.address)
        worker = await main.start(fake_engine(), settings, "prefill", PrefillRole)
        try:
            async with rpc.channel(worker.address) as channel:
                self.prefill, self.prefill_stub = worker, prefill_pb2_grpc.PrefillStub(channel)
                yield
        finally:
            await worker.stop()

    def rotate_keys(self) -> None:
        """Of handles, as the operator does, while both workers run."""
        signing_keys.rotate(Path(self.prefill.core.settings.handle_keys_file))

    # ---- requests

    def new_prompt(self, num_tokens: int) -> tuple[int, ...]:
        """One that shares no block with another one of this pair."""
        return self._prompts.new(num_tokens)

    def prefill_request(
        self,
        prompt: Sequence[int],
        *,
        name: str = "r",
        max_tokens: int = 8,
        wants_handle: bool = True,
        handover: int = common_pb2.HANDOVER_PATH_UNSPECIFIED,
        tenant: str = "t",
        **sampling: Any,
    ) -> prefill_pb2.PrefillRequest:
        return prefill_pb2.PrefillRequest(
            request_id=name,
            tenant=tenant,
            tenant_salt=SALT,
            prompt_token_ids=prompt,
            sampling=sampling_params(max_tokens=max_tokens, **sampling),
            model_fingerprint=self.model.info.fingerprint,
            wants_handle=wants_handle,
            handover=handover,
        )

    @contextlib.asynccontextmanager
    async def own_prefill_stub(self) -> AsyncIterator[prefill_pb2_grpc.PrefillStub]:
        """Over a connection of its own, which ends with the body."""
        async with rpc.channel(self.prefill.address) as channel:
            yield prefill_pb2_grpc.PrefillStub(channel)

    def call(
        self, asked: Any, *, timeout_s: float | None = LEASE_TTL_S, stub: Any = None, **options: Any
    ) -> PrefillCall:
        """Of a whole request, or of one of this prompt. Args: stub: another than the pair's."""
        if not isinstance(asked, prefill_pb2.PrefillRequest):
            asked = self.prefill_request(asked, **options)
        return PrefillCall(stub or self.prefill_stub, asked, timeout_s=timeout_s)

    async def run_prefill(
        self, prompt: Sequence[int], *, timeout_s: float = LEASE_TTL_S, **options: Any
    ) -> prefill_pb2.PrefillReply:
        """One prompt. Without a handle its answer does not wait for the store: we do."""
        reply = await whole(self.call(prompt, timeout_s=timeout_s, **options))
        if not options.get("wants_handle", True):
            await until(lambda: self.at_prefill.num_chains_behind == 0)
        return reply

    def reserve(
        self,
        prompt: Sequence[int],
        *,
        name: str = "r",
        max_tokens: int = 8,
        budget_ms: int = int(LEASE_TTL_S * 1000),
        tenant: str = "t",
        tenant_salt: bytes = SALT,
        has_begun: bool = False,
        **sampling: Any,
    ) -> decode_pb2.ReserveDecode:
        return decode_pb2.ReserveDecode(
            request_id=name,
            tenant=tenant,
            tenant_salt=tenant_salt,
            prompt_token_ids=prompt,
            sampling=sampling_params(max_tokens=max_tokens, **sampling),
            model_fingerprint=self.model.info.fingerprint,
            budget_ms=budget_ms,
            has_begun=has_begun,
        )

    @contextlib.asynccontextmanager
    async def stream(self) -> AsyncIterator[RouterStream]:
        """One router's multiplexed stream."""
        call = self.decode_stub.Stream()
        stream = RouterStream(call)
        try:
            yield stream
        finally:
            await stream.close()

    @contextlib.asynccontextmanager
    async def reserved(
        self, prompt: Sequence[int], **options: Any
    ) -> AsyncIterator[tuple[RouterStream, int]]:
        """A stream of its own, and the key of a request on it that has its room at decode."""
        async with self.stream() as stream:
            yield stream, await stream.begin(self.reserve(prompt, **options))

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        name: str = "r",
        max_tokens: int = 8,
        handover: int = common_pb2.HANDOVER_PATH_UNSPECIFIED,
        **sampling: Any,
    ) -> Answer:
        """As a router does it: reserve, prefill, hand over, collect."""
        options = {"name": name, "max_tokens": max_tokens, **sampling}
        async with self.reserved(prompt, **options) as (stream, key):
            reply = await self.run_prefill(prompt, handover=handover, **options)
            return await stream.answer(key, reply)

    async def forget(self, num_blocks: int = 64) -> None:
        """Push everything out of the device cache of a prefill worker of so many blocks; the store
        keeps it."""
        for _ in range(-(-num_blocks * 4 // 200)):
            await self.run_prefill(self.new_prompt(200), name="filler", wants_handle=False)

    async def generate_together(
        self, prompts: Sequence[Sequence[int]], *, max_tokens: int
    ) -> list[Answer]:
        """All of them, whose first step at decode is made when all are there."""
        async with self.stream() as stream:
            keys = [
                await stream.begin(self.reserve(prompt, name=f"r{index}", max_tokens=max_tokens))
                for index, prompt in enumerate(prompts)
            ]
            replies = [
                await self.run_prefill(prompt, name=f"r{index}", max_tokens=max_tokens)
                for index, prompt in enumerate(prompts)
            ]
            self.decode_model.hold()
            for key, reply in zip(keys, replies, strict=True):
                await stream.generate(key, reply)
            await until(lambda: self.at_decode.states() == ["running"] * len(prompts))
            self.decode_model.release()
            answers = [await stream.collect(key) for key in keys]
        for answer, reply in zip(answers, replies, strict=True):
            answer.prefill = reply
            answer.token_ids[:0] = reply.token_ids
        return answers

    async def decode_from(
        self, reply: prefill_pb2.PrefillReply, prompt: Sequence[int], **options: Any
    ) -> Answer:
        """What decode makes of prefill's account, which came before it was asked."""
        async with self.reserved(prompt, **options) as (stream, key):
            return await stream.answer(key, reply)

    async def generate_samples(
        self,
        prompt: Sequence[int],
        *,
        name: str = "r",
        max_tokens: int = 8,
        loses_handle: bool = False,
        handover: int = common_pb2.HANDOVER_PATH_UNSPECIFIED,
        **sampling: Any,
    ) -> dict[int, Sample]:
        """`generate` of several samples, each on its own."""
        options = {"name": name, "max_tokens": max_tokens, **sampling}
        samples: dict[int, Sample] = defaultdict(Sample)
        async with self.reserved(prompt, **options) as (stream, key):
            *firsts, account = await self.call(prompt, handover=handover, **options).answer()
            for first in firsts:
                if not first.beam_start:
                    samples[first.sample_index].add(first)
            if samples and all(sample.finish_reason for sample in samples.values()):
                await stream.end(key)
                return samples
            if loses_handle:
                connector = self.prefill.core.connector
                leases = {run.lease_id for run in (*account.handle.runs, account.handle.tail)}
                connector.release_later(connector.client, sorted(leases - {""}))
                account.ClearField("handle")
            await stream.generate_from(key, handover_of(account, firsts))
            finished = await stream.finish(key, samples)
        for sample in samples.values():
            sample.leg = finished.leg
        return samples

    def alone(self, prompt: Sequence[int], *, max_tokens: int = 8, **sampling: Any) -> list[Sample]:
        """What one engine gives that serves the whole request by itself."""
        return served_by(fake_engine(), SALT, prompt, max_tokens=max_tokens, **sampling)

    def expected(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """What one engine alone draws."""
        return self.model.generate(prompt, num_tokens)

    # ---- laws

    async def check(self, *, leases: int = 0) -> None:
        """Nothing is held any more, anywhere, and every law holds."""
        for worker in (self.prefill, self.decode):
            await worker.core.connector.settle()
            await until(lambda worker=worker: worker.core.num_live == 0)
            stub: Any = self.prefill_stub if worker is self.prefill else self.decode_stub
            await until(partial(self._is_idle, stub))
        assert not self.at_prefill.states() and not self.at_decode.states()
        await until(lambda: self.at_prefill.num_chains_behind == 0)
        await until(lambda: self.at_prefill.num_lent_blocks == self.at_prefill.num_loans == 0)
        if self.store is not None:
            await self.check_store(leases)
        if self.has_two_nodes:
            await self.check_store(0, self.decode_store)

    async def _is_idle(self, stub: Any) -> bool:
        """No block is held: not for a request, nor lent to the measuring of a link."""
        status = await stub.GetWorkerStatus(common_pb2.GetWorkerStatusRequest(), timeout=WAIT_S)
        assert status.integrity_error == ""
        assert status.num_waiting == status.num_running == status.num_holding == 0
        num_held = status.num_blocks - status.num_free_blocks - status.num_cached_blocks
        return num_held == status.num_quarantined_blocks == 0

    async def check_store(self, leases: int, store: Any = None) -> None:
        async def settled() -> bool:
            status = await self.store_status(store)
            assert status.integrity_error == ""
            return (
                status.num_leases == leases
                and status.num_writing == 0
                and status.num_quarantined == 0
                and (leases > 0 or status.num_pinned == status.num_tails == 0)
            )

        await until(settled)


@dataclass
class Sample:
    """What came of one sample."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    traces: list[common_pb2.StepTrace] = field(default_factory=list)
    finish_reason: int = 0
    score: float | None = None
    leg: common_pb2.KvLeg | None = field(default=None, compare=False)

    def add(self, part: Any) -> None:
        assert not self.finish_reason, "more came of a sample that had ended"
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs
        self.traces += part.traces
        self.finish_reason = part.finish_reason
        if isinstance(part, decode_pb2.DecodeTokens | decode_pb2.DecodeFinished):
            self.score = part.score if part.HasField("score") else None


def served_by(
    engine: LLMEngine, salt: bytes, prompt: Sequence[int], **sampling: Any
) -> list[Sample]:
    """What one engine gives that serves the whole request by itself."""
    params = sampling_params(**sampling)
    root = block_hash.root_key(salt, engine.model_info.fingerprint)
    asked = Request(
        request_id="alone",
        prompt_token_ids=tuple(prompt),
        sampling=sampling_from_proto(params, 0),
        block_hasher=partial(block_hash.extend, root),
        cache_root=root,
        num_samples=num_samples_of(params),
        beam=beam_from_proto(params),
    )
    engine.reserve(asked)
    engine.start("alone")
    samples = [Sample() for _ in range(asked.num_samples)]
    while engine.has_work():
        for event in engine.step().events:
            assert event.error is None, event.error
            sample = samples[event.sample_index]
            sample.token_ids += event.token_ids
            sample.logprobs += logprobs_to_proto(event.logprobs or ())
            sample.traces += traces_to_proto(event.traces or ())
            sample.score = event.score
            if event.finish_reason is not None:
                sample.finish_reason = FINISH_REASONS[event.finish_reason]
    engine.check_integrity()
    return samples


def handover_of(
    account: prefill_pb2.PrefillReply, firsts: Sequence[prefill_pb2.PrefillReply]
) -> decode_pb2.GenerateFromHandle:
    """As the router makes it of a prefill worker's messages."""
    command = decode_pb2.GenerateFromHandle(
        handle=account.handle if account.HasField("handle") else None
    )
    if firsts[0].beam_start:
        command.beam_start.extend(firsts[0].beam_start)
        return command
    if len(firsts) == 1:
        command.output_token_ids.extend(firsts[0].token_ids)
        return command
    for first in firsts:
        command.outputs.add(token_ids=first.token_ids, is_over=bool(first.finish_reason))
    return command


@dataclass
class Answer:
    """What came over the stream for one key."""

    token_ids: list[int] = field(default_factory=list)
    finished: decode_pb2.DecodeFinished | None = None
    failed: decode_pb2.DecodeFailed | None = None
    prefill: prefill_pb2.PrefillReply | None = None

    @property
    def leg(self) -> common_pb2.KvLeg:
        assert self.finished is not None, self.failed
        return self.finished.leg

    @property
    def recomputed(self) -> dict[str, int]:
        return {count.reason: count.num_blocks for count in self.leg.recomputed}


class RouterStream:
    """The router's end of one stream: events by key, and every message as it came."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.messages: list[decode_pb2.DecodeEvents] = []
        self._writing = asyncio.Lock()
        self._events: dict[int, asyncio.Queue[decode_pb2.DecodeEvent]] = {}
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while isinstance(message := await self._call.read(), decode_pb2.DecodeEvents):
                self.messages.append(message)
                for event in message.events:
                    self._queue(event.key).put_nowait(event)

    def _queue(self, key: int) -> asyncio.Queue[decode_pb2.DecodeEvent]:
        return self._events.setdefault(key, asyncio.Queue())

    async def _write(self, command: decode_pb2.DecodeCommand) -> None:
        async with self._writing:  # gRPC takes one write at a time
            await self._call.write(command)

    async def reserve(self, reserve: decode_pb2.ReserveDecode, *, under: int | None = None) -> int:
        """Returns: its key, which is a new one but for `under`."""
        key = next(_keys) if under is None else under
        await self._write(decode_pb2.DecodeCommand(key=key, reserve=reserve))
        return key

    async def begin(self, reserve: decode_pb2.ReserveDecode, timeout_s: float = WAIT_S) -> int:
        """Until it has its room. Returns: its key."""
        key = await self.reserve(reserve)
        event = await self.next(key, timeout_s)
        assert event.HasField("reserved"), event
        return key

    async def answer(self, key: int, reply: prefill_pb2.PrefillReply) -> Answer:
        """Hand over, and all that comes, the first tokens too."""
        await self.generate(key, reply)
        answer = await self.collect(key)
        answer.prefill = reply
        answer.token_ids[:0] = reply.token_ids
        return answer

    async def compute(
        self, key: int, token_ids: Sequence[int] = (), *, is_told: bool = False
    ) -> None:
        """Without a handle: decode computes the prompt, and what was drawn. is_told: it is expected
        to, so that nothing counts as missing."""
        command = decode_pb2.GenerateFromHandle(output_token_ids=token_ids, computes_prompt=is_told)
        await self.generate_from(key, command)

    async def go_on(
        self,
        key: int,
        outputs: Sequence[Sequence[int]],
        *,
        handle: common_pb2.KvHandle | None = None,
        over: Sequence[int] = (),
        computes_prompt: bool = False,
    ) -> None:
        """Samples go on behind these tokens. over: those that are complete."""
        command = decode_pb2.GenerateFromHandle(handle=handle, computes_prompt=computes_prompt)
        for index, token_ids in enumerate(outputs):
            command.outputs.add(token_ids=token_ids, is_over=index in over)
        await self.generate_from(key, command)

    async def generate(self, key: int, reply: prefill_pb2.PrefillReply) -> None:
        handle = reply.handle if reply.HasField("handle") else None
        command = decode_pb2.GenerateFromHandle(handle=handle, output_token_ids=reply.token_ids)
        await self._write(decode_pb2.DecodeCommand(key=key, generate=command))

    async def generate_from(self, key: int, command: decode_pb2.GenerateFromHandle) -> None:
        await self._write(decode_pb2.DecodeCommand(key=key, generate=command))

    async def prefetch(self, key: int, handle: common_pb2.KvHandle) -> None:
        command = decode_pb2.PrefetchDecode(handle=handle)
        await self._write(decode_pb2.DecodeCommand(key=key, prefetch=command))

    async def forward(
        self,
        key: int,
        call: PrefillCall,
        on_partial: Callable[[common_pb2.KvHandle], Awaitable[None]] | None = None,
    ) -> tuple[list[prefill_pb2.PrefillReply], prefill_pb2.PrefillReply]:
        """A prefill's partial handles go to decode, as by the router. Returns: its first tokens and
        its account. Args: on_partial: called behind each."""
        messages = []
        async for message in call:
            if not message.handle.is_partial:
                messages.append(message)
                continue
            await self.prefetch(key, message.handle)
            if on_partial is not None:
                await on_partial(message.handle)
        *firsts, account = messages
        return firsts, account

    async def cancel_sample(self, key: int, sample_index: int) -> None:
        cancel = decode_pb2.CancelSample(sample_index=sample_index)
        await self._write(decode_pb2.DecodeCommand(key=key, cancel_sample=cancel))

    async def cancel(self, key: int) -> None:
        cancel = decode_pb2.CancelDecode()
        await self._write(decode_pb2.DecodeCommand(key=key, cancel=cancel))

    async def next(self, key: int, timeout_s: float = WAIT_S) -> decode_pb2.DecodeEvent:
        async with asyncio.timeout(timeout_s):
            return await self._queue(key).get()

    async def collect(self, key: int) -> Answer:
        """Everything until the last word on this key."""
        answer = Answer()
        while answer.finished is None and answer.failed is None:
            event = await self.next(key)
            kind = event.WhichOneof("event")
            if kind == "tokens":
                answer.token_ids += event.tokens.token_ids
            elif kind == "finished":
                answer.token_ids += event.finished.token_ids
                answer.finished = event.finished
            elif kind == "failed":
                answer.failed = event.failed
        return answer

    async def end(self, key: int) -> Answer:
        """Cancel it. Returns: all that came, until it was told to be so."""
        await self.cancel(key)
        answer = await self.collect(key)
        assert answer.finished is not None
        return answer

    async def finish(
        self, key: int, samples: Any, timeout_s: float = WAIT_S
    ) -> decode_pb2.DecodeFinished:
        """All that comes to the end, added to `samples`, by index. Returns: the last word."""
        while True:
            event = await self.next(key, timeout_s)
            assert event.WhichOneof("event") in ("tokens", "finished"), event
            part = event.finished if event.HasField("finished") else event.tokens
            samples[part.sample_index].add(part)
            if event.HasField("finished"):
                return event.finished

    async def in_order(self) -> None:
        """Until the worker has read all commands that were sent before."""
        key = next(_keys)
        await self._write(decode_pb2.DecodeCommand(key=key))
        assert (await self.next(key)).failed.message.startswith("command: ")

    async def half_close(self) -> None:
        await self._call.done_writing()

    async def ended(self) -> grpc.StatusCode:
        async with asyncio.timeout(WAIT_S):
            code: grpc.StatusCode = await self._call.code()
            return code

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


class PrefillStream:
    """A router's end of a stream of several prompts: commands out, events in as messages."""

    def __init__(self, stub: Any) -> None:
        self.call = stub.Stream()

    async def send(self, key: int, **command: Any) -> None:
        await self.call.write(prefill_pb2.PrefillCommand(key=key, **command))

    async def read(self) -> list[prefill_pb2.PrefillEvent]:
        """One message."""
        async with asyncio.timeout(WAIT_S):
            message = await self.call.read()
        assert isinstance(message, prefill_pb2.PrefillEvents)
        return list(message.events)

    async def until_over(self, keys: set[int]) -> dict[int, list[prefill_pb2.PrefillEvent]]:
        """All that comes until each of `keys` has had its last word."""
        events: dict[int, list[prefill_pb2.PrefillEvent]] = {key: [] for key in keys}
        left = set(keys)
        while left:
            for event in await self.read():
                events[event.key].append(event)
                if event.HasField("failed") or event.reply.HasField("leg"):
                    left.remove(event.key)
        return events


def sampling_params(
    *, max_tokens: int = 8, temperature: float = 0.0, seed: int = 7, **more: Any
) -> common_pb2.SamplingParams:
    """Every field that a worker reads, EOS ignored so that lengths are known."""
    more.setdefault("ignore_eos", True)
    return common_pb2.SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=1.0, seed=seed, **more
    )


ROLES: dict[str, Any] = {"prefill": PrefillRole, "decode": DecodeRole}


def keys_in(folder: Path) -> str:
    """A file of keys of handles, made if need be."""
    key_file = folder / "handle.keys"
    if not key_file.exists():
        signing_keys.create(key_file)
    return str(key_file)


@contextlib.asynccontextmanager
async def started(
    role: str, engine: LLMEngine, store_address: str = "", **settings: Any
) -> AsyncIterator[main.Worker]:
    """A worker, until the body ends. Args: settings: as of WorkerSettings."""
    own = {"worker_id": f"{role}-0", "redis_url": "", "engine": engine.config, **settings}
    own["limits"] = own.get("limits") or patient()
    made = WorkerSettings(store_address=store_address, **own)
    worker = await main.start(engine, made, role, ROLES[role])
    try:
        yield worker
    finally:
        await worker.stop()


@contextlib.asynccontextmanager
async def pair(
    slab_dir: Path,
    *,
    num_frames: int = 512,
    tenant_shares: tuple[str, ...] = (),
    prefill_blocks: int = 256,
    decode_blocks: int = 256,
    decode_preemption: str = "never",
    decode_parts: Mapping[str, Any] | None = None,
    chunk: int = 16,
    limits: WorkerLimits | None = None,
    has_two_nodes: bool = False,
    tracing: TracingSettings | None = None,
    **settings: Any,
) -> AsyncIterator[Pair]:
    """Start all three; at the end stop them and check that what is left is nothing.

    With two nodes decode has a store of its own and pulls what prefill stored in the other.

    Args: decode_parts: of the decode worker's engine, see fake_engine. settings: of both workers.
    """
    models = [GatedModel() for _ in range(3)]
    tracing = tracing or TracingSettings()
    async with contextlib.AsyncExitStack() as stack:
        store_exit = contextlib.AsyncExitStack()
        of_store = KvStoreSettings(
            slab_dir=str(slab_dir),
            capacity_bytes=num_frames * FRAME_BYTES,
            stop_timeout_s=0.0,
            tenant_shares=tenant_shares,
            tracing=tracing,
        )
        store = decode_store = await store_exit.enter_async_context(store_process.running(of_store))
        if has_two_nodes:
            own = dataclasses.replace(of_store, node_id="decode-home")
            decode_store = await stack.enter_async_context(store_process.running(own))
        settings |= {"tracing": tracing, "limits": limits, "handle_keys_file": keys_in(slab_dir)}
        engines = (
            fake_engine(num_blocks=prefill_blocks, chunk=chunk, model=models[1]),
            fake_engine(
                num_blocks=decode_blocks,
                chunk=chunk,
                model=models[2],
                preemption=decode_preemption,
                **decode_parts or {},
            ),
        )
        homes = (("prefill", store), ("decode", decode_store))
        workers = [
            await stack.enter_async_context(started(role, engine, home.address, **settings))
            for (role, home), engine in zip(homes, engines, strict=True)
        ]
        channels = [
            await stack.enter_async_context(rpc.channel(worker.address)) for worker in workers
        ]
        made = Pair(
            *models,
            dataclasses.replace(of_store, listen=store.address),
            store,
            store_exit,
            workers[0],
            workers[1],
            prefill_pb2_grpc.PrefillStub(channels[0]),
            decode_pb2_grpc.DecodeStub(channels[1]),
            decode_store,
            has_two_nodes,
        )
        try:
            yield made
        finally:
            for held in models:
                held.release()
            await stack.aclose()
            await made.store_exit.aclose()


def patient(**changes: Any) -> WorkerLimits:
    """Limits that no busy machine reaches, but for these."""
    most: dict[str, Any] = {
        "store_wait_s": WAIT_S,
        "lease_ttl_s": LEASE_TTL_S,
        "attach_budget_s": 5.0,
        "link_budget_s": WAIT_S,
        "put_budget_s": WAIT_S,
        "drain_s": 0.2,
        "stop_grace_s": 0.05,
    }
    return WorkerLimits(**most | changes)


def error_of(failed: decode_pb2.DecodeFailed | prefill_pb2.PrefillFailed) -> BatonError:
    """What the last word of a request means."""
    retry_after_s = failed.retry_after_s if failed.HasField("retry_after_s") else None
    return rpc.error_of_code(failed.code, failed.message, retry_after_s)


KEY = 7
_MARGIN_S = 20.0
"""A worker that says nothing for so long beyond a request's own time is stuck."""


class PrefillCall:
    """Its messages as they come; its end is what the worker says of it, or what the broken stream
    means, as an error.
    """

    def __init__(
        self,
        stub: Any,
        request: prefill_pb2.PrefillRequest,
        *,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> None:
        """timeout_s: the request's own time; None: it names none."""
        if timeout_s is not None:
            request.budget_ms = int(timeout_s * 1000)
        request.traceparent = traceparent
        self.prompt = tuple(request.prompt_token_ids)
        self._bound_s = (timeout_s or 0.0) + _MARGIN_S
        self._stream = stub.Stream()
        self._commands: asyncio.Queue[prefill_pb2.PrefillCommand] = asyncio.Queue()
        self._events: list[prefill_pb2.PrefillEvent] = []
        self._is_over = False
        self._commands.put_nowait(prefill_pb2.PrefillCommand(key=KEY, prefill=request))
        self._writer = asyncio.create_task(self._write())

    async def read(self) -> Any:
        """The next message; grpc.aio.EOF behind the account. Raises: BatonError."""
        while not self._events:
            if self._is_over:
                return grpc.aio.EOF
            await self._take()
        event = self._events.pop(0)
        assert event.key == KEY
        if event.HasField("failed"):
            await self._end()
            raise error_of(event.failed)
        if event.reply.HasField("leg"):
            await self._end()
        return event.reply

    async def answer(self) -> list[prefill_pb2.PrefillReply]:
        """First tokens, and the account behind them. Partial handles are left out, which come
        before them or not, as quick as the store is."""
        return [message async for message in self if not message.handle.is_partial]

    async def __aiter__(self) -> AsyncIterator[prefill_pb2.PrefillReply]:
        while isinstance(message := await self.read(), prefill_pb2.PrefillReply):
            yield message

    def cancel(self) -> None:
        """As a router that does not want it any more; nothing when it is over."""
        cancel = prefill_pb2.CancelPrefill()
        self._commands.put_nowait(prefill_pb2.PrefillCommand(key=KEY, cancel=cancel))

    def vanish(self) -> None:
        """As a router that is gone: the stream breaks."""
        self._is_over = True
        self._writer.cancel()
        self._stream.cancel()

    async def error(self) -> BatonError | None:
        """How it ends; None: with an account."""
        try:
            while await self.read() is not grpc.aio.EOF:
                pass
        except BatonError as error:
            return error
        return None

    async def _take(self) -> None:
        try:
            async with asyncio.timeout(self._bound_s):
                message: Any = await self._stream.read()
        except grpc.aio.AioRpcError as error:
            await self._end()
            raise rpc.error_from_rpc(error) from error
        assert isinstance(message, prefill_pb2.PrefillEvents), "the stream ended without a word"
        self._events += message.events

    async def _end(self) -> None:
        """No more is asked for: the worker ends the stream, in order."""
        self._is_over = True
        self._writer.cancel()
        await asyncio.gather(self._writer, return_exceptions=True)
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._stream.done_writing()

    async def _write(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                await self._stream.write(await self._commands.get())
