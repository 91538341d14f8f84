"""The keys under which handles are signed and verified, as one worker holds them.

A MAC is keyed BLAKE2b with 32 bytes of key and of output, personalised so that one made for
anything else is none for a handle (RFC 7693, sections 2.5 and 2.8). Which bytes are signed is
`handle`'s business.

The file is read again when it has changed: looked at before each signature and each check of one,
so that a rotated secret is taken up, and a dropped one is of no use any more, without a restart. A
file that cannot be read then changes nothing but the log, and is tried again: the keys that were
valid stay so. Belongs to the loop's thread; a look is one `stat`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from process import keys as key_files
from process import logs
from process.errors import Internal
from process.keys import Key
from process.settings import SettingsError

logger = logging.getLogger(__name__)

MAC_BYTES = 32
PERSON = b"baton-handle-1"

_Look = tuple[int, int, int, int, int, int]

RETRY_S = 1.0
"""How soon a changed file that could not be read is tried again."""


class HandleKeys:
    """See the module."""

    def __init__(self, keys: Sequence[Key], path: Path | None = None) -> None:
        """Keys, the one that signs first; `path`: where changes of them are looked for.

        Without any (`HandleKeys(())`) nothing can be signed and nothing verifies: a worker without
        a store.
        """
        self._path = path
        self._look = _look(path)
        self._take(keys)
        self.num_reloads = 0
        self._retry_at_s = 0.0

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises: SettingsError naming the file and the fix."""
        look = _look(path)
        keys = cls(key_files.load(path), path)
        keys._look = look  # of before the read: a change in between is seen by the next look
        return keys

    @classmethod
    def of(cls, handle_keys_file: str) -> Self:
        """Those of a setting; an empty one has none. Raises: SettingsError as `load`."""
        return cls.load(Path(handle_keys_file)) if handle_keys_file else cls(())

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Of the valid keys, the one that signs first."""
        return tuple(self._secrets)

    def signing_key_id(self) -> str:
        """The key that signs now. Raises: Internal when there is none."""
        self._reload()
        if not self._secrets:
            raise Internal("a handle without keys: handle_keys_file is not set")
        return next(iter(self._secrets))

    def mac(self, key_id: str, content: bytes) -> bytes:
        """32 bytes. Raises: KeyError for a key that is not valid (any more)."""
        secret = self._secrets[key_id]
        return hashlib.blake2b(content, digest_size=MAC_BYTES, key=secret, person=PERSON).digest()

    def is_signed(self, key_id: str, content: bytes, signature: bytes) -> bool:
        """Whether `signature` is of `content` under a valid key; compared in constant time."""
        if len(signature) != MAC_BYTES:
            return False
        self._reload()
        if key_id not in self._secrets:
            return False
        return hmac.compare_digest(self.mac(key_id, content), signature)

    def _take(self, keys: Sequence[Key]) -> None:
        self._secrets = {key.key_id: key.secret for key in keys}

    def _reload(self) -> None:
        look = _look(self._path)
        if self._path is None or look == self._look or time.monotonic() < self._retry_at_s:
            return
        try:
            self._take(key_files.load(self._path))
        except SettingsError as error:
            self._retry_at_s = time.monotonic() + RETRY_S
            logs.event(
                logger, "handle_keys_not_reloaded", level=logging.WARNING, problem=str(error)
            )
            return
        self._look = look  # of before the read: a change in between is seen by the next look
        self.num_reloads += 1
        logs.event(logger, "handle_keys_reloaded", key_ids=self.key_ids)


def _look(path: Path | None) -> _Look | None:
    """What changes when the file does; None: there is none to look at."""
    if path is None:
        return None
    try:
        found = path.stat()
    except OSError:
        return None
    # Of a change of mode or owner only ctime tells, and it may be the fix that was asked for.
    return (
        found.st_dev,
        found.st_ino,
        found.st_mtime_ns,
        found.st_ctime_ns,
        found.st_mode,
        found.st_size,
    )
