"""What benchmarks of quantized numbers share: their options, a table of all choices, and the last
line, which is one JSON object."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.context import context, publish
from benchmarks.teacher_forced import drift, windows
from checkpoints.resolve import resolve
from engine.models.interface import LoadedModel

Choice = tuple[str, str]
Measure = Callable[
    [argparse.Namespace, Choice, list[list[int]], list[torch.Tensor]], dict[str, Any]
]
"""What one choice comes to: of the options, the texts, and the first one's logits (see `drift`)."""

_CONSOLE = Console(stderr=True, width=110)


def drift_of(
    model: LoadedModel, choice: Choice, texts: list[list[int]], exact: list[torch.Tensor]
) -> dict[str, Any]:
    """The Drift of a model that is loaded by this choice. See `drift`."""
    told = track(texts, " ".join(choice), console=_CONSOLE)
    return drift(model, told, exact, len(texts[0]))._asdict()


def run(
    doc: str | None,
    name: str,
    choices: Iterable[Choice],
    columns: Sequence[str],
    measure: Measure,
    *,
    has_device: bool = False,
) -> int:
    """The program.

    Args:
        choices: what the others are compared with comes first.
        columns: of the table, in the order of what `measure` says.
        has_device: `--device` is an option, and told.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--model", default="baton-5m")
    if has_device:
        parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    path = resolve(arguments.model, files="all").path
    texts = windows(path, arguments.windows, arguments.tokens)
    exact: list[torch.Tensor] = []
    found = [measure(arguments, choice, texts, exact) for choice in choices]
    table = Table(*columns)
    for one in found:
        table.add_row(
            *(f"{each:.4g}" if isinstance(each, float) else str(each) for each in one.values())
        )
    _CONSOLE.print(table)
    result = {
        "benchmark": name,
        **context(),
        "model": arguments.model,
        **({"device": arguments.device} if has_device else {}),
        "num_windows": len(texts),
        "num_window_tokens": arguments.tokens,
        "choices": found,
    }
    publish(result, arguments.out)
    return 0
