"""Weights of a checkpoint: whether they fit into memory (`check_memory`), and where they come from:
safetensors files, memory, or chance. Safetensors only: nothing that could run code.

For our own decoder (`read_weights`) every tensor goes straight to its place on the device, through
a StagedCopy, without a second copy of the model; a rank of several reads only its share. Invariant:
what is returned is whole; a name that is missing, left over or of another shape is an error. For
other models `read_tensors` gives all tensors by name. Knows no model code. Load time only.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from checkpoints import files
from engine.config import EngineConfig
from engine.errors import LoadError
from engine.kv import sizing
from engine.kv.layout import DTYPE_BYTES
from engine.models.llama import (
    ALL,
    EMBEDDING,
    HEAD,
    LAYERS,
    WHOLE,
    LlamaConfig,
    LlamaWeights,
    Placement,
    Share,
    WeightsBuilder,
)
from engine.models.weight_streaming import make_plan

# -- copies to the device


_PIECE_BYTES = 64 * 1024 * 1024


class StagedCopy:
    """Tensors from a file to the device through two pinned buffers, so that the copy to the device
    runs while the next piece is read. On CPU a plain copy. After the `with` block all copies have
    ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0
        if device.type == "cuda":
            self._buffers = [
                torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]

    def __enter__(self) -> StagedCopy:
        return self

    def __exit__(self, *_: object) -> None:
        if self._buffers:
            torch.cuda.synchronize(self._device)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a CPU tensor into `target`, of the same shape and any dtype, dense."""
        if not self._buffers:
            target.copy_(source)
            return
        if not target.is_contiguous():
            raise ValueError("target: not dense")
        flat, into = source.reshape(-1), target.view(-1)
        step = _PIECE_BYTES // target.element_size()
        for first in range(0, flat.numel(), step):
            piece = flat[first : first + step]
            buffer = self._next_buffer().view(target.dtype)[: piece.numel()]
            buffer.copy_(piece)
            into[first : first + piece.numel()].copy_(buffer, non_blocking=True)
            self._events[self._turn] = torch.cuda.current_stream(self._device).record_event()

    def _next_buffer(self) -> torch.Tensor:
        self._turn = 1 - self._turn
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()
        return self._buffers[self._turn]


# -- weights of our own decoder


Progress = Callable[[str, int, int], None]

_BUFFERS = ("rotary_emb.inv_freq",)
"""What old checkpoints carry and is never read."""


def read_weights(
    folder: Path,
    shape: LlamaConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    share: Share = WHOLE,
    weight_dtype: str = "",
    progress: Progress | None = None,
) -> LlamaWeights:
    """A checkpoint's tensors, from its safetensors files.

    Args:
        dtype: that is computed in.
        weight_dtype: see WeightsBuilder.
        progress: called with ("weights", bytes done, bytes in all) of the files.
    Raises: LoadError for a file that cannot be read, and for tensors that are missing, left over or
        of another shape; CheckpointError for a file that is missing or truncated.
    """
    builder = WeightsBuilder(shape, share, dtype, device, weight_dtype)
    weights = builder.build()
    filling = _Filling(builder, shape)
    paths = files.weight_files(folder)
    total = sum(path.stat().st_size for path in paths)
    done = 0
    with StagedCopy(device) as staging:
        for path in paths:
            try:
                for name, stored, read in _stored(path):
                    for placement in filling.take(name, tuple(stored)):
                        _fill(placement, read(placement.rows, placement.columns), staging, dtype)
                    done += stored.num_bytes
                    if progress is not None:
                        progress("weights", min(done, total), total)
            except (SafetensorError, OSError) as error:
                raise LoadError(
                    f"{path}: cannot be read ({error}); fetch the checkpoint again"
                ) from error
    filling.check_whole()
    if progress is not None:
        progress("weights", total, total)
    return weights


def take_weights(
    tensors: Mapping[str, torch.Tensor],
    shape: LlamaConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    share: Share = WHOLE,
    weight_dtype: str = "",
) -> LlamaWeights:
    """The same from tensors in memory, by a checkpoint's names. Raises: LoadError, as
    `read_weights`."""
    builder = WeightsBuilder(shape, share, dtype, device, weight_dtype)
    weights = builder.build()
    filling = _Filling(builder, shape)
    for name, tensor in tensors.items():
        for placement in filling.take(name, tuple(tensor.shape)):
            placement.put(_cut(tensor, placement.rows, placement.columns).to(device, dtype))
    filling.check_whole()
    return weights


def random_weights(
    shape: LlamaConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    share: Share = WHOLE,
    weight_dtype: str = "",
) -> LlamaWeights:
    """Random numbers made on the device, each matrix keeping the scale of what passes through it:
    for benchmarks and tests. A rank's are not a part of the whole model's."""
    builder = WeightsBuilder(shape, share, dtype, device, weight_dtype)
    weights = builder.build()
    generator = torch.Generator(device=device).manual_seed(seed)
    for placement in builder.placements:
        numbers = torch.empty(placement.target.shape, dtype=dtype, device=device)
        if numbers.dim() == 2:
            gain = 1.0 if placement.name == EMBEDDING else placement.full_shape[1] ** -0.5
            numbers.normal_(0.0, gain, generator=generator)
        elif "norm" in placement.name:
            numbers.uniform_(0.5, 1.5, generator=generator)
        else:
            numbers.normal_(0.0, 0.3, generator=generator)
        placement.put(numbers)
    return weights


def _fill(
    placement: Placement, part: torch.Tensor, staging: StagedCopy, dtype: torch.dtype
) -> None:
    """From a file's tensor, on the host."""
    target = placement.target
    if placement.scales is None:
        staging.copy(part, target)
        return
    numbers = torch.empty(target.shape, dtype=dtype, device=target.device)
    staging.copy(part, numbers)
    placement.put(numbers)


