"""The fields of an encoded protobuf message, one after the other, without making the message. Pure;
any thread.

Opening: the first command of a leg to its worker, which carries the prompt. Pure.

SealedHandle: a KvHandle that is passed on as the bytes that came.

A handle on a long prompt has thousands of entries, and the router needs none of them while it is
handed over: to make a message of them, copy it and write it out again would hold every other
request's tokens up. Only one that is given back unused is opened, for its leases. So the
handle is cut out of the prefill worker's reply and set into the decode worker's command unread; who
uses it looks at its signature first. Bytes that are no message are found here, not passed on.

Knows no RPC and no request. Pure but for `Command`, which belongs to one asyncio loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from google.protobuf.message import Message

from protos import common_pb2, decode_pb2, prefill_pb2

VARINT, FIXED_64, LENGTH, FIXED_32 = 0, 1, 2, 5
"""Wire types."""


class WireField(NamedTuple):
    """Where one field lies: its tag from `start` on, its value in [begin, end)."""

    number: int
    wire_type: int
    start: int
    begin: int
    end: int


def fields_of(data: bytes, begin: int = 0, end: int | None = None) -> Iterator[WireField]:
    """The fields of the message in data[begin:end], in the order in which they lie there.

    Raises: ValueError where the bytes are no message, behind the fields that were.
    """
    end = len(data) if end is None else end
    position = begin
    while position < end:
        start = position
        tag, position = varint(data, position)
        field = WireField(tag >> 3, tag & 7, start, *_extent(data, position, tag & 7))
        if field.end > end:
            raise ValueError("beyond the end")
        yield field
        position = field.end


def varint(data: bytes, position: int) -> tuple[int, int]:
    """The number there, and where it ends. Raises: ValueError."""
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
    raise ValueError("no varint")


def nested(number: int, *parts: bytes) -> bytes:
    """A field that holds `parts`, joined: bytes, text or a message."""
    size = sum(map(len, parts))
    return b"".join((_varint_of(number << 3 | LENGTH), _varint_of(size), *parts))


def _extent(data: bytes, position: int, wire_type: int) -> tuple[int, int]:
    """Where a field's value lies, after its tag. Raises: ValueError when it does not fit."""
    if wire_type == VARINT:
        return position, varint(data, position)[1]
    if wire_type == LENGTH:
        size, position = varint(data, position)
    elif wire_type in (FIXED_64, FIXED_32):
        size = 8 if wire_type == FIXED_64 else 4
    else:
        raise ValueError("groups are not used here")
    if position + size > len(data):
        raise ValueError("beyond the end")
    return position, position + size


