"""FakePrefill and FakeDecode: prefill and decode workers without a model, for tests of the router.
They serve the real gRPC services on loopback; tokens come from a hash of the request
(`FakeServedModel`). One asyncio loop.

Tests control them through attributes: errors to raise, numbers to report, and gates (`Gate`) that
hold a request at a point for as long as the test needs. Counters and recorded messages show what
the router sent.

Invariants: `FakePrefill.num_active` is the number of prompts, and `FakeDecode.num_open` the number
of reservations, without a final event; `idle` is set when it is 0.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePath
from typing import Any

import grpc.aio
from google.protobuf import json_format

from process import entrypoint, grpc_server, rpc
from process.rpc_errors import BatonError, Cancelled, NoCapacity, Unavailable
from protos import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc


class Gate:
    """A point that requests pass; while closed, it holds them. `reached` is set when a request
    arrives.
    """

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._num_free = 0

    @property
    def is_open(self) -> bool:
        """Whether requests pass."""
        return self._open.is_set()

    def close(self) -> None:
        """Hold the requests that arrive from now on."""
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        """Let all requests pass."""
        self._open.set()

    def let_pass(self, count: int) -> None:
        """Let the next `count` requests pass while the gate is closed."""
        self._num_free = count

    async def passed(self) -> None:
        """Arrive, and return once the gate lets the request pass."""
        self.reached.set()
        if self._num_free:
            self._num_free -= 1
            return
        await self._open.wait()


@dataclass(frozen=True)
class FakeServedModel:
    """The model that a fake worker pretends to run. Its tokens are a hash of seed, prompt, position
    and sample.
    """

    name: str = "fake"
    tokenizer_digest: str = "00" * 32
    fingerprint: str = "ab" * 32
    alphabet: tuple[int, ...] = tuple(range(97, 123))
    """Token ids that it samples."""
    eos_token_id: int = 0
    eos_at: int | None = None
    """Output position at which it samples EOS; None: never."""
    context_window: int = 512
    vocab_size: int = 300
    block_size: int = 16

    def token(
        self,
        prompt: Sequence[int],
        params: common_pb2.SamplingParams,
        position: int,
        sample_index: int = 0,
    ) -> int:
        """Return the output token of one sample at `position` (0 is the first)."""
        if position == self.eos_at and not params.ignore_eos:
            return self.eos_token_id
        seed = repr((params.seed, tuple(prompt), position, sample_index)).encode()
        number = int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "little")
        return self.alphabet[number % len(self.alphabet)]

    def embedding(self, prompt: Sequence[int]) -> list[float]:
        """Return an embedding of four numbers with length 1."""
        digest = hashlib.blake2b(repr(tuple(prompt)).encode(), digest_size=4).digest()
        numbers = [byte - 127.5 for byte in digest]
        length = math.hypot(*numbers)
        return [number / length for number in numbers]

    def reason(
        self, token_id: int, params: common_pb2.SamplingParams, num_output_tokens: int
    ) -> common_pb2.FinishReason:
        """Return why the output ends with `token_id`, its token number `num_output_tokens`.
        UNSPECIFIED: it goes on.
        """
        if token_id == self.eos_token_id and not params.ignore_eos:
            return common_pb2.FINISH_REASON_EOS
        if token_id in params.stop_token_ids:
            return common_pb2.FINISH_REASON_STOP_TOKEN
        if num_output_tokens >= params.max_tokens:
            return common_pb2.FINISH_REASON_LENGTH
        return common_pb2.FINISH_REASON_UNSPECIFIED


def logprobs(
    token_ids: Sequence[int], params: common_pb2.SamplingParams
) -> list[common_pb2.TokenLogprobs]:
    """Return the log probabilities of each token, if they are requested. A token's is its negative
    id; its alternatives are the previous id and those from its own id on.
    """
    if not params.HasField("logprobs"):
        return []

    def of(token_id: int) -> common_pb2.TokenLogprob:
        return common_pb2.TokenLogprob(token_id=token_id, logprob=-float(token_id))

    return [
        common_pb2.TokenLogprobs(chosen=of(token_id), top=map(of, _near(token_id, params.logprobs)))
        for token_id in token_ids
    ]


def prompt_logprobs(prompt: Sequence[int], num: int) -> list[common_pb2.TokenLogprobs]:
    """Return the log probabilities of a prompt's tokens, with `num` alternatives each. The first
    token has none (NaN).
    """
    told = logprobs(prompt, common_pb2.SamplingParams(logprobs=num))
    told[0] = common_pb2.TokenLogprobs(
        chosen=common_pb2.TokenLogprob(token_id=prompt[0], logprob=math.nan)
    )
    return told


def _near(token_id: int, num: int) -> range:
    first = max(0, token_id - 1)
    return range(first, first + num)


Context = grpc.aio.ServicerContext[Any, Any]


class FakeWorker:
    """The common part of both roles: address, incarnation, status, and adapters."""

    role = ""

    def __init__(self, worker_id: str, model: FakeServedModel) -> None:
        self.worker_id = worker_id
        self.model = model
        self.incarnation = entrypoint.new_incarnation().hex()
        self.address = ""
        self.is_draining = False
        self.num_blocks = 1000
        self.num_blocks_taken = 0
        self.num_queued_tokens = 0
        """Prompt tokens that it reports as queued."""
        self.num_running = 0
        """Requests that it reports as running."""
        self.step_age_s = 0.0
        """Seconds that it reports its engine to have spent in the current step."""
        self.store_node_id = ""
        self.transport = "shm"
        self.remote_transport = "grpc"
        self.lender_node_id = ""
        self.adapters: dict[str, str] = {}
        """Digests of the adapters that it reports, by name."""
        self.loaded: set[tuple[str, str]] = set()
        """Name and digest of further adapters that it reports: those that `LoadAdapter` loaded."""
        self.held: dict[tuple[str, str], int] = {}
        """Adapters that LoadAdapter loaded, by name and digest, with the version of the AdapterWish
        that the load precedes.
        """
        self.load_gate = Gate()
        """Holds LoadAdapter before it loads an adapter, whose digest is the name of its folder."""
        self.load_error: BatonError | None = None
        """Error that LoadAdapter raises instead."""
        self.on_loaded: Callable[[], Awaitable[None]] | None = None
        """Called when `loaded` has changed."""
        self.links: Sequence[Mapping[str, Any]] = ()
        """Fields of the LinkStatus of each store that it reports."""
        self.status_gate = Gate()
        """Holds GetWorkerStatus."""
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        self._server, self.address = await grpc_server.listen("127.0.0.1:0", [self._add_to])

    @property
    def is_alive(self) -> bool:
        """Whether it was started and not stopped."""
        return self._server is not None

    async def stop(self) -> None:
        """Close all connections at once, as a killed process does."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def status(self) -> common_pb2.WorkerStatus:
        """Return the status that a real worker's heartbeat reports."""
        model = self.model
        return common_pb2.WorkerStatus(
            worker_id=self.worker_id,
            role=self.role,
            address=self.address,
            incarnation=self.incarnation,
            model=model.name,
            model_fingerprint=model.fingerprint,
            tokenizer_digest=model.tokenizer_digest,
            dtype="float32",
            block_size=model.block_size,
            block_bytes=1024,
            num_blocks=self.num_blocks,
            num_free_blocks=self.num_free_blocks,
            num_queued_tokens=self.num_queued_tokens,
            num_running=self.num_running,
            context_window=model.context_window,
            vocab_size=model.vocab_size,
            num_step_tokens=512,
            step_age_s=self.step_age_s,
            store_node_id=self.store_node_id,
            transport=self.transport,
            remote_transport=self.remote_transport,
            lender_node_id=self.lender_node_id,
            draining=self.is_draining,
            adapters=[
                common_pb2.AdapterStatus(name=name, digest=digest)
                for name, digest in sorted({*self.adapters.items(), *self.loaded})
            ],
            links=[common_pb2.LinkStatus(**link) for link in self.links],
        )

    async def register(self, client: Any, *, ttl_ms: int = 60_000) -> None:
        """Write the worker's entry and heartbeat once, with a Redis `client`."""
        entry = json_format.MessageToJson(self.status(), indent=None)
        await client.hset("baton:workers", self.worker_id, entry)
        await client.set(f"baton:worker:{self.worker_id}:beat", self.incarnation, px=ttl_ms)

    @rpc.unary
    async def LoadAdapter(
        self, request: common_pb2.LoadAdapterRequest, context: Context
    ) -> common_pb2.LoadAdapterReply:
        await self.load_gate.passed()
        if self.load_error is not None:
            raise self.load_error
        digest = PurePath(request.folder).name
        self.loaded.add((request.name, digest))
        self.held[request.name, digest] = request.version
        if self.on_loaded is not None:
            await self.on_loaded()
        status = common_pb2.AdapterStatus(name=request.name, digest=digest)
        return common_pb2.LoadAdapterReply(adapter=status)

    @rpc.unary
    async def UnloadAdapter(
        self, request: common_pb2.UnloadAdapterRequest, context: Context
    ) -> common_pb2.UnloadAdapterReply:
        self.loaded.discard((request.name, request.digest))
        if self.on_loaded is not None:
            await self.on_loaded()
        return common_pb2.UnloadAdapterReply()

    @property
    def num_free_blocks(self) -> int:
        """Number of KV blocks without a reservation."""
        return self.num_blocks - self.num_blocks_taken

    def leg(self, num_tokens: int, *, is_computed: bool, num_local: int = 0) -> common_pb2.KvLeg:
        """Return the provenance (KvLeg) of this worker's part of a request: all tokens computed
        here except `num_local` from its cache, or all loaded from the store.
        """
        leg = common_pb2.KvLeg(
            role=self.role,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            transport="shm",
            dtype="float32",
        )
        if is_computed:
            leg.num_tokens_local = num_local
            leg.num_tokens_computed = num_tokens - num_local
        else:
            leg.from_store.add(tier=common_pb2.TIER_HOST, node_id="fake", num_tokens=num_tokens)
        return leg

    def _add_to(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError


class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServicer):
    """A fake prefill worker. Invariant: `num_active` prompts are without a final event."""

    role = "prefill"

    def __init__(self, worker_id: str, model: FakeServedModel) -> None:
        super().__init__(worker_id, model)
        self.gate = Gate()
        """Holds a prompt before its first token."""
        self.num_partials = 0
        """Partial handles that it sends before the first token."""
        self.num_late_partials = 0
        """Partial handles that it sends between the first tokens and the account."""
        self.account_gate = Gate()
        """Holds a prompt between its first tokens and its account (the last reply)."""
        self.account_error: BatonError | None = None
        """Error that it raises instead of the account."""
        self.error: BatonError | None = None
        """Error that it raises after `error_after` first tokens."""
        self.error_after = 0
        self.num_local = 0
        """Prompt tokens that its accounts report as cached locally."""
        self.store_address = ""
        """Store whose leases its handles name; empty: none."""
        self.requests: list[prefill_pb2.PrefillRequest] = []
        self.traceparents: list[str] = []
        """Traceparent of each prompt, in order; empty for a prompt without one."""
        self.num_active = 0
        self.num_cancelled = 0
        self.num_cancelled_late = 0
        """Number of cancels for prompts that had ended."""
        self.idle = asyncio.Event()
        self.idle.set()

    @rpc.streaming
    async def Stream(
        self, commands: AsyncIterator[prefill_pb2.PrefillCommand], context: Context
    ) -> AsyncGenerator[prefill_pb2.PrefillEvents, None]:
        events: asyncio.Queue[prefill_pb2.PrefillEvent | None] = asyncio.Queue()
        tasks: dict[int, asyncio.Task[None]] = {}
        reader = asyncio.create_task(self._obey(commands, tasks, events))
        try:
            while (event := await events.get()) is not None:
                yield prefill_pb2.PrefillEvents(events=[event])
        finally:
            reader.cancel()
            for task in tasks.values():
                task.cancel()

    async def _obey(
        self,
        commands: AsyncIterator[prefill_pb2.PrefillCommand],
        tasks: dict[int, asyncio.Task[None]],
        events: asyncio.Queue[prefill_pb2.PrefillEvent | None],
    ) -> None:
        async for command in commands:
            key = command.key
            if command.WhichOneof("command") == "prefill":
                tasks[key] = asyncio.create_task(self._live(key, command.prefill, events))
                tasks[key].add_done_callback(partial(_forget, tasks, key))
            elif key in tasks:
                tasks[key].cancel()
            else:
                self.num_cancelled_late += 1
        events.put_nowait(None)

    async def _live(
        self,
        key: int,
        request: prefill_pb2.PrefillRequest,
        events: asyncio.Queue[prefill_pb2.PrefillEvent | None],
    ) -> None:
        self.requests.append(request)
        self.traceparents.append(request.traceparent)
        self.num_active += 1
        self.idle.clear()
        problem: BatonError | None = None
        try:
            async for reply in self._replies(request):
                events.put_nowait(prefill_pb2.PrefillEvent(key=key, reply=reply))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            problem = Cancelled("cancelled")
        except BatonError as error:
            problem = error
        finally:
            self.num_active -= 1
            if not self.num_active:
                self.idle.set()
        if problem is not None:
            code, message = rpc.status_of(problem)
            failed = prefill_pb2.PrefillFailed(
                code=rpc.code_number(code),
                message=message,
                retry_after_s=problem.retry_after_s,
            )
            events.put_nowait(prefill_pb2.PrefillEvent(key=key, failed=failed))

    async def _replies(
        self, request: prefill_pb2.PrefillRequest
    ) -> AsyncIterator[prefill_pb2.PrefillReply]:
        for reply in self._partials(request, 0, self.num_partials):
            yield reply
        told = []
        if request.HasField("prompt_logprobs"):
            told = prompt_logprobs(request.prompt_token_ids, request.prompt_logprobs)
        half = -(-len(told) // 2)
        if told:
            yield prefill_pb2.PrefillReply(prompt_logprobs=told[:half])
        await self.gate.passed()
        if told[half:]:
            yield prefill_pb2.PrefillReply(prompt_logprobs=told[half:])
        firsts = [self._first(request, index) for index in range(request.sampling.n or 1)]
        for index, first in enumerate(firsts):
            if self.error is not None and index == self.error_after:
                raise self.error
            yield first
        for reply in self._partials(request, self.num_partials, self.num_late_partials):
            yield reply
        await self.account_gate.passed()
        if self.account_error is not None:
            raise self.account_error
        yield self._last(request, is_over=all(first.finish_reason for first in firsts))

    async def GetWorkerStatus(
        self, request: common_pb2.GetWorkerStatusRequest, context: Context
    ) -> common_pb2.WorkerStatus:
        await self.status_gate.passed()
        return self.status()

    def _first(
        self, request: prefill_pb2.PrefillRequest, sample_index: int
    ) -> prefill_pb2.PrefillReply:
        prompt, sampling, num_drawn = (
            request.prompt_token_ids,
            request.sampling,
            len(request.output_token_ids),
        )
        token_id = self.model.token(prompt, sampling, num_drawn, sample_index)
        reason = self.model.reason(token_id, sampling, num_drawn + 1)
        reply = prefill_pb2.PrefillReply(
            sample_index=sample_index,
            token_ids=[token_id],
            logprobs=logprobs([token_id], request.sampling),
            finish_reason=reason,
        )
        if reason in (common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN):
            reply.stop_token_id = token_id
        if request.wants_embedding:
            reply.embedding.extend(self.model.embedding(request.prompt_token_ids))
        return reply

    def _last(
        self, request: prefill_pb2.PrefillRequest, *, is_over: bool
    ) -> prefill_pb2.PrefillReply:
        reply = prefill_pb2.PrefillReply(
            leg=self.leg(len(request.prompt_token_ids), is_computed=True, num_local=self.num_local),
            times=[common_pb2.StageTime(stage="prefill_compute", seconds=1e-6)],
        )
        if request.wants_handle and not is_over:
            num_tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
            reply.handle.CopyFrom(self._handle(request, num_tokens))
            if self.store_address:
                reply.handle.tail.store_address = self.store_address
                reply.handle.tail.lease_id = "lease-tail"
        return reply

    def _partials(
        self, request: prefill_pb2.PrefillRequest, first: int, count: int
    ) -> list[prefill_pb2.PrefillReply]:
        if not request.wants_handle:
            return []
        return [self._partial(request, index) for index in range(first, first + count)]

    def _partial(self, request: prefill_pb2.PrefillRequest, index: int) -> prefill_pb2.PrefillReply:
        """Return the handle of the tokens stored after chunk `index`, with chunks of one block. The
        worker keeps its lease.
        """
        size = self.model.block_size
        num_tokens = min((index + 1) * size, len(request.prompt_token_ids) // size * size)
        handle = self._handle(request, num_tokens)
        handle.is_partial = True
        return prefill_pb2.PrefillReply(handle=handle)

    def _handle(self, request: prefill_pb2.PrefillRequest, num_tokens: int) -> common_pb2.KvHandle:
        handle = common_pb2.KvHandle(
            request_id=request.request_id, num_tokens=num_tokens, nonce=os.urandom(16)
        )
        if self.store_address:
            handle.runs.add(store_address=self.store_address, lease_id="lease-run")
        return handle

    def _add_to(self, server: grpc.aio.Server) -> None:
        add: Any = prefill_pb2_grpc.add_PrefillServicer_to_server
        add(self, server)


def _forget(tasks: dict[int, asyncio.Task[None]], key: int, task: asyncio.Task[None]) -> None:
    del tasks[key]


Events = asyncio.Queue[decode_pb2.DecodeEvent | None]


@dataclass(eq=False)
class _Leg:
    """One request's reservation at the fake decode worker, with its outputs so far."""

    reserve: decode_pb2.ReserveDecode
    table: dict[int, _Leg]
    """Reservations of its stream, by key."""
    key: int
    events: Events
    task: asyncio.Task[None] | None = None
    outputs: list[list[int]] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    """Indices of the samples that are not finished."""
    num_blocks: int = 0
    is_generating: bool = False
    is_alone: bool = False
    """Whether this worker computes the prompt itself."""


class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServicer):
    """A fake decode worker. Invariant: `num_open` reservations are without a final event."""

    role = "decode"

    def __init__(self, worker_id: str, model: FakeServedModel) -> None:
        super().__init__(worker_id, model)
        self.read_gate = Gate()
        """Holds a command before it is processed."""
        self.reserve_gate = Gate()
        """Holds a reservation before it is answered."""
        self.place_gate = Gate()
        """Holds a reservation that has its blocks. While the gate is closed, the request is
        reported as queued.
        """
        self.token_gate = Gate()
        """Holds a request before each token."""
        self.pause_at: int | None = None
        """Output position at which the token gate closes by itself; None: never."""
        self.error: BatonError | None = None
        """Error that answers reservations."""
        self.num_tokens_local = 0
        """Prompt tokens that it reports as cached, for each request."""
        self.num_free_places: int | None = None
        """Free places that it reports; None: it reports none."""
        self.most_taken = 0
        """Largest number of blocks that were reserved at one time."""
        self.generated: list[decode_pb2.GenerateFromHandle] = []
        self.prefetched: list[tuple[str, common_pb2.KvHandle]] = []
        """Request id and partial handle of each prefetch, in order."""
        self.traceparents: list[str] = []
        """Traceparent of each reservation, in order."""
        self.num_misplaced = 0
        """Number of prefetches for a key that generates, or that the router has cancelled."""
        self.moved: list[decode_pb2.DecodeMoved] = []
        """DecodeMoved events that it sent."""
        self.store_address = ""
        """Store whose leases the handles of moved requests name; empty: none."""
        self.num_reserved = 0
        self.num_refused = 0
        self.num_cancelled = 0
        self.num_samples_cancelled = 0
        self.num_streams = 0
        self.num_open = 0
        self._legs: list[_Leg] = []
        self.idle = asyncio.Event()
        self.idle.set()

    @property
    def num_generating(self) -> int:
        """Number of requests that generate, of all routers."""
        return sum(leg.is_generating for leg in self._legs)

    @property
    def num_drawn(self) -> dict[int, int]:
        """Number of tokens of each unfinished sample; there must be exactly one request."""
        (leg,) = self._legs
        return {index: len(leg.outputs[index]) for index in leg.open}

    def move_all(self, *, with_handles: bool = True, num_lost: int = 0, **handle: int) -> None:
        """Drain as a real worker does: move the generating requests, fail the other reservations,
        accept nothing new.

        Args:
            with_handles: whether moved requests carry a KV handle.
            num_lost: tokens that each output reports beyond those sent.
            handle: fields of the handles to overwrite with wrong values.
        """
        self.is_draining = True
        self.error = Unavailable(f"{self.worker_id} is leaving", retry_after_s=0.0)
        for leg in list(self._legs):
            self._end(leg.table, leg.key)
            if leg.is_generating:
                moved = self._moved(leg, with_handle=with_handles, num_lost=num_lost)
                for name, value in handle.items():
                    setattr(moved.handle, name, value)
                self.moved.append(moved)
                leg.events.put_nowait(decode_pb2.DecodeEvent(key=leg.key, moved=moved))
            else:
                failed = _failed(self.error)
                leg.events.put_nowait(decode_pb2.DecodeEvent(key=leg.key, failed=failed))

    def fail_all(self) -> None:
        """Fail all its reservations with `error`."""
        assert self.error is not None
        for leg in list(self._legs):
            self._end(leg.table, leg.key)
            failed = decode_pb2.DecodeEvent(key=leg.key, failed=_failed(self.error))
            leg.events.put_nowait(failed)

    def _moved(self, leg: _Leg, *, with_handle: bool, num_lost: int) -> decode_pb2.DecodeMoved:
        num_prompt_tokens = len(leg.reserve.prompt_token_ids)
        moved = decode_pb2.DecodeMoved(
            num_output_tokens=[len(output) + num_lost for output in leg.outputs],
            leg=self.leg(num_prompt_tokens, is_computed=leg.is_alone),
            times=[common_pb2.StageTime(stage="decode", seconds=1e-6)],
            reason="draining",
        )
        if with_handle and len(leg.outputs) == 1:
            moved.handle.request_id = leg.reserve.request_id
            moved.handle.num_tokens = num_prompt_tokens + len(leg.outputs[0]) - 1
            moved.handle.nonce = os.urandom(16)
            if self.store_address:
                moved.handle.runs.add(store_address=self.store_address, lease_id="lease-moved")
        return moved

    def _blocks_for(self, reserve: decode_pb2.ReserveDecode) -> int:
        tokens = len(reserve.prompt_token_ids) + reserve.sampling.max_tokens - 1
        return -(-tokens // self.model.block_size)

    @rpc.streaming
    async def Stream(
        self, commands: AsyncIterator[decode_pb2.DecodeCommand], context: Context
    ) -> AsyncGenerator[decode_pb2.DecodeEvents, None]:
        events: Events = asyncio.Queue()
        legs: dict[int, _Leg] = {}
        self.num_streams += 1
        reader = asyncio.create_task(self._obey(commands, legs, events))
        try:
            while (event := await events.get()) is not None:
                yield decode_pb2.DecodeEvents(
                    events=[event],
                    num_free_blocks=self.num_free_blocks,
                    num_running=self.num_generating,
                    num_free_places=self.num_free_places,
                )
        finally:
            self.num_streams -= 1
            reader.cancel()
            for key in list(legs):
                self._end(legs, key)

    def status(self) -> common_pb2.WorkerStatus:
        status = super().status()
        if self.num_free_places is not None:
            status.num_free_places = self.num_free_places
        return status

    async def GetWorkerStatus(
        self, request: common_pb2.GetWorkerStatusRequest, context: Context
    ) -> common_pb2.WorkerStatus:
        await self.status_gate.passed()
        return self.status()

    async def _obey(
        self,
        commands: AsyncIterator[decode_pb2.DecodeCommand],
        legs: dict[int, _Leg],
        events: Events,
    ) -> None:
        cancelled: set[int] = set()
        async for command in commands:
            await self.read_gate.passed()
            key, kind = command.key, command.WhichOneof("command")
            if kind == "prefetch":
                self._prefetch(command, legs.get(key), was_cancelled=key in cancelled)
            elif kind == "reserve":
                self.traceparents.append(command.reserve.traceparent)
                legs[key] = _Leg(command.reserve, legs, key, events)
                self._legs.append(legs[key])
                self.num_open += 1
                self.idle.clear()
                legs[key].task = asyncio.create_task(self._reserve(legs, key, events))
            elif key not in legs:
                continue  # its final event was sent
            elif kind == "generate":
                self.generated.append(command.generate)
                _take_over(legs[key], command.generate)
                legs[key].task = asyncio.create_task(self._generate(legs, key, events))
            elif kind == "cancel_sample":
                self.num_samples_cancelled += 1
                legs[key].open.discard(command.cancel_sample.sample_index)
                if not legs[key].open:
                    self._cancel(legs, key, events)
            elif kind == "cancel":
                self.num_cancelled += 1
                cancelled.add(key)
                self._cancel(legs, key, events)
        events.put_nowait(None)

    def _prefetch(
        self, command: decode_pb2.DecodeCommand, leg: _Leg | None, *, was_cancelled: bool
    ) -> None:
        # Not counted: a prefetch that crossed this worker's final event for its key.
        if was_cancelled or (leg is not None and leg.outputs):
            self.num_misplaced += 1
        elif leg is not None:
            self.prefetched.append((leg.reserve.request_id, command.prefetch.handle))

    def _cancel(
        self,
        legs: dict[int, _Leg],
        key: int,
        events: Events,
    ) -> None:
        leg = self._end(legs, key)
        finished = decode_pb2.DecodeFinished(
            finish_reason=common_pb2.FINISH_REASON_CANCELLED,
            leg=self.leg(len(leg.reserve.prompt_token_ids), is_computed=False),
        )
        events.put_nowait(decode_pb2.DecodeEvent(key=key, finished=finished))

    async def _reserve(
        self,
        legs: dict[int, _Leg],
        key: int,
        events: Events,
    ) -> None:
        await self.reserve_gate.passed()
        leg, error = legs[key], self.error
        num_blocks = self._blocks_for(leg.reserve)
        if error is None and num_blocks > self.num_free_blocks:
            error = NoCapacity("no room for so many blocks")
        if error is None:
            self.num_reserved += 1
            leg.num_blocks = num_blocks
            self.num_blocks_taken += num_blocks
            self.most_taken = max(self.most_taken, self.num_blocks_taken)
            if not self.place_gate.is_open:
                queued = decode_pb2.DecodeQueued()
                events.put_nowait(decode_pb2.DecodeEvent(key=key, queued=queued))
            await self.place_gate.passed()
            reserved = decode_pb2.DecodeReserved(num_tokens_local=self.num_tokens_local)
            events.put_nowait(decode_pb2.DecodeEvent(key=key, reserved=reserved))
            return
        self.num_refused += 1
        self._end(legs, key, by_itself=True)
        events.put_nowait(decode_pb2.DecodeEvent(key=key, failed=_failed(error)))

    async def _generate(
        self,
        legs: dict[int, _Leg],
        key: int,
        events: Events,
    ) -> None:
        leg = legs[key]
        leg.is_generating = True
        while True:
            if max(map(len, leg.outputs)) == self.pause_at:
                self.token_gate.close()
            await self.token_gate.passed()
            for index in sorted(leg.open):
                tokens = self._draw(leg, index)
                if leg.open:
                    events.put_nowait(decode_pb2.DecodeEvent(key=key, tokens=tokens))
                    continue
                finished = decode_pb2.DecodeFinished(
                    sample_index=index,
                    token_ids=tokens.token_ids,
                    logprobs=tokens.logprobs,
                    finish_reason=tokens.finish_reason,
                    leg=self.leg(
                        len(leg.reserve.prompt_token_ids),
                        is_computed=leg.is_alone,
                        num_local=self.num_tokens_local,
                    ),
                    times=[common_pb2.StageTime(stage="decode", seconds=1e-6)],
                )
                if tokens.HasField("stop_token_id"):
                    finished.stop_token_id = tokens.stop_token_id
                self._end(legs, key, by_itself=True)
                events.put_nowait(decode_pb2.DecodeEvent(key=key, finished=finished))
                return
            await asyncio.sleep(0)

    def _draw(self, leg: _Leg, index: int) -> decode_pb2.DecodeTokens:
        """Generate one token of one sample, which may finish the sample."""
        output, params = leg.outputs[index], leg.reserve.sampling
        token_id = self.model.token(leg.reserve.prompt_token_ids, params, len(output), index)
        output.append(token_id)
        reason = self.model.reason(token_id, params, len(output))
        tokens = decode_pb2.DecodeTokens(
            sample_index=index,
            token_ids=[token_id],
            logprobs=logprobs([token_id], params),
            finish_reason=reason,
        )
        if reason in (common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN):
            tokens.stop_token_id = token_id
        if reason:
            leg.open.discard(index)
        return tokens

    def _end(self, legs: dict[int, _Leg], key: int, *, by_itself: bool = False) -> _Leg:
        leg = legs.pop(key)
        self.num_blocks_taken -= leg.num_blocks
        self._legs.remove(leg)
        if leg.task is not None and not by_itself:
            leg.task.cancel()
        self.num_open -= 1
        if not self.num_open:
            self.idle.set()
        return leg

    def _add_to(self, server: grpc.aio.Server) -> None:
        add: Any = decode_pb2_grpc.add_DecodeServicer_to_server
        add(self, server)


def _failed(error: BatonError) -> decode_pb2.DecodeFailed:
    code, message = rpc.status_of(error)
    return decode_pb2.DecodeFailed(
        code=rpc.code_number(code), message=message, retry_after_s=error.retry_after_s
    )


def _take_over(leg: _Leg, command: decode_pb2.GenerateFromHandle) -> None:
    """Set the reservation's outputs so far, its unfinished samples, and whether this worker
    computes the prompt.
    """
    leg.is_alone = command.computes_prompt
    if not command.outputs:
        leg.outputs, leg.open = [list(command.output_token_ids)], {0}
        return
    leg.outputs = [list(output.token_ids) for output in command.outputs]
    leg.open = {index for index, output in enumerate(command.outputs) if not output.is_over}
