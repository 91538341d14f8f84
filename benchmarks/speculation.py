"""Several tokens a step against one: tokens per step of the target and speed by the clock, by batch
size, on a CPU and on a GPU.

    OMP_NUM_THREADS=1 python -m benchmarks.speculation cpu --ways ngram,draft,tree
    python -m benchmarks.speculation gpu --shape llama-8b
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import click
import torch
import transformers
from rich.progress import track

from benchmarks import harness
from benchmarks.engine_gpu import Bench
from benchmarks.harness import Several, block_hash
from benchmarks.random_checkpoint import SHAPES
from checkpoints.resolve import resolve
from engine.config import EngineConfig
from engine.decoder.ahead import make_ahead
from engine.decoder.plain_graphs import make_plain_graphs
from engine.engine import LLMEngine
from engine.models.llama import (
    LlamaConfig,
    LlamaDecoder,
    LlamaModel,
    LlamaWeights,
    kv_layout,
    read_llama_config,
    rope_table,
)
from engine.models.loader import Loaded, load_model
from engine.models.weights import random_weights
from engine.request import ModelInfo, Request, Sampling
from engine.sequence import Key
from engine.speculation.config import SpeculationConfig
from engine.speculation.loader import load_proposers
from engine.speculation.proposer import Draft, DraftTask, Proposer
from engine.speculation.token_tree import TokenTree
from process.entrypoint import begin_serving
from tokens.tokenizer import Tokenizer

PLAIN, AGAIN = "plain", "plain again"
"""Names of plain decoding and of a second engine that does the very same: how far the latter's
speed is from 1 is noise."""

# -- whole rounds: in which order ways take their turns, and what came of their answers


@dataclass(frozen=True)
class Round:
    """The answers of one way to all prompts of a cell, once."""

    num_tokens: int
    """Number of answered tokens."""
    num_kept: int
    """Number of answered tokens that were guessed."""
    answers_s: float
    """Sum over the answers of the seconds from the round's beginning to the answer's last token."""


def turns(ways: Sequence[str], seed: str) -> Iterator[list[str]]:
    """Yield the order of the ways in each turn, without end: shuffled anew each time, the same for
    a seed."""
    rng = random.Random(seed)
    order = list(ways)
    while True:
        rng.shuffle(order)
        yield list(order)


def answers(rounds: Mapping[str, Sequence[Round]]) -> dict[str, dict[str, float]]:
    """Figures of the answers, by way: `tokens_per_step`, tokens per row of logits that the target
    sampled from; and `answers_speed`, plain decoding's mean time of an answer by the way's: a batch
    is over when its slowest answer is, and an answer with more right guesses than the others is
    there before."""
    plain_s = sum(each.answers_s for each in rounds[PLAIN])
    found = {}
    for way, own in rounds.items():
        num_tokens = sum(each.num_tokens for each in own)
        num_rows = num_tokens - sum(each.num_kept for each in own)
        found[way] = {
            "tokens_per_step": round(num_tokens / num_rows, 3),
            "answers_speed": round(plain_s / sum(each.answers_s for each in own), 3),
        }
    return found


# -- single steps: a way's speed against plain decoding, with an interval, split into what resting
# costs and what guessing costs.
#
# A step in which no proposer is asked, and that computes as many rows as plain decoding's of the
# same number, is a resting one: both compute the same, one right after the other. What resting
# costs is the median of the quotients of such pairs in a round: no step that something else held up
# has more say than any other. All other steps are guessing ones, and count by the seconds they
# took: those with guesses, those with a call of a proposer for nothing, and those of fewer rows,
# since a sequence with right guesses ends first. With P the seconds of all plain steps, P_rest of
# those that resting ones stand beside, r the rounds' medians (mean by P_rest), O the seconds of
# guessing ones:
#
#     1 / speed = (r * P_rest + O) / P = 1 + (r - 1) * P_rest / P  +  (O - (P - P_rest)) / P
#                                            resting_loss             guessing_loss
#
# The interval. Steps that follow each other meet the same moments of a machine, and all steps of an
# engine the same memory, so that neither steps nor pairs are independent; rounds are, in which all
# engines are made anew. So a round is one observation: what its resting steps took more or less
# than r says, and its guessing ones than the quotient of all rounds' says, together; the interval
# is Student's, of as many observations as rounds. It is about time: which guesses were made, and
# kept, is taken as it was.

_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14,
            2.13, 2.12, 2.11, 2.10, 2.09, 2.09)  # fmt: skip
"""Student's t of 95 %, both sides, for 1, 2, ... degrees of freedom; the last for more, too."""

