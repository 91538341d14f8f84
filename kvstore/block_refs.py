"""References to KV blocks. A `Block` (`BlockRef` on the wire) says in which frame of a store or
lender one lies, with its hash and checksum, a `Page` where in the file tier; `PackedBlocks` are the
references of a whole prompt, as a handle carries them.

`PackedBlocks` holds a row of fixed size for each block. The references of a long prompt are made,
signed, sent, verified and compared as one piece of bytes; a block becomes a `Block` when it is read
out. A row holds everything about its block: equal bytes are equal blocks, and the other way round.
All values are immutable; no I/O, any thread.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt

from kvstore.block_hash import CHAIN_HASH_BYTES

_ROW = struct.Struct("<16sQQIIBB")
_COLUMNS = np.dtype(
    [
        ("chain_hash", "<u8", (2,)),
        ("generation", "<u8"),
        ("checksum", "<u8"),
        ("frame", "<u4"),
        ("num_tokens", "<u4"),
        ("tier", "u1"),
        ("num_hash_bytes", "u1"),
    ]
)
"""The layout of a row for numpy: one field of all rows at once."""

ROW_BYTES = _ROW.size


class Tier(enum.IntEnum):
    """The kind of memory in which a block lies. The numbers are those of the protobuf enum."""

    UNSPECIFIED = 0
    DEVICE = 1
    HOST = 2
    FILE = 3
    OBJECT = 4


@dataclass(frozen=True, slots=True)
class Block:
    """A committed block. `chain_hash` is empty for a tail block; `generation` is even; `num_tokens`
    counts filled slots. `tier` is where the block lay when it was matched."""

    chain_hash: bytes
    frame: int
    generation: int
    checksum: int
    num_tokens: int
    tier: Tier = Tier.HOST


@dataclass(frozen=True, slots=True)
class Page:
    """A block's place in the file tier: a slot of its file, not a page of the OS. Its checksum is
    of the bytes there: another writer of the same block may have left slightly other ones in a
    frame."""

    index: int
    checksum: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A block in the file tier as its page's header describes it; an earlier start of the store
    may have written it. serial: grows with each page written, so that the newer of two pages of one
    block is known."""

    index: int
    chain_hash: bytes
    parent: bytes
    checksum: int
    num_tokens: int
    tenant: str
    serial: int


_TIERS = {tier.value: tier for tier in Tier}


class InTier(NamedTuple):
    """A run of neighbouring blocks that lie in one tier, with the number of their tokens."""

    tier: Tier
    num_blocks: int
    num_tokens: int


