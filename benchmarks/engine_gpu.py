"""The whole engine on one GPU: schedule, forward, draw, bookkeeping; beside what the device can do.

Random weights of two shapes, greedy, bfloat16, the prefix cache without use (prompts differ). Per
shape: milliseconds a decode step at batch 1, 8, 64 and 256 with 1,024 tokens of context, as (time
of 129 tokens - time of 1) / 128; prompts of 1 x 2048, 1 x 8192 and 16 x 2048 tokens; 256 requests
of (1024 in, 256 out). Ceilings of the same run: a device-to-device copy, a read, a large matrix
product; what our bytes and operations would take at them stands beside each figure (floors.py).
The peer's figures (vLLM 0.24 on one H100 80GB HBM3, same definitions) stand beside ours; it cannot
be brought into the run. Of the 256 requests also: how many steps computed prompts, how many only
decoded, how long each kind took, and how long the device had nothing to do in a stretch of either.
Of every batch: the longest step, and the kernels that were compiled since the batch before, which
the warm-up has missed.
`--profile` adds where a step's time goes, kernel by kernel.

    python -m benchmarks.engine_gpu --shapes llama-8b qwen3-0.6b

The last line printed is one JSON object. Needs one CUDA device with 80 GB; takes minutes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import random_checkpoint
from benchmarks.compiles import Compiles
from benchmarks.context import context, publish
from benchmarks.floors import Floors
from benchmarks.random_checkpoint import SHAPES
from engine.config import EngineConfig
from engine.loop import Engine, load_engine
from engine.request import Request, Sampling
from kvstore import block_hash
from process import entrypoint

BATCHES = (1, 8, 64, 256)
PEER: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "decode_ms": {1: 6.55, 8: 7.00, 64: 10.18, 256: 21.51},
        "prefill_tokens_per_s": {"1x2048": 41_395, "1x8192": 39_296, "16x2048": 43_256},
        "output_tokens_per_s": 5_641,
    },
    "qwen3-0.6b": {
        "decode_ms": {1: 1.755, 8: 2.004, 64: 4.591, 256: 13.12},
        "prefill_tokens_per_s": {"1x2048": 150_069, "1x8192": 255_428, "16x2048": 371_172},
        "output_tokens_per_s": 16_020,
    },
}
"""vLLM 0.24.0, torch 2.11.0+cu130, FlashAttention 3, CUDA graphs and torch.compile; one H100."""

CONTEXT = 1024
NUM_DECODED = 128


# -- ceilings


def _seconds(work: Any, repeats: int) -> float:
    """Median of `repeats`, by events."""
    for _ in range(2):
        work()
    times: list[float] = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def ceilings() -> dict[str, float]:
    """copy_gb_per_s (bytes read and written), read_gb_per_s, matmul_tflop_per_s (bfloat16, random
    numbers)."""
    num_bytes = 2 << 30
    source = torch.randn(num_bytes // 4, device="cuda")
    target = torch.empty_like(source)
    copy_s = _seconds(lambda: target.copy_(source), 10)
    read_s = _seconds(lambda: source.max(), 10)
    size = 8192
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    matmul_s = _seconds(lambda: a @ b, 10)
    return {
        "copy_gb_per_s": 2 * num_bytes / copy_s / 1e9,
        "read_gb_per_s": num_bytes / read_s / 1e9,
        "matmul_tflop_per_s": 2 * size**3 / matmul_s / 1e12,
    }


# -- the engine


_ROOT = block_hash.root_key(b"benchmark", "00")


def _block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """As a worker's."""
    return block_hash.extend(_ROOT, parent, token_ids)


