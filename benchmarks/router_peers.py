"""The processes around the router in benchmarks/router_overhead.py.

    python -m benchmarks.router_peers workers REDIS_URL MODEL
    python -m benchmarks.router_peers relay DECODE_ADDRESS

`workers`: a prefill and a decode worker that answer at once, over the real wire, one message a
step for all requests as the real ones. A request's seed says how long its steps take
(microseconds), its top_k how many begin to decode together; with logprobs each token says when
it was sent. `relay`: what no router can be less
than: requests onto one decode stream, tokens off it, one message a token; no text, no choice, no
account.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import redis.asyncio
import uvloop

import checkpoints
from process import grpc_server, rpc
from protos import common_pb2, decode_pb2, decode_pb2_grpc, inference_pb2
from services.router.fakes.model import FakeModel
from services.router.fakes.prefill import FakePrefill
from services.router.fakes.worker import Context, FakeWorker

CLOCK_S = 8.0
"""Send times are told modulo this: a float32 then resolves half a microsecond."""
SERVICE = "baton.v1.Inference"
_TTL_MS = 3_600_000


@dataclass
class _Leg:
    num_left: int
    step_s: float
    has_times: bool
    prompt: Any
    group: int
    """So many begin together."""
    is_waiting: bool = False
    is_running: bool = False


class SteppingDecode(FakeWorker, decode_pb2_grpc.DecodeServicer):
    """A decode worker of steps: one token for each running request in one message."""

    role = "decode"

    @rpc.streaming
    async def Stream(
        self, commands: AsyncIterator[decode_pb2.DecodeCommand], context: Context
    ) -> AsyncIterator[decode_pb2.DecodeEvents]:
        legs: dict[int, _Leg] = {}
        told: list[decode_pb2.DecodeEvent] = []
        woken = asyncio.Event()
        reader = asyncio.create_task(self._obey(commands, legs, told, woken))
        due_s = 0.0
        try:
            while True:
                running = [(key, leg) for key, leg in legs.items() if leg.is_running]
                if not (running or told):
                    woken.clear()
                    await woken.wait()
                    continue
                now_s = time.monotonic()
                events, told[:] = list(told), []
                if running and now_s >= due_s:
                    due_s = max(due_s + running[0][1].step_s, now_s)
                    events += [self._step(legs, key, leg) for key, leg in running]
                if events:
                    yield decode_pb2.DecodeEvents(events=events, num_free_blocks=10**6)
                    await asyncio.sleep(0)
                else:
                    woken.clear()
                    await _wait(woken, due_s - now_s)
        finally:
            reader.cancel()

    async def GetWorkerStatus(
        self, request: common_pb2.GetWorkerStatusRequest, context: Context
    ) -> common_pb2.WorkerStatus:
        return self.status()

    async def _obey(
        self,
        commands: AsyncIterator[decode_pb2.DecodeCommand],
        legs: dict[int, _Leg],
        told: list[decode_pb2.DecodeEvent],
        woken: asyncio.Event,
    ) -> None:
        async for command in commands:
            kind, key = command.WhichOneof("command"), command.key
            if kind == "reserve":
                sampling = command.reserve.sampling
                legs[key] = _Leg(
                    sampling.max_tokens - 1,
                    sampling.seed / 1e6,
                    sampling.HasField("logprobs"),
                    len(command.reserve.prompt_token_ids),
                    sampling.top_k,
                )
                reserved = decode_pb2.DecodeReserved()
                told.append(decode_pb2.DecodeEvent(key=key, reserved=reserved))
            elif kind == "generate" and key in legs:
                legs[key].is_waiting = True
                waiting = [leg for leg in legs.values() if leg.is_waiting]
                if len(waiting) >= legs[key].group:
                    for leg in waiting:
                        leg.is_waiting, leg.is_running = False, True
            elif kind == "cancel" and legs.pop(key, None) is not None:
                finished = decode_pb2.DecodeFinished(
                    finish_reason=common_pb2.FINISH_REASON_CANCELLED
                )
                told.append(decode_pb2.DecodeEvent(key=key, finished=finished))
            woken.set()

    def _step(self, legs: dict[int, _Leg], key: int, leg: _Leg) -> decode_pb2.DecodeEvent:
        leg.num_left -= 1
        token_id = self.model.alphabet[leg.num_left % len(self.model.alphabet)]
        entry = common_pb2.TokenLogprob(token_id=token_id, logprob=time.monotonic() % CLOCK_S)
        logprobs = [common_pb2.TokenLogprobs(chosen=entry)] if leg.has_times else []
        if leg.num_left:
            tokens = decode_pb2.DecodeTokens(token_ids=[token_id], logprobs=logprobs)
            return decode_pb2.DecodeEvent(key=key, tokens=tokens)
        del legs[key]
        finished = decode_pb2.DecodeFinished(
            token_ids=[token_id],
            logprobs=logprobs,
            finish_reason=common_pb2.FINISH_REASON_LENGTH,
            leg=self.leg(leg.prompt, is_computed=False),
        )
        return decode_pb2.DecodeEvent(key=key, finished=finished)

    def _add_to(self, server: grpc.aio.Server) -> None:
        add: Any = decode_pb2_grpc.add_DecodeServicer_to_server
        add(self, server)


class Relay:
    """Requests onto one decode stream, tokens off it."""

    def __init__(self, decode_address: str) -> None:
        self._channel = rpc.channel(decode_address)
        self._call: Any = decode_pb2_grpc.DecodeStub(self._channel).Stream()
        self._queues: dict[int, asyncio.Queue[decode_pb2.DecodeEvent]] = {}
        self._last_key = 0
        self._writing = asyncio.Lock()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve Generate as the router does: bytes in, bytes out."""
        handler: Any = grpc.unary_stream_rpc_method_handler(self.generate)
        server.add_registered_method_handlers(SERVICE, {"Generate": handler})

    async def read(self) -> None:
        """Hand events to their requests, until the stream ends."""
        while (message := await self._call.read()) is not grpc.aio.EOF:
            for event in message.events:
                self._queues[event.key].put_nowait(event)

    async def generate(self, data: bytes, context: Context) -> None:
        """One request."""
        request = inference_pb2.GenerateRequest.FromString(data)
        self._last_key += 1
        key = self._last_key
        queue = self._queues[key] = asyncio.Queue()
        reserve = decode_pb2.ReserveDecode(
            sampling=request.sampling, prompt_token_ids=request.token_ids.ids
        )
        async with self._writing:
            await self._call.write(decode_pb2.DecodeCommand(key=key, reserve=reserve))
        await queue.get()
        generate = decode_pb2.GenerateFromHandle()
        async with self._writing:
            await self._call.write(decode_pb2.DecodeCommand(key=key, generate=generate))
        while True:
            event = await queue.get()
            part = event.tokens if event.HasField("tokens") else event.finished
            message = inference_pb2.GenerateResponse(
                token_ids=part.token_ids, logprobs=part.logprobs
            )
            await context.write(message.SerializeToString())
            if event.HasField("finished"):
                del self._queues[key]
                return


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        pass


async def _workers(redis_url: str, name: str) -> None:
    checkpoint = checkpoints.resolve(name, files="tokenizer")
    model = FakeModel(
        name=checkpoint.name,
        tokenizer_digest=checkpoints.tokenizer_digest(checkpoint.path),
        alphabet=tuple(range(300, 900)),  # words and parts of words
        eos_token_id=1,
        context_window=16_384,
        vocab_size=2048,
    )
    prefill, decode = FakePrefill("p0", model), SteppingDecode("d0", model)
    client = redis.asyncio.from_url(redis_url)
    for worker in (prefill, decode):
        worker.num_blocks = 10**6
        await worker.start()
        await worker.register(client, ttl_ms=_TTL_MS)
    await client.aclose()
    _say(f"{decode.address} {prefill.address}")
    await asyncio.Event().wait()


async def _relay(decode_address: str) -> None:
    relay = Relay(decode_address)
    reader = asyncio.create_task(relay.read())
    _, address = await grpc_server.listen("127.0.0.1:0", [relay.add_to])
    _say(address)
    await reader


def _say(line: str) -> None:
    sys.stdout.write(f"ready {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    uvloop.run({"workers": _workers, "relay": _relay}[role](*arguments))
