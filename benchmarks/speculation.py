"""Several tokens a step against one: tokens per step of the target and wall-clock speed, the
bundled model with its draft model, by batch size; all ways in one run, turn about by a few steps,
and all rounds together: what an engine tries for the first time counts.

Engines are called as a worker calls them, one process, one thread each. Per batch size and
temperature every way answers the same prompts with the same seeds, and the answers are compared:
not one token may differ, but for those sampled by the multi-step rule, which are other ones of the
same distribution. `tokens_per_step` is output tokens per row of logits that the target drew
from (1 without guesses), `speed` tokens per second over those of plain decoding, by the time that
the engine's thread computed, `wall_speed` by the clock, in which other work on the machine has its
say. The last line printed is one JSON object.

    OMP_NUM_THREADS=1 python -m benchmarks.speculation --out benchmarks/results/<date>-....json
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.context import context, publish
from checkpoints.resolve import resolve
from engine.config import EngineConfig
from engine.loop import Engine, load_engine
from engine.request import Request, Sampling
from engine.speculation.config import SpeculationConfig
from tokens.tokenizer import Tokenizer

TARGET, DRAFT = "baton-5m", "baton-5m-draft"
WAYS = {
    "plain": SpeculationConfig(),
    "ngram": SpeculationConfig(drafters=("ngram",)),
    "draft": SpeculationConfig(draft_models=(DRAFT,), expansion=(1, 1, 1, 1)),
    "tree": SpeculationConfig(draft_models=(DRAFT,), expansion=(2, 1, 1, 1)),
    "all of the tree": SpeculationConfig(
        draft_models=(DRAFT,), expansion=(2, 1, 1, 1), always=True
    ),
    "naive": SpeculationConfig(
        draft_models=(DRAFT,), expansion=(2, 1, 1, 1), always=True, acceptance="naive"
    ),
    "multi_step": SpeculationConfig(
        draft_models=(DRAFT,), expansion=(2, 1, 1, 1), always=True, acceptance="multi_step"
    ),
}
"""The last three compute what does not pay, too, by each rule of acceptance: at a temperature, that
of "all of the tree" is the exact one. Greedy, there is one rule."""

_NAMES = ("Tom", "Anna", "Lily", "Ben", "Mia", "Sam", "Max", "Sue")
_BEGINNINGS = (
    "Once upon a time there was a little dog called {}. One day",
    "One day {} went to the park and",
    "{} had a red ball. It was",
    "The sun was warm and {} wanted to",
    "There was a big tree in the garden. {} said:",
    "{} and Mom went to the shop. They",
    "It was a cold day. {} looked out and",
    "{} saw a small cat near the house. The cat",
)


_TURN_STEPS = 8
"""Few enough that a machine's bad moments meet all ways alike."""


def _block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    data = b"".join(token.to_bytes(4, "little") for token in token_ids)
    return hashlib.blake2b(parent + data, digest_size=16).digest()


def _prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load(resolve(TARGET, files="tokenizer").path)
    pairs = itertools.product(_BEGINNINGS, _NAMES)
    return [tokenizer.encode(beginning.format(name)) for beginning, name in pairs]


class _Run:
    """One way's engine answering all prompts, some steps at a time."""

    def __init__(
        self, engine: Engine, prompts: list[list[int]], temperature: float, num_tokens: int
    ) -> None:
        self._engine = engine
        self._answers: dict[str, list[int]] = {}
        self.cpu_s = self.wall_s = 0.0
        for index, prompt in enumerate(prompts):
            sampling = Sampling(
                max_tokens=num_tokens, temperature=temperature, seed=index, ignore_eos=True
            )
            request = Request(f"r{index}", tuple(prompt), sampling, _block_hash)
            self._answers[request.request_id] = []
            engine.submit(request)

    @property
    def answers(self) -> list[tuple[int, ...]]:
        return [tuple(one) for one in self._answers.values()]

    def step(self, num_steps: int) -> bool:
        """At most so many. Returns: there are more to come."""
        began_s, cpu_began_s = time.perf_counter(), time.thread_time()
        while num_steps > 0 and self._engine.has_work():
            num_steps -= 1
            for event in self._engine.step().events:
                self._answers[event.request_id] += event.token_ids
        self.cpu_s += time.thread_time() - cpu_began_s
        self.wall_s += time.perf_counter() - began_s
        return self._engine.has_work()


def _measure(
    engines: dict[str, Engine],
    prompts: list[list[int]],
    temperature: float,
    num_tokens: int,
    num_rounds: int,
) -> dict[str, dict[str, float]]:
    cpu_s, wall_s = dict.fromkeys(engines, 0.0), dict.fromkeys(engines, 0.0)
    before = {way: engine.metrics() for way, engine in engines.items()}
    for _ in range(num_rounds):
        runs = {
            way: _Run(engine, prompts, temperature, num_tokens) for way, engine in engines.items()
        }
        live = list(runs.values())
        while live:
            live = [run for run in live if run.step(_TURN_STEPS)]
        for way, run in runs.items():
            is_other = way == "multi_step" and temperature > 0.0
            if run.answers != runs["plain"].answers and not is_other:
                raise SystemExit(f"{way}: an answer differs from plain decoding's")
            cpu_s[way] += run.cpu_s
            wall_s[way] += run.wall_s
    found: dict[str, dict[str, float]] = {}
    for way, engine in engines.items():
        after = engine.metrics()
        num_tokens_out = after.num_output_tokens - before[way].num_output_tokens
        num_kept = after.num_kept_tokens - before[way].num_kept_tokens
        found[way] = {
            "tokens_per_s": round(num_tokens_out / cpu_s[way], 1),
            "speed": round(cpu_s["plain"] / cpu_s[way], 3),
            "wall_speed": round(wall_s["plain"] / wall_s[way], 3),
            "tokens_per_step": round(num_tokens_out / (num_tokens_out - num_kept), 3),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="and plain")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    config = EngineConfig(
        model=TARGET,
        device="cpu",
        dtype="float32",
        num_threads=1,
        context_window=512,
        num_blocks=64 * 512 // 16,
        max_num_tokens_per_step=1024,
    )
    engines = {
        way: load_engine(replace(config, speculation=speculation))
        for way, speculation in track(WAYS.items(), "loading", console=Console(stderr=True))
        if way in ("plain", *arguments.ways)
    }
    prompts = _prompts()
    result: dict[str, Any] = {}
    pairs = list(itertools.product(arguments.temperatures, arguments.batches))
    for temperature, size in track(pairs, "answering", console=Console(stderr=True)):
        # A prefix of a shuffled list would do as well: neighbours differ in the name alone.
        own = prompts[:: len(prompts) // size][:size] if size < len(prompts) else prompts
        found = _measure(engines, own, temperature, arguments.tokens, arguments.rounds)
        result[f"temperature {temperature:g}, batch {size}"] = found
    _show(result, list(engines))
    publish({**context(), "tokens": arguments.tokens, "by_batch": result}, arguments.out)


def _show(result: dict[str, Any], ways: Sequence[str]) -> None:
    table = Table(title="tokens per step of the target, and speed against plain decoding")
    table.add_column("")
    for way in ways:
        table.add_column(way, justify="right")
    for name, found in result.items():
        cells = [f"{one['tokens_per_step']:.2f}, {one['speed']:.2f} x" for one in found.values()]
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
