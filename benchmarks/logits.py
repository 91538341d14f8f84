"""Milliseconds from logits to tokens on CPU, with each logits processor apart, against
transformers' own.

A step is: a batch of float32 logits in, one token per row out, one processor on for every row.
Ours is `engine.sampling.pipeline.draw`, with one token appended to each row's history, as the
engine does it; theirs is the processor of transformers followed by argmax, or by softmax and
multinomial where it samples, in the same process, taking turns. `added_ms` is what the processor
costs beside the same step without it. Times are the best of some rounds. With one thread they are
that thread's CPU time, so that other processes on the machine hardly count; with more, wall time.

Logits follow a Zipf law with exponent 1.5 in an order of their own for each row, about as a
language model's do; histories are 512 prompt and 128 output tokens drawn from such a law. The last
line printed is one JSON object.

    python -m benchmarks.logits --threads 1 --out benchmarks/results/<date>-logits.json

Nothing is written unless --out says where.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from transformers.generation import logits_process as theirs

from benchmarks.context import context, publish
from engine.request import Sampling
from engine.sampling.history import TokenHistory, needs_history
from engine.sampling.pipeline import Draw, draw

Theirs = Callable[["Inputs"], Any]
Step = Callable[[], object]

NUM_PROMPT, NUM_OUTPUT = 512, 128
EXPONENT = 1.5


@dataclass(frozen=True)
class Inputs:
    """One batch, the same for both sides."""

    logits: torch.Tensor
    token_ids: torch.Tensor
    """[R, prompt + output]."""


@dataclass(frozen=True)
class Case:
    """One processor: ours by fields of Sampling, theirs by what makes it, if there is one."""

    name: str
    fields: Callable[[int, Sequence[int]], dict[str, Any]]
    """(vocabulary, tokens so far) -> fields."""
    theirs: Theirs | None = None
    is_sampled: bool = False
    draw: dict[str, Any] = field(default_factory=dict)
    """Fields of Draw."""


def _bad_words(vocab_size: int, tokens: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Twenty, of one to four tokens; some match the end of the sequence."""
    single = [(vocab_size - 1 - i,) for i in range(5)]
    near = [(*tokens[-k:], vocab_size // 2 + k) for k in range(1, 4)]
    return (*single, *near, *((i + 2, i + 3, i + 4) for i in range(12)))


def _top_biases(vocab_size: int) -> tuple[tuple[int, float], ...]:
    return tuple((i * (vocab_size // 300), 1.0) for i in range(300))


CASES = (
    Case("greedy", lambda v, t: {}, lambda i: None),
    Case(
        "repetition_penalty",
        lambda v, t: {"repetition_penalty": 1.2},
        lambda i: theirs.RepetitionPenaltyLogitsProcessor(1.2),
    ),
    Case("presence_penalty", lambda v, t: {"presence_penalty": 0.5}),
    Case("frequency_penalty", lambda v, t: {"frequency_penalty": 0.5}),
    Case(
        "logit_bias (300)",
        lambda v, t: {"logit_bias": _top_biases(v)},
        lambda i: theirs.SequenceBiasLogitsProcessor(
            [[[token_id], bias] for token_id, bias in _top_biases(i.logits.shape[-1])]
        ),
    ),
    Case(
        "allowed_token_ids (half)",
        lambda v, t: {"allowed_token_ids": frozenset(range(0, v, 2))},
        lambda i: theirs.SuppressTokensLogitsProcessor(list(range(1, i.logits.shape[-1], 2))),
    ),
    Case(
        "bad_words (20)",
        lambda v, t: {"bad_words": _bad_words(v, t)},
        lambda i: theirs.NoBadWordsLogitsProcessor(
            [list(word) for word in _bad_words(i.logits.shape[-1], i.token_ids[0].tolist())]
        ),
    ),
    Case(
        "no_repeat_ngram (3)",
        lambda v, t: {"no_repeat_ngram": 3},
        lambda i: theirs.NoRepeatNGramLogitsProcessor(3),
    ),
    Case("grammar", lambda v, t: {}, draw={"bitmask": True}),
    Case(
        "min_tokens",
        lambda v, t: {"min_tokens": 900},
        lambda i: theirs.MinNewTokensLengthLogitsProcessor(NUM_PROMPT, 900, torch.tensor([1, 2])),
    ),
    Case(
        "temperature",
        lambda v, t: {"temperature": 0.8},
        lambda i: theirs.TemperatureLogitsWarper(0.8),
        is_sampled=True,
    ),
    Case(
        "top_k (50)",
        lambda v, t: {"temperature": 1.0, "top_k": 50},
        lambda i: theirs.TopKLogitsWarper(50),
        is_sampled=True,
    ),
    Case(
        "top_p (0.9)",
        lambda v, t: {"temperature": 1.0, "top_p": 0.9},
        lambda i: theirs.TopPLogitsWarper(0.9),
        is_sampled=True,
    ),
    Case(
        "min_p (0.05)",
        lambda v, t: {"temperature": 1.0, "min_p": 0.05},
        lambda i: theirs.MinPLogitsWarper(0.05),
        is_sampled=True,
    ),
    Case("logprobs (5)", lambda v, t: {"logprobs": 5}),
    Case("trace", lambda v, t: {"trace": True}),
)


def make_inputs(batch: int, vocab_size: int) -> Inputs:
    """The same for every run of these sizes."""
    generator = torch.Generator().manual_seed(batch * vocab_size)
    law = -EXPONENT * torch.log(torch.arange(1, vocab_size + 1, dtype=torch.float32))
    orders = [torch.randperm(vocab_size, generator=generator) for _ in range(batch)]
    token_ids = torch.multinomial(
        torch.exp(law).expand(batch, -1), NUM_PROMPT + NUM_OUTPUT, True, generator=generator
    )
    return Inputs(torch.stack([law[order] for order in orders]), token_ids)


def our_step(case: Case, inputs: Inputs) -> Step:
    """draw(), with a token more in each history at every call."""
    vocab_size = inputs.logits.shape[-1]
    draws, histories = [], []
    bitmask = torch.full((-(-vocab_size // 32),), 0x55555555, dtype=torch.int32)
    for row, tokens in enumerate(inputs.token_ids.tolist()):
        sampling = Sampling(max_tokens=1000, seed=row, **case.fields(vocab_size, tokens))
        history = None
        if needs_history(sampling):
            history = TokenHistory(sampling, tokens[:NUM_PROMPT], tokens[NUM_PROMPT:])
            histories.append((history, tokens))
        draws.append(
            Draw(
                sampling,
                position=len(tokens),
                num_output_tokens=NUM_OUTPUT,
                end_token_ids=frozenset({1, 2}),
                history=history,
                bitmask=bitmask if case.draw else None,
            )
        )
    calls = 0

    def step() -> None:
        nonlocal calls
        for history, tokens in histories:
            history.append(tokens[calls % len(tokens)])
        calls += 1
        drawn = draw(inputs.logits, draws)
        assert all(one.error is None for one in drawn)

    return step


def their_step(case: Case, inputs: Inputs) -> Step | None:
    """The processor and what generate does after it."""
    if case.theirs is None:
        return None
    processor = case.theirs(inputs)

    @torch.inference_mode()
    def step() -> object:
        scores = inputs.logits
        if processor is not None:
            # Some change what they are given.
            scores = processor(inputs.token_ids, scores.clone())
        if case.is_sampled:
            return torch.multinomial(torch.softmax(scores, dim=-1), 1).tolist()
        return scores.argmax(dim=-1).tolist()

    return step


def clock() -> float:
    """Seconds; see the module."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def best_ms(steps: Sequence[Step | None], rounds: int, limit_s: float) -> list[float | None]:
    """Best time of each, taking turns; fewer rounds where they take longer than `limit_s`."""
    best: list[float | None] = [None] * len(steps)
    began = time.perf_counter()
    for number in range(rounds + 1):
        for place, step in enumerate(steps):
            if step is None:
                continue
            start = clock()
            step()
            took = (clock() - start) * 1e3
            if best[place] is None or took < best[place]:
                best[place] = took
        if number and time.perf_counter() - began > limit_s:
            break
    return best


def measure(batch: int, vocab_size: int, rounds: int, limit_s: float) -> list[dict[str, Any]]:
    """Every case at these sizes."""
    inputs = make_inputs(batch, vocab_size)
    plain = {
        False: our_step(CASES[0], inputs),
        True: our_step(Case("", lambda v, t: {"temperature": 1.0}), inputs),
    }
    results = []
    for case in CASES:
        sys.stderr.write(f"batch {batch}, vocabulary {vocab_size}: {case.name}\n")
        steps = (our_step(case, inputs), their_step(case, inputs), plain[case.is_sampled])
        ours, other, base = best_ms(steps, rounds, limit_s)
        assert ours is not None and base is not None
        results.append(
            {
                "processor": case.name,
                "batch": batch,
                "vocab_size": vocab_size,
                "ms": round(ours, 3),
                "added_ms": round(ours - base, 3),
                "transformers_ms": None if other is None else round(other, 3),
                "ratio": None if other is None else round(other / ours, 2),
            }
        )
    return results


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[4096, 151_936])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=4.0, help="per processor and size")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="write the JSON object here, too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console(stderr=True)

    results = [
        result
        for vocab_size in arguments.vocabularies
        for batch in arguments.batches
        for result in measure(batch, vocab_size, arguments.rounds, arguments.limit_s)
    ]
    table = Table(title="one step, logits to tokens")
    for column in ("vocabulary", "batch", "processor", "ms", "added", "transformers", "ratio"):
        table.add_column(column, justify="left" if column == "processor" else "right")
    for one in results:
        other = one["transformers_ms"]
        table.add_row(
            f"{one['vocab_size']}",
            f"{one['batch']}",
            one["processor"],
            f"{one['ms']:.3f}",
            f"{one['added_ms']:.3f}",
            "" if other is None else f"{other:.2f}",
            "" if other is None else f"{one['ratio']:.1f}x",
        )
    console.print(table)
    publish(
        {
            "benchmark": "logits",
            "dtype": "float32",
            "threads": arguments.threads,
            "clock": "thread CPU time" if arguments.threads == 1 else "wall",
            "zipf_exponent": EXPONENT,
            "num_prompt_tokens": NUM_PROMPT,
            "num_output_tokens": NUM_OUTPUT,
            "results": results,
            **context(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        arguments.out,
    )


if __name__ == "__main__":
    main()
