"""One block in one place, as a value: in a store frame (what the wire calls `BlockRef`), or in a
page of the file tier. No I/O, any thread."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Tier(enum.IntEnum):
    """Where a block lies. Numbers are those of the wire."""

    UNSPECIFIED = 0
    DEVICE = 1
    HOST = 2
    FILE = 3
    OBJECT = 4


@dataclass(frozen=True, slots=True)
class Block:
    """A committed block. `chain_hash` is empty for a tail block; `generation` is even; `num_tokens`
    counts filled slots. `tier` is where it lay when it was asked for."""

    chain_hash: bytes
    frame: int
    generation: int
    checksum: int
    num_tokens: int
    tier: Tier = Tier.HOST


@dataclass(frozen=True, slots=True)
class Page:
    """A block's place in the file tier. Its checksum is of the bytes there: another writer of the
    same block may have left slightly other ones in a frame."""

    index: int
    checksum: int
    num_tokens: int
