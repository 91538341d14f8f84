"""What a router adds: CPU and latency per token, tokens a second; beside a bare relay of one
multiplexed decode stream, in the same run.

    python -m benchmarks.router overhead --out benchmarks/results/<date>-router-overhead.json
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from process import entrypoint  # before gRPC; the children inherit what it sets

# isort: split
import click
import grpc.aio
import redis.asyncio
import uvloop

import checkpoints
from baton.cluster.local_cluster import find_redis_server
from benchmarks import harness
from benchmarks.harness import KeyedStream, Several, cpu_s
from process import grpc_server, rpc
from protos import common_pb2, decode_pb2, decode_pb2_grpc, inference_pb2
from services.router.testing.fake_workers import Context, FakePrefill, FakeServedModel, FakeWorker

MODEL = "baton-5m"
SERVICE = "baton.v1.Inference"
CLOCK_S = 8.0
"""Modulus of the send times that tokens carry: a float32 then resolves half a microsecond."""
TOKENS_PER_S = 2_000
"""Tokens a second of all streams of a paced run together: far below what any target can do."""
MOST_TOKENS_PER_S = 40_000
"""Tokens a second of a saturated run: more than any target takes."""
PROMPT_TOKENS = 64
_FEW = 3

# -- fake workers that answer at once over the real wire, and the relay


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
    """A fake decode worker that works in steps: one token for each running request in one
    message."""

    role = "decode"

    @rpc.streaming
    async def Stream(
        self, commands: AsyncIterator[decode_pb2.DecodeCommand], context: Context
    ) -> AsyncGenerator[decode_pb2.DecodeEvents, None]:
        legs: dict[int, _Leg] = {}
        outgoing: list[decode_pb2.DecodeEvent] = []
        changed = asyncio.Event()
        reader = asyncio.create_task(self._handle(commands, legs, outgoing, changed))
        due_s = 0.0
        try:
            while True:
                running = [(key, leg) for key, leg in legs.items() if leg.is_running]
                if not (running or outgoing):
                    changed.clear()
                    await changed.wait()
                    continue
                now_s = time.monotonic()
                events, outgoing[:] = list(outgoing), []
                if running and now_s >= due_s:
                    due_s = max(due_s + running[0][1].step_s, now_s)
                    events += [self._step(legs, key, leg) for key, leg in running]
                if events:
                    yield decode_pb2.DecodeEvents(events=events, num_free_blocks=10**6)
                    await asyncio.sleep(0)
                else:
                    changed.clear()
                    await _wait(changed, due_s - now_s)
        finally:
            reader.cancel()

    async def GetWorkerStatus(
        self, request: common_pb2.GetWorkerStatusRequest, context: Context
    ) -> common_pb2.WorkerStatus:
        return self.status()

    async def _handle(
        self,
        commands: AsyncIterator[decode_pb2.DecodeCommand],
        legs: dict[int, _Leg],
        outgoing: list[decode_pb2.DecodeEvent],
        changed: asyncio.Event,
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
                outgoing.append(decode_pb2.DecodeEvent(key=key, reserved=reserved))
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
                outgoing.append(decode_pb2.DecodeEvent(key=key, finished=finished))
            changed.set()

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
    """The least that a router does: requests onto one decode stream, tokens off it."""

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
        """Hand the events of the decode stream to their requests, until the stream ends."""
        while (message := await self._call.read()) is not grpc.aio.EOF:
            for event in message.events:
                self._queues[event.key].put_nowait(event)

    async def generate(self, data: bytes, context: Context) -> None:
        """Serve one request."""
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
    model = FakeServedModel(
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
        await worker.register(client, ttl_ms=3_600_000)
    await client.aclose()
    _ready(decode.address)
    await asyncio.Event().wait()


async def _relay(decode_address: str) -> None:
    relay = Relay(decode_address)
    reader = asyncio.create_task(relay.read())
    _, address = await grpc_server.listen("127.0.0.1:0", [relay.add_to])
    _ready(address)
    await reader


def _ready(*addresses: str) -> None:
    print("ready", *addresses, flush=True)  # noqa: T201


@click.command("workers", hidden=True)
@click.argument("redis_url")
@click.argument("model")
def workers(redis_url: str, model: str) -> None:
    """A prefill and a decode worker that answer at once, one message a step for all requests as the
    real ones. A request's seed says how long its steps take (microseconds), its top_k how many
    begin to decode together; with logprobs each token says when it was sent."""
    uvloop.run(_workers(redis_url, model))


@click.command("relay", hidden=True)
@click.argument("decode_address")
def relay(decode_address: str) -> None:
    """What no router can be less than: requests onto one decode stream, tokens off it, one message
    a token; no text, no choice, no account."""
    uvloop.run(_relay(decode_address))


# -- clients: each way yields how many tokens a message had, and how long ago the worker sent it

Messages = AsyncIterator[tuple[int, float]]
"""The messages of one stream: (tokens, seconds from the worker's send to here; NaN: not known)."""
Ask = Callable[[int, float, bool, int], Messages]
"""A function that serves one stream of (tokens, seconds of a step, whether send times are wanted,
how many begin together)."""


def through(address: str) -> Ask:
    """Make an `Ask` that calls Generate of a router, or of the relay."""
    channel = rpc.channel(address)
    generate: Any = channel.unary_stream(f"/{SERVICE}/Generate")

    async def ask(num_tokens: int, step_s: float, has_times: bool, group: int) -> Messages:
        request = a_request(num_tokens, step_s, has_times, group)
        call = generate(request.SerializeToString())
        while (data := await call.read()) is not grpc.aio.EOF:
            message = inference_pb2.GenerateResponse.FromString(data)
            sent_s = message.logprobs[0].chosen.logprob if message.logprobs else -1.0
            yield len(message.token_ids), since(sent_s) if has_times else float("nan")

    return ask


def direct(address: str) -> Ask:
    """Make an `Ask` over the decode worker's own stream, all requests over one, as a router has
    it."""
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
            sent_s = part.logprobs[0].chosen.logprob if part.logprobs else -1.0
            yield len(part.token_ids), since(sent_s, came_s)
            if event.HasField("finished"):
                stream.close(key)
                return

    return ask


def a_request(
    num_tokens: int, step_s: float, has_times: bool, group: int
) -> inference_pb2.GenerateRequest:
    """Make a request for the fake workers: the seed says the step, logprobs that send times are
    wanted."""
    request = inference_pb2.GenerateRequest()
    request.token_ids.ids.extend(range(300, 300 + PROMPT_TOKENS))
    request.sampling.max_tokens = num_tokens
    request.sampling.seed = int(step_s * 1e6)
    request.sampling.top_k = group
    if has_times:
        request.sampling.logprobs = 0
    return request


def since(sent_s: float, now_s: float | None = None) -> float:
    """Seconds since a token was sent; NaN for one that the prefill worker sampled."""
    if sent_s < 0:
        return float("nan")
    now_s = time.monotonic() if now_s is None else now_s
    passed_s = (now_s - sent_s) % CLOCK_S
    return passed_s if passed_s < CLOCK_S - 1 else 0.0


# -- one run of several streams


@dataclass
class Run:
    """The figures of one run of several streams, while all of them were under way: from the moment
    when each has a few tokens until the first one ends."""

    pid: int
    num_tokens: int = 0
    num_messages: int = 0
    transits_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    is_steady: bool = False

    def begin(self) -> None:
        """Begin to count: all streams are under way."""
        self.is_steady = True
        self.cpu_s, self.wall_s = -cpu_s(self.pid), -time.monotonic()

    def end(self) -> None:
        """Stop counting: the first stream ends."""
        self.is_steady = False
        self.cpu_s += cpu_s(self.pid)
        self.wall_s += time.monotonic()

    def take(self, count: int, transit_s: float) -> None:
        """Count a message of a stream."""
        if not self.is_steady:
            return
        self.num_tokens += count
        self.num_messages += 1
        if transit_s == transit_s:
            self.transits_s.append(transit_s)

    def figures(self, *, is_paced: bool) -> dict[str, float]:
        """The figures of the run that are published."""
        figures = {
            "tokens_per_s": round(self.num_tokens / self.wall_s),
            "tokens_per_message": round(self.num_tokens / self.num_messages, 2),
            "cpu_us_per_token": round(self.cpu_s / self.num_tokens * 1e6, 1),
            "num_tokens": self.num_tokens,
        }
        if is_paced:
            cuts = statistics.quantiles(self.transits_s, n=100)
            figures |= {
                "transit_p50_ms": round(cuts[49] * 1e3, 3),
                "transit_p99_ms": round(cuts[98] * 1e3, 3),
            }
        return figures


async def run_streams(
    ask: Ask, pid: int, *, num_streams: int, num_tokens: int, step_s: float, has_times: bool
) -> Run:
    """Send `num_streams` requests at the same time and measure them; the CPU is that of process
    `pid`. Raises: RuntimeError when they were never all under way."""
    run, num_started, is_over = Run(pid), 0, False

    async def one() -> None:
        nonlocal num_started, is_over
        num_messages = 0
        async for count, transit_s in ask(num_tokens, step_s, has_times, num_streams):
            num_messages += 1
            run.take(count, transit_s)
            if num_messages == _FEW:
                num_started += 1
                if num_started == num_streams and not is_over:
                    run.begin()
        if run.is_steady:
            run.end()
        is_over = True

    async with asyncio.TaskGroup() as group:
        for _ in range(num_streams):
            group.create_task(one())
    if not run.num_tokens:
        raise RuntimeError(f"{num_streams} streams of {num_tokens} tokens never ran together")
    return run


async def measure(
    stack: ExitStack, redis_url: str, streams: Sequence[int], seconds: float
) -> dict[str, Any]:
    """Measure all runs."""
    of_workers, (decode,) = _peer(stack, "workers", redis_url, MODEL)
    of_relay, (relay_address,) = _peer(stack, "relay", decode)
    settings: dict[str, Any] = {
        "redis_url": redis_url,
        "model": MODEL,
        "listen": "127.0.0.1:0",
        "admission__max_queued_requests": 4096,
        "admission__max_queued_per_tenant": 4096,
    }
    of_router, ready = stack.enter_context(harness.service("services.router", **settings))
    await _until_served(ready["address"])
    targets: dict[str, tuple[Ask, int]] = {
        "direct": (direct(decode), of_workers),
        "relay": (through(relay_address), of_relay),
        "router": (through(ready["address"]), of_router),
    }
    found = {f"streams_{num}": await measure_streams(targets, num, seconds) for num in streams}
    return {"grpc": entrypoint.grpc_experiments(), **found}


def _peer(stack: ExitStack, *arguments: str) -> tuple[int, list[str]]:
    """A process of this module. Returns: its process id, and the addresses of its ready line.
    Raises: RuntimeError when it ends instead."""
    argv = harness.module("benchmarks.router", *arguments)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process = stack.enter_context(harness.child(*argv, **pipes))
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready "):
            return process.pid, line.split()[1:]
    raise RuntimeError(f"{' '.join(arguments)}: the process ended early")


async def measure_streams(
    targets: dict[str, tuple[Ask, int]], num_streams: int, seconds: float
) -> dict[str, Any]:
    """Measure one number of streams, paced and saturated, each target in turn."""
    found: dict[str, Any] = {}
    step_s = num_streams / TOKENS_PER_S
    for name, (ask, pid) in targets.items():
        paced = await run_streams(
            ask,
            pid,
            num_streams=num_streams,
            num_tokens=10 + int(seconds / step_s),
            step_s=step_s,
            has_times=True,
        )
        found[name] = {"paced": paced.figures(is_paced=True)}
        if name == "direct":
            continue
        num_tokens = max(400, int(seconds * 10_000 / num_streams))
        full = await run_streams(
            ask,
            pid,
            num_streams=num_streams,
            num_tokens=num_tokens,
            step_s=num_streams / MOST_TOKENS_PER_S,
            has_times=False,
        )
        found[name]["saturated"] = full.figures(is_paced=False)
    for name in ("relay", "router"):
        mine, base = found[name]["paced"], found["direct"]["paced"]
        for quantile in ("p50", "p99"):
            key = f"transit_{quantile}_ms"
            found[name][f"added_{quantile}_ms"] = round(mine[key] - base[key], 3)
    of_both = [found[name]["saturated"]["tokens_per_s"] for name in ("router", "relay")]
    found["router"]["of_relay"] = round(of_both[0] / of_both[1], 3)
    return found


async def _until_served(router: str) -> None:
    """The router has seen the workers and is connected to them."""
    ask = through(router)
    for _ in range(100):
        try:
            async for _message in ask(3, 0.0, False, 0):
                pass
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.1)
        else:
            return
    raise RuntimeError("the router does not serve")


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for key, runs in result.items():
        for name in ("relay", "router") if key.startswith("streams_") else ():
            run, full = runs[name], runs[name]["saturated"]
            rows.append(
                {
                    "streams": key.removeprefix("streams_"),
                    "through": name,
                    "CPU us/token": run["paced"]["cpu_us_per_token"],
                    "added p50/p99 ms": f"{run['added_p50_ms']} / {run['added_p99_ms']}",
                    "tokens/s": full["tokens_per_s"],
                    "tokens/message": full["tokens_per_message"],
                    "of relay": run.get("of_relay", ""),
                }
            )
    return rows


