"""What asks in benchmarks/router_overhead.py: a router or the relay over gRPC, a router over HTTP,
and the workers themselves. Each way yields the same: how many tokens a message had, and how long
ago the worker sent it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import grpc.aio
import msgspec

from benchmarks.keyed_stream import KeyedStream
from benchmarks.router_peers import CLOCK_S, SERVICE
from process import rpc
from protos import decode_pb2, decode_pb2_grpc, inference_pb2, prefill_pb2, prefill_pb2_grpc

PROMPT_TOKENS = 64
Messages = AsyncIterator[tuple[int, float]]
"""Of one stream: (tokens, seconds from the worker's send to here; NaN where it was not told)."""
Ask = Callable[[int, float, bool, int], Messages]
"""(tokens, seconds of a step, whether send times are told, how many begin together)."""


def over_grpc(address: str, metadata: Sequence[tuple[str, str]] = ()) -> Ask:
    """Generate of a router, or of the relay."""
    channel = rpc.channel(address)
    generate: Any = channel.unary_stream(f"/{SERVICE}/Generate")

    async def ask(num_tokens: int, step_s: float, has_times: bool, group: int) -> Messages:
        request = a_request(num_tokens, step_s, has_times, group)
        call = generate(request.SerializeToString(), metadata=metadata)
        while (data := await call.read()) is not grpc.aio.EOF:
            if has_times:
                message = inference_pb2.GenerateResponse.FromString(data)
                told = message.logprobs[0].chosen.logprob if message.logprobs else -1.0
                yield len(message.token_ids), since(told)
            else:  # its client's work is not what is measured
                yield _num_tokens(data), float("nan")

    return ask


def over_http(address: str, session: aiohttp.ClientSession) -> Ask:
    """/v1/completions as events."""
    decode = msgspec.json.Decoder()

    async def ask(num_tokens: int, step_s: float, has_times: bool, group: int) -> Messages:
        body = {
            "prompt": list(range(300, 300 + PROMPT_TOKENS)),
            "max_tokens": num_tokens,
            "seed": int(step_s * 1e6),
            "top_k": group,
            "stream": True,
            **({"logprobs": 0} if has_times else {"baton": {"token_ids": True}}),
        }
        async with session.post(f"http://{address}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(await response.text())
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                (choice,) = decode.decode(line[6:])["choices"]
                if not has_times:
                    yield len(choice["token_ids"]), float("nan")
                    continue
                told = choice["logprobs"]["token_logprobs"]
                yield len(told), since(told[0] if told else -1.0)

    return ask


def direct(address: str) -> Ask:
    """The decode worker's own stream, all requests over one, as a router has it."""
    kept: list[KeyedStream] = []

    async def ask(num_tokens: int, step_s: float, has_times: bool, group: int) -> Messages:
        if not kept:
            call = decode_pb2_grpc.DecodeStub(rpc.channel(address)).Stream()
            kept.append(KeyedStream(call, decode_pb2.DecodeCommand))
        (stream,) = kept
        key, events = stream.open()
        sampling = a_request(num_tokens, step_s, has_times, group).sampling
        await stream.send(key, reserve=decode_pb2.ReserveDecode(sampling=sampling))
        await events.get()
        await stream.send(key, generate=decode_pb2.GenerateFromHandle())
        while True:
            event, came_s = await events.get()
            part = event.tokens if event.HasField("tokens") else event.finished
            told = part.logprobs[0].chosen.logprob if part.logprobs else -1.0
            yield len(part.token_ids), since(told, came_s)
            if event.HasField("finished"):
                stream.close(key)
                return

    return ask


def first_of(address: str, prompt: Sequence[int]) -> Callable[[], Awaitable[float]]:
    """A prefill worker's own stream, as a router has it. What is returned yields the seconds to a
    prompt's first token."""
    call = prefill_pb2_grpc.PrefillStub(rpc.channel(address)).Stream()
    stream = KeyedStream(call, prefill_pb2.PrefillCommand)

    async def ask() -> float:
        asked = prefill_pb2.PrefillRequest(prompt_token_ids=prompt)
        asked.sampling.max_tokens, asked.sampling.n = 2, 1
        key, events = stream.open()
        began_s = time.monotonic()
        await stream.send(key, prefill=asked)
        _, came_s = await events.get()
        await events.get()  # the account
        stream.close(key)
        return came_s - began_s

    return ask


def _num_tokens(data: bytes) -> int:
    return len(inference_pb2.GenerateResponse.FromString(data).token_ids)


def a_request(
    num_tokens: int,
    step_s: float,
    has_times: bool,
    group: int = 0,
    prompt: str | Sequence[int] = (),
) -> inference_pb2.GenerateRequest:
    """Seed says the step, logprobs that send times are wanted."""
    request = inference_pb2.GenerateRequest()
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt or range(300, 300 + PROMPT_TOKENS))
    request.sampling.max_tokens = num_tokens
    request.sampling.seed = int(step_s * 1e6)
    request.sampling.top_k = group
    if has_times:
        request.sampling.logprobs = 0
    return request


def since(told: float, now_s: float | None = None) -> float:
    """Seconds since a token was sent; NaN for one that the prefill worker drew."""
    if told < 0:
        return float("nan")
    now_s = time.monotonic() if now_s is None else now_s
    passed_s = (now_s - told) % CLOCK_S
    return passed_s if passed_s < CLOCK_S - 1 else 0.0