_DIGITS = 4


class Step(NamedTuple):
    """The account of one step of an engine."""

    seconds: float
    num_tokens: int
    """Number of tokens that the step computed and kept: rows, where nothing was guessed."""
    is_asked: bool
    """Whether a proposer was asked in the step."""


class Held(NamedTuple):
    """The times of one round of a way and of plain decoding's round beside it, of which the speed
    is computed."""

    plain_s: float
    resting_plain_s: float
    """Seconds of the plain steps beside the steps in which the way did not guess."""
    resting: float
    """Median ratio of the seconds of steps without guesses to those of the plain steps beside them;
    1.0 where there are none."""
    guessing_s: float
    num_resting: int
    num_guessing: int


class Speed(NamedTuple):
    """The speed of a way over all rounds, with its interval of 95 %."""

    speed: float
    low: float | None
    high: float | None
    """Upper end of the interval; None: one round has no interval."""
    resting_loss: float
    guessing_loss: float


def held(plain: Sequence[Step], own: Sequence[Step]) -> Held:
    """Compare one round of a way with plain decoding's.

    Args: plain, own: steps in their order, without those of prompts; the way's n-th was taken
        beside the plain n-th, and it has no more of them.
    """
    if len(own) > len(plain):
        raise ValueError(f"{len(own)} steps where plain decoding took {len(plain)}")
    quotients: list[float] = []
    resting_plain_s = guessing_s = 0.0
    for step, beside in zip(own, plain, strict=False):
        if step.is_asked or step.num_tokens != beside.num_tokens:
            guessing_s += step.seconds
        else:
            quotients.append(step.seconds / beside.seconds)
            resting_plain_s += beside.seconds
    num_resting = len(quotients)
    resting = statistics.median(quotients) if quotients else 1.0
    num_guessing = len(own) - num_resting
    plain_s = sum(step.seconds for step in plain)
    return Held(plain_s, resting_plain_s, resting, guessing_s, num_resting, num_guessing)


def speed(rounds: Sequence[Held]) -> Speed:
    """Compute the speed and its interval from all rounds."""
    plain_s = math.fsum(one.plain_s for one in rounds)
    rested_s = math.fsum(one.resting_plain_s for one in rounds)
    guessing_s = math.fsum(one.guessing_s for one in rounds)
    resting_s = math.fsum(one.resting * one.resting_plain_s for one in rounds)
    own_s = resting_s + guessing_s
    found = plain_s / own_s
    resting_loss = (resting_s - rested_s) / plain_s
    guessing_loss = (guessing_s - (plain_s - rested_s)) / plain_s
    if len(rounds) < 2:
        return Speed(found, None, None, resting_loss, guessing_loss)
    resting = resting_s / rested_s if rested_s else 1.0
    in_place_s = plain_s - rested_s  # of guessing
    guessing = guessing_s / in_place_s if in_place_s > 0.0 else 0.0
    off_s = [
        (one.resting - resting) * one.resting_plain_s
        + one.guessing_s
        - guessing * (one.plain_s - one.resting_plain_s)
        for one in rounds
    ]
    num_rounds = len(rounds)
    error = math.sqrt(math.fsum(one * one for one in off_s) * num_rounds / (num_rounds - 1)) / own_s
    width = math.exp(_STUDENT[min(num_rounds - 1, len(_STUDENT)) - 1] * error)
    return Speed(found, found / width, found * width, resting_loss, guessing_loss)