class _Filling:
    """Which placements are filled."""

    def __init__(self, builder: WeightsBuilder, shape: LlamaConfig) -> None:
        self._shape = shape
        self._wanted: dict[str, list[Placement]] = {}
        for placement in builder.placements:
            self._wanted.setdefault(placement.name, []).append(placement)
        names = {*self._wanted, *builder.others}
        self._in_layers = {one.split(".", 3)[-1] for one in names if one.startswith(LAYERS)}
        self._left = set(self._wanted)
        self._unknown: list[str] = []

    def take(self, name: str, shape: tuple[int, ...]) -> list[Placement]:
        """Where this tensor goes; nowhere where it is another rank's."""
        found = self._wanted.get(name, [])
        for placement in found:
            if placement.full_shape != shape:
                raise LoadError(
                    f"weights do not fit config.json: {name} is {list(shape)}, not "
                    f"{list(placement.full_shape)}; fetch the checkpoint again"
                )
        if not found and not self._is_others(name):
            self._unknown.append(name)
        self._left.discard(name)
        return found

    def _is_others(self, name: str) -> bool:
        """Another rank's, or never read."""
        if name.startswith(LAYERS):
            layer, _, rest = name[len(LAYERS) :].partition(".")
            is_layer = layer.isdecimal() and int(layer) < self._shape.num_layers
            return is_layer and (rest in self._in_layers or rest.endswith(_BUFFERS))
        if name == HEAD:
            return True  # tied, or of the last stage
        return name in (EMBEDDING, "model.norm.weight") or name.endswith(_BUFFERS)

    def check_whole(self) -> None:
        for what, names in (("missing", self._left), ("unexpected", self._unknown)):
            if names:
                raise LoadError(
                    f"weights do not fit config.json: {what} keys: {len(names)}, first "
                    f"{min(names)}; fetch the checkpoint again"
                )


class _Stored(tuple[int, ...]):
    """The shape of a tensor in a file, and its bytes there."""

    num_bytes: int


_DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}
_Read = Callable[[slice, slice], torch.Tensor]


def _stored(path: Path) -> Iterator[tuple[str, _Stored, _Read]]:
    """Every tensor of a safetensors file: (name, shape, how to read a part of it)."""
    opened: AbstractContextManager[Any] = safe_open(path, framework="pt", device="cpu")
    with opened as source:
        for name in source.keys():
            part = source.get_slice(name)
            stored = _Stored(part.get_shape())
            width = _DTYPE_BYTES.get(part.get_dtype(), 1)
            stored.num_bytes = int(torch.Size(stored).numel()) * width
            yield name, stored, _reading(source, name)


def _reading(source: Any, name: str) -> _Read:
    def read(rows: slice, columns: slice) -> torch.Tensor:
        if rows == ALL and columns == ALL:
            return source.get_tensor(name)  # type: ignore[no-any-return]
        part = source.get_slice(name)
        return part[rows] if columns == ALL else part[rows, columns]  # type: ignore[no-any-return]

    return read


def _cut(tensor: torch.Tensor, rows: slice, columns: slice) -> torch.Tensor:
    return tensor[rows] if columns == ALL else tensor[rows, columns]


# -- all tensors by name


def read_tensors(
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


# -- memory


_FLOATS = ("F64", "F32", "F16", "BF16")
_STORED = {"float32": "F32", "bfloat16": "BF16"}
_LAYER_NUMBER = re.compile(r"\.(\d+)\.")
"""The first number in a tensor's name: experts are numbered behind it."""


def check_memory(config: EngineConfig, folder: Path, name: str, device: str, dtype: str) -> None:
    """The least that the weights take, against what is free now on `device` (of all ranks, on a
    CPU; of each one's own, on GPUs).

    Args: dtype: that is computed in.
    Raises: LoadError, one line.
    """
    if must_stream(config, folder, dtype):
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


def must_stream(config: EngineConfig, folder: Path, dtype: str) -> bool:
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
