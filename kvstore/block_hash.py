"""Hashes of KV blocks: the chain hash, which names a block by its tokens and all tokens before it
(the key of the prefix cache), and the checksum of its bytes.

Pure functions over bytes and token ids, for any thread; `HashTurns` runs them on an asyncio loop.
No torch, no I/O. A chain hash is keyed by (tenant salt, model fingerprint, adapter), so equal
tokens of two tenants, models or adapters have different hashes. Only full blocks have one.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
import itertools
import struct
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

CHAIN_HASH_BYTES = 16
_START = bytes(CHAIN_HASH_BYTES)
_ROOT_PERSON = b"baton-root-v1"
_CHAIN_PERSON = b"baton-chain-v1"
TURN_TOKENS = 1024
"""Least number of tokens that HashTurns hashes in one turn of the loop: 0.05 ms, about the cost of
the turn itself."""

MAX_LOOP_SHARE = 0.2
"""Most of the loop's time that HashTurns takes while more prompts wait, as a part of 1. With one
part a turn, long turns of other work would let prompts come faster than they are hashed. Not
measured."""


def root_key(tenant_salt: bytes, model_fingerprint: str, adapter: str = "") -> bytes:
    """The 32-byte key of every chain hash of one (tenant, model, adapter).

    Args: tenant_salt: any bytes. model_fingerprint: hex digits, case does not matter. adapter:
        empty for none.
    Raises: ValueError if the fingerprint is not hex.
    """
    digest = hashlib.blake2b(digest_size=32, person=_ROOT_PERSON)
    for part in (tenant_salt, bytes.fromhex(model_fingerprint), adapter.encode("utf-8")):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def extend(root: bytes, parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The 16-byte chain hash of one full block that follows `parent` (empty at the start of a
    prompt).

    Raises: ValueError for a parent of another length, OverflowError for an id outside 0..2^32-1.
    """
    if parent and len(parent) != CHAIN_HASH_BYTES:
        raise ValueError(f"parent: a chain hash has {CHAIN_HASH_BYTES} bytes, got {len(parent)}")
    digest = hashlib.blake2b(
        parent or _START, key=root, digest_size=CHAIN_HASH_BYTES, person=_CHAIN_PERSON
    )
    digest.update(_token_bytes(token_ids))
    return digest.digest()


def chain(
    root: bytes, token_ids: Sequence[int], block_size: int, parent: bytes = b""
) -> list[bytes]:
    """The chain hashes of the FULL blocks of `token_ids`, the first one following `parent`.

    Returns: len(token_ids) // block_size hashes of 16 bytes; an unfilled last block has none.
    """
    if block_size < 1:
        raise ValueError(f"block_size: must be at least 1, got {block_size}")
    num_hashed = len(token_ids) // block_size * block_size
    if not num_hashed:
        return []
    if parent and len(parent) != CHAIN_HASH_BYTES:
        raise ValueError(f"parent: a chain hash has {CHAIN_HASH_BYTES} bytes, got {len(parent)}")
    data = _token_bytes(token_ids[:num_hashed])
    hashes: list[bytes] = []
    # As `extend`, block by block, at a fifth of its price: the key is taken in once.
    keyed = hashlib.blake2b(key=root, digest_size=CHAIN_HASH_BYTES, person=_CHAIN_PERSON)
    parent = parent or _START
    for (block,) in struct.iter_unpack(f"{block_size * 4}s", data):
        digest = keyed.copy()
        digest.update(parent + block)
        parent = digest.digest()
        hashes.append(parent)
    return hashes


def chain_on(
    root: bytes, hashes: Sequence[bytes], parts: Iterable[Sequence[int]], block_size: int
) -> list[bytes]:
    """The chain hashes of a prompt given as consecutive `parts`, whose first blocks have the known
    `hashes`: only the tokens after those blocks are read and hashed.

    Returns: `hashes`, and those of the full blocks that follow. Raises: as `chain`.
    """
    num_known = len(hashes) * block_size
    rest: list[int] = []
    for part in parts:
        rest.extend(part[num_known:])
        num_known = max(num_known - len(part), 0)
    return [*hashes, *chain(root, rest, block_size, hashes[-1] if hashes else b"")]


