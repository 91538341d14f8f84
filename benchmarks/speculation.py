"""Several tokens a step against one: tokens per step of the target and speed by the clock, the
bundled model with its draft model, by batch size.

A cell is a batch size and a temperature; it has engines of its own, so that none knows what an
earlier cell taught, and cells can be run one by one. In each round every way answers the same
prompts with the same seeds: all ways turn about by a few steps, in an order that is shuffled for
each turn, so that a busy machine's bad moments meet all alike, and each is held against plain
decoding of the same round. The answers are compared: not one token may differ, but for those
sampled by the multi-step rule, which are other ones of the same distribution.

Engines are called as a worker calls them, each in a thread of its own, one at a time: what guesses
cost is judged by the time that an engine's own thread computed, in which the other engines must
have no part. Printed: tokens per step, the median speed by the clock with the least and the
greatest of all rounds, and the median by the time that the engine's thread computed, in which other
work on the machine has less say. What an engine tries for the first time is in the first rounds,
and in `wall_speed_total`.

"plain again" is a second engine without guesses: what it is away from 1 is noise. It is in every
run, and in the lists of ways that are too slow as any other, so that noise which would make a way
look slow is seen there. Two lists, of the ways that may rest: `below`, whose median is below 0.98,
and `below_surely`, those of them where the rounds say so beyond noise. The rule is a sign test
(speculation_rounds.py:surely_slower): were the way just as fast as 0.98, each round would be below
it or above like a coin; listed is who is below in so many rounds as come by chance once in twenty
cells at most: 5 of 5, 9 of 11, 12 of 15. Below 0.98 of plain, that is, or of the median of "plain
again" where that is slower: some percent are an engine's own as long as it lives, by where its
memory lies, and which ways have a lucky one no number of rounds tells. One that is really below
may be missed where its rounds scatter: more rounds find it. `below` hides nothing.

The last line printed is one JSON object. `--resume FILE` keeps each cell when it is done, and goes
on from there. `--ways` leaves ways out, so that there is time for more rounds; the ways that may
rest, 11 rounds, take some 20 minutes on a quiet machine of two cores:

    OMP_NUM_THREADS=1 python -m benchmarks.speculation --ways ngram draft tree --rounds 11 --out
        benchmarks/results/<date>-....json
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import os
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.context import context, publish
from benchmarks.speculation_rounds import (
    AGAIN,
    PLAIN,
    Kept,
    Round,
    slower,
    summary,
    surely_slower,
    turns,
)
from checkpoints.resolve import resolve
from engine.config import EngineConfig
from engine.loop import Engine, load_engine
from engine.request import Request, Sampling
from engine.speculation.config import SpeculationConfig
from tokens.tokenizer import Tokenizer

TARGET, DRAFT = "baton-5m", "baton-5m-draft"
WAYS = {
    PLAIN: SpeculationConfig(),
    AGAIN: SpeculationConfig(),
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

LEAST_SPEED = 0.98
"""What a way that may rest is never to fall below."""

_CONFIG = EngineConfig(
    model=TARGET,
    device="cpu",
    dtype="float32",
    num_threads=1,
    context_window=512,
    num_blocks=64 * 512 // 16,
    max_num_tokens_per_step=1024,
)


def _block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    data = b"".join(token.to_bytes(4, "little") for token in token_ids)
    return hashlib.blake2b(parent + data, digest_size=16).digest()


def _prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load(resolve(TARGET, files="tokenizer").path)
    pairs = itertools.product(_BEGINNINGS, _NAMES)
    return [tokenizer.encode(beginning.format(name)) for beginning, name in pairs]


class _Way:
    """An engine and its thread."""

    def __init__(self, speculation: SpeculationConfig) -> None:
        self.thread = ThreadPoolExecutor(1)
        config = replace(_CONFIG, speculation=speculation)
        self.engine: Engine = self.thread.submit(load_engine, config).result()

    def close(self) -> None:
        self.thread.submit(self.engine.close).result()
        self.thread.shutdown()


class _Run:
    """One way's engine answering all prompts, some steps at a time."""

    def __init__(
        self, way: _Way, prompts: list[list[int]], temperature: float, num_tokens: int
    ) -> None:
        self._engine, self._thread = way.engine, way.thread
        engine = way.engine
        self._answers: dict[str, list[int]] = {}
        self._num_kept = -engine.metrics().num_kept_tokens
        self._cpu_s = self._wall_s = 0.0
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

    @property
    def is_over(self) -> bool:
        return not self._engine.has_work()

    def step(self, num_steps: int) -> None:
        """At most so many."""
        self._thread.submit(self._step, num_steps).result()

    def _step(self, num_steps: int) -> None:
        began_s, cpu_began_s = time.perf_counter(), time.thread_time()
        while num_steps > 0 and self._engine.has_work():
            num_steps -= 1
            for event in self._engine.step().events:
                self._answers[event.request_id] += event.token_ids
        self._cpu_s += time.thread_time() - cpu_began_s
        self._wall_s += time.perf_counter() - began_s

    def over(self) -> Round:
        """What it was."""
        num_kept = self._num_kept + self._engine.metrics().num_kept_tokens
        num_tokens = sum(len(one) for one in self._answers.values())
        return Round(self._wall_s, self._cpu_s, num_tokens, num_kept)


