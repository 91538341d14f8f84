"""Make the bundled checkpoints: tokenizer, target model, and a draft model distilled from it.

    python -m tools.bundled_model.train --device cuda --out build/bundled

makes everything from the seed alone. Nothing is downloaded. See the model card that
`tools.bundled_model.model_card` writes for the run that made the committed files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch.nn import functional as F
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tools.bundled_model.corpus import HELD_OUT, documents
from tools.bundled_model.token_windows import TokenStream, build_stream, sample_windows
from tools.bundled_model.tokenizer import END_ID, PAD_ID, save_tokenizer, train_tokenizer

TARGET_NAME, DRAFT_NAME = "baton-5m", "baton-5m-draft"
CONTEXT = 2048
VOCAB_SIZE = 2048


@dataclass(frozen=True)
class ModelShape:
    """The dimensions of one Llama-shaped model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int


TARGET_SHAPE = ModelShape(hidden=256, layers=6, heads=8, kv_heads=4, feed_forward=704)
DRAFT_SHAPE = ModelShape(hidden=128, layers=2, heads=4, kv_heads=2, feed_forward=512)


@dataclass(frozen=True)
class Schedule:
    """The training schedule of one model: its steps, batch and learning rate."""

    steps: int
    batch: int
    length: int
    peak: float
    warmup: int = 100
    floor: float = 0.02

    def rate(self, step: int) -> float:
        """Learning rate at `step`: linear warm-up, then a cosine down to `floor` of the peak."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2)


def build_model(shape: ModelShape, vocab_size: int) -> LlamaForCausalLM:
    """Make a model with random weights; its token embedding is its output layer, too."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    return LlamaForCausalLM(config)


def _autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    if device.startswith("cuda"):
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def _logits(model: Any, inputs: torch.Tensor, device: str) -> torch.Tensor:
    with _autocast(device):
        logits: torch.Tensor = model(input_ids=inputs, use_cache=False).logits
    return logits


