"""Prefill and decode workers without a model: real gRPC servicers that draw tokens from a hash.

For tests and demonstrations of the router. They keep the promises of real workers: each reservation
ends with exactly one last word, a broken stream cancels what came over it, a cancel is answered.
`Gate`s hold a request in a state for as long as a test wants. The tokens depend on (seed, prompt,
position) only, so both fakes go on from each other. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from google.protobuf import json_format

from process import incarnation, serving
from process.errors import BatonError
from protos import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class FakeModel:
    """What a fake worker pretends to run."""

    name: str = "fake"
    tokenizer_digest: str = "00" * 32
    fingerprint: str = "ab" * 32
    alphabet: tuple[int, ...] = tuple(range(97, 123))
    """Ids it draws from."""
    eos_token_id: int = 0
    eos_at: int | None = None
    """Output position at which EOS is drawn."""
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
        """The output token at `position` (0 is the first) of one sample."""
        if position == self.eos_at and not params.ignore_eos:
            return self.eos_token_id
        seed = repr((params.seed, tuple(prompt), position, sample_index)).encode()
        number = int.from_bytes(hashlib.blake2b(seed, digest_size=8).digest(), "little")
        return self.alphabet[number % len(self.alphabet)]

    def reason(
        self, token_id: int, params: common_pb2.SamplingParams, num_output_tokens: int
    ) -> common_pb2.FinishReason:
        """Why the answer ends with `token_id`, its `num_output_tokens`-th; UNSPECIFIED: it does
        not.
        """
        if token_id == self.eos_token_id and not params.ignore_eos:
            return common_pb2.FINISH_REASON_EOS
        if token_id in params.stop_token_ids:
            return common_pb2.FINISH_REASON_STOP_TOKEN
        if num_output_tokens >= params.max_tokens:
            return common_pb2.FINISH_REASON_LENGTH
        return common_pb2.FINISH_REASON_UNSPECIFIED


class Gate:
    """A point that requests pass; closed, it holds them. `reached` is set when one arrives."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()

    def close(self) -> None:
        """Hold whoever comes from now on."""
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        """Let all pass."""
        self._open.set()

    async def passed(self) -> None:
        """Arrive, and go on when the gate is open."""
        self.reached.set()
        await self._open.wait()