def _measure(
    engines: dict[str, _Way],
    prompts: list[list[int]],
    temperature: float,
    num_tokens: int,
    num_rounds: int,
    seed: str,
) -> dict[str, list[Round]]:
    rounds: dict[str, list[Round]] = {way: [] for way in engines}
    orders = turns(list(engines), seed)
    for _ in range(num_rounds):
        runs = {
            way: _Run(engine, prompts, temperature, num_tokens) for way, engine in engines.items()
        }
        while not all(run.is_over for run in runs.values()):
            for way in next(orders):
                runs[way].step(_TURN_STEPS)
        for way, run in runs.items():
            is_other = way == "multi_step" and temperature > 0.0
            if run.answers != runs[PLAIN].answers and not is_other:
                raise SystemExit(f"{way}: an answer differs from plain decoding's")
            rounds[way].append(run.over())
    return rounds


def _cell(arguments: argparse.Namespace, name: str, temperature: float, size: int) -> Any:
    """Figures by way."""
    engines: dict[str, _Way] = {}
    try:
        for way, speculation in WAYS.items():
            if way in (PLAIN, AGAIN, *arguments.ways):
                engines[way] = _Way(speculation)
        prompts = _prompts()
        # A prefix of a shuffled list would do as well: neighbours differ in the name alone.
        own = prompts[:: len(prompts) // size][:size] if size < len(prompts) else prompts
        seed = f"{arguments.seed} {name}"
        found = summary(
            _measure(engines, own, temperature, arguments.tokens, arguments.rounds, seed)
        )
    finally:
        for engine in engines.values():
            engine.close()
        engines.clear()
        gc.collect()
    return found


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--batches", type=_positive, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--tokens", type=_positive, default=96)
    parser.add_argument("--rounds", type=_positive, default=5)
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help=f"and {PLAIN} and {AGAIN}"
    )
    parser.add_argument("--seed", type=int, help="of the order of turns; drawn if not given")
    parser.add_argument("--resume", type=Path, help="cells that are done; made if it is missing")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(2**32)
    torch.set_num_threads(1)
    told = context()
    run = {
        "commit": told["commit"],
        "ways": [way for way in WAYS if way in (PLAIN, AGAIN, *arguments.ways)],
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
    }
    kept = Kept(arguments.resume, run)
    screen = Console(stderr=True)
    screen.print(f"seed {arguments.seed}")
    pairs = list(itertools.product(arguments.temperatures, arguments.batches))
    for temperature, size in track(pairs, "answering", console=screen):
        name = f"temperature {temperature:g}, batch {size}"
        if name in kept.by_batch:
            continue
        busy_before = os.getloadavg()[0]
        found = _cell(arguments, name, temperature, size)
        busy = [round(one, 2) for one in (busy_before, os.getloadavg()[0])]
        kept.add(name, {"ways": found, "load_average": busy, "seed": arguments.seed})
        screen.print(f"{name}: load average {busy[0]} before, {busy[1]} after")
    names = [f"temperature {temperature:g}, batch {size}" for temperature, size in pairs]
    cells = {name: kept.by_batch[name] for name in names}
    by_batch = {name: cell["ways"] for name, cell in cells.items()}
    may_rest = {
        name: {way: one for way, one in found.items() if not WAYS[way].always}
        for name, found in by_batch.items()
    }
    below = slower(may_rest, LEAST_SPEED)
    below_surely = surely_slower(may_rest, LEAST_SPEED)
    _show(by_batch, run["ways"])
    sys.stdout.write(f"below {LEAST_SPEED}: {'; '.join(below) or 'none'}\n")
    sys.stdout.write(f"of them beyond noise: {'; '.join(below_surely) or 'none'}\n")
    result = {
        **told,
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "by_batch": by_batch,
        "below": below,
        "below_surely": below_surely,
        "load_average": {name: cell["load_average"] for name, cell in cells.items()},
        "seeds": {name: cell["seed"] for name, cell in cells.items()},
    }
    publish(result, arguments.out)


def _show(by_batch: dict[str, Any], ways: Sequence[str]) -> None:
    table = Table(
        title="tokens per step of the target; speed against plain decoding by the clock: median "
        "(least to greatest round); by the thread's own time"
    )
    table.add_column("")
    for way in ways:
        table.add_column(way, justify="right")
    for name, found in by_batch.items():
        cells = []
        for way in ways:
            one = found[way]
            low, high = one["wall_speed_range"]
            cells.append(
                f"{one['tokens_per_step']:.2f}; {one['wall_speed']:.2f} ({low:.2f} to {high:.2f}); "
                f"{one['cpu_speed']:.2f}"
            )
        table.add_row(name, *cells)
    Console(width=None if sys.stdout.isatty() else 40 + 40 * len(ways)).print(table)


if __name__ == "__main__":
    main()
