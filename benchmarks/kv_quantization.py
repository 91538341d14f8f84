"""What each way to store the KV cache costs and saves, on one model and its held-out text.

Teacher-forced over documents that training never saw, joined to full context windows; the model
computes in float32 throughout, so that the cache is the only difference. Against the float32 cache:
bytes per token, error of the logits (root mean square, relative to their spread, and the greatest),
share of positions with the same best token, KL divergence, and perplexity. The last line printed is
one JSON object.

    python -m benchmarks.kv_quantization --windows 24
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.context import context, publish
from benchmarks.teacher_forced import drift, windows
from checkpoints.resolve import resolve
from engine.config import EngineConfig
from engine.models.load import load_model

CHOICES = (
    ("float32", "block"),
    ("bfloat16", "block"),
    *(
        (dtype, scale)
        for dtype in ("fp8_e4m3", "int8")
        for scale in ("tensor", "block", "token_head")
    ),
)


def measure(
    name: str, kv_dtype: str, kv_scale: str, texts: list[list[int]], exact: list[torch.Tensor]
) -> dict[str, Any]:
    """One way to store the cache: its bytes, and its Drift from float32.

    Args:
        exact: see `drift`.
    """
    config = EngineConfig(
        model=name, dtype="float32", device="cpu", kv_dtype=kv_dtype, kv_scale=kv_scale
    )
    model = load_model(config)
    told = track(texts, f"{kv_dtype} {kv_scale}", console=_CONSOLE)
    found = drift(model, told, exact, len(texts[0]))
    layout = model.layout
    bytes_per_token = layout.block_bytes / layout.block_size
    bfloat16_bytes = layout.raw.block_bytes / layout.block_size / 2
    return {
        "kv_dtype": kv_dtype,
        "kv_scale": kv_scale if layout.is_quantized else "",
        "bytes_per_token": bytes_per_token,
        "share_of_bytes": round(bytes_per_token / bfloat16_bytes, 4),  # of a bfloat16 cache
        **found._asdict(),
    }


_CONSOLE = Console(stderr=True, width=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="baton-5m")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    path = resolve(arguments.model, files="all").path
    texts = windows(path, arguments.windows, arguments.tokens)
    exact: list[torch.Tensor] = []
    costs = [measure(arguments.model, *choice, texts, exact) for choice in CHOICES]
    table = Table(
        "KV", "scale", "B/token", "of bf16", "logit rms", "max", "top-1", "KL", "ppl", "change"
    )
    for cost in costs:
        table.add_row(
            *(f"{each:.4g}" if isinstance(each, float) else each for each in cost.values())
        )
    _CONSOLE.print(table)
    result = {
        "benchmark": "kv_quantization",
        **context(),
        "model": arguments.model,
        "num_windows": len(texts),
        "num_window_tokens": arguments.tokens,
        "choices": costs,
    }
    publish(result, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
