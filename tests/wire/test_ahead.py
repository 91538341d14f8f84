"""What a prefill worker still computes is asked for at itself: the last blocks come before their
handle does, count only if that names them just so, and nobody waits at the lender any more however
it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore import errors
from kvstore.lending import followers
from kvstore.lending.server import LenderServicer
from kvstore.rpc import Attached
from protos import common_pb2, kvstore_pb2, prefill_pb2
from services.decode import ahead as decode_ahead
from services.decode.states import DecodeState
from services.worker import handle as handles
from tests.handle_blocks import forge
from tests.unit.worker.builders import BLOCK_SIZE, prompt_of
from tests.wire.deadlines import Deadlines, task_of
from tests.wire.decode_movers import hold_at
from tests.wire.partial_handles import prefetch
from tests.wire.prefill_call import PrefillCall
from tests.wire.prefill_decode_pair import WAIT_S, Gate, Pair, RouterStream, pair, until, whole

DIRECT = common_pb2.HANDOVER_PATH_DIRECT
PROMPT = prompt_of(30, start=3)
NUM_BLOCKS = -(-len(PROMPT) // BLOCK_SIZE)
CHUNK = 16


class Ahead:
    """A prompt of two chunks: decode was told of the first one, and prefill stands in the second.

    `key` is decode's, `call` prefill's."""

    def __init__(self, p: Pair, stream: RouterStream, key: int, call: PrefillCall) -> None:
        self.p, self.stream, self.key, self.call = p, stream, key, call
        assert p.prefill.core.lender is not None
        self.lender = p.prefill.core.lender

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
        """Decode has the first chunk, and waits at the lender for the rest."""
        await until(lambda: self.num_read >= CHUNK // BLOCK_SIZE)
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
async def ahead(folder: Path, **options: Any) -> AsyncIterator[Ahead]:
    async with pair(folder, chunk=CHUNK, **options) as p, p.stream() as stream:
        key = await stream.reserve(p.reserve(PROMPT, budget_ms=int(10 * WAIT_S * 1000)))
        await stream.next(key)
        hold_at(p.prefill_model, 2)
        ask = p.prefill_request(PROMPT, handover=DIRECT)
        call = PrefillCall(p.prefill_stub, ask, timeout_s=WAIT_S)
        async with asyncio.timeout(WAIT_S):
            first = await call.read()
        assert first.handle.is_partial
        await prefetch(stream, key, first.handle)
        made = Ahead(p, stream, key, call)
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
    for module in (followers, decode_ahead):  # who is not ended waits on
        monkeypatch.setattr(module, "MAX_WAIT_S", 1e6)
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
