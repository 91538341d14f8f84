"""Messages between a client and its engine in a child process: frozen values, encoded as msgpack.
They are checked against these types when they are read; pickle is not used.

    client -> engine   Start first; then Submit, Cancel, Call in any order; Stop, or it closes
    engine -> client   Loading*, then Hello or Refused; then Batch, Reply; Failed before it exits

`VERSION` is in the first message of each side: the two may be of different installations. Any
thread.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.config import EngineConfig
from engine.request import ModelInfo
from engine_client.encoded_errors import Failure
from engine_client.interface import Ask, News
from process.rpc_errors import InvalidArgument, Unavailable

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
"""Names of the calls that an engine supports; each is answered with one Reply."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """First message: the configuration of the engine to load."""

    version: int
    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Message that submits one request."""

    ask: Ask


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Message that cancels one request."""

    request_id: str


class EndSample(msgspec.Struct, frozen=True, tag=True):
    """Message that ends one sample of a request; the others go on."""

    request_id: str
    sample_index: int


class Call(msgspec.Struct, frozen=True, tag=True):
    """Call for the engine to answer between two steps."""

    call_id: int
    what: What
    asks: tuple[Ask, ...] = ()
    name: str = ""
    """Name of the adapter that the call is about."""
    folder: str = ""
    """Folder that the adapter is loaded from."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Message that ends the engine after the step in progress."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Progress of loading the engine."""

    what: str
    done: int
    total: int


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Message that the engine is loaded and ready."""

    version: int
    model: ModelInfo


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Message that the engine cannot start, with the reason."""

    failure: Failure


class StepNews(msgspec.Struct, frozen=True, tag=True):
    """All news of one step."""

    news: tuple[News, ...]


class Reply(msgspec.Struct, frozen=True, tag=True):
    """Answer to a Call: a value, or the failure."""

    call_id: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # None
    failure: Failure | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Message that the engine has failed and ends."""

    failure: Failure


ToEngine = Start | Submit | Cancel | EndSample | Call | Stop
FromEngine = Loading | Hello | Refused | StepNews | Reply | Failed

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_ask: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)


def encode(message: ToEngine | FromEngine) -> bytes:
    """Encode a message as msgpack bytes."""
    return _encoder.encode(message)


def encode_value(value: object) -> msgspec.Raw:
    """Encode the value of a Reply as msgpack."""
    return msgspec.Raw(_encoder.encode(value))


def read_to_engine(frame: bytes) -> ToEngine:
    """Decode a client's message. Raises: Unavailable for invalid bytes."""
    try:
        return _to_engine.decode(frame)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"the client sent what is no message: {error}") from error


def read_from_engine(frame: bytes) -> FromEngine:
    """Decode an engine's message. Raises: Unavailable for invalid bytes."""
    try:
        return _from_engine.decode(frame)
    except msgspec.MsgspecError as error:
        raise Unavailable(f"the engine sent what is no message: {error}") from error


def check_types(ask: Ask) -> int:
    """Check the types of an Ask's fields, which its constructor does not, by encoding and decoding
    it.

    Returns: its encoded size in bytes.

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
