"""What structured output costs with a vocabulary of 128,000 tokens: Baton's grammars (llguidance
behind a front of its own) beside xgrammar, over the corpus of JSON schemas of the test suite.

Vocabulary: a byte-level BPE that is trained on the prose, Python and JSON files of the standard
library and the installed packages, and kept in --cache, since that takes minutes. It differs a
little from machine to machine; both engines have the same one.

Each engine runs in a process of its own, on one thread, with the same schemas, token bytes and
seeds. Per schema: compile (`source` and `compile_grammar` here; xgrammar's GrammarCompiler without
cache), then follow outputs of random draws among what is allowed, which favour what closes after
two fifths of --tokens. Every token has a mask: those where the text is forced, which an engine may
jump over, are reported apart. "follow" is to accept a token and to look what is forced after it.
"memory" is the growth of the resident memory while all compiled grammars are kept. "valid" are the
finished outputs that satisfy their schema by jsonschema, formats included.

    OMP_NUM_THREADS=1 python -m benchmarks.structured_output --cache FOLDER --out FILE

The last line printed is one JSON object. Nothing else is written unless --cache or --out say where.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.context import context, publish
from benchmarks.structured_output_engines import (
    END,
    ENGINES,
    VOCAB_SIZE,
    Costs,
    Draws,
    Engine,
    Output,
    Rows,
    train,
)
from engine.grammar.config import GrammarLimits

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests" / "unit" / "engine" / "grammar" / "json_schemas.jsonl"
SEED = 1
NUM_SLOWEST = 20

# -- outputs


def follow(
    output: Output, draws: Draws, num_tokens: int, costs: Costs, schema: int = 0, index: int = 0
) -> tuple[list[int], str]:
    """Draw an output. Returns its ids, and how it ended: "finished", "cut", or what is wrong."""
    rng = np.random.default_rng([SEED, index])
    token_ids: list[int] = []
    is_forced = output.is_forced()
    while not output.is_over():
        if len(token_ids) >= num_tokens:
            return token_ids, "cut"
        began, began_cpu = time.perf_counter(), time.thread_time()
        words = output.mask()
        cpu_s, wall_s = time.thread_time() - began_cpu, time.perf_counter() - began
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if not len(allowed):
            return token_ids, output.error() or "a dead end"
        token_id = draws.draw(allowed, rng, len(token_ids) >= 0.4 * num_tokens)
        is_one = is_forced or len(allowed) == 1
        began = time.perf_counter()
        is_taken = output.accept(token_id)
        is_forced = is_taken and output.is_forced()
        follow_s = time.perf_counter() - began
        costs.add(wall_s, cpu_s, follow_s, is_one, len(token_ids), len(allowed), schema, index)
        if not is_taken:
            return token_ids, output.error() or "an allowed token is refused"
        if token_id == END:
            break
        token_ids.append(token_id)
    return token_ids, output.error() or "finished"


# -- whether an output satisfies its schema


def validator(schema: Any) -> Any:
    """With OpenAPI's `nullable`, and patterns as ECMA 262 has them: \\w and \\d are ASCII."""
    written = _with_null(_read(json.dumps(schema)))
    made = jsonschema.validators.validator_for(written, jsonschema.Draft202012Validator)
    own = jsonschema.validators.extend(made, {"pattern": _pattern})
    return own(written, format_checker=made.FORMAT_CHECKER)


