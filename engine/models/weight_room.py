"""Whether a checkpoint's weights can lie in the memory that is free, told before they are read: the
kernel ends a process that takes too much without a word. Start-up only.
"""

from __future__ import annotations

import math
from pathlib import Path

from safetensors import SafetensorError, safe_open

from checkpoints import files
from engine.config import EngineConfig
from engine.errors import LoadError
from engine.kv import sizing
from engine.kv.layout import DTYPE_BYTES

_FLOATS = ("F64", "F32", "F16", "BF16")


def check(config: EngineConfig, folder: Path, name: str, device: str, dtype: str) -> None:
    """The least that the weights take, against what is free now on `device` (of all ranks, on a
    CPU; of each one's own, on GPUs).

    Args: dtype: that is computed in.
    Raises: LoadError, one line.
    """
    weight_bytes = num_weight_bytes(
        folder, 1 if config.weight_dtype != "auto" else DTYPE_BYTES[dtype]
    )
    num_devices = 1 if device == "cpu" else config.num_ranks
    needed_bytes = weight_bytes // num_devices
    free_bytes = sizing.free_memory_bytes(device)
    if needed_bytes > free_bytes:
        of_each = f" on each of {num_devices} devices" if num_devices > 1 else ""
        fix = "raise the memory limit" if device == "cpu" else "spread it (tensor_parallel)"
        raise LoadError(
            f"{name}: its weights take {_shown(needed_bytes)} as {dtype}{of_each}, and "
            f"{_shown(free_bytes)} of memory are free for {device}: {fix}, or choose a smaller "
            "model"
        )


def num_weight_bytes(folder: Path, float_bytes: int) -> int:
    """Of all tensors, with `float_bytes` for each floating-point number; others as they are stored.
    By the files' headers: no weight is read. Raises: LoadError for a broken file."""
    return sum(_num_bytes_of(file, float_bytes) for file in files.weight_files(folder))


def _num_bytes_of(file: Path, float_bytes: int) -> int:
    total = 0
    try:
        with safe_open(file, framework="pt") as stored:
            for key in stored.keys():
                tensor = stored.get_slice(key)
                num = math.prod(tensor.get_shape())
                total += num * (float_bytes if tensor.get_dtype() in _FLOATS else 1)
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{file}: cannot be read ({error}); fetch the checkpoint again") from error
    return total


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