def _varint_of(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


@dataclass(frozen=True)
class Opening:
    """A command of its key and one part: to set a message into another one copies it, which takes
    longer than to write it out.

    Attributes:
        head: the command without the part.
        number: the part's field in the command.
        part: not changed any more.
    """

    head: Message
    number: int
    part: Message

    def write(self) -> bytes:
        """As it goes over the wire."""
        return self.head.SerializeToString() + nested(self.number, self.part.SerializeToString())


_EVENTS = prefill_pb2.PrefillEvents.EVENTS_FIELD_NUMBER
_REPLY = prefill_pb2.PrefillEvent.REPLY_FIELD_NUMBER
_HANDLE = prefill_pb2.PrefillReply.HANDLE_FIELD_NUMBER
_SMALL_BYTES = 1024
"""A message up to this size is read as a whole to see that it has no handle: most have none."""
_UINT32 = 2**32 - 1
_IS_PARTIAL = common_pb2.KvHandle.IS_PARTIAL_FIELD_NUMBER

_EXTENT = (
    common_pb2.KvHandle.NUM_TOKENS_FIELD_NUMBER,
    common_pb2.KvHandle.BLOCK_SIZE_FIELD_NUMBER,
    common_pb2.KvHandle.DEADLINE_UNIX_MS_FIELD_NUMBER,
)

_PLACES = {
    "prefetch": (
        decode_pb2.DecodeCommand.PREFETCH_FIELD_NUMBER,
        decode_pb2.PrefetchDecode.HANDLE_FIELD_NUMBER,
    ),
    "generate": (
        decode_pb2.DecodeCommand.GENERATE_FIELD_NUMBER,
        decode_pb2.GenerateFromHandle.HANDLE_FIELD_NUMBER,
    ),
}
"""Numbers of the command and of the handle in it, for those that carry one."""


class Extent(NamedTuple):
    """What a handle says of itself in three numbers, as in `common.proto`; 0: it does not say."""

    num_tokens: int = 0
    block_size: int = 0
    deadline_unix_ms: int = 0


@dataclass(frozen=True)
class SealedHandle:
    """See the module."""

    data: bytes
    is_partial: bool

    @classmethod
    def seal(cls, data: bytes) -> SealedHandle:
        """Raises: ValueError for what cannot be a handle."""
        is_partial = False
        for field in fields_of(data):
            if field.number == _IS_PARTIAL:
                _need(field, VARINT)
                is_partial = bool(varint(data, field.begin)[0])
        return cls(data, is_partial)

    def extent(self) -> Extent:
        """Read without the entries. Raises: ValueError for what cannot be a handle."""
        numbers = dict.fromkeys(_EXTENT, 0)
        for field in fields_of(self.data):
            if field.number in numbers:
                _need(field, VARINT)
                numbers[field.number] = varint(self.data, field.begin)[0]
        num_tokens, block_size, deadline_unix_ms = numbers.values()
        return Extent(num_tokens & _UINT32, block_size & _UINT32, _signed(deadline_unix_ms))

    def opened(self) -> common_pb2.KvHandle:
        """The handle, read. Raises: google.protobuf.message.DecodeError."""
        return common_pb2.KvHandle.FromString(self.data)


@dataclass(frozen=True)
class PrefillNews:
    """One message of a prefill worker: all but the handle, and the handle if there is one."""

    reply: prefill_pb2.PrefillReply
    handle: SealedHandle | None

    @classmethod
    def parse(cls, data: bytes) -> PrefillNews:
        """Raises: ValueError or DecodeError for what is no reply."""
        parts, rest, position = [], [], 0
        for field in fields_of(data):
            if field.number == _HANDLE:
                _need(field, LENGTH)
                parts.append(data[field.begin : field.end])
                rest.append(data[position : field.start])
                position = field.end
        rest.append(data[position:])
        # A message that comes in several parts is their joined bytes, by protobuf's own rule.
        handle = SealedHandle.seal(b"".join(parts)) if parts else None
        return cls(prefill_pb2.PrefillReply.FromString(b"".join(rest)), handle)

    @property
    def is_only_partial(self) -> bool:
        """Whether it brings a partial handle and nothing else: prefill still runs."""
        reply = self.reply
        says_more = reply.token_ids or reply.beam_start or reply.HasField("leg")
        return self.handle is not None and self.handle.is_partial and not says_more


@dataclass(frozen=True)
class PrefillWord:
    """What a prefill worker says of one key: a reply, or that the prompt has failed."""

    key: int
    news: PrefillNews | None
    failed: prefill_pb2.PrefillFailed | None

    @property
    def is_last(self) -> bool:
        """Whether nothing comes under this key any more."""
        return self.news is None or self.news.reply.HasField("leg")


def words_of(data: bytes) -> Iterator[PrefillWord]:
    """What an encoded PrefillEvents says, in its order.

    Raises: ValueError or DecodeError for what is none, behind the words that were.
    """
    if len(data) <= _SMALL_BYTES:
        events = prefill_pb2.PrefillEvents.FromString(data).events
        if not any(event.reply.HasField("handle") for event in events):
            for event in events:
                news = PrefillNews(event.reply, None) if event.HasField("reply") else None
                yield _word(event, news)
            return
    rest, position = [], 0
    for field in fields_of(data):
        if field.number == _EVENTS:
            _need(field, LENGTH)
            yield _word_in(data, field)
            rest.append(data[position : field.start])
            position = field.end
    rest.append(data[position:])
    prefill_pb2.PrefillEvents.FromString(b"".join(rest))  # nothing of ours, but of its form


def _word_in(data: bytes, event: WireField) -> PrefillWord:
    replies, rest, position = [], [], event.begin
    for field in fields_of(data, event.begin, event.end):
        if field.number == _REPLY:
            _need(field, LENGTH)
            replies.append(data[field.begin : field.end])
            rest.append(data[position : field.start])
            position = field.end
    rest.append(data[position : event.end])
    about = prefill_pb2.PrefillEvent.FromString(b"".join(rest))
    return _word(about, PrefillNews.parse(b"".join(replies)) if replies else None)


def _word(event: prefill_pb2.PrefillEvent, news: PrefillNews | None) -> PrefillWord:
    """Raises: ValueError when there is none."""
    if news is not None:
        return PrefillWord(event.key, news, None)
    if event.HasField("failed"):
        return PrefillWord(event.key, None, event.failed)
    raise ValueError("an event without news")


class Command:
    """One command to a decode worker, and the handle that it carries if it does. Until it is
    written its handle may be replaced by a newer one.
    """

    def __init__(
        self, message: decode_pb2.DecodeCommand, handle: SealedHandle | None = None
    ) -> None:
        """`message` is complete but for the handle."""
        self.message = message
        self.handle = handle
        self.is_written = False

    def write(self) -> bytes:
        """As it goes over the wire; from now on it cannot be changed."""
        self.is_written = True
        head = self.message.SerializeToString()
        if self.handle is None:
            return head
        # What follows is merged into the command of the same kind, by protobuf's own rule.
        kind, number = _PLACES[self.message.WhichOneof("command") or ""]
        return head + nested(kind, nested(number, self.handle.data))


def _signed(number: int) -> int:
    """An int64, as protobuf's varints have it."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


def _need(field: WireField, wire_type: int) -> None:
    if field.wire_type != wire_type:
        raise ValueError(f"field {field.number} is encoded as another type")