class PackedBlocks(Sequence[Block]):
    """References to blocks, packed as one row of bytes for each block, side by side: as fast to
    copy and compare as bytes."""

    __slots__ = ("data",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, data: bytes = b"") -> None:
        """Take over rows from the wire. Raises: ValueError unless these are whole rows such as `of`
        makes."""
        if len(data) % ROW_BYTES:
            raise ValueError(f"blocks of {ROW_BYTES} bytes each, not {len(data)} bytes")
        self.data = data
        """All rows, as they go over the wire."""
        if data:
            sizes = self._column("num_hash_bytes")
            others = sizes != CHAIN_HASH_BYTES
            if others.any():
                if sizes[others].any():
                    raise ValueError(f"a chain hash has {CHAIN_HASH_BYTES} bytes")
                if self._column("chain_hash")[others].any():
                    raise ValueError("a block without a chain hash has one")

    @classmethod
    def of(cls, blocks: Iterable[Block]) -> PackedBlocks:
        """Pack blocks. Raises: ValueError for a chain hash that is neither empty nor of 16 bytes;
        struct.error for a number that its field cannot hold."""
        if isinstance(blocks, PackedBlocks):
            return blocks
        return cls.of_rows(map(row_of, blocks))

    @classmethod
    def of_rows(cls, rows: Iterable[bytes]) -> PackedBlocks:
        """The blocks whose rows `row` or `PackedBlocks.rows` made."""
        return cls._whole(b"".join(rows))

    @property
    def rows(self) -> list[bytes]:
        """The row of each block, in order."""
        data = self.data
        return [data[at : at + ROW_BYTES] for at in range(0, len(data), ROW_BYTES)]

    @property
    def frames(self) -> npt.NDArray[np.uint32]:
        """The frame of each block: uint32 [blocks]."""
        return self._column("frame")

    @property
    def generations(self) -> npt.NDArray[np.uint64]:
        """The generation of each block: uint64 [blocks]."""
        return self._column("generation")

    @property
    def checksums(self) -> npt.NDArray[np.uint64]:
        """The checksum of each block: uint64 [blocks]."""
        return self._column("checksum")

    @property
    def num_tokens(self) -> npt.NDArray[np.uint32]:
        """The number of filled slots of each block: uint32 [blocks]."""
        return self._column("num_tokens")

    @property
    def are_reserved(self) -> npt.NDArray[np.bool_]:
        """Whether each block lies at an odd generation, that is, its frame is still to be written:
        bool [blocks]."""
        return np.asarray(self.generations % 2, bool)

    def with_checksums(self, first: int, checksums: Sequence[int]) -> PackedBlocks:
        """A copy of the blocks in which those from `first` on have these checksums."""
        columns = np.frombuffer(self.data, _COLUMNS).copy()
        columns["checksum"][first : first + len(checksums)] = np.array(checksums, np.uint64)
        return self._whole(columns.tobytes())

    def with_num_tokens(self, num_tokens: npt.ArrayLike) -> PackedBlocks:
        """A copy of the blocks with other numbers of filled slots: one for each block, or one for
        all."""
        columns = np.frombuffer(self.data, _COLUMNS).copy()
        columns["num_tokens"] = num_tokens
        return self._whole(columns.tobytes())

    def take(self, which: npt.NDArray[Any]) -> PackedBlocks:
        """A selection of the blocks. which: their indices, or a mask, [blocks]."""
        return self._whole(np.frombuffer(self.data, _COLUMNS)[which].tobytes())

    def tiers(self) -> list[InTier]:
        """The runs of neighbouring blocks that lie in one tier, in order."""
        if not self.data:
            return []
        tiers, counts = self._column("tier"), self._column("num_tokens")
        edges = [0, *(np.flatnonzero(tiers[1:] != tiers[:-1]) + 1).tolist(), len(tiers)]
        return [
            InTier(
                _TIERS.get(int(tiers[at]), Tier.UNSPECIFIED), end - at, int(counts[at:end].sum())
            )
            for at, end in pairwise(edges)
        ]

    def num_matching(self, chain_hashes: Sequence[bytes], num_tokens: int) -> int:
        """The number of leading blocks that have these hashes (16 bytes each), in order, and
        `num_tokens` tokens."""
        count = min(len(self), len(chain_hashes))
        if not count:
            return 0
        ours = b"".join(chain_hashes[:count])
        theirs = self._column("chain_hash")[:count]
        fits = self._column("num_tokens")[:count] == num_tokens
        fits &= self._column("num_hash_bytes")[:count] == CHAIN_HASH_BYTES
        if fits.all() and theirs.tobytes() == ours:
            return count
        fits &= (theirs == np.frombuffer(ours, "<u8").reshape(count, 2)).all(axis=1)
        return int(fits.argmin())

    def num_same(self, other: PackedBlocks) -> int:
        """The number of leading blocks that have equal rows in both."""
        count = min(len(self), len(other))
        ours, theirs = self.data[: count * ROW_BYTES], other.data[: count * ROW_BYTES]
        if ours == theirs:
            return count
        same = np.frombuffer(ours, np.uint8) == np.frombuffer(theirs, np.uint8)
        return int(same.reshape(count, ROW_BYTES).all(axis=1).argmin())

    def has_hashes(self, chain_hashes: bytes) -> bool:
        """Whether the blocks are full ones with exactly these hashes, of 16 bytes each, side by
        side."""
        if not self.data:
            return not chain_hashes
        if (self._column("num_hash_bytes") != CHAIN_HASH_BYTES).any():
            return False
        return self._column("chain_hash").tobytes() == chain_hashes

    def names_same(self, other: PackedBlocks) -> bool:
        """Whether both have the same chain hashes in the same order, empty ones for tails."""
        if len(self) != len(other):
            return False
        columns = ("chain_hash", "num_hash_bytes")
        return not self.data or all(
            bool((self._column(column) == other._column(column)).all()) for column in columns
        )

    def __len__(self) -> int:
        return len(self.data) // ROW_BYTES

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> PackedBlocks: ...
    def __getitem__(self, index: int | slice) -> Block | PackedBlocks:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError("blocks are cut out in one piece")
            return self._whole(self.data[start * ROW_BYTES : max(start, stop) * ROW_BYTES])
        at = range(len(self))[index]
        return _block(*_ROW.unpack_from(self.data, at * ROW_BYTES))

    def __iter__(self) -> Iterator[Block]:
        return (_block(*row) for row in _ROW.iter_unpack(self.data))

    def __add__(self, other: PackedBlocks) -> PackedBlocks:
        return self._whole(self.data + other.data)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedBlocks):
            return self.data == other.data
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return repr(tuple(self))

    @classmethod
    def _whole(cls, data: bytes) -> PackedBlocks:
        """The blocks of rows that are known to be valid."""
        made = cls()
        made.data = data
        return made

    def _column(self, name: str) -> npt.NDArray[Any]:
        return np.frombuffer(self.data, _COLUMNS)[name]