def _pattern(_: Any, pattern: str, instance: Any, __: Any) -> Iterator[Any]:
    flags = (re.ASCII, re.UNICODE)
    if isinstance(instance, str) and not any(re.search(pattern, instance, one) for one in flags):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _with_null(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_null(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _with_null(value) for key, value in schema.items()}
    if inner.pop("nullable", False) is True:
        return {"anyOf": [inner, {"type": "null"}]}
    return inner


def _read(text: str) -> Any:
    """JSON, with decimals for floats, so that multiples of 0.01 are."""

    def number(text: str) -> Decimal | float:
        exponent = re.search(r"[eE][+-]?(\d+)$", text)
        return float(text) if exponent and len(exponent.group(1)) > 2 else Decimal(text)

    return json.loads(text, parse_float=number)


def is_valid(schema: Any, data: bytes) -> bool:
    """Whether an output satisfies its schema."""
    with localcontext(prec=500):
        try:
            return bool(validator(schema).is_valid(_read(data.decode())))
        except ValueError:
            return False


# -- one engine


def measure(engine: Engine, num_tokens: int, num_outputs: int) -> dict[str, Any]:
    """All schemas on one engine, in this process."""
    entries = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
    draws = Draws(engine.token_bytes)
    costs = Costs(len(entries) * num_outputs * num_tokens)
    first = engine.compile('{"type": "object", "properties": {"a": {"type": "string"}}}')
    follow(engine.begin(first), draws, num_tokens, Costs(num_tokens))
    compiled: dict[str, Any] = {}
    refused: dict[str, str] = {}
    compile_s: list[float] = []
    resident = [_resident_bytes()]
    for entry in track(entries, "compiling", console=Console(stderr=True)):
        text = json.dumps(entry["schema"])
        began = time.perf_counter()
        try:
            compiled[entry["name"]] = engine.compile(text)
        except Exception as error:  # whatever the engine refuses with
            refused[entry["name"]] = str(error).strip()[:200]
        else:
            compile_s.append(time.perf_counter() - began)
    resident.append(_resident_bytes())
    outputs = []
    for place, entry in enumerate(track(entries, "following", console=Console(stderr=True))):
        for index in range(num_outputs if entry["name"] in compiled else 0):
            output = engine.begin(compiled[entry["name"]])
            outputs.append((entry, *follow(output, draws, num_tokens, costs, place, index)))
    resident.append(_resident_bytes())
    endings: Counter[str] = Counter()
    invalid, broken = [], {}
    for entry, token_ids, ending in outputs:
        endings[ending if ending in ("finished", "cut") else "broken"] += 1
        data = b"".join(engine.token_bytes[token_id] for token_id in token_ids)
        if ending == "finished" and not is_valid(entry["schema"], data):
            invalid.append([entry["name"], data.decode(errors="replace")[:300]])
        elif ending not in ("finished", "cut"):
            broken[entry["name"]] = ending
    megabytes = [round(float(grown) / 1e6, 1) for grown in np.diff(resident)]
    return (
        {"accepted": len(compiled), "schemas": len(entries), "refused": refused}
        | report(compile_s, costs.rows, entries)
        | {"compile_mb": megabytes[0], "follow_mb": megabytes[1], "outputs": dict(endings)}
        | {"invalid": invalid, "broken": broken, "valid": endings["finished"] - len(invalid)}
    )


def report(compile_s: list[float], rows: Rows, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """What was measured, as figures."""
    ways = {
        "all": rows,
        "free": rows[~rows["forced"]],
        "forced": rows[rows["forced"]],
        "first_output": rows[rows["output"] == 0],
        "later_outputs": rows[rows["output"] > 0],
    }
    sources = np.array([entry["source"] for entry in entries])[rows["schema"]]
    slowest = rows[np.argsort(-rows["s"])[:NUM_SLOWEST]]
    return {
        "compile_ms": quantiles(np.array(compile_s), 1e3),
        "mask_us": {way: quantiles(some["s"], 1e6) for way, some in ways.items()},
        "mask_cpu_us": quantiles(rows["cpu_s"], 1e6),
        "mask_us_of_source": {
            str(name): quantiles(rows["s"][sources == name], 1e6) for name in np.unique(sources)
        },
        "follow_us": quantiles(rows["follow_s"], 1e6),
        "slowest": [
            {"schema": entries[row["schema"]]["name"], "place": int(row["place"])}
            | {"allowed": int(row["allowed"]), "us": round(float(row["s"]) * 1e6)}
            for row in slowest
        ],
    }


def quantiles(values: npt.NDArray[np.float64], scale: float) -> dict[str, float]:
    """Of so many values; the mean too."""
    if not len(values):
        return {"num": 0}
    found = values * scale
    named = {f"p{share}": float(np.quantile(found, share / 100)) for share in (50, 90, 99)}
    named |= {"max": float(found.max()), "mean": float(found.mean())}
    return {"num": len(values)} | {name: round(value, 2) for name, value in named.items()}


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def in_own_process(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """`measure` of one engine in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.structured_output", "--engine", name]
    command += ["--cache", str(folder), "--tokens", str(arguments.tokens)]
    command += [
        "--outputs",
        str(arguments.outputs),
        "--token-fuel",
        str(arguments.token_fuel),
    ]
    command += ["--token-items", str(arguments.token_items)]
    single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ | single)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def show(results: dict[str, dict[str, Any]]) -> None:
    """Tables, for people."""
    rows: dict[str, Callable[[dict[str, Any]], str]] = {
        "accepted": lambda one: f"{one['accepted']} of {one['schemas']}",
        "compile ms": lambda one: _line(one["compile_ms"]),
        "mask us": lambda one: _line(one["mask_us"]["all"]),
        "  of CPU time": lambda one: _line(one["mask_cpu_us"]),
        "  not forced": lambda one: _line(one["mask_us"]["free"]),
        "  forced": lambda one: _line(one["mask_us"]["forced"]),
        "  first outputs": lambda one: _line(one["mask_us"]["first_output"]),
        "  later outputs": lambda one: _line(one["mask_us"]["later_outputs"]),
        "follow us": lambda one: _line(one["follow_us"]),
        "memory MB": lambda one: f"{one['compile_mb']} compiled, {one['follow_mb']} followed",
        "valid": lambda one: f"{one['valid']} of {one['outputs'].get('finished', 0)} finished",
        "broken outputs": lambda one: str(one["outputs"].get("broken", 0)),
    }
    for source in next(iter(results.values()))["mask_us_of_source"]:
        rows[f"mask us, {source}"] = lambda one, source=source: _line(  # type: ignore[misc]
            one["mask_us_of_source"].get(source, {"num": 0})
        )
    table = Table("p50 / p90 / p99 / max", *results, title=f"{VOCAB_SIZE:,} tokens")
    for label, cell in rows.items():
        table.add_row(label, *(cell(one) for one in results.values()))
    Console(stderr=True).print(table)


def _line(found: dict[str, float]) -> str:
    values = (f"{found[name]:,.6g}" for name in ("p50", "p90", "p99", "max") if name in found)
    return " / ".join(values)


def main() -> None:
    """Parse, measure, print."""
    limits = GrammarLimits()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--cache", type=Path, help="where tokenizer.json is, or will be")
    parser.add_argument("--tokens", type=int, default=60, help="most tokens of an output")
    parser.add_argument("--outputs", type=int, default=1, help="outputs per schema")
    parser.add_argument("--token-fuel", type=int, default=limits.max_num_token_fuel)
    parser.add_argument("--token-items", type=int, default=limits.max_num_token_items)
    parser.add_argument("--engine", choices=ENGINES, help="measure this one alone, here")
    parser.add_argument("--out", type=Path, help="write the JSON object here, too")
    arguments = parser.parse_args()
    limits = GrammarLimits(
        max_num_token_fuel=arguments.token_fuel,
        max_num_token_items=arguments.token_items,
    )
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as temporary:
        folder = arguments.cache or Path(temporary)
        with Console(stderr=True).status("a vocabulary"):
            train(folder)
        if arguments.engine:
            engine = ENGINES[arguments.engine](folder, limits)
            publish(measure(engine, arguments.tokens, arguments.outputs), arguments.out)
            return
        results = {name: in_own_process(name, folder, arguments) for name in ENGINES}
    show(results)
    libraries = {name: version(name) for name in ("llguidance", "xgrammar", "tokenizers")}
    settings = {"vocabulary": VOCAB_SIZE, "max_num_token_fuel": limits.max_num_token_fuel}
    settings["max_num_token_items"] = limits.max_num_token_items
    publish(
        {
            "benchmark": "structured_output",
            **settings,
            "engines": results,
            **libraries,
            **context(),
        },
        arguments.out,
    )


if __name__ == "__main__":
    main()
