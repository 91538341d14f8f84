"""Two ways to compute one model's logits, compared over held-out text that both are fed: what
benchmarks of a cheaper way (a quantized cache, quantized weights) say of its accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

from engine.batch import Batch, Span
from engine.kv.memory import KvMemory
from engine.models.interface import LoadedModel
from tokens.tokenizer import Tokenizer
from tools.bundled_model import corpus


class Drift(NamedTuple):
    """How far one way is from the one it is compared with."""

    logit_error_rms: float
    """Relative to the standard deviation of the logits."""
    logit_error_max: float
    top_1_agreement: float
    """Share of positions with the same best token."""
    kl_divergence: float
    """Mean over positions, in nats."""
    perplexity: float
    perplexity_change: float
    """Relative to the other's."""


def windows(path: Path, count: int, num_tokens: int) -> list[list[int]]:
    """Held-out documents, one after the other, cut into windows."""
    tokenizer = Tokenizer.load(path)
    ids: list[int] = []
    for document in corpus.documents(corpus.HELD_OUT, 10**9):
        ids += tokenizer.encode(document.text + corpus.END)
        if len(ids) >= count * num_tokens:
            break
    return [ids[first : first + num_tokens] for first in range(0, count * num_tokens, num_tokens)]


def all_logits(model: LoadedModel, token_ids: list[int], memory: KvMemory) -> torch.Tensor:
    """[T, V] float32 on the CPU: every position's, in one prompt."""
    blocks = tuple(range(model.layout.num_blocks_for(len(token_ids))))
    for block_id in blocks:
        memory.clear(block_id)
    span = Span(0, len(token_ids), blocks)
    logits = model.forward(Batch(tuple(token_ids), (span,), tuple(range(len(token_ids)))))
    return logits.float().cpu()


def drift(
    model: LoadedModel, texts: Iterable[list[int]], exact: list[torch.Tensor], num_tokens: int
) -> Drift:
    """Run all texts, each on its own.

    Args:
        exact: the other way's logits of each text; an empty list is filled with this model's.
        num_tokens: most of a text.
    """
    memory = KvMemory(model.layout, model.layout.num_blocks_for(num_tokens), model.info.device)
    model.attach(memory)
    is_first = not exact
    sums = torch.zeros(6, dtype=torch.float64)
    greatest, count, num_predicted = 0.0, 0, 0
    for index, text in enumerate(texts):
        logits = all_logits(model, text, memory)
        if is_first:
            exact.append(logits)
        sums += _sums(logits, exact[index], text)
        greatest = max(greatest, float((logits - exact[index]).abs().max()))
        count, num_predicted = count + len(text), num_predicted + len(text) - 1
    squares, spread, agreed, divergence, loss, exact_loss = sums.tolist()
    return Drift(
        logit_error_rms=round(math.sqrt(squares / spread), 6),
        logit_error_max=round(greatest, 5),
        top_1_agreement=round(agreed / count, 5),
        kl_divergence=round(max(0.0, divergence / count), 8),
        perplexity=round(math.exp(loss / num_predicted), 5),
        perplexity_change=round(math.exp((loss - exact_loss) / num_predicted) - 1, 6),
    )


def _sums(logits: torch.Tensor, exact: torch.Tensor, text: list[int]) -> torch.Tensor:
    """[6]: squared error, variance, equal best tokens, KL divergence, loss, exact loss."""
    following = torch.tensor(text[1:])[:, None]
    log_p, log_q = exact.log_softmax(-1), logits.log_softmax(-1)
    return torch.tensor(
        [
            float((logits - exact).square().mean(dim=-1).sum()),
            float(exact.var(dim=-1).sum()),
            float((logits.argmax(-1) == exact.argmax(-1)).sum()),
            float((log_p.exp() * (log_p - log_q)).sum()),
            -float(log_q[:-1].gather(1, following).sum()),
            -float(log_p[:-1].gather(1, following).sum()),
        ],
        dtype=torch.float64,
    )
