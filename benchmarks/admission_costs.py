"""What letting a long prompt in costs a worker that decodes, of the host.

No GPU is needed.

    python -m benchmarks.admission_costs admission
    OMP_NUM_THREADS=1 python -m benchmarks.admission_costs joining --walk-mib 32
    python -m benchmarks.admission_costs switch-interval

Each case prints one JSON object as its last line.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import select
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
import uvloop

from benchmarks import harness
from benchmarks.harness import KeyedStream, block_hash
from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.models.interface import DecodeRow, Launch, MixedRow, Progress
from engine.request import Request, Sampling
from engine.sampling.metadata import SamplerOutput, SamplingRequest, metadata_of
from engine.testing.fake_model import FakeModel
from kvstore import store_process
from kvstore.config import KvStoreSettings
from process import entrypoint, rpc, signing_keys
from protos import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from services.decode.role import DecodeRole
from services.prefill.role import PrefillRole
from services.worker.config import WorkerSettings
from services.worker.server import start as start_worker
from tools.step_log import LoggedSpan

BLOCK_SIZE = 16

# -- one request joins those that decode

T = TypeVar("T")

NUM_BEFORE = 3
"""Number of steps between `reserve` and `start`, while the cache would be on its way."""
_STREAM_TOKENS = 256
_VOCAB_SIZE = 4096


class _ZeroCostModel(FakeModel):
    """A model whose answer is there already: the same rows of logits for every step."""

    def __init__(self, num_rows: int, context_window: int) -> None:
        super().__init__(
            vocab_size=_VOCAB_SIZE, context_window=context_window, block_size=BLOCK_SIZE
        )
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(num_rows, _VOCAB_SIZE, generator=generator)

    def forward(self, batch: Batch) -> torch.Tensor:
        """The first rows, as many as are wanted."""
        return self.rows[: len(batch.draw_indices)]


class _ZeroCostAhead:
    """Launches whose draws are there already; `read_s` is when the last one was read."""

    max_rows = 1 << 16
    takes_prompts = True
    read_s = 0.0

    def warm_up(self, progress: Progress | None = None) -> None:
        """Do nothing: there is nothing to compile."""

    def takes(self, draw: SamplingRequest) -> bool:
        """Whether a step with this sampling can be launched ahead: greedy ones can. A real runner
        must look at that, too."""
        return metadata_of(draw.sampling).is_plain

    def launch(self, rows: Sequence[DecodeRow]) -> Launch:
        """Any token will do."""
        return [SamplerOutput(1)] * len(rows)

    def launch_mixed(self, rows: Sequence[MixedRow]) -> Launch:
        """Any token will do for each row that samples."""
        return [SamplerOutput(1) for row in rows if row.draw is not None]

    def read(self, launch: Any) -> list[SamplerOutput]:
        """The tokens that `launch` gave."""
        self.read_s = time.perf_counter()
        drawn: list[SamplerOutput] = launch
        return drawn

    def drain(self) -> None:
        """Nothing is under way."""


class Joining:
    """An engine that decodes, and the microseconds that its thread took by stretch."""

    def __init__(
        self, streams: int, prompt_tokens: int, every: int, joins: int, room: int, walk_mib: int
    ) -> None:
        self.us: dict[str, list[float]] = {}
        self._rng = random.Random(0)
        self._num_prompt, self._every = prompt_tokens, every
        self._walked = bytearray(walk_mib << 20)
        num_steps = (every + NUM_BEFORE + 8) * (joins + 2)
        num_tokens = _STREAM_TOKENS + num_steps
        num_blocks = streams * (num_tokens // BLOCK_SIZE + 2)
        num_blocks += room * (prompt_tokens // BLOCK_SIZE + 1)
        window = max(num_tokens, prompt_tokens) + BLOCK_SIZE
        model = _ZeroCostModel(streams + 1, window)
        model.ahead = self._ahead = _ZeroCostAhead()
        config = EngineConfig(num_blocks=num_blocks, max_num_tokens_per_step=window)
        self._engine = LLMEngine(config, model)
        for number in range(streams):
            self._engine.submit(self._request(f"stream {number}", _STREAM_TOKENS, num_steps))
        while self._engine.stats().num_output_tokens < streams:
            self._engine.step()

    def _request(self, name: str, num_tokens: int, max_tokens: int) -> Request:
        """Its prompt's hashes are known, as a handed-over one's are."""
        prompt = tuple(self._rng.choices(range(1, _VOCAB_SIZE), k=num_tokens))
        hashes, parent = [], b""
        for first in range(0, num_tokens - BLOCK_SIZE + 1, BLOCK_SIZE):
            parent = block_hash(parent, prompt[first : first + BLOCK_SIZE])
            hashes.append(parent)
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        return Request(name, prompt, sampling, block_hash, prompt_hashes=tuple(hashes))

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        for first in range(0, len(self._walked), 1 << 20):
            bytes(memoryview(self._walked)[first : first + (1 << 20)])
        began_s = time.perf_counter()
        found = work()
        ended_s = time.perf_counter()
        if name in ("step", "end"):  # from its draws on
            began_s = self._ahead.read_s
        self.us.setdefault(name, []).append((ended_s - began_s) * 1e6)
        return found

    def join(self, number: int) -> None:
        """Run ordinary steps, and let one request join. Raises: RuntimeError if it did not."""
        engine, name = self._engine, str(number)
        for _ in range(self._every):
            self._timed("step", engine.step)
        request = self._request(name, self._num_prompt, 2)
        self._timed("reserve", lambda: engine.reserve(request))
        for _ in range(NUM_BEFORE):
            self._timed("step", engine.step)
        outputs = ((1,),)
        self._timed(
            "start",
            lambda: engine.start(name, num_loaded_tokens=self._num_prompt, outputs=outputs),
        )
        engine.step()  # it is in the launch for the next one
        events = self._timed("end", engine.step).events
        if not any(event.finish_reason for event in events):
            raise RuntimeError(f"request {name} did not end")
        engine.step()
        engine.check_integrity()


@harness.case
@click.option("--streams", default=16)
@click.option("--prompt-tokens", default=8192)
@click.option("--every", default=20, help="steps")
@click.option("--joins", default=60)
@click.option("--room", default=4, help="prompts that the cache has room for")
@click.option("--walk-mib", default=0, help="memory that is read before each call")
def joining(**options: int) -> dict[str, Any]:
    """Microseconds (p10, p50, p90) that a long request which joins costs the engine's thread; the
    model costs nothing, and each step is launched ahead.

    So many streams decode; every --every steps a request of --prompt-tokens joins as one that was
    handed over does, with its cache and its first token, and ends with the next one: `reserve` and
    `start`, which run while a step computes, and from a step's draws to its events, which every
    stream waits for: `end` of a step in which it ends, `step` of the others. With --walk-mib
    nothing is in the processor's caches, as after a step of a device.
    """
    torch.set_num_threads(1)
    run = Joining(**options)
    entrypoint.begin_serving()
    for number in range(options["joins"]):
        run.join(number)
    cuts = {name: statistics.quantiles(us, n=10) for name, us in run.us.items()}
    found = {
        name: {f"p{10 * i + 10}": round(one[i]) for i in (0, 4, 8)} for name, one in cuts.items()
    }
    harness.show("microseconds", [{"": name} | one for name, one in found.items()])
    return {**options, "us": found, "torch": torch.__version__}


# -- prompts pour in at a decode worker whose device is paced

VOCAB, WINDOW, MAX_ROWS = 32000, 9216, 64
STREAM_PROMPT, CHUNK, TIMEOUT_S = 256, 2048, 60.0
TIMED = ("step", "reserve", "start", "abort")


def _model() -> FakeModel:
    """The model of both workers: their fingerprints must be the same."""
    return FakeModel(vocab_size=VOCAB, context_window=WINDOW, block_size=BLOCK_SIZE)


@dataclass(frozen=True, eq=False)
class _Launch:
    num_rows: int
    over_s: float


@dataclass
class Seen:
    """What the decode worker's process measured, in order of time; seconds of the machine's
    monotonic clock."""

    launches: list[tuple[float, float]] = field(default_factory=list)
    """Launches of steps: (when the device could have begun, when it did)."""
    late: list[tuple[float, float]] = field(default_factory=list)
    """Ends of launches: (when a launch was over, how much later the engine's thread knew)."""
    calls: list[tuple[str, float, float]] = field(default_factory=list)
    """Calls of the engine: (method, begun, CPU time of its thread)."""


class PacedDevice:
    """A runner of decode steps without arithmetic: launches take `step_s` each, one after the
    other."""

    def __init__(self, step_s: float, seen: Seen) -> None:
        self.max_rows = MAX_ROWS
        self.takes_prompts = False
        self._step_s = step_s
        self._seen = seen
        self._free_s = 0.0

    def warm_up(self, progress: Progress | None = None) -> None:
        """Do nothing: there is nothing to compile."""

    def takes(self, draw: SamplingRequest) -> bool:
        """Whether a step with this sampling can be launched ahead: every one can."""
        return True

    def launch(self, rows: Sequence[DecodeRow]) -> _Launch:
        """Launch a step that begins when the one before is over, or now."""
        now_s = time.monotonic()
        begun_s = max(now_s, self._free_s)
        self._seen.launches.append((self._free_s, begun_s))
        self._free_s = begun_s + self._step_s
        return _Launch(len(rows), self._free_s)

    def read(self, launch: Any) -> list[SamplerOutput]:
        """Wait for a launch as for a device: without the interpreter's lock."""
        left_s = launch.over_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
            self._seen.late.append((launch.over_s, time.monotonic() - launch.over_s))
        return [SamplerOutput(1)] * launch.num_rows

    def drain(self) -> None:
        """Do nothing: no launch's result is needed."""


class TimedEngine:
    """An engine whose calls are timed on their thread."""

    def __init__(self, engine: LLMEngine, seen: Seen) -> None:
        self._engine = engine
        self._calls = seen.calls
        for name in TIMED:
            setattr(self, name, self._timed(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _timed(self, name: str) -> Callable[..., Any]:
        call = getattr(self._engine, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            began_s, cpu_s = time.monotonic(), time.thread_time()
            try:
                return call(*arguments, **options)
            finally:
                self._calls.append((name, began_s, time.thread_time() - cpu_s))

        return timed


async def _run_worker(options: dict[str, Any]) -> None:
    """A real decode worker, over gRPC, whose device is paced, in a process of its own. It prints
    its address as one JSON line, and when stdin ends what it saw as another."""
    seen = Seen()
    paced: Any = _model()
    paced.ahead = PacedDevice(options["step_s"], seen)
    config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=12288, max_num_running=MAX_ROWS)
    engine: Any = TimedEngine(LLMEngine(config, paced), seen)
    settings = WorkerSettings(
        worker_id="decode-0",
        redis_url="",
        store_address=options["store_address"],
        transport="shm",
        remote_transport=options["transport"],
        handle_keys_file=options["key_file"],
    )
    worker = await start_worker(engine, settings, "decode", DecodeRole)
    entrypoint.begin_serving()
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def listen() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=listen, name="stdin", daemon=True).start()
    print(json.dumps({"address": worker.address}), flush=True)  # noqa: T201
    await ended.wait()
    print(json.dumps(vars(seen)), flush=True)  # noqa: T201
    await worker.stop()


class Router:
    """The calls that a router makes to one prefill and one decode worker."""

    def __init__(self, prefill: KeyedStream, decode: KeyedStream, fingerprint: str) -> None:
        self._prefill = prefill
        self._decode = decode
        self._fingerprint = fingerprint
        self._rng = random.Random(7)

    async def generate(self, num_prompt_tokens: int, max_tokens: int) -> AsyncIterator[None]:
        """Send a request through prefill and decode. Yields: one item per token of decode."""
        key, events = self._decode.open()
        prompt = [self._rng.randrange(1, VOCAB) for _ in range(num_prompt_tokens)]
        asked: dict[str, Any] = {
            "request_id": f"r{key}",
            "tenant": "t",
            "tenant_salt": b"a tenant's salt",
            "prompt_token_ids": prompt,
            "sampling": common_pb2.SamplingParams(
                max_tokens=max_tokens, temperature=0.0, top_p=1.0, seed=7, ignore_eos=True
            ),
            "model_fingerprint": self._fingerprint,
            "budget_ms": int(TIMEOUT_S * 1e3),
        }
        await self._decode.send(key, reserve=decode_pb2.ReserveDecode(**asked))
        _need((await events.get())[0], "reserved")
        await self._run_prefill(key, asked)
        while (event := (await events.get())[0]).WhichOneof("event") == "tokens":
            yield
        _need(event, "finished")
        leg = event.finished.leg
        if leg.recomputed:
            raise RuntimeError(f"KV was computed again: {leg.recomputed}")
        self._decode.close(key)
        yield

    async def _run_prefill(self, key: int, asked: dict[str, Any]) -> None:
        """What comes of the prompt goes to decode under `key`."""
        ask = prefill_pb2.PrefillRequest(
            **asked, wants_handle=True, handover=common_pb2.HANDOVER_PATH_DIRECT
        )
        prompt_key, events = self._prefill.open()
        await self._prefill.send(prompt_key, prefill=ask)
        token_ids: list[int] = []
        is_over = False
        while not is_over:
            event, _ = await events.get()
            _need(event, "reply")
            reply, is_over = event.reply, event.reply.HasField("leg")
            token_ids += reply.token_ids
            if not reply.HasField("handle"):
                continue
            if reply.handle.is_partial:
                early = decode_pb2.PrefetchDecode(handle=reply.handle)
                await self._decode.send(key, prefetch=early)
            else:
                final = decode_pb2.GenerateFromHandle(
                    handle=reply.handle, output_token_ids=token_ids
                )
                await self._decode.send(key, generate=final)
        self._prefill.close(prompt_key)

    async def drain(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Send a request and wait for its end."""
        async with asyncio.timeout(TIMEOUT_S):
            async for _ in self.generate(num_prompt_tokens, max_tokens):
                pass

    async def close(self) -> None:
        """End all requests that are under way."""
        await self._prefill.end()
        await self._decode.end()


def _need(event: Any, kind: str) -> None:
    if event.WhichOneof("event") != kind:
        raise RuntimeError(f"not {kind}: {event}")


@contextlib.asynccontextmanager
async def _decode_worker(
    options: dict[str, Any],
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    process = await asyncio.create_subprocess_exec(
        *harness.module("benchmarks.admission_costs", "worker", json.dumps(options)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 28,
    )
    try:
        yield json.loads(await _line(process))["address"], process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _line(process: asyncio.subprocess.Process) -> bytes:
    assert process.stdout is not None
    async with asyncio.timeout(TIMEOUT_S):
        line = await process.stdout.readline()
    if not line:
        raise RuntimeError("the decode worker ended")
    return line


@dataclass(frozen=True)
class Storm:
    """The options of `admission`."""

    transport: str
    streams: int
    storm: int
    prompt_tokens: int
    step_ms: float
    seconds: float


async def _admitted(folder: Path, options: Storm) -> dict[str, Any]:
    key_file = folder / "handle.keys"
    signing_keys.create(key_file)
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            store_process.running(KvStoreSettings(capacity_bytes=1 << 15 << 12, stop_timeout_s=0.0))
        )
        config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=8192, max_num_tokens_per_step=CHUNK)
        prefill = await start_worker(
            LLMEngine(config, _model()),
            WorkerSettings(
                worker_id="prefill-0",
                redis_url="",
                store_address=store.address,
                remote_transport=options.transport,
                handle_keys_file=str(key_file),
            ),
            "prefill",
            PrefillRole,
        )
        stack.push_async_callback(prefill.stop)
        of_worker = {
            "store_address": store.address,
            "transport": options.transport,
            "key_file": str(key_file),
            "step_s": options.step_ms / 1e3,
        }
        address, process = await stack.enter_async_context(_decode_worker(of_worker))
        channels = [
            await stack.enter_async_context(rpc.channel(to)) for to in (prefill.address, address)
        ]
        router = Router(
            KeyedStream(
                prefill_pb2_grpc.PrefillStub(channels[0]).Stream(), prefill_pb2.PrefillCommand
            ),
            KeyedStream(decode_pb2_grpc.DecodeStub(channels[1]).Stream(), decode_pb2.DecodeCommand),
            prefill.core.model.fingerprint,
        )
        stack.push_async_callback(router.close)
        return await _phases(router, process, options)


async def _phases(
    router: Router, process: asyncio.subprocess.Process, options: Storm
) -> dict[str, Any]:
    await router.drain(options.prompt_tokens, 2)  # connections, links measured
    began = asyncio.Event()

    async def stream() -> None:
        async for _ in router.generate(STREAM_PROMPT, 8000):
            began.set()

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(stream()) for _ in range(options.streams)]
        await began.wait()
        await asyncio.sleep(2.0)
        quiet_s = time.monotonic()
        await asyncio.sleep(options.seconds)
        storm_s, num_prompts = time.monotonic(), 0

        async def storm() -> None:
            nonlocal num_prompts
            while time.monotonic() < storm_s + options.seconds:
                await router.drain(options.prompt_tokens, 2)
                num_prompts += 1

        await asyncio.gather(*(storm() for _ in range(options.storm)))
        ended_s = time.monotonic()
        assert process.stdin is not None
        process.stdin.close()
        seen = json.loads(await _line(process))
        for task in streams:
            task.cancel()
    quiet, stormy = LoggedSpan(quiet_s, storm_s), LoggedSpan(storm_s, ended_s)
    return {
        "num_prompts": num_prompts,
        "quiet": _figures(seen, quiet, options.step_ms),
        "storm": _figures(seen, stormy, options.step_ms),
        "calls": _calls(seen, stormy),
    }


def _figures(seen: dict[str, Any], span: LoggedSpan, pace_ms: float) -> dict[str, Any]:
    begun = [at for _, at in seen["launches"] if at in span]
    periods = [(after - before) * 1e3 for before, after in itertools.pairwise(begun)]
    return {
        "period": harness.cuts(periods, scale=1.0),
        "num_over_1_ms": sum(period > pace_ms + 1.0 for period in periods),
        "late": harness.cuts([late for at, late in seen["late"] if at in span]),
    }


def _calls(seen: dict[str, Any], span: LoggedSpan) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    for name, at, cpu_s in seen["calls"]:
        if at in span:
            found.setdefault(name, []).append(cpu_s)
    return {name: harness.cuts(values) for name, values in found.items()}


@harness.case
@click.option("--transport", type=click.Choice(("grpc", "nixl")), default="nixl")
@click.option("--streams", default=16)
@click.option("--storm", default=2, help="prompts under way at once")
@click.option("--prompt-tokens", default=8192)
@click.option("--step-ms", default=5.0)
@click.option("--seconds", default=8.0, help="of each of the two times")
def admission(**options: Any) -> dict[str, Any]:
    """What letting long prompts in costs a decode worker that is decoding: quiet against storm.

    A real store, a prefill worker that lends, and a real decode worker in a process of its own,
    whose device is paced: each launch takes --step-ms. So many --streams decode; after a quiet time
    prompts of --prompt-tokens are handed over, --storm under way at once, each ended after one
    token. `period`: from one launch to the next, what a stream sees between two tokens; above the
    pace is time in which the device waited for the host. `late`: how much later than the device the
    engine's thread went on, since others held the interpreter's lock. `calls`: CPU time of the
    engine's thread, which other work on the machine changes little.
    """
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(_admitted(Path(name), Storm(**options)))
    harness.CONSOLE.print(found)
    return {**options, **found}


@click.command("worker", hidden=True)
@click.argument("options", type=json.loads)
def worker(options: dict[str, Any]) -> None:
    """The decode worker of `admission`."""
    uvloop.run(_run_worker(options))


# -- the interpreter's lock between the engine's thread and the loop

INTERVALS_S = (0.0005, 0.0002, 0.0001, 0.00005)
_READ_S, _LAUNCH_S, _SEND_S, _TURN_S = 0.00005, 0.00035, 0.0002, 0.0003
_NUM_TURNS = 6
_PAUSE_S = (0.001, 0.006)
"""Between one row of turns and the next."""


def _spin(num: int) -> None:
    total = 0
    for number in range(num):
        total += number


def _spins_per_s() -> float:
    begun_s, num = time.thread_time(), 3_000_000
    _spin(num)
    return num / (time.thread_time() - begun_s)


class _Trial:
    """Both threads at work for a while."""

    def __init__(self, step_s: float, spins_per_s: float, *, has_work: bool) -> None:
        self._step_s, self._rate, self._has_work = step_s, spins_per_s, has_work
        self._is_over = False
        self._reader, self._writer = socket.socketpair()
        self._unsent: list[float] = []  # when each step was over on the device
        self.s: dict[str, list[float]] = {"woken": [], "launched": [], "sent": [], "turns": []}

    def run(self, seconds: float) -> dict[str, dict[str, float]]:
        threads = [threading.Thread(target=run) for run in (self._engine, self._loop)]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        self._is_over = True
        for thread in threads:
            thread.join()
        self._reader.close()
        self._writer.close()
        return {name: harness.cuts(values) for name, values in self.s.items()}

    def _compute(self, seconds: float) -> None:
        _spin(int(seconds * self._rate))

    def _note(self, name: str, since_s: float) -> None:
        self.s[name].append(time.perf_counter() - since_s)

    def _engine(self) -> None:
        while not self._is_over:
            over_s = time.perf_counter() + self._step_s
            time.sleep(self._step_s)
            self._note("woken", over_s)
            self._compute(_READ_S)
            self._unsent.append(over_s)
            self._writer.send(b"x")
            self._compute(_LAUNCH_S)
            self._note("launched", over_s)

    def _loop(self) -> None:
        rng, num_turns, begun_s = random.Random(1), 0, 0.0
        due_s = time.perf_counter()
        while not self._is_over:
            wait_s = max(0.0, due_s - time.perf_counter()) if self._has_work else 0.1
            if select.select([self._reader], [], [], 0 if num_turns else wait_s)[0]:
                self._reader.recv(64)
                while self._unsent:
                    self._compute(_SEND_S)
                    self._note("sent", self._unsent.pop(0))
            if self._has_work and not num_turns and time.perf_counter() >= due_s:
                num_turns, begun_s = _NUM_TURNS, time.perf_counter()
            if num_turns:
                self._compute(_TURN_S)
                num_turns -= 1
                if not num_turns:
                    self._note("turns", begun_s)
                    due_s = time.perf_counter() + rng.uniform(*_PAUSE_S)


@harness.case
@click.option("--step-ms", default=5.0)
@click.option("--seconds", default=2.5, help="of each trial")
def switch_interval(step_ms: float, seconds: float) -> dict[str, Any]:
    """Milliseconds from the device's end until the engine's thread is awake, has launched, and the
    loop has sent the tokens, by the length of `entrypoint.SWITCH_INTERVAL_S`: two threads that
    compute nothing.

    One waits in C for --step-ms, as for a device, needs Python for 0.05 ms to read what was
    sampled, and 0.35 ms more to launch what comes next. The other one needs 0.2 ms to send it; now
    and then (`has_work`) it has six turns of 0.3 ms of other work besides, between which it looks
    whether there is something to send, as asyncio does. Needs two cores of its own, or it measures
    the machine's other work.
    """
    spins_per_s, kept_s = _spins_per_s(), sys.getswitchinterval()
    trials: list[dict[str, Any]] = []
    for has_work, interval_s in itertools.product((False, True), INTERVALS_S):
        sys.setswitchinterval(interval_s)
        found = _Trial(step_ms / 1e3, spins_per_s, has_work=has_work).run(seconds)
        trials.append({"switch_ms": interval_s * 1e3, "has_work": has_work, **found})
    sys.setswitchinterval(kept_s)
    shown = [
        {key: one.get("p99_ms", "") if isinstance(one, dict) else one for key, one in each.items()}
        for each in trials
    ]
    harness.show("P99, ms", shown)
    return {"trials": trials}


main = harness.program(__doc__, admission, joining, switch_interval, worker)

if __name__ == "__main__":
    main()
