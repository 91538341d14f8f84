"""Decode steps with LoRA adapters in the batch, against none and against a merged model.

One random checkpoint of a 0.5B or 5M model's shape (benchmarks/engine_cpu.py), four random adapters
on all seven projections. One model has the adapters loaded and computes the same decode batch with
none of them asked for, one for every row, one for half of the rows, and four taking turns. A second
model has one adapter merged into its weights, and none loaded: what any model costs without LoRA.
They take turns step by step, so that other load on the machine hits all alike, and a ratio is the
median of the ratios within one turn. Only the forward pass is timed. The last line printed is one
JSON object.

    OMP_NUM_THREADS=1 python -m benchmarks.lora --threads 1
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from benchmarks.context import context, publish
from benchmarks.engine_cpu import SHAPES, save_random
from engine.batch import Batch, Span
from engine.config import EngineConfig
from engine.kv.memory import KvMemory
from engine.models.hugging_face import HuggingFaceModel
from engine.models.load import load_model

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_ADAPTERS = 4
MERGED, IDLE = "merged, none loaded", "4 loaded, none asked for"


def save_adapter(folder: Path, checkpoint: Path, rank: int, seed: int) -> None:
    """A random adapter on every projection, in PEFT's format."""
    torch.manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in TARGETS:
            key = f"base_model.model.{module}.lora_"
            tensors[f"{key}A.weight"] = torch.randn(rank, weight.shape[1]) * 0.01
            tensors[f"{key}B.weight"] = torch.randn(weight.shape[0], rank) * 0.01
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": TARGETS}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def save_merged(folder: Path, checkpoint: Path, adapter: Path) -> None:
    """The checkpoint with an adapter in its weights."""
    folder.mkdir()
    for file in checkpoint.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(checkpoint / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, weight in weights.items():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{key}A.weight" in tensors:
            delta = tensors[f"{key}B.weight"] @ tensors[f"{key}A.weight"]
            weights[name] = (weight.float() + delta).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def decode_batch(model: HuggingFaceModel, num_rows: int, num_tokens: int) -> Batch:
    """Compute `num_rows` prompts of `num_tokens`; the batch that decodes one more token of each."""
    num_blocks = model.layout.num_blocks_for(num_tokens + 1)
    model.attach(KvMemory(model.layout, num_rows * num_blocks, "cpu"))
    spans: list[Span] = []
    for row in range(num_rows):
        block_ids = tuple(range(row * num_blocks, (row + 1) * num_blocks))
        prompt = tuple((7919 * i + 31 * row) % 2000 for i in range(num_tokens))
        held = block_ids[: model.layout.num_blocks_for(num_tokens)]
        model.forward(Batch(prompt, (Span(0, num_tokens, held),), (num_tokens - 1,)))
        spans.append(Span(num_tokens, 1, block_ids))
    return Batch(tuple(range(num_rows)), tuple(spans), tuple(range(num_rows)))


def with_slots(batch: Batch, slots: Sequence[int]) -> Batch:
    """Row i with slots[i % len]."""
    spans = tuple(
        span._replace(adapter=slots[row % len(slots)]) for row, span in enumerate(batch.spans)
    )
    return dataclasses.replace(batch, spans=spans)


def measure(
    base: HuggingFaceModel, merged: HuggingFaceModel, num_rows: int, num_tokens: int, turns: int
) -> dict[str, list[float]]:
    """Seconds of each step by way."""
    batch = decode_batch(base, num_rows, num_tokens)
    ways = {
        MERGED: (merged, decode_batch(merged, num_rows, num_tokens)),
        IDLE: (base, batch),
        "1 adapter, all rows": (base, with_slots(batch, [1])),
        "1 adapter, half of the rows": (base, with_slots(batch, [0, 1])),
        "4 adapters": (base, with_slots(batch, [1, 2, 3, 4])),
    }
    steps_s: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(turns + 3):  # the first three warm up
        for name, (model, own) in ways.items():
            began = time.perf_counter()
            model.forward(own)
            if turn >= 3:
                steps_s[name].append(time.perf_counter() - began)
    return steps_s


def _load(folder: Path, dtype: str) -> HuggingFaceModel:
    return load_model(
        EngineConfig(model=str(folder), device="cpu", dtype=dtype, context_window=1024)
    )


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="write the JSON object here, too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_random(folder / "base", arguments.shape, arguments.dtype)
        adapters = [folder / f"adapter-{index}" for index in range(NUM_ADAPTERS)]
        for index, adapter in enumerate(adapters):
            save_adapter(adapter, folder / "base", arguments.rank, index)
        save_merged(folder / "merged", folder / "base", adapters[0])
        base, merged = (_load(folder / which, arguments.dtype) for which in ("base", "merged"))
        base.attach(KvMemory(base.layout, 1, "cpu"))
        for adapter in adapters:
            base.adapters.load(adapter.name, adapter)
    steps_s = measure(base, merged, arguments.batch, arguments.prompt_tokens, arguments.turns)
    _report(arguments, steps_s, base)


def _report(
    arguments: argparse.Namespace, steps_s: dict[str, list[float]], model: HuggingFaceModel
) -> None:
    ways: dict[str, dict[str, float]] = {}
    for name, steps in steps_s.items():
        step_ms = statistics.median(steps) * 1e3
        ways[name] = {
            "tokens_per_s": round(arguments.batch / step_ms * 1e3, 1),
            "step_ms": round(step_ms, 2),
            "best_step_ms": round(min(steps) * 1e3, 2),
            "speed_of_idle": _ratio(steps_s[IDLE], steps),
            "speed_of_merged": _ratio(steps_s[MERGED], steps),
        }
    result: dict[str, Any] = {
        "benchmark": "lora",
        "shape": arguments.shape,
        "dtype": arguments.dtype,
        "batch": arguments.batch,
        "rank": arguments.rank,
        "prompt_tokens": arguments.prompt_tokens,
        "turns": arguments.turns,
        "threads": arguments.threads,
        "ways": ways,
        "adapter_bytes": model.adapters.infos()[0].num_bytes,
        "weight_bytes": model.info.weight_bytes,
        "linear": model.info.linear,
        "fused": model.info.fused,
        **context(),
        "torch": torch.__version__,
    }
    table = Table(title=f"decode, batch {arguments.batch}, {arguments.shape} {arguments.dtype}")
    for column in ("", "tokens/s", "step ms", "best ms", "of idle", "of merged"):
        table.add_column(column, justify="right")
    for name, way in ways.items():
        table.add_row(name, *(str(value) for value in way.values()))
    Console(stderr=True).print(table)
    publish(result, arguments.out)


def _ratio(reference: list[float], steps: list[float]) -> float:
    """Median within one turn."""
    return round(statistics.median(r / s for r, s in zip(reference, steps, strict=True)), 3)


if __name__ == "__main__":
    main()
