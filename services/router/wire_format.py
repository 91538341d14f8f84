"""A request's bytes to a message, and if that fails, the name of the field that is broken.

protobuf refuses invalid UTF-8 when it parses, and gRPC would answer INTERNAL for that. So the
handler takes raw bytes and asks here. Pure; any thread.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from process.errors import InvalidArgument
from protos import inference_pb2

_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5


def parse_request(data: bytes, *, max_bytes: int) -> inference_pb2.GenerateRequest:
    """The message in `data`.

    Raises: InvalidArgument naming the field: too large, broken UTF-8, damaged, or with fields this
        version does not know
        (ignoring those could mean to serve something else than was asked).
    """
    if len(data) > max_bytes:
        raise InvalidArgument("request", f"has {len(data)} bytes, at most {max_bytes} are allowed")
    try:
        request = inference_pb2.GenerateRequest.FromString(data)
    except DecodeError as error:
        field = find_broken_text(inference_pb2.GenerateRequest(), data)
        if field is not None:
            raise InvalidArgument(field, "is not valid UTF-8") from error
        raise InvalidArgument("request", "is no GenerateRequest: damaged message") from error
    _check_known(request, "")
    return request


def _check_known(message: Message, path: str) -> None:
    """Raises: InvalidArgument naming the first part that has a field unknown here."""
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]
        raise InvalidArgument(
            path or "request", f"has field number {unknown.field_number}, unknown here"
        )
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue  # the maps here hold numbers
        name = f"{path}.{field.name}" if path else field.name
        if isinstance(value, Message):
            _check_known(value, name)
            continue
        for index, part in enumerate(value):
            _check_known(part, f"{name}[{index}]")


def find_broken_text(kind: Message, data: bytes, path: str = "") -> str | None:
    """Path of the first string field of an encoded `kind` that is not UTF-8; None if there is none
    or the bytes are damaged.
    """
    seen: Counter[int] = Counter()
    position = 0
    while position < len(data):
        try:
            tag, position = _varint(data, position)
            number, wire_type = tag >> 3, tag & 7
            begin, end = _extent(data, position, wire_type)
        except ValueError:
            return None
        position = end
        field = kind.DESCRIPTOR.fields_by_number.get(number)
        if field is None or wire_type != _LENGTH:
            continue
        is_single = isinstance(getattr(kind, field.name), str | bytes | Message)
        name = path + field.name + ("" if is_single else f"[{seen[number]}]")
        seen[number] += 1
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(data[begin:end]):
            return name
        if field.message_type is not None:
            inner = _empty(field.message_type)
            found = find_broken_text(inner, data[begin:end], name + ".")
            if found is not None:
                return found
    return None


def _empty(kind: Any) -> Message:
    # Any: the stubs call a descriptor by two names.
    return message_factory.GetMessageClass(kind)()


def _extent(data: bytes, position: int, wire_type: int) -> tuple[int, int]:
    """Where a field's value lies, after its tag. Raises: ValueError when it does not fit."""
    if wire_type == _VARINT:
        return position, _varint(data, position)[1]
    if wire_type == _LENGTH:
        size, position = _varint(data, position)
    elif wire_type in (_FIXED_64, _FIXED_32):
        size = 8 if wire_type == _FIXED_64 else 4
    else:
        raise ValueError("groups are not used here")
    if position + size > len(data):
        raise ValueError("beyond the end")
    return position, position + size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 64:
        byte = data[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position
    raise ValueError("no varint")


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
