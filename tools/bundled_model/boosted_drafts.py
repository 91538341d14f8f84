"""Train a further draft model on what the earlier ones miss (SpecInfer, arXiv 2305.09781, section
3.2: merge-based trees of several boosted SSMs).

    python -m tools.bundled_model.boosted_drafts --out build/baton-5m-draft-2

The target answers prompts of the corpus, greedily and sampled. A position counts as missed where no
earlier draft model has the target's token among its likeliest; there the new one, of the last one's
shape and, unless told otherwise, with its weights to begin with, learns the target's token.
Elsewhere it learns with a smaller weight, so that it can go on from what it guessed. The folder is
an ordinary checkpoint for `speculation.draft_models`; its boosting.json says what became of it on
answers that were kept out of training.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from checkpoints.resolve import resolve
from tools.bundled_model.chat import render
from tools.bundled_model.corpus import Document, documents
from tools.bundled_model.tokenizer import END_ID, PAD_ID
from tools.bundled_model.train import DRAFT_NAME, TARGET_NAME, Schedule, save_checkpoint

_KEPT_OUT = 8
"""One answer of so many is for measuring."""
_MIXED_TOKENS = 16.0
"""Rows whose lengths differ by less may come into any order: a batch is padded to its longest."""


@dataclass(frozen=True)
class Settings:
    """The settings of one training of a draft model. Raises ValueError for a value out of range."""

    target: str = TARGET_NAME
    """Target model whose tokens are to be guessed: a bundled name or a folder, with the bundled
    tokenizer."""

    drafts: tuple[str, ...] = (DRAFT_NAME,)
    """The earlier draft models, first to last."""

    seed: int = 11
    """Seed of the prompts, of sampled answers and of the order in training."""

    num_prompts: int = 1600
    """Number of prompts; each is answered once at each temperature."""

    num_prompt_tokens: int = 128
    """Most tokens of a prompt; longer documents are passed over."""

    num_tokens: int = 96
    """Most tokens of an answer."""

    temperatures: tuple[float, ...] = (0.0, 0.8)
    """Temperatures of the answers; 0: greedy."""

    top_k: int = 1
    """Number of likeliest tokens of each earlier draft model: a token that is among none of them is
    missed."""

    rest_weight: float = 0.1
    """Weight in the loss of a position that is not missed; a missed one has 1. 0 leaves them
    out."""

    num_steps: int = 1500
    """Number of training steps."""

    batch: int = 16
    """Number of answers in a training step, and made at once."""

    rate: float = 1e-3
    """Learning rate at its peak."""

    from_scratch: bool = False
    """Whether to begin with random weights, and not with those of the last draft model."""

    def __post_init__(self) -> None:
        if not self.drafts:
            raise ValueError("drafts: empty; boosting starts from one draft model at least")
        if not self.temperatures or min(self.temperatures) < 0.0:
            raise ValueError(f"temperatures: {self.temperatures} are not all 0 or above")
        if not 0.0 <= self.rest_weight <= 1.0:
            raise ValueError(f"rest_weight: {self.rest_weight} is not in [0, 1]")
        for name in ("num_prompts", "num_prompt_tokens", "num_tokens", "top_k", "num_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")
        if self.batch < 1 or not self.rate > 0.0:
            raise ValueError(f"batch, rate: {self.batch}, {self.rate} are not above 0")
        if self.num_prompts * len(self.temperatures) < _KEPT_OUT:
            raise ValueError(f"num_prompts: fewer than {_KEPT_OUT} answers leave none to measure")


class TargetAnswer(NamedTuple):
    """An answer of the target model, from which a draft model is trained."""

    token_ids: tuple[int, ...]
    """Token ids of the prompt, then of the answer."""

    num_prompt_tokens: int
    temperature: float
    """Temperature at which the answer was sampled; 0: greedy."""


def prompts(tokenizer: Tokenizer, seed: int, count: int, longest: int) -> list[list[int]]:
    """Take `count` prompts of at most `longest` tokens from the corpus of `seed`: dialogues up to
    their last answer, and the beginnings of everything else."""
    found: list[list[int]] = []
    start = 0
    while len(found) < count:
        for document in documents(seed, count, start):
            token_ids = _prompt(document, tokenizer)
            if 0 < len(token_ids) <= longest and len(found) < count:
                found.append(token_ids)
        start += count
    return found


def _prompt(document: Document, tokenizer: Tokenizer) -> list[int]:
    if document.messages:
        asked = render(list(document.messages[:-1])) + "<|assistant|>"
        return list(tokenizer.encode(asked).ids)
    token_ids = list(tokenizer.encode(document.text).ids)
    return token_ids[: max(1, min(16, len(token_ids) // 2))]


@torch.no_grad()
def answer(
    model: Any, asked: Sequence[Sequence[int]], temperature: float, num_tokens: int, batch: int
) -> list[TargetAnswer]:
    """Have the model answer prompts, in order; an answer includes its end token if it came to one.
    Sampled ones depend on torch's random numbers."""
    found: dict[int, TargetAnswer] = {}
    order = sorted(range(len(asked)), key=lambda index: len(asked[index]))
    name = "greedy answers" if temperature == 0.0 else f"answers at {temperature:g}"
    drawing = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    for places in track(_chunks(order, batch), name, console=Console(stderr=True)):
        width = len(asked[places[-1]])
        # Padding goes to the left, so that every prompt ends where its answer begins.
        rows = [[PAD_ID] * (width - len(asked[i])) + list(asked[i]) for i in places]
        mask = [[0] * (width - len(asked[i])) + [1] * len(asked[i]) for i in places]
        output = model.generate(
            input_ids=torch.tensor(rows, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            max_new_tokens=num_tokens,
            do_sample=temperature > 0.0,
            **drawing,
        )
        for place, said in zip(places, output[:, width:].tolist(), strict=True):
            end = said.index(END_ID) + 1 if END_ID in said else len(said)
            token_ids = (*asked[place], *said[:end])
            found[place] = TargetAnswer(token_ids, len(asked[place]), temperature)
    return [found[index] for index in range(len(asked))]


@torch.no_grad()
def ranks(model: Any, answers: Sequence[TargetAnswer], batch: int) -> list[NDArray[np.int64]]:
    """For each answered token, the number of other tokens that `model` thinks likelier after what
    came before it.

    Returns: for each answer [number of its tokens, without the prompt's].
    """
    model.eval()
    found: dict[int, NDArray[np.int64]] = {}
    order = sorted(range(len(answers)), key=lambda index: len(answers[index].token_ids))
    for places in _chunks(order, batch):
        inputs = _padded([answers[i].token_ids for i in places]).to(model.device)
        logits = model(input_ids=inputs[:, :-1], use_cache=False).logits.float()
        own = logits.gather(-1, inputs[:, 1:, None])
        above = (logits > own).sum(-1).cpu().numpy()
        for row, place in zip(above, places, strict=True):
            one = answers[place]
            found[place] = row[one.num_prompt_tokens - 1 : len(one.token_ids) - 1]
    return [found[index] for index in range(len(answers))]


def missed(by_draft: Sequence[Sequence[NDArray[np.int64]]], top_k: int) -> list[NDArray[np.bool_]]:
    """Whether, at each token, none of the draft models had it among its `top_k` likeliest.

    Args: by_draft: `ranks` of each.
    """
    return [np.min(np.stack(own), axis=0) >= top_k for own in zip(*by_draft, strict=True)]


def fit(
    model: Any,
    answers: Sequence[TargetAnswer],
    weights: Sequence[NDArray[np.float32]],
    wanted: Settings,
) -> list[float]:
    """Train `model` in place on the answers' tokens, each with its weight in the loss. Returns: the
    loss of each step, in nats."""
    rng = np.random.default_rng(wanted.seed)
    schedule = Schedule(
        wanted.num_steps, wanted.batch, wanted.num_tokens, wanted.rate, min(20, wanted.num_steps)
    )
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    batches = _batches([len(one.token_ids) for one in answers], wanted.batch, rng)
    losses: list[float] = []
    model.train()
    for step in track(range(wanted.num_steps), "training", console=Console(stderr=True)):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        places = next(batches)
        inputs = _padded([answers[i].token_ids for i in places]).to(model.device)
        weight = torch.zeros(len(places), inputs.shape[1] - 1, device=model.device)
        for row, place in enumerate(places):
            first = answers[place].num_prompt_tokens - 1
            own = torch.from_numpy(weights[place]).to(model.device)
            weight[row, first : first + len(own)] = own
        # What has no weight is not worth its logits.
        chosen = weight > 0.0
        if not chosen.any():
            losses.append(0.0)
            continue
        logits = model(input_ids=inputs[:, :-1], use_cache=False).logits[chosen].float()
        apart = F.cross_entropy(logits, inputs[:, 1:][chosen], reduction="none")
        loss = (apart * weight[chosen]).sum() / weight[chosen].sum()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    model.eval()
    return losses


def _batches(lengths: Sequence[int], batch: int, rng: np.random.Generator) -> Iterator[list[int]]:
    """Rows of about one length, every row once before any comes again."""
    while True:
        order = np.argsort(np.array(lengths) + rng.uniform(0.0, _MIXED_TOKENS, len(lengths)))
        parts = _chunks(order.tolist(), batch)
        for index in rng.permutation(len(parts)):
            yield parts[index]


def _chunks(places: Sequence[int], size: int) -> list[list[int]]:
    return [list(places[first : first + size]) for first in range(0, len(places), size)]


def _padded(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """[R, longest]; what is padded to the right is seen by nothing before it."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[PAD_ID] * (width - len(row))] for row in rows])


def load(name: str, device: str = "cpu") -> tuple[Any, Path]:
    """Load a model in float32. Returns: the model, and its folder. Raises: CheckpointError."""
    folder = resolve(name, files="all").path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval(), folder


def boost(wanted: Settings, out: Path, device: str = "cpu") -> dict[str, Any]:
    """Train one further draft model and write its checkpoint. Returns: what boosting.json says.

    Raises: CheckpointError; ValueError for models of several tokenizers, or where nothing is
        missed and nothing else has a weight.
    """
    target, folder = load(wanted.target, device)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    earlier = []
    for name in wanted.drafts:
        draft, own = load(name, device)
        if (own / "tokenizer.json").read_bytes() != (folder / "tokenizer.json").read_bytes():
            raise ValueError(f"drafts: {name} has another tokenizer than {wanted.target}")
        earlier.append(draft)
    torch.manual_seed(wanted.seed)
    asked = prompts(tokenizer, wanted.seed, wanted.num_prompts, wanted.num_prompt_tokens)
    answers = [
        one
        for temperature in wanted.temperatures
        for one in answer(target, asked, temperature, wanted.num_tokens, wanted.batch)
    ]
    # By the prompt: one that was kept out greedily is kept out sampled, too.
    is_kept_out = [index % wanted.num_prompts % _KEPT_OUT == 0 for index in range(len(answers))]
    learnt = [one for one, out_ in zip(answers, is_kept_out, strict=True) if not out_]
    tested = [one for one, out_ in zip(answers, is_kept_out, strict=True) if out_]
    marks = missed([ranks(draft, learnt, wanted.batch) for draft in earlier], wanted.top_k)
    weights = [np.where(own, 1.0, wanted.rest_weight).astype(np.float32) for own in marks]
    num_missed = int(sum(own.sum() for own in marks))
    if num_missed == 0 and wanted.rest_weight == 0.0:
        raise ValueError("nothing is missed: more prompts, or a rest_weight above 0")
    model = copy.deepcopy(earlier[-1])
    if wanted.from_scratch:
        model = type(model)(model.config).to(device)
    began = time.monotonic()
    losses = fit(model, learnt, weights, wanted)
    training_s = time.monotonic() - began
    save_checkpoint(model, tokenizer, out)
    # What is measured is what was written: in bfloat16.
    saved, _ = load(str(out), device)
    report = {
        **asdict(wanted),
        "num_positions": int(sum(map(len, marks))),
        "num_missed": num_missed,
        "training_s": round(training_s, 1),
        "first_loss": round(losses[0], 4),
        "last_loss": round(float(np.mean(losses[-20:])), 4),
        "kept_out": _compared(earlier, saved, tested, wanted.batch),
    }
    (out / "boosting.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def _compared(
    earlier: Sequence[Any], new: Any, answers: Sequence[TargetAnswer], batch: int
) -> dict[str, dict[str, float]]:
    """By temperature: how often the target's token is the first choice of the earlier models, of
    the new one, of any; and among as many choices of the last earlier one as `any` has."""
    found: dict[str, dict[str, float]] = {}
    for temperature in sorted({one.temperature for one in answers}):
        own = [one for one in answers if one.temperature == temperature]
        before = [np.concatenate(ranks(draft, own, batch)) for draft in earlier]
        after = np.concatenate(ranks(new, own, batch))
        best = np.min(np.stack(before), axis=0)
        hits = {
            "positions": len(after),
            "earlier": best < 1,
            "new": after < 1,
            "any": np.minimum(best, after) < 1,
            f"top {len(before) + 1} of the last earlier": before[-1] < len(before) + 1,
        }
        found[f"temperature {temperature:g}"] = {
            name: round(float(np.mean(hit)), 4) if isinstance(hit, np.ndarray) else hit
            for name, hit in hits.items()
        }
    return found


def _parse() -> tuple[Settings, Path, str]:
    defaults = Settings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--target", default=defaults.target)
    parser.add_argument("--drafts", nargs="+", default=defaults.drafts, help="the earlier ones")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--prompts", type=int, default=defaults.num_prompts)
    parser.add_argument("--prompt-tokens", type=int, default=defaults.num_prompt_tokens)
    parser.add_argument("--tokens", type=int, default=defaults.num_tokens)
    parser.add_argument("--temperatures", type=float, nargs="+", default=defaults.temperatures)
    parser.add_argument("--top-k", type=int, default=defaults.top_k)
    parser.add_argument("--rest-weight", type=float, default=defaults.rest_weight)
    parser.add_argument("--steps", type=int, default=defaults.num_steps)
    parser.add_argument("--batch", type=int, default=defaults.batch)
    parser.add_argument("--rate", type=float, default=defaults.rate)
    parser.add_argument("--from-scratch", action="store_true")
    given = parser.parse_args()
    try:
        wanted = Settings(
            target=given.target,
            drafts=tuple(given.drafts),
            seed=given.seed,
            num_prompts=given.prompts,
            num_prompt_tokens=given.prompt_tokens,
            num_tokens=given.tokens,
            temperatures=tuple(given.temperatures),
            top_k=given.top_k,
            rest_weight=given.rest_weight,
            num_steps=given.steps,
            batch=given.batch,
            rate=given.rate,
            from_scratch=given.from_scratch,
        )
    except ValueError as error:
        parser.error(str(error))
    return wanted, given.out, given.device


def main() -> None:
    """Train one further draft model, as the text at the top of this file says."""
    wanted, out, device = _parse()
    console = Console()
    console.print(f"seed {wanted.seed}")
    console.print_json(json.dumps(boost(wanted, out, device)))


if __name__ == "__main__":
    main()
