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
    ("float32", "auto"),
    ("bfloat16", "auto"),
    ("float32", "fp8_e4m3"),
    ("bfloat16", "fp8_e4m3"),
)
"""(computed in, weights): what the others are compared with comes first."""

_CONSOLE = Console(stderr=True, width=110)


def measure(
    fields: dict[str, Any], texts: list[list[int]], exact: list[torch.Tensor]
) -> dict[str, Any]:
    """One way to keep the weights: their bytes on the device, and the Drift.

    Args:
        fields: of EngineConfig.
        exact: see `drift`.
    """
    model = load_model(EngineConfig(decoder="own", **fields))
    told = track(texts, f"{fields['dtype']} {fields['weight_dtype']}", console=_CONSOLE)
    found = drift(model, told, exact, len(texts[0]))
    return {
        "dtype": fields["dtype"],
        "weight_dtype": fields["weight_dtype"],
        "weight_bytes": model.info.weight_bytes,
        **found._asdict(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="baton-5m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    path = resolve(arguments.model, files="all").path
    texts = windows(path, arguments.windows, arguments.tokens)
    exact: list[torch.Tensor] = []
    same = {"model": arguments.model, "device": arguments.device}
    found = [
        measure({**same, "dtype": dtype, "weight_dtype": weights}, texts, exact)
        for dtype, weights in CHOICES
    ]
    table = Table(
        "computed in", "weights", "bytes", "logit rms", "max", "top-1", "KL", "ppl", "change"
    )
    for one in found:
        table.add_row(
            *(f"{each:.4g}" if isinstance(each, float) else str(each) for each in one.values())
        )
    _CONSOLE.print(table)
    result = {
        "benchmark": "weight_quantization",
        **context(),
        "model": arguments.model,
        "device": arguments.device,
        "num_windows": len(texts),
        "num_window_tokens": arguments.tokens,
        "choices": found,
    }
    publish(result, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
