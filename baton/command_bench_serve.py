"""`baton bench serve`: load on a running cluster, at a rate that waits for nobody, and what came of
it.

    baton bench serve --rate 4 --requests 200 --goodput ttft:500 --goodput tpot:50 --plot load.png
    baton bench serve --rate 2:30,8:10,2:30 --prefix-groups 4 --prefix-len 64
    baton bench serve --trace conversation_trace.jsonl --shrink 64 --speed 10
    baton bench serve --openai http://127.0.0.1:8000/v1 --model NAME --vocab-size 32000 --rate 1 \\
        --requests 50

Any server of the OpenAI API can be measured the same way; the first form speaks Baton's gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from baton import command_options
from baton.client import Client
from baton.errors import InvalidArgument
from baton.load import arrivals, planned, plots, trace_file
from baton.load.outcome import Outcome
from baton.load.planned import Planned
from baton.load.report import Limits, Report, as_json, report
from baton.load.run import OnProgress
from baton.load.run import run as run_load
from baton.load.senders import GrpcSender, OpenAiSender, Sender
from baton.tables import table
from process.spread import Spread

API_KEY = "OPENAI_API_KEY"
"""Environment variable, as that API's own clients read it."""


def add_parser(kinds: Any) -> None:
    """`baton bench serve` and its options."""
    parser = kinds.add_parser(
        "serve",
        help="load on a running cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    group = parser.add_argument_group("to whom")
    command_options.add_address(parser)
    group.add_argument("--openai", metavar="URL", help="over HTTP, as http://HOST:PORT/v1")
    group.add_argument("--model", default="", help="needed with --openai")
    group.add_argument("--tenant", default="", help="not with --openai")
    group.add_argument("--vocab-size", type=int, metavar="N", help="needed with --openai")
    group.add_argument(
        "--extra", default="{}", metavar="JSON", help="with --openai: more fields of each body"
    )
    group = parser.add_argument_group("when")
    group.add_argument(
        "--rate",
        default="1",
        metavar="R",
        help="requests a second; R:SECONDS,R..R:SECONDS,... in phases, .. climbs; default: 1",
    )
    group.add_argument("--requests", type=int, metavar="N", help="how many, at most")
    group.add_argument("--arrivals", choices=("poisson", "constant"), default="poisson")
    group.add_argument(
        "--burstiness", type=float, default=1.0, metavar="X", help="below 1: in bursts; default: 1"
    )
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="under way at once; the rest waits here"
    )
    group.add_argument("--timeout", type=command_options.seconds, default=300.0, metavar="SECONDS")
    group = parser.add_argument_group("what")
    group.add_argument("--input-len", type=int, default=128, metavar="N", help="tokens a prompt")
    group.add_argument("--output-len", type=int, default=64, metavar="N", help="tokens an answer")
    group.add_argument(
        "--spread", type=float, default=0.0, metavar="SHARE", help="lengths vary within this share"
    )
    group.add_argument("--prefix-groups", type=int, metavar="N", help="prompts share N prefixes")
    group.add_argument("--prefix-len", type=int, default=64, metavar="N", help="tokens of each")
    group.add_argument("--trace", type=Path, metavar="FILE", help="replay, in Mooncake's format")
    group.add_argument("--speed", type=float, default=1.0, metavar="X", help="of the replay")
    group.add_argument(
        "--shrink", type=int, default=1, metavar="N", help="of the replay: lengths divided by N"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is random")
    group = parser.add_argument_group("what comes of it")
    group.add_argument(
        "--goodput",
        action="append",
        default=[],
        metavar="NAME:MS",
        help="a bound that a good request keeps: ttft, tpot or e2e; repeatable",
    )
    group.add_argument("--plot", type=Path, metavar="FILE", help="*.png, *.svg or *.pdf")
    group.add_argument("--json", action="store_true", help="one JSON object as the last line")
    group.add_argument("--out", type=Path, metavar="FILE", help="that object into a file, too")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Returns: 0; 1 when no request was served. Raises: BatonError; OSError of files."""
    limits = Limits.parse(parsed.goodput)
    if parsed.plot is not None:
        plots.check(parsed.plot)
    console = Console(stderr=True)
    outcomes = asyncio.run(_measure(parsed, console))
    result = report(outcomes, limits)
    for made in _tables(result, limits):
        Console().print(made)
        Console().print()
    if parsed.plot is not None:
        plots.draw(outcomes, limits, parsed.plot, _title(parsed))
        console.print(f"plot: {parsed.plot}")
    line = json.dumps(as_json(result) | {"load": _asked(parsed)})
    if parsed.out is not None:
        parsed.out.parent.mkdir(parents=True, exist_ok=True)
        parsed.out.write_text(line + "\n", encoding="utf-8")
    if parsed.json:
        sys.stdout.write(line + "\n")
    return 0 if result.num_served else 1


async def _measure(parsed: argparse.Namespace, console: Console) -> list[Outcome]:
    sender = _sender(parsed)
    try:
        vocab_size = parsed.vocab_size or await sender.vocab_size()
        if not vocab_size:
            raise InvalidArgument("--vocab-size", "needed with --openai: that API does not tell")
        load = _load(parsed, vocab_size)
        with _bar(console) as bar:
            return await run_load(
                load,
                sender,
                timeout_s=parsed.timeout,
                max_concurrency=parsed.max_concurrency,
                on_progress=_progress(bar),
            )
    finally:
        await sender.close()


def _sender(parsed: argparse.Namespace) -> Sender:
    if parsed.openai is None:
        client = Client(command_options.address_of(parsed), command_options.credentials_of(parsed))
        return GrpcSender(client, {"model": parsed.model, "tenant": parsed.tenant})
    if not parsed.model:
        raise InvalidArgument("--model", "needed with --openai")
    if parsed.tenant:
        raise InvalidArgument("--tenant", "not with --openai: there the API key says it")
    try:
        extra = json.loads(parsed.extra)
    except ValueError as error:
        raise InvalidArgument("--extra", f"no JSON: {error}") from None
    if not isinstance(extra, dict):
        raise InvalidArgument("--extra", "not a JSON object")
    return OpenAiSender(
        parsed.openai, model=parsed.model, api_key=os.environ.get(API_KEY, ""), extra=extra
    )


def _load(parsed: argparse.Namespace, vocab_size: int) -> Sequence[Planned]:
    if parsed.trace is not None:
        if parsed.prefix_groups is not None:
            raise InvalidArgument("--prefix-groups", "not with --trace: it says who shares what")
        return trace_file.replay(
            trace_file.read_trace(parsed.trace, limit=parsed.requests),
            vocab_size=vocab_size,
            seed=parsed.seed,
            speed=parsed.speed,
            shrink=parsed.shrink,
        )
    shared = None
    if parsed.prefix_groups is not None:
        shared = planned.SharedPrefixes(parsed.prefix_groups, parsed.prefix_len)
    times = arrivals.arrivals(
        arrivals.parse_rates(parsed.rate),
        num_requests=parsed.requests,
        kind=parsed.arrivals,
        burstiness=parsed.burstiness,
        seed=parsed.seed,
    )
    if not times:
        raise InvalidArgument("--rate", f"{parsed.rate!r} sends nothing with this seed")
    lengths = planned.Lengths(parsed.input_len, parsed.output_len, parsed.spread)
    return planned.random_load(
        times, lengths, vocab_size=vocab_size, seed=parsed.seed, shared=shared
    )


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("requests"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed} of {task.total} ended, {task.fields[live]} under way"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def _progress(bar: Progress) -> OnProgress:
    task = bar.add_task("requests", total=None, live=0)

    def on_progress(num_planned: int, num_sent: int, num_ended: int) -> None:
        bar.update(task, total=num_planned, completed=num_ended, live=num_sent - num_ended)

    return on_progress


def _tables(result: Report, limits: Limits) -> list[Table]:
    times = table("milliseconds", numbers=("mean", "p50", "p90", "p99", "max", "of"))
    for name, spread in (
        ("time to first token", result.ttft),
        ("time per output token", result.tpot),
        ("gap between chunks", result.itl),
        ("whole request", result.e2e),
        ("sent late by", result.lag),
    ):
        if spread is not None:
            times.add_row(name, *_cells(spread))
    rates = table("", "")
    rates.add_row("requests served", f"{result.num_served:,} of {result.num_requests:,}")
    for failure in result.failures:
        rates.add_row(f"  {failure.kind}", f"{failure.num:,}, as: {failure.example}")
    rates.add_row("seconds", f"{result.seconds:,.1f}")
    rates.add_row("requests offered / served a second", _pair(result))
    rates.add_row("prompt tokens a second", f"{result.input_tokens_per_s:,.0f}")
    rates.add_row("output tokens a second", f"{result.output_tokens_per_s:,.0f}")
    if result.hit_rate is not None:
        rates.add_row("prompt tokens cached", f"{100 * result.hit_rate:.1f} %")
    if result.tokens_per_chunk is not None:
        rates.add_row("tokens per chunk", f"{result.tokens_per_chunk:.2f}")
    if limits != Limits():
        rates.add_row(
            "good requests a second (share of all)",
            f"{result.good_requests_per_s:,.2f} ({100 * result.good_share:.1f} %)",
        )
    return [rates, times]


def _cells(spread: Spread) -> list[str]:
    values = (spread.mean_ms, spread.p50_ms, spread.p90_ms, spread.p99_ms, spread.max_ms)
    return [*(f"{value:,.2f}" for value in values), f"{spread.num:,}"]


def _pair(result: Report) -> str:
    return f"{result.offered_requests_per_s:,.2f} / {result.requests_per_s:,.2f}"


def _title(parsed: argparse.Namespace) -> str:
    what = f"trace {parsed.trace.name}" if parsed.trace else f"rate {parsed.rate}"
    return f"baton bench serve: {what}, seed {parsed.seed}"


def _asked(parsed: argparse.Namespace) -> dict[str, Any]:
    """The options that make this load this load; no address, no key."""
    names = (
        *("rate", "requests", "arrivals", "burstiness", "max_concurrency", "input_len"),
        *("output_len", "spread", "prefix_groups", "prefix_len", "speed", "shrink", "seed"),
        *("goodput", "model"),
    )
    values = {name: getattr(parsed, name) for name in names}
    return values | {
        "trace": parsed.trace.name if parsed.trace else None,
        "api": "openai" if parsed.openai else "grpc",
    }
