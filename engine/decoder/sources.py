"""Where the tensors of our decoder come from: a checkpoint's safetensors files, memory, or chance.

Every tensor goes straight to its place on the device, without a second copy of the model; a rank of
several reads only its share. Invariant: what is returned is whole; a name that is missing, left
over or of another shape is an error. Knows no model code. Load time only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from checkpoints import files
from engine.decoder.shape import DecoderShape
from engine.decoder.staging import Staging
from engine.decoder.weights import (
    ALL,
    EMBEDDING,
    HEAD,
    LAYERS,
    WHOLE,
    Builder,
    DecoderWeights,
    Placement,
    Share,
)
from engine.errors import LoadError

Progress = Callable[[str, int, int], None]

_BUFFERS = ("rotary_emb.inv_freq",)
"""What old checkpoints carry and nobody reads."""


def read_weights(
    folder: Path,
    shape: DecoderShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    share: Share = WHOLE,
    weight_dtype: str = "",
    progress: Progress | None = None,
) -> DecoderWeights:
    """A checkpoint's tensors, from its safetensors files.

    Args:
        dtype: that is computed in.
        weight_dtype: see Builder.
        progress: called with ("weights", bytes done, bytes in all) of the files.
    Raises: LoadError for a file that cannot be read, and for tensors that are missing, left over or
        of another shape; CheckpointError for a file that is missing or truncated.
    """
    builder = Builder(shape, share, dtype, device, weight_dtype)
    weights = builder.build()
    filling = _Filling(builder, shape)
    paths = files.weight_files(folder)
    total = sum(path.stat().st_size for path in paths)
    done = 0
    with Staging(device) as staging:
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
    shape: DecoderShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    share: Share = WHOLE,
    weight_dtype: str = "",
) -> DecoderWeights:
    """The same from tensors in memory, by a checkpoint's names. Raises: LoadError, as
    `read_weights`."""
    builder = Builder(shape, share, dtype, device, weight_dtype)
    weights = builder.build()
    filling = _Filling(builder, shape)
    for name, tensor in tensors.items():
        for placement in filling.take(name, tuple(tensor.shape)):
            placement.put(_cut(tensor, placement.rows, placement.columns).to(device, dtype))
    filling.check_whole()
    return weights


def random_weights(
    shape: DecoderShape,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    share: Share = WHOLE,
    weight_dtype: str = "",
) -> DecoderWeights:
    """Random numbers made on the device, each matrix keeping the scale of what passes through it:
    for benchmarks and tests. A rank's are not a part of the whole model's."""
    builder = Builder(shape, share, dtype, device, weight_dtype)
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


def _fill(placement: Placement, part: torch.Tensor, staging: Staging, dtype: torch.dtype) -> None:
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

    def __init__(self, builder: Builder, shape: DecoderShape) -> None:
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
        """Another rank's, or nobody's."""
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
