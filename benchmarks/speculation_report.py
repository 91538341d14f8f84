"""How good guesses are, SpecInfer's tables (arXiv 2305.09781) for the bundled models, as Markdown.

OMP_NUM_THREADS=1 python -m benchmarks.speculation_report --out benchmarks/results/....json
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import click
import numpy as np
import torch
from baton_kernels import gumbel_noise
from numpy.typing import NDArray
from rich.progress import track
from tokenizers import Tokenizer

from benchmarks import harness
from benchmarks.harness import Several, block_hash
from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from engine.request import Request, Sampling
from engine.speculation.config import SpeculationConfig
from engine.speculation.rejection_sampler import (
    Distribution,
    DistributionKey,
    multi_step,
    naive,
    pick,
)
from engine.speculation.token_tree import ROOT, TokenTree, Try
from tools.bundled_model.boosted_drafts import TargetAnswer, load, prompts
from tools.bundled_model.corpus import HELD_OUT

WIDTHS = (1, 2, 3, 4, 5)
"""Numbers k of tokens that one draft model proposes after one token; the paper's."""
DEPTH = 4
"""Number of steps of a tree: <k, 1, 1, 1>."""
RULES = ("exact", "multi_step", "naive")

Table = dict[str, dict[str, list[float]]]
"""A table of the report: {how the answer was sampled: {row: a figure of each width}}."""


@dataclass(frozen=True)
class Settings:
    """The settings of one report."""

    target: str = "baton-5m"
    """Target model: a bundled name or a folder."""

    drafts: tuple[str, ...] = ("baton-5m-draft",)
    """Draft models. The first one is also measured alone; the others together with it."""

    num_prompts: int = 32
    num_prompt_tokens: int = 128
    """Most tokens of a prompt; longer prompts are passed over."""

    num_tokens: int = 64
    """Most tokens of an answer."""

    temperatures: tuple[float, ...] = (0.8, 1.0)
    """Temperatures of sampled answers, besides the greedy ones."""

    num_trials: int = 2
    """Number of trials of each rule of acceptance at each token."""

    seed: int = 5
    """Seed of prompts and draws; the prompts are of the held-out part of the corpus."""

    widths: tuple[int, ...] = WIDTHS
    """Widths of the trees for which tokens per step are counted, ascending."""

    rules: tuple[str, ...] = RULES
    """Rules of acceptance that are compared on the same trees."""


class ScoredAnswer(NamedTuple):
    """An answer, and the logits that each model gives for each of its tokens."""

    answer: TargetAnswer
    seed: int
    """Seed of the answer's request."""
    logits: tuple[torch.Tensor, ...]
    """Logits of the target, then of each draft model: [answered tokens, V] float32 each."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of the answer, without the prompt's."""
        return self.answer.token_ids[self.answer.num_prompt_tokens :]


def way(temperature: float) -> str:
    """The name of a way in the tables."""
    return "greedy" if temperature == 0.0 else f"temperature {temperature:g}"


def engine_for(wanted: Settings, speculation: SpeculationConfig) -> LLMEngine:
    """Make a CPU engine (float32, one thread) of `wanted.target` that speculates as `speculation`
    says, with room for all prompts at once."""
    window = wanted.num_prompt_tokens + wanted.num_tokens + _beyond(wanted)
    window += -window % 16
    return load_engine(
        EngineConfig(
            model=wanted.target,
            device="cpu",
            dtype="float32",
            num_threads=1,
            context_window=window,
            num_blocks=wanted.num_prompts * window // 16,
            max_num_running=wanted.num_prompts,
            # Room for all trees, and for a draft model to read all prompts at once.
            max_num_tokens_per_step=wanted.num_prompts * window,
            speculation=speculation,
        )
    )


def _beyond(wanted: Settings) -> int:
    """Tokens that each request may have after those that count, which it is ended without. At most
    as many nodes are guessed as it may still have: trees would be cut towards its end."""
    return wanted.widths[-1] * DEPTH * len(wanted.drafts)


