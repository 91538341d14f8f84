"""Several tokens a step against one: tokens per step of the target and speed by the clock, the
bundled model with its draft model, by batch size.

A cell is a batch size and a temperature. In each round every way answers the same prompts with the
same seeds, step by step: all ways take one step each, one right after the other, in an order that
is shuffled for each turn, so that a busy machine's bad moments meet all alike, and each step is
held against plain decoding's step beside it. The answers are compared: not one token may differ,
but for those sampled by the multi-step rule, which are other ones of the same distribution.

How a speed, its interval and its two parts, what resting costs and what guessing costs, come of
these steps is told in speculation_steps.py. Steps of prompts are left out: nobody guesses in them.
`shown`, `open` and `refuted` list the ways that may rest by whether they are at least 0.98 times as
fast as plain decoding: the whole interval says so, or a part of it, or nothing of it.

"plain again" is a second engine without guesses, in every run, and in those lists as any other. It
is as fast as plain decoding, so that its interval tells what intervals are worth (`control`): one
in 20 may leave out 1.

Engines are made anew for each round, and why, speculation_engines.py says.

The last line printed is one JSON object: also the medians over rounds of whole rounds' speeds, each
with its least and its greatest (speculation_rounds.py). `--resume FILE` keeps each cell when it is
done, and goes on from there. `--ways` leaves ways out, so that there is time for more rounds;
`--rounds` is one number, or one for each batch size, as a small batch's take less time. The ways
that may rest take some 15 minutes so on a quiet machine of two cores:

    OMP_NUM_THREADS=1 python -m benchmarks.speculation --ways ngram draft tree
        --rounds 12 12 12 16 12 8 5 --out benchmarks/results/<date>-....json
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.context import context, publish
from benchmarks.speculation_engines import Way
from benchmarks.speculation_rounds import AGAIN, PLAIN, Kept, Round, summary, turns
from benchmarks.speculation_steps import Step, control, figures, markdown, verdicts
from checkpoints.resolve import resolve
from engine.config import EngineConfig
from engine.models.load import Loaded, load_model
from engine.request import Request, Sampling
from engine.speculation.config import SpeculationConfig
from process.entrypoint import begin_serving
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


class _Run:
    """One way's engine answering all prompts, step by step."""

    def __init__(
        self, way: Way, prompts: list[list[int]], temperature: float, num_tokens: int
    ) -> None:
        self._way, self._engine = way, way.engine
        self._answers: dict[str, list[int]] = {}
        self._num_kept = -self._engine.metrics().num_kept_tokens
        self._num_tokens = num_tokens
        self._ended_s: dict[str, float] = {}
        """When whose answer was whole, by the seconds of steps."""
        self.steps: list[Step] = []
        for index, prompt in enumerate(prompts):
            sampling = Sampling(
                max_tokens=num_tokens, temperature=temperature, seed=index, ignore_eos=True
            )
            request = Request(f"r{index}", tuple(prompt), sampling, _block_hash)
            self._answers[request.request_id] = []
            self._engine.submit(request)

    @property
    def answers(self) -> list[tuple[int, ...]]:
        return [tuple(one) for one in self._answers.values()]

    @property
    def is_over(self) -> bool:
        return not self._engine.has_work()

    def step(self) -> None:
        """One, if there is one."""
        if self.is_over:
            return
        self.steps.append(self._way.step(self._answers))
        ended = [name for name, one in self._answers.items() if len(one) == self._num_tokens]
        now_s = sum(step.wall_s for step in self.steps)
        for name in ended:
            self._ended_s.setdefault(name, now_s)

    def over(self) -> Round:
        """What it was."""
        num_kept = self._num_kept + self._engine.metrics().num_kept_tokens
        num_tokens = sum(len(one) for one in self._answers.values())
        wall_s, cpu_s = (sum(step[clock] for step in self.steps) for clock in (0, 1))
        answers_s = sum(self._ended_s.values())
        return Round(wall_s, cpu_s, num_tokens, num_kept, answers_s)


def _round(
    ways: dict[str, Way],
    prompts: list[list[int]],
    temperature: float,
    num_tokens: int,
    orders: Iterator[list[str]],
) -> dict[str, _Run]:
    gc.unfreeze()  # what was the last round's may go
    for way in next(orders):
        ways[way].renew()
    begin_serving()
    runs = {way: _Run(one, prompts, temperature, num_tokens) for way, one in ways.items()}
    while not all(run.is_over for run in runs.values()):
        for way in next(orders):
            runs[way].step()
    for way, run in runs.items():
        is_other = way == "multi_step" and temperature > 0.0
        if run.answers != runs[PLAIN].answers and not is_other:
            raise SystemExit(f"{way}: an answer differs from plain decoding's")
    if any(step.num_tokens != len(prompts) for step in runs[PLAIN].steps[1:]):
        raise SystemExit("prompts took more than the first step")
    return runs


