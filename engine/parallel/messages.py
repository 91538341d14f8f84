"""Messages between the engine's process and its ranks' processes: frozen values as msgpack, in
frames (engine/parallel/framing.py) on a socket pair. No pickle: bytes are data, checked against
types.

    engine -> rank   Start; after Ready: Meet, Verify, Attach; then WarmUp, Change, Step,
                     LaunchWords, Drain, Settle in any order; Stop, or the socket is closed
    rank -> engine   Loading*, then Ready or Refused; Met, Attached, Settled as answers; Failed
                     before it ends because of an error

All processes are of one installation: the parent starts its own interpreter. Any thread.
"""

from __future__ import annotations

import msgspec
from baton_kernels.sampling import Needs

from engine.batch import Batch
from engine.config import EngineConfig
from engine.models.llama import LlamaConfig
from engine.parallel.cuda_ipc import SharedCache
from process.rpc_errors import Unavailable


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """A request to load the rank's part of the model."""

    config: EngineConfig
    """The settings, with device (by kind) and dtype as rank 0 chose them."""

    folder: str
    """The folder of the checkpoint."""

    shape: LlamaConfig
    """The sizes of the whole model."""

    rank: int


class Meet(msgspec.Struct, frozen=True, tag=True):
    """A request to form the process groups; all ranks have loaded their parts."""


class Verify(msgspec.Struct, frozen=True, tag=True):
    """A request to compute the batches of the kernels' check, together with all ranks."""


class Attach(msgspec.Struct, frozen=True, tag=True):
    """A request to create the cache, with this number of blocks; on CPU its file has its size
    now."""

    num_blocks: int


class Change(msgspec.Struct, frozen=True, tag=True):
    """A change of a block in the ranks' own caches: a copy of another block, or zeros."""

    block_id: int
    source: int = -1
    """The block to copy; -1: write zeros."""


class ComputeBatch(msgspec.Struct, frozen=True, tag=True):
    """A request to compute a batch, together with all ranks."""

    batch: Batch


class WarmUp(msgspec.Struct, frozen=True, tag=True):
    """A request to compile and capture launches, together with all ranks."""


class LaunchWords(msgspec.Struct, frozen=True, tag=True):
    """A request to launch a decode step of rows that stay on the device
    (engine/decoder/row_table.py)."""

    words: bytes
    """int32, the used words of the image."""

    overflow: bytes
    """int32 [C, 2], changes of the block tables for which the image has no room."""

    num_rows: int
    num_blocks: int
    needs: Needs


class Drain(msgspec.Struct, frozen=True, tag=True):
    """A request to forget all rows and launches (AheadDecoder.drain)."""


class Settle(msgspec.Struct, frozen=True, tag=True):
    """A request for a Settled message when all earlier work is done, on the device, too."""


class StopRank(msgspec.Struct, frozen=True, tag=True):
    """A request to end the process."""


ToRank = (
    StartRank
    | Meet
    | Verify
    | Attach
    | Change
    | ComputeBatch
    | WarmUp
    | LaunchWords
    | Drain
    | Settle
    | StopRank
)


class RankLoading(msgspec.Struct, frozen=True, tag=True):
    """Progress of loading; also a sign of life."""

    what: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The rank has loaded its part."""

    weight_bytes: int


class Met(msgspec.Struct, frozen=True, tag=True):
    """The rank has formed its process groups."""

    free_bytes: int
    """Free bytes on the rank's device, for its part of the cache and of a step."""


class RankRefused(msgspec.Struct, frozen=True, tag=True):
    """The rank cannot load, with the reason."""

    reason: str


class Attached(msgspec.Struct, frozen=True, tag=True):
    """The rank has its cache."""

    cache: SharedCache


class Settled(msgspec.Struct, frozen=True, tag=True):
    """The rank has done all earlier work."""


class RankFailure(msgspec.Struct, frozen=True, tag=True):
    """The rank ends because of an error, with the reason."""

    reason: str


FromRank = RankLoading | Ready | RankRefused | Met | Attached | Settled | RankFailure

_encoder = msgspec.msgpack.Encoder()
_to_rank = msgspec.msgpack.Decoder(ToRank)
_from_rank = msgspec.msgpack.Decoder(FromRank)


def encode(message: ToRank | FromRank) -> bytes:
    """Encode a message as one frame."""
    return _encoder.encode(message)


def read_to_rank(frame: bytes) -> ToRank:
    """Decode a message to a rank. Raises: Unavailable for an invalid frame."""
    try:
        message: ToRank = _to_rank.decode(frame)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"the engine sent what is no message: {error}") from error
    return message


def read_from_rank(frame: bytes) -> FromRank:
    """Decode a message from a rank. Raises: Unavailable for an invalid frame."""
    try:
        message: FromRank = _from_rank.decode(frame)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"a rank sent what is no message: {error}") from error
    return message
