"""The whole engine on one GPU: schedule, forward, draw, bookkeeping; random weights of two shapes,
bfloat16, greedy. `offload` serves the bundled model with a part of its weights in host memory.

    python -m benchmarks.engine_gpu whole --shapes llama-8b,qwen3-0.6b
"""

from __future__ import annotations

import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks import harness, random_checkpoint
from benchmarks.harness import Several, block_hash
from benchmarks.random_checkpoint import SHAPES
from checkpoints.resolve import resolve
from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from engine.kv.layout import DTYPE_BYTES
from engine.lora.adapter import Factors, LoraAdapter, PeftConfig
from engine.lora.limits import LoraLimits
from engine.models import weights
from engine.models.loader import load_model
from engine.models.transformers_backend import TransformersModel
from engine.request import Request, Sampling
from engine.speculation.config import SpeculationConfig
from engine.speculation.loader import load_proposers
from kvstore import block_hash as chains
from process import entrypoint
from tokens.tokenizer import Tokenizer

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
"""Figures of vLLM 0.24.0, torch 2.11.0+cu130, FlashAttention 3, CUDA graphs and torch.compile; one
H100, by the same definitions. vLLM cannot be brought into the run."""

CONTEXT = 1024
NUM_DECODED = 128
_ROOT = chains.root_key(b"benchmark", "00")


class Compiles:
    """Records the names of the kernels that Triton compiled since it was made, a name for each
    time, read from disk or not: what a warm-up has missed. Covers the whole process; only the
    newest one sees them."""

    def __init__(self) -> None:
        import triton

        self.names: list[str] = []
        triton.knobs.runtime.jit_post_compile_hook = self._note

    def take(self) -> list[str]:
        """The names of kernels compiled since the last call."""
        names, self.names = self.names, []
        return names

    def _note(self, *, fn: Any, **_: Any) -> None:
        self.names.append(str(fn.name))