@torch.no_grad()
def held_out_loss(model: Any, stream: TokenStream, device: str, length: int, windows: int) -> float:
    """Mean cross-entropy, in nats a token, over the first windows of the held-out stream."""
    model.eval()
    losses = []
    for row in range(min(windows, (len(stream.tokens) - 1) // length)):
        piece = stream.tokens[row * length : (row + 1) * length + 1].astype(np.int64)
        window = torch.from_numpy(piece).to(device)[None]
        logits = _logits(model, window[:, :-1], device)
        losses.append(F.cross_entropy(logits[0].float(), window[0, 1:]).item())
    model.train()
    return float(np.mean(losses))


def _optimizer(model: Any, device: str) -> torch.optim.AdamW:
    """AdamW that decays matrices only: decaying a norm's scale would only fight the norm."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    scales = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": scales, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.startswith("cuda"))


@dataclass
class Run:
    """The settings and data that every training loop needs beside its model."""

    train: TokenStream
    held_out: TokenStream
    device: str
    seed: int
    console: Console
    save_every: int


def fit(
    run: Run,
    name: str,
    model: Any,
    schedule: Schedule,
    save: Callable[[Any], None],
    teacher: Any = None,
) -> dict[str, Any]:
    """Train `model` in place and return its loss curve.

    With a teacher, nine tenths of the loss is the divergence from the teacher's distribution: a
    draft is not there to be right but to say what the target will say.
    """
    rng = np.random.default_rng([run.seed, len(name)])
    optimizer = _optimizer(model, run.device)
    model.train()
    curve: list[dict[str, float]] = []
    began = time.monotonic()
    log_every = max(1, schedule.steps // 100)
    validate_every = max(1, schedule.steps // 20)
    running: list[torch.Tensor] = []
    for step in _progress(run.console, name, schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        windows = sample_windows(run.train, rng, schedule.batch, schedule.length)
        if run.device.startswith("cuda"):
            windows = windows.pin_memory().to(run.device, non_blocking=True)
        inputs, targets = windows[:, :-1], windows[:, 1:]
        logits = _logits(model, inputs, run.device).flatten(0, 1).float()
        loss = F.cross_entropy(logits, targets.flatten())
        # The curve shows cross-entropy for both models, whatever the draft is trained on.
        running.append(loss.detach())
        if teacher is not None:
            with torch.no_grad():
                wanted = _logits(teacher, inputs, run.device).flatten(0, 1).float()
            divergence = F.kl_div(
                logits.log_softmax(-1),
                wanted.log_softmax(-1),
                reduction="batchmean",
                log_target=True,
            )
            loss = 0.1 * loss + 0.9 * divergence
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        final = step + 1 == schedule.steps
        if (step + 1) % log_every == 0 or final:
            point = {"step": float(step + 1), "train": torch.stack(running).mean().item()}
            running = []
            if (step + 1) % validate_every == 0 or final:
                point["held_out"] = held_out_loss(
                    model, run.held_out, run.device, schedule.length, 32
                )
                run.console.log(f"{name} {json.dumps(point)} {time.monotonic() - began:.0f} s")
            curve.append(point)
        if not final and (step + 1) % run.save_every == 0:
            save(model)
    save(model)
    return {
        "steps": schedule.steps,
        "tokens": schedule.steps * schedule.batch * schedule.length,
        "seconds": round(time.monotonic() - began, 1),
        "curve": curve,
    }


def _progress(console: Console, name: str, steps: int) -> Iterator[int]:
    """Count to `steps` behind a progress bar."""
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=steps)
        for step in range(steps):
            yield step
            bar.advance(task)


def save_checkpoint(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Write an ordinary Hugging Face checkpoint.

    The weights are stored in bfloat16, half the size; the config says float32, which is what they
    are to be computed in. Every bfloat16 is a float32, so a run in either type has the same
    weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        bos_token_id=None, eos_token_id=END_ID, pad_token_id=PAD_ID, do_sample=False
    )
    copy.to(torch.bfloat16).save_pretrained(folder)
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text())
    config["dtype"] = "float32"
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_tokenizer(tokenizer, folder, CONTEXT)


def _round_to_bfloat16(model: Any) -> None:
    """Give the model the weights that its checkpoint holds."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for both checkpoints")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=5000, help="steps of the target")
    parser.add_argument("--draft-steps", type=int, default=3000, help="steps of the draft")
    parser.add_argument("--batch", type=int, default=32, help="windows a step")
    parser.add_argument("--length", type=int, default=CONTEXT, help="tokens a window")
    parser.add_argument("--save-every", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--width", type=int, default=None, help="columns of the log")
    return parser.parse_args()


def main() -> None:
    """Train both models, and write their checkpoints and `training.json` with the loss curves."""
    arguments = parse_arguments()
    console = Console(width=arguments.width)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    began = time.monotonic()
    out: Path = arguments.out
    target_folder, draft_folder = out / TARGET_NAME, out / DRAFT_NAME
    target_folder.mkdir(parents=True, exist_ok=True)

    sample = min(60_000, arguments.documents)
    tokenizer = train_tokenizer((d.text for d in documents(arguments.seed, sample)), VOCAB_SIZE)
    save_tokenizer(tokenizer, target_folder, CONTEXT)
    console.log(f"tokenizer: {tokenizer.get_vocab_size()} tokens")
    path = target_folder / "tokenizer.json"
    train = build_stream(path, arguments.seed, arguments.documents, arguments.workers)
    held_out = build_stream(path, arguments.seed + HELD_OUT, 4096, arguments.workers)
    console.log(f"{len(train.tokens):,} tokens, {time.monotonic() - began:.0f} s")

    run = Run(train, held_out, arguments.device, arguments.seed, console, arguments.save_every)
    vocabulary = tokenizer.get_vocab_size()
    report: dict[str, Any] = {
        "seed": arguments.seed,
        "documents": arguments.documents,
        "corpus_tokens": len(train.tokens),
    }
    target = build_model(TARGET_SHAPE, vocabulary).to(arguments.device)
    target_schedule = Schedule(arguments.steps, arguments.batch, arguments.length, peak=2e-3)
    report[TARGET_NAME] = fit(
        run, TARGET_NAME, target, target_schedule,
        lambda model: save_checkpoint(model, tokenizer, target_folder),
    )  # fmt: skip
    # The draft learns from the target as it is stored, not as it was in training.
    _round_to_bfloat16(target)
    target.eval()
    draft = build_model(DRAFT_SHAPE, vocabulary).to(arguments.device)
    draft_schedule = Schedule(arguments.draft_steps, arguments.batch, arguments.length, peak=4e-3)
    report[DRAFT_NAME] = fit(
        run, DRAFT_NAME, draft, draft_schedule,
        lambda model: save_checkpoint(model, tokenizer, draft_folder), teacher=target,
    )  # fmt: skip
    _round_to_bfloat16(draft)
    for name, model in ((TARGET_NAME, target), (DRAFT_NAME, draft)):
        report[name]["parameters"] = sum(p.numel() for p in model.parameters())
        report[name]["held_out"] = held_out_loss(
            model, held_out, arguments.device, arguments.length, 256
        )
    report["seconds"] = round(time.monotonic() - began, 1)
    (target_folder / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    console.log({k: v for k, v in report.items() if not isinstance(v, dict)})


if __name__ == "__main__":
    main()