def checksum(view: bytes | bytearray | memoryview | npt.NDArray[np.uint8]) -> int:
    """The XXH3-64 checksum of a contiguous buffer. It finds torn and corrupt bytes; it is no
    protection against an attacker."""
    return xxhash.xxh3_64_intdigest(view.data if isinstance(view, np.ndarray) else view)


class RunningChecksum:
    """Computes `checksum` of a buffer that comes in pieces, in order. One thread at a time."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, piece: bytes | bytearray | memoryview | npt.NDArray[np.uint8]) -> None:
        """Add the next piece of the buffer, which must be contiguous."""
        self._state.update(piece.data if isinstance(piece, np.ndarray) else piece)

    @property
    def value(self) -> int:
        """The checksum of all pieces added so far."""
        return self._state.intdigest()


def _parts(num_tokens: int, block_size: int) -> Iterator[slice]:
    """The slices of a prompt that are hashed in one go: TURN_TOKENS tokens, or one block."""
    step = max(1, TURN_TOKENS // block_size) * block_size
    for start in range(0, num_tokens, step):
        yield slice(start, start + step)


class HashTurns:
    """`chain` for whole prompts on an asyncio loop, in turns, so that the loop can do other work in
    between. The prompt with the fewest tokens left comes first, so that short prompts do not wait
    for long ones; of equal ones the first is finished before the next begins. A turn hashes one
    part, and more for MAX_LOOP_SHARE of the time since the turn before."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._waiting: list[tuple[int, int, _Prompt]] = []
        """A heap by tokens left and turn. A cancelled prompt is removed when it comes first."""
        self._turns = itertools.count()
        self._is_asked = False
        """Whether the loop will call `_turn`."""
        self._ended_s = 0.0
        """Time at which the last turn ended, or the first one was asked for."""

    async def chain(self, root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
        """The chain hashes of the prompt's full blocks. A prompt of one part is hashed at once, a
        longer one from the loop's next turn on. Raises: as `chain`."""
        if len(token_ids) <= TURN_TOKENS:
            return chain(root, token_ids, block_size)
        done: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        prompt = _Prompt(root, token_ids, block_size, done)
        heapq.heappush(self._waiting, (prompt.num_left, next(self._turns), prompt))
        if not self._is_asked:
            self._ended_s = self._now_s()
            self._ask()
        return await done

    def _ask(self) -> None:
        self._is_asked = True
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        begun_s = self._now_s()
        ends_s = begun_s + MAX_LOOP_SHARE * (begun_s - self._ended_s)
        while self._waiting:
            _, turn, prompt = self._waiting[0]
            if not prompt.done.done():
                prompt.hash_part()
            if prompt.done.done():
                heapq.heappop(self._waiting)
            else:
                heapq.heapreplace(self._waiting, (prompt.num_left, turn, prompt))
            if self._now_s() >= ends_s:
                break
        self._ended_s = self._now_s()
        self._is_asked = False
        if self._waiting:
            self._ask()


@dataclass
class _Prompt:
    root: bytes
    token_ids: Sequence[int]
    block_size: int
    done: asyncio.Future[list[bytes]]

    def __post_init__(self) -> None:
        self._hashes: list[bytes] = []
        self._parts = _parts(len(self.token_ids), self.block_size)
        self.num_left = len(self.token_ids)

    def hash_part(self) -> None:
        """Hash one more part; `done` has the result after the last one, or the error."""
        part = next(self._parts)
        parent = self._hashes[-1] if self._hashes else b""
        try:
            self._hashes += chain(self.root, self.token_ids[part], self.block_size, parent)
        except Exception as error:  # raised in the caller that awaits `done`
            self.done.set_exception(error)
            return
        self.num_left = len(self.token_ids) - part.stop
        if self.num_left <= 0:
            self.done.set_result(self._hashes)


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    if isinstance(token_ids, np.ndarray):
        if token_ids.dtype == np.uint32:
            return token_ids.astype("<u4", copy=False).tobytes()
        token_ids = token_ids.tolist()  # numpy would wrap an id out of range instead of raising
    try:
        column = array("I", token_ids)  # four bytes an item wherever Python runs
    except OverflowError:
        raise OverflowError("token_ids: an id is outside 0..2^32-1") from None
    return np.asarray(column, dtype="<u4").tobytes()