@dataclass(frozen=True)
class Floors:
    """Lower bounds of times: what a shape's bytes and operations would take at the ceilings of this
    run, one after the other: weights and cached keys and values read once a step, each product
    once. Nothing runs much faster; what runs products and reads at once may."""

    shape: Mapping[str, Any]
    ceilings: Mapping[str, float]

    @property
    def _layer_parameters(self) -> int:
        hidden, inner, heads = (
            self.shape[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")
        )
        columns = (heads + 2 * self.shape["num_key_value_heads"]) * self.shape["head_dim"]
        attended = heads * self.shape["head_dim"]
        per_layer = hidden * (columns + attended + 3 * inner)
        return int(self.shape["num_hidden_layers"] * per_layer)

    @property
    def _token_bytes(self) -> int:
        """Keys and values of one token, bfloat16."""
        heads = self.shape["num_key_value_heads"] * self.shape["head_dim"]
        return int(2 * 2 * self.shape["num_hidden_layers"] * heads)

    def decode_s(self, batch: int, context: float) -> float:
        """Lower bound of one decode step, in seconds."""
        head = self.shape["hidden_size"] * self.shape["vocab_size"]
        num_bytes = 2 * (self._layer_parameters + head) + batch * context * self._token_bytes
        return float(num_bytes / (self.ceilings["read_gb_per_s"] * 1e9))

    def prefill_s(self, num_prompts: int, num_tokens: int) -> float:
        """Lower bound, in seconds, of the prefill of `num_prompts` prompts of `num_tokens` tokens
        each: the layers' matrix products and causal attention."""
        heads = self.shape["num_attention_heads"] * self.shape["head_dim"]
        pairs = num_tokens * num_tokens / 2
        flops = 2.0 * self._layer_parameters * num_tokens
        flops += 4.0 * self.shape["num_hidden_layers"] * heads * pairs
        return float(num_prompts * flops / (self.ceilings["matmul_tflop_per_s"] * 1e12))

    def throughput_s(self, num_requests: int, num_prompt: int, num_output: int) -> float:
        """Lower bound of all prompts, then all decode steps, in seconds."""
        step_s = self.decode_s(num_requests, num_prompt + num_output / 2)
        return self.prefill_s(num_requests, num_prompt) + (num_output - 1) * step_s


class Bench:
    """One engine, and requests that differ from all before, so that nothing is a prefix hit."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._num_requests = 0

    def submit(self, num_requests: int, num_prompt: int, num_output: int) -> list[str]:
        """Submit requests to the engine. Returns: their names."""
        names = []
        for _ in range(num_requests):
            self._num_requests += 1
            names.append(f"r{self._num_requests}")
            self.engine.submit(
                Request(
                    names[-1],
                    numbered_prompt(self._num_requests, num_prompt, self.engine),
                    Sampling(max_tokens=num_output, ignore_eos=True),
                    partial(chains.extend, _ROOT),
                )
            )
        return names

    def run(self) -> tuple[float, float, list[float], float]:
        """Run the engine until no request is left. Returns: seconds until every request has its
        first token, seconds in all, milliseconds of each step from there until a request ends, and
        of the longest of all."""
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
        """Measure a decode step: one figure as the peer's is taken, the median step of a full
        batch, and its floor."""
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
        }

    def prefill(self, num_prompts: int, num_tokens: int, floors: Floors) -> dict[str, float]:
        """Measure prompts: the best of three runs."""
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

    def profiled(self, num_steps: int) -> list[tuple[float, float]]:
        """Run so many steps under torch's profiler. Returns: when a kernel or a copy ran on the
        device: (start, end), microseconds. Nothing else is measured meanwhile: the profiler costs
        time."""
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(num_steps):
                self.engine.step()
            torch.cuda.synchronize()
        kind = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
        return [
            (one.time_range.start, one.time_range.end)
            for one in profile.events()
            if one.device_type == kind
        ]

    def idle_share(self, num_requests: int, num_prompt: int, num_output: int) -> dict[str, float]:
        """Share of the time in which nothing ran on the device: of twelve steps with prompts, and
        of forty decode steps."""
        self.submit(num_requests, num_prompt, num_output)
        shares = {}
        for kind, num_before, num_steps in (("with_prompts", 4, 12), ("decodes_only", 40, 40)):
            for _ in range(num_before):
                self.engine.step()
            shares[kind] = idle_share(self.profiled(num_steps))
        self.abort_last(num_requests)
        return shares

    def abort_last(self, num_requests: int) -> None:
        """Abort the requests that were submitted last; then none is left."""
        for index in range(num_requests):
            self.engine.abort(f"r{self._num_requests - index}")
        self.run()


def numbered_prompt(number: int, num_tokens: int, engine: LLMEngine) -> tuple[int, ...]:
    """A prompt of random tokens, another one for each number."""
    vocab_size = engine.model_info.vocab_size
    return tuple((number * 7919 + at * 104_729) % vocab_size for at in range(num_tokens))


def idle_share(busy: list[tuple[float, float]]) -> float:
    """Share of the time from the first interval's start to the last one's end that no interval
    covers; intervals may overlap."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(busy):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return 1.0 - covered / (reached - min(start for start, _ in busy))


@contextmanager
def random_engine(shape: str, **config: Any) -> Iterator[tuple[LLMEngine, float]]:
    """Make an engine with random weights on the GPU. Returns: the engine, and the seconds until it
    was ready. The memory of an engine before is free only when its caller has no reference to it:
    call this in a function for each shape."""
    gc.unfreeze()  # engines are in cycles
    gc.collect()
    with tempfile.TemporaryDirectory() as name:
        random_checkpoint.save(Path(name), shape, device="cuda")
        torch.cuda.empty_cache()
        began = time.perf_counter()
        engine = load_engine(EngineConfig(model=name, device="cuda", **config))
        ready_s = time.perf_counter() - began
    entrypoint.begin_serving()  # as a worker does: a collection of all objects takes 0.6 s
    try:
        yield engine, ready_s
    finally:
        engine.check_integrity()
        engine.close()


# -- decode steps, prompts, throughput


def _rows(shape: str, found: dict[str, Any]) -> list[dict[str, Any]]:
    peer = PEER[shape]
    rows = []
    for batch, one in found["decode"].items():
        ours, theirs = one["ms_per_step"], peer["decode_ms"].get(batch, float("nan"))
        rows.append((f"decode ms, batch {batch}", ours, theirs, one["floor_ms"] / ours))
    for name, one in found["prefill"].items():
        ours, theirs = one["tokens_per_s"], peer["prefill_tokens_per_s"][name]
        rows.append((f"prefill tok/s, {name}", ours, theirs, one["floor_s"] / one["seconds"]))
    run = found["throughput_256x1024x256"]
    ours, theirs = run["output_tokens_per_s"], peer["output_tokens_per_s"]
    rows.append(("256 x (1024, 256) tok/s", ours, theirs, run["floor_s"] / run["seconds"]))
    return [
        {"": what, "ours": f"{ours:,.2f}", "vLLM 0.24": theirs, "ratio": ours / theirs}
        | {"share of the ceilings": f"{share:.0%}"}
        for what, ours, theirs, share in rows
    ]


@harness.case
@click.option("--shapes", type=Several(click.Choice(list(SHAPES))), default=",".join(SHAPES))
@click.option("--batches", type=Several(int), default="1,8,64,256")
@click.option("--exact", is_flag=True, help="batch-invariant, see EngineConfig")
def whole(shapes: Sequence[str], batches: Sequence[int], exact: bool) -> dict[str, Any]:
    """Decode steps, prompts and 256 requests of (1024 in, 256 out), beside vLLM's figures and the
    floor that the ceilings of the run set.

    Milliseconds a decode step with 1,024 tokens of context, as (time of 129 tokens - time of 1) /
    128; prompts of 1 x 2048, 1 x 8192 and 16 x 2048 tokens; of the 256 requests also how many steps
    computed prompts, how long each kind took, and how long the device had nothing to do; of every
    batch the longest step, and the kernels that were compiled since the batch before, which the
    warm-up has missed. Needs one CUDA device with 80 GB; takes minutes.
    """
    harness.needs_cuda()
    ceilings = harness.device_ceilings()
    result: dict[str, Any] = {**harness.device_context(), "ceilings": ceilings}
    for shape in shapes:
        result[shape] = _whole(shape, batches, exact, Floors(SHAPES[shape], ceilings))
        harness.show(shape, _rows(shape, result[shape]))
    return result


def _whole(shape: str, batches: Sequence[int], exact: bool, floors: Floors) -> dict[str, Any]:
    """Figures of one shape."""
    limits: dict[str, Any] = {"max_num_tokens_per_step": 8192, "max_num_running": 256}
    with random_engine(shape, exact=exact, **limits) as (engine, ready_s):
        bench, compiles = Bench(engine), Compiles()
        bench.decode_ms(1, floors)  # what is made on the first use is not counted
        compiles.take()
        return {
            "time_to_ready_s": ready_s,
            "decode": {
                batch: bench.decode_ms(batch, floors) | {"compiled": compiles.take()}
                for batch in batches
            },
            "prefill": {
                f"{count}x{length}": bench.prefill(count, length, floors)
                for count, length in ((1, 2048), (1, 8192), (16, 2048))
            },
            "throughput_256x1024x256": bench.throughput(256, 1024, 256, floors),
            "idle_share_of_256x1024x256": bench.idle_share(256, 1024, 256),
            "peer": PEER[shape],
        }


# -- steps with prompts, one by one

NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT = 256, 1024, 256
NUM_SKIPPED = 4
"""Steps at the beginning of each pass that are not counted."""


def _pass(bench: Bench, num_steps: int) -> list[float]:
    """Seconds of each of so many mixed steps, after the first; then all requests are let go."""
    bench.submit(NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT)
    seconds: list[float] = []
    for _ in range(num_steps):
        began = time.perf_counter()
        output = bench.engine.step()
        seconds.append(time.perf_counter() - began)
        if output.num_scheduled_tokens <= NUM_REQUESTS:
            raise RuntimeError(f"step {len(seconds)} had no prompts")
    bench.abort_last(NUM_REQUESTS)
    return seconds


def _mixed_device(bench: Bench, num_steps: int) -> dict[str, float]:
    bench.submit(NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT)
    for _ in range(NUM_SKIPPED):
        bench.engine.step()
    busy = bench.profiled(num_steps - NUM_SKIPPED)
    bench.abort_last(NUM_REQUESTS)
    idle = idle_share(busy)
    period_us = max(end for _, end in busy) - min(start for start, _ in busy)
    period_ms = period_us / 1e3 / (num_steps - NUM_SKIPPED)
    return {
        "device_busy_ms": period_ms * (1 - idle),
        "device_idle_ms": period_ms * idle,
        "device_idle_share": idle,
    }


@harness.case
@click.option("--shapes", type=Several(click.Choice(list(SHAPES))), default="qwen3-0.6b")
@click.option("--steps", default=24, help="of each pass; 32 have prompts")
@click.option("--plain", is_flag=True, help="launch no step with prompts ahead")
def mixed(shapes: Sequence[str], steps: int, plain: bool) -> dict[str, Any]:
    """Steps of 8,192 tokens with prompts and decodes: how long one takes, how long the device
    computes, and how long it has nothing to do.

    256 requests of 1,024 tokens come at once and go on to 256 each. Two passes (other tokens), so
    that neither measurement bears the cost of the other: the steps' own times, and the device's
    intervals, by torch's profiler.
    """
    harness.needs_cuda()
    result: dict[str, Any] = {
        **harness.device_context(),
        "requests": [NUM_REQUESTS, NUM_PROMPT, NUM_OUTPUT],
    }
    for shape in shapes:
        result[shape] = _mixed(shape, steps, plain)
        rows = [{"what": name, "": value} for name, value in result[shape].items()]
        harness.show(f"a step with prompts, {shape}", rows)
    return result


def _mixed(shape: str, steps: int, plain: bool) -> dict[str, Any]:
    """Figures of one shape."""
    limits: dict[str, Any] = {"max_num_tokens_per_step": 8192, "max_num_running": NUM_REQUESTS}
    with random_engine(shape, overlap_prompts=not plain, **limits) as (engine, _):
        bench = Bench(engine)
        _pass(bench, steps)  # what is made on the first use is not counted
        seconds = _pass(bench, steps)
        return {
            "first_step_ms": seconds[0] * 1e3,
            "step_ms": statistics.fmean(seconds[NUM_SKIPPED:]) * 1e3,
            **_mixed_device(bench, steps),
        }


# -- adapters

NUM_ADAPTERS = 4
LORA_PROMPT, LORA_OUTPUT = 64, 160
LORA_WAYS: dict[str, tuple[int, ...]] = {
    "no adapter": (0,),
    "1 adapter, all rows": (1,),
    "1 adapter, every other row": (1, 0),
    "4 adapters": (1, 2, 3, 4),
}
"""Numbers of adapters that the rows of a batch have in turn; 0: none."""

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500}
TINY |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}


