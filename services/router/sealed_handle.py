"""SealedHandle: a KV handle (protobuf KvHandle) that the router passes from the prefill worker to
the decode worker as encoded bytes, without parsing it.

The handle on a long prompt has thousands of entries, and the router needs none of them for the
handover. Parsing, copying and encoding it on the event loop would delay the tokens of every other
request. So the handle is cut out of the prefill worker's reply (`PrefillNews`, `words_of`) and set
into the decode worker's command (`Command`) as bytes; the decode worker checks its signature. Only
a handle that is given back unused is parsed, for its leases. `Opening` likewise writes a command
with a large part, the prompt, without copying that part into a message first. `fields_of` finds the
fields of an encoded message. Bytes that are not a valid message are rejected here and not passed
on.

Knows no RPC and no request. Pure, any thread, except `Command`, which belongs to one asyncio loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from google.protobuf.message import Message

from protos import common_pb2, decode_pb2, prefill_pb2

VARINT, FIXED_64, LENGTH, FIXED_32 = 0, 1, 2, 5
"""Protobuf wire types."""


class WireField(NamedTuple):
    """Position of one field in encoded bytes: the tag begins at `start`, the value is
    [begin, end)."""

    number: int
    wire_type: int
    start: int
    begin: int
    end: int


def fields_of(data: bytes, begin: int = 0, end: int | None = None) -> Iterator[WireField]:
    """Return the fields of the encoded message in data[begin:end], in their order.

    Raises: ValueError at the first bytes that are not a valid field, after the fields before them.
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
    """Return the varint at `position`, and the position after it. Raises: ValueError."""
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
    raise ValueError("no varint")


def nested(number: int, *parts: bytes) -> bytes:
    """Encode a length-delimited field whose value is `parts`, joined: bytes, text or a message."""
    size = sum(map(len, parts))
    return b"".join((_varint_of(number << 3 | LENGTH), _varint_of(size), *parts))


def _extent(data: bytes, position: int, wire_type: int) -> tuple[int, int]:
    """Return [begin, end) of a field's value; `position` is after the tag. Raises: ValueError when
    the value does not fit into `data`, or its wire type is unknown."""
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
    """First command of a call to a worker: a key and one large part. The part is encoded on its
    own, because setting it into the command would copy it, which takes longer than encoding it.

    Attributes:
        head: the command without the part.
        number: field number of the part in the command.
        part: the message, which must not change any more.
    """

    head: Message
    number: int
    part: Message

    def write(self) -> bytes:
        """Return the encoded command."""
        return self.head.SerializeToString() + nested(self.number, self.part.SerializeToString())


_EVENTS = prefill_pb2.PrefillEvents.EVENTS_FIELD_NUMBER
_REPLY = prefill_pb2.PrefillEvent.REPLY_FIELD_NUMBER
_HANDLE = prefill_pb2.PrefillReply.HANDLE_FIELD_NUMBER
_SMALL_BYTES = 1024
"""Messages up to this size are parsed as a whole to see whether they hold a handle; most do not."""
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
"""Field numbers of the command and of the handle in it, by the name of the command."""


class Extent(NamedTuple):
    """Three numbers of a handle, as in `common.proto`; 0: the handle does not give it."""

    num_tokens: int = 0
    block_size: int = 0
    deadline_unix_ms: int = 0


@dataclass(frozen=True)
class SealedHandle:
    """Encoded KvHandle, with the one flag that the router needs."""

    data: bytes
    is_partial: bool

    @classmethod
    def seal(cls, data: bytes) -> SealedHandle:
        """Wrap encoded bytes. Raises: ValueError for bytes that cannot be a handle."""
        is_partial = False
        for field in fields_of(data):
            if field.number == _IS_PARTIAL:
                _need(field, VARINT)
                is_partial = bool(varint(data, field.begin)[0])
        return cls(data, is_partial)

    def extent(self) -> Extent:
        """Read the three numbers without the entries. Raises: ValueError for bytes that cannot be a
        handle."""
        numbers = dict.fromkeys(_EXTENT, 0)
        for field in fields_of(self.data):
            if field.number in numbers:
                _need(field, VARINT)
                numbers[field.number] = varint(self.data, field.begin)[0]
        num_tokens, block_size, deadline_unix_ms = numbers.values()
        return Extent(num_tokens & _UINT32, block_size & _UINT32, _signed(deadline_unix_ms))

    def opened(self) -> common_pb2.KvHandle:
        """Parse the handle. Raises: google.protobuf.message.DecodeError."""
        return common_pb2.KvHandle.FromString(self.data)


