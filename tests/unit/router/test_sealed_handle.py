"""Handles that are passed on unread arrive as they were, and what is no handle is not passed on."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protos import common_pb2, decode_pb2, prefill_pb2
from services.router.sealed_handle import (
    LENGTH,
    Command,
    PrefillNews,
    SealedHandle,
    fields_of,
    nested,
    varint,
    words_of,
)

handles = st.builds(
    lambda ids, frames, is_partial, tail, signature: common_pb2.KvHandle(
        request_id=ids,
        is_partial=is_partial,
        signature=signature,
        runs=[
            common_pb2.BlockRun(
                node_id=ids, blocks=b"".join(frame.to_bytes(4, "little") for frame in frames)
            )
        ],
        tail=common_pb2.BlockRun(lease_id=tail) if tail else None,
    ),
    st.text(max_size=200),
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.booleans(),
    st.text(max_size=3),
    st.binary(max_size=8),
)
token_lists = st.lists(st.integers(0, 2**32 - 1), max_size=3)


@given(handle=st.none() | handles, token_ids=token_lists, has_leg=st.booleans())
def test_a_reply_is_the_same_in_two_parts(
    handle: common_pb2.KvHandle | None, token_ids: list[int], has_leg: bool
) -> None:
    leg = common_pb2.KvLeg(worker_id="p") if has_leg else None
    sent = prefill_pb2.PrefillReply(token_ids=token_ids, handle=handle, leg=leg)
    news = PrefillNews.parse(sent.SerializeToString())
    assert not news.reply.HasField("handle")
    assert (news.handle is None) == (handle is None)
    if handle is not None and news.handle is not None:
        assert news.handle.is_partial == handle.is_partial
        assert news.handle.opened() == handle
        sent.ClearField("handle")
    assert news.reply == sent
    says_more = bool(token_ids) or has_leg
    is_partial = handle is not None and handle.is_partial
    assert news.is_only_partial == (is_partial and not says_more)


events = st.builds(
    lambda key, token_ids, handle, has_leg, problem: (
        prefill_pb2.PrefillEvent(key=key, failed={"code": 14, "message": problem})
        if problem
        else prefill_pb2.PrefillEvent(
            key=key,
            reply={
                "token_ids": token_ids,
                "handle": handle,
                "leg": common_pb2.KvLeg(worker_id="p") if has_leg else None,
            },
        )
    ),
    st.integers(0, 2**64 - 1),
    token_lists,
    st.none() | handles,
    st.booleans(),
    st.sampled_from(["", "", "", "no room"]),
)


@given(st.lists(events, max_size=5))
def test_what_a_prefill_worker_says_is_the_same_word_by_word(
    sent: list[prefill_pb2.PrefillEvent],
) -> None:
    data = prefill_pb2.PrefillEvents(events=sent).SerializeToString()
    words = list(words_of(data))
    assert [word.key for word in words] == [event.key for event in sent]
    for word, event in zip(words, sent, strict=True):
        if event.HasField("failed"):
            assert word.failed == event.failed and word.news is None and word.is_last
            continue
        assert word.failed is None
        assert word.news == PrefillNews.parse(event.reply.SerializeToString())
        assert word.is_last == event.reply.HasField("leg")


@given(st.binary(max_size=40))
def test_bytes_that_are_no_events_are_refused_or_say_what_protobuf_reads(data: bytes) -> None:
    try:
        words = list(words_of(data))
    except (ValueError, DecodeError):
        return
    read = prefill_pb2.PrefillEvents.FromString(data)
    assert [word.key for word in words] == [event.key for event in read.events]


def test_an_event_without_news_is_refused() -> None:
    data = prefill_pb2.PrefillEvents(events=[{"key": 3}]).SerializeToString()
    with pytest.raises(ValueError, match="without news"):
        list(words_of(data))


@given(handle=st.none() | handles, token_ids=token_lists)
def test_a_command_with_a_sealed_handle_is_read_as_one_made_with_it(
    handle: common_pb2.KvHandle | None, token_ids: list[int]
) -> None:
    sealed = None if handle is None else SealedHandle.seal(handle.SerializeToString())
    plain = decode_pb2.GenerateFromHandle(output_token_ids=token_ids, handle=handle)
    bare = decode_pb2.GenerateFromHandle(output_token_ids=token_ids)
    command = Command(decode_pb2.DecodeCommand(key=7, generate=bare), sealed)
    assert not command.is_written
    read = decode_pb2.DecodeCommand.FromString(command.write())
    assert read == decode_pb2.DecodeCommand(key=7, generate=plain)
    assert command.is_written
    early = decode_pb2.DecodeCommand(key=8, prefetch=decode_pb2.PrefetchDecode())
    read = decode_pb2.DecodeCommand.FromString(Command(early, sealed).write())
    prefetch = decode_pb2.PrefetchDecode(handle=handle)
    assert read == decode_pb2.DecodeCommand(key=8, prefetch=prefetch)


@given(
    handles,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(-(2**63), 2**63 - 1),
)
def test_its_extent_is_what_the_opened_handle_says(
    handle: common_pb2.KvHandle, num_tokens: int, block_size: int, deadline_unix_ms: int
) -> None:
    handle.num_tokens, handle.block_size = num_tokens, block_size
    handle.deadline_unix_ms = deadline_unix_ms
    sealed = SealedHandle.seal(handle.SerializeToString())
    assert sealed.extent() == (num_tokens, block_size, deadline_unix_ms)


def test_what_has_no_extent_is_told() -> None:
    number = common_pb2.KvHandle.NUM_TOKENS_FIELD_NUMBER
    with pytest.raises(ValueError, match="another type"):
        SealedHandle(nested(number, b"x"), is_partial=False).extent()


def test_a_handle_that_comes_in_two_parts_is_one() -> None:
    first = common_pb2.KvHandle(request_id="r").SerializeToString()
    second = common_pb2.KvHandle(is_partial=True).SerializeToString()
    number = prefill_pb2.PrefillReply.HANDLE_FIELD_NUMBER
    news = PrefillNews.parse(nested(number, first) + nested(number, second))
    assert news.handle is not None and news.handle.is_partial
    assert news.handle.opened() == common_pb2.KvHandle(request_id="r", is_partial=True)


@given(st.binary(max_size=40))
def test_bytes_that_are_no_reply_are_refused_as_protobuf_refuses_them(data: bytes) -> None:
    """A handle's inside is not looked at: whoever uses it looks at its signature first."""
    try:
        news = PrefillNews.parse(data)
    except (ValueError, DecodeError):
        return
    if news.handle is None:
        assert news.reply == prefill_pb2.PrefillReply.FromString(data)


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_a_reply_that_was_cut_short_is_refused(cut: int) -> None:
    handle = common_pb2.KvHandle(request_id="request", is_partial=True)
    data = prefill_pb2.PrefillReply(handle=handle).SerializeToString()
    with pytest.raises(ValueError):
        PrefillNews.parse(data[:-cut])


def test_a_partial_flag_of_another_type_is_no_flag() -> None:
    data = nested(common_pb2.KvHandle.IS_PARTIAL_FIELD_NUMBER, b"\x01")
    with pytest.raises(ValueError, match="another type"):
        SealedHandle.seal(data)
    wrong = bytes([prefill_pb2.PrefillReply.HANDLE_FIELD_NUMBER << 3, 1])
    with pytest.raises(ValueError, match="another type"):
        PrefillNews.parse(wrong)


@given(st.integers(1, 2**29 - 1), st.binary(max_size=300))
def test_a_nested_field_is_found_again(number: int, value: bytes) -> None:
    data = b"\x08\x01" + nested(number, value[:1], value[1:]) if number != 1 else nested(1, value)
    field = list(fields_of(data))[-1]
    assert (field.number, field.wire_type) == (number, LENGTH)
    assert data[field.begin : field.end] == value
    assert varint(data, field.start)[0] >> 3 == number
