"""Handle: a signed reference to one prompt's KV, built by a prefill worker and checked by a decode
worker.

A handle comes from another process, so a decode worker trusts nothing in it before these checks:

- `from_proto` rejects a handle that no key of this worker has signed; before the signature it reads
  only the version, which defines how the handle is signed;
- `check` rejects a handle that is not for exactly this tenant, model, layout and prompt, or is past
  its deadline;
- HandleLedger rejects a handle that was used before;
- the blocks that the handle names are verified one by one when they are fetched.

The signature is a keyed BLAKE2b MAC (RFC 7693) with 32 bytes of key and of output, personalised for
handles. It covers an encoding of every field of the message, each of fixed size or preceded by its
length, and lists preceded by their number, so no two messages have the same bytes. Protobuf's own
encoding may differ between versions.

HandleKeys: the keys of one worker. The key file is checked for changes (`process.secret_files`, one
`stat`) before each signature and verification, so rotated keys take effect, and removed ones stop
being valid, without a restart.

HandleLedger: the replay protection of one worker. A nonce is kept until its handle's deadline, and
the allowed clock skew, has passed; from then on the handle is refused as too old. So memory is
bounded by the handles of one deadline's time and by `max_entries`; a handle that does not fit is
refused. A restarted worker has an empty ledger; a replayed handle is then still valid only for its
own request, tenant, model and prompt, and for blocks that verify.

Times are arguments. HandleKeys and HandleLedger are used on the event loop's thread.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
import secrets
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kvstore.block_refs import Block, PackedBlocks
from kvstore.errors import DEADLINE, INCARNATION
from process import signing_keys
from process.deadline import Clock
from process.rpc_errors import BatonError, Internal
from process.secret_files import WatchedFile
from process.signing_keys import SigningKey
from protos import common_pb2
from services.worker.provenance import FINGERPRINT

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


LEDGER_FULL = "ledger_full"

MAX_ENTRIES = 65536
"""Most nonces that are kept: some 10 MiB; at a lease time of 30 s that is 2,000 handles per
second."""


class HandleLedger:
    """Nonces of the handles that were used and have not expired."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._nonces: set[bytes] = set()
        self._newest_over_ms = 0
        self._ends: list[tuple[int, bytes]] = []
        """(deadline_unix_ms, nonce), the next to end first."""

    def __len__(self) -> int:
        return len(self._nonces)

    def take(self, handle: Handle, now_s: float) -> None:
        """Use a verified handle, once. `now_s`: wall clock, seconds.

        Raises: HandleRefused with "replayed" for one that was used before, "deadline" for one that
        is too old, "ledger_full" when no more can be remembered.
        """
        # Never back: a clock that is set back must not let in again what was forgotten.
        newest_over_ms = max(self._newest_over_ms, int((now_s - CLOCK_SLACK_S) * 1000))
        self._newest_over_ms = newest_over_ms
        self._forget(newest_over_ms)
        if handle.nonce in self._nonces:
            raise HandleRefused(REPLAYED, "the handle was used before")
        if handle.deadline_unix_ms < newest_over_ms:
            raise HandleRefused(DEADLINE, "the handle's deadline has passed")
        if len(self._nonces) >= self._max_entries:
            raise HandleRefused(LEDGER_FULL, f"{self._max_entries} handles are remembered already")
        self._nonces.add(handle.nonce)
        heapq.heappush(self._ends, (handle.deadline_unix_ms, handle.nonce))

    def check_integrity(self) -> None:
        """Check the ledger's invariants. Raises: Internal when its two halves differ or the bound
        does not hold."""
        if {nonce for _, nonce in self._ends} != self._nonces or len(self._ends) != len(
            self._nonces
        ):
            raise Internal("handle ledger: nonces and their ends differ")
        if len(self._nonces) > self._max_entries:
            raise Internal("handle ledger: more entries than its bound")

    def _forget(self, newest_over_ms: int) -> None:
        while self._ends and self._ends[0][0] < newest_over_ms:
            _, nonce = heapq.heappop(self._ends)
            self._nonces.discard(nonce)


VERSION = 3
"""Version of the handle format: 1 was not signed; 2 had a message for each block."""

SIGNATURE = "signature"
REPLAYED = "replayed"
OTHER_VERSION = "version"
"""Metrics reasons beside those of `kvstore.errors` and `provenance`: forged, replayed, and from a
worker of another version, whose signature cannot be checked here."""

CLOCK_SLACK_S = 2.0
"""Largest clock difference between two machines in seconds before a handle counts as expired.
Guessed."""

INCARNATION_BYTES = 16
NONCE_BYTES = 16
_TAIL_HASH = b""

WallClock = Callable[[], float]


