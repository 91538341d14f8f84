"""What an attached store costs prefill, on a device that is paced: no GPU needed.

A real prefill worker in a process of its own serves prompts of `--prompt-tokens` that end with
their first token, `--outstanding` at once, as the router admits them. Its device takes as long as
one H200 takes for a model of 8 B parameters (45,600 tokens a second, 3 ms a step) and computes
nothing; blocks are small, so that what is measured is the work of the host: calls, checksums,
bookkeeping. With `--checkpoint` the worker serves that model on a GPU instead. Cells, in turn in
each round:

- `none`: no store. What the device allows is the ceiling.
- `default`: a store that is full all the time. It has room for a few steps' blocks; with a
  checkpoint, the size that a store has by default.
- `large`: a store that keeps every block; `all_stored` says whether every block of every prompt
  was in it 2 s after the last answer.
- `stopped`, `killed`: the store is stopped (SIGSTOP), or killed, while the load runs; `lost` says
  what was counted.

The last line printed is one JSON object; `ratio` is served prompts against `none`.

    python -m benchmarks.write_path cells --rounds 3
    python -m benchmarks.write_path cells --checkpoint llama-8b --rounds 1 --seconds 6
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import uvloop

from benchmarks import harness, random_checkpoint
from benchmarks.harness import KeyedStream, Several
from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from engine.testing.fake_model import FakeModel
from engine.testing.paced_model import DevicePace, PacedModel
from process import entrypoint, rpc, signing_keys
from process.deadline import Deadline
from protos import common_pb2, kvstore_pb2, kvstore_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from services.prefill.role import PrefillRole
from services.worker.config import WorkerSettings
from services.worker.server import start

VOCAB = 32000
BLOCK_SIZE = 16
FRAME_BYTES = 4096
"""The least that a store's frame takes."""
GPU_FRAME_BYTES = 2 * 1024 * 1024
"""Of 16 tokens of a model of 8 B parameters."""
STEP_TOKENS = 8192
PACE = DevicePace(step_s=0.003, token_s=1 / 45_600)
CELLS = ("none", "default", "large", "stopped", "killed")
DEFAULT_FRAMES = 1024
"""Of the cell `default`: the least that a store has by default."""
TIMEOUT_S = 300.0
SAMPLING = common_pb2.SamplingParams(max_tokens=1, temperature=0.0, top_p=1.0, seed=7)


@dataclass(frozen=True)
class Load:
    """What each cell serves, and how often."""

    checkpoint: str
    """A folder, or a shape of benchmarks/random_checkpoint.py; empty: the paced device."""
    overlap_prompts: bool
    seconds: float
    rounds: int
    prompt_tokens: int
    outstanding: int
    cells: tuple[str, ...]


