"""What letting a long prompt in costs a decode worker that is decoding: no GPU needed.

A real store, a prefill worker that lends, and a real decode worker in a process of its own, whose
device is paced: each launch takes `--step-ms` (benchmarks/admission_worker.py). So many `--streams`
decode; after a quiet time prompts of `--prompt-tokens` are handed over, `--storm` under way at
once, each ended after one token. What it shows, quiet against storm:

- `period`: from one launch's end to the next one's: what a stream sees between two tokens. Above
  the pace is time in which the device waited for the host.
- `late`: how much later than the device the engine's thread went on: it waits for the interpreter's
  lock that others hold.
- `calls`, `cpu_ms_per_prompt`: what each call of the engine took its thread, and what each thread
  of the process used for one prompt more. CPU time: what else the machine does matters little.

The last line printed is one JSON object.

    python -m benchmarks.admission --transport nixl
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.admission_worker import BLOCK_SIZE, VOCAB, model
from benchmarks.context import context, publish
from benchmarks.keyed_stream import KeyedStream
from engine.config import EngineConfig
from engine.loop import Engine
from kvstore import serve
from kvstore.config import KvStoreSettings
from process import rpc, signing_keys
from protos import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from services.prefill.role import PrefillRole
from services.worker import main as worker_main
from services.worker.config import WorkerSettings

SALT = b"a tenant's salt"
STREAM_PROMPT = 256
CHUNK = 2048
FRAME_BYTES = 4096
TIMEOUT_S = 60.0


class Router:
    """A router's worth of calls to one prefill and one decode worker."""

    def __init__(self, prefill: KeyedStream, decode: KeyedStream, fingerprint: str) -> None:
        self._prefill = prefill
        self._decode = decode
        self._fingerprint = fingerprint
        self._rng = random.Random(7)

    async def generate(self, num_prompt_tokens: int, max_tokens: int) -> AsyncIterator[None]:
        """A request through prefill and decode; one item per token of decode."""
        key, events = self._decode.open()
        prompt = [self._rng.randrange(1, VOCAB) for _ in range(num_prompt_tokens)]
        asked: dict[str, Any] = {
            "request_id": f"r{key}",
            "tenant": "t",
            "tenant_salt": SALT,
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
        """`generate` to its end."""
        async with asyncio.timeout(TIMEOUT_S):
            async for _ in self.generate(num_prompt_tokens, max_tokens):
                pass

    async def close(self) -> None:
        """Ends all that is under way."""
        await self._prefill.end()
        await self._decode.end()


def _need(event: decode_pb2.DecodeEvent | prefill_pb2.PrefillEvent, kind: str) -> None:
    if event.WhichOneof("event") != kind:
        raise RuntimeError(f"not {kind}: {event}")


@contextlib.asynccontextmanager
async def _decode_worker(
    ask: dict[str, Any],
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.admission_worker",
        json.dumps(ask),
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


async def _tell(process: asyncio.subprocess.Process, word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(word.encode() + b"\n")
    await process.stdin.drain()


async def _measured(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    key_file = folder / "handle.keys"
    signing_keys.create(key_file)
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(
            serve.running(KvStoreSettings(capacity_bytes=1 << 15 << 12, stop_timeout_s=0.0))
        )
        config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=8192, max_num_tokens_per_step=CHUNK)
        prefill = await worker_main.start(
            Engine(config, model()),
            WorkerSettings(
                worker_id="prefill-0",
                redis_url="",
                store_address=store.address,
                remote_transport=arguments.transport,
                handle_keys_file=str(key_file),
            ),
            "prefill",
            PrefillRole,
        )
        stack.push_async_callback(prefill.stop)
        ask = {
            "store_address": store.address,
            "transport": arguments.transport,
            "key_file": str(key_file),
            "step_s": arguments.step_ms / 1e3,
            "serves": not arguments.plain_interpreter,
        }
        address, process = await stack.enter_async_context(_decode_worker(ask))
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
        return await _phases(router, process, arguments)


async def _phases(
    router: Router, process: asyncio.subprocess.Process, arguments: argparse.Namespace
) -> dict[str, Any]:
    await router.drain(arguments.prompt_tokens, 2)  # connections, links measured
    began = asyncio.Event()
    most = 8000

    async def stream() -> None:
        async for _ in router.generate(STREAM_PROMPT, most):
            began.set()

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(stream()) for _ in range(arguments.streams)]
        await began.wait()
        await asyncio.sleep(2.0)
        await _tell(process, "quiet")
        quiet_s = time.monotonic()
        await asyncio.sleep(arguments.seconds)
        await _tell(process, "storm")
        storm_s, num_prompts = time.monotonic(), 0

        async def storm() -> None:
            nonlocal num_prompts
            while time.monotonic() < storm_s + arguments.seconds:
                await router.drain(arguments.prompt_tokens, 2)
                num_prompts += 1

        await asyncio.gather(*(storm() for _ in range(arguments.storm)))
        ended_s = time.monotonic()
        await _tell(process, "end")
        seen = json.loads(await _line(process))
        for task in streams:
            task.cancel()
    quiet = Span(quiet_s, storm_s)
    stormy = Span(storm_s, ended_s)
    pace_ms = arguments.step_ms
    idle_cpu, begun_cpu, end_cpu = seen["cpu"]
    share = stormy.length_s / quiet.length_s
    names = sorted({*idle_cpu, *begun_cpu, *end_cpu})
    extra = {
        name: (end_cpu.get(name, 0.0) - begun_cpu.get(name, 0.0))
        - share * (begun_cpu.get(name, 0.0) - idle_cpu.get(name, 0.0))
        for name in names
    }
    return {
        "num_prompts": num_prompts,
        "quiet": _figures(seen, quiet, pace_ms),
        "storm": _figures(seen, stormy, pace_ms),
        "calls": _calls(seen, stormy),
        "cpu_ms_per_prompt": {
            name: round(spent * 1e3 / num_prompts, 2)
            for name, spent in extra.items()
            if spent * 1e3 / num_prompts > 0.05
        },
    }


@dataclasses.dataclass(frozen=True)
class Span:
    """From one moment of the monotonic clock to another."""

    begun_s: float
    ended_s: float

    @property
    def length_s(self) -> float:
        """Seconds."""
        return self.ended_s - self.begun_s

    def __contains__(self, at_s: float) -> bool:
        return self.begun_s <= at_s < self.ended_s


def _figures(seen: dict[str, Any], span: Span, pace_ms: float) -> dict[str, Any]:
    begun = [at for _, at in seen["launches"] if at in span]
    periods = [(after - before) * 1e3 for before, after in itertools.pairwise(begun)]
    return {
        "period_ms": _cuts(periods),
        "num_over_1_ms": sum(period > pace_ms + 1.0 for period in periods),
        "late_ms": _cuts([late * 1e3 for at, late in seen["late"] if at in span]),
        "loop_late_ms": _cuts([late * 1e3 for at, late in seen["held"] if at in span]),
        "collections": len([at for at, _ in seen["collections"] if at in span]),
        "longest_collection_ms": round(
            max((took * 1e3 for at, took in seen["collections"] if at in span), default=0.0), 2
        ),
    }


def _calls(seen: dict[str, Any], span: Span) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    for name, at, _, cpu_s in seen["calls"]:
        if at in span:
            found.setdefault(name, []).append(cpu_s * 1e3)
    return {name: _cuts(values) for name, values in found.items()}


def _cuts(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {"num": len(values)}
    cuts = statistics.quantiles(values, n=100)
    return {
        "num": len(values),
        "p50": round(cuts[49], 3),
        "p99": round(cuts[98], 3),
        "longest": round(max(values), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--transport", choices=("grpc", "nixl"), default="nixl")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--storm", type=int, default=2, help="prompts under way at once")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each of the two times")
    parser.add_argument(
        "--plain-interpreter", action="store_true", help="without process/entrypoint.py"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(_measured(Path(name), arguments))
    Console(stderr=True).print(found)
    result = {
        "benchmark": "admission",
        **context(),
        "transport": arguments.transport,
        "num_streams": arguments.streams,
        "num_storm": arguments.storm,
        "num_prompt_tokens": arguments.prompt_tokens,
        "step_ms": arguments.step_ms,
        **found,
    }
    publish(result, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