class HandleRefused(BatonError):
    """Error of a handle that is not used; `reason` is the metrics reason under which its blocks are
    counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class HandleRun:
    """Consecutive blocks of one prompt in one store, pinned by one lease."""

    node_id: str
    store_address: str
    store_incarnation: bytes
    lease_id: str
    first_block: int
    blocks: Sequence[Block]
    """Block references; `PackedBlocks` in a received handle, of which decode mostly has the blocks
    already."""


@dataclass(frozen=True)
class Handle:
    """KV of one prompt: full blocks from block 0 on in `runs`, then the tail."""

    request_id: str
    tenant: str
    adapter: str
    model_fingerprint: str
    producer_id: str
    producer_incarnation: bytes
    block_size: int
    num_tokens: int
    runs: tuple[HandleRun, ...]
    tail: HandleRun | None
    deadline_unix_ms: int
    nonce: bytes
    """Nonce of this handle alone, 16 random bytes from `new_nonce`."""
    is_partial: bool = False
    """Whether prefill is still running: further handles will follow under the same leases, which
    stay the producer's."""

    @property
    def lease_ids(self) -> tuple[str, ...]:
        """Return the distinct lease ids, in order."""
        runs = (*self.runs, *((self.tail,) if self.tail else ()))
        return tuple(dict.fromkeys(run.lease_id for run in runs if run.lease_id))


def new_nonce() -> bytes:
    """Return 16 random bytes for one handle."""
    return secrets.token_bytes(NONCE_BYTES)


def deadline_unix_ms(left_s: float, now: WallClock = time.time) -> int:
    """Return the wall-clock time `left_s` seconds from now, in Unix milliseconds."""
    return int((now() + left_s) * 1000)


def to_proto(handle: Handle, keys: HandleKeys) -> common_pb2.KvHandle:
    """Convert a handle to a signed protobuf message. Raises: Internal when there is no signing
    key."""
    message = common_pb2.KvHandle(
        version=VERSION,
        request_id=handle.request_id,
        tenant=handle.tenant,
        model_fingerprint=bytes.fromhex(handle.model_fingerprint),
        producer_id=handle.producer_id,
        producer_incarnation=handle.producer_incarnation,
        block_size=handle.block_size,
        num_tokens=handle.num_tokens,
        runs=[_run_to_proto(run) for run in handle.runs],
        deadline_unix_ms=handle.deadline_unix_ms,
        adapter=handle.adapter,
        nonce=handle.nonce,
        is_partial=handle.is_partial,
    )
    if handle.tail is not None:
        message.tail.CopyFrom(_run_to_proto(handle.tail))
    sign(message, keys)
    return message


def sign(message: common_pb2.KvHandle, keys: HandleKeys) -> None:
    """Set the key id and signature of a message. Raises: Internal when there is no signing key."""
    message.key_id = keys.signing_key_id()
    message.signature = keys.mac(message.key_id, signed_bytes(message))


def from_proto(message: common_pb2.KvHandle, keys: HandleKeys) -> Handle:
    """Verify a handle message, then parse it.

    Raises: HandleRefused with "version" for another version, "signature" for one that is not signed
    by one of our keys, or with the reason of an invalid shape.
    """
    # Before the signature, which another version makes of other fields: it does nothing but refuse.
    if message.version != VERSION:
        raise HandleRefused(OTHER_VERSION, f"handle version {message.version}, ours is {VERSION}")
    if not keys.is_signed(message.key_id, signed_bytes(message), message.signature):
        raise HandleRefused(SIGNATURE, "the handle is not signed by a key that is valid here")
    if len(message.producer_incarnation) != INCARNATION_BYTES:
        raise HandleRefused(INCARNATION, "the producer's incarnation is not 16 bytes")
    if len(message.nonce) != NONCE_BYTES:
        raise HandleRefused(FINGERPRINT, "the nonce is not 16 bytes")
    return Handle(
        request_id=message.request_id,
        tenant=message.tenant,
        adapter=message.adapter,
        model_fingerprint=message.model_fingerprint.hex(),
        producer_id=message.producer_id,
        producer_incarnation=message.producer_incarnation,
        block_size=message.block_size,
        num_tokens=message.num_tokens,
        runs=tuple(_run_from_proto(run) for run in message.runs),
        tail=_run_from_proto(message.tail) if message.HasField("tail") else None,
        deadline_unix_ms=message.deadline_unix_ms,
        nonce=message.nonce,
        is_partial=message.is_partial,
    )


