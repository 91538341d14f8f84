"""Decode tokens per second on CPU: the engine against transformers' generate and generate_batch.

One random checkpoint of the shape of a 0.5B model (24 layers, hidden 896, 14 query and 2 kv heads,
ffn 4864, vocabulary 151,936, tied) in bfloat16, one prompt batch, all three in one process, taking
turns, so that drift of the machine hits all. A rate counts the tokens drawn after every prompt has
its first, over
the time from there to the last: start-up and prefill are outside. The floor is the time to read
each weight once at the bandwidth measured in the same run. The last line printed is one JSON
object.

    OMP_NUM_THREADS=2 python -m benchmarks.engine_cpu --batch 8 --rounds 3

Nothing is written unless --out says where; the checkpoint lies in a temporary folder.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks.context import context, publish
from engine.config import EngineConfig
from engine.loop import Engine, load_engine
from engine.request import Request, Sampling

Times = list[list[float]]
"""Per prompt, when each of its tokens was drawn; seconds on one clock."""
Run = Callable[[int], Times]
"""Generate this many tokens for every prompt."""

SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    },
    "5m": {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 704,
        "vocab_size": 2048,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    },
}


def save_random(folder: Path, shape: str, dtype: str) -> None:
    """A random Qwen2-shaped checkpoint with a tokenizer file."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SHAPES[shape], eos_token_id=None, pad_token_id=0)
    model = transformers.Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    vocabulary = {str(token_id): token_id for token_id in range(config.vocab_size)}
    Tokenizer(WordLevel(vocabulary, unk_token="0")).save(str(folder / "tokenizer.json"))


def read_bandwidth() -> float:
    """GB/s of reading 1 GiB, best of a second."""
    data = torch.ones(1 << 27, dtype=torch.int64)
    best, end = 0.0, time.perf_counter() + 1.0
    while time.perf_counter() < end:
        began = time.perf_counter()
        data.sum()
        best = max(best, data.numel() * 8 / (time.perf_counter() - began) / 1e9)
    return best


def _block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    data = b"".join(token.to_bytes(4, "little") for token in token_ids)
    return hashlib.blake2b(parent + data, digest_size=16).digest()


def with_engine(engine: Engine, prompts: list[list[int]]) -> Run:
    """The engine, called as a worker calls it; prompts differ per call, so nothing is cached."""
    calls = 0

    def run(num_tokens: int) -> Times:
        nonlocal calls
        calls += 1
        times: dict[str, list[float]] = {}
        for row, prompt in enumerate(prompts):
            token_ids = (calls % 1000 + 2, *prompt[1:])
            sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
            engine.reserve(Request(f"{calls} {row}", token_ids, sampling, _block_hash))
            engine.start(f"{calls} {row}")
        while engine.has_work():
            for event in engine.step().events:
                if event.token_ids:
                    times.setdefault(event.request_id, []).append(time.perf_counter())
        return list(times.values())

    return run


class _Clock(transformers.StoppingCriteria):  # type: ignore[misc]
    """Notes when each token was drawn; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def with_generate(model: Any, prompts: list[list[int]]) -> Run:
    """transformers' generate, SDPA attention, dynamic cache, static batch."""
    batch = torch.tensor(prompts)
    mask = torch.ones_like(batch)

    def run(num_tokens: int) -> Times:
        clock = _Clock()
        with torch.inference_mode():
            model.generate(
                batch,
                attention_mask=mask,
                max_new_tokens=num_tokens,
                do_sample=False,
                stopping_criteria=transformers.StoppingCriteriaList([clock]),
            )
        return [clock.times] * len(prompts)

    return run


