"""Tensors of a checkpoint folder, read with progress. Safetensors only: nothing that could run
code. Load time only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from checkpoints import files
from engine.errors import LoadError


def read_weights(
    folder: Path,
    dtype: torch.dtype,
    progress: Callable[[str, int, int], None] | None = None,
    *,
    is_kept: bool = True,
) -> dict[str, torch.Tensor]:
    """Every tensor by name, floating ones in `dtype`.

    Args:
        progress: called with ("weights", bytes done, bytes in all).
        is_kept: False: they are copied elsewhere at once. Else they are copied here: what lies in
            the file itself, mapped, changes with it when somebody writes there.
    Raises: LoadError for a file that cannot be read; CheckpointError for one that is missing or
        truncated.
    """
    paths = files.weight_files(folder)
    total = sum(path.stat().st_size for path in paths)
    done = 0
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt", device="cpu") as source:
                for name in source.keys():
                    tensor = source.get_tensor(name)
                    done += tensor.numel() * tensor.element_size()
                    wanted = dtype if tensor.is_floating_point() else tensor.dtype
                    tensors[name] = tensor.to(wanted, copy=is_kept)
                    if progress is not None:
                        progress("weights", done, total)
        except (SafetensorError, OSError) as error:
            raise LoadError(
                f"{path}: cannot be read ({error}); fetch the checkpoint again"
            ) from error
    if progress is not None:
        progress("weights", total, total)
    return tensors