async def _work(ask: dict[str, Any]) -> None:
    """The prefill worker: says its address and fingerprint, serves until stdin ends, and says what
    it counted."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        max_num_tokens_per_step=STEP_TOKENS,
        overlap_prompts=ask["overlap_prompts"],
    )
    if ask["checkpoint"]:
        config = dataclasses.replace(config, model=ask["checkpoint"], device="cuda")
        engine = load_engine(config)
    else:
        config = dataclasses.replace(config, num_blocks=16_384)
        fake = FakeModel(vocab_size=VOCAB, context_window=8192, block_size=BLOCK_SIZE)
        engine = LLMEngine(config, PacedModel(fake, PACE))
    settings = WorkerSettings(
        worker_id="prefill-0",
        redis_url="",
        engine=config,
        store_address=ask["store_address"],
        transport="shm",
        handle_keys_file=ask["key_file"],
    )
    worker = await start(engine, settings, "prefill", PrefillRole)
    if ask["store_address"]:  # its slab may still be page-locked
        await worker.core.connector.wait_attached(Deadline.after(TIMEOUT_S))
    entrypoint.begin_serving()
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def listen() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=listen, name="stdin", daemon=True).start()
    _say({"address": worker.address, "fingerprint": worker.core.model.fingerprint})
    await ended.wait()
    counts = worker.core.counts
    _say({"lost": dict(counts.not_written_back), "cpu_s": time.process_time()})
    await worker.stop()


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


@contextlib.asynccontextmanager
async def _worker(
    store_address: str, folder: Path, load: Load
) -> AsyncIterator[tuple[dict[str, Any], Any]]:
    """A worker process, and what it said first."""
    ask = {
        "store_address": store_address,
        "key_file": str(folder / "handle.keys"),
        "checkpoint": load.checkpoint,
        "overlap_prompts": load.overlap_prompts,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.write_path", "worker", json.dumps(ask)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield await _line(process), process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _line(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    async with asyncio.timeout(TIMEOUT_S):
        line = await process.stdout.readline()
    if not line:
        raise RuntimeError("the worker ended")
    found: dict[str, Any] = json.loads(line)
    return found


async def _serve(address: str, fingerprint: str, load: Load) -> tuple[int, float, int]:
    """Prompts, so many at once. Returns: how many were served after the first second, for how many
    seconds, and how many in all."""
    draw = random.Random(f"write path {time.monotonic_ns()}")
    async with rpc.channel(address) as channel:
        stream = KeyedStream(
            prefill_pb2_grpc.PrefillStub(channel).Stream(), prefill_pb2.PrefillCommand
        )
        begun_s = time.monotonic()
        warm_s, end_s = begun_s + 1.0, begun_s + 1.0 + load.seconds
        served: list[float] = []

        async def one() -> None:
            while time.monotonic() < end_s:
                asked = prefill_pb2.PrefillRequest(
                    request_id=f"r{draw.getrandbits(64):x}",
                    tenant="default",
                    tenant_salt=b"salt",
                    prompt_token_ids=[draw.randrange(VOCAB) for _ in range(load.prompt_tokens)],
                    sampling=SAMPLING,
                    model_fingerprint=fingerprint,
                )
                key, events = stream.open()
                await stream.send(key, prefill=asked)
                async with asyncio.timeout(TIMEOUT_S):
                    while True:
                        event, _ = await events.get()
                        if event.WhichOneof("event") != "reply":
                            raise RuntimeError(f"not served: {event}")
                        if event.reply.HasField("leg"):
                            break
                stream.close(key)
                served.append(time.monotonic())

        await asyncio.gather(*(one() for _ in range(load.outstanding)))
        await stream.end()
        return sum(warm_s <= at_s < end_s for at_s in served), end_s - warm_s, len(served)


async def _cell(name: str, folder: Path, load: Load) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        address, pid = "", 0
        if name != "none":
            num_prompts = int((load.seconds + 2) * 50)
            large = num_prompts * (load.prompt_tokens // BLOCK_SIZE)
            num_frames = large if name == "large" else DEFAULT_FRAMES
            capacity_bytes = num_frames * FRAME_BYTES
            if load.checkpoint:
                capacity_bytes = num_frames * GPU_FRAME_BYTES if name == "large" else 0
            pid, ready = stack.enter_context(
                harness.store(capacity_bytes=capacity_bytes, slab_dir="/dev/shm")
            )
            address = ready["address"]
        async with _worker(address, folder, load) as (said, process):
            blow = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}.get(name)
            if blow is not None:
                at_s = 1.0 + load.seconds / 4
                asyncio.get_running_loop().call_later(at_s, os.kill, pid, blow)
            if name == "stopped":
                stack.callback(os.kill, pid, signal.SIGCONT)
            num, seconds, num_all = await _serve(said["address"], said["fingerprint"], load)
            found: dict[str, Any] = {"served_per_s": num / seconds}
            if name == "large":
                await asyncio.sleep(2.0)
                num_there = await _num_committed(address)
                num_asked = num_all * (load.prompt_tokens // BLOCK_SIZE)
                found |= {"all_stored": num_there == num_asked, "num_blocks": num_there}
            process.stdin.write_eof()
            end = await _line(process)
            found |= {
                "lost": end["lost"],
                "cpu_ms_per_prompt": round(end["cpu_s"] * 1e3 / num_all, 2),
            }
            return found


async def _num_committed(address: str) -> int:
    async with rpc.channel(address) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        status = await stub.GetStatus(kvstore_pb2.GetStatusRequest(), timeout=TIMEOUT_S)
        return int(status.num_committed)


async def _measure(load: Load) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in load.cells}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if load.checkpoint in random_checkpoint.SHAPES:
            (folder / "model").mkdir()
            random_checkpoint.save(folder / "model", load.checkpoint, device="cuda")
            load = dataclasses.replace(load, checkpoint=str(folder / "model"))
        signing_keys.create(folder / "handle.keys")
        for number in range(load.rounds):
            for cell in load.cells:
                result = await _cell(cell, folder, load)
                found[cell].append(result)
                sys.stderr.write(f"round {number} {cell}: {json.dumps(result)}\n")
    rates = {
        cell: statistics.median(each["served_per_s"] for each in results)
        for cell, results in found.items()
    }
    ceiling = 1 / (PACE.token_s * load.prompt_tokens + PACE.step_s / 8)
    return {
        "ceiling_per_s": round(ceiling, 2),
        "served_per_s": {cell: round(rate, 2) for cell, rate in rates.items()},
        "ratio": {cell: round(rate / rates["none"], 4) for cell, rate in rates.items()},
        "rounds": found,
    }


@harness.case
@click.option("--seconds", default=10.0, help="of load in each cell")
@click.option("--rounds", default=3)
@click.option("--prompt-tokens", default=1024)
@click.option("--checkpoint", default="", help="a folder or a shape; served on a GPU")
@click.option("--overlap-prompts", is_flag=True)
@click.option("--outstanding", default=24, help="prompts at once")
@click.option("--cells", type=Several(click.Choice(CELLS)), default=",".join(CELLS))
def cells(**options: Any) -> dict[str, Any]:
    """Prompts served with and without a store, in each of the cells."""
    found: dict[str, Any] = uvloop.run(_measure(Load(**options)))
    return options | found


@click.command("worker", hidden=True)
@click.argument("ask", type=json.loads)
def worker(ask: dict[str, Any]) -> None:
    """The prefill worker of `cells`."""
    uvloop.run(_work(ask))


main = harness.program(__doc__, cells, worker)

if __name__ == "__main__":
    main()