class Bench:
    """One engine and requests that differ from all before, so that nothing is a prefix hit."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._num_requests = 0
        self._compiles = Compiles()

    def submit(self, num_requests: int, num_prompt: int, num_output: int) -> None:
        vocab_size = self.engine.model_info.vocab_size
        sampling = Sampling(max_tokens=num_output, ignore_eos=True)
        for _ in range(num_requests):
            self._num_requests += 1
            token_ids = tuple(
                (self._num_requests * 7919 + at * 104_729) % vocab_size for at in range(num_prompt)
            )
            self.engine.submit(Request(f"r{self._num_requests}", token_ids, sampling, _block_hash))

    def run(self) -> tuple[float, float, list[float], float]:
        """Until nothing is left. Returns: seconds until everybody's first token, seconds in all,
        milliseconds of each step from there until somebody ends, and of the longest of all."""
        began = time.perf_counter()
        live: set[str] = set()
        first_s, num_ended = 0.0, 0
        steps: list[float] = []
        longest_s = 0.0
        num_wanted = self.engine.stats().num_waiting + self.engine.stats().num_running
        while self.engine.has_work():
            step_began = time.perf_counter()
            output = self.engine.step()
            now = time.perf_counter()
            longest_s = max(longest_s, now - step_began)
            for event in output.events:
                if event.token_ids:
                    live.add(event.request_id)
            if any(event.finish_reason for event in output.events):
                num_ended += 1
            if first_s and not num_ended:
                steps.append((now - step_began) * 1e3)
            elif not first_s and len(live) >= num_wanted:
                first_s = now - began
        return first_s, time.perf_counter() - began, steps, longest_s * 1e3

    def decode_ms(self, batch: int, floors: Floors) -> dict[str, Any]:
        """One figure as the peer's is taken, the median step of a full batch, and its floor."""
        self.submit(batch, CONTEXT, 1)
        _, one_s, _, one_longest_ms = self.run()
        self.submit(batch, CONTEXT, NUM_DECODED + 1)
        first_s, all_s, steps, longest_ms = self.run()
        return {
            "ms_per_step": (all_s - one_s) / NUM_DECODED * 1e3,
            "median_step_ms": statistics.median(steps),
            "floor_ms": floors.decode_s(batch, CONTEXT + NUM_DECODED / 2) * 1e3,
            "one_token_s": one_s,
            "first_tokens_s": first_s,
            "longest_steps_ms": [one_longest_ms, longest_ms],
            "compiled": self._compiles.take(),
        }

    def prefill(self, num_prompts: int, num_tokens: int, floors: Floors) -> dict[str, float]:
        """Best of three."""
        seconds = []
        for _ in range(3):
            self.submit(num_prompts, num_tokens, 1)
            seconds.append(self.run()[1])
        best = min(seconds)
        return {
            "seconds": best,
            "tokens_per_s": num_prompts * num_tokens / best,
            "floor_s": floors.prefill_s(num_prompts, num_tokens),
        }

    def throughput(
        self, num_requests: int, num_prompt: int, num_output: int, floors: Floors
    ) -> dict[str, Any]:
        self.submit(num_requests, num_prompt, num_output)
        began = time.perf_counter()
        steps: dict[str, list[float]] = {"with_prompts": [], "decodes_only": []}
        while self.engine.has_work():
            step_began = time.perf_counter()
            output = self.engine.step()
            # No step of decodes has more tokens than there are requests.
            kind = "with_prompts" if output.num_scheduled_tokens > num_requests else "decodes_only"
            steps[kind].append(time.perf_counter() - step_began)
        all_s = time.perf_counter() - began
        return {
            "seconds": all_s,
            "output_tokens_per_s": num_requests * num_output / all_s,
            "floor_s": floors.throughput_s(num_requests, num_prompt, num_output),
            "steps": {
                kind: {"number": len(seconds), "seconds": sum(seconds)}
                for kind, seconds in steps.items()
            },
        }

    def idle_share(self, num_requests: int, num_prompt: int, num_output: int) -> dict[str, float]:
        """Share of the time in which no kernel and no copy ran: of twelve steps with prompts, and
        of forty steps of decodes. Nothing else is measured meanwhile: the profiler costs time."""
        self.submit(num_requests, num_prompt, num_output)
        shares = {}
        for kind, num_before, num_steps in (("with_prompts", 4, 12), ("decodes_only", 40, 40)):
            for _ in range(num_before):
                self.engine.step()
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
                for _ in range(num_steps):
                    self.engine.step()
                torch.cuda.synchronize()
            shares[kind] = idle_share(device_intervals(found))
        self.abort_last(num_requests)
        return shares

    def abort_last(self, num_requests: int) -> None:
        """Those that were submitted last; then nothing is left."""
        for index in range(num_requests):
            self.engine.abort(f"r{self._num_requests - index}")
        self.run()

    def profile(self, batch: int) -> str:
        """Time by kernel of ten decode steps."""
        self.submit(batch, CONTEXT, 40)
        for _ in range(20):
            self.engine.step()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(10):
                self.engine.step()
            torch.cuda.synchronize()
        self.run()
        table: str = profile.key_averages().table(sort_by="cuda_time_total", row_limit=16)
        return table


def device_intervals(profile: Any) -> list[tuple[float, float]]:
    """When something ran on the device: (start, end), microseconds."""
    kind = torch.autograd.DeviceType.CUDA
    return [
        (one.time_range.start, one.time_range.end)
        for one in profile.events()
        if one.device_type == kind
    ]