@harness.case
@click.option("--streams", type=Several(int), default="32,256")
@click.option("--seconds", default=3.0, help="about, of each run")
def overhead(streams: Sequence[int], seconds: float) -> dict[str, Any]:
    """Microseconds of CPU and added latency per token, and tokens a second.

    Workers are fakes that answer at once over the real wire; the router is the real process with
    the bundled model's tokenizer. For each number of streams there are two runs: *paced* (steps of
    a fixed time, far below what any target can do: every token is a message of its own, so CPU per
    token and latency are comparable) and *saturated* (steps faster than any target follows: tokens
    a second; the router then merges what it cannot send in time, the relay does not). All requests
    are taken in before the first of them decodes, and only what comes while all of them do is
    counted. `direct` is the client on the decode stream itself: added latency is measured from
    there. The client is one process as well and shares the cores with all of them.
    """
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder, ExitStack() as stack:
        path = Path(folder) / "redis.sock"
        options = ("--port", "0", "--unixsocket", str(path), "--save", "", "--appendonly", "no")
        argv = (str(find_redis_server()), *options, "--dir", folder)
        stack.enter_context(harness.child(*argv, stdout=subprocess.DEVNULL))
        while not path.exists():
            time.sleep(0.01)
        result: dict[str, Any] = uvloop.run(measure(stack, f"unix://{path}", streams, seconds))
    harness.show("what a router adds", _rows(result))
    return result


main = harness.program(__doc__, overhead, workers, relay)

if __name__ == "__main__":
    main()
