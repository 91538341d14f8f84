"""What a cheaper way to compute costs in accuracy: the KV cache's dtype, the weights' dtype.

    python -m benchmarks.accuracy weights --windows 24

Teacher-forced over documents that training never saw, joined to full context windows. Against the
first way: error of the logits (root mean square relative to their spread, and the greatest), share
of positions with the same best token, KL divergence in nats, and perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.progress import track

from benchmarks import harness
from checkpoints.resolve import resolve
from engine.batch import Batch, TokenSpan
from engine.config import EngineConfig
from engine.kv.memory import KvMemory
from engine.models.interface import LoadedModel
from engine.models.loader import load_model
from tokens.tokenizer import Tokenizer
from tools.bundled_model import corpus

KV_DTYPES = (
    *(("float32", "block"), ("bfloat16", "block")),
    *(("fp8_e4m3", "tensor"), ("fp8_e4m3", "block"), ("fp8_e4m3", "token_head")),
    *(("int8", "tensor"), ("int8", "block"), ("int8", "token_head")),
)
"""KV cache formats that are compared: (dtype, what has a scale of its own)."""
WEIGHTS = (
    *(("float32", "auto"), ("bfloat16", "auto")),
    *(("float32", "fp8_e4m3"), ("bfloat16", "fp8_e4m3")),
)
"""Weight formats that are compared: (dtype of the products, format of the weights)."""


def windows(path: Path, count: int, num_tokens: int) -> list[list[int]]:
    """Join held-out documents and cut them into windows of tokens."""
    tokenizer = Tokenizer.load(path)
    ids: list[int] = []
    for document in corpus.documents(corpus.HELD_OUT, 10**9):
        ids += tokenizer.encode(document.text + corpus.END)
        if len(ids) >= count * num_tokens:
            break
    return [ids[first : first + num_tokens] for first in range(0, count * num_tokens, num_tokens)]


def all_logits(model: LoadedModel, token_ids: list[int], memory: KvMemory) -> torch.Tensor:
    """Compute the logits of every position of a prompt: [T, V] float32 on the CPU."""
    blocks = tuple(range(model.layout.num_blocks_for(len(token_ids))))
    for block_id in blocks:
        memory.clear(block_id)
    span = TokenSpan(0, len(token_ids), blocks)
    logits = model.forward(Batch(tuple(token_ids), (span,), tuple(range(len(token_ids)))))
    return logits.float().cpu()


def drift(
    model: LoadedModel, texts: Iterable[list[int]], exact: list[torch.Tensor], num_tokens: int
) -> dict[str, float]:
    """Run all texts through a model, each on its own, and compare its logits with the exact ones.

    Args: exact: the first way's logits of each text; an empty list is filled with this model's.
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
    return {
        "logit_error_rms": round(math.sqrt(squares / spread), 6),
        "logit_error_max": round(greatest, 5),
        "top_1_agreement": round(agreed / count, 5),
        "kl_divergence": round(max(0.0, divergence / count), 8),
        "perplexity": round(math.exp(loss / num_predicted), 5),
        "perplexity_change": round(math.exp((loss - exact_loss) / num_predicted) - 1, 6),
    }


def _sums(logits: torch.Tensor, exact: torch.Tensor, text: list[int]) -> torch.Tensor:
    """Sums over the positions of a text, [6]: squared error, variance of the exact logits, equal
    best tokens, KL divergence, loss, exact loss."""
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


def _measured(
    configs: Sequence[tuple[dict[str, Any], EngineConfig]], num_windows: int, num_tokens: int
) -> dict[str, Any]:
    """Each way's names, bytes and drift from the first."""
    path = resolve(configs[0][1].model, files="all").path
    texts = windows(path, num_windows, num_tokens)
    exact: list[torch.Tensor] = []
    rows = []
    for names, config in configs:
        model, layout = load_model(config), None
        if "kv_dtype" in names:
            layout = model.layout
            bfloat16_bytes = layout.raw.block_bytes / layout.block_size / 2
            names["bytes_per_token"] = layout.block_bytes / layout.block_size
            names["share_of_bfloat16"] = round(names["bytes_per_token"] / bfloat16_bytes, 4)
        else:
            names["weight_bytes"] = model.info.weight_bytes
        progress = track(texts, " ".join(map(str, names.values())), console=harness.CONSOLE)
        rows.append(names | drift(model, progress, exact, num_tokens))
    harness.show(f"against {rows[0]}", rows)
    return {"num_windows": num_windows, "num_window_tokens": num_tokens, "choices": rows}


_MODEL = click.option("--model", default="baton-5m")
_WINDOWS = click.option("--windows", "num_windows", default=24)
_TOKENS = click.option("--tokens", "num_tokens", default=512, help="of a window")


@harness.case
@_MODEL
@_WINDOWS
@_TOKENS
def kv(model: str, num_windows: int, num_tokens: int) -> dict[str, Any]:
    """The KV cache's dtype and scales; the model computes in float32 throughout, so that the cache
    is the only difference. Against a float32 cache."""
    configs = [
        (
            {"kv_dtype": dtype, "kv_scale": scale},
            EngineConfig(
                model=model, dtype="float32", device="cpu", kv_dtype=dtype, kv_scale=scale
            ),
        )
        for dtype, scale in KV_DTYPES
    ]
    return {"model": model, **_measured(configs, num_windows, num_tokens)}


@harness.case
@_MODEL
@_WINDOWS
@_TOKENS
@click.option("--device", default="cpu")
def weights(model: str, num_windows: int, num_tokens: int, device: str) -> dict[str, Any]:
    """The weights' dtype, computed by our own decoder: bfloat16, and fp8 (a scale per output
    channel, activations quantized per token) computed in either. Against float32 in float32."""
    configs = [
        (
            {"dtype": dtype, "weight_dtype": kept},
            EngineConfig(model=model, decoder="own", device=device, dtype=dtype, weight_dtype=kept),
        )
        for dtype, kept in WEIGHTS
    ]
    return {"model": model, "device": device, **_measured(configs, num_windows, num_tokens)}


main = harness.program(__doc__, kv, weights)

if __name__ == "__main__":
    main()
