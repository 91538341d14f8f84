"""What quantized weights cost in accuracy, on one model and its held-out text.

Teacher-forced over documents that training never saw, joined to full context windows, computed by
our own decoder. Against float32 weights computed in float32: error of the logits (root mean square,
relative to their spread, and the greatest), share of positions with the same best token, KL
divergence, and perplexity; of bfloat16, and of fp8 weights (a scale per output channel, activations
quantized per token) computed in either. The last line printed is one JSON object.

    python -m benchmarks.weight_quantization --windows 24 [--device cuda]
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
    ("float32", "auto"),
    ("bfloat16", "auto"),
    ("float32", "fp8_e4m3"),
    ("bfloat16", "fp8_e4m3"),
)
"""(computed in, weights): what the others are compared with comes first."""
_COLUMNS = ("computed in", "weights", "bytes", "logit rms", "max", "top-1", "KL", "ppl", "change")


def measure(
    arguments: argparse.Namespace,
    choice: Choice,
    texts: list[list[int]],
    exact: list[torch.Tensor],
) -> dict[str, Any]:
    """One way to keep the weights: their bytes on the device, and the Drift."""
    dtype, weights = choice
    config = EngineConfig(
        decoder="own",
        model=arguments.model,
        device=arguments.device,
        dtype=dtype,
        weight_dtype=weights,
    )
    model = load_model(config)
    found = drift_of(model, choice, texts, exact)
    return {
        "dtype": dtype,
        "weight_dtype": weights,
        "weight_bytes": model.info.weight_bytes,
        **found,
    }


if __name__ == "__main__":
    sys.exit(run(__doc__, "weight_quantization", CHOICES, _COLUMNS, measure, has_device=True))