def answered(
    engine: LLMEngine, asked: Sequence[Sequence[int]], temperature: float, wanted: Settings
) -> tuple[list[TargetAnswer], float]:
    """Have the engine answer, up to `num_tokens`. Returns: the answers, and tokens per step: of the
    steps after the prompt's that began before so many were there."""
    said: dict[str, list[int]] = {}
    for index, token_ids in enumerate(asked):
        sampling = Sampling(
            max_tokens=wanted.num_tokens + _beyond(wanted), temperature=temperature, seed=index
        )
        name = f"{temperature:g}-{index}"
        said[name] = []
        engine.submit(Request(name, tuple(token_ids), sampling, block_hash))
    num_steps = num_tokens = 0
    while engine.has_work():
        for event in engine.step().events:
            own = said[event.request_id]
            if event.token_ids and 0 < len(own) < wanted.num_tokens:
                num_steps += 1
                num_tokens += len(event.token_ids)
            own += event.token_ids
            if len(own) >= wanted.num_tokens and event.finish_reason is None:
                engine.abort(event.request_id)
    answers = [
        TargetAnswer((*token_ids, *own[: wanted.num_tokens]), len(token_ids), temperature)
        for token_ids, own in zip(asked, said.values(), strict=True)
    ]
    return answers, num_tokens / max(1, num_steps)


@torch.no_grad()
def score(models: Sequence[Any], answers: Sequence[TargetAnswer]) -> list[ScoredAnswer]:
    """Compute each model's logits along each answer.

    Args: answers: to requests of the seeds 0, 1, 2, ...
    """
    found = []
    for seed, one in enumerate(answers):
        inputs = torch.tensor([one.token_ids[:-1]])
        logits = tuple(
            model(input_ids=inputs, use_cache=False).logits[0, one.num_prompt_tokens - 1 :].float()
            for model in models
        )
        found.append(ScoredAnswer(one, seed, logits))
    return found


def ranks(scored: ScoredAnswer, logits: torch.Tensor, *, is_coupled: bool) -> NDArray[np.int64]:
    """The number of tokens that come before the target's in these scores, at each token of an
    answer: [answered tokens].

    Args: is_coupled: with the noise that the target sampled with, as the exact rule's drafts are.
    """
    if is_coupled and scored.answer.temperature > 0.0:
        first, end = scored.answer.num_prompt_tokens, len(scored.answer.token_ids)
        keys = gumbel_noise.row_keys(
            [scored.seed] * (end - first), [0] * (end - first), list(range(first, end))
        )
        every = torch.arange(logits.shape[-1])[None]
        gumbel = gumbel_noise.gumbel(torch.from_numpy(keys)[:, None], every)
        logits = logits / scored.answer.temperature + gumbel
    own = logits.gather(-1, torch.tensor(scored.tokens)[:, None])
    return (logits > own).sum(-1).numpy().astype(np.int64)


def hit_rates(
    scored: Sequence[ScoredAnswer], names: Sequence[str], *, is_coupled: bool
) -> dict[str, list[float]]:
    """The share of tokens that were among a draft model's k likeliest, for each of WIDTHS: by draft
    model, and of all together where there are several."""
    by_name = {
        name: np.concatenate(
            [ranks(one, one.logits[1 + place], is_coupled=is_coupled) for one in scored]
        )
        for place, name in enumerate(names)
    }
    if len(names) > 1:
        by_name["any"] = np.min(np.stack(list(by_name.values())), axis=0)
    return {
        name: [round(float((own < width).mean()), 4) for width in WIDTHS]
        for name, own in by_name.items()
    }


def drawn_children(
    distributions: Sequence[Distribution], width: int, rng: random.Random
) -> tuple[TokenTree, dict[DistributionKey, Distribution]]:
    """Make a tree of one level: `width` samples of each draft model, equal ones folded into one
    node."""
    tries: dict[int, tuple[Try, ...]] = {}
    for proposer, own in enumerate(distributions):
        for _ in range(width):
            token_id = pick(own, rng.random())
            tries[token_id] = (*tries.get(token_id, ()), Try(proposer, float(own[token_id])))
    num_nodes = len(tries)
    tree = TokenTree(tuple(tries), (ROOT,) * num_nodes, (1.0,) * num_nodes, tuple(tries.values()))
    return tree, {((), proposer): own for proposer, own in enumerate(distributions)}


