"""What a prefill worker still computes is asked for at itself: the last blocks come before their
handle does, count only if that names them just so, and nobody waits at the lender any more however
it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore import errors
from kvstore.client import StoreClient
from kvstore.lending import followers
from kvstore.lending.followers import Told
from kvstore.lending.server import LenderServicer
from kvstore.rpc import Attached
from process.errors import BatonError, DeadlineExceeded, Unavailable
from protos import common_pb2, kvstore_pb2, prefill_pb2
from services.decode import ahead as decode_ahead
from services.decode.states import DecodeState
from services.worker import handle as handles
from services.worker.config import WorkerLimits
from services.worker.connector import StoreConnector
from services.worker.stores import RemoteStores, StoreUnusable
from tests.handle_blocks import forge
from tests.unit.worker.builders import BLOCK_SIZE, prompt_of
from tests.wire.deadlines import Deadlines, task_of
from tests.wire.decode_movers import hold_at
from tests.wire.partial_handles import partial, prefetch
from tests.wire.prefill_call import PrefillCall
from tests.wire.prefill_decode_pair import (
    LEASE_TTL_S,
    WAIT_S,
    Gate,
    Pair,
    RouterStream,
    pair,
    until,
    whole,
)

DIRECT = common_pb2.HANDOVER_PATH_DIRECT
PROMPT = prompt_of(30, start=3)
NUM_BLOCKS = -(-len(PROMPT) // BLOCK_SIZE)
CHUNK = 16
FOR_EVER_S = 1e6


@pytest.fixture(autouse=True)
def _unbounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits is told of nothing because a time was over; who is not ended waits on."""
    for module in (followers, decode_ahead):
        monkeypatch.setattr(module, "MAX_WAIT_S", FOR_EVER_S)


class Ahead:
    """A prompt of two chunks: decode was told of the first one, and prefill stands in the second.

    `key` is decode's, `call` prefill's, `first` names all of the first chunk."""

    def __init__(
        self,
        p: Pair,
        stream: RouterStream,
        key: int,
        call: PrefillCall,
        first: common_pb2.KvHandle,
        num_told: int,
    ) -> None:
        """num_told: blocks that decode was told of."""
        self.p, self.stream, self.key, self.call = p, stream, key, call
        self.first, self._num_told = first, num_told
        assert p.prefill.core.lender is not None
        self.lender = p.prefill.core.lender
        self.num_asked = 0
        """Questions that came to the lender."""
        rest = self.lender.lender.followers.rest

        async def counted(*question: Any) -> Told:
            self.num_asked += 1
            return await rest(*question)

        self.lender.lender.followers.rest = counted  # type: ignore[method-assign]

    @property
    def num_waiting(self) -> int:
        return self.lender.lender.followers.num_waiting

    @property
    def num_read(self) -> int:
        """Blocks that decode has copied for it."""
        (request,) = self.p.decode_role.worker._requests.values()
        return request._leg.num_bytes_read // self.lender.loans.frame_bytes

    @property
    def state(self) -> list[DecodeState]:
        return list(self.p.decode_role.worker.states.values())

    async def asked(self) -> None:
        """Decode has what it was told of, and waits at the lender for the rest."""
        await until(lambda: self.num_read >= self._num_told)
        await until(lambda: self.num_waiting == 1 and self.state == [DecodeState.RESERVED])

    async def computed(self) -> prefill_pb2.PrefillReply:
        """Prefill goes on to its end. Returns: its last word, which decode has not got."""
        self.p.prefill_model.release()
        async with asyncio.timeout(WAIT_S):
            return await whole(self.call)

    async def copied(self) -> prefill_pb2.PrefillReply:
        """Until the rest has come, too."""
        reply = await self.computed()
        await until(lambda: self.num_read == NUM_BLOCKS)
        await until(lambda: self.num_waiting == 0 and self.state == [DecodeState.RESERVED])
        return reply

    async def answer(self, reply: prefill_pb2.PrefillReply) -> Any:
        """Decode gets the last word. The answer is exact, whatever that says."""
        await self.stream.generate(self.key, reply)
        answer = await self.stream.collect(self.key)
        assert [*reply.token_ids, *answer.token_ids] == self.p.expected(PROMPT, 8)
        return answer


@contextlib.asynccontextmanager
async def ahead(
    folder: Path, *, num_told: int = CHUNK // BLOCK_SIZE, **options: Any
) -> AsyncIterator[Ahead]:
    """num_told: blocks of the first chunk that decode is told of."""
    limits = WorkerLimits(
        store_wait_s=WAIT_S,
        lease_ttl_s=LEASE_TTL_S,
        attach_budget_s=WAIT_S,
        transfer_budget_s=WAIT_S,
        put_budget_s=WAIT_S,
        drain_s=0.2,
    )
    async with pair(folder, chunk=CHUNK, limits=limits, **options) as p, p.stream() as stream:
        key = await stream.reserve(p.reserve(PROMPT, budget_ms=int(10 * WAIT_S * 1000)))
        await stream.next(key)
        hold_at(p.prefill_model, 2)
        ask = p.prefill_request(PROMPT, handover=DIRECT)
        call = PrefillCall(p.prefill_stub, ask, timeout_s=WAIT_S)
        async with asyncio.timeout(WAIT_S):
            first = await call.read()
        assert first.handle.is_partial and first.handle.num_tokens == CHUNK
        made = Ahead(p, stream, key, call, first.handle, num_told)
        is_all = num_told == CHUNK // BLOCK_SIZE
        told = first.handle if is_all else partial(p, first.handle, num_told)
        await prefetch(stream, key, told)
        yield made
        p.prefill_model.release()
        call.vanish()
        await until(lambda: made.num_waiting == 0)
        await until(lambda: p.prefill_role.worker.behind.num_writers == 0)
        await until(lambda: made.lender.num_lent_blocks == made.lender.loans.num_leases == 0)
        await p.check()


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
        gate.open()
        answer = await a.stream.collect(a.key)
        assert [*reply.token_ids, *answer.token_ids] == a.p.expected(PROMPT, 8)
        assert answer.leg.num_tokens_early == len(PROMPT) and answer.recomputed == {}


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