class FakeWorker:
    """What both roles share: an address, a life, a status."""

    role = ""

    def __init__(self, worker_id: str, model: FakeModel) -> None:
        self.worker_id = worker_id
        self.model = model
        self.incarnation = incarnation.new().hex()
        self.address = ""
        self.is_draining = False
        self.store_node_id = ""
        self.adapters: dict[str, str] = {}
        """Digest of each adapter that it says to have, by name."""
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listen on a free port of loopback."""
        self._server, self.address = await serving.listen("127.0.0.1:0", [self._add_to])

    async def stop(self) -> None:
        """Vanish at once, as a killed process does."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def status(self) -> common_pb2.WorkerStatus:
        """What a real worker's heartbeat says."""
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
            num_blocks=1000,
            num_free_blocks=1000,
            context_window=model.context_window,
            vocab_size=model.vocab_size,
            store_node_id=self.store_node_id,
            draining=self.is_draining,
            adapters=[
                common_pb2.AdapterStatus(name=name, digest=digest)
                for name, digest in self.adapters.items()
            ],
        )

    async def register(self, client: Any, *, ttl_ms: int = 60_000) -> None:
        """Write entry and heartbeat with a Redis `client`, once."""
        entry = json_format.MessageToJson(self.status(), indent=None)
        await client.hset("baton:workers", self.worker_id, entry)
        await client.set(f"baton:worker:{self.worker_id}:beat", self.incarnation, px=ttl_ms)

    def leg(self, num_tokens: int, *, is_computed: bool) -> common_pb2.KvLeg:
        """An account: all computed here, or all from the store."""
        leg = common_pb2.KvLeg(
            role=self.role,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            transport="shm",
            dtype="float32",
        )
        if is_computed:
            leg.num_tokens_computed = num_tokens
        else:
            leg.from_store.add(tier=common_pb2.TIER_HOST, node_id="fake", num_tokens=num_tokens)
        return leg

    def _add_to(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError


class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServicer):
    """A prefill worker."""

    role = "prefill"

    def __init__(self, worker_id: str, model: FakeModel) -> None:
        super().__init__(worker_id, model)
        self.gate = Gate()
        """Before the first token."""
        self.account_gate = Gate()
        """Between the token and the account."""
        self.end_gate = Gate()
        """Between the account and the end of the call."""
        self.account_error: BatonError | None = None
        """Raised instead of the account."""
        self.error: BatonError | None = None
        """Raised instead of an answer, or behind `error_after` first tokens of it."""
        self.error_after = 0
        self.store_address = ""
        """Store that its handles say to hold leases of."""
        self.requests: list[prefill_pb2.PrefillRequest] = []
        self.num_active = 0
        self.num_cancelled = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @serving.unary
    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Context) -> None:
        self.requests.append(request)
        self.num_active += 1
        self.idle.clear()
        try:
            await self.gate.passed()
            firsts = [self._first(request, index) for index in range(request.sampling.n or 1)]
            for index, first in enumerate(firsts):
                if self.error is not None and index == self.error_after:
                    raise self.error
                await context.write(first)
            await self.account_gate.passed()
            if self.account_error is not None:
                raise self.account_error
            is_over = all(first.finish_reason for first in firsts)
            await context.write(self._last(request, is_over=is_over))
            await self.end_gate.passed()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_active -= 1
            if not self.num_active:
                self.idle.set()

    async def GetWorkerStatus(
        self, request: common_pb2.GetWorkerStatusRequest, context: Context
    ) -> common_pb2.WorkerStatus:
        return self.status()

    def _first(
        self, request: prefill_pb2.PrefillRequest, sample_index: int
    ) -> prefill_pb2.PrefillReply:
        token_id = self.model.token(request.prompt_token_ids, request.sampling, 0, sample_index)
        reason = self.model.reason(token_id, request.sampling, 1)
        reply = prefill_pb2.PrefillReply(
            sample_index=sample_index,
            token_ids=[token_id],
            logprobs=_logprobs([token_id], request.sampling),
            finish_reason=reason,
        )
        if reason in (common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN):
            reply.stop_token_id = token_id
        return reply

    def _last(
        self, request: prefill_pb2.PrefillRequest, *, is_over: bool
    ) -> prefill_pb2.PrefillReply:
        reply = prefill_pb2.PrefillReply(
            leg=self.leg(len(request.prompt_token_ids), is_computed=True),
            times=[common_pb2.StageTime(stage="prefill_compute", seconds=1e-6)],
        )
        if request.wants_handle and not is_over:
            reply.handle.request_id = request.request_id
            reply.handle.num_tokens = len(request.prompt_token_ids)
            if self.store_address:
                reply.handle.runs.add(store_address=self.store_address, lease_id="lease-run")
                reply.handle.tail.store_address = self.store_address
                reply.handle.tail.lease_id = "lease-tail"
        return reply

    def _add_to(self, server: grpc.aio.Server) -> None:
        add: Any = prefill_pb2_grpc.add_PrefillServicer_to_server
        add(self, server)


@dataclass
class _Leg:
    reserve: decode_pb2.ReserveDecode
    task: asyncio.Task[None] | None = None
    outputs: list[list[int]] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    """Samples that go on."""


