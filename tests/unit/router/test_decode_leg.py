"""A leg's states and its merging inbox."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from process.deadline import Deadline
from process.rpc_errors import Internal, Unavailable
from protos import common_pb2, decode_pb2
from services.router.sealed_handle import Command, SealedHandle
from services.router.worker_client import DECODE_TRANSITIONS, CallUpdate, DecodeCall, LegState

# Counted from when the tests are collected: a long run must not reach it.
FAR = Deadline.after(1e6)


def _leg() -> tuple[DecodeCall, list[Command]]:
    sent: list[Command] = []
    return DecodeCall(1, "d", sent.append), sent


def _kinds(sent: list[Command]) -> list[str | None]:
    return [command.message.WhichOneof("command") for command in sent]


def _partial(number: int) -> SealedHandle:
    return SealedHandle.seal(
        common_pb2.KvHandle(is_partial=True, num_tokens=number).SerializeToString()
    )


def _event(**fields: Any) -> decode_pb2.DecodeEvent:
    return decode_pb2.DecodeEvent(key=1, **fields)


GENERATE = decode_pb2.GenerateFromHandle(output_token_ids=[5])
RESERVED = _event(reserved={"num_tokens_local": 3})
FINISHED = _event(finished={"token_ids": [9], "finish_reason": common_pb2.FINISH_REASON_LENGTH})


def _ids(arrival: CallUpdate) -> list[int]:
    (news,) = arrival.samples
    return news.token_ids


@pytest.mark.parametrize("state", [LegState.RESERVING, LegState.RESERVED, LegState.GENERATING])
async def test_cancel_in_each_state(state: LegState) -> None:
    leg, sent = _leg()
    if state is not LegState.RESERVING:
        leg.on_event(RESERVED)
    if state is LegState.GENERATING:
        leg.generate(GENERATE)
    sent.clear()
    leg.cancel()
    leg.cancel()
    assert _kinds(sent) == ["cancel"]
    # What was under way already is dropped, the last word counts.
    leg.on_event(RESERVED)
    leg.on_event(_event(tokens={"token_ids": [1]}))
    leg.on_event(FINISHED)
    finished = await leg.wait_over()
    assert finished is not None and leg.state is LegState.OVER
    assert (await leg.take()).samples == ()


@pytest.mark.parametrize("state", [s for s in LegState if s is not LegState.OVER])
async def test_a_broken_stream_ends_each_state(state: LegState) -> None:
    leg, _ = _leg()
    leg.state = state
    leg.fail(Unavailable("gone"))
    assert leg.is_over
    assert (await leg.take()).error is not None
    with pytest.raises(Unavailable):
        leg.generate(GENERATE)


def test_what_no_state_allows_is_our_own_mistake() -> None:
    leg, _ = _leg()
    with pytest.raises(Internal):
        leg.generate(GENERATE)
    assert all(
        LegState.OVER in after or state is LegState.OVER
        for state, after in DECODE_TRANSITIONS.items()
    )


@given(st.lists(st.lists(st.integers(0, 100), max_size=3), max_size=20), st.data())
def test_no_token_is_lost_or_doubled(steps: list[list[int]], data: st.DataObject) -> None:
    async def run() -> None:
        leg, _ = _leg()
        leg.on_event(RESERVED)
        leg.generate(GENERATE)
        taken: list[int] = []
        for step in steps:
            leg.on_event(_event(tokens={"token_ids": step}))
            if step and data.draw(st.booleans()):
                taken += _ids(await leg.take())
        leg.on_event(FINISHED)
        taken += _ids(await leg.take())
        assert taken == [token_id for step in steps for token_id in step] + [9]

    asyncio.run(run())


@given(
    st.lists(
        st.sampled_from(
            ["reserved", "prefetch", "write", "generate", "tokens", "cancel", "finished", "broken"]
        ),
        max_size=16,
    )
)
def test_a_partial_handle_goes_only_to_a_reservation_that_waits(doings: list[str]) -> None:
    """Whatever happens in whatever order; what no worker does is left out. Of those that wait to be
    written the worker is told the newest, and no other."""
    leg, sent = _leg()
    told: list[int] = []
    newest = 0
    due: list[int] = []
    for number, doing in enumerate(doings, start=1):
        before = leg.state
        if doing == "prefetch":
            leg.prefetch(_partial(number))
            newest = number if before is LegState.RESERVED else newest
            assert leg.state is before
        elif doing == "write":
            for command in sent:
                if not command.is_written:
                    told += _told(command)
            due += [newest] if newest and newest not in due else []
        elif doing == "generate" and before is LegState.RESERVED:
            leg.generate(GENERATE)
        elif doing == "cancel":
            leg.cancel()
        elif before is LegState.OVER:
            continue
        elif doing == "reserved":
            leg.on_event(RESERVED)
        elif doing == "tokens":
            leg.on_event(_event(tokens={"token_ids": [1]}))
        elif doing == "finished":
            leg.on_event(FINISHED)
        elif doing == "broken":
            leg.fail(Unavailable("gone"))
    assert told == due
    kinds = _kinds(sent)
    assert kinds.count("prefetch") - len(due) in (0, 1)  # at most one waits to be written
    # Before everything that ends the wait.
    assert "prefetch" not in kinds[kinds.count("prefetch") :]


def _told(command: Command) -> list[int]:
    """Writes a command. Returns: the tokens of the partial handle in it."""
    message = decode_pb2.DecodeCommand.FromString(command.write())
    return [message.prefetch.handle.num_tokens] if message.HasField("prefetch") else []


def _moved(*, with_handle: bool = True) -> decode_pb2.DecodeEvent:
    event = _event(moved={"num_output_tokens": [2], "reason": "draining"})
    if with_handle:
        event.moved.handle.num_tokens = 7
    return event


def _generating() -> tuple[DecodeCall, list[SealedHandle]]:
    leg, _ = _leg()
    given_back: list[SealedHandle] = []
    leg.give_back = given_back.append
    leg.on_event(RESERVED)
    leg.generate(GENERATE)
    return leg, given_back


@pytest.mark.parametrize("is_cancelled_first", [False, True])
async def test_a_handle_that_nobody_took_is_given_back_once(is_cancelled_first: bool) -> None:
    leg, given_back = _generating()
    if is_cancelled_first:
        leg.cancel()
    leg.on_event(_moved())
    leg.cancel()
    leg.cancel()
    assert [handle.opened().num_tokens for handle in given_back] == [7]
    last = await leg.wait_over()
    assert isinstance(last, decode_pb2.DecodeMoved) and last.reason == "draining"
