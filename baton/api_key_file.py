"""Adds and removes keys in a file of API keys, and leaves the rest of the file as it is.

Readers see the old file or the new one. Blocking; any thread.
"""

from __future__ import annotations

import re
from pathlib import Path

from baton.errors import BatonError
from process import api_keys
from process.secret_files import replace_file

_HEAD = "# API keys of a Baton deployment: digests, no secrets. Written by `baton api-key`.\n"


class KeyFileError(BatonError):
    """A file of API keys cannot be changed; the message says why."""


def add(path: Path, key_id: str, entry: api_keys.ApiKey) -> None:
    """Add an API key to a file, which is made if it does not exist. Raises: SettingsError where the
    file is not one of API keys; KeyFileError."""
    text = _HEAD
    if path.exists():
        api_keys.load(path)
        text = path.read_text(encoding="utf-8").rstrip("\n") + "\n"
    lines = [f"\n[keys.{key_id}]", f'tenant = "{entry.tenant}"', f'digest = "{entry.digest}"']
    lines += ["is_admin = true"] if entry.is_admin else []
    lines += [f"min_priority = {entry.min_priority}", f"max_priority = {entry.max_priority}"]
    lines += [f'expires = "{entry.expires}"'] if entry.expires else []
    _replace(path, text + "\n".join(lines) + "\n")


def remove(path: Path, key_id: str) -> None:
    """Remove an API key from a file. Raises: SettingsError; KeyFileError where the file does not
    have it."""
    if key_id not in api_keys.load(path).keys:
        raise KeyFileError(f"{path}: has no key {key_id!r}; `baton api-key list` shows them")
    table = re.compile(rf"^\[keys\.{re.escape(key_id)}\][^\n]*\n(?:(?!\[)[^\n]*\n?)*", re.MULTILINE)
    text = table.sub("", path.read_text(encoding="utf-8"), count=1)
    _replace(path, text)
    if key_id in api_keys.load(path).keys:
        raise KeyFileError(
            f"{path}: key {key_id} is not written as `baton api-key` writes it; remove it by hand"
        )


def _replace(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never a part."""
    try:
        replace_file(path, text)
    except PermissionError as error:
        raise KeyFileError(
            f"{path}: {error.strerror}; change it as its owner, or as root"
        ) from error
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}") from error
