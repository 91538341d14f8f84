"""Digests of a checkpoint's parts, which the model fingerprint is made of.

Two folders have equal digests exactly if they would compute the same thing, wherever they lie:
paths and file names do not count. All are lower-case hex of 32 bytes of BLAKE2b.

Any thread may call; `weights_digest` reads every byte, on all cores, and lets other threads run
meanwhile.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from checkpoints import files
from checkpoints.errors import CheckpointError

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, done so far, in all); the unit is bytes."""

_CHUNK_BYTES = 4 * 1024 * 1024
PIECE_BYTES = 64 * 1024 * 1024
"""What one thread digests at a time. Part of what the digest is: another size, another digest."""
_MAX_THREADS = 16
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


def weights_digest(
    folder: Path, progress: Progress | None = None, *, piece_bytes: int = PIECE_BYTES
) -> str:
    """Of the safetensors files' contents in the order of their names: each one's length, and the
    digests of its pieces, which several threads take at once.

    Raises: CheckpointError when a file is missing or truncated.
    """
    weight_files = files.weight_files(folder)
    sizes = [file.stat().st_size for file in weight_files]
    pieces = [
        (file, first, min(piece_bytes, size - first))
        for file, size in zip(weight_files, sizes, strict=True)
        for first in range(0, size, piece_bytes)
    ]
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"baton-weights2")
    for size in sizes:
        digest.update(size.to_bytes(8, "little"))
    done = 0
    pool = concurrent.futures.ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))
    try:
        for found, (_, _, size) in zip(pool.map(_piece_digest, pieces), pieces, strict=True):
            digest.update(found)
            done += size
            if progress is not None:
                progress("verify weights", done, sum(sizes))
    finally:
        pool.shutdown(cancel_futures=True)
    return digest.hexdigest()


def _piece_digest(piece: tuple[Path, int, int]) -> bytes:
    """Of (file, first byte, number of bytes)."""
    file, first, left = piece
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES, person=b"baton-piece")
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, left)))
    with file.open("rb", buffering=0) as stream:
        stream.seek(first)
        while left > 0:
            count = stream.readinto(buffer[: min(left, len(buffer))])
            if not count:
                raise CheckpointError(f"{file} became shorter while it was read")
            digest.update(buffer[:count])
            left -= count
    return digest.digest()


def _hex(data: bytes, person: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, person=b"baton-" + person).hexdigest()
