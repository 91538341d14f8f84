"""The fields of an encoded protobuf message, one after the other, without making the message. Pure;
any thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

VARINT, FIXED_64, LENGTH, FIXED_32 = 0, 1, 2, 5
"""Wire types."""


class Field(NamedTuple):
    """Where one field lies: its tag from `start` on, its value in [begin, end)."""

    number: int
    wire_type: int
    start: int
    begin: int
    end: int


def fields_of(data: bytes, begin: int = 0, end: int | None = None) -> Iterator[Field]:
    """The fields of the message in data[begin:end], in the order in which they lie there.

    Raises: ValueError where the bytes are no message, behind the fields that were.
    """
    end = len(data) if end is None else end
    position = begin
    while position < end:
        start = position
        tag, position = varint(data, position)
        field = Field(tag >> 3, tag & 7, start, *_extent(data, position, tag & 7))
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
