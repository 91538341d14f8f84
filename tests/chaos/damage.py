"""Ways to spoil a committed block: its bytes in the store's slab, behind everybody's back, or the
reference that somebody was told.

Each returns the reasons that a reader may give for not using the block. All draw from the caller's
`random.Random`, so that a seed replays them.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import numpy as np

from kvstore.block_refs import Block
from kvstore.errors import CHECKSUM, GENERATION, MISSING
from kvstore.slab import Slab

Damage = Callable[[random.Random, Slab, Sequence[Block], int], tuple[Block, frozenset[str]]]
"""(rng, slab, refs, index) -> the reference to give to a reader, and the reasons that are right."""

_BYTES_ARE_WRONG = frozenset({CHECKSUM})
_NOT_THAT_LIFE = frozenset({GENERATION})


def one_bit(
    rng: random.Random, slab: Slab, refs: Sequence[Block], index: int
) -> tuple[Block, frozenset[str]]:
    """What bad memory does."""
    frame = slab.block(refs[index].frame)
    frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
    return refs[index], _BYTES_ARE_WRONG


def torn(
    rng: random.Random, slab: Slab, refs: Sequence[Block], index: int
) -> tuple[Block, frozenset[str]]:
    """The end of another write: a run of bytes that belongs elsewhere."""
    frame = slab.block(refs[index].frame)
    start = rng.randrange(len(frame) - 16)
    end = rng.randrange(start + 16, len(frame) + 1)
    frame[start:end] ^= np.uint8(rng.randrange(1, 256))
    return refs[index], _BYTES_ARE_WRONG


def zeroed(
    rng: random.Random, slab: Slab, refs: Sequence[Block], index: int
) -> tuple[Block, frozenset[str]]:
    """A page that was never written."""
    slab.block(refs[index].frame)[:] = 0
    return refs[index], _BYTES_ARE_WRONG


def exchanged(
    rng: random.Random, slab: Slab, refs: Sequence[Block], index: int
) -> tuple[Block, frozenset[str]]:
    """A whole, valid block: of another place."""
    own = refs[index].frame
    other = rng.choice([frame for frame in range(slab.layout.num_frames) if frame != own])
    if np.array_equal(slab.block(other), slab.block(own)):
        return one_bit(rng, slab, refs, index)
    slab.block(own)[:] = slab.block(other)
    return refs[index], _BYTES_ARE_WRONG


def wrong_checksum(
    rng: random.Random, slab: Slab, refs: Sequence[Block], index: int
) -> tuple[Block, frozenset[str]]:
    """A reference that was spoiled on its way."""
    wrong = refs[index].checksum ^ (1 << rng.randrange(64))
    return dataclasses.replace(refs[index], checksum=wrong), _BYTES_ARE_WRONG


def other_generation(
    rng: random.Random, slab: Slab, refs: Sequence[Block], index: int
) -> tuple[Block, frozenset[str]]:
    """A reference to an earlier or later life of the frame, or to one being written (odd)."""
    change = rng.choice([-2, -1, 1, 2, 1000])
    generation = max(0, refs[index].generation + change)
    return dataclasses.replace(refs[index], generation=generation), _NOT_THAT_LIFE


def other_frame(
    rng: random.Random, slab: Slab, refs: Sequence[Block], index: int
) -> tuple[Block, frozenset[str]]:
    """A reference that names another frame, at that frame's own generation."""
    own = refs[index].frame
    frame = rng.choice([frame for frame in range(slab.layout.num_frames) if frame != own])
    generation = int(slab.generations[frame])
    # A store that is asked for the bytes sees that it is another block; who maps the slab sees it
    # by the bytes, or that the frame is being written.
    reasons = frozenset({CHECKSUM, GENERATION, MISSING})
    return dataclasses.replace(refs[index], frame=frame, generation=generation), reasons


def absent_frame(
    rng: random.Random, slab: Slab, refs: Sequence[Block], index: int
) -> tuple[Block, frozenset[str]]:
    """A reference beyond the slab."""
    frame = slab.layout.num_frames + rng.randrange(2**31)
    return dataclasses.replace(refs[index], frame=frame), frozenset({GENERATION, MISSING})


OF_BYTES: tuple[Damage, ...] = (one_bit, torn, zeroed, exchanged)
OF_REFERENCES: tuple[Damage, ...] = (wrong_checksum, other_generation, other_frame, absent_frame)