def idle_share(busy: list[tuple[float, float]]) -> float:
    """Of the time from the first start to the last end; intervals may overlap."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(busy):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1.0 - covered / (reached - min(start for start, _ in busy))


def measure(
    shape: str, console: Console, arguments: argparse.Namespace, found: Mapping[str, float]
) -> Any:
    """Every figure of one shape.

    Args:
        found: the ceilings.
    """
    floors = Floors(SHAPES[shape], found, 1 if arguments.weights == "fp8_e4m3" else 2)
    batches: Sequence[int] = arguments.batches
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_checkpoint.save(folder, shape, device="cuda")
        torch.cuda.empty_cache()
        config = EngineConfig(
            model=str(folder),
            device="cuda",
            max_num_tokens_per_step=8192,
            max_num_running=max(BATCHES),
            overlap=not arguments.plain,
            exact=arguments.exact,
            weight_dtype=arguments.weights,
        )
        began = time.perf_counter()
        engine = load_engine(config)
        ready_s = time.perf_counter() - began
    entrypoint.begin_serving()  # as a worker does: a collection of all objects takes 0.6 s
    bench = Bench(engine)
    bench.decode_ms(1, floors)  # whatever is made on the first use
    result: dict[str, Any] = {
        "time_to_ready_s": ready_s,
        "seconds_by_phase": dict(engine.model_info.seconds),
        "num_blocks": engine.model_info.num_blocks,
        "decode": {batch: bench.decode_ms(batch, floors) for batch in batches},
        "prefill": {
            f"{count}x{length}": bench.prefill(count, length, floors)
            for count, length in ((1, 2048), (1, 8192), (16, 2048))
        },
        "throughput_256x1024x256": bench.throughput(256, 1024, 256, floors),
        "idle_share_of_256x1024x256": bench.idle_share(256, 1024, 256),
        "peer": PEER[shape],
    }
    if arguments.profile:
        for batch in batches:
            console.print(f"{shape}, batch {batch}, ten steps:\n{bench.profile(batch)}")
    engine.check_integrity()
    engine.close()
    del engine, bench
    gc.unfreeze()  # it is in cycles, and the next shape needs its memory
    gc.collect()
    torch.cuda.empty_cache()
    return result


def _show(console: Console, shape: str, result: dict[str, Any]) -> None:
    table = Table(title=shape)
    for column in ("what", "ours", "vLLM 0.24", "ratio", "share of the ceilings"):
        table.add_column(column, justify="right")
    peer = PEER[shape]
    for batch, one in result["decode"].items():
        ours, theirs = one["ms_per_step"], peer["decode_ms"][batch]
        table.add_row(
            f"decode ms, batch {batch}",
            f"{ours:.2f}",
            f"{theirs}",
            f"{ours / theirs:.2f}",
            f"{one['floor_ms'] / ours:.0%}",
        )
    for name, one in result["prefill"].items():
        ours, theirs = one["tokens_per_s"], peer["prefill_tokens_per_s"][name]
        share = one["floor_s"] / one["seconds"]
        table.add_row(
            f"prefill tok/s, {name}",
            f"{ours:.0f}",
            f"{theirs}",
            f"{ours / theirs:.2f}",
            f"{share:.0%}",
        )
    run = result["throughput_256x1024x256"]
    ours, theirs = run["output_tokens_per_s"], peer["output_tokens_per_s"]
    table.add_row(
        "256 x (1024, 256) tok/s",
        f"{ours:.0f}",
        f"{theirs}",
        f"{ours / theirs:.2f}",
        f"{run['floor_s'] / run['seconds']:.0%}",
    )
    for kind, steps in run["steps"].items():
        idle = result["idle_share_of_256x1024x256"][kind]
        text = f"{steps['number']} in {steps['seconds']:.2f} s"
        table.add_row(f"    steps {kind.replace('_', ' ')}", text, f"idle {idle:.1%}", "", "")
    table.add_row("time to ready, s", f"{result['time_to_ready_s']:.1f}", "", "", "")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--plain", action="store_true", help="wait for each step's tokens")
    parser.add_argument("--exact", action="store_true", help="batch-invariant, see EngineConfig")
    parser.add_argument("--weights", choices=("auto", "fp8_e4m3"), default="auto")
    parser.add_argument("--profile", action="store_true", help="time by kernel, on stderr")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.engine_gpu: torch finds no CUDA device")
    console = Console(stderr=True, width=200)
    result: dict[str, Any] = {
        **context(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "ceilings": ceilings(),
    }
    for shape in arguments.shapes:
        one = measure(shape, console, arguments, result["ceilings"])
        result[shape] = one
        _show(console, shape, one)
    publish(result, arguments.out)


if __name__ == "__main__":
    main()