@dataclass(frozen=True)
class PrefillNews:
    """One reply of a prefill worker: the parsed message without the handle, and the handle
    if any."""

    reply: prefill_pb2.PrefillReply
    handle: SealedHandle | None

    @classmethod
    def parse(cls, data: bytes) -> PrefillNews:
        """Parse an encoded PrefillReply. Raises: ValueError or DecodeError for other bytes."""
        parts, rest, position = [], [], 0
        for field in fields_of(data):
            if field.number == _HANDLE:
                _need(field, LENGTH)
                parts.append(data[field.begin : field.end])
                rest.append(data[position : field.start])
                position = field.end
        rest.append(data[position:])
        # A message field that occurs several times is merged, by protobuf's rule: join the bytes.
        handle = SealedHandle.seal(b"".join(parts)) if parts else None
        return cls(prefill_pb2.PrefillReply.FromString(b"".join(rest)), handle)

    @property
    def is_only_partial(self) -> bool:
        """Whether the reply holds a partial handle and nothing else, so that prefill still runs."""
        reply = self.reply
        says_more = reply.token_ids or reply.beam_start or reply.HasField("leg")
        return self.handle is not None and self.handle.is_partial and not says_more


@dataclass(frozen=True)
class PrefillWord:
    """One event of a prefill worker for one key: a reply, or the prompt's failure."""

    key: int
    news: PrefillNews | None
    failed: prefill_pb2.PrefillFailed | None

    @property
    def is_last(self) -> bool:
        """Whether this is the worker's last event for the key."""
        return self.news is None or self.news.reply.HasField("leg")


def words_of(data: bytes) -> Iterator[PrefillWord]:
    """Return the events of an encoded PrefillEvents, in order.

    Raises: ValueError or DecodeError for other bytes, after the events before them.
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
    prefill_pb2.PrefillEvents.FromString(b"".join(rest))  # raises when the rest is not valid


def _word_in(data: bytes, event: WireField) -> PrefillWord:
    """Parse one encoded event, without parsing the handle in its reply."""
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
    """Make a PrefillWord. Raises: ValueError when the event holds neither a reply nor a failure."""
    if news is not None:
        return PrefillWord(event.key, news, None)
    if event.HasField("failed"):
        return PrefillWord(event.key, None, event.failed)
    raise ValueError("an event without news")


class Command:
    """Command to a decode worker, with the handle that it carries, if any. Until it is written, its
    handle may be replaced by a newer one."""

    def __init__(
        self, message: decode_pb2.DecodeCommand, handle: SealedHandle | None = None
    ) -> None:
        """message: the command, complete except for the handle."""
        self.message = message
        self.handle = handle
        self.is_written = False

    def write(self) -> bytes:
        """Return the encoded command; from now on it must not change."""
        self.is_written = True
        head = self.message.SerializeToString()
        if self.handle is None:
            return head
        # A second occurrence of the command's field is merged into the first, by protobuf's rule.
        kind, number = _PLACES[self.message.WhichOneof("command") or ""]
        return head + nested(kind, nested(number, self.handle.data))


def _signed(number: int) -> int:
    """Return an int64 from the unsigned number of its varint."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number


def _need(field: WireField, wire_type: int) -> None:
    """Raises: ValueError when the field is not encoded as `wire_type`."""
    if field.wire_type != wire_type:
        raise ValueError(f"field {field.number} is encoded as another type")
