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
from typing import Any

import torch

from benchmarks.quantization import Choice, drift_of, run
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
_COLUMNS = (
    *("KV", "scale", "B/token", "of bf16"),
    *("logit rms", "max", "top-1", "KL", "ppl", "change"),
)


def measure(
    arguments: argparse.Namespace,
    choice: Choice,
    texts: list[list[int]],
    exact: list[torch.Tensor],
) -> dict[str, Any]:
    """One way to store the cache: its bytes, and its Drift from float32."""
    kv_dtype, kv_scale = choice
    config = EngineConfig(
        model=arguments.model, dtype="float32", device="cpu", kv_dtype=kv_dtype, kv_scale=kv_scale
    )
    model = load_model(config)
    found = drift_of(model, choice, texts, exact)
    layout = model.layout
    bytes_per_token = layout.block_bytes / layout.block_size
    bfloat16_bytes = layout.raw.block_bytes / layout.block_size / 2
    return {
        "kv_dtype": kv_dtype,
        "kv_scale": kv_scale if layout.is_quantized else "",
        "bytes_per_token": bytes_per_token,
        "share_of_bytes": round(bytes_per_token / bfloat16_bytes, 4),  # of a bfloat16 cache
        **found,
    }


if __name__ == "__main__":
    sys.exit(run(__doc__, "kv_quantization", CHOICES, _COLUMNS, measure))
