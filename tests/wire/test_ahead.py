"""What a prefill worker still computes is asked for at itself: the last blocks come before their
handle does, count only if that names them just so, and nobody waits at the lender any more however
it ends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore import errors
from kvstore.client import StoreClient
from kvstore.lending import followers
from kvstore.lending.followers import Followers, Told
from kvstore.lending.server import LenderServicer
from kvstore.rpc import Attached
from process.errors import BatonError, DeadlineExceeded, Unavailable
from protos import common_pb2, kvstore_pb2
from services.decode import ahead as decode_ahead
from services.decode.states import DecodeState
from services.worker import handle as handles
from services.worker.connector import StoreConnector
from services.worker.handle_maker import HandleMaker
from services.worker.stores import RemoteStores, StoreUnusable
from tests.deadlines import Deadlines, task_of
from tests.handle_blocks import forge
from tests.unit.worker.builders import BLOCK_SIZE
from tests.wire.ahead_pair import CHUNK, PROMPT, ahead
from tests.wire.partial_handles import prefetch
from tests.wire.prefill_decode_pair import WAIT_S, Gate, until

FOR_EVER_S = 1e6


@pytest.fixture(autouse=True)
def _unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits is told of nothing because a time was over; who is not ended waits on."""
    for module in (followers, decode_ahead):
        monkeypatch.setattr(module, "MAX_WAIT_S", FOR_EVER_S)


async def test_the_last_blocks_are_here_before_their_handle(tmp_path: Path) -> None:
    async with ahead(tmp_path) as a:
        await a.asked()
        reply = await a.copied()
        (client,) = a.p.decode.core.remote_stores.clients
        gate = Gate(client, "get_blocks")  # nothing is read again
        answer = await a.answer(reply)
        assert not gate.entered.is_set()
        gate.open()
        leg = answer.leg
        assert leg.num_tokens_computed == 0 and answer.recomputed == {}
        assert leg.num_tokens_early == len(PROMPT)
        (count,) = leg.from_store
        assert (count.node_id, count.num_tokens) == (a.lender.node_id, len(PROMPT))
        assert not a.p.decode.core.counts.early_pulls_failed


async def test_a_handle_that_is_faster_waits_for_what_is_on_its_way(tmp_path: Path) -> None:
    async with ahead(tmp_path) as a:
        await a.asked()
        (client,) = a.p.decode.core.remote_stores.clients
        gate = Gate(client, "get_blocks")
        reply = await a.computed()
        await gate.wait_entered()
        assert a.state == [DecodeState.PREFETCHING]
        (waiting,) = a.p.decode_role.worker._requests.values()
        await a.stream.generate(a.key, reply)
        await until(lambda: waiting.arrival.is_over)
        waited_s = time.monotonic()
        gate.open()
        answer = await a.stream.collect(a.key)
        assert [*reply.token_ids, *answer.token_ids] == a.p.expected(PROMPT, 8)
        assert answer.leg.num_tokens_early == len(PROMPT) and answer.recomputed == {}
        stages = [stage for stage, from_s, to_s in waiting._clock.laps if from_s <= waited_s < to_s]
        assert stages == ["decode_fetch"], "it waits for its KV, and says so"


