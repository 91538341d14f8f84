"""A model larger than the device memory given to it: passes of the target per output token, with a
draft model's token trees and without, and what a pass costs beside what its copies must cost.

First, the bundled model with `--share` of its weights on the device, the other layers streamed:
one request at a time, the same prompts and seeds every way, ways turn about, best of rounds.
`passes` is steps of the target per output token (prompts included), `copied_bytes` what they copied
per output token, `speed` tokens per second over those of streaming without trees. Streamed answers
with and without trees are compared; on a CPU not one token may differ (in bfloat16 a sum over more
rows may round otherwise). `resident` is the same model wholly on the device, as it is computed
there without the setting.

Then, with `--shape`, a random model of a known shape with `--given-gib` on the device: milliseconds
a pass of 1 row, and of 1 + 32 as a tree has, and beside it the copy of as many bytes from the same
kind of host memory, nothing else going on. `overlap` is that over the pass: 1 where all computation
is under the copies. Peak memory is the allocator's, while loading too.

    OMP_NUM_THREADS=1 python -m benchmarks.offload --out benchmarks/results/<date>-offload.json
    python -m benchmarks.offload --device cuda --shape llama-8b --given-gib 6 --out ...

The last line printed is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import random_checkpoint
from benchmarks.context import context, publish
from checkpoints.resolve import resolve
from engine.batch import Batch, Span
from engine.config import EngineConfig
from engine.kv.layout import DTYPE_BYTES
from engine.loop import Engine
from engine.models import weight_room
from engine.models.hugging_face import HuggingFaceModel
from engine.models.load import load_model
from engine.models.offload_copies import HostMemory
from engine.request import Request, Sampling
from engine.speculation.config import SpeculationConfig
from engine.speculation.load import load_drafters
from tokens.tokenizer import Tokenizer

TARGET, DRAFT = "baton-5m", "baton-5m-draft"
EXPANSIONS: dict[str, tuple[int, ...]] = {
    "chain of 4": (1, 1, 1, 1),
    "tree <2,1,1,1>": (2, 1, 1, 1),
    "tree <4,2,1,1>": (4, 2, 1, 1),
    "tree <2,1,1,1,1,1,1,1>": (2, 1, 1, 1, 1, 1, 1, 1),
}
"""The last ones are for passes that cost so much that a row more is nothing beside them."""
PROMPTS = (
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
CONTEXT = 512


@dataclass
class _Way:
    """One engine, and what it was seen to do."""

    engine: Engine
    streamed_bytes: int
    """That a pass copies."""
    answers: dict[float, list[tuple[int, ...]]]
    seconds: dict[float, float]
    passes: dict[float, float]


def _block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    data = b"".join(token.to_bytes(4, "little") for token in token_ids)
    return hashlib.blake2b(parent + data, digest_size=16).digest()


def _load(config: EngineConfig) -> _Way:
    model = load_model(config)
    engine = Engine(config, model, drafters=load_drafters(config, model.info))
    engine.warm_up()
    stream = model.stream if isinstance(model, HuggingFaceModel) else None
    return _Way(engine, stream.plan.host_bytes if stream else 0, {}, {}, {})


def _answer(way: _Way, temperature: float, num_tokens: int, name: str) -> None:
    """All prompts, one after the other."""
    tokenizer = Tokenizer.load(resolve(TARGET, files="tokenizer").path)
    answers: list[tuple[int, ...]] = []
    before, took_s = way.engine.metrics().step_s.count, 0.0
    for index, prompt in enumerate(PROMPTS):
        sampling = Sampling(num_tokens, temperature=temperature, seed=index, ignore_eos=True)
        token_ids: list[int] = []
        way.engine.submit(
            Request(f"{name}-{index}", tuple(tokenizer.encode(prompt)), sampling, _block_hash)
        )
        began = time.perf_counter()
        while way.engine.has_work():
            for event in way.engine.step().events:
                token_ids += event.token_ids
        took_s += time.perf_counter() - began
        answers.append(tuple(token_ids))
    num_steps = way.engine.metrics().step_s.count - before
    way.answers[temperature] = answers
    way.passes[temperature] = num_steps / (len(PROMPTS) * num_tokens)
    way.seconds[temperature] = min(took_s, way.seconds.get(temperature, took_s))


def _trees(arguments: argparse.Namespace) -> dict[str, Any]:
    dtype = "float32" if arguments.device == "cpu" else "bfloat16"
    folder = resolve(TARGET, files="all").path
    weight_bytes = weight_room.num_weight_bytes(folder, DTYPE_BYTES[dtype])
    given = int(arguments.share * weight_bytes)
    plain = EngineConfig(
        model=TARGET,
        device=arguments.device,
        dtype=dtype,
        context_window=CONTEXT,
        num_blocks=4 * CONTEXT // 16,
        weights_device_bytes=given,
    )
    configs = {"resident": replace(plain, weights_device_bytes=0), "streamed": plain}
    for name, expansion in EXPANSIONS.items():
        guessing = SpeculationConfig(
            draft_models=(DRAFT,),
            expansion=expansion,
            max_num_nodes=NUM_TREE_NODES,
            always=True,
        )
        configs[f"streamed, {name}"] = replace(plain, speculation=guessing)
    ways = {name: _load(config) for name, config in configs.items()}
    for index, temperature in itertools.product(range(arguments.rounds), arguments.temperatures):
        for way in ways.values():
            _answer(way, temperature, arguments.tokens, f"{temperature}-{index}")
    found: dict[str, Any] = {"weight_bytes": weight_bytes, "given_bytes": given, "dtype": dtype}
    for temperature in arguments.temperatures:
        expected = ways["streamed"].answers[temperature]
        rows: dict[str, Any] = {}
        for name, way in ways.items():
            num_equal = sum(
                one == other for one, other in zip(way.answers[temperature], expected, strict=True)
            )
            if arguments.device == "cpu" and name != "resident" and num_equal < len(expected):
                raise SystemExit(f"{name}: an answer differs from the one without trees")
            num_tokens = len(PROMPTS) * arguments.tokens
            rows[name] = {
                "passes": round(way.passes[temperature], 3),
                "copied_bytes": round(way.passes[temperature] * way.streamed_bytes),
                "tokens_per_s": round(num_tokens / way.seconds[temperature], 1),
                "speed": round(ways["streamed"].seconds[temperature] / way.seconds[temperature], 3),
                "answers_equal": num_equal / len(expected),
            }
        found[f"temperature {temperature:g}"] = rows
    for way in ways.values():
        way.engine.close()
    return found


# -- what a pass costs


def _median_s(work: Callable[[], object], device: torch.device, repeats: int = 9) -> float:
    times: list[float] = []
    for _ in range(repeats + 2):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def _pass(shape: str, given_bytes: int, device_name: str) -> dict[str, Any]:
    device = torch.device(device_name)
    with tempfile.TemporaryDirectory() as name:
        random_checkpoint.save(Path(name), shape, device=device_name)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        config = EngineConfig(
            model=name,
            device=device_name,
            dtype="bfloat16",
            context_window=CONTEXT,
            weights_device_bytes=given_bytes,
        )
        began = time.perf_counter()
        model = load_model(config)
        load_s = time.perf_counter() - began
    if not isinstance(model, HuggingFaceModel) or model.stream is None:
        raise SystemExit(f"{shape} fits in {given_bytes} bytes: nothing is streamed")
    plan = model.stream.plan
    found: dict[str, Any] = {
        "given_bytes": given_bytes,
        "device_bytes": plan.device_bytes,
        "host_bytes": plan.host_bytes,
        "layers_streamed": f"{len(plan.streamed)} of {len(plan.layer_bytes)}",
        "load_s": round(load_s, 1),
    }
    if device.type == "cuda":
        found["peak_bytes_while_loading"] = torch.cuda.max_memory_allocated(device)
    memory = model.make_memory(model.layout.num_blocks_for(CONTEXT))
    model.attach(memory)
    blocks = tuple(range(memory.num_blocks))
    model.forward(Batch(tuple(range(1, 257)), (Span(0, 256, blocks),), (255,)))
    for num_rows in (1, 1 + NUM_TREE_NODES):
        # Chains of 4: four rows follow the root, each of the others the one four before it.
        branches = tuple(max(node - 4, -1) for node in range(num_rows - 1))
        span = Span(256, num_rows, blocks, branches=branches)
        batch = Batch(tuple(range(2, 2 + num_rows)), (span,), tuple(range(num_rows)))
        found[f"pass_ms_of_{num_rows}"] = round(
            _median_s(partial(model.forward, batch), device) * 1e3, 3
        )
    model.check_integrity()
    size = plan.buffer_bytes
    source, target = HostMemory(size, device), torch.empty(size, dtype=torch.uint8, device=device)
    source.bytes.fill_(1)  # pages that were never written are copied from one page of zeros
    copy_s = _median_s(lambda: target.copy_(source.bytes, non_blocking=True), device)
    found["copy_gb_per_s"] = round(size / copy_s / 1e9, 2)
    found["copies_ms"] = round(plan.host_bytes / size * copy_s * 1e3, 3)
    found["overlap"] = round(found["copies_ms"] / found["pass_ms_of_1"], 3)
    model.close()
    source.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=sorted(random_checkpoint.SHAPES))
    parser.add_argument("--given-gib", type=float, default=6.0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"trees": _trees(arguments)}
    _show(result["trees"])
    if arguments.shape:
        given_bytes = int(arguments.given_gib * 2**30)
        result[arguments.shape] = _pass(arguments.shape, given_bytes, arguments.device)
    publish({**context(), "device": _device_name(arguments.device), **result}, arguments.out)


def _device_name(device: str) -> str:
    return "cpu" if device == "cpu" else torch.cuda.get_device_name(device)


def _show(found: dict[str, Any]) -> None:
    table = Table(title="passes of the target per output token, and speed against no trees")
    table.add_column("")
    for column in ("passes", "MB copied", "tokens/s", "speed"):
        table.add_column(column, justify="right")
    for name, rows in found.items():
        if not isinstance(rows, dict):
            continue
        for way, one in rows.items():
            table.add_row(
                f"{name}, {way}",
                f"{one['passes']:.3f}",
                f"{one['copied_bytes'] / 1e6:.2f}",
                f"{one['tokens_per_s']:.1f}",
                f"{one['speed']:.2f} x",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