def check(
    handle: Handle,
    *,
    request_id: str,
    tenant: str,
    adapter: str,
    model_fingerprint: str,
    block_size: int,
    now: WallClock = time.time,
) -> None:
    """Check that a handle is for this request. Raises: HandleRefused with the reason to count."""
    expected = (
        ("request id", handle.request_id, request_id),
        ("tenant", handle.tenant, tenant),
        ("adapter", handle.adapter, adapter),
        ("model fingerprint", handle.model_fingerprint, model_fingerprint.lower()),
        ("block size", handle.block_size, block_size),
    )
    for what, theirs, ours in expected:
        if theirs != ours:
            raise HandleRefused(FINGERPRINT, f"the handle is of another {what}")
    if now() * 1000 > handle.deadline_unix_ms + CLOCK_SLACK_S * 1000:
        raise HandleRefused(DEADLINE, "the handle's deadline has passed")


@dataclass(frozen=True)
class Stretch:
    """Blocks [first, end) of the prompt within one run."""

    run: HandleRun
    first: int
    end: int

    def blocks(self, first: int, end: int) -> Sequence[Block]:
        """Return the references of those blocks of [first, end) that are in this stretch."""
        offset = self.run.first_block
        return self.run.blocks[
            max(first, self.first) - offset : max(0, min(end, self.end) - offset)
        ]


def stretches(handle: Handle, chain_hashes: Sequence[bytes]) -> tuple[list[Stretch], str | None]:
    """Match the handle's full blocks with the prompt's, from block 0 up to the first mismatch.

    Args: chain_hashes: chain hashes of the prompt's full blocks, computed with this worker's tenant
    key.
    Returns: the matching stretches without a gap, and the reason why they end before the handle
    does (None: they do not).
    """
    found: list[Stretch] = []
    first = 0
    for run in handle.runs:
        if run.first_block != first:
            return found, FINGERPRINT
        ours = chain_hashes[first : first + len(run.blocks)]
        num_ours = PackedBlocks.of(run.blocks).num_matching(ours, handle.block_size)
        if num_ours:
            found.append(Stretch(run, first, first + num_ours))
        if num_ours < len(run.blocks):
            return found, FINGERPRINT
        first += num_ours
    return found, None


def tail_stretch(handle: Handle, num_full_blocks: int) -> Stretch | None:
    """Return the tail after `num_full_blocks` full blocks; None if there is none that fits."""
    tail = handle.tail
    if tail is None or tail.first_block != num_full_blocks or len(tail.blocks) != 1:
        return None
    block = tail.blocks[0]
    fits = (
        block.chain_hash == _TAIL_HASH
        and 0 < block.num_tokens < handle.block_size
        and num_full_blocks * handle.block_size + block.num_tokens == handle.num_tokens
    )
    return Stretch(tail, num_full_blocks, num_full_blocks + 1) if fits else None


_HEAD = struct.Struct("<IIIq??I")
_RUN = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


def signed_bytes(message: common_pb2.KvHandle) -> bytes:
    """Return the bytes that are signed: an encoding of every field of the message except the
    signature."""
    parts = [
        _HEAD.pack(
            message.version,
            message.block_size,
            message.num_tokens,
            message.deadline_unix_ms,
            message.is_partial,
            message.HasField("tail"),
            len(message.runs),
        )
    ]
    _add_sized(
        parts,
        message.key_id.encode(),
        message.nonce,
        message.request_id.encode(),
        message.tenant.encode(),
        message.adapter.encode(),
        message.model_fingerprint,
        message.producer_id.encode(),
        message.producer_incarnation,
    )
    for run in message.runs:
        _add_run(parts, run)
    if message.HasField("tail"):
        _add_run(parts, message.tail)
    return b"".join(parts)


def _add_run(parts: list[bytes], run: common_pb2.BlockRun) -> None:
    parts.append(_RUN.pack(run.first_block))
    _add_sized(
        parts,
        run.node_id.encode(),
        run.store_address.encode(),
        run.store_incarnation,
        run.lease_id.encode(),
        run.blocks,
    )


def _add_sized(parts: list[bytes], *values: bytes) -> None:
    for value in values:
        parts += (_LENGTH.pack(len(value)), value)


def _run_to_proto(run: HandleRun) -> common_pb2.BlockRun:
    return common_pb2.BlockRun(
        node_id=run.node_id,
        store_address=run.store_address,
        store_incarnation=run.store_incarnation,
        lease_id=run.lease_id,
        first_block=run.first_block,
        blocks=PackedBlocks.of(run.blocks).data,
    )


def _run_from_proto(run: common_pb2.BlockRun) -> HandleRun:
    try:
        blocks = PackedBlocks(run.blocks)
    except ValueError as error:
        raise HandleRefused(FINGERPRINT, f"a run of {error}") from error
    return HandleRun(
        node_id=run.node_id,
        store_address=run.store_address,
        store_incarnation=run.store_incarnation,
        lease_id=run.lease_id,
        first_block=run.first_block,
        blocks=blocks,
    )
