"""Raw bytes: what protobuf cannot parse is named, what it would ignore is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from process.rpc_errors import InvalidArgument
from protos import common_pb2, inference_pb2
from services.router import grpc_service
from services.router.grpc_service import parse_request


def _parse(data: bytes) -> inference_pb2.GenerateRequest:
    return parse_request(data, max_bytes=10_000)


FULL = inference_pb2.GenerateRequest(
    model="MODEL",
    chat={
        "messages": [
            {"role": "ROLE0", "content": "CONTENT0"},
            {"role": "ROLE1", "content": "CONTENT1", "name": "NAME1"},
        ]
    },
    sampling={"temperature": 0.5, "stop": ["STOP0", "STOP1"], "stop_token_ids": [1, 2]},
    request_id="REQID",
    tenant="TENANT",
    adapter="ADAPTER",
    session="SESSION",
    priority=-3,
)


@pytest.mark.parametrize(
    ("mark", "field"),
    [
        (b"MODEL", "model"),
        (b"ROLE0", "chat.messages[0].role"),
        (b"CONTENT1", "chat.messages[1].content"),
        (b"NAME1", "chat.messages[1].name"),
        (b"STOP1", "sampling.stop[1]"),
        (b"REQID", "request_id"),
        (b"TENANT", "tenant"),
        (b"ADAPTER", "adapter"),
        (b"SESSION", "session"),
    ],
)
def test_broken_utf8_is_found(mark: bytes, field: str) -> None:
    data = FULL.SerializeToString().replace(mark, b"\xc0\xff" + mark[2:])
    with pytest.raises(InvalidArgument) as caught:
        _parse(data)
    assert caught.value.field == field


def test_a_surrogate_is_no_utf8() -> None:
    data = inference_pb2.GenerateRequest(text="abc").SerializeToString()
    with pytest.raises(InvalidArgument, match=r"^text: is not valid UTF-8"):
        _parse(data.replace(b"abc", b"\xed\xa0\x80"))


def test_good_bytes_pass() -> None:
    assert _parse(FULL.SerializeToString()) == FULL


@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_request_or_a_named_error(data: bytes) -> None:
    """Nothing else may come out: it would be INTERNAL for the client."""
    try:
        _parse(data)
    except InvalidArgument as error:
        assert error.field


@given(cut=st.integers(0, 150), byte=st.integers(0, 255))
def test_a_damaged_message_is_a_request_or_a_named_error(cut: int, byte: int) -> None:
    data = bytearray(FULL.SerializeToString())
    data[cut % len(data)] = byte
    try:
        _parse(bytes(data))
    except InvalidArgument as error:
        assert error.field


def test_size_is_bounded() -> None:
    data = inference_pb2.GenerateRequest(text="x" * 20).SerializeToString()
    assert parse_request(data, max_bytes=len(data))
    with pytest.raises(InvalidArgument, match=r"^request: has 22 bytes, at most 21"):
        parse_request(data, max_bytes=len(data) - 1)


def test_fields_of_a_newer_version_are_refused() -> None:
    """Ignoring one could serve something else than was asked."""
    newer = b"\xfa\x3e\x01x"  # field 1007, a string
    with pytest.raises(InvalidArgument, match="request: has field number 1007"):
        _parse(inference_pb2.GenerateRequest(text="a").SerializeToString() + newer)
    sampling = common_pb2.SamplingParams(top_k=1).SerializeToString() + newer
    inside = b"\x2a" + bytes([len(sampling)]) + sampling
    with pytest.raises(InvalidArgument, match="sampling: has field number 1007"):
        _parse(inside)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda part: inference_pb2.GenerateRequest(sampling={"beam": part}), "sampling.beam"),
        (lambda part: inference_pb2.GenerateRequest(sampling={"choice": part}), "sampling.choice"),
        (
            lambda part: inference_pb2.GenerateRequest(sampling={"bad_word_ids": [part]}),
            "sampling.bad_word_ids[0]",
        ),
    ],
)
def test_fields_of_a_newer_version_are_refused_in_every_part(make: Any, field: str) -> None:
    kinds = {"beam": common_pb2.BeamParams, "choice": common_pb2.StringList}
    kind = kinds.get(field.rpartition(".")[2], common_pb2.TokenSequence)
    part = kind.FromString(b"\xfa\x3e\x01x")
    with pytest.raises(InvalidArgument, match=re.escape(f"{field}: has field number 1007")):
        _parse(make(part).SerializeToString())


@pytest.mark.parametrize("num_calls", [0, 1])
def test_what_takes_too_long_to_check_is_refused_unchecked(num_calls: int) -> None:
    message = inference_pb2.ChatMessage(tool_calls=[{"id": "a"}] * num_calls)
    num_messages = grpc_service.MAX_PARTS // (1 + num_calls)
    chat = inference_pb2.ChatMessages(messages=[message] * num_messages)
    full = inference_pb2.GenerateRequest(chat=chat)
    assert parse_request(full.SerializeToString(), max_bytes=1_000_000) == full
    full.chat.messages.add(role="user")
    with pytest.raises(InvalidArgument, match=r"^chat\.messages.*: has too many entries"):
        parse_request(full.SerializeToString(), max_bytes=1_000_000)


def test_a_large_damaged_message_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(*given: Any) -> None:
        raise AssertionError("searched")

    monkeypatch.setattr(grpc_service, "find_broken_text", searched)
    with pytest.raises(InvalidArgument, match="damaged message, or text that is not valid UTF-8"):
        parse_request(b"\x0a\x01\xff" * 50_000, max_bytes=1_000_000)
