"""Digests of a checkpoint's parts, which the model fingerprint is made of.

Two folders have equal digests exactly if they would compute the same thing, wherever they lie:
paths and file names do not count. All are lower-case hex of 32 bytes of BLAKE2b.

Any thread may call; `weights_digest` reads every byte and lets other threads run meanwhile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from checkpoints import files

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done so far, in all); the unit is bytes."""

_CHUNK_BYTES = 16 * 1024 * 1024
_DIGEST_BYTES = 32


def tokenizer_digest(folder: Path) -> str:
    """Of `tokenizer.json`'s bytes: the whole map between text and token ids lies in it.

    Chat templates and defaults lie elsewhere and do not count: KV belongs to token ids.
    Raises: CheckpointError when it is missing.
    """
    files.check_tokenizer(folder)
    return _hex((folder / files.TOKENIZER).read_bytes(), b"tokenizer")


def config_digest(folder: Path) -> str:
    """Of `config.json` as a value: the order of keys and white space do not count.

    The version of the library that saved it and the path it was loaded from do not count either.
    Raises: CheckpointError when it is missing.
    """
    config = files.read_config(folder)
    kept = {
        key: value
        for key, value in config.items()
        if key not in ("transformers_version", "_name_or_path")
    }
    return _hex(json.dumps(kept, sort_keys=True).encode(), b"config")


def weights_digest(folder: Path, progress: Progress | None = None) -> str:
    """Of the safetensors files' contents in the order of their names, each preceded by its length.

    Raises: CheckpointError when a file is missing or truncated.
    """
    weight_files = files.weight_files(folder)
    total = sum(file.stat().st_size for file in weight_files)
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"baton-weights")
    done = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for file in weight_files:
        digest.update(file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(buffer[:count])
                done += count
                if progress is not None:
                    progress("verify weights", done, total)
    return digest.hexdigest()


def _hex(data: bytes, person: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, person=b"baton-" + person).hexdigest()
