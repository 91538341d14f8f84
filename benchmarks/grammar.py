"""What a grammar costs per token: filling a mask and following the token drawn, by kind of grammar
and size of vocabulary, beside the cost of a plain draw from the same vocabulary; and what compiling
costs.

Vocabularies: the bundled model's (2,048 tokens) and a synthetic one of 152,000: all bytes, and
random words of letters, digits and JSON's punctuation, most of them after a space. Outputs are
driven by random draws among what is allowed. "fill" is the library's mask on one thread, without
the hand-over between threads that Fill adds (reported apart); in the engine it runs beside the
model. "follow" is accept and the look whether the text is complete, on the engine's thread. The
last line printed is one JSON object.

    OMP_NUM_THREADS=1 python -m benchmarks.grammar

Nothing is written unless --out says where.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xgrammar
from engine.grammar.jump import Cutter
from engine.grammar.workers import Workers
from rich.console import Console
from rich.table import Table

from benchmarks.context import context, publish
from engine.grammar.compile_server import compile_grammar, tokenizer_info
from engine.grammar.config import GrammarLimits
from engine.grammar.fill import Fill
from engine.grammar.source import source
from engine.grammar.state import GrammarState, Surroundings, new_state
from engine.grammar.vocabulary import Vocabulary
from engine.request import GrammarKind, GrammarSpec, Sampling
from engine.sampling.pipeline import draw
from engine.sampling.row import Draw
from tokens.tokenizer import Tokenizer

BUNDLED = Path(__file__).resolve().parents[1] / "checkpoints" / "bundled" / "baton-5m"
LARGE = 152_000
SEED = 1
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["cat", "dog", "hedgehog"]},
    },
    "required": ["name", "age", "tags", "kind"],
}
SPECS = {
    "choice": GrammarSpec(GrammarKind.CHOICE, choices=("Positive", "Negative", "Neutral")),
    "regex": GrammarSpec(GrammarKind.REGEX, r"\d{4}-\d\d-\d\d: [a-z ]{20,60}\."),
    "schema": GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "any json": GrammarSpec(GrammarKind.JSON_SCHEMA, "{}"),
    "counted": GrammarSpec(
        GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "minLength": 40, "maxLength": 200})
    ),
    "ebnf": GrammarSpec(
        GrammarKind.EBNF,
        'root ::= sum\nsum ::= term (" + " term)*\nterm ::= [0-9]+ | "(" sum ")"',
    ),
}


def large_vocabulary() -> Vocabulary:
    """See the module."""
    rng = random.Random(SEED)
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    signs = '0123456789_{}[]":,.-'
    found = dict.fromkeys(bytes([byte]) for byte in range(256))
    while len(found) < LARGE - 8:
        length = 1 + min(11, int(rng.expovariate(0.25)))
        word = "".join(
            rng.choice(letters if rng.random() < 0.9 else letters + signs) for _ in range(length)
        )
        found[(rng.choice((" ", " ", "")) + word).encode()] = None
    return Vocabulary((*found, *[b""] * 8))


def best_of(call: Callable[[], Any], num_rounds: int) -> float:
    """Median seconds of a call."""
    times = []
    for _ in range(num_rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure_draw(vocab_size: int, temperature: float, num_rounds: int) -> float:
    """Seconds of one draw without any processor."""
    torch.manual_seed(SEED)
    logits = torch.randn(1, vocab_size)
    one = Draw(Sampling(max_tokens=1, temperature=temperature), position=5)
    return best_of(lambda: draw(logits, [one]), num_rounds)


class Costs:
    """Seconds of the parts of each token of some outputs."""

    def __init__(self) -> None:
        self.fill: list[float] = []
        self.follow: list[float] = []
        self.jump: list[float] = []
        self.num_forced = 0
        self.num_tokens = 0

    def row(self) -> dict[str, float]:
        """Microseconds, mean and worst; a mean, because costs of states differ by design."""

        def us(values: list[float]) -> float:
            return round(statistics.mean(values) * 1e6, 1)

        return {
            "fill_us": us(self.fill),
            "fill_p99_us": round(float(np.quantile(self.fill, 0.99)) * 1e6, 1),
            "follow_us": us(self.follow),
            "follow_p99_us": round(float(np.quantile(self.follow, 0.99)) * 1e6, 1),
            "look_for_jump_us": us(self.jump),
            "num_tokens": self.num_tokens,
        }


def drive(
    make: Callable[[], GrammarState], surroundings: Surroundings, num_tokens: int, costs: Costs
) -> None:
    """Outputs of random draws until so many tokens were timed."""
    rng = random.Random(SEED)
    rows = torch.zeros(1, surroundings.num_words, dtype=torch.int32)
    while costs.num_tokens < num_tokens:
        state = make()
        for _ in range(num_tokens):
            began = time.perf_counter()
            state.fill(rows, 0)
            costs.fill.append(time.perf_counter() - began)
            bits = np.unpackbits(rows[0].numpy().view(np.uint8), bitorder="little")
            token_id = int(rng.choice(np.nonzero(bits)[0]))
            began = time.perf_counter()
            state.forced_after(token_id)
            costs.jump.append(time.perf_counter() - began)
            began = time.perf_counter()
            assert state.accept(token_id)
            is_over = state.is_complete
            costs.follow.append(time.perf_counter() - began)
            costs.num_tokens += 1
            if is_over:
                break


def measure_batch(
    make: Callable[[], GrammarState], surroundings: Surroundings, num_rows: int, num_rounds: int
) -> float:
    """Seconds per row of a whole Fill, threads included."""
    states = [make() for _ in range(num_rows)]
    return best_of(lambda: Fill(surroundings, states).result(), num_rounds) / num_rows


def measure(vocabulary: Vocabulary, tokenizer: Tokenizer, num_tokens: int) -> dict[str, Any]:
    """One vocabulary."""
    # Costs are what is asked here: nothing is cut off.
    limits = GrammarLimits(token_cpu_s=60.0, token_timeout_s=60.0)
    cutter = Cutter(tokenizer, vocabulary)
    surroundings = Surroundings(vocabulary, limits, Workers("benchmark", 4), cutter)
    info = tokenizer_info(vocabulary)
    # An id of no text ends outputs: the last one of either vocabulary, or <|end|>.
    end = vocabulary.size - 1 if not vocabulary.token_bytes[-1] else 1
    greedy = measure_draw(vocabulary.size, 0.0, 200)
    sampled = measure_draw(vocabulary.size, 1.0, 200)
    result: dict[str, Any] = {
        "vocabulary": vocabulary.size,
        "greedy_draw_us": round(greedy * 1e6, 1),
        "sampled_draw_us": round(sampled * 1e6, 1),
        "kinds": {},
    }
    for name, spec in SPECS.items():
        checked = source(spec, limits)
        began = time.perf_counter()
        compiled = compile_grammar(info, checked.form, checked.text)
        compile_s = time.perf_counter() - began

        def make(compiled: Any = compiled) -> GrammarState:
            return new_state(compiled, surroundings, frozenset({end}))

        costs = Costs()
        drive(make, surroundings, num_tokens, costs)
        row: dict[str, Any] = {"compile_s": round(compile_s, 4), **costs.row()}
        row["batch_64_fill_us_per_row"] = round(measure_batch(make, surroundings, 64, 20) * 1e6, 1)
        per_token = row["fill_us"] + row["follow_us"]
        row["ratio_to_greedy_draw"] = round(per_token / (greedy * 1e6), 3)
        row["ratio_to_sampled_draw"] = round(per_token / (sampled * 1e6), 3)
        result["kinds"][name] = row
    surroundings.workers.close()
    return result


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=600, help="tokens timed per kind")
    parser.add_argument("--out", type=Path, help="write the JSON object here, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(stderr=True)
    tokenizer = Tokenizer.load(BUNDLED)
    results = []
    for name, make in (
        ("bundled", lambda: Vocabulary.load(BUNDLED, 2048)),
        ("synthetic", large_vocabulary),
    ):
        with console.status(name):
            results.append(measure(make(), tokenizer, arguments.tokens))
        table = Table(title=f"{results[-1]['vocabulary']} tokens, microseconds per token")
        columns = ("compile_s", "fill_us", "follow_us", "look_for_jump_us", "ratio_to_sampled_draw")
        for column in ("", *columns):
            table.add_column(column, justify="right")
        for kind, row in results[-1]["kinds"].items():
            table.add_row(kind, *(str(row[column]) for column in columns))
        console.print(table)
        console.print(
            f"a plain draw: greedy {results[-1]['greedy_draw_us']} us, "
            f"sampled {results[-1]['sampled_draw_us']} us"
        )
    result = {
        "benchmark": "grammar",
        "vocabularies": results,
        **context(),
        "torch": torch.__version__,
        "xgrammar": getattr(xgrammar, "__version__", "unknown"),
    }
    publish(result, arguments.out)


if __name__ == "__main__":
    main()
