"""One block in one store frame, as a value. What the wire calls `BlockRef`. No I/O, any thread."""

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
    counts filled slots."""

    chain_hash: bytes
    frame: int
    generation: int
    checksum: int
    num_tokens: int
    tier: Tier = Tier.HOST
