"""`baton bench`: a running cluster or server under load, and the speed of the engine alone.

The engine is imported only when it is measured: it needs torch, the rest of `baton` does not.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import operator
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from baton.cli import options, plots, render
from baton.cli.options import FILE, RouterTarget, flag, seconds, section, value
from baton.cli.render import number, text
from baton.client import Client
from baton.errors import InvalidArgument
from baton.load import workload
from baton.load.report import Limits, Report, report
from baton.load.runner import OnProgress, RequestOutcome
from baton.load.runner import run as run_load
from baton.load.senders import GrpcSender, OpenAiSender, Sender
from baton.load.workload import Planned
from process import settings

API_KEY = "OPENAI_API_KEY"
"""The environment variable with the API key that clients of the OpenAI API read."""


@options.group("bench")
def bench() -> None:
    """Measure a cluster, or the engine alone."""


_load_options = options.as_argument(
    "asked",
    SimpleNamespace,
    section(
        "Which server",
        value("--openai", "URL", "Measure a server of the OpenAI API at http://HOST:PORT/v1."),
        value("--model", "NAME", "Ask this model; needed with --openai.", ""),
        value("--tenant", "NAME", "Ask as this tenant; not with --openai.", ""),
        value("--vocab-size", "N", "Size of the vocabulary; needed with --openai.", type=int),
        value("--extra", "JSON", "With --openai, add these fields to each body.", "{}"),
    ),
    section(
        "When requests are sent",
        value(
            "--rate",
            "R",
            "Requests a second, or phases R:SECONDS,R..R:SECONDS,... where .. is a ramp.",
            "1",
        ),
        value("--requests", "N", "Send at most N requests.", type=int),
        value(
            "--arrivals",
            None,
            "Draw the times between requests, or keep them constant.",
            "poisson",
            type=click.Choice(("poisson", "constant")),
        ),
        value("--burstiness", "X", "Below 1, requests arrive in bursts.", 1.0),
        value(
            "--max-concurrency", "N", "Keep at most N requests in flight; others wait.", type=int
        ),
        value(
            "--timeout", "SECONDS", "Give up on a request that takes longer.", 300.0, type=seconds
        ),
    ),
    section(
        "What is sent",
        value("--input-len", "N", "Tokens of a prompt.", 128),
        value("--output-len", "N", "Tokens of an answer.", 64),
        value("--spread", "SHARE", "Vary the lengths by up to this share.", 0.0),
        value("--prefix-groups", "N", "Begin each prompt with one of N prefixes.", type=int),
        value("--prefix-len", "N", "Tokens of each prefix.", 64),
        value("--trace", "FILE", "Replay this trace, in Mooncake's format.", type=FILE),
        value("--speed", "X", "Replay the trace X times as fast.", 1.0),
        value("--shrink", "N", "Divide the lengths of the trace by N.", 1),
        value("--seed", "N", "The same seed gives the same load.", 0),
    ),
    section(
        "Results",
        value(
            "--goodput",
            "NAME:MS",
            "Count the requests within this limit of ttft, tpot or e2e.",
            multiple=True,
        ),
    ),
)


@bench.command("serve")
@_load_options
@section(
    "Results",
    value("--plot", "FILE", "Draw the results (*.png, *.svg or *.pdf).", type=FILE),
    flag("--json", "Print one JSON object as the last line.", dest="with_json"),
    value("--out", "FILE", "Write the JSON object into this file.", type=FILE),
)
@options.router_target()
def _serve(
    target: RouterTarget,
    asked: SimpleNamespace,
    plot: Path | None,
    with_json: bool,
    out: Path | None,
) -> int:
    """Measure a running cluster under load.

    Requests are sent at a given rate, whether or not earlier ones have ended. Exit code 1: no
    request was served.

    \b
    baton bench serve --rate 4 --requests 200 --goodput ttft:500 --goodput tpot:50 --plot load.png
    baton bench serve --rate 2:30,8:10,2:30 --prefix-groups 4 --prefix-len 64
    baton bench serve --trace conversation_trace.jsonl --shrink 64 --speed 10
    baton bench serve --openai http://127.0.0.1:8000/v1 --model NAME --vocab-size 32000 --rate 1 \\
        --requests 50

    With --openai it measures any server of the OpenAI API, otherwise Baton's gRPC API.
    """
    limits = Limits.parse(asked.goodput)
    if plot is not None:
        plots.check("--plot", plot)
    console = Console(stderr=True)
    outcomes = asyncio.run(_measure(target, asked, console))
    result = report(outcomes, limits)
    for made in _tables(result, limits):
        Console().print(made)
        Console().print()
    if plot is not None:
        plots.draw_load(outcomes, limits, plot, _title(asked))
        console.print(f"plot: {plot}")
    line = json.dumps(dataclasses.asdict(result) | {"load": _load_as_json(asked)})
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(line + "\n", encoding="utf-8")
    if with_json:
        sys.stdout.write(line + "\n")
    return 0 if result.num_served else 1


async def _measure(
    target: RouterTarget, asked: SimpleNamespace, console: Console
) -> list[RequestOutcome]:
    sender = _sender(target, asked)
    try:
        vocab_size = asked.vocab_size or await sender.vocab_size()
        if not vocab_size:
            raise InvalidArgument("--vocab-size", "needed with --openai: that API does not say it")
        load = _load(asked, vocab_size)
        with render.progress(console, "requests", TextColumn(_PROGRESS)) as bar:
            return await run_load(
                load,
                sender,
                timeout_s=asked.timeout,
                max_concurrency=asked.max_concurrency,
                on_progress=_progress(bar),
            )
    finally:
        await sender.close()


def _sender(target: RouterTarget, asked: SimpleNamespace) -> Sender:
    if asked.openai is None:
        client = Client(target.router_address(), target.credentials())
        return GrpcSender(client, {"model": asked.model, "tenant": asked.tenant})
    if not asked.model:
        raise InvalidArgument("--model", "needed with --openai")
    if asked.tenant:
        raise InvalidArgument("--tenant", "not with --openai: there the API key decides the tenant")
    try:
        extra = json.loads(asked.extra)
    except ValueError as error:
        raise InvalidArgument("--extra", f"not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise InvalidArgument("--extra", "not a JSON object")
    return OpenAiSender(
        asked.openai, model=asked.model, api_key=os.environ.get(API_KEY, ""), extra=extra
    )


def _load(asked: SimpleNamespace, vocab_size: int) -> Sequence[Planned]:
    if asked.trace is not None:
        if asked.prefix_groups is not None:
            raise InvalidArgument("--prefix-groups", "not with --trace, which has its own prefixes")
        return workload.replay_trace(
            workload.read_trace(asked.trace, limit=asked.requests),
            vocab_size=vocab_size,
            seed=asked.seed,
            speed=asked.speed,
            shrink=asked.shrink,
        )
    shared = None
    if asked.prefix_groups is not None:
        shared = workload.SharedPrefixes(asked.prefix_groups, asked.prefix_len)
    times = workload.arrival_times(
        workload.parse_rates(asked.rate),
        num_requests=asked.requests,
        kind=asked.arrivals,
        burstiness=asked.burstiness,
        seed=asked.seed,
    )
    if not times:
        raise InvalidArgument("--rate", f"{asked.rate!r} sends nothing with this seed")
    lengths = workload.Lengths(asked.input_len, asked.output_len, asked.spread)
    return workload.random_load(
        times, lengths, vocab_size=vocab_size, seed=asked.seed, shared=shared
    )


_PROGRESS = "{task.completed} of {task.total} ended, {task.fields[live]} in flight"


def _progress(bar: Progress) -> OnProgress:
    task = bar.add_task("requests", total=None, live=0)

    def on_progress(num_planned: int, num_sent: int, num_ended: int) -> None:
        bar.update(task, total=num_planned, completed=num_ended, live=num_sent - num_ended)

    return on_progress


def _milliseconds(title: str, name: str) -> render.Column:
    return number(title, lambda item: f"{getattr(item[1], name):,.2f}")


_TIMES = (
    text("milliseconds", operator.itemgetter(0)),
    *(_milliseconds(name, f"{name}_ms") for name in ("mean", "p50", "p90", "p99", "max")),
    number("of", lambda item: f"{item[1].num:,}"),
)
_FIGURES = (text("", operator.itemgetter(0)), text("", operator.itemgetter(1)))


def _tables(result: Report, limits: Limits) -> list[Table]:
    times = (
        ("time to first token", result.ttft),
        ("time per output token", result.tpot),
        ("gap between chunks", result.itl),
        ("whole request", result.e2e),
        ("sent late by", result.lag),
    )
    figures = [
        ("requests served", f"{result.num_served:,} of {result.num_requests:,}"),
        *(
            (f"  {failure.kind}", f"{failure.num:,}, as: {failure.example}")
            for failure in result.failures
        ),
        ("seconds", f"{result.seconds:,.1f}"),
        (
            "requests offered / served a second",
            f"{result.offered_requests_per_s:,.2f} / {result.requests_per_s:,.2f}",
        ),
        ("prompt tokens a second", f"{result.input_tokens_per_s:,.0f}"),
        ("output tokens a second", f"{result.output_tokens_per_s:,.0f}"),
    ]
    if result.hit_rate is not None:
        figures.append(("prompt tokens cached", f"{100 * result.hit_rate:.1f} %"))
    if result.tokens_per_chunk is not None:
        figures.append(("tokens per chunk", f"{result.tokens_per_chunk:.2f}"))
    if limits != Limits():
        good = f"{result.good_requests_per_s:,.2f} ({100 * result.good_share:.1f} %)"
        figures.append(("good requests a second (share of all)", good))
    known = [(name, spread) for name, spread in times if spread is not None]
    return [render.table(_FIGURES, figures), render.table(_TIMES, known)]


def _title(asked: SimpleNamespace) -> str:
    what = f"trace {asked.trace.name}" if asked.trace else f"rate {asked.rate}"
    return f"baton bench serve: {what}, seed {asked.seed}"


def _load_as_json(asked: SimpleNamespace) -> dict[str, Any]:
    """The options that define the load, without addresses and keys."""
    names = (
        *("rate", "requests", "arrivals", "burstiness", "max_concurrency", "input_len"),
        *("output_len", "spread", "prefix_groups", "prefix_len", "speed", "shrink", "seed"),
        *("goodput", "model"),
    )
    values = {name: getattr(asked, name) for name in names}
    return values | {
        "trace": asked.trace.name if asked.trace else None,
        "api": "openai" if asked.openai else "grpc",
    }


# -- the engine alone

_engine_options = options.as_argument(
    "asked",
    SimpleNamespace,
    value("--model", "NAME", "Load this model.", "baton-5m"),
    value("--input-len", "N", "Tokens of a prompt.", 128),
    value("--output-len", "N", "Tokens of an answer.", 128),
    value("--seed", "N", "The same seed gives the same prompts.", 0),
    value("--engines", "N", "Spread the prompts over N engines.", 1),
    flag("--process", "Run the engine in a process of its own."),
    value("--set", "KEY=VALUE", "Change a setting of the engine.", dest="sets", multiple=True),
    options.as_json("Print one JSON object as the last line."),
)


@bench.command("latency")
@value("--batch", "N", "Prompts in a batch.", 1)
@value("--rounds", "N", "Measure N batches.", 10)
@value("--warm-up", "N", "Run N batches before the measured ones.", 2)
@_engine_options
def _latency(batch: int, rounds: int, warm_up: int, asked: SimpleNamespace) -> None:
    """Measure how long one batch takes."""
    with render.progress(Console(stderr=True), "batches", MofNCompleteColumn()) as bar:
        task = bar.add_task("batches")
        result = _measure_engine(
            "latency",
            asked,
            batch=batch,
            num_warm_up=warm_up,
            num_rounds=rounds,
            on_progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    _show_engine(result, asked)


@bench.command("throughput")
@value("--prompts", "N", "Complete N prompts.", 100)
@value("--spread", "SHARE", "Vary the lengths by up to this share.", 0.0)
@value("--texts", "FILE", "Use the prompts in this file, one a line, not random ids.", type=FILE)
@_engine_options
def _throughput(prompts: int, spread: float, texts: Path | None, asked: SimpleNamespace) -> None:
    """Measure the throughput when all prompts are submitted at once."""
    result = _measure_engine(
        "throughput", asked, num_prompts=prompts, spread=spread, texts=_texts(texts), progress=True
    )
    _show_engine(result, asked)


def _measure_engine(kind: str, asked: SimpleNamespace, **arguments: Any) -> dict[str, Any]:
    """Load the engine and measure it by the function of this name in `engine_client.bench`.

    Returns: the figures. Raises: BatonError, SettingsError.
    """
    try:
        module = importlib.import_module("engine_client.bench")
        llm_module = importlib.import_module("engine_client.llm")
    except ImportError as error:
        raise InvalidArgument("bench", f"needs what workers need ({error})") from error
    with llm_module.LLM(
        asked.model,
        engine="process" if asked.process else "in_process",
        num_engines=asked.engines,
        **dict(map(settings.parse_override, asked.sets)),
    ) as llm:
        result = getattr(module, kind)(
            llm,
            num_input_tokens=asked.input_len,
            num_output_tokens=asked.output_len,
            seed=asked.seed,
            **arguments,
        )
        model = llm.model
    return {
        "benchmark": kind,
        "model": model.model,
        "dtype": model.dtype,
        "device": model.device,
        "engines": asked.engines,
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}",
        **dataclasses.asdict(result),
    }


def _show_engine(result: dict[str, Any], asked: SimpleNamespace) -> None:
    rows: list[tuple[str, ...]] = []
    for name, found in result.items():
        if isinstance(found, dict):
            times = (f"{found[key]:,.2f} ms" for key in ("mean_ms", "p50_ms", "p99_ms"))
            rows.append((f"{name} ({found['num']})", *times))
        elif isinstance(found, int | float) and name != "engines":
            rows.append((name.replace("_", " "), f"{found:,}", "", ""))
    columns = [text(result["benchmark"], operator.itemgetter(0))]
    for index, title in enumerate(("mean", "p50", "p99"), start=1):
        columns.append(number(title, operator.itemgetter(index)))
    render.show(render.table(columns, rows))
    if asked.as_json:
        render.print_json(result)


def _texts(file: Path | None) -> list[str]:
    if file is None:
        return []
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise InvalidArgument("--texts", f"{file} has no line of text")
    return lines