def random_adapter(shape: dict[str, Any], rank: int, index: int, device: str) -> LoraAdapter:
    """Make a random LoRA adapter on every projection."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    query = shape["num_attention_heads"] * shape["head_dim"]
    key = shape["num_key_value_heads"] * shape["head_dim"]
    sizes = {
        "self_attn.q_proj": (hidden, query),
        "self_attn.k_proj": (hidden, key),
        "self_attn.v_proj": (hidden, key),
        "self_attn.o_proj": (query, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    generator = torch.Generator(device=device).manual_seed(index)

    def draw(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator, device=device) * 0.01).cpu()

    factors = {
        f"model.layers.{layer}.{name}": Factors(draw(rank, depth), draw(width, rank), 1.0)
        for layer in range(shape["num_hidden_layers"])
        for name, (depth, width) in sizes.items()
    }
    targets = tuple(name.rpartition(".")[2] for name in sizes)
    config = PeftConfig(rank, float(rank), False, targets, (), None, (), {}, {})
    return LoraAdapter(config, factors, f"{index + 1:064x}")


def _lora_step_ms(engine: LLMEngine, first: int, num_rows: int, adapters: tuple[int, ...]) -> float:
    """The median step in which all rows decode, from one `LLMEngine.step` to the next."""
    infos = engine.adapters()
    digests, names = ["", *(one.digest for one in infos)], ["", *(one.name for one in infos)]
    for row in range(num_rows):
        which = adapters[row % len(adapters)]
        root = chains.root_key(b"benchmark", "00", digests[which])
        engine.submit(
            Request(
                f"r{first + row}",
                numbered_prompt(first + row, LORA_PROMPT, engine),
                Sampling(max_tokens=LORA_OUTPUT, ignore_eos=True),
                partial(chains.extend, root),
                adapter=names[which],
                cache_root=root,
            )
        )
    steps: list[float] = []
    while engine.has_work():
        began = time.perf_counter()
        output = engine.step()
        ends = any(event.finish_reason for event in output.events)
        if len(output.events) == num_rows and not ends:
            steps.append(time.perf_counter() - began)
    return statistics.median(steps[len(steps) // 4 :]) * 1e3


def _lora_engine(
    folder: str, shape: dict[str, Any], rank: int, is_launched: bool, device: str, batches: Any
) -> dict[str, Any]:
    """Milliseconds a step by way and batch, of one engine."""
    limits = LoraLimits(
        max_num_adapters=NUM_ADAPTERS,
        max_rank=rank,
        max_bytes=8 << 30,
        max_launched_rank=rank if is_launched else 0,
    )
    began = time.perf_counter()
    engine = load_engine(
        EngineConfig(
            model=folder,
            device=device,
            decoder="own",
            context_window=1024,
            max_num_tokens_per_step=8192,
            max_num_running=max(batches),
            num_blocks=0 if device == "cuda" else 2000,
            lora=limits,
        )
    )
    ready_s = time.perf_counter() - began
    for index in range(NUM_ADAPTERS):
        engine.install_adapter(f"adapter {index}", random_adapter(shape, rank, index, device))
    numbers = itertools.count(1, max(batches))
    _lora_step_ms(engine, next(numbers), min(batches), LORA_WAYS["4 adapters"])  # the first use
    found: dict[str, Any] = {
        name: {batch: _lora_step_ms(engine, next(numbers), batch, adapters) for batch in batches}
        for name, adapters in LORA_WAYS.items()
    }
    engine.check_integrity()
    engine.close()
    return {"time_to_ready_s": ready_s, "adapter_bytes": engine.adapters()[0].num_bytes} | found


@harness.case
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen3-0.6b")
@click.option("--batches", type=Several(int), default="1,8,64")
@click.option("--rank", default=16)
@click.option("--device", type=click.Choice(("cuda", "cpu")), default="cuda", help="cpu: tiny")
def lora(shape: str, batches: Sequence[int], rank: int, device: str) -> dict[str, Any]:
    """Decode steps with LoRA adapters on all seven projections, milliseconds from step to step:
    launched ahead in CUDA graphs (`lora.max_launched_rank`), and as plain steps.

    Two engines, one after the other, with four random adapters: one launches adapters of this rank,
    the other none. Batches have no adapter, one for all rows, one for every other row, and four
    taking turns.
    """
    if device == "cuda":
        harness.needs_cuda()
    else:
        SHAPES[shape] |= TINY
    result: dict[str, Any] = {"shape": shape if device == "cuda" else "tiny", "rank": rank}
    with tempfile.TemporaryDirectory() as folder:
        random_checkpoint.save(Path(folder), shape, device=device)
        for label, is_launched in (("launched", True), ("plain", False)):
            one = _lora_engine(folder, SHAPES[shape], rank, is_launched, device, batches)
            result[label] = one
            gc.collect()  # an engine is in cycles, and the next one needs its memory
            if device == "cuda":
                torch.cuda.empty_cache()
    rows = [
        {"": way}
        | {
            f"batch {batch}, {label}": result[label][way][batch]
            for batch, label in itertools.product(batches, ("launched", "plain"))
        }
        for way in LORA_WAYS
    ]
    harness.show("ms a step", rows)
    return {**harness.device_context(device), **result}


# -- a model larger than the device memory given to it

TARGET, DRAFT = "baton-5m", "baton-5m-draft"
EXPANSIONS: dict[str, tuple[int, ...]] = {
    "chain of 4": (1, 1, 1, 1),
    "tree <2,1,1,1>": (2, 1, 1, 1),
    "tree <4,2,1,1>": (4, 2, 1, 1),
    "tree <2,1,1,1,1,1,1,1>": (2, 1, 1, 1, 1, 1, 1, 1),
}
"""Shapes of token trees (children by level). The last ones are for passes that cost so much that a
row more is nothing beside them."""
STORIES = (
    "Once upon a time there was a little dog called Tom. One day",
    "One day Anna went to the park and",
    "Lily had a red ball. It was",
    "The sun was warm and Ben wanted to",
    "There was a big tree in the garden. Mia said:",
    "Sam and Mom went to the shop. They",
    "It was a cold day. Max looked out and",
    "Sue saw a small cat near the house. The cat",
)
NUM_TREE_NODES = 32
WINDOW = 512


@dataclass
class _Way:
    """One engine, and what it did, by temperature."""

    engine: LLMEngine
    streamed_bytes: int
    """Bytes that a pass copies."""
    answers: dict[float, list[tuple[int, ...]]] = field(default_factory=dict)
    passes: dict[float, float] = field(default_factory=dict)

    @classmethod
    def load(cls, config: EngineConfig) -> _Way:
        model = load_model(config)
        engine = LLMEngine(config, model, proposers=load_proposers(config, model.info))
        engine.warm_up()
        stream = model.stream if isinstance(model, TransformersModel) else None
        return cls(engine, stream.plan.host_bytes if stream else 0)

    def answer(self, temperature: float, num_tokens: int) -> None:
        """All prompts, one after the other."""
        tokenizer = Tokenizer.load(resolve(TARGET, files="tokenizer").path)
        answers: list[tuple[int, ...]] = []
        before = self.engine.metrics().step_s.count
        for index, prompt in enumerate(STORIES):
            sampling = Sampling(num_tokens, temperature=temperature, seed=index, ignore_eos=True)
            ids = tuple(tokenizer.encode(prompt))
            token_ids: list[int] = []
            self.engine.submit(Request(f"{temperature}-{index}", ids, sampling, block_hash))
            while self.engine.has_work():
                for event in self.engine.step().events:
                    token_ids += event.token_ids
            answers.append(tuple(token_ids))
        num_steps = self.engine.metrics().step_s.count - before
        self.answers[temperature] = answers
        self.passes[temperature] = num_steps / (len(STORIES) * num_tokens)


def _streamed(
    device: str, share: float, temperatures: Sequence[float], num_tokens: int
) -> dict[str, Any]:
    dtype = "float32" if device == "cpu" else "bfloat16"
    folder = resolve(TARGET, files="all").path
    weight_bytes = weights.num_weight_bytes(folder, DTYPE_BYTES[dtype])
    plain = EngineConfig(
        model=TARGET,
        device=device,
        dtype=dtype,
        context_window=WINDOW,
        num_blocks=4 * WINDOW // 16,
        weights_device_bytes=int(share * weight_bytes),
    )
    configs = {"streamed": plain}
    for name, expansion in EXPANSIONS.items():
        guessing = SpeculationConfig(
            draft_models=(DRAFT,), expansion=expansion, max_num_nodes=NUM_TREE_NODES, always=True
        )
        configs[f"streamed, {name}"] = replace(plain, speculation=guessing)
    ways = {name: _Way.load(config) for name, config in configs.items()}
    for temperature, way in itertools.product(temperatures, ways.values()):
        way.answer(temperature, num_tokens)
    given = {"weight_bytes": weight_bytes, "given_bytes": plain.weights_device_bytes}
    found: dict[str, Any] = {**given, "dtype": dtype}
    for temperature in temperatures:
        expected, rows = ways["streamed"].answers[temperature], {}
        for name, way in ways.items():
            pairs = zip(way.answers[temperature], expected, strict=True)
            num_equal = sum(one == other for one, other in pairs)
            if device == "cpu" and num_equal < len(expected):
                raise RuntimeError(f"{name}: an answer differs from the one without trees")
            rows[name] = {
                "passes": round(way.passes[temperature], 3),
                "copied_bytes": round(way.passes[temperature] * way.streamed_bytes),
                "answers_equal": num_equal / len(expected),
            }
        found[f"temperature {temperature:g}"] = rows
        title = f"per output token, temperature {temperature:g}"
        harness.show(title, [{"": name} | row for name, row in rows.items()])
    for way in ways.values():
        way.engine.close()
    return found


@harness.case
@click.option("--device", default="cpu")
@click.option("--share", default=0.6, help="of the bundled model's weights on the device")
@click.option("--temperatures", type=Several(float), default="0,0.8")
@click.option("--tokens", default=96)
def offload(
    device: str, share: float, temperatures: Sequence[float], tokens: int
) -> dict[str, Any]:
    """A model larger than the device memory given to it: passes of the target per output token with
    a draft model's token trees and without.

    The bundled model, one request at a time, the same prompts and seeds every way: `passes` is
    steps of the target per output token (prompts included), `copied_bytes` what they copied. On a
    CPU not one token may differ.
    """
    trees = _streamed(device, share, temperatures, tokens)
    return {**harness.device_context(device), "trees": trees}


main = harness.program(__doc__, whole, mixed, lora, offload)

if __name__ == "__main__":
    main()
