"""HeadCheckpoint: a folder with draft heads in the format of Medusa and EAGLE: config.json and
tensors. Only safetensors are read, since loading a pickle would run code. It does not compute
the network. Used at load time only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from checkpoints import files
from checkpoints.resolve import resolve
from engine.errors import LoadError

MEDUSA_FILE = "medusa_lm_head.safetensors"
"""The published file name of Medusa's heads; the folder may also contain the files of a whole
model."""


class HeadCheckpoint:
    """The tensors and the config.json of one folder.

    Args:
        name: a folder, or a Hugging Face name.
        dtype: the type to which floating-point tensors are converted.
    Raises: CheckpointError or LoadError with one line that says what is wrong and how to fix it.
    """

    def __init__(self, name: str, *, dtype: torch.dtype, device: str) -> None:
        found = resolve(name, files="weights")
        self.name = found.name
        self.folder = found.path
        self.config: dict[str, Any] = files.read_config(found.path)
        self._dtype = dtype
        self.device = device
        self._places: dict[str, tuple[Path, str]] = {}
        for path in self._paths():
            for key in _keys(path):
                self._places[_plain(key)] = path, key

    def _paths(self) -> tuple[Path, ...]:
        paths = files.weight_files(self.folder)
        own = self.folder / MEDUSA_FILE
        return (own,) if own.is_file() else paths

    @property
    def keys(self) -> frozenset[str]:
        """Names of all tensors, without the prefix that they have in a checkpoint of a whole
        model."""
        return frozenset(self._places)

    def tensor(self, key: str, shape: Sequence[int]) -> torch.Tensor:
        """Read one tensor to the device. Raises: LoadError if it is missing or has another
        shape."""
        found = self._read(key, shape)
        return found.to(device=self.device, dtype=self._dtype, copy=True)

    def exact(self, key: str, shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
        """Read one tensor to the host without conversion. Raises: LoadError if it is missing, has
        another shape, or a type that is not in `dtypes`."""
        found = self._read(key, shape).clone()
        if found.dtype not in dtypes:
            raise LoadError(
                f"speculation.draft_heads: {self.name}: {key} is of {found.dtype}, and must be of "
                f"{' or '.join(str(dtype) for dtype in dtypes)}; fetch it again"
            )
        return found

    def _read(self, key: str, shape: Sequence[int]) -> torch.Tensor:
        """Return one tensor, mapped from the file; the caller must copy it, or it changes with the
        file."""
        if key not in self._places:
            raise LoadError(
                f"speculation.draft_heads: {self.name} has no tensor {key}; fetch it again, or "
                "name heads in the published format"
            )
        path, saved = self._places[key]
        try:
            with safe_open(path, framework="pt", device="cpu") as source:
                found = tuple(source.get_slice(saved).get_shape())
                if found != tuple(shape):
                    raise LoadError(
                        f"speculation.draft_heads: {self.name}: {key} is {list(found)}, and must "
                        f"be {list(shape)} beside this model; name heads that were made for it"
                    )
                tensor: torch.Tensor = source.get_tensor(saved)
        except (SafetensorError, OSError) as error:
            raise LoadError(f"{path}: cannot be read ({error}); fetch it again") from error
        return tensor

    def optional(self, key: str, shape: Sequence[int]) -> torch.Tensor | None:
        """Read one tensor to the device; None if the checkpoint has none. Raises: LoadError if it
        has another shape."""
        return self.tensor(key, shape) if key in self._places else None

    def check_known(self, known: Iterable[str]) -> None:
        """Check that all tensors are known. Raises: LoadError naming a tensor that would not be
        used, which means that the network differs from the one implemented here."""
        unknown = sorted(self.keys - set(known))
        if unknown:
            raise LoadError(
                f"speculation.draft_heads: {self.name}: {len(unknown)} tensors that this format "
                f"does not have, first {unknown[0]}; name heads in the published format"
            )

    def number(self, field: str, default: int) -> int:
        """Return a count from config.json, or `default` if the field is missing. Raises: LoadError
        if the value is not a count."""
        value = self.config.get(field)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise LoadError(f"{self.folder}/config.json: {field} is {value!r}, not a count; fix it")
        return value


def _keys(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt", device="cpu") as source:
            return list(source.keys())
    except (SafetensorError, OSError) as error:
        raise LoadError(f"{path}: cannot be read ({error}); fetch it again") from error


def _plain(key: str) -> str:
    for prefix in ("medusa_head.", "model."):
        if key.startswith(prefix):
            return key.removeprefix(prefix)
    return key
