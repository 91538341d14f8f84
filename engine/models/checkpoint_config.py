"""CheckpointConfig: the contents of a checkpoint's config files as transformers reads them; and
Rehearsed: a cache of them and of passed architecture checks, kept between starts.

Reading a config and checking its architecture imports transformers' modelling code, which takes two
of the five CPU seconds of a worker's start. Both depend only on the config files, the libraries and
this code, so a start that finds their digest in the cache folder skips them. A failed check is
never cached. Of several starts at once, as on a node with several workers, one does the check.
Start-up only.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import baton_kernels
import torch

import engine
from engine.errors import LoadError
from engine.models.llama import LlamaConfig, read_llama_config, unsupported_reason

logger = logging.getLogger(__name__)

_FILES = ("config.json", "generation_config.json")
_CODE = (*engine.__path__, *baton_kernels.__path__)
_PRIVATE = 0o700
_WAIT_S = 30.0
"""Longest wait in seconds for another start that checks the same files: a check takes three
seconds, ten with few cores."""
_POLL_S = 0.05

Way = Literal["transformers", "own", "own kernels"]
"""A way to compute a model: "transformers": transformers' modelling code; "own": LlamaDecoder with
torch's attention; "own kernels": LlamaDecoder with the kernels (on a CPU: their reference)."""


@dataclass(frozen=True)
class CheckpointConfig:
    """The parts of config.json and generation_config.json that a start needs."""

    model_type: str
    vocab_size: int
    max_position_embeddings: int | None
    """The longest context that the model was made for, in tokens; None: the config names none."""

    eos_token_ids: tuple[int, ...]
    """EOS token ids of both files together, sorted."""

    refusal: str
    """Why LlamaDecoder does not support the model; "": it does."""

    shape: LlamaConfig | None
    """The sizes for LlamaDecoder; None: it does not support the model."""

    @property
    def decoder_shape(self) -> LlamaConfig:
        """The sizes for LlamaDecoder. Raises: ValueError with `refusal` if it does not support the
        model."""
        if self.shape is None:
            raise ValueError(self.refusal)
        return self.shape


def transformers_config(folder: Path) -> Any:
    """Read config.json with transformers. Returns: a transformers config. Raises: LoadError if
    transformers rejects the file."""
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        line = str(error).splitlines()[0]
        raise LoadError(
            f"{folder}/config.json: transformers refuses it ({line}); fix or fetch it again"
        ) from error


def read_checkpoint_config(folder: Path) -> CheckpointConfig:
    """Read a CheckpointConfig from a folder, with transformers. Raises: LoadError if transformers
    rejects the file."""
    config = transformers_config(folder)
    reason = unsupported_reason(config)
    positions = getattr(config, "max_position_embeddings", None)
    return CheckpointConfig(
        model_type=config.model_type,
        vocab_size=int(config.vocab_size),
        max_position_embeddings=None if positions is None else int(positions),
        eos_token_ids=_eos_token_ids(folder, config),
        refusal=reason or "",
        shape=read_llama_config(config) if reason is None else None,
    )


def _eos_token_ids(folder: Path, config: Any) -> tuple[int, ...]:
    import transformers

    found: set[int] = set()
    named = [config.eos_token_id]
    if (folder / "generation_config.json").is_file():
        named.append(transformers.GenerationConfig.from_pretrained(folder).eos_token_id)
    for value in named:
        if value is not None:
            found.update(value if isinstance(value, list | tuple) else [value])
    return tuple(sorted(found))


class Rehearsed:
    """The cached results of earlier starts for one checkpoint's config files: one JSON file.

    A file that cannot be read, that another user owns or may write, or that has another form, is
    ignored and replaced; if none can be written, each start reads and checks the config itself.

    Args:
        folder: the checkpoint's folder.
        cache: the folder of the cache files; None: `cache_folder()`.
        code: folders of Python files that the results depend on.
    """

    def __init__(
        self, folder: Path, cache: Path | None = None, *, code: Sequence[str] = _CODE
    ) -> None:
        self._cache = cache_folder() if cache is None else cache
        self._path: Path | None = None
        if self._cache is not None:
            self._path = self._cache / f"{_digest(folder, code)}.json"
        self.config: CheckpointConfig | None = None
        self._ways: set[str] = set()
        self._look()

    def _look(self) -> None:
        if self._path is not None:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                self.config, self._ways = _read(self._path)

    @contextlib.contextmanager
    def alone(self, wait_s: float = _WAIT_S) -> Iterator[None]:
        """Return a context that one start of the same files enters at a time, if nothing is cached;
        the results of the start before it are loaded on entry. After `wait_s` seconds it is
        entered all the same."""
        with contextlib.ExitStack() as held:
            if self.config is None and self._path is not None:
                with contextlib.suppress(OSError):  # as `keep`: each start for itself
                    self._path.parent.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
                    lock = held.enter_context(self._path.with_suffix(".lock").open("a"))
                    _take(lock.fileno(), wait_s)
                self._look()
            yield

    def has(self, way: Way) -> bool:
        """Whether a check of this config, run in this way, has passed."""
        return self.config is not None and way in self._ways

    def keep(self, config: CheckpointConfig, way: Way) -> None:
        """Store that a check of this config, run in this way, has passed. A failure to write is
        logged."""
        self.config = config
        self._ways.add(way)
        if self._path is None or self._cache is None:
            return
        text = json.dumps({"config": asdict(config), "ways": sorted(self._ways)})
        try:
            self._cache.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._cache, delete=False) as file:
                file.write(text)
            Path(file.name).replace(self._path)
        except OSError as error:
            logger.info("the next start rehearses the model again: %s", error)


def cache_folder() -> Path | None:
    """Return the folder of cache files, under XDG_CACHE_HOME or ~/.cache; None for a user without a
    home."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        return None
    return cache / "baton" / "rehearsed"


def _take(lock: int, wait_s: float) -> None:
    """Lock an open file until it is closed, or give up after `wait_s` seconds if another process
    holds the lock. Raises: OSError if the file system has no locks."""
    ends_s = time.monotonic() + wait_s
    while time.monotonic() < ends_s:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_S)
        else:
            return


def _read(path: Path) -> tuple[CheckpointConfig, set[str]]:
    """Read a file that `keep` wrote. Raises: OSError, ValueError, TypeError or KeyError for any
    other file."""
    with path.open() as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
            raise ValueError(f"{path} could be another user's")
        kept = json.load(file)
    fields = dict(kept["config"])
    fields["eos_token_ids"] = tuple(fields["eos_token_ids"])
    if fields["shape"] is not None:
        shape = dict(fields["shape"])
        for name in ("windows", "rope_frequencies"):
            shape[name] = tuple(shape[name])
        fields["shape"] = LlamaConfig(**shape)
    return CheckpointConfig(**fields), set(kept["ways"])


def _digest(folder: Path, code: Sequence[str]) -> str:
    """Return a digest of all that a check depends on: the config files, the libraries, this code,
    the CPU."""
    digest = hashlib.blake2b(digest_size=16, person=b"baton-rehearsed")
    for name in _FILES:
        path = folder / name
        _add(digest, path.read_bytes() if path.is_file() else b"")
    for package in ("torch", "transformers"):
        _add(digest, metadata.version(package).encode())
    _add(digest, f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}".encode())
    for root in code:
        for path in sorted(Path(root).rglob("*.py")):
            _add(digest, path.read_bytes())
    return digest.hexdigest()


def _add(digest: Any, data: bytes) -> None:
    digest.update(len(data).to_bytes(8, "little"))
    digest.update(data)
