"""`baton bench latency|throughput`: speed of the engine as a library, on this machine. For `serve`,
load on a running cluster, see `command_bench_serve`.

The engine is loaded only when it is asked for: it needs torch, which the rest of `baton` does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from baton import command_bench_serve
from baton.errors import InvalidArgument
from process.settings import SettingsError


def add_parser(commands: Any) -> None:
    """`baton bench` and its options."""
    parser = commands.add_parser("bench", help="measure a cluster, or the engine alone")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="serve|latency|throughput")
    command_bench_serve.add_parser(kinds)
    one = kinds.add_parser("latency", help="how long one batch takes")
    one.add_argument("--batch", type=int, default=1, metavar="N", help="prompts at once")
    one.add_argument("--rounds", type=int, default=10, metavar="N", help="batches measured")
    one.add_argument("--warm-up", type=int, default=2, metavar="N", help="batches before")
    many = kinds.add_parser("throughput", help="how much gets done when all is asked for at once")
    many.add_argument("--prompts", type=int, default=100, metavar="N", help="how many; default 100")
    many.add_argument(
        "--spread",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="lengths are uniform within this share of those given",
    )
    many.add_argument(
        "--texts", type=Path, metavar="FILE", help="prompts, one a line, instead of random ids"
    )
    for kind in (one, many):
        _add_common(kind)
        kind.set_defaults(run=run)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="baton-5m", help="default: baton-5m")
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="tokens a prompt")
    parser.add_argument("--output-len", type=int, default=128, metavar="N", help="tokens an answer")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random prompts")
    parser.add_argument("--engines", type=int, default=1, metavar="N", help="several, balanced")
    parser.add_argument("--process", action="store_true", help="one, in a process of its own")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an engine's setting"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")


def run(parsed: argparse.Namespace) -> int:
    """Returns: 0. Raises: BatonError, SettingsError."""
    try:
        bench = importlib.import_module("engine_client.bench")
        llm_module = importlib.import_module("engine_client.llm")
    except ImportError as error:
        raise InvalidArgument("bench", f"needs what workers need ({error})") from error
    console = Console(stderr=True)
    with llm_module.LLM(
        parsed.model,
        engine="process" if parsed.process else "in_process",
        num_engines=parsed.engines,
        **_settings(parsed.set),
    ) as llm:
        measure = _latency if parsed.kind == "latency" else _throughput
        result = dataclasses.asdict(measure(bench, llm, parsed, console))
        model = llm.model
    Console().print(_table(parsed.kind, result))
    if parsed.json:
        sys.stdout.write(json.dumps(_object(parsed, model, result)) + "\n")
    return 0


def _latency(bench: Any, llm: Any, parsed: argparse.Namespace, console: Console) -> Any:
    with Progress(
        TextColumn("batches"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("batches")
        return bench.latency(
            llm,
            batch=parsed.batch,
            num_input_tokens=parsed.input_len,
            num_output_tokens=parsed.output_len,
            num_warm_up=parsed.warm_up,
            num_rounds=parsed.rounds,
            seed=parsed.seed,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _throughput(bench: Any, llm: Any, parsed: argparse.Namespace, console: Console) -> Any:
    return bench.throughput(
        llm,
        num_prompts=parsed.prompts,
        num_input_tokens=parsed.input_len,
        num_output_tokens=parsed.output_len,
        spread=parsed.spread,
        texts=_texts(parsed.texts),
        seed=parsed.seed,
        progress=True,
    )


def _texts(file: Path | None) -> list[str]:
    if file is None:
        return []
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise InvalidArgument("--texts", f"{file} has no line of text")
    return lines


def _settings(pairs: list[str]) -> dict[str, Any]:
    """`--set` as keywords of LLM: numbers and truth values as such, all else as text."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (key and equals):
            raise SettingsError(f"--set {pair}: write it as key=value")
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
    return values


def _table(kind: str, result: dict[str, Any]) -> Table:
    table = Table(title=kind)
    for column in ("", "mean", "p50", "p99"):
        table.add_column(column, justify="left" if not column else "right")
    for name, value in result.items():
        if isinstance(value, dict):
            cells = [f"{value[key]:,.2f} ms" for key in ("mean_ms", "p50_ms", "p99_ms")]
            table.add_row(f"{name} ({value['num']})", *cells)
        elif value is not None:
            table.add_row(name.replace("_", " "), f"{value:,}", "", "")
    return table


def _object(parsed: argparse.Namespace, model: Any, result: dict[str, Any]) -> dict[str, Any]:
    return {
        "benchmark": parsed.kind,
        "model": model.model,
        "dtype": model.dtype,
        "device": model.device,
        "engines": parsed.engines,
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        **result,
    }
