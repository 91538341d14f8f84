"""CheckpointConfig: what a checkpoint's config files say as transformers reads them; and Rehearsed,
which keeps it between starts.

Reading and rehearsing a config imports transformers' modelling code: two of the five CPU seconds
that a worker's start took. Both depend on nothing but the config files, the libraries and this
code, so a start that finds their digest in the cache folder imports none of it. A rehearsal that
failed is never kept. Of several starts at once, as on a node with several workers, one does it.
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
"""For another start that rehearses the same: it takes three, ten where the cores are few."""
_POLL_S = 0.05

Way = Literal["transformers", "own", "own kernels"]
"""How a model is computed: by transformers' code; by our own decoder with torch's attention; by our
own decoder with the kernels (of a CPU: their reference)."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What a start needs of config.json and generation_config.json."""

    model_type: str
    vocab_size: int
    max_position_embeddings: int | None
    """The longest context that the model was made for, in tokens; None: the config names none."""

    eos_token_ids: tuple[int, ...]
    """Of both files together, sorted."""

    refusal: str
    """Why our own decoder does not compute it; "": it does."""

    shape: LlamaConfig | None
    """For our own decoder; None: it does not compute this model."""

    @property
    def decoder_shape(self) -> LlamaConfig:
        """Raises: ValueError with `refusal`."""
        if self.shape is None:
            raise ValueError(self.refusal)
        return self.shape


def transformers_config(folder: Path) -> Any:
    """transformers' own object. Raises: LoadError where it refuses the file."""
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, TypeError, KeyError) as error:
        line = str(error).splitlines()[0]
        raise LoadError(
            f"{folder}/config.json: transformers refuses it ({line}); fix or fetch it again"
        ) from error


def read_checkpoint_config(folder: Path) -> CheckpointConfig:
    """By transformers. Raises: LoadError, as `transformers_config`."""
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
    """What earlier starts found out about one checkpoint's config files: one JSON file.

    A file that cannot be read, is another user's or can be written by one, or has another form, is
    passed over and written anew; where none can be written, each start reads and rehearses.

    Args:
        folder: of the checkpoint.
        cache: where such files lie; None: `cache_folder()`.
        code: folders of Python files that a rehearsal depends on.
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
        """Where nothing is kept yet, the body runs when no other start's does for the same files,
        after at most `wait_s` beside it; what that one kept is known then."""
        with contextlib.ExitStack() as held:
            if self.config is None and self._path is not None:
                with contextlib.suppress(OSError):  # as `keep`: each start for itself
                    self._path.parent.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
                    lock = held.enter_context(self._path.with_suffix(".lock").open("a"))
                    _take(lock.fileno(), wait_s)
                self._look()
            yield

    def has(self, way: Way) -> bool:
        """A rehearsal of this config by this way passed."""
        return self.config is not None and way in self._ways

    def keep(self, config: CheckpointConfig, way: Way) -> None:
        """Such a rehearsal passed. What cannot be written is logged."""
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
    """Under XDG_CACHE_HOME, ~/.cache where that is not set; None for a user without a home."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        return None
    return cache / "baton" / "rehearsed"


def _take(lock: int, wait_s: float) -> None:
    """Have the lock of an open file, which the kernel takes back when that is closed; go on without
    where another process has it for so long. Raises: OSError where the file system has no locks."""
    ends_s = time.monotonic() + wait_s
    while time.monotonic() < ends_s:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL_S)
        else:
            return


def _read(path: Path) -> tuple[CheckpointConfig, set[str]]:
    """Raises: OSError, ValueError, TypeError, KeyError for what `keep` did not write."""
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
    """Of all that a rehearsal depends on: the config files, the libraries, this code, the CPU."""
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
