"""From what a user types as `--model` to a folder with a whole checkpoint.

    baton-5m               a bundled model: a folder beside this file
    ./path, /path, ~/path  a local folder (any existing folder, with or without ./)
    Qwen/Qwen3-0.6B        a Hugging Face hub name; `name@revision` for a branch, tag or commit

The hub is asked through huggingface_hub, so HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE and the user's
token count. Only configuration, tokenizer and safetensors files are fetched; pickles never.
Does not know models or tensors. Blocking; any thread may call, none with an event loop.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from checkpoints import files as checkpoint_files
from checkpoints.digests import Progress
from checkpoints.errors import CheckpointError

Files = Literal["tokenizer", "weights", "all"]

_BUNDLED = Path(__file__).resolve().parent / "bundled"
_BUNDLED_PREFIX = "baton-"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on this machine."""

    name: str
    """What users and replies call it: a bundled name, a hub name, or the folder's last part."""
    path: Path
    """The folder; its files were checked."""


def bundled_names() -> tuple[str, ...]:
    """Names of the models that come with Baton, sorted."""
    return tuple(sorted(path.parent.name for path in _BUNDLED.glob("*/config.json")))


def resolve(model: str, *, files: Files, progress: Progress | None = None) -> Checkpoint:
    """Find `model`, fetching it first if it is a hub name.

    Args:
        files: "tokenizer" needs config.json and tokenizer.json, "weights" config.json and whole
            safetensors (what belongs to another model, as draft heads do), "all" needs all three.
        progress: called with (what, done, total) in bytes while fetching.
    Raises: CheckpointError, one line: what is wrong and how to fix it.
    """
    checkpoint = _find(model, files, progress)
    checkpoint_files.read_config(checkpoint.path)
    if files != "weights":
        checkpoint_files.check_tokenizer(checkpoint.path)
    if files != "tokenizer":
        checkpoint_files.weight_files(checkpoint.path)
    return checkpoint


def _find(model: str, files: Files, progress: Progress | None) -> Checkpoint:
    if not model:
        raise CheckpointError("model: empty; give a bundled name, a folder or a hub name")
    if model in bundled_names():
        return Checkpoint(model, _BUNDLED / model)
    folder = Path(model).expanduser()
    if folder.is_dir():
        resolved = folder.resolve()
        return Checkpoint(resolved.name, resolved)
    if folder.exists():
        raise CheckpointError(f"{model}: is a file; give the checkpoint's folder")
    if model.startswith((".", "~", os.sep)):
        raise CheckpointError(f"{model}: no such folder; check the path")
    if model.startswith(_BUNDLED_PREFIX):
        raise CheckpointError(
            f"{model}: no such bundled model; there are {', '.join(bundled_names()) or 'none'}"
        )
    name, _, revision = model.partition("@")
    if not _HUB_NAME.fullmatch(name):
        raise CheckpointError(
            f"{model}: neither a folder, nor a bundled model ({', '.join(bundled_names())}), nor a "
            "hub name such as Qwen/Qwen3-0.6B; check the spelling"
        )
    from checkpoints import hub  # here: a folder needs none of the library that it imports

    path = hub.fetch(name, revision or None, with_weights=files != "tokenizer", progress=progress)
    return Checkpoint(name, path)
