"""A worker changes its role: it drains as the one, and serves as the other over the same engine;
the one that it has not says so; what was cached still is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from process.rpc_errors import BatonError, InvalidArgument, Unavailable
from tests.harness.decode_movers import Movers, lone_decode, movers, release_when_taken_out
from tests.harness.gated_engine import GatedModel, prompt_of
from tests.harness.prefill_decode_pair import Pair, Sample, pair, patient
from tests.harness.waiting import until

pytestmark = pytest.mark.oracle

PROMPT = prompt_of(30, start=3)
SHORT = PROMPT[:10]
"""One step."""


@pytest.fixture
async def m(tmp_path: Path) -> AsyncIterator[Movers]:
    async with movers(tmp_path) as made:
        yield made


@contextlib.asynccontextmanager
async def flipped(p: Pair) -> AsyncIterator[Pair]:
    """The prefill worker decodes, the decode worker prefills."""
    for worker, role in ((p.at_prefill, "decode"), (p.at_decode, "prefill")):
        await worker.set_role(role)
    async with p.swapped():
        yield p


async def test_both_workers_change_places_and_serve_as_before(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        first = await p.generate(PROMPT)
        await p.check()
        before = [worker.status() for worker in (p.at_prefill, p.at_decode)]
        memories = [worker.memory for worker in (p.at_prefill, p.at_decode)]
        async with flipped(p):
            after = [worker.status() for worker in (p.at_decode, p.at_prefill)]
            assert [one.worker_id for one in after] == [one.worker_id for one in before]
            assert not {one.incarnation for one in before} & {one.incarnation for one in after}
            assert [one.role for one in after] == ["decode", "prefill"]
            # A device's checksums are captured once.
            assert p.at_decode.memory is memories[0] and p.at_prefill.memory is memories[1]
            again = await p.generate(PROMPT, name="again")
            assert again.token_ids == first.token_ids == p.expected(PROMPT, 8)
            assert again.prefill is not None and again.prefill.leg.num_tokens_local == 28
            other = prompt_of(35, start=8)
            answer = await p.generate(other, name="other")
            assert answer.token_ids == p.expected(other, 8)
            assert answer.leg.num_tokens_computed == 0 and not answer.recomputed
            await p.check()
            async with flipped(p):
                last = await p.generate(PROMPT, name="last")
                assert last.token_ids == first.token_ids
                await p.check()


async def test_the_role_that_it_has_not_says_which_it_has(m: Movers) -> None:
    worker = m.at(0)
    with pytest.raises(Unavailable, match=r"^decode-0 has the role decode now$"):
        await worker.status_as("prefill")
    assert (await worker.status_as("decode")).role == "decode"
    reply = await worker.set_role("decode")  # it has it already
    assert reply.incarnation == worker.status().incarnation
    stream = m.streams[0]
    reply = await worker.set_role("prefill")
    assert (reply.worker_id, reply.role) == ("decode-0", "prefill")
    assert reply.incarnation == worker.status().incarnation
    assert await stream.ended() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(Unavailable, match=r"^decode-0 has the role prefill now$"):
        await worker.status_as("decode")
    status = await worker.status_as("prefill")
    assert (status.role, status.draining, status.integrity_error) == ("prefill", False, "")


async def test_streams_move_away_before_the_role_changes(tmp_path: Path) -> None:
    async with movers(tmp_path, limits=patient(drain_s=60.0)) as m:
        sample, key = Sample(), await m.begin_held(1, SHORT, max_tokens=40)
        release_when_taken_out(m, 0)
        changing = asyncio.create_task(m.at(0).set_role("prefill"))
        moved = (await m.last_word(0, key, sample)).moved
        await changing
        finished = await m.go_on(1, moved, [sample], SHORT, max_tokens=40)
        assert sample.token_ids == GatedModel().generate(SHORT, 40)
        assert finished.leg.num_tokens_computed == 0 and not finished.leg.recomputed


async def test_two_changes_wait_for_one_another_and_a_stop_for_both(m: Movers) -> None:
    worker, made = m.at(0), m.workers[0]
    await m.begin_held(1, SHORT, max_tokens=40)
    one = asyncio.create_task(made.set_role("prefill"))
    two = asyncio.create_task(made.set_role("decode"))
    await until(lambda: worker.is_draining)
    assert worker.why_not_ready == "draining"
    worker.model.release()
    first, second = await one, await two
    assert (first.role, second.role) == ("prefill", "decode")
    assert first.incarnation != second.incarnation and worker.why_not_ready == ""
    three = asyncio.create_task(made.set_role("prefill"))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(made.stop())
    with pytest.raises(Unavailable, match="is stopping"):
        await three
    await stopping
    with pytest.raises(Unavailable, match="is stopping"):
        await made.set_role("decode")


async def test_a_caller_that_goes_leaves_no_half_of_a_role(m: Movers) -> None:
    worker = m.at(0)
    await m.begin_held(1, SHORT, max_tokens=40)
    changing: Any = asyncio.create_task(worker.set_role("prefill"))
    await until(lambda: worker.is_draining)
    changing.cancel()  # and with it the call
    with contextlib.suppress(asyncio.CancelledError):
        await changing
    # It has been told of that when it has heard of what came after it.
    with pytest.raises(InvalidArgument):
        await worker.set_role("king")
    worker.model.release()
    await until(lambda: worker.status().role == "prefill" and not worker.is_draining)


async def test_what_is_no_role_is_refused_by_name(m: Movers) -> None:
    worker = m.at(0)
    with pytest.raises(BatonError) as caught:
        await worker.set_role("king")
    assert isinstance(caught.value, InvalidArgument)
    assert str(caught.value) == "role: 'king' is none of prefill, decode"
    assert not worker.is_draining
    key = await m.begin(0, PROMPT, max_tokens=3)
    assert len((await m.streams[0].collect(key)).token_ids) == 3


async def test_without_a_store_it_changes_all_the_same() -> None:
    async with lone_decode() as worker:
        assert (await worker.set_role("prefill")).role == "prefill"
        assert (await worker.set_role("decode")).role == "decode"
        assert (await worker.status_as("decode")).role == "decode"