class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServicer):
    """A decode worker. Its law: `num_open` reservations have not had their last word."""

    role = "decode"

    def __init__(self, worker_id: str, model: FakeModel) -> None:
        super().__init__(worker_id, model)
        self.reserve_gate = Gate()
        """Before a reservation is answered."""
        self.token_gate = Gate()
        """Before each token."""
        self.pause_at: int | None = None
        """Output position at which the token gate closes by itself."""
        self.error: BatonError | None = None
        """Answers reservations instead of blocks."""
        self.generated: list[decode_pb2.GenerateFromHandle] = []
        self.num_reserved = 0
        self.num_refused = 0
        self.num_cancelled = 0
        self.num_samples_cancelled = 0
        self.num_streams = 0
        self.num_open = 0
        self.idle = asyncio.Event()
        self.idle.set()

    @serving.streaming
    async def Stream(
        self, commands: AsyncIterator[decode_pb2.DecodeCommand], context: Context
    ) -> AsyncIterator[decode_pb2.DecodeEvents]:
        events: asyncio.Queue[decode_pb2.DecodeEvent | None] = asyncio.Queue()
        legs: dict[int, _Leg] = {}
        self.num_streams += 1
        reader = asyncio.create_task(self._obey(commands, legs, events))
        try:
            while (event := await events.get()) is not None:
                yield decode_pb2.DecodeEvents(
                    events=[event], num_free_blocks=1000, num_running=len(legs)
                )
        finally:
            self.num_streams -= 1
            reader.cancel()
            for key in list(legs):
                self._end(legs, key)

    async def GetWorkerStatus(
        self, request: common_pb2.GetWorkerStatusRequest, context: Context
    ) -> common_pb2.WorkerStatus:
        return self.status()

    async def _obey(
        self,
        commands: AsyncIterator[decode_pb2.DecodeCommand],
        legs: dict[int, _Leg],
        events: asyncio.Queue[decode_pb2.DecodeEvent | None],
    ) -> None:
        async for command in commands:
            key, kind = command.key, command.WhichOneof("command")
            if kind == "reserve":
                legs[key] = _Leg(command.reserve)
                self.num_open += 1
                self.idle.clear()
                legs[key].task = asyncio.create_task(self._reserve(legs, key, events))
            elif key not in legs:
                continue  # its last word has been said
            elif kind == "generate":
                self.generated.append(command.generate)
                _take_over(legs[key], command.generate)
                legs[key].task = asyncio.create_task(self._generate(legs, key, events))
            elif kind == "cancel_sample":
                self.num_samples_cancelled += 1
                legs[key].open.discard(command.cancel_sample.sample_index)
                if not legs[key].open:
                    self._cancel(legs, key, events)
            else:
                self.num_cancelled += 1
                self._cancel(legs, key, events)
        events.put_nowait(None)

    def _cancel(
        self,
        legs: dict[int, _Leg],
        key: int,
        events: asyncio.Queue[decode_pb2.DecodeEvent | None],
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
        events: asyncio.Queue[decode_pb2.DecodeEvent | None],
    ) -> None:
        await self.reserve_gate.passed()
        if self.error is None:
            self.num_reserved += 1
            events.put_nowait(decode_pb2.DecodeEvent(key=key, reserved=decode_pb2.DecodeReserved()))
            return
        self.num_refused += 1
        code, message = serving.status_of(self.error)
        failed = decode_pb2.DecodeFailed(
            code=serving.code_number(code),
            message=message,
            retry_after_s=self.error.retry_after_s,
        )
        self._end(legs, key, by_itself=True)
        events.put_nowait(decode_pb2.DecodeEvent(key=key, failed=failed))

    async def _generate(
        self,
        legs: dict[int, _Leg],
        key: int,
        events: asyncio.Queue[decode_pb2.DecodeEvent | None],
    ) -> None:
        leg = legs[key]
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
                    leg=self.leg(len(leg.reserve.prompt_token_ids), is_computed=False),
                    times=[common_pb2.StageTime(stage="decode", seconds=1e-6)],
                )
                if tokens.HasField("stop_token_id"):
                    finished.stop_token_id = tokens.stop_token_id
                self._end(legs, key, by_itself=True)
                events.put_nowait(decode_pb2.DecodeEvent(key=key, finished=finished))
                return
            await asyncio.sleep(0)

    def _draw(self, leg: _Leg, index: int) -> decode_pb2.DecodeTokens:
        """One token of one sample, which may end with it."""
        output, params = leg.outputs[index], leg.reserve.sampling
        token_id = self.model.token(leg.reserve.prompt_token_ids, params, len(output), index)
        output.append(token_id)
        reason = self.model.reason(token_id, params, len(output))
        tokens = decode_pb2.DecodeTokens(
            sample_index=index,
            token_ids=[token_id],
            logprobs=_logprobs([token_id], params),
            finish_reason=reason,
        )
        if reason in (common_pb2.FINISH_REASON_EOS, common_pb2.FINISH_REASON_STOP_TOKEN):
            tokens.stop_token_id = token_id
        if reason:
            leg.open.discard(index)
        return tokens

    def _end(self, legs: dict[int, _Leg], key: int, *, by_itself: bool = False) -> _Leg:
        leg = legs.pop(key)
        if leg.task is not None and not by_itself:
            leg.task.cancel()
        self.num_open -= 1
        if not self.num_open:
            self.idle.set()
        return leg

    def _add_to(self, server: grpc.aio.Server) -> None:
        add: Any = decode_pb2_grpc.add_DecodeServicer_to_server
        add(self, server)


def _take_over(leg: _Leg, command: decode_pb2.GenerateFromHandle) -> None:
    """What was drawn already, and who goes on."""
    if not command.outputs:
        leg.outputs, leg.open = [list(command.output_token_ids)], {0}
        return
    leg.outputs = [list(output.token_ids) for output in command.outputs]
    leg.open = {index for index, output in enumerate(command.outputs) if not output.is_over}


def _logprobs(
    token_ids: Sequence[int], params: common_pb2.SamplingParams
) -> list[common_pb2.TokenLogprobs]:
    if not params.HasField("logprobs"):
        return []
    return [
        common_pb2.TokenLogprobs(
            chosen=common_pb2.TokenLogprob(token_id=token_id, logprob=-float(token_id))
        )
        for token_id in token_ids
    ]
