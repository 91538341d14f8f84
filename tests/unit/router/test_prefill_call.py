"""A prefill call's states, and whose a handle is that came."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from process.rpc_errors import BatonError, Internal, Unavailable
from protos import common_pb2, prefill_pb2
from services.router.sealed_handle import PrefillNews, PrefillWord, SealedHandle
from services.router.worker_client import PREFILL_TRANSITIONS, CallState, PrefillCall

CANCELLED, EXHAUSTED = 1, 8


@dataclass
class Made:
    """A call and what it did."""

    call: PrefillCall = field(init=False)
    sent: list[str] = field(default_factory=list)
    partials: list[int] = field(default_factory=list)
    given_back: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.call = PrefillCall(
            5,
            "prefill worker p",
            send=lambda command: self.sent.append(command.WhichOneof("command") or ""),
            on_partial=lambda handle: self.partials.append(_num_tokens(handle)),
            give_back=lambda handle: self.given_back.append(_num_tokens(handle)),
        )


def _num_tokens(handle: SealedHandle) -> int:
    return handle.opened().num_tokens


def _handle(num_tokens: int, *, is_partial: bool) -> SealedHandle:
    handle = common_pb2.KvHandle(num_tokens=num_tokens, is_partial=is_partial)
    return SealedHandle.seal(handle.SerializeToString())


def _says(handle: SealedHandle | None = None, **fields: Any) -> PrefillWord:
    return PrefillWord(5, PrefillNews(prefill_pb2.PrefillReply(**fields), handle), None)


def _fails(code: int, message: str) -> PrefillWord:
    failed = prefill_pb2.PrefillFailed(code=code, message=message, retry_after_s=0.5)
    return PrefillWord(5, None, failed)


FIRST = _says(token_ids=[9])
ACCOUNT = _says(_handle(40, is_partial=False), leg={"worker_id": "p"})
PARTIAL = _says(_handle(16, is_partial=True))


async def test_news_come_in_order_and_partial_handles_at_once() -> None:
    made = Made()
    for word in (PARTIAL, FIRST, ACCOUNT):
        made.call.on_word(word)
    assert made.partials == [16] and made.call.is_over
    assert list((await made.call.next()).reply.token_ids) == [9]
    account = await made.call.next()
    assert account.handle is not None and _num_tokens(account.handle) == 40
    made.call.close()
    assert not made.sent and not made.given_back
    with pytest.raises(Internal, match="last word"):
        await made.call.next()


async def test_a_worker_that_cancels_by_itself_is_stopping() -> None:
    made = Made()
    made.call.on_word(_fails(CANCELLED, "cancelled"))
    with pytest.raises(Unavailable, match="prefill worker p is stopping"):
        await made.call.next()


async def test_an_account_that_crosses_a_cancel_is_given_back() -> None:
    made = Made()
    made.call.close()
    made.call.close()
    assert made.sent == ["cancel"] and made.call.state is CallState.CANCELLING
    made.call.on_word(PARTIAL)  # its leases stay the worker's
    made.call.on_word(FIRST)
    made.call.on_word(ACCOUNT)
    assert made.given_back == [40] and made.partials == [] and made.call.is_over


WORDS = {
    "first": FIRST,
    "partial": PARTIAL,
    "account": ACCOUNT,
    "failed": _fails(EXHAUSTED, "no room"),
}


@given(st.lists(st.sampled_from([*WORDS, "close", "take", "break"]), max_size=12))
def test_whatever_happens_a_handle_has_one_owner(steps: list[str]) -> None:
    """Taken, or given back, never both, never neither once the call is closed."""

    async def play() -> None:
        made, taken, came = Made(), 0, 0
        for step in [*steps, "close"]:
            call = made.call
            if step == "close":
                call.close()
            elif step == "take":
                try:
                    news = await call.next() if call.has_news else None
                except BatonError:
                    news = None
                taken += news is not None and news.handle is not None
            elif not call.is_over:
                came += step == "account"
                if step == "break":
                    call.fail(Unavailable("gone"))
                else:
                    call.on_word(WORDS[step])
        assert taken + len(made.given_back) == came

    asyncio.run(play())


def test_the_states_are_the_ones_documented() -> None:
    assert PREFILL_TRANSITIONS[CallState.OVER] == frozenset()
    made = Made()
    made.call.on_word(ACCOUNT)
    with pytest.raises(Internal, match="over -> over"):
        made.call.on_word(ACCOUNT)