def with_generate_batch(model: Any, prompts: list[list[int]]) -> Run:
    """transformers' continuous batching, paged SDPA attention."""

    def run(num_tokens: int) -> Times:
        config = transformers.GenerationConfig(
            max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        outputs = model.generate_batch(prompts, generation_config=config, record_timestamps=True)
        return [one.timestamps for one in outputs.values()]

    return run


def decode_rate(times: Times, num_prompts: int, num_tokens: int) -> float:
    """Tokens per second after every prompt has its first."""
    assert [len(one) for one in times] == [num_tokens] * num_prompts
    began = max(one[0] for one in times)
    after = [moment for one in times for moment in one if moment > began]
    return len(after) / (max(after) - began)


def measure(
    runs: dict[str, Run], num_tokens: int, batch: int, rounds: int, settle_s: float
) -> dict[str, Any]:
    """Take turns; per way the decode rate of each round and their median."""
    for run in runs.values():
        run(2)  # warm up
    rates: dict[str, list[float]] = {name: [] for name in runs}
    # A line a round: a spinner's thread would take time from the two cores that are measured.
    for number in range(1, rounds + 1):
        sys.stderr.write(f"round {number} of {rounds}\n")
        for name, run in runs.items():
            # generate_batch gives GBs back to the system after it returned, and who comes next pays
            # for it (measured: 122 instead of 215 tokens/s). Nobody shall.
            gc.collect()
            time.sleep(settle_s)
            rates[name].append(decode_rate(run(num_tokens), batch, num_tokens))
    return {
        name: {
            "tokens_per_s": round(statistics.median(values), 1),
            "rounds": [round(value, 1) for value in values],
        }
        for name, values in rates.items()
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=33)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle-s", type=float, default=6.0, help="pause before each turn")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="write the JSON object here, too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    console = Console(stderr=True)

    with tempfile.TemporaryDirectory() as folder:
        with console.status("random checkpoint"):
            save_random(Path(folder), arguments.shape, arguments.dtype)
        with console.status("loading"):
            engine = load_engine(
                EngineConfig(model=folder, device="cpu", dtype=arguments.dtype, context_window=1024)
            )
            # One each: generate_batch changes its model's attention implementation.
            static, continuous = (
                transformers.AutoModelForCausalLM.from_pretrained(
                    folder, dtype=arguments.dtype, attn_implementation="sdpa"
                ).eval()
                for _ in range(2)
            )
    prompts = torch.randint(2, 2000, (arguments.batch, arguments.prompt_tokens)).tolist()
    bandwidth = read_bandwidth()
    rates = measure(
        {
            "engine": with_engine(engine, prompts),
            "generate": with_generate(static, prompts),
            "generate_batch": with_generate_batch(continuous, prompts),
        },
        arguments.tokens,
        arguments.batch,
        arguments.rounds,
        arguments.settle_s,
    )
    ours = rates["engine"]["tokens_per_s"]
    step_ms = arguments.batch / ours * 1e3
    floor_ms = engine.model_info.weight_bytes / bandwidth / 1e6
    result = {
        "benchmark": "engine_cpu",
        "shape": arguments.shape,
        "dtype": arguments.dtype,
        "batch": arguments.batch,
        "prompt_tokens": arguments.prompt_tokens,
        "threads": arguments.threads,
        "rates": rates,
        "ratio_to_generate": round(ours / rates["generate"]["tokens_per_s"], 2),
        "ratio_to_generate_batch": round(ours / rates["generate_batch"]["tokens_per_s"], 2),
        "step_ms": round(step_ms, 2),
        "read_bandwidth_gb_per_s": round(bandwidth, 1),
        "weight_bytes": engine.model_info.weight_bytes,
        "bandwidth_floor_ms": round(floor_ms, 2),
        "share_of_floor": round(floor_ms / step_ms, 3),
        "linear": engine.model_info.linear,
        "fused": engine.model_info.fused,
        **context(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    table = Table(title=f"decode, batch {arguments.batch}, {arguments.shape} {arguments.dtype}")
    for column in ("", "tokens/s", "engine is"):
        table.add_column(column, justify="right")
    for name, rate in rates.items():
        value = rate["tokens_per_s"]
        table.add_row(name, f"{value}", f"{ours / value:.2f}x")
    console.print(table)
    console.print(
        f"step {step_ms:.1f} ms; reading the weights once takes {floor_ms:.1f} ms at "
        f"{bandwidth:.1f} GB/s: {floor_ms / step_ms:.0%} of the floor"
    )
    publish(result, arguments.out)


if __name__ == "__main__":
    main()
