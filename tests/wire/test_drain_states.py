"""A decode worker drains while a request is in each of its states, or ends meanwhile in each way:
it moves with its KV, moves without, or is sent elsewhere, within the time there is; nothing stays
held."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from process.deadline import Deadline
from process.errors import Unavailable
from protos import common_pb2, decode_pb2
from services.decode.intake import Handover
from services.worker.config import WorkerLimits
from services.worker.connector import StoreConnector
from tests.harness.decode_movers import (
    Movers,
    StalledConnector,
    alone,
    going_on,
    hold_at,
    movers,
    release_when_taken_out,
)
from tests.harness.gated_engine import GatedModel, prompt_of
from tests.harness.prefill_decode_pair import LEASE_TTL_S, WAIT_S, Sample
from tests.harness.waiting import Deadlines, Gate, task_of, until

PROMPT = prompt_of(30, start=3)
NUM_TOKENS = 40
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE.value[0]


async def moved_handle(m: Movers) -> tuple[decode_pb2.DecodeMoved, Sample]:
    """A request that has moved away from worker 0, in the middle of its answer."""
    sample = Sample()
    model = m.engine(0)._model
    hold_at(model, 5)
    key = await m.begin(0, PROMPT, max_tokens=NUM_TOKENS)
    await until(model.is_held.is_set)
    release_when_taken_out(m, 0)
    m.leave(0)
    while not (event := await m.streams[0].next(key)).HasField("moved"):
        sample.add(event.tokens)
    m.stay(0)
    assert event.moved.HasField("handle")
    return event.moved, sample


async def finish(
    m: Movers, index: int, command: decode_pb2.GenerateFromHandle, prompt: tuple[int, ...] = PROMPT
) -> Any:
    """Go on there to the end. Returns: the tokens that came and the last word."""
    stream, sample = m.streams[index], Sample()
    key = await stream.reserve(m.reserve(prompt, "r", max_tokens=NUM_TOKENS))
    await stream.next(key)
    await stream.generate_from(key, command)
    while not (event := await stream.next(key)).HasField("finished"):
        sample.add(event.tokens)
    sample.add(event.finished)
    return sample.token_ids, event.finished


@contextlib.asynccontextmanager
async def held_in(
    m: Movers, state: str
) -> AsyncIterator[tuple[int, Sample, decode_pb2.GenerateFromHandle]]:
    """A request at worker 0 that stays in a state: its key, what it was sent, and the handle's
    command."""
    moved, sample = await moved_handle(m)
    command = going_on(moved, [sample])
    stream, model = m.streams[0], m.engine(0)._model
    busy = None
    if state == "reserving":
        model.hold()
        busy = await m.begin(0, prompt_of(5), "busy", max_tokens=200)
        await until(model.is_held.is_set)
    key = await stream.reserve(m.reserve(PROMPT, "r", max_tokens=NUM_TOKENS))
    if state != "reserving":
        assert (await stream.next(key)).HasField("reserved")
    gate = None
    client = m.workers[0].core.connector.client
    if state == "fetching":
        gate = Gate(client, "get_blocks")
    if state == "moving":
        gate = Gate(client, "put_blocks")
    if state in ("running", "moving"):
        model.hold()
    if state in ("fetching", "running", "moving"):
        await stream.generate_from(key, command)
    if state == "moving":
        await until(lambda: "running" in m.states(0))
        await until(model.is_held.is_set)
        release_when_taken_out(m, 0)
        m.leave(0, 60.0)
    try:
        await until(lambda: state in m.states(0))
        yield key, sample, command
    finally:
        if gate is not None:
            gate.open()
        model.release()
        if busy is not None:
            await stream.cancel(busy)
        m.stay(0)


async def last_word(m: Movers, key: int, sample: Sample) -> decode_pb2.DecodeEvent:
    """The event that ends the leg; tokens before it go to the sample."""
    while (event := await m.streams[0].next(key)).HasField("tokens") or event.HasField("reserved"):
        if event.HasField("tokens"):
            sample.add(event.tokens)
    return event


@pytest.mark.parametrize("state", ["reserving", "reserved"])
async def test_what_has_no_handover_yet_is_sent_elsewhere(tmp_path: Path, state: str) -> None:
    async with movers(tmp_path) as m:
        async with held_in(m, state) as (key, sample, command):
            m.leave(0)
            failed = (await last_word(m, key, sample)).failed
            assert failed.code == UNAVAILABLE and "draining" in failed.message
            assert failed.HasField("retry_after_s") and failed.retry_after_s == 0
            refused = await m.streams[0].reserve(m.reserve(PROMPT, "new", max_tokens=4))
            assert (await m.streams[0].next(refused)).failed.code == UNAVAILABLE
        tokens, finished = await finish(m, 1, command)
        assert [*sample.token_ids, *tokens] == GatedModel().generate(PROMPT, NUM_TOKENS)
        assert finished.leg.num_tokens_computed == 0 and not finished.leg.recomputed
        await m.check()


@pytest.mark.parametrize("state", ["fetching", "running"])
async def test_what_runs_moves_with_its_kv(tmp_path: Path, state: str) -> None:
    async with movers(tmp_path) as m:
        gates = list(Gate.closed)
        async with held_in(m, state) as (key, sample, _):
            m.engine(0)._model.hold()
            release_when_taken_out(m, 0)
            m.leave(0)
            for gate in [gate for gate in Gate.closed if gate not in gates]:
                gate.open()
            moved = (await last_word(m, key, sample)).moved
            assert list(moved.num_output_tokens) == [len(sample.token_ids)]
            num_tokens = len(PROMPT) + len(sample.token_ids) - 1
            assert moved.handle.num_tokens == num_tokens and moved.reason == "draining"
            assert [time.stage for time in moved.times][-1] == "decode_move"
        tokens, finished = await finish(m, 1, going_on(moved, [sample]))
        assert [*sample.token_ids, *tokens] == GatedModel().generate(PROMPT, NUM_TOKENS)
        assert finished.leg.num_tokens_computed == 0 and not finished.leg.recomputed
        await m.check()
        assert m.workers[0].core.counts.moved["draining"] == 2  # the handle's, too


@pytest.mark.parametrize("state", ["fetching", "running", "moving"])
async def test_what_does_not_get_ready_in_time_moves_without_its_kv(
    tmp_path: Path, state: str
) -> None:
    """The store is slow, or the engine is in a long step: nobody waits for them."""
    async with movers(tmp_path) as m:
        async with held_in(m, state) as (key, sample, _):
            if state == "moving":
                request = next(iter(m.workers[0].role.worker._requests.values()))
                request._departure._set_alarm(Deadline.after(0.05))
            else:
                m.leave(0, 0.05)
            moved = (await last_word(m, key, sample)).moved
            assert not moved.HasField("handle") and moved.reason == "deadline"
            assert moved.HasField("leg") == (state != "fetching")
            assert list(moved.num_output_tokens) == [len(sample.token_ids)]
        tokens, finished = await finish(m, 1, going_on(moved, [sample]))
        assert [*sample.token_ids, *tokens] == GatedModel().generate(PROMPT, NUM_TOKENS)
        assert {one.reason for one in finished.leg.recomputed} == {"missing"}
        await m.check()


@pytest.mark.parametrize("end", ["cancel", "deadline", "stream"])
@pytest.mark.parametrize("state", ["reserved", "fetching", "running", "moving"])
async def test_a_request_may_end_while_it_is_told_to_leave(
    tmp_path: Path, state: str, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch)
    async with movers(tmp_path) as m:
        async with held_in(m, state) as (key, sample, _):
            task = task_of(m.workers[0].role.worker, key)
            if state != "moving":
                m.leave(0)
            if end == "cancel":
                await m.streams[0].cancel(key)
            elif end == "stream":
                await m.streams[0].close()
            else:
                await deadlines.end(task)
            if end != "stream":
                event = await last_word(m, key, sample)
                kind = event.WhichOneof("event")
                if state == "reserved":  # whichever came first
                    assert kind in ("failed", "finished")
                else:
                    assert kind == {"cancel": "finished", "deadline": "failed"}[end]
            await until(lambda: not m.states(0))
        await m.workers[0].core.connector.settle()
        if state == "reserved":  # its handle was never handed over
            return
        await m.check()


async def test_a_request_that_ends_in_the_step_before_does_not_move(tmp_path: Path) -> None:
    async with movers(tmp_path) as m:
        model = m.engine(0)._model
        model.hold()
        prompt = PROMPT[:10]  # one step
        key = await m.begin(0, prompt, max_tokens=1)
        await until(model.is_held.is_set)
        m.leave(0)
        await asyncio.sleep(0)
        model.release()
        sample = Sample()
        event = await last_word(m, key, sample)
        assert event.HasField("finished"), event
        assert list(event.finished.token_ids) == GatedModel().generate(prompt, 1)
        await m.check()


@pytest.mark.parametrize("trouble", ["away", "full"])
async def test_a_store_that_takes_nothing_leaves_no_handle(tmp_path: Path, trouble: str) -> None:
    """Or one that is shorter. The next worker computes the rest, and says why."""
    store_bytes = 16 * 1024 * 1024 if trouble == "away" else 3 * 4096
    async with movers(tmp_path, store_bytes=store_bytes) as m:
        sample, model = Sample(), m.engine(0)._model
        hold_at(model, 5)
        key = await m.begin(0, PROMPT, max_tokens=NUM_TOKENS)
        await until(model.is_held.is_set)
        if trouble == "away":
            connector = m.workers[0].core.connector
            connector.__class__ = StalledConnector
        release_when_taken_out(m, 0)
        m.leave(0)
        moved = (await last_word(m, key, sample)).moved
        num_blocks = -(-(len(PROMPT) + len(sample.token_ids) - 1) // 4)
        not_stored = {one.reason: one.num_blocks for one in moved.leg.not_stored}
        if trouble == "away":
            assert not moved.HasField("handle") and moved.reason == "store_unavailable"
            assert not_stored["store_unavailable"] >= num_blocks  # and of the write-back
        else:
            # None at all where a write-back had the frames just then.
            assert moved.reason == "no_room" and moved.handle.num_tokens in (0, 4, 8, 12)
            assert not_stored["no_room"] >= num_blocks - moved.handle.num_tokens // 4
        tokens, finished = await finish(m, 1, going_on(moved, [sample]))
        assert [*sample.token_ids, *tokens] == GatedModel().generate(PROMPT, NUM_TOKENS)
        num_computed = finished.leg.num_tokens_computed + finished.leg.num_tokens_local
        assert num_computed >= 30 - 12 and finished.leg.recomputed
        if trouble == "away":
            connector.__class__ = StoreConnector
        await m.check()


@pytest.mark.parametrize("n", [1, 2])
async def test_what_leaves_inside_its_prompt_has_computed_no_more_than_that(
    tmp_path: Path, n: int
) -> None:
    """Chunks of 16 tokens, of which one or two are done; several samples leave without a handle,
    and do not wait for the second one."""
    async with movers(tmp_path) as m:
        sample, model = Sample(), m.engine(0)._model
        prompt = prompt_of(60, start=3)
        hold_at(model, 2)
        key = await m.begin(0, prompt, max_tokens=NUM_TOKENS, n=n)
        await until(model.is_held.is_set)
        if n == 1:
            release_when_taken_out(m, 0)
        m.leave(0)
        moved = (await last_word(m, key, sample)).moved
        model.release()
        assert not sample.token_ids
        assert moved.leg.num_tokens_computed == (32 if n == 1 else 16)
        if n == 1:
            assert moved.leg.num_tokens_computed == moved.handle.num_tokens
        counts = m.workers[0].core.counts
        assert counts.num_prompt_tokens_computed == moved.leg.num_tokens_computed
        if n == 1:
            tokens, finished = await finish(m, 1, going_on(moved, [sample]), prompt)
            assert tokens == GatedModel().generate(prompt, NUM_TOKENS)
            assert finished.leg.num_tokens_computed == 60 - moved.handle.num_tokens
        await m.check()


async def test_what_is_cancelled_inside_its_prompt_has_computed_no_more_than_that(
    tmp_path: Path,
) -> None:
    async with movers(tmp_path) as m:
        model = m.engine(0)._model
        hold_at(model, 2)
        key = await m.begin(0, prompt_of(60, start=3), max_tokens=NUM_TOKENS)
        await until(model.is_held.is_set)
        await m.streams[0].cancel(key)
        leg = (await last_word(m, key, Sample())).finished.leg
        model.release()
        assert leg.num_tokens_computed == 16
        await m.check()


async def test_a_beam_search_moves_without_anything(tmp_path: Path) -> None:
    async with movers(tmp_path) as m:
        beam = common_pb2.BeamParams(num_beams=3)
        stream = m.streams[0]
        options = {"max_tokens": 150, "beam": beam, "n": 2}
        m.engine(0)._model.hold()
        key = await stream.reserve(m.reserve(PROMPT, "r", **options))
        await stream.next(key)
        await stream.generate_from(key, alone(2))
        await until(m.engine(0)._model.is_held.is_set)
        m.leave(0)
        moved = (await last_word(m, key, Sample())).moved  # which asks nothing of the engine
        m.engine(0)._model.release()
        assert list(moved.num_output_tokens) == [0, 0] and not moved.HasField("handle")
        m.stay(0)
        await m.check()


async def test_a_handle_that_comes_when_the_request_has_just_ended_gives_its_leases_back(
    tmp_path: Path,
) -> None:
    """After its last word, before its stream has forgotten it."""
    async with movers(tmp_path) as m:
        moved, sample = await moved_handle(m)
        worker = m.workers[0].role.worker
        forget = worker.forget
        refused: list[BaseException] = []

        def late(request: Any) -> None:
            forget(request)
            handle = m.workers[0].role._servicer._handover(going_on(moved, [sample])).handle
            try:
                request.hand_over(Handover(handle, ((),)))
            except Exception as error:
                refused.append(error)

        worker.forget = late
        key = await m.streams[0].reserve(m.reserve(PROMPT, "r", max_tokens=NUM_TOKENS))
        await m.streams[0].next(key)
        m.leave(0)
        assert (await m.streams[0].next(key)).failed.code == UNAVAILABLE
        assert [type(error).__name__ for error in refused] == ["NotFound"]
        worker.forget = forget
        m.stay(0)


async def test_a_handle_that_nobody_was_told_of_gives_its_leases_back(tmp_path: Path) -> None:
    """The router does not read, and then its stream breaks."""
    async with movers(tmp_path) as m:
        model = m.engine(0)._model
        hold_at(model, 5)
        await m.begin(0, PROMPT, max_tokens=NUM_TOKENS)
        await until(model.is_held.is_set)
        (outbox,) = m.workers[0].core.outboxes
        outbox.flush = lambda: None  # type: ignore[method-assign]
        release_when_taken_out(m, 0)
        m.leave(0)
        await until(lambda: m.workers[0].core.num_live == 0)
        assert m.workers[0].core.counts.moved["draining"] == 1
        await m.streams[0].close()
        m.stay(0)
        await until(lambda: not m.workers[0].core.outboxes)
        await m.check()


@pytest.mark.parametrize("is_stuck", [False, True])
async def test_stopping_moves_what_runs_and_ends_in_time(tmp_path: Path, is_stuck: bool) -> None:
    """The whole of it, as a signal begins it."""
    drain_s = 1.0 if is_stuck else 30.0
    limits = WorkerLimits(
        store_wait_s=WAIT_S, lease_ttl_s=LEASE_TTL_S, attach_budget_s=5.0, drain_s=drain_s
    )
    async with movers(tmp_path, limits=limits) as m:
        sample, model = Sample(), m.engine(0)._model
        hold_at(model, 5)
        key = await m.begin(0, PROMPT, max_tokens=NUM_TOKENS)
        await until(model.is_held.is_set)
        began_s = time.monotonic()
        if not is_stuck:
            release_when_taken_out(m, 0)
        stopping = asyncio.create_task(m.workers[0].stop())
        moved = (await last_word(m, key, sample)).moved
        assert moved.HasField("handle") != is_stuck
        if is_stuck:
            assert time.monotonic() - began_s >= 0.5  # no sooner than it must
        model.release()
        await stopping
        tokens, _ = await finish(m, 1, going_on(moved, [sample]))
        assert [*sample.token_ids, *tokens] == GatedModel().generate(PROMPT, NUM_TOKENS)
        with pytest.raises(Unavailable):
            await m.workers[0].core.thread.call(lambda engine: engine.stats())