def kept_rates(
    scored: Sequence[ScoredAnswer], num_drafts: int, wanted: Settings
) -> dict[str, list[float]]:
    """How often one of k independent samples of each of the first `num_drafts` draft models is
    kept, for each of WIDTHS, by rule. Both rules judge the same samples."""
    rng = random.Random(wanted.seed)
    kept = {rule: np.zeros(len(WIDTHS)) for rule in ("multi_step", "naive")}
    num_judged = 0
    for target, drafts in _distributions(scored, num_drafts):
        num_judged += wanted.num_trials
        always = partial(_same, target)
        for place, width in enumerate(WIDTHS):
            for _ in range(wanted.num_trials):
                tree, drawn_from = drawn_children(drafts, width, rng)
                accepted = multi_step(tree, drawn_from, always, rng.random)
                kept["multi_step"][place] += len(accepted.nodes)
                accepted = naive(tree, always, rng.random)
                kept["naive"][place] += len(accepted.nodes)
    return {
        rule: [round(float(one), 4) for one in counts / num_judged] for rule, counts in kept.items()
    }


def _same(distribution: Distribution, _: int) -> Distribution:
    """After any node: in a tree of one level, what is drawn after a child keeps nothing more."""
    return distribution


def _distributions(
    scored: Sequence[ScoredAnswer], num_drafts: int
) -> Iterator[tuple[Distribution, list[Distribution]]]:
    """The distributions from which the target and the draft models would sample each answered
    token."""
    for one in scored:
        shares = [
            torch.softmax(logits.double() / one.answer.temperature, dim=-1).numpy()
            for logits in one.logits[: 1 + num_drafts]
        ]
        for target, *drafts in zip(*shares, strict=True):
            yield target, drafts


def tokens_per_step(wanted: Settings, asked: Sequence[Sequence[int]]) -> Table:
    """Tokens per step by rule of acceptance for the first draft model, and by the exact one for all
    together. Raises: SystemExit where an answer by the exact rule is not the same at every width.
    """
    found: Table = {}
    first, ways = wanted.drafts[:1], (0.0, *wanted.temperatures)
    runs = [(first, rule, rule) for rule in wanted.rules]
    if len(wanted.drafts) > 1:
        runs.append((wanted.drafts, "exact", "any, exact"))
    expected: dict[float, list[TargetAnswer]] = {}
    pairs = [(width, run) for width in wanted.widths for run in runs]
    for width, (drafts, rule, name) in track(pairs, "trees", console=harness.CONSOLE):
        speculation = SpeculationConfig(
            draft_models=drafts,
            expansion=(width, *[1] * (DEPTH - 1)),
            max_num_nodes=width * DEPTH * len(drafts),
            acceptance=rule,
            always=True,
        )
        engine = engine_for(wanted, speculation)
        for temperature in ways:
            if temperature == 0.0 and rule != "exact":
                continue  # greedy, there is one rule
            answers, rate = answered(engine, asked, temperature, wanted)
            if rule == "exact" and answers != expected.setdefault(temperature, answers):
                raise SystemExit(f"{name}, width {width}: an answer differs from width 1's")
            found.setdefault(way(temperature), {}).setdefault(name, []).append(round(rate, 3))
    return found


# -- the tables as Markdown

_TITLES = {
    "hit_rate": "The target's token among the draft's k likeliest",
    "kept_rate": "One of k independent draws is kept",
    "tokens_per_step": "Tokens per step of the target, trees <k, 1, 1, 1>",
}


