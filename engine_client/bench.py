"""Benchmarks of an engine as its users see it: the time of one batch (`latency`), and tokens per
second when all prompts are submitted at once (`throughput`).

Prompts are random token ids, so that no prefix cache helps, or texts of the caller's. Every output
has exactly the asked length: EOS is ignored. Measured through an `LLM`, whatever engines are behind
it. One thread.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_client.answer import Answer
from engine_client.llm import ClientLLM
from engine_client.params import SamplingParams
from process.latency_summary import LatencySummary
from process.rpc_errors import InvalidArgument

OnProgress = Callable[[int, int], None]
"""Progress callback: called with (rounds or prompts done, their total)."""

FIRST_TOKEN_ID = 8
"""Lowest token id of random prompts: lower ids are control tokens of the bundled models."""


@dataclass(frozen=True)
class Latency:
    """Latencies of batches of prompts that are submitted at once."""

    batch: int
    num_input_tokens: int
    num_output_tokens: int
    num_rounds: int
    ttft: LatencySummary
    """Seconds from the call to a prompt's first token; one value per prompt and round."""
    itl: LatencySummary | None
    """Seconds between a prompt's tokens; None with one output token."""
    total: LatencySummary
    """Seconds of a whole batch; one value per round."""


@dataclass(frozen=True)
class Throughput:
    """Throughput over many prompts that are submitted at once."""

    num_prompts: int
    num_input_tokens: int
    num_output_tokens: int
    seconds: float
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    ttft: LatencySummary
    """Seconds to the first token, queueing included."""
    tpot: LatencySummary | None
    """Mean seconds between the tokens of a prompt; None where all outputs have one token."""


def latency(
    llm: ClientLLM,
    *,
    batch: int = 1,
    num_input_tokens: int = 128,
    num_output_tokens: int = 128,
    num_warm_up: int = 2,
    num_rounds: int = 10,
    seed: int = 0,
    on_progress: OnProgress | None = None,
) -> Latency:
    """Measure latency: generate for `batch` prompts at once, `num_rounds` times.

    Raises: InvalidArgument naming what is out of range; errors of `generate`.
    """
    _check_at_least("batch", batch, 1)
    _check_at_least("num_warm_up", num_warm_up, 0)
    _check_at_least("num_rounds", num_rounds, 1)
    _check_lengths(llm, num_input_tokens, num_output_tokens)
    rng = random.Random(seed)
    params = _params(num_output_tokens)
    ttft_s: list[float] = []
    itl_s: list[float] = []
    total_s: list[float] = []
    for index in range(num_warm_up + num_rounds):
        prompts = [_random_prompt(rng, llm, num_input_tokens) for _ in range(batch)]
        began_s = time.perf_counter()
        answers = llm.generate(prompts, params, progress=False)
        spent_s = time.perf_counter() - began_s
        if index >= num_warm_up:
            total_s.append(spent_s)
            ttft_s += [answer.times.ttft_s for answer in answers]
            itl_s += [gap for answer in answers for gap in answer.times.itl_s]
        if on_progress is not None:
            on_progress(index + 1, num_warm_up + num_rounds)
    return Latency(
        batch=batch,
        num_input_tokens=num_input_tokens,
        num_output_tokens=num_output_tokens,
        num_rounds=num_rounds,
        ttft=LatencySummary.of(ttft_s),
        itl=LatencySummary.of(itl_s) if itl_s else None,
        total=LatencySummary.of(total_s),
    )


def throughput(
    llm: ClientLLM,
    *,
    num_prompts: int = 100,
    num_input_tokens: int = 128,
    num_output_tokens: int = 128,
    spread: float = 0.0,
    texts: Sequence[str] = (),
    seed: int = 0,
    progress: bool = False,
) -> Throughput:
    """Measure throughput: generate for `num_prompts` prompts that are submitted at once.

    Args:
        spread: lengths are uniform within this share of the ones given; 0: all alike.
        texts: prompts instead of random ones, repeated as often as there are prompts to ask.
    Raises: InvalidArgument naming what is out of range; errors of `generate`.
    """
    _check_at_least("num_prompts", num_prompts, 1)
    if not 0 <= spread < 1:
        raise InvalidArgument("spread", f"{spread} is outside [0, 1)")
    longest = [int(num * (1 + spread)) for num in (num_input_tokens, num_output_tokens)]
    _check_lengths(llm, 1 if texts else longest[0], longest[1])
    rng = random.Random(seed)

    def near(num: int) -> int:
        return max(1, rng.randint(int(num * (1 - spread)), int(num * (1 + spread))))

    prompts: list[str] | list[list[int]]
    if texts:
        prompts = [texts[index % len(texts)] for index in range(num_prompts)]
    else:
        prompts = [_random_prompt(rng, llm, near(num_input_tokens)) for _ in range(num_prompts)]
    params = [_params(near(num_output_tokens)) for _ in range(num_prompts)]
    began_s = time.perf_counter()
    answers = llm.generate(prompts, params, progress=progress)
    return _throughput(answers, time.perf_counter() - began_s)


def _throughput(answers: Sequence[Answer], seconds: float) -> Throughput:
    num_input = sum(answer.usage.num_prompt_tokens for answer in answers)
    num_output = sum(answer.usage.num_output_tokens for answer in answers)
    tpot_s = [answer.times.tpot_s for answer in answers if answer.times.itl_s]
    return Throughput(
        num_prompts=len(answers),
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        seconds=round(seconds, 4),
        requests_per_s=round(len(answers) / seconds, 3),
        input_tokens_per_s=round(num_input / seconds, 1),
        output_tokens_per_s=round(num_output / seconds, 1),
        ttft=LatencySummary.of([answer.times.ttft_s for answer in answers]),
        tpot=LatencySummary.of(tpot_s) if tpot_s else None,
    )


def _params(num_output_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_output_tokens, ignore_eos=True)


def _random_prompt(rng: random.Random, llm: ClientLLM, num_tokens: int) -> list[int]:
    return rng.choices(range(FIRST_TOKEN_ID, llm.model.vocab_size), k=num_tokens)


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InvalidArgument(name, f"{value} is below {least}")


def _check_lengths(llm: ClientLLM, num_input_tokens: int, num_output_tokens: int) -> None:
    _check_at_least("num_input_tokens", num_input_tokens, 1)
    _check_at_least("num_output_tokens", num_output_tokens, 1)
    window = llm.model.context_window
    if num_input_tokens + num_output_tokens > window:
        raise InvalidArgument(
            "num_input_tokens",
            f"{num_input_tokens} and {num_output_tokens} of output are above the context window "
            f"of {window}",
        )
