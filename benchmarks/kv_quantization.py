"""What each way to store the KV cache costs and saves, on one model and its held-out text.

Teacher-forced over documents that training never saw, joined to full context windows; the model
computes in float32 throughout, so that the cache is the only difference. Against the float32 cache:
bytes per token, error of the logits (root mean square, relative to their spread, and the greatest),
share of positions with the same best token, KL divergence, and perplexity. The last line printed is
one JSON object.

    python -m benchmarks.kv_quantization --windows 24
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.context import context, publish
from checkpoints.resolve import resolve
from engine.batch import Batch, Span
from engine.config import EngineConfig
from engine.kv.memory import KvMemory
from engine.models.hugging_face import HuggingFaceModel
from engine.models.load import load_model
from tokens.tokenizer import Tokenizer
from tools.bundled_model import corpus

CHOICES = (
    ("float32", "block"),
    ("bfloat16", "block"),
    *(
        (dtype, scale)
        for dtype in ("fp8_e4m3", "int8")
        for scale in ("tensor", "block", "token_head")
    ),
)


@dataclass(frozen=True)
class Cost:
    """One way to store the cache, measured."""

    kv_dtype: str
    kv_scale: str
    bytes_per_token: float
    share_of_bytes: float
    """Of a bfloat16 cache."""
    logit_error_rms: float
    """Relative to the standard deviation of the logits."""
    logit_error_max: float
    top_1_agreement: float
    kl_divergence: float
    """Mean over positions, in nats."""
    perplexity: float
    perplexity_change: float
    """Relative to the float32 cache."""


def windows(path: Path, count: int, num_tokens: int) -> list[list[int]]:
    """Held-out documents, one after the other, cut into windows."""
    tokenizer = Tokenizer.load(path)
    ids: list[int] = []
    for document in corpus.documents(corpus.HELD_OUT, 10**9):
        ids += tokenizer.encode(document.text + corpus.END)
        if len(ids) >= count * num_tokens:
            break
    return [ids[first : first + num_tokens] for first in range(0, count * num_tokens, num_tokens)]


def all_logits(model: HuggingFaceModel, token_ids: list[int], memory: KvMemory) -> torch.Tensor:
    """[T, V] float32: every position's, in one prompt."""
    blocks = tuple(range(model.layout.num_blocks_for(len(token_ids))))
    for block_id in blocks:
        memory.clear(block_id)
    span = Span(0, len(token_ids), blocks)
    logits = model.forward(Batch(tuple(token_ids), (span,), tuple(range(len(token_ids)))))
    return logits.float()


def measure(
    name: str, kv_dtype: str, kv_scale: str, texts: list[list[int]], exact: list[torch.Tensor]
) -> Cost:
    """Run all texts. `exact` is filled by the first call (float32), and compared with by others."""
    config = EngineConfig(
        model=name, dtype="float32", device="cpu", kv_dtype=kv_dtype, kv_scale=kv_scale
    )
    model = load_model(config)
    memory = KvMemory(model.layout, model.layout.num_blocks_for(len(texts[0])))
    model.attach(memory)
    is_first = not exact
    sums = torch.zeros(6, dtype=torch.float64)
    greatest = 0.0
    for index, text in enumerate(track(texts, f"{kv_dtype} {kv_scale}", console=_CONSOLE)):
        logits = all_logits(model, text, memory)
        if is_first:
            exact.append(logits)
        sums += _sums(logits, exact[index], text)
        greatest = max(greatest, float((logits - exact[index]).abs().max()))
    count, num_predicted = len(texts) * len(texts[0]), len(texts) * (len(texts[0]) - 1)
    squares, spread, agreed, divergence, loss, exact_loss = sums.tolist()
    layout = model.layout
    bytes_per_token = layout.block_bytes / layout.block_size
    bfloat16_bytes = layout.raw.block_bytes / layout.block_size / 2
    return Cost(
        kv_dtype=kv_dtype,
        kv_scale=kv_scale if layout.is_quantized else "",
        bytes_per_token=bytes_per_token,
        share_of_bytes=round(bytes_per_token / bfloat16_bytes, 4),
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


_CONSOLE = Console(stderr=True, width=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="baton-5m")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512, help="of a window")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    path = resolve(arguments.model, files="all").path
    texts = windows(path, arguments.windows, arguments.tokens)
    exact: list[torch.Tensor] = []
    costs = [measure(arguments.model, *choice, texts, exact) for choice in CHOICES]
    table = Table(
        "KV", "scale", "B/token", "of bf16", "logit rms", "max", "top-1", "KL", "ppl", "change"
    )
    for cost in costs:
        table.add_row(
            *(f"{each:.4g}" if isinstance(each, float) else each for each in asdict(cost).values())
        )
    _CONSOLE.print(table)
    result = {
        "benchmark": "kv_quantization",
        **context(),
        "model": arguments.model,
        "num_windows": len(texts),
        "num_window_tokens": arguments.tokens,
        "choices": [asdict(cost) for cost in costs],
    }
    publish(result, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
