"""Decode tokens per second on a CPU: the engine against transformers' generate and generate_batch.

OMP_NUM_THREADS=2 python -m benchmarks.engine_cpu --batch 8 --rounds 3
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks import harness
from benchmarks.harness import block_hash
from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from engine.request import Request, Sampling

Times = list[list[float]]
"""The times at which each token was sampled, by prompt; seconds on one clock."""
Run = Callable[[int], Times]
"""A function that generates a number of tokens for every prompt."""

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
    """Write a random Qwen2-shaped checkpoint with a tokenizer file."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(**SHAPES[shape], eos_token_id=None, pad_token_id=0)
    model = transformers.Qwen2ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    vocabulary = {str(token_id): token_id for token_id in range(config.vocab_size)}
    Tokenizer(WordLevel(vocabulary, unk_token="0")).save(str(folder / "tokenizer.json"))


def with_engine(engine: LLMEngine, prompts: list[list[int]]) -> Run:
    """Generate with the engine, called as a worker calls it; prompts differ per call, so nothing is
    cached."""
    calls = 0

    def run(num_tokens: int) -> Times:
        nonlocal calls
        calls += 1
        times: dict[str, list[float]] = {}
        for row, prompt in enumerate(prompts):
            token_ids = (calls % 1000 + 2, *prompt[1:])
            sampling = Sampling(max_tokens=num_tokens, ignore_eos=True)
            engine.reserve(Request(f"{calls} {row}", token_ids, sampling, block_hash))
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
    """Generate with transformers' `generate`: SDPA attention, dynamic cache, static batch."""
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
    """Generate with transformers' continuous batching: paged SDPA attention."""

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


@harness.case
@click.option("--shape", type=click.Choice(list(SHAPES)), default="0.5b")
@click.option("--dtype", type=click.Choice(("bfloat16", "float32")), default="bfloat16")
@click.option("--batch", default=8)
@click.option("--prompt-tokens", default=64)
@click.option("--tokens", default=33)
@click.option("--rounds", default=3)
@click.option("--settle-s", default=6.0, help="pause before each turn")
@click.option("--threads", default=os.cpu_count() or 1)
def main(
    shape: str,
    dtype: str,
    batch: int,
    prompt_tokens: int,
    tokens: int,
    rounds: int,
    settle_s: float,
    threads: int,
) -> dict[str, Any]:
    """Decode tokens per second on a CPU: the engine against transformers' generate and
    generate_batch, in one process, taking turns.

    One random checkpoint of the shape of a 0.5B model. A rate counts the tokens drawn after every
    prompt has its first, over the time from there to the last: start-up and prefill are outside.
    The floor is the time to read each weight once at the bandwidth measured in the same run.
    """
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        save_random(Path(folder), shape, dtype)
        config = EngineConfig(model=folder, device="cpu", dtype=dtype, context_window=1024)
        engine = load_engine(config)
        # One each: generate_batch changes its model's attention implementation.
        static, continuous = (
            transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, attn_implementation="sdpa"
            ).eval()
            for _ in range(2)
        )
    prompts = torch.randint(2, 2000, (batch, prompt_tokens)).tolist()
    bandwidth = harness.host_read_gb_per_s()
    runs = {
        "engine": with_engine(engine, prompts),
        "generate": with_generate(static, prompts),
        "generate_batch": with_generate_batch(continuous, prompts),
    }
    for run in runs.values():
        run(2)  # warm up

    def turn(run: Run) -> float:
        # generate_batch gives GBs back to the system after it returned, and the next way would pay
        # for it (measured: 122 instead of 215 tokens/s).
        gc.collect()
        time.sleep(settle_s)
        return decode_rate(run(tokens), batch, tokens)

    ways = {name: (lambda run=run: turn(run)) for name, run in runs.items()}
    rates = harness.interleaved(ways, rounds)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    step_ms = batch / medians["engine"] * 1e3
    floor_ms = engine.model_info.weight_bytes / bandwidth / 1e6
    harness.show(
        f"decode, batch {batch}, {shape} {dtype}: {step_ms:.1f} ms a step, floor {floor_ms:.1f}",
        [
            {"": name, "tokens/s": rate, "engine is": medians["engine"] / rate}
            for name, rate in medians.items()
        ],
    )
    return {
        "rates": {name: [round(value, 1) for value in values] for name, values in rates.items()},
        "tokens_per_s": {name: round(rate, 1) for name, rate in medians.items()},
        "ratio_to_generate": round(medians["engine"] / medians["generate"], 2),
        "ratio_to_generate_batch": round(medians["engine"] / medians["generate_batch"], 2),
        "step_ms": round(step_ms, 2),
        "read_bandwidth_gb_per_s": round(bandwidth, 1),
        "weight_bytes": engine.model_info.weight_bytes,
        "bandwidth_floor_ms": round(floor_ms, 2),
        "share_of_floor": round(floor_ms / step_ms, 3),
        "linear": engine.model_info.linear,
        "fused": engine.model_info.fused,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


if __name__ == "__main__":
    main()
