"""A call's room while its message is read: whose it is until when."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import grpc
import grpc.aio
import pytest

from process import rpc
from process.grpc_server import CallGate
from process.memory_budget import MemoryBudget
from process.rpc_errors import BatonError, DeadlineExceeded, InvalidArgument, NoCapacity
from tests.harness.waiting import settled

WAIT_S = 60.0
PATH = "/a.B/C"


class _Refused(Exception):
    """As gRPC's own, which ends a handler that refused."""


class _Caller:
    """A call's context, of a client whose message is `message`; None: it does not come."""

    def __init__(self, message: object) -> None:
        self._message = message

    async def read(self) -> object:
        if self._message is None:
            await asyncio.Event().wait()
        return self._message


class _Refusals:
    """Each takes until `may_end`: its client reads nothing."""

    def __init__(self, intake: MemoryBudget) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()
        self.errors: list[BatonError] = []
        self.num_bytes_held: list[int] = []
        self._intake = intake

    async def refuse(self, context: Any, error: BatonError) -> NoReturn:
        self.errors.append(error)
        self.num_bytes_held.append(self._intake.num_bytes)
        self.begun.set()
        await self.may_end.wait()
        raise _Refused


async def _guard(path: str, context: Any) -> str:
    return "host"


async def _serve(request: Any, context: Any) -> Any:
    return request


def _method(intake: MemoryBudget, read_s: float = WAIT_S) -> Any:
    gate = CallGate(_guard, intake, max_bytes=50, read_s=read_s)
    handler = grpc.unary_unary_rpc_method_handler(_serve)
    return gate.handler(handler, PATH).stream_unary


@pytest.fixture
def intake() -> MemoryBudget:
    return MemoryBudget(100, wait_s=WAIT_S)


@pytest.fixture
def refusals(intake: MemoryBudget, monkeypatch: pytest.MonkeyPatch) -> _Refusals:
    made = _Refusals(intake)
    monkeypatch.setattr(rpc, "abort", made.refuse)
    return made


async def test_who_is_refused_for_being_slow_and_reads_nothing_holds_nobody_up(
    intake: MemoryBudget, refusals: _Refusals
) -> None:
    intake.patience_s = 0.001
    method = _method(intake)
    slow = asyncio.create_task(method(None, _Caller(None)))
    await settled()
    assert intake.num_bytes == intake.max_owner_bytes
    other = asyncio.create_task(method(None, _Caller(b"here")))
    await refusals.begun.wait()
    assert isinstance(refusals.errors[0], NoCapacity) and not slow.done()
    await settled()
    assert other.done() and await other == b"here"
    intake.check_integrity()
    refusals.may_end.set()
    with pytest.raises(_Refused):
        await slow
    assert intake.num_bytes == 0
    intake.check_integrity()


@pytest.mark.parametrize(
    ("message", "read_s", "kind"),
    [(None, 0.001, DeadlineExceeded), (grpc.aio.EOF, WAIT_S, InvalidArgument)],
)
async def test_whoever_is_refused_holds_no_room(
    intake: MemoryBudget,
    refusals: _Refusals,
    message: object,
    read_s: float,
    kind: type[BatonError],
) -> None:
    refusals.may_end.set()
    with pytest.raises(_Refused):
        await _method(intake, read_s)(None, _Caller(message))
    assert [type(error) for error in refusals.errors] == [kind]
    assert refusals.num_bytes_held == [0]
    intake.check_integrity()


async def test_a_call_that_is_cancelled_while_it_is_read_gives_its_room_back(
    intake: MemoryBudget,
) -> None:
    call = asyncio.create_task(_method(intake)(None, _Caller(None)))
    await settled()
    assert intake.num_bytes == 50
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert intake.num_bytes == 0
    intake.check_integrity()
