"""Steps with prompts, one by one: how long the device computes, how long it has nothing to do, and
what the host does meanwhile.

256 requests of 1,024 tokens come at once and go on to 256 each: every step of 8,192 tokens has
prompts and the decodes of those before. Three passes of the same requests (other tokens), so that
no measurement bears the cost of another: the steps' own times; the host's stretches, by a stopwatch
around each (host_stretches.py); the device's intervals, by torch's profiler. Of each pass the first
steps are left out. Random weights, greedy.

    python -m benchmarks.mixed_steps --shapes qwen3-0.6b llama-8b       # one CUDA device
    python -m benchmarks.mixed_steps --shapes none --plain              # the host alone, on CPU

"none" is a model that costs nothing and waits for nothing: its stretches are the host's. What
stands under "hidden" runs while a device would compute; all others keep it waiting, but where steps
are launched ahead (--plain: only decodes are). Blocks are evicted for each pass but the first. The
last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import host_stretches, random_checkpoint
from benchmarks.context import context, publish
from benchmarks.engine_gpu import Bench, device_intervals, idle_share
from benchmarks.engine_step import ZeroCostAhead, ZeroCostModel
from benchmarks.random_checkpoint import SHAPES
from engine.config import EngineConfig
from engine.loop import Engine, load_engine
from process import entrypoint

NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 256, 1024, 256
NUM_SKIPPED = 4
"""Steps at the beginning of each pass."""


@contextmanager
def _engine(shape: str, *, is_plain: bool) -> Iterator[Engine]:
    limits: dict[str, Any] = {"max_num_tokens_per_step": 8192, "max_num_running": NUM_REQUESTS}
    limits["overlap_prompts"] = not is_plain
    if shape == "none":
        num_tokens = NUM_PROMPT + NUM_OUTPUT
        num_blocks = NUM_REQUESTS * (num_tokens // 16 + 1)
        model = ZeroCostModel(NUM_REQUESTS + 1, num_tokens)
        model.ahead = ZeroCostAhead()
        yield Engine(EngineConfig(num_blocks=num_blocks, **limits), model)
        return
    with tempfile.TemporaryDirectory() as name:
        random_checkpoint.save(Path(name), shape, device="cuda")
        torch.cuda.empty_cache()
        engine = load_engine(EngineConfig(model=name, device="cuda", **limits))
    entrypoint.begin_serving()
    try:
        yield engine
    finally:
        engine.close()
        gc.unfreeze()


def _pass(bench: Bench, step: Callable[[], Any], num_steps: int) -> list[float]:
    """Seconds of each of so many mixed steps, after the first; then all requests are let go."""
    bench.submit(NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT)
    seconds: list[float] = []
    for _ in range(num_steps):
        began = time.perf_counter()
        output = step()
        seconds.append(time.perf_counter() - began)
        if output.num_scheduled_tokens <= NUM_REQUESTS:
            raise RuntimeError(f"step {len(seconds)} had no prompts")
    bench.abort_last(NUM_REQUESTS)
    return seconds


def measure(shape: str, num_steps: int, *, is_plain: bool = False) -> dict[str, Any]:
    """Milliseconds a mixed step, and microseconds of its stretches.

    Args:
        is_plain: no step with prompts is launched ahead, only decodes are.
    """
    with _engine(shape, is_plain=is_plain) as engine:
        bench, is_cuda = Bench(engine), shape != "none"
        _pass(bench, engine.step, num_steps)  # whatever is made on the first use
        seconds = _pass(bench, engine.step, num_steps)
        with host_stretches.watched(engine) as watch:
            _pass(bench, watch.step, num_steps)
        stretches = host_stretches.medians_us(watch.steps[NUM_SKIPPED:])
        hidden = {name: stretches.pop(name) for name in host_stretches.HIDDEN if name in stretches}
        found: dict[str, Any] = {
            "first_step_ms": seconds[0] * 1e3,
            "step_ms": statistics.fmean(seconds[NUM_SKIPPED:]) * 1e3,
            "waited_for_us": stretches,
            "hidden_us": hidden,
        }
        if is_cuda:
            found |= _device(bench, num_steps)
        engine.check_integrity()
    return found


def _device(bench: Bench, num_steps: int) -> dict[str, float]:
    engine = bench.engine
    bench.submit(NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT)
    for _ in range(NUM_SKIPPED):
        engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(num_steps - NUM_SKIPPED):
            engine.step()
        torch.cuda.synchronize()
    bench.abort_last(NUM_REQUESTS)
    busy = device_intervals(profile)
    idle = idle_share(busy)
    period_us = max(end for _, end in busy) - min(start for start, _ in busy)
    period_ms = period_us / 1e3 / (num_steps - NUM_SKIPPED)
    return {
        "device_busy_ms": period_ms * (1 - idle),
        "device_idle_ms": period_ms * idle,
        "device_idle_share": idle,
    }


def _show(console: Console, shape: str, found: dict[str, Any]) -> None:
    table = Table(title=f"a step with prompts, {shape}")
    table.add_column("what")
    table.add_column("", justify="right")
    for name, value in found.items():
        if isinstance(value, dict):
            for stretch, took_us in value.items():
                table.add_row(f"{name.removesuffix('_us')}: {stretch}", f"{took_us} us")
        else:
            table.add_row(name, f"{value:.3f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=["none", *SHAPES], default=["none"])
    parser.add_argument("--steps", type=int, default=24, help="of each pass; 32 have prompts")
    parser.add_argument("--plain", action="store_true", help="launch no step with prompts ahead")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    result: dict[str, Any] = {
        "benchmark": "mixed_steps",
        "requests": [NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT],
        "is_plain": arguments.plain,
        "load_average": round(os.getloadavg()[0], 1),
        **context(),
        "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        result["device"] = torch.cuda.get_device_name()
    for shape in arguments.shapes:
        result[shape] = measure(shape, arguments.steps, is_plain=arguments.plain)
        _show(console, shape, result[shape])
    publish(result, arguments.out)


if __name__ == "__main__":
    main()