def _cell(
    arguments: argparse.Namespace,
    model: Loaded,
    name: str,
    temperature: float,
    size: int,
    num_rounds: int,
) -> dict[str, dict[str, Any]]:
    """Figures by way."""
    prompts = _prompts()
    # A prefix of a shuffled list would do as well: neighbours differ in the name alone.
    own = prompts[:: len(prompts) // size][:size] if size < len(prompts) else prompts
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    ways = {
        way: Way(model, replace(_CONFIG, speculation=speculation), core)
        for way, speculation in WAYS.items()
        if way in (PLAIN, AGAIN, *arguments.ways)
    }
    orders = turns(list(ways), f"{arguments.seed} {name}")
    rounds: dict[str, list[Round]] = {way: [] for way in ways}
    steps: dict[str, list[list[Step]]] = {way: [] for way in ways}
    try:
        for _ in range(num_rounds):
            for way, run in _round(ways, own, temperature, arguments.tokens, orders).items():
                rounds[way].append(run.over())
                steps[way].append(run.steps[1:])
    finally:
        for one in ways.values():
            one.close()
    found = summary(rounds)
    for way in ways:
        found[way] |= figures(steps[PLAIN], steps[way])
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
    parser.add_argument(
        "--rounds", type=_positive, nargs="+", default=[9], help="one number, or one a batch size"
    )
    parser.add_argument(
        "--ways", nargs="+", choices=WAYS, default=list(WAYS), help=f"and {PLAIN} and {AGAIN}"
    )
    parser.add_argument("--seed", type=int, help="of the order of turns; drawn if not given")
    parser.add_argument("--resume", type=Path, help="cells that are done; made if it is missing")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if len(arguments.rounds) not in (1, len(arguments.batches)):
        parser.error("--rounds: one number, or one for each batch size")
    by_size = itertools.cycle(arguments.rounds)
    num_rounds = {size: next(by_size) for size in arguments.batches}
    if arguments.seed is None:
        arguments.seed = random.SystemRandom().randrange(2**32)
    torch.set_num_threads(1)
    told = context()
    run = {
        "commit": told["commit"],
        "ways": [way for way in WAYS if way in (PLAIN, AGAIN, *arguments.ways)],
        "tokens": arguments.tokens,
        "rounds": {str(size): number for size, number in num_rounds.items()},
    }
    kept = Kept(arguments.resume, run)
    model = load_model(_CONFIG)
    screen = Console(stderr=True)
    screen.print(f"seed {arguments.seed}")
    pairs = list(itertools.product(arguments.temperatures, arguments.batches))
    for temperature, size in track(pairs, "answering", console=screen):
        name = f"temperature {temperature:g}, batch {size}"
        if name in kept.by_batch:
            continue
        busy_before = os.getloadavg()[0]
        found = _cell(arguments, model, name, temperature, size, num_rounds[size])
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
    by_verdict, controlled = verdicts(may_rest, LEAST_SPEED), control(by_batch)
    _show(by_batch, run["ways"])
    sys.stdout.write(markdown(by_batch, [way for way in run["ways"] if way != PLAIN]) + "\n")
    for verdict, those in by_verdict.items():
        sys.stdout.write(f"at least {LEAST_SPEED}, {verdict}: {len(those)}\n")
        if verdict != "shown":
            sys.stdout.write("".join(f"    {one}\n" for one in those))
    num_cells, off = controlled["num_cells"], controlled["off"]
    sys.stdout.write(f"{AGAIN}: 1 is in the interval in {num_cells - len(off)} of {num_cells} ")
    sys.stdout.write(f"cells (19 of 20 are expected); not in: {'; '.join(off) or 'none'}\n")
    result = {
        **told,
        "tokens": arguments.tokens,
        "rounds": run["rounds"],
        "by_batch": by_batch,
        "least": LEAST_SPEED,
        **by_verdict,
        "control": controlled,
        "load_average": {name: cell["load_average"] for name, cell in cells.items()},
        "seeds": {name: cell["seed"] for name, cell in cells.items()},
    }
    publish(result, arguments.out)


def _show(by_batch: dict[str, Any], ways: Sequence[str]) -> None:
    table = Table(
        title="tokens per step of the target; speed against plain decoding by the clock (interval "
        "of 95 %); of it lost by resting and by guessing, %; speed by the thread's own time"
    )
    table.add_column("")
    for way in ways:
        table.add_column(way, justify="right")
    for name, found in by_batch.items():
        cells = []
        for way in ways:
            one = found[way]
            low, high = one["interval"] or (float("nan"), float("nan"))
            losses = (f"{100.0 * one[loss]:+.1f}" for loss in ("resting_loss", "guessing_loss"))
            cells.append(
                f"{one['tokens_per_step']:.2f}; {one['speed']:.3f} ({low:.3f} to {high:.3f}); "
                f"{', '.join(losses)}; {one['by_cpu']['speed']:.3f}"
            )
        table.add_row(name, *cells)
    Console(width=None if sys.stdout.isatty() else 40 + 52 * len(ways)).print(table)


if __name__ == "__main__":
    main()
