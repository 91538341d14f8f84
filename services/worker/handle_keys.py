"""HandleKeys: the keys with which a worker signs and verifies handles.

A MAC is keyed BLAKE2b with 32 bytes of key and of output, personalised so that one made for
anything else is none for a handle (RFC 7693, sections 2.5 and 2.8). Which bytes are signed is
`handle`'s business.

The key file is checked for changes (`process.secret_files`, one `stat`) before each signature and
each verification, so that rotated keys take effect, and removed ones stop being valid, without a
restart. Belongs to the loop's thread.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from process import signing_keys
from process.deadline import Clock
from process.errors import Internal
from process.secret_files import WatchedFile
from process.signing_keys import SigningKey

MAC_BYTES = 32
PERSON = b"baton-handle-1"

_Secrets = Mapping[str, bytes]


class HandleKeys:
    """Valid handle keys of one worker, reloaded when their file changes."""

    def __init__(
        self, keys: Sequence[SigningKey], file: WatchedFile[_Secrets] | None = None
    ) -> None:
        """Create from keys, the signing key first. `file` is watched for changes. Without keys
        (`HandleKeys(())`), nothing can be signed and nothing verifies: a worker without a store."""
        self._file = file
        # As they were looked at last: a signature is made by the keys that were asked about.
        self._secrets = file.get() if file is not None else _secrets_of(keys)

    @classmethod
    def load(cls, path: Path, clock: Clock = time.monotonic) -> Self:
        """Read the keys from a file and watch it. clock: seconds, for retries of a changed file
        that could not be read. Raises: SettingsError naming the file and the fix."""
        return cls(
            (),
            WatchedFile(
                "handle_keys_file", [path], lambda: _secrets_of(signing_keys.load(path)), clock
            ),
        )

    @classmethod
    def of(cls, handle_keys_file: str) -> Self:
        """Create from the setting `handle_keys_file`; an empty one gives no keys. Raises:
        SettingsError as `load`."""
        return cls.load(Path(handle_keys_file)) if handle_keys_file else cls(())

    @property
    def num_reloads(self) -> int:
        """Return the number of changes since the start."""
        return self._file.num_reloads if self._file is not None else 0

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Return the ids of the valid keys, the signing key first."""
        return tuple(self._secrets)

    def signing_key_id(self) -> str:
        """Return the id of the key that signs now. Raises: Internal when there is none."""
        self._look()
        if not self._secrets:
            raise Internal("a handle without keys: handle_keys_file is not set")
        return next(iter(self._secrets))

    def mac(self, key_id: str, content: bytes) -> bytes:
        """Compute the 32-byte MAC of `content`. Raises: KeyError for a key that is not valid."""
        secret = self._secrets[key_id]
        return hashlib.blake2b(content, digest_size=MAC_BYTES, key=secret, person=PERSON).digest()

    def is_signed(self, key_id: str, content: bytes, signature: bytes) -> bool:
        """Return whether `signature` is that of `content` under a valid key; compared in constant
        time."""
        if len(signature) != MAC_BYTES:
            return False
        self._look()
        if key_id not in self._secrets:
            return False
        return hmac.compare_digest(self.mac(key_id, content), signature)

    def _look(self) -> None:
        if self._file is not None:
            self._secrets = self._file.get()


def _secrets_of(keys: Sequence[SigningKey]) -> _Secrets:
    return {key.key_id: key.secret for key in keys}
