"""Which files of a checkpoint folder matter, and whether they are whole. Reads no tensor.

Knows the Hugging Face folder layout: `config.json`, `tokenizer.json`, `model.safetensors` or
`model.safetensors.index.json` with its shards. Does not know what the tensors mean. Pickled weights
are refused, not converted: loading them runs code.

Pure reads; any thread may call.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# The format's own bound on its JSON header.
_MAX_HEADER_BYTES = 100_000_000
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pickle", "*.pkl")


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's `config.json`. Raises: CheckpointError when missing or no JSON object."""
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{folder}: no {CONFIG}; give the folder that a Hugging Face checkpoint was saved to"
        )
    return _read_object(folder / CONFIG)


def check_tokenizer(folder: Path) -> None:
    """Raises: CheckpointError when there is no readable `tokenizer.json`."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: no {TOKENIZER}; save the tokenizer once with "
            "transformers.AutoTokenizer (fast) and save_pretrained"
        )
    _read_object(path)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of the checkpoint, sorted by name, each with a whole header and as long
    as its header says.

    Raises: CheckpointError naming the file that is missing, truncated or of a kind we refuse.
    """
    if (folder / SINGLE).is_file():
        names = [SINGLE]
    elif (folder / INDEX).is_file():
        names = _shards(folder / INDEX)
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise CheckpointError(_no_weights(folder))
    files = tuple(folder / name for name in names)
    for file in files:
        _check_safetensors(file)
    return files


Stamp = tuple[int, int, int, int, int]
"""Device, inode, size, and when a file was written and changed."""


def stamps(folder: Path) -> dict[Path, Stamp]:
    """What tells whether one of a checkpoint's files was replaced or written into between two
    looks: weights, config, tokenizer. Raises: CheckpointError as `weight_files`, or for one that
    went away."""
    found: dict[Path, Stamp] = {}
    for file in (*weight_files(folder), folder / CONFIG, folder / TOKENIZER):
        try:
            stat = file.stat()
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({error})") from error
        found[file] = (
            stat.st_dev,
            stat.st_ino,
            stat.st_size,
            stat.st_mtime_ns,
            stat.st_ctime_ns,
        )
    return found


def check_unchanged(folder: Path, before: dict[Path, Stamp]) -> None:
    """Raises: CheckpointError naming a file that is not what it was when `before` was taken."""
    now = stamps(folder)
    for file in sorted(now.keys() | before.keys()):
        if now.get(file) != before.get(file):
            raise CheckpointError(f"{file} changed while the model was loaded; start again")


def _shards(index: Path) -> list[str]:
    weight_map = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map; fetch the checkpoint again")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index}: shard name {name!r} leaves the folder; refused")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: {len(missing)} of {len(names)} shards missing, first "
            f"{missing[0]}; fetch the checkpoint again"
        )
    return names


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder}: only pickled weights ({pickles[0]}), which can run code when loaded: "
            "refused; convert them to safetensors (save_pretrained does) or choose a checkpoint "
            "that has them"
        )
    return f"{folder}: no .safetensors file; fetch the checkpoint with its weights"


def _check_safetensors(file: Path) -> None:
    """A header that is JSON, and a file exactly as long as the header's last offset says."""
    num_bytes = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else None
        if header_bytes is None or header_bytes > min(_MAX_HEADER_BYTES, num_bytes - 8):
            raise CheckpointError(
                f"{file}: truncated safetensors header ({num_bytes} bytes in all); fetch it again"
            )
        raw = stream.read(header_bytes)
    try:
        header = json.loads(raw)
        ends = [
            int(tensor["data_offsets"][1])
            for name, tensor in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{file}: broken safetensors header; fetch it again") from error
    expected = 8 + header_bytes + max(ends, default=0)
    if num_bytes != expected:
        raise CheckpointError(
            f"{file}: {num_bytes} bytes where its header says {expected}; fetch it again"
        )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object; fetch it again")
    return value
