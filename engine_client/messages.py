"""What an engine in a process of its own and its client say to each other: frozen values, encoded
as msgpack. No pickle: bytes are data, checked against these types when they are read.

    client -> engine   Start first; then Submit, Cancel, Call in any order; Stop, or it closes
    engine -> client   Loading*, then Hello or Refused; then Batch, Reply; Failed before a sad end

`VERSION` is in the first message of each side: the two may be of different installations. Any
thread.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.config import EngineConfig
from engine.request import ModelInfo
from engine_client.base import Ask, News
from engine_client.failure import Failure
from process.errors import InvalidArgument, Unavailable

VERSION = 1

What = Literal[
    "check",
    "stats",
    "metrics",
    "check_integrity",
    "load_adapter",
    "unload_adapter",
    "adapters",
]
"""What can be called; each answers with one Reply."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """Load this."""

    version: int
    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Serve this."""

    ask: Ask


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End this."""

    request_id: str


class EndSample(msgspec.Struct, frozen=True, tag=True):
    """Draw no more for this sample."""

    request_id: str
    sample_index: int


class Call(msgspec.Struct, frozen=True, tag=True):
    """Answer this between two steps."""

    call_id: int
    what: What
    asks: tuple[Ask, ...] = ()
    name: str = ""
    """Of an adapter."""
    folder: str = ""
    """Where it lies."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End after the step in progress."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """How far loading is."""

    what: str
    done: int
    total: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The engine is ready."""

    version: int
    model: ModelInfo


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start."""

    failure: Failure


class Batch(msgspec.Struct, frozen=True, tag=True):
    """All news of one step."""

    news: tuple[News, ...]


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The answer to a Call: a value, or why there is none."""

    call_id: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # None
    failure: Failure | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine made a mistake and ends."""

    failure: Failure


ToEngine = Start | Submit | Cancel | EndSample | Call | Stop
FromEngine = Loading | Hello | Refused | Batch | Reply | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_ask: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)


def encode(message: ToEngine | FromEngine) -> bytes:
    """Bytes of a message."""
    return _encoder.encode(message)


def encode_value(value: object) -> msgspec.Raw:
    """The value of a Reply."""
    return msgspec.Raw(_encoder.encode(value))


def read_to_engine(frame: bytes) -> ToEngine:
    """A client's message. Raises: Unavailable for bytes that are none."""
    try:
        return _to_engine.decode(frame)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"the client sent what is no message: {error}") from error


def read_from_engine(frame: bytes) -> FromEngine:
    """An engine's message. Raises: Unavailable for bytes that are none."""
    try:
        return _from_engine.decode(frame)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"the engine sent what is no message: {error}") from error


def check_types(ask: Ask) -> int:
    """Types are not checked when an Ask is made; here they are, by sending it to ourselves.

    Returns: how many bytes it takes.
    Raises: InvalidArgument naming the field of `ask` that holds a value of the wrong type.
    """
    try:
        data = _encoder.encode(ask)
        _ask.decode(data)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        raise InvalidArgument(path.rstrip("`") or "ask", problem) from error
    except (msgspec.MsgspecError, TypeError, OverflowError, ValueError) as error:
        raise InvalidArgument("ask", f"cannot be sent: {error}") from error
    return len(data)
