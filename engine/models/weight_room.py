"""Whether a checkpoint's weights can lie in the memory that is free, told before they are read: the
kernel ends a process that takes too much without a word. Start-up only.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

from checkpoints import files
from engine.config import EngineConfig
from engine.errors import LoadError
from engine.kv import sizing
from engine.kv.layout import DTYPE_BYTES
from engine.models.weight_streaming import make_plan

_FLOATS = ("F64", "F32", "F16", "BF16")
_STORED = {"float32": "F32", "bfloat16": "BF16"}
_LAYER_NUMBER = re.compile(r"\.(\d+)\.")
"""The first number in a tensor's name: experts are numbered behind it."""


def check(config: EngineConfig, folder: Path, name: str, device: str, dtype: str) -> None:
    """The least that the weights take, against what is free now on `device` (of all ranks, on a
    CPU; of each one's own, on GPUs).

    Args: dtype: that is computed in.
    Raises: LoadError, one line.
    """
    if is_streamed(config, folder, dtype):
        _check_streamed(config, folder, name, device, dtype)
        return
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


def is_streamed(config: EngineConfig, folder: Path, dtype: str) -> bool:
    """Whether the weights are more than `config` lets them take on the device, so that some layers
    stay in host memory. Raises: LoadError for a broken file."""
    given = config.weights_device_bytes
    return 0 < given < num_weight_bytes(folder, DTYPE_BYTES[dtype])


def _check_streamed(config: EngineConfig, folder: Path, name: str, device: str, dtype: str) -> None:
    """The same for a model whose layers are streamed (models/weight_streaming.py)."""
    sizes, rest_bytes, is_converted = _by_layer(folder, dtype)
    if not sizes:
        return  # files that number no layer: the model itself will tell
    plan = make_plan(sizes, rest_bytes, config.weights_device_bytes)
    host_bytes = plan.host_bytes
    if device == "cpu":
        host_bytes += plan.device_bytes
    elif is_converted:  # all of it lies there in the new dtype, before any of it is moved
        host_bytes = sum(sizes) + rest_bytes
    needs = [("cpu", host_bytes, "host memory", "raise the memory limit")]
    if device != "cpu":
        needs.append((device, plan.device_bytes, "memory", "lower weights_device_bytes"))
    for where, needed_bytes, memory, fix in needs:
        free_bytes = sizing.free_memory_bytes(where)
        if needed_bytes > free_bytes:
            raise LoadError(
                f"{name}: of its weights as {dtype}, {plan.device_bytes} bytes are for {device} "
                f"(weights_device_bytes={config.weights_device_bytes}) and {plan.host_bytes} for "
                f"host memory; {needed_bytes} bytes of {memory} are needed on {where}, and "
                f"{free_bytes} are free: {fix}, or choose a smaller model"
            )


def _by_layer(folder: Path, dtype: str) -> tuple[list[int], int, bool]:
    """(bytes of each layer as `dtype`, bytes of the rest, whether any are stored otherwise)."""
    layers: dict[int, int] = {}
    rest_bytes, is_converted = 0, False
    for file in files.weight_files(folder):
        for key, stored, num in _tensors(file):
            is_float = stored in _FLOATS
            num_bytes = num * (DTYPE_BYTES[dtype] if is_float else 1)
            is_converted |= is_float and stored != _STORED[dtype]
            if number := _LAYER_NUMBER.search(key):
                index = int(number[1])
                layers[index] = layers.get(index, 0) + num_bytes
            else:
                rest_bytes += num_bytes
    return [layers[index] for index in sorted(layers)], rest_bytes, is_converted


def num_weight_bytes(folder: Path, float_bytes: int) -> int:
    """Of all tensors, with `float_bytes` for each floating-point number; others as they are stored.
    By the files' headers: no weight is read. Raises: LoadError for a broken file."""
    return sum(_num_bytes_of(file, float_bytes) for file in files.weight_files(folder))


def _num_bytes_of(file: Path, float_bytes: int) -> int:
    return sum(num * (float_bytes if stored in _FLOATS else 1) for _, stored, num in _tensors(file))


def _tensors(file: Path) -> list[tuple[str, str, int]]:
    """(name, dtype as stored, how many numbers) of each."""
    try:
        with safe_open(file, framework="pt") as stored:
            slices = [(key, stored.get_slice(key)) for key in stored.keys()]
            return [(key, one.get_dtype(), math.prod(one.get_shape())) for key, one in slices]
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{file}: cannot be read ({error}); fetch the checkpoint again") from error


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