async def test_who_asks_where_the_rest_lies_hears_of_it_before_the_handle_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make, sign and write a handle takes a while, and the bytes take longer than its way."""
    order: list[str] = []
    rest, make = Followers.rest, HandleMaker.whole

    async def told(lender: Followers, *question: Any) -> Told:
        answer = await rest(lender, *question)
        order.append("told")
        return answer

    def made(maker: HandleMaker, *parts: Any) -> handles.Handle | None:
        order.append("handle made")
        return make(maker, *parts)

    monkeypatch.setattr(Followers, "rest", told)
    monkeypatch.setattr(HandleMaker, "whole", made)
    async with ahead(tmp_path) as a:
        await a.asked()
        await a.answer(await a.copied())
    assert order == ["told", "handle made"]


async def test_who_hears_of_nothing_new_for_a_while_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (followers, decode_ahead):
        monkeypatch.setattr(module, "MAX_WAIT_S", 0.01)
    monkeypatch.setattr(decode_ahead, "ANSWER_S", WAIT_S)  # however busy the machine is
    async with ahead(tmp_path) as a:
        await until(lambda: a.num_asked >= 3 and a.num_read == CHUNK // BLOCK_SIZE)
        answer = await a.answer(await a.copied())
        assert answer.leg.num_tokens_early == len(PROMPT) and answer.recomputed == {}
        assert not a.p.decode.core.counts.early_pulls_failed


async def test_who_knows_more_asks_anew_and_not_twice(tmp_path: Path) -> None:
    async with ahead(tmp_path, num_told=CHUNK // BLOCK_SIZE - 2) as a:
        await a.asked()
        assert a.num_asked == 1
        await prefetch(a.stream, a.key, a.first)
        await until(lambda: a.num_read == CHUNK // BLOCK_SIZE and a.num_asked == 2)
        await until(lambda: a.num_waiting == 1)
        answer = await a.answer(await a.copied())
        assert a.num_asked == 2
        assert answer.leg.num_tokens_early == len(PROMPT) and answer.recomputed == {}
        assert not a.p.decode.core.counts.early_pulls_failed


LAST_FULL = len(PROMPT) // BLOCK_SIZE - 1


def _other_checksum(handle: common_pb2.KvHandle) -> None:
    forge(handle.runs[0], LAST_FULL, checksum=1)


def _other_generation(handle: common_pb2.KvHandle) -> None:
    forge(handle.runs[0], LAST_FULL, generation=4)


def _other_tail(handle: common_pb2.KvHandle) -> None:
    forge(handle.tail, 0, checksum=1)


@pytest.mark.parametrize(
    ("change", "num_early", "reasons"),
    [
        (_other_checksum, LAST_FULL * BLOCK_SIZE, {errors.CHECKSUM}),
        (_other_generation, LAST_FULL * BLOCK_SIZE, {errors.GENERATION, errors.CHECKSUM}),
        (_other_tail, (LAST_FULL + 1) * BLOCK_SIZE, {errors.CHECKSUM}),
    ],
)
async def test_only_what_the_handle_names_just_so_counts(
    tmp_path: Path,
    change: Callable[[common_pb2.KvHandle], None],
    num_early: int,
    reasons: set[str],
) -> None:
    """Signed, and of other blocks than the lender spoke of: the handle decides."""
    async with ahead(tmp_path) as a:
        await a.asked()
        reply = await a.copied()
        change(reply.handle)
        handles.sign(reply.handle, a.p.prefill.core.handle_keys)
        answer = await a.answer(reply)
        assert set(answer.recomputed) <= reasons and answer.recomputed
        assert answer.leg.num_tokens_early == num_early
        assert a.p.decode.core.counts.early_pulls_failed == {"fingerprint": 1}


async def test_without_a_handle_that_names_it_what_came_is_not_used(tmp_path: Path) -> None:
    async with ahead(tmp_path) as a:
        await a.asked()
        reply = await a.copied()
        lease_id = reply.handle.runs[0].lease_id
        reply.ClearField("handle")
        answer = await a.answer(reply)
        assert answer.leg.num_tokens_early == CHUNK
        assert answer.leg.num_tokens_computed == len(PROMPT) - CHUNK
        a.lender.release(lease_id)


async def test_bytes_that_changed_under_the_lender_are_found(tmp_path: Path) -> None:
    async with ahead(tmp_path) as a:
        await a.asked()
        lend = a.lender.lend

        async def spoilt(blocks: Any, lease_id: str) -> Any:
            lent = await lend(blocks, lease_id)
            a.lender.lender.memory.view[lent[1][-2].frame, 5] ^= 1
            return lent

        a.lender.lend = spoilt  # type: ignore[method-assign]
        reply = await a.computed()
        await until(lambda: a.p.decode.core.counts.early_pulls_failed == {errors.CHECKSUM: 1})
        await until(lambda: a.state == [DecodeState.RESERVED])
        answer = await a.answer(reply)
        # Whoever reports it ends the lease: the handle may be asked about behind that.
        assert set(answer.recomputed) <= {errors.CHECKSUM, errors.LEASE_LAPSED, errors.GENERATION}
        assert answer.leg.num_tokens_early == LAST_FULL * BLOCK_SIZE


async def test_a_lender_with_no_room_for_those_who_wait_is_as_good_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "MAX_FOLLOWERS", 0)
    async with ahead(tmp_path) as a:
        failed = a.p.decode.core.counts.early_pulls_failed
        await until(lambda: failed.total() == 1)
        await until(lambda: a.num_read == CHUNK // BLOCK_SIZE)
        reply = await a.computed()
        answer = await a.answer(reply)
        assert answer.recomputed == {} and answer.leg.num_tokens_early == CHUNK


async def test_a_lender_that_cannot_be_reached_is_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By who pulls, not by who asks as well."""
    is_away, num_tries = True, 0
    way = RemoteStores.client

    async def client(stores: RemoteStores, *place: Any) -> Any:
        nonlocal num_tries
        if not is_away:
            return await way(stores, *place)
        num_tries += 1
        raise StoreUnusable("nobody is there", errors.STORE_UNAVAILABLE)

    monkeypatch.setattr(RemoteStores, "client", client)
    async with ahead(tmp_path) as a:
        await until(lambda: num_tries == 2 and a.state == [DecodeState.RESERVED])
        is_away = False
        answer = await a.answer(await a.computed())
        assert answer.recomputed == {} and answer.leg.num_tokens_early == 0
        failed = a.p.decode.core.counts.early_pulls_failed
        assert failed == {errors.STORE_UNAVAILABLE: 1}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DeadlineExceeded("no answer"), errors.DEADLINE),
        (Unavailable("the connection is gone"), errors.STORE_UNAVAILABLE),
        (errors.LeaseLapsed("released"), ""),
    ],
)
async def test_a_question_that_fails_is_counted_and_its_lender_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BatonError, reason: str
) -> None:
    """But not one whose prompt was given up."""
    has_failed = False
    suspected: list[tuple[BatonError, float]] = []

    async def fails(*_: Any, **options: Any) -> Any:
        nonlocal has_failed
        assert options["num_wanted"] > options["num_known"]
        has_failed = True
        raise error

    def suspect(_: Any, client: StoreClient, why: BatonError, *, had_s: float = math.inf) -> None:
        if why is error:
            suspected.append((why, had_s))

    monkeypatch.setattr(StoreClient, "await_lent", fails)
    monkeypatch.setattr(StoreConnector, "suspect", suspect)
    # There is time left behind the wait.
    monkeypatch.setattr(decode_ahead, "MAX_WAIT_S", WAIT_S)
    async with ahead(tmp_path) as a:
        await until(lambda: has_failed and a.num_read == CHUNK // BLOCK_SIZE)
        await until(lambda: a.state == [DecodeState.RESERVED])
        failed = a.p.decode.core.counts.early_pulls_failed
        assert failed == ({reason: 1} if reason else {})
        assert suspected == ([(error, decode_ahead.ANSWER_S)] if reason else [])
        answer = await a.answer(await a.computed())
        assert answer.recomputed == {}


async def test_a_lender_of_an_earlier_version_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would refuse a call that it does not know, and the connection with it."""
    of = Attached.of

    def earlier(reply: kvstore_pb2.AttachReply) -> Attached:
        reply.tells_when_lent = False
        return of(reply)

    monkeypatch.setattr(Attached, "of", earlier)
    monkeypatch.delattr(LenderServicer, "AwaitLent")
    async with ahead(tmp_path) as a:
        await until(lambda: a.num_read == CHUNK // BLOCK_SIZE)
        answer = await a.answer(await a.computed())
        assert answer.recomputed == {} and answer.leg.num_tokens_early == CHUNK
        assert not a.p.decode.core.counts.early_pulls_failed


@pytest.mark.parametrize(
    ("state", "how"),
    [
        *((state, "cancel") for state in ("asking", "copying", "copied")),
        ("asking", "deadline"),
        ("copied", "stream"),
    ],
)
async def test_ended_in_each_state_nobody_waits_at_the_lender(
    tmp_path: Path, state: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch)
    async with ahead(tmp_path) as a:
        await a.asked()
        gate: Gate | None = None
        if state == "copying":
            (client,) = a.p.decode.core.remote_stores.clients
            gate = Gate(client, "get_blocks")
            reply = await a.computed()
            await gate.wait_entered()
        elif state == "copied":
            reply = await a.copied()
        if how == "cancel":
            await a.stream.cancel(a.key)
        elif how == "deadline":
            await deadlines.end(task_of(a.p.decode_role.worker, a.key))
        else:
            await a.stream.close()
        await until(lambda: not a.p.decode_role.worker.states)
        await until(lambda: a.num_waiting == 0)
        if gate is not None:
            gate.open()
        if state == "asking":
            reply = await a.computed()
        a.lender.release(reply.handle.runs[0].lease_id)
