"""A request's bytes to a message, and if that fails, the name of the field that is broken.

protobuf refuses invalid UTF-8 when it parses, and gRPC would answer INTERNAL for that. So the
handler takes raw bytes and asks here. Pure; any thread.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from process.errors import InvalidArgument
from protos import inference_pb2
from services.router.wire_fields import LENGTH, fields_of

MAX_PARTS = 32_768
"""Chat messages, tool calls and the like in one request. Each takes microseconds to check, on the
loop that serves everybody.
"""

MAX_SEARCHED_BYTES = 64 * 1024
"""Of a damaged message that is searched for the field to name, for the same reason."""


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
        if len(data) > MAX_SEARCHED_BYTES:
            why = "is no GenerateRequest: damaged message, or text that is not valid UTF-8"
            raise InvalidArgument("request", why) from error
        field = find_broken_text(inference_pb2.GenerateRequest(), data)
        if field is not None:
            raise InvalidArgument(field, "is not valid UTF-8") from error
        raise InvalidArgument("request", "is no GenerateRequest: damaged message") from error
    _check_known(request, "")
    return request


def _check_known(message: Message, path: str, left: int = MAX_PARTS) -> int:
    """`left`: how many parts there may be. Returns: how many more.

    Raises: InvalidArgument naming the first part that has a field unknown here, or is too many.
    """
    for unknown in UnknownFieldSet(message):  # type: ignore[attr-defined]
        raise InvalidArgument(
            path or "request", f"has field number {unknown.field_number}, unknown here"
        )
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue  # the maps here hold numbers
        name = f"{path}.{field.name}" if path else field.name
        if isinstance(value, Message):
            left = _check_known(value, name, left)
            continue
        left -= len(value)
        if left < 0:
            raise InvalidArgument(name, f"has too many entries: {MAX_PARTS} are allowed in all")
        for index, part in enumerate(value):
            left = _check_known(part, f"{name}[{index}]", left)
    return left


def find_broken_text(kind: Message, data: bytes, path: str = "") -> str | None:
    """Path of the first string field of an encoded `kind` that is not UTF-8; None if there is none
    or the bytes are damaged.
    """
    with contextlib.suppress(ValueError):
        return _find_broken_text(kind, data, path)
    return None


def _find_broken_text(kind: Message, data: bytes, path: str) -> str | None:
    """Raises: ValueError where the bytes are damaged."""
    seen: Counter[int] = Counter()
    for number, wire_type, _, begin, end in fields_of(data):
        field = kind.DESCRIPTOR.fields_by_number.get(number)
        if field is None or wire_type != LENGTH:
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


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