def markdown(found: Mapping[str, Any]) -> str:
    """Write the tables of `report` as Markdown."""
    lines: list[str] = []
    for key, title in _TITLES.items():
        heads = " | ".join(f"k = {width}" for width in WIDTHS)
        lines += [f"{title}:", "", f"| | {heads} |", "|---|" + "---:|" * len(WIDTHS)]
        for how, rows in found[key].items():
            for name, values in rows.items():
                shown = [
                    f"{one:.2f}" if key == "tokens_per_step" else f"{100 * one:.1f} %"
                    for one in values
                ]
                lines.append(f"| {how}: {name} | {' | '.join(shown)} |")
        lines.append("")
    return "\n".join(lines)


def report(wanted: Settings) -> dict[str, Any]:
    """Compute the three tables, and how many tokens of answers they are of."""
    loaded = [load(name) for name in (wanted.target, *wanted.drafts)]
    models, names = [model for model, _ in loaded], [folder.name for _, folder in loaded[1:]]
    tokenizer = Tokenizer.from_file(str(loaded[0][1] / "tokenizer.json"))
    asked = prompts(tokenizer, wanted.seed + HELD_OUT, wanted.num_prompts, wanted.num_prompt_tokens)
    plain = engine_for(wanted, SpeculationConfig())
    hits: Table = {}
    kept: Table = {}
    num_tokens: dict[str, int] = {}
    for temperature in track((0.0, *wanted.temperatures), "hit rates", console=harness.CONSOLE):
        answers, _ = answered(plain, asked, temperature, wanted)
        scored = score(models, answers)
        name = way(temperature)
        num_tokens[name] = sum(len(one.tokens) for one in scored)
        hits[name] = hit_rates(scored, names, is_coupled=False)
        if temperature > 0.0:
            hits[f"{name}, same noise"] = hit_rates(scored, names, is_coupled=True)
            kept[name] = kept_rates(scored, 1, wanted)
            if len(names) > 1:
                together = kept_rates(scored, len(names), wanted)
                kept[name] |= {f"any, {rule}": rates for rule, rates in together.items()}
    return {
        "seed": wanted.seed,
        "num_tokens": num_tokens,
        "hit_rate": hits,
        "kept_rate": kept,
        "tokens_per_step": tokens_per_step(wanted, asked),
    }


@harness.case
@click.option("--target", default=Settings.target)
@click.option("--draft", default=Settings.drafts[0])
@click.option("--further", type=Several(str), help="draft models beside the first")
@click.option("--prompts", "num_prompts", type=click.IntRange(1), default=Settings.num_prompts)
@click.option("--tokens", "num_tokens", type=click.IntRange(1), default=Settings.num_tokens)
@click.option("--temperatures", type=Several(click.FloatRange(0, min_open=True)), default="0.8,1")
@click.option("--trials", type=click.IntRange(1), default=Settings.num_trials)
@click.option("--seed", default=Settings.seed)
def main(
    target: str,
    draft: str,
    further: Sequence[str] | None,
    num_prompts: int,
    num_tokens: int,
    temperatures: tuple[float, ...],
    trials: int,
    seed: int,
) -> dict[str, Any]:
    """How good guesses are: how often the target's token is among a draft model's k likeliest, how
    often one of k draws is kept by each rule, and tokens per step of the target by tree width.

    An engine without guesses answers prompts that training never saw, greedily and sampled. Hit
    rates and the rates of the rules are taken along these answers, token by token; tokens per step
    come from engines that guess by trees <k, 1, 1, 1> and compute all of them. --further names
    draft models that were trained on what the first one misses (`python -m
    tools.bundled_model.boosted_drafts`): "any" is all draft models together, with k tokens of each.
    """
    wanted = Settings(
        target=target,
        drafts=(draft, *(further or ())),
        num_prompts=num_prompts,
        num_tokens=num_tokens,
        temperatures=temperatures,
        num_trials=trials,
        seed=seed,
    )
    torch.set_num_threads(1)
    found: dict[str, Any] = {"target": wanted.target, "drafts": wanted.drafts, **report(wanted)}
    sys.stdout.write(markdown(found) + "\n")
    return found


if __name__ == "__main__":
    main()
