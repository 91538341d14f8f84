"""Fetch a checkpoint's files from the Hugging Face hub into its own cache.

The one module that imports huggingface_hub; it turns that library's errors into one line each.
Knows names and file patterns, not what is in the files. Blocking.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils.tqdm import tqdm

from checkpoints.digests import Progress
from checkpoints.errors import CheckpointError

_TOKENIZER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
# Copies of the same weights in another layout: other people's loaders, subfolders.
_NOT_OURS = ("*/*", "consolidated*")


def fetch(
    name: str, revision: str | None, *, with_weights: bool, progress: Progress | None
) -> Path:
    """The snapshot's folder in the hub cache, fetched as far as it was not there.

    Raises: CheckpointError when the hub refuses, cannot be reached, or is switched off and the
    cache does not have it.
    """
    shown = f"{name}@{revision}" if revision else name
    patterns = [*_TOKENIZER_FILES, *(_WEIGHT_FILES if with_weights else ())]
    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=list(_NOT_OURS),
                tqdm_class=None if progress is None else _bar_class(progress, shown),
            )
        )
    except hub_errors.GatedRepoError:
        raise CheckpointError(
            f"{shown}: the hub asks you to accept its terms first; do so on its page, then set "
            "HF_TOKEN or run `hf auth login`"
        ) from None
    except hub_errors.RepositoryNotFoundError:
        raise CheckpointError(
            f"{shown}: not on the hub, or private; check the spelling, or set HF_TOKEN"
        ) from None
    except hub_errors.RevisionNotFoundError:
        raise CheckpointError(f"{shown}: the hub has no such revision; check it") from None
    except hub_errors.LocalEntryNotFoundError as error:
        raise CheckpointError(_unreachable(shown, error)) from None
    except Exception as error:
        # This is the border to that library, whose HTTP stack (and with it the roots of its errors)
        # differs from version to version.
        raise CheckpointError(
            f"{shown}: fetching it failed ({type(error).__name__}: {_first_line(error)}); try again"
        ) from error


def _unreachable(shown: str, error: Exception) -> str:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return f"{shown}: not in the cache, and HF_HUB_OFFLINE is set; unset it, or give a folder"
    endpoint = os.environ.get("HF_ENDPOINT", "the hub")
    return (
        f"{shown}: {endpoint} cannot be reached and the local cache does not have it; check the "
        f"network or HF_ENDPOINT, or give a folder ({_first_line(error)})"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _bar_class(progress: Progress, shown: str) -> type[tqdm]:
    """A bar that draws nothing and tells `progress` how many bytes are there.

    The hub makes one bar per kind of count; we report the one that counts bytes written.
    """

    class Bar(tqdm):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            keywords.pop("name", None)
            keywords.update(file=io.StringIO(), disable=False)
            self._is_bytes = keywords.get("unit") == "B"
            super().__init__(*arguments, **keywords)  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            result: bool | None = super().update(n)
            if self._is_bytes and not str(self.desc or "").startswith("Downloading bytes"):
                progress(f"fetch {shown}", int(self.n), int(self.total or 0))
            return result

    return Bar
