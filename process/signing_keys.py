"""The file of keys with which a deployment signs its handles: read, made, rotated. Blocking; any
thread.

One key a line, `key_id:64 hex digits`; `#` begins a comment. The first key signs and all verify, so
that the old key stays valid while it is rotated. Only the owner (and, for secrets that a pod
mounts, its group) may read the file.

A rotation where all processes read one file is one step (`rotate`). Where copies of the file arrive
at different moments it is three: `add_next` everywhere, then `use_next`, then `drop_old`; no
process ever meets a key that it does not know.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from process import secret_files
from process.settings import SettingsError

KEY_BYTES = 32
"""Length of a signing key's secret."""

MAX_KEYS = 4
"""Most keys in a file: one that signs, one that is coming, and old ones."""

MAX_FILE_BYTES = 64 * 1024
"""Largest file that is read, far above any key file: a longer one was named by mistake."""

_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SECRET = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True)
class SigningKey:
    """A key that signs and verifies the handles of KV blocks."""

    key_id: str
    """Name of the key in signatures; no secret."""
    secret: bytes = field(repr=False)
    """The secret: 32 bytes."""

    def __post_init__(self) -> None:
        if not _KEY_ID.fullmatch(self.key_id):
            raise SettingsError(f"key id {self.key_id!r}: must be 1 to 64 of A-Z a-z 0-9 . _ -")
        if len(self.secret) != KEY_BYTES:
            raise SettingsError(f"key {self.key_id}: must have {KEY_BYTES} bytes")


def new_key() -> SigningKey:
    """Make a random key under a random name."""
    return SigningKey(f"k-{secrets.token_hex(6)}", secrets.token_bytes(KEY_BYTES))


def load(path: Path) -> tuple[SigningKey, ...]:
    """Read the keys of a file, the one that signs first.

    Raises: SettingsError naming the file, the line and the fix. A key is never part of a message.
    """
    content = secret_files.read_secret(
        path,
        what="key file",
        max_bytes=MAX_FILE_BYTES,
        fix=f"`baton keys new {path}` makes one",
    )
    try:
        text = content.decode("ascii")
    except UnicodeDecodeError:
        raise SettingsError(f"key file {path}: is no text of key_id:hex lines") from None
    return parse(text, where=f"key file {path}")


def parse(text: str, *, where: str) -> tuple[SigningKey, ...]:
    """Read keys from the text of a key file. Raises: SettingsError as `load`."""
    keys: list[SigningKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        key_id, colon, digits = (part.strip() for part in line.partition(":"))
        if not (colon and _KEY_ID.fullmatch(key_id) and _SECRET.fullmatch(digits)):
            raise SettingsError(f"{where}, line {number}: is not key_id:64 hex digits")
        keys.append(SigningKey(key_id, bytes.fromhex(digits)))
    check(keys, where=where)
    return tuple(keys)


def check(keys: Sequence[SigningKey], *, where: str) -> None:
    """Check the keys of a file. Raises: SettingsError for no key, too many, or two that are the
    same."""
    if not keys:
        raise SettingsError(f"{where}: holds no key; `baton keys new FILE` makes one")
    if len(keys) > MAX_KEYS:
        raise SettingsError(f"{where}: {len(keys)} keys, at most {MAX_KEYS}; remove the oldest")
    if len({key.key_id for key in keys}) < len(keys):
        raise SettingsError(f"{where}: the same key id twice")
    if len({key.secret for key in keys}) < len(keys):
        raise SettingsError(f"{where}: the same key under two ids")


def create(path: Path) -> SigningKey:
    """Make a key file with one new key, readable by its owner only. Returns: the key.

    Raises: SettingsError when there is a file already, or no place for one.
    """
    key = new_key()
    try:
        path.touch(mode=0o600, exist_ok=False)
    except FileExistsError:
        raise SettingsError(
            f"key file {path}: is there already; `baton keys rotate {path}` adds a key to it"
        ) from None
    except OSError as error:
        raise SettingsError(f"key file {path}: {error.strerror}") from error
    try:
        _replace(path, [key])
    except BaseException:
        path.unlink(missing_ok=True)  # empty, and not there before
        raise
    return key


def rotate(path: Path) -> SigningKey:
    """Add a new key to a file, which signs from now on; the one that signed before stays valid,
    older ones are removed. Returns: the new key."""
    old = load(path)
    key = new_key()
    _replace(path, [key, old[0]])
    return key


def add_next(path: Path) -> SigningKey:
    """Add a new key to a file that verifies and does not sign yet: the first of three steps of a
    rotation. Returns: the new key."""
    old = load(path)
    key = new_key()
    keys = [*old, key]
    check(keys, where=f"key file {path}")
    _replace(path, keys)
    return key


def use_next(path: Path) -> SigningKey:
    """Let the key that was added last sign; the others stay valid: the second step of a rotation.
    Returns: that key."""
    old = load(path)
    if len(old) < 2:
        raise SettingsError(f"key file {path}: holds one key only; add the next one first")
    _replace(path, [old[-1], *old[:-1]])
    return old[-1]


def drop_old(path: Path) -> SigningKey:
    """Remove all keys of a file but the one that signs: the third step of a rotation. Returns: the
    key that is left."""
    old = load(path)
    _replace(path, old[:1])
    return old[0]


def _replace(path: Path, keys: Sequence[SigningKey]) -> None:
    try:
        secret_files.replace_file(path, _text(keys))
    except PermissionError as error:
        raise SettingsError(
            f"key file {path}: {error.strerror}; change it as its owner, or as root"
        ) from error
    except OSError as error:
        raise SettingsError(f"key file {path}: {error.strerror}") from error


def _text(keys: Sequence[SigningKey]) -> str:
    lines = ["# Keys of a Baton deployment. Secret. The first signs, all verify."]
    return "\n".join([*lines, *(f"{key.key_id}:{key.secret.hex()}" for key in keys), ""])
