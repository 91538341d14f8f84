"""What the engine's process and its ranks' processes say to each other: frozen values as msgpack,
in frames (engine/parallel/framing.py) on a socket pair. No pickle: bytes are data, checked against
types.

    engine -> rank   Start; once it is Ready: Meet, Verify, Attach; then WarmUp, Change, Step,
                     LaunchWords, Drain, Settle in any order; Stop, or it closes
    rank -> engine   Loading*, then Ready or Refused; Met, Attached, Settled as an answer each;
                     Failed before a sad end

All processes are of one installation: the parent starts its own interpreter. Any thread.
"""

from __future__ import annotations

import msgspec
from baton_kernels.sampling import Needs

from engine.batch import Batch
from engine.config import EngineConfig
from engine.models.llama import LlamaConfig
from engine.parallel.cuda_ipc import SharedCache
from process.errors import Unavailable


class Start(msgspec.Struct, frozen=True, tag=True):
    """Load your part."""

    config: EngineConfig
    """With device and dtype as rank 0 chose them, by kind."""

    folder: str
    """Of the checkpoint."""

    shape: LlamaConfig
    """Of the whole model."""

    rank: int


class Meet(msgspec.Struct, frozen=True, tag=True):
    """All are loaded: form the process groups."""


class Verify(msgspec.Struct, frozen=True, tag=True):
    """Compute what the kernels are checked with, together with everyone."""


class Attach(msgspec.Struct, frozen=True, tag=True):
    """The cache has so many blocks; on CPU its file has its size now."""

    num_blocks: int


class Change(msgspec.Struct, frozen=True, tag=True):
    """Make a block a copy of another, or zero, where caches are the ranks' own."""

    block_id: int
    source: int = -1
    """-1: zero."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """Compute this, together with everyone."""

    batch: Batch


class WarmUp(msgspec.Struct, frozen=True, tag=True):
    """Compile and capture what launches need, together with everyone."""


class LaunchWords(msgspec.Struct, frozen=True, tag=True):
    """Begin a decode step of rows that stay on the device (engine/decoder/rows.py)."""

    words: bytes
    """int32: of the image, as many as are in use."""

    overflow: bytes
    """int32 [C, 2]: changes of the block tables for which the image has no room."""

    num_rows: int
    num_blocks: int
    needs: Needs


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Forget all rows and launches (AheadDecoder.drain)."""


class Settle(msgspec.Struct, frozen=True, tag=True):
    """Say when all of this is done, on the device, too."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End."""


ToRank = (
    Start | Meet | Verify | Attach | Change | Step | WarmUp | LaunchWords | Drain | Settle | Stop
)


class Loading(msgspec.Struct, frozen=True, tag=True):
    """So much of it is loaded; also a sign of life."""

    what: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Loaded."""

    weight_bytes: int


class Met(msgspec.Struct, frozen=True, tag=True):
    """In the process groups."""

    free_bytes: int
    """On its device, for its part of the cache and of a step."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """It cannot load, for this reason."""

    reason: str


class Attached(msgspec.Struct, frozen=True, tag=True):
    """Has its cache."""

    cache: SharedCache


class Settled(msgspec.Struct, frozen=True, tag=True):
    """Nothing that was asked for is under way."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It ends, for this reason."""

    reason: str


FromRank = Loading | Ready | Refused | Met | Attached | Settled | Failed

_encoder = msgspec.msgpack.Encoder()
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def encode(message: ToRank | FromRank) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def read_to_rank(frame: bytes) -> ToRank:
    """Raises: Unavailable for what is no message."""
    try:
        message: ToRank = _to_rank.decode(frame)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"the engine sent what is no message: {error}") from error
    return message


def read_from_rank(frame: bytes) -> FromRank:
    """Raises: Unavailable for what is no message."""
    try:
        message: FromRank = _from_rank.decode(frame)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"a rank sent what is no message: {error}") from error
    return message
