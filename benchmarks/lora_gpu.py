"""Decode steps of a whole engine with LoRA adapters on one GPU: launched ahead in CUDA graphs, and
as plain steps.

Random weights of a known shape (benchmarks/random_checkpoint.py) and four random adapters on all
seven projections, bfloat16, greedy. Two engines, one after the other: one launches adapters of this
rank (`lora.max_launched_rank`), the other none: of that one, only batches without adapters are
launched. Each decodes batches of requests with no adapter, one for all rows, one for every other
row, and four taking turns. A figure is the median step of a full batch, from one `Engine.step` to
the next. The last line printed is one JSON object.

    python -m benchmarks.lora_gpu --shape qwen3-0.6b --batches 1 8 64

Without CUDA nothing is measured, but `--device cpu` runs it with a small shape.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import random_checkpoint
from benchmarks.context import context, publish
from benchmarks.random_checkpoint import SHAPES
from engine.config import EngineConfig
from engine.loop import Engine, load_engine
from engine.lora.config import LoraLimits
from engine.lora.files import Adapter, Factors
from engine.lora.peft import PeftConfig
from engine.request import Request, Sampling
from kvstore import block_hash

NUM_ADAPTERS = 4
NUM_PROMPT = 64
NUM_OUTPUT = 160
WAYS: dict[str, tuple[int, ...]] = {
    "no adapter": (0,),
    "1 adapter, all rows": (1,),
    "1 adapter, every other row": (1, 0),
    "4 adapters": (1, 2, 3, 4),
}
"""Adapters that rows have in turn; 0: none."""

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 500}
TINY |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96}


def random_adapter(shape: dict[str, Any], rank: int, index: int, device: str) -> Adapter:
    """On every projection."""
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
    return Adapter(config, factors, f"{index + 1:064x}")


class Bench:
    """One engine, its adapters loaded, and requests that differ from all before."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_requests = 0

    def step_ms(self, num_rows: int, adapters: tuple[int, ...]) -> float:
        """The median step in which all rows decode."""
        digests = [""] + [info.digest for info in self._engine.adapters()]
        names = [""] + [info.name for info in self._engine.adapters()]
        sampling = Sampling(max_tokens=NUM_OUTPUT, ignore_eos=True)
        vocab_size = self._engine.model_info.vocab_size
        for row in range(num_rows):
            self._num_requests += 1
            which = adapters[row % len(adapters)]
            prompt = [(self._num_requests * 7919 + at * 104_729) for at in range(NUM_PROMPT)]
            root = block_hash.root_key(b"benchmark", "00", digests[which])
            self._engine.submit(
                Request(
                    f"r{self._num_requests}",
                    tuple(token % vocab_size for token in prompt),
                    sampling,
                    partial(block_hash.extend, root),
                    adapter=names[which],
                    cache_root=root,
                )
            )
        steps: list[float] = []
        while self._engine.has_work():
            began = time.perf_counter()
            output = self._engine.step()
            ends = any(event.finish_reason for event in output.events)
            if len(output.events) == num_rows and not ends:
                steps.append(time.perf_counter() - began)
        return statistics.median(steps[len(steps) // 4 :]) * 1e3


def measure(
    folder: Path, shape: dict[str, Any], arguments: argparse.Namespace, *, is_launched: bool
) -> dict[str, Any]:
    """Milliseconds a step by way and batch, of one engine."""
    rank = arguments.rank
    limits = LoraLimits(
        max_num_adapters=NUM_ADAPTERS,
        max_rank=rank,
        max_bytes=8 << 30,
        max_launched_rank=rank if is_launched else 0,
    )
    began = time.perf_counter()
    engine = load_engine(
        EngineConfig(
            model=str(folder),
            device=arguments.device,
            decoder="own",
            context_window=1024,
            max_num_tokens_per_step=8192,
            max_num_running=max(arguments.batches),
            num_blocks=0 if arguments.device == "cuda" else 2000,
            lora=limits,
        )
    )
    ready_s = time.perf_counter() - began
    for index in range(NUM_ADAPTERS):
        adapter = random_adapter(shape, rank, index, arguments.device)
        engine.install_adapter(f"adapter {index}", adapter)
    bench = Bench(engine)
    bench.step_ms(min(arguments.batches), WAYS["4 adapters"])  # whatever a first use makes
    found: dict[str, Any] = {
        name: {batch: bench.step_ms(batch, adapters) for batch in arguments.batches}
        for name, adapters in WAYS.items()
    }
    engine.check_integrity()
    engine.close()
    return {"time_to_ready_s": ready_s, "adapter_bytes": engine.adapters()[0].num_bytes} | found


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("benchmarks.lora_gpu: torch finds no CUDA device")
    if arguments.device == "cpu":
        SHAPES[arguments.shape] |= TINY
    shape = SHAPES[arguments.shape]
    console = Console(stderr=True, width=140)
    result: dict[str, Any] = {
        **context(),
        "shape": arguments.shape if arguments.device == "cuda" else "tiny",
        "rank": arguments.rank,
        "torch": torch.__version__,
    }
    with tempfile.TemporaryDirectory() as name:
        random_checkpoint.save(Path(name), arguments.shape, device=arguments.device)
        for label, is_launched in (("launched", True), ("plain", False)):
            result[label] = measure(Path(name), shape, arguments, is_launched=is_launched)
            gc.collect()  # an engine is in cycles, and the next one needs its memory
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
    for way in WAYS:
        for batch in arguments.batches:
            launched, plain = result["launched"][way][batch], result["plain"][way][batch]
            console.print(
                f"batch {batch:3}, {way:26}: launched {launched:7.3f} ms a step, plain "
                f"{plain:7.3f} ms"
            )
    publish(result, arguments.out)


if __name__ == "__main__":
    main()
