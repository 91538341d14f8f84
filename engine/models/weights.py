"""Weights of a checkpoint: the check that they fit into memory (`check_memory`), and reading them
from safetensors files, from memory, or from random numbers. Only safetensors are read, since
other formats can run code.

For LlamaDecoder (`read_weights`) every tensor is copied straight to its place on the device,
through a StagedCopy, without a second copy of the model; a rank of several reads only its part.
Invariant: the weights returned are complete; a tensor that is missing, unexpected or of another
shape is an error. For other models `read_tensors` returns all tensors by name. It knows no model
code. Load time only.
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
    """Copies of tensors from a file to the device through two pinned buffers, so that the copy to
    the device runs while the next piece is read; plain copies on CPU. All copies are done at the
    end of the `with` block."""

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
        """Copy a CPU tensor into `target`, which is dense and of the same shape, and may have
        another dtype."""
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
"""Names of tensors that old checkpoints contain and that are not read."""


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
    """Read a checkpoint's weights from its safetensors files.

    Args:
        dtype: the dtype to compute in.
        weight_dtype: the dtype of the layers' matrices, "fp8_e4m3"; "": the dtype to compute in.
        progress: called with ("weights", bytes done, bytes in all) of the files.
    Raises: LoadError for a file that cannot be read, and for tensors that are missing, unexpected
        or of another shape; CheckpointError for a file that is missing or truncated.
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
    """Copy weights from tensors in memory, with a checkpoint's names. Arguments and errors are
    those of `read_weights`."""
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
    """Create random weights on the device, each matrix keeping the scale of its input, for
    benchmarks and tests. A rank's weights are not a part of the whole model's."""
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
    """Fill a placement from a file's tensor on the host."""
    target = placement.target
    if placement.scales is None:
        staging.copy(part, target)
        return
    numbers = torch.empty(target.shape, dtype=dtype, device=target.device)
    staging.copy(part, numbers)
    placement.put(numbers)


class _Filling:
    """The progress of filling placements: which ones are filled, and which tensors were
    unexpected."""

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
        """Return the placements of this tensor; none if it belongs to another rank. Raises:
        LoadError if it has another shape."""
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
        """Whether the tensor belongs to another rank, or is one that is never read."""
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
    """The shape of a tensor in a file, and its size there in bytes."""

    num_bytes: int


_DTYPE_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}
_Read = Callable[[slice, slice], torch.Tensor]


def _stored(path: Path) -> Iterator[tuple[str, _Stored, _Read]]:
    """Iterate over the tensors of a safetensors file: (name, shape and size, function that reads a
    part)."""
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
    """Read every tensor by name, floating-point ones as `dtype`.

    Args:
        progress: called with ("weights", bytes done, bytes in all).
        is_kept: False: the caller copies the tensors at once. True: they are copied here, since
            tensors mapped from a file change when the file is written.
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
"""The first number in a tensor's name, which is that of its layer; the numbers of experts come
later."""


def check_memory(config: EngineConfig, folder: Path, name: str, device: str, dtype: str) -> None:
    """Check that the weights, at their smallest, fit in the memory that is free on `device` (for
    all ranks together on a CPU, for each rank's own on GPUs).

    Args: dtype: the dtype to compute in.
    Raises: LoadError in one line.
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
    """Return whether the weights exceed `config.weights_device_bytes`, so that some layers must
    stay in host memory. Raises: LoadError for a file that cannot be read."""
    given = config.weights_device_bytes
    return 0 < given < num_weight_bytes(folder, DTYPE_BYTES[dtype])


def _check_streamed(config: EngineConfig, folder: Path, name: str, device: str, dtype: str) -> None:
    """Check that the weights of a model whose layers are streamed (weight_streaming.py) fit in the
    free memory of host and device."""
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
    """Return (bytes of each layer as `dtype`, bytes of the other weights, whether any are stored in
    another dtype)."""
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
    """Return the bytes of all tensors, with `float_bytes` for each floating-point number and others
    as stored, from the files' headers. Raises: LoadError for a file that cannot be read."""
    return sum(_num_bytes_of(file, float_bytes) for file in files.weight_files(folder))


def _num_bytes_of(file: Path, float_bytes: int) -> int:
    return sum(num * (float_bytes if stored in _FLOATS else 1) for _, stored, num in _tensors(file))


def _tensors(file: Path) -> list[tuple[str, str, int]]:
    """Return (name, dtype as stored, number of elements) of each tensor of a file."""
    try:
        with safe_open(file, framework="pt") as stored:
            slices = [(key, stored.get_slice(key)) for key in stored.keys()]
            return [(key, one.get_dtype(), math.prod(one.get_shape())) for key, one in slices]
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{file}: cannot be read ({error}); fetch the checkpoint again") from error


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