class PackedItems(Sequence[tuple[Block, int]]):
    """Blocks, each with the index of a worker's block that it is copied to."""

    __slots__ = ("blocks", "places")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, blocks: PackedBlocks, places: Sequence[int]) -> None:
        """Pair each block with a place: the index of a worker's block. Raises: ValueError where
        there is not one place for each block."""
        if len(blocks) != len(places):
            raise ValueError(f"{len(blocks)} blocks and {len(places)} places")
        self.blocks = blocks
        self.places = tuple(places)

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> tuple[Block, int]: ...
    @overload
    def __getitem__(self, index: slice) -> PackedItems: ...
    def __getitem__(self, index: int | slice) -> tuple[Block, int] | PackedItems:
        if isinstance(index, slice):
            return PackedItems(self.blocks[index], self.places[index])
        return self.blocks[index], self.places[index]

    def __iter__(self) -> Iterator[tuple[Block, int]]:
        return zip(self.blocks, self.places, strict=True)

    def __add__(self, other: PackedItems) -> PackedItems:
        return PackedItems(self.blocks + other.blocks, self.places + other.places)


def row(
    chain_hash: bytes, frame: int, generation: int, checksum: int, num_tokens: int, tier: Tier
) -> bytes:
    """Pack one block into a row. Raises: ValueError for a chain hash that is neither empty nor of
    16 bytes; struct.error for a number that its field cannot hold."""
    num_hash_bytes = len(chain_hash)
    if num_hash_bytes not in (0, CHAIN_HASH_BYTES):
        raise ValueError(f"a chain hash has {CHAIN_HASH_BYTES} bytes: {chain_hash!r}")
    return _ROW.pack(chain_hash, generation, checksum, frame, num_tokens, tier, num_hash_bytes)


def row_of(block: Block) -> bytes:
    """Pack a Block into a row. Raises: as `row`."""
    return row(
        block.chain_hash,
        block.frame,
        block.generation,
        block.checksum,
        block.num_tokens,
        block.tier,
    )


def block_of(row: bytes) -> Block:
    """Unpack a row that `row` made into a Block."""
    return _block(*_ROW.unpack(row))


def _block(
    chain_hash: bytes,
    generation: int,
    checksum: int,
    frame: int,
    num_tokens: int,
    tier: int,
    num_hash_bytes: int,
) -> Block:
    """A tier that this version does not know becomes UNSPECIFIED."""
    return Block(
        chain_hash[:num_hash_bytes],
        frame,
        generation,
        checksum,
        num_tokens,
        _TIERS.get(tier, Tier.UNSPECIFIED),
    )