def figures(plain: Sequence[Sequence[Step]], own: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """Compare one way of speculative decoding with plain decoding: `speed`, plain time by its time,
    with its 95 % `interval`; the time added by steps without draft tokens (`resting_loss`) and by
    those with some (`guessing_loss`), as shares of plain time; `held`: the times of each round."""
    by_round = [held(one, beside) for one, beside in zip(plain, own, strict=True)]
    found = speed(by_round)
    interval = None
    if found.low is not None and found.high is not None:
        interval = [round(found.low, _DIGITS), round(found.high, _DIGITS)]
    return {
        "speed": round(found.speed, _DIGITS),
        "interval": interval,
        "resting_loss": round(found.resting_loss, _DIGITS),
        "guessing_loss": round(found.guessing_loss, _DIGITS),
        "held": [[round(number, 6) for number in one] for one in by_round],
    }


def verdicts(by_batch: Mapping[str, Mapping[str, Any]], least: float) -> dict[str, list[str]]:
    """Sort cells and ways by whether they are at least so fast: `shown`, all of the interval is;
    `refuted`, nothing of it is; `open`, it says neither."""
    found: dict[str, list[str]] = {"shown": [], "open": [], "refuted": []}
    for cell, by_way in by_batch.items():
        for way, one in by_way.items():
            if way == PLAIN:
                continue
            low, high = one["interval"] or (0.0, math.inf)
            verdict = "shown" if low >= least else "refuted" if high < least else "open"
            found[verdict].append(_line(cell, way, one))
    return found


def markdown(by_batch: Mapping[str, Mapping[str, Any]], ways: Sequence[str]) -> str:
    """Write a table of speeds and their intervals, by cell and way."""
    lines = [f"| speed against plain (95 %) | {' | '.join(ways)} |", "|---|" + "---|" * len(ways)]
    for cell, by_way in by_batch.items():
        cells: list[str] = []
        for way in ways:
            low, high = by_way[way]["interval"] or (math.nan, math.nan)
            cells.append(f"{by_way[way]['speed']:.3f} ({low:.3f}-{high:.3f})")
        lines.append(f"| {cell} | {' | '.join(cells)} |")
    return "\n".join(lines)


def control(by_batch: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of "plain again", which is as fast as plain decoding, whatever is measured:
    `num_cells`, and `off`, those whose interval leaves 1 out. Intervals of 95 % leave it out in one
    of 20."""
    off = [
        _line(cell, AGAIN, by_way[AGAIN])
        for cell, by_way in by_batch.items()
        if (interval := by_way[AGAIN]["interval"]) and not interval[0] <= 1.0 <= interval[1]
    ]
    return {"num_cells": len(by_batch), "off": off}


def _line(cell: str, way: str, one: Mapping[str, Any]) -> str:
    interval = one["interval"]
    text = "no interval" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
    return f"{cell}, {way}: {one['speed']:.3f} ({text})"


# -- engines of the CPU's ways: those that do the same shall take the same time.
#
# What would make them differ is taken away, or varied. Weights of the target lie in memory once.
# Engines are called one at a time, each in a thread of its own, all bound to one core. (One thread
# would not do: what guesses cost is judged by the time that an engine's own thread computed.) What
# is left, where an engine's cache and its thread's heap lie in memory, is an engine's own as long
# as it lives, and up to some percent: so `renew` makes engine and thread anew. The new one goes on
# with what the last one had learnt of guesses: what is tried for the first time is tried once.


class Way:
    """A way to decode: one engine after the other, each in a thread of its own.

    Args: model: not attached to a cache; all ways' may be one. core: that its threads are bound to;
        None: to none.
    """

    def __init__(self, model: Loaded, config: EngineConfig, core: int | None) -> None:
        self._model = model
        self._config = config
        self._core = core
        self._thread: ThreadPoolExecutor | None = None
        self._engine: LLMEngine | None = None
        self._num_asked = 0

    @property
    def engine(self) -> LLMEngine:
        assert self._engine is not None
        return self._engine

    def renew(self) -> None:
        """Make another engine in another thread, which takes over what the one before has learnt of
        guesses."""
        last, self._thread = self._thread, ThreadPoolExecutor(1, "engine", _bind, (self._core,))
        self._thread.submit(self._renew).result()
        if last is not None:
            last.shutdown()

    def _renew(self) -> None:
        last = self._engine
        # Shallow: the modules, and their weights, are shared by all.
        model = copy.copy(self._model)
        proposers = load_proposers(self._config, model.info)
        for proposer in proposers:
            self._watch(proposer)
        self._engine = engine = LLMEngine(self._config, model, proposers=proposers)
        if last is None:
            engine.warm_up()
            return
        old, new = last._speculation, engine._speculation  # noqa: SLF001  not for others
        if old is not None and new is not None:
            new._controller = old._controller  # noqa: SLF001
        last.close()

    def _watch(self, proposer: Proposer) -> None:
        """Have it counted how often it is asked."""
        propose = proposer.propose

        def counted(tasks: Sequence[DraftTask]) -> list[Draft]:
            self._num_asked += 1
            return propose(tasks)

        proposer.propose = counted  # type: ignore[method-assign]

    def step(self, answers: dict[str, list[int]]) -> Step:
        """Run one step of the engine; its tokens are appended to the answers."""
        assert self._thread is not None
        return self._thread.submit(self._step, answers).result()

    def _step(self, answers: dict[str, list[int]]) -> Step:
        num_asked, began_s = self._num_asked, time.perf_counter()
        output = self.engine.step()
        seconds = time.perf_counter() - began_s
        for event in output.events:
            answers[event.request_id] += event.token_ids
        is_asked = self._num_asked > num_asked
        return Step(seconds, output.num_scheduled_tokens, is_asked)

    def close(self) -> None:
        """End the engine and its thread."""
        if self._engine is not None:
            self._engine.close()
        if self._thread is not None:
            self._thread.shutdown()


def _bind(core: int | None) -> None:
    """Bind this thread to a core."""
    torch.set_num_threads(1)
    if core is not None:
        os.sched_setaffinity(0, {core})


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
"""The ways to decode that are compared. The last three compute what does not pay, too, by each rule
of acceptance: at a temperature, that of "all of the tree" is the exact one. Greedy, there is one
rule."""

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
"""Speed that a way which may stop guessing is never to fall below."""

_CONFIG = EngineConfig(
    model=TARGET,
    device="cpu",
    dtype="float32",
    num_threads=1,
    context_window=512,
    num_blocks=64 * 512 // 16,
    max_num_tokens_per_step=1024,
)


def _prompts() -> list[list[int]]:
    tokenizer = Tokenizer.load(resolve(TARGET, files="tokenizer").path)
    pairs = itertools.product(_BEGINNINGS, _NAMES)
    return [tokenizer.encode(beginning.format(name)) for beginning, name in pairs]


class _Run:
    """A way's engine that answers all prompts, step by step."""

    def __init__(
        self, way: Way, prompts: list[list[int]], temperature: float, num_tokens: int
    ) -> None:
        self._way, self._engine = way, way.engine
        self._answers: dict[str, list[int]] = {}
        self._num_kept = -self._engine.metrics().num_kept_tokens
        self._num_tokens = num_tokens
        self._ended_s: dict[str, float] = {}
        """Time at which each answer was whole, by the seconds of steps."""
        self.steps: list[Step] = []
        for index, prompt in enumerate(prompts):
            sampling = Sampling(
                max_tokens=num_tokens, temperature=temperature, seed=index, ignore_eos=True
            )
            request = Request(f"r{index}", tuple(prompt), sampling, block_hash)
            self._answers[request.request_id] = []
            self._engine.submit(request)

    @property
    def answers(self) -> list[tuple[int, ...]]:
        return [tuple(one) for one in self._answers.values()]

    @property
    def is_over(self) -> bool:
        return not self._engine.has_work()

    def step(self) -> None:
        """Take one step, if there is one."""
        if self.is_over:
            return
        self.steps.append(self._way.step(self._answers))
        ended = [name for name, one in self._answers.items() if len(one) == self._num_tokens]
        now_s = sum(step.seconds for step in self.steps)
        for name in ended:
            self._ended_s.setdefault(name, now_s)

    def over(self) -> Round:
        """The round that the run was."""
        num_kept = self._num_kept + self._engine.metrics().num_kept_tokens
        num_tokens = sum(len(one) for one in self._answers.values())
        return Round(num_tokens, num_kept, sum(self._ended_s.values()))


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
    model: Loaded,
    chosen: Sequence[str],
    seed: str,
    temperature: float,
    size: int,
    num_tokens: int,
    num_rounds: int,
) -> dict[str, dict[str, Any]]:
    """The figures of a cell by way."""
    prompts = _prompts()
    # A prefix of a shuffled list would do as well: neighbours differ in the name alone.
    own = prompts[:: len(prompts) // size][:size] if size < len(prompts) else prompts
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    ways = {
        way: Way(model, replace(_CONFIG, speculation=speculation), core)
        for way, speculation in WAYS.items()
        if way in chosen
    }
    orders = turns(list(ways), seed)
    rounds: dict[str, list[Round]] = {way: [] for way in ways}
    steps: dict[str, list[list[Step]]] = {way: [] for way in ways}
    try:
        for _ in range(num_rounds):
            for way, run in _round(ways, own, temperature, num_tokens, orders).items():
                rounds[way].append(run.over())
                steps[way].append(run.steps[1:])
    finally:
        for one in ways.values():
            one.close()
    found = answers(rounds)
    return {way: found[way] | figures(steps[PLAIN], steps[way]) for way in ways}


@harness.case
@click.option("--batches", type=Several(click.IntRange(1)), default="1,2,4,8,16,32,64")
@click.option("--temperatures", type=Several(float), default="0,0.8")
@click.option("--tokens", type=click.IntRange(1), default=96)
@click.option("--rounds", type=Several(click.IntRange(1)), default="9", help="one, or one a batch")
@click.option("--ways", type=Several(click.Choice(list(WAYS))), default=",".join(WAYS))
@click.option("--seed", type=int, help="of the order of turns; drawn if not given")
def cpu(
    batches: Sequence[int],
    temperatures: Sequence[float],
    tokens: int,
    rounds: Sequence[int],
    ways: Sequence[str],
    seed: int | None,
) -> dict[str, Any]:
    """The bundled model with its draft model on one CPU core: speed against plain decoding, with an
    interval, by batch size and temperature.

    In each round every way answers the same prompts with the same seeds, step by step: all ways
    take one step each, one right after the other, in an order that is shuffled for each turn, and
    each step is held against plain decoding's step beside it. Not one token may differ, but for
    those sampled by the multi-step rule. Steps of prompts are left out. `shown`, `open` and
    `refuted` list the ways that may rest, that is stop drafting where it does not pay, by whether
    they are at least 0.98 times as fast as plain decoding: the whole interval says so, or a part of
    it, or nothing of it. "plain again" is a
    second engine without guesses: its interval tells what intervals are worth (`control`). Engines
    are made anew for each round. The ways that may rest take some 15 minutes on a quiet machine of
    two cores.
    """
    if len(rounds) not in (1, len(batches)):
        raise click.BadParameter("one number, or one for each batch size", param_hint="--rounds")
    num_rounds = dict(zip(batches, itertools.cycle(rounds), strict=False))
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    chosen = [way for way in WAYS if way in (PLAIN, AGAIN, *ways)]
    torch.set_num_threads(1)
    model = load_model(_CONFIG)
    cells = {
        f"temperature {temperature:g}, batch {size}": (temperature, size)
        for temperature, size in itertools.product(temperatures, batches)
    }
    by_batch: dict[str, dict[str, dict[str, Any]]] = {}
    for name, (temperature, size) in track(cells.items(), "answering", console=harness.CONSOLE):
        order = f"{seed} {name}"
        by_batch[name] = _cell(model, chosen, order, temperature, size, tokens, num_rounds[size])
    may_rest = {
        name: {way: one for way, one in found.items() if not WAYS[way].always}
        for name, found in by_batch.items()
    }
    by_verdict, controlled = verdicts(may_rest, LEAST_SPEED), control(by_batch)
    sys.stdout.write(markdown(by_batch, [way for way in chosen if way != PLAIN]) + "\n")
    for verdict, those in by_verdict.items():
        sys.stdout.write(f"at least {LEAST_SPEED}, {verdict}: {len(those)}\n")
        if verdict != "shown":
            sys.stdout.write("".join(f"    {one}\n" for one in those))
    num_cells, off = controlled["num_cells"], controlled["off"]
    sys.stdout.write(f"{AGAIN}: 1 is in the interval in {num_cells - len(off)} of {num_cells} ")
    sys.stdout.write(f"cells (19 of 20 are expected); not in: {'; '.join(off) or 'none'}\n")
    return {
        "tokens": tokens,
        "rounds": num_rounds,
        "seed": seed,
        "by_batch": by_batch,
        "least": LEAST_SPEED,
        **by_verdict,
        "control": controlled,
    }


# -- on a GPU: a model whose next token is known, and a proposer that knows it and is right as often
# as it is set to. Random weights: what attention and MLP add to a token is scaled down so far that
# the next token is the last one's successor whatever is rounded how. Costs are those of any
# weights.

DEVICE = "cuda:0"
BLOCK_SIZE = 16
WINDOW = 4096
NUM_BRANCHES = 4
DEPTH = 4


def make_weights(shape: LlamaConfig) -> LlamaWeights:
    """Make random weights with which the next token is, by far, `successor` of the last one."""
    weights = random_weights(shape, dtype=torch.bfloat16, device=torch.device(DEVICE), seed=0)
    for layer in weights.layers:
        layer.o.weight.mul_(1e-3)  # type: ignore[union-attr]
        layer.down.weight.mul_(1e-3)  # type: ignore[union-attr]
    assert weights.norm is not None and weights.embedding is not None and weights.head is not None
    weights.norm.fill_(1.0)
    if not shape.is_tied:
        weights.head.weight.copy_(weights.embedding.roll(1, 0))  # type: ignore[union-attr]
    return weights


def successor(token_id: int, shape: LlamaConfig) -> int:
    """The next token by the weights of `make_weights`."""
    return token_id if shape.is_tied else (token_id + 1) % shape.vocab_size


def make_model(weights: LlamaWeights, config: EngineConfig, *, num_nodes: int) -> LlamaModel:
    """Make a model of its own on the same weights.

    Args: num_nodes: guesses for one sequence in a step; 0: no guesses.
    """
    shape = weights.shape
    info = ModelInfo(
        model="random",
        model_type="llama",
        fingerprint="",
        tokenizer_digest="",
        dtype="bfloat16",
        context_window=WINDOW,
        vocab_size=shape.vocab_size,
        eos_token_ids=(),
        block_size=BLOCK_SIZE,
        num_blocks=0,
        device=DEVICE,
        linear="fused kernels",
        fused=(),
        num_parameters=shape.num_parameters,
        weight_bytes=weights.num_bytes,
    )
    sizes: dict[str, Any] = {
        "max_rows": config.max_num_running,
        "max_tokens": config.max_num_tokens_per_step,
        "context_window": WINDOW,
    }
    return LlamaModel(
        LlamaDecoder(weights, rope_table(shape, WINDOW, torch.device(DEVICE))),
        info,
        kv_layout(shape, block_size=BLOCK_SIZE, dtype="bfloat16"),
        make_ahead=functools.partial(make_ahead, **sizes, max_num_nodes=num_nodes),
        make_graphs=functools.partial(make_plain_graphs, **sizes, max_num_nodes=num_nodes),
    )


class Scripted:
    """A Proposer that knows the rule of the weights, and is right as often as it is set to.

    Attributes: num_nodes: of a tree of wrong guesses; 0: paths, as far as `depth`, each token of
    which is right with `chance`. seconds: that its calls took.
    """

    name = "scripted"

    def __init__(self, shape: LlamaConfig) -> None:
        self.num_nodes = 0
        self.depth = DEPTH
        self.chance = 0.0
        self.seconds = 0.0
        self._shape = shape

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        """Guess tokens for each sequence; the proposer's own time is noted."""
        began = time.perf_counter()
        make = self._wrong if self.num_nodes else self._path
        drafts = [Draft(make(task), {}) for task in tasks]
        self.seconds += time.perf_counter() - began
        return drafts

    def forget(self, key: Key) -> None:
        """Do nothing: nothing is kept of a sequence."""

    def check_integrity(self) -> None:
        """Do nothing: there is no state to check."""

    def _wrong(self, task: DraftTask) -> TokenTree:
        num_nodes = min(self.num_nodes, task.num_nodes)
        right = successor(task.token_ids[-1], self._shape)
        token_ids: list[int] = []
        parents: list[int] = []
        for branch in range(NUM_BRANCHES):
            parent = -1
            for node in range(len(parents), num_nodes * (branch + 1) // NUM_BRANCHES):
                token_ids.append((right + 1 + node) % self._shape.vocab_size)
                parents.append(parent)
                parent = node
        return _tree(token_ids, parents, [0.5] * num_nodes)

    def _path(self, task: DraftTask) -> TokenTree:
        depth = min(self.depth, task.num_nodes)
        token = task.token_ids[-1]
        token_ids, chances = [], []
        # By sequence and place: the same guesses however many are computed.
        draws = random.Random(hash((task.key, len(task.token_ids))))
        for _ in range(depth):
            token = successor(token, self._shape)
            if draws.random() >= self.chance:
                token = (token + 7) % self._shape.vocab_size
            token_ids.append(token)
            chances.append(self.chance ** len(token_ids))
        return _tree(token_ids, list(range(-1, depth - 1)), chances)


def _tree(token_ids: list[int], parents: list[int], chances: list[float]) -> TokenTree:
    tries = ((),) * len(token_ids)
    return TokenTree(tuple(token_ids), tuple(parents), tuple(chances), tries)


def chance_for(tokens_per_step: float, depth: int) -> float:
    """The chance p of each token of a path to be right that gives 1 + p + p^2 + ... tokens a
    step."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**power for power in range(depth + 1)) < tokens_per_step:
            low = middle
        else:
            high = middle
    return low


CONTEXT = 1024
NUM_BLOCKS = 4096
NUM_STEPS = 40
MAX_BATCH = 64
SWEEP_PROMPT, SWEEP_OUTPUT = 512, 97
SETTLING_STEPS = 400
"""Number of tokens of a sequence before its batch is measured: whether drafts pay is found out in
some hundred steps, and a server's load lasts longer."""


class GpuBench(Bench):
    """An engine on a GPU with batches that decode, and the tokens of each step."""

    def __init__(self, engine: LLMEngine, shape: LlamaConfig) -> None:
        super().__init__(engine)
        self._shape = shape

    def steps(self, names: Sequence[str]) -> Iterator[tuple[float, dict[str, tuple[int, ...]]]]:
        """Run a batch. Yields: (milliseconds, new tokens by request) of each step after all have
        their first token."""
        live: set[str] = set()
        while self.engine.has_work():
            was_full = len(live) == len(names)
            began = time.perf_counter()
            output = self.engine.step()
            took_ms = (time.perf_counter() - began) * 1e3
            tokens = {event.request_id: event.token_ids for event in output.events}
            live |= tokens.keys()
            if was_full:
                yield took_ms, tokens

    def step_ms(self, batch: int, proposer: Scripted | None = None) -> float:
        """Median milliseconds of NUM_STEPS decode steps, without what the proposer took."""
        names = self.submit(batch, CONTEXT, 1000)
        found: list[float] = []
        before = proposer.seconds if proposer else 0.0
        for took_ms, tokens in self.steps(names):
            if any(len(token_ids) != 1 for token_ids in tokens.values()):
                raise RuntimeError("a wrong guess was kept, or a step gave nothing")
            drafted_s = proposer.seconds - before if proposer else 0.0
            before = proposer.seconds if proposer else 0.0
            found.append(took_ms - drafted_s * 1e3)
            if len(found) == NUM_STEPS:
                break
        for name in names:
            self.engine.abort(name)
        while self.engine.has_work():
            self.engine.step()
        self.engine.step()  # whatever is in flight is over
        return statistics.median(found[5:])

    def answers(self, batch: int) -> tuple[float, float]:
        """Run a batch to its end: (tokens per second from all first tokens to the last one, tokens
        of a sequence's step). Every answer is checked."""
        names = self.submit(batch, SWEEP_PROMPT, SWEEP_OUTPUT)
        took_s, num_tokens, num_events = 0.0, 0, 0
        newest: dict[str, int] = {}
        for took_ms, tokens in self.steps(names):
            took_s += took_ms / 1e3
            for name, token_ids in tokens.items():
                for token_id in token_ids:
                    before = newest.get(name)
                    if before is not None and token_id != successor(before, self._shape):
                        raise RuntimeError(f"{name}: {token_id} is not what follows {before}")
                    newest[name] = token_id
                num_tokens += len(token_ids)
                num_events += 1
        return num_tokens / took_s, num_tokens / num_events


def _config(num_nodes: int, *, always: bool) -> EngineConfig:
    return EngineConfig(
        device=DEVICE,
        max_num_tokens_per_step=8192,
        max_num_running=MAX_BATCH,
        num_blocks=NUM_BLOCKS,
        speculation=SpeculationConfig(max_num_nodes=max(num_nodes, 1), always=always),
    )


def _engine(
    weights: LlamaWeights, num_nodes: int, proposer: Scripted | None, *, always: bool = False
) -> LLMEngine:
    config = _config(num_nodes, always=always)
    model = make_model(weights, config, num_nodes=num_nodes)
    engine = LLMEngine(config, model, proposers=[proposer] if proposer else [])
    engine.warm_up()
    return engine


def _close(engine: LLMEngine) -> None:
    engine.check_integrity()
    engine.close()
    gc.collect()
    torch.cuda.empty_cache()


def _sweep(plain: GpuBench, own: GpuBench, batches: Sequence[int]) -> list[dict[str, Any]]:
    """Turn about, the better of two."""
    found: list[dict[str, Any]] = []
    plain.answers(1)  # what is made on the first use is not counted
    own.answers(1)
    for batch in batches:
        for _ in range(-(-SETTLING_STEPS // SWEEP_OUTPUT)):
            own.answers(batch)
        ways = {"plain": [plain.answers(batch)], "guessing": [own.answers(batch)]}
        ways["plain"].append(plain.answers(batch))
        ways["guessing"].append(own.answers(batch))
        plain_per_s, own_per_s = (max(rate for rate, _ in one) for one in ways.values())
        kept = round(statistics.mean(kept for _, kept in ways["guessing"]), 3)
        row = {"batch": batch, "plain_tokens_per_s": round(plain_per_s, 1)}
        row |= {"tokens_per_s": round(own_per_s, 1), "speed": round(own_per_s / plain_per_s, 3)}
        found.append(row | {"tokens_per_step": kept})
    return found


@harness.case
@click.option("--shape", type=click.Choice(list(SHAPES)), default="llama-8b")
@click.option("--nodes", type=Several(int), default="8,16,32,64")
@click.option("--step-batches", type=Several(int), default="1,8,32")
@click.option("--batches", type=Several(int), default="1,2,4,8,16,32,64")
@click.option("--tokens-per-step", default=3.3)
def gpu(
    shape: str,
    nodes: Sequence[int],
    step_batches: Sequence[int],
    batches: Sequence[int],
    tokens_per_step: float,
) -> dict[str, Any]:
    """On one GPU: what a step costs that verifies guesses, and what it brings.

    1. A step by number of guessed tokens, a tree of four branches for each sequence, with 1,024
    tokens of context: milliseconds of the engine's whole step, without the proposer's time, beside
    a plain step's. 2. Speed by batch size, with guesses of up to four tokens of which each is right
    with the chance that gives --tokens-per-step where all are computed; the engine chooses how many
    it computes, and has served that batch for a while. The proposer itself costs nothing here.
    Needs one CUDA device with 80 GB; takes about two minutes.
    """
    harness.needs_cuda()
    fields = {name: value for name, value in SHAPES[shape].items() if name != "architectures"}
    decoder_shape = read_llama_config(transformers.AutoConfig.for_model(**fields))
    weights, proposer = make_weights(decoder_shape), Scripted(decoder_shape)
    plain_engine = _engine(weights, 0, None)
    engine = _engine(weights, max(nodes), proposer, always=True)
    begin_serving()
    plain, own = GpuBench(plain_engine, decoder_shape), GpuBench(engine, decoder_shape)
    steps: list[dict[str, Any]] = []
    for batch in step_batches:
        plain.step_ms(batch)  # what is made on the first use is not counted
        plain_ms = plain.step_ms(batch)
        for num_nodes in nodes:
            proposer.num_nodes = num_nodes
            took_ms = own.step_ms(batch, proposer)
            row = {"batch": batch, "nodes": num_nodes, "plain_ms": round(plain_ms, 3)}
            row |= {"ms": round(took_ms, 3), "ratio": round(took_ms / plain_ms, 3)}
            steps.append(row)
    harness.show("a step", steps)
    _close(engine)
    del engine, own
    proposer.num_nodes = 0
    proposer.chance = chance_for(tokens_per_step, DEPTH)
    engine = _engine(weights, 16, proposer)
    sweep = _sweep(plain, GpuBench(engine, decoder_shape), batches)
    harness.show("speed against plain decoding, launched ahead", sweep)
    _close(engine)
    _close(plain_engine)
    about = {"shape": shape, "tokens_per_step": tokens_per_step, "chance": proposer.chance}
    return {**harness.device_context(), **about, "steps": steps, "sweep": sweep}


main = harness.program(__doc__, cpu, gpu)

if __name__ == "__main__":
    main()
