"""Two small models with the bundled tokenizer and random weights, as checkpoints."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer

from tools.bundled_model.train import ModelShape, build_model, save_checkpoint

TOKENIZER = Path(__file__).resolve().parents[3] / "checkpoints/bundled/baton-5m/tokenizer.json"
_SHAPE = ModelShape(hidden=32, layers=1, heads=2, kv_heads=1, feed_forward=32)


def save_pair(folder: Path) -> tuple[Path, Path]:
    """Write both. Returns: target, draft; of one shape, with weights of their own."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    folders = folder / "target", folder / "draft"
    with torch.random.fork_rng(devices=[]):
        for seed, own in enumerate(folders):
            torch.manual_seed(seed)
            model = build_model(_SHAPE, tokenizer.get_vocab_size())
            # As built, logits are all about 0, and highest for the token that was read: input and
            # output embedding are one, and what is added to it is small.
            with torch.no_grad():
                for matrix in model.parameters():
                    if matrix.dim() == 2:
                        matrix.mul_(15.0)
            save_checkpoint(model, tokenizer, own)
    return folders
