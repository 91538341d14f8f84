"""A decode request is cancelled, out of time, loses its stream or its store in each of its states:
nothing stays held, tokens stay exact, and what was computed again is counted by reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.errors import Quarantine, TransferCancelled, TransferTimeout
from protos import common_pb2, decode_pb2, prefill_pb2
from services.decode.states import DecodeState
from services.worker.config import WorkerLimits
from tests.harness.gated_engine import prompt_of
from tests.harness.handles import partial, prefetch
from tests.harness.prefill_decode_pair import (
    WAIT_S,
    Pair,
    PrefillCall,
    RouterStream,
    handover,
    pair,
)
from tests.harness.waiting import Deadlines, Gate, task_of, until

STATES = ["reserving", "reserved", "prefetching", "fetching", "running"]
PROMPT = prompt_of(30, start=3)
NUM_TOKENS = 8


@dataclass
class Held:
    """A request that stays in one state."""

    stream: RouterStream
    key: int
    reply: prefill_pb2.PrefillReply
    state: DecodeState

    def is_there(self, p: Pair) -> bool:
        return self.state in p.decode_role.worker.states.values()


@contextlib.asynccontextmanager
async def held_in(p: Pair, name: str) -> AsyncIterator[Held]:
    """A request on PROMPT that stays in a state; the way is free again at the end."""
    reply = await p.run_prefill(PROMPT, max_tokens=NUM_TOKENS)
    async with p.stream() as other, p.stream() as stream:
        gate: Gate | None = None
        busy: int | None = None
        if name == "reserving":  # the engine is in the middle of somebody else's step
            p.decode_model.hold()
            busy = await other.reserve(p.reserve(prompt_of(5), name="busy"))
            await other.next(busy)
            await other.generate(busy, prefill_pb2.PrefillReply())
            await until(p.decode_model.is_held.is_set)
        key = await stream.reserve(p.reserve(PROMPT, max_tokens=NUM_TOKENS))
        if name != "reserving":
            assert (await stream.next(key)).HasField("reserved")
        if name in ("prefetching", "fetching"):
            gate = Gate(p.decode.core.connector.client, "get_blocks")
        elif name == "running":
            p.decode_model.hold()
        if name == "prefetching":
            await prefetch(stream, key, partial(p, reply.handle, 4))
        if name in ("fetching", "running"):
            await stream.generate(key, reply)
        held = Held(stream, key, reply, DecodeState[name.upper()])
        try:
            if gate is not None:
                await gate.wait_entered()
            elif name == "running":
                await until(p.decode_model.is_held.is_set)
            await until(lambda: held.is_there(p))
            yield held
        finally:
            p.decode_model.release()
            if gate is not None:
                gate.open()
            if busy is not None:
                answer = await other.collect(busy)
                assert answer.token_ids == p.expected(prompt_of(5), NUM_TOKENS)


async def settle(p: Pair, held: Held) -> None:
    """After an end before the handle was taken in, its lease is given back here instead of
    waiting.
    """
    client = p.decode.core.connector.client
    if client is not None:
        p.decode.core.connector.release_later(client, [held.reply.handle.runs[0].lease_id])
    await p.check()


async def assert_served(p: Pair) -> None:
    """The worker is as good as new."""
    prompt = prompt_of(35, start=8)
    answer = await p.generate(prompt, name="after")
    assert answer.token_ids == p.expected(prompt, 8)
    assert answer.leg.num_tokens_computed == 0
    await p.check()


@pytest.mark.parametrize("name", STATES)
async def test_cancel_in_each_state_is_told_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    async with pair(tmp_path) as p:
        async with held_in(p, name) as held:
            await held.stream.cancel(held.key)
            answer = await held.stream.collect(held.key)
            assert answer.finished is not None
            assert answer.finished.finish_reason == common_pb2.FINISH_REASON_CANCELLED
            assert not held.is_there(p)
        assert answer.token_ids == []
        await settle(p, held)
        await assert_served(p)


@pytest.mark.parametrize("name", STATES)
async def test_a_broken_stream_cancels_its_requests_in_each_state(
    tmp_path: Path, name: str
) -> None:
    async with pair(tmp_path) as p:
        async with held_in(p, name) as held:
            await held.stream.close()
            await until(lambda: not held.is_there(p))
        await settle(p, held)
        await assert_served(p)


@pytest.mark.parametrize("name", STATES)
async def test_the_budget_ends_it_in_each_state(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reservation whose handle never comes expires, too."""
    deadlines = Deadlines(monkeypatch)
    async with pair(tmp_path) as p:
        async with held_in(p, name) as held:
            await deadlines.end(task_of(p.decode_role.worker, held.key))
            answer = await held.stream.collect(held.key)
            assert answer.failed is not None
            assert answer.failed.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
            assert not answer.failed.HasField("retry_after_s")
            assert not held.is_there(p)
        await settle(p, held)
        await assert_served(p)


async def test_the_budget_is_the_one_that_was_asked_for(tmp_path: Path) -> None:
    async with pair(tmp_path) as p, p.stream() as stream:
        key = await stream.reserve(p.reserve(PROMPT, budget_ms=200))
        answer = await stream.collect(key)
        assert answer.failed is not None
        assert answer.failed.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        await p.check()


@pytest.mark.parametrize("name", STATES)
async def test_the_store_dies_in_each_state_and_the_tokens_still_come(
    tmp_path: Path, name: str
) -> None:
    async with pair(tmp_path) as p:
        expected = p.expected(PROMPT, NUM_TOKENS)
        async with held_in(p, name) as held:
            client = p.decode.core.connector.client
            assert client is not None
            await p.kill_store()
            await until(lambda: client.broken is not None)
            p.decode_model.release()
            for gate in list(Gate.closed):
                gate.open()
            if name in ("reserving", "reserved", "prefetching"):
                await held.stream.generate(held.key, held.reply)
            answer = await held.stream.collect(held.key)
        assert [*held.reply.token_ids, *answer.token_ids] == expected
        if name in ("reserving", "reserved"):
            assert answer.recomputed == {"store_unavailable": 8}
        num_from_store = sum(count.num_tokens for count in answer.leg.from_store)
        assert answer.leg.num_tokens_computed + num_from_store == len(PROMPT)
        await p.check()
        await p.start_store()
        await p.reattached()
        await assert_served(p)


async def test_a_timed_out_transfer_keeps_its_blocks_out_of_use_until_it_is_over(
    tmp_path: Path,
) -> None:
    """The request goes on with other blocks; a write that lands late harms nobody."""
    async with pair(tmp_path) as p:
        client = p.decode.core.connector.client
        assert client is not None
        settled = asyncio.get_running_loop().create_future()
        late: list[int] = []

        async def too_late(lease_id: str, items: Any, deadline: Any, **options: Any) -> Any:
            late.extend(block_id for _, block_id in items)
            raise TransferTimeout("the time ran out", Quarantine(tuple(late), settled))

        real, client.get_blocks = client.get_blocks, too_late  # type: ignore[method-assign]
        answer = await p.generate(PROMPT)
        assert answer.token_ids == p.expected(PROMPT, 8)
        assert answer.recomputed == {"deadline": 8}
        # Its own write-back holds blocks, too, until the store has them.
        await until(lambda: p.decode.core.status().num_quarantined_blocks == len(late) == 8)
        client.get_blocks = real  # type: ignore[method-assign]
        view = p.decode.core.thread._engine.kv.host_view
        for start in range(3):
            prompt = prompt_of(100, start=20 + start)
            async with p.stream() as stream:
                key = await stream.reserve(p.reserve(prompt, name=f"r{start}", max_tokens=30))
                await stream.next(key)
                view[late] = 255  # the late write
                await stream.generate(key, prefill_pb2.PrefillReply())
                other = await stream.collect(key)
            assert other.token_ids == p.expected(prompt, 30)
        settled.set_result(None)
        await until(lambda: p.decode.core.status().num_quarantined_blocks == 0)
        await p.check()
        await assert_served(p)


async def test_a_cancel_in_the_middle_of_a_transfer_quarantines_before_it_frees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch)
    async with pair(tmp_path) as p:
        client = p.decode.core.connector.client
        assert client is not None
        settled = asyncio.get_running_loop().create_future()
        entered = asyncio.Event()

        async def stalled(lease_id: str, items: Any, deadline: Any, **options: Any) -> Any:
            entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                block_ids = tuple(block_id for _, block_id in items)
                raise TransferCancelled("cancelled", Quarantine(block_ids, settled)) from error

        real, client.get_blocks = client.get_blocks, stalled  # type: ignore[method-assign]
        for how in ("cancel", "deadline", "cancel early", "deadline early"):
            reply = await p.run_prefill(PROMPT)  # a handle is good for one use
            entered.clear()
            async with p.stream() as stream:
                key = await stream.reserve(p.reserve(PROMPT, name="r"))
                await stream.next(key)
                num_blocks = 8
                if how.endswith("early"):
                    num_blocks = 5
                    await prefetch(stream, key, partial(p, reply.handle, num_blocks))
                else:
                    await stream.generate(key, reply)
                await asyncio.wait_for(entered.wait(), WAIT_S)
                if how.startswith("cancel"):
                    await stream.cancel(key)
                else:
                    await deadlines.end(task_of(p.decode_role.worker, key))
                answer = await stream.collect(key)
            assert (answer.finished is not None) == how.startswith("cancel")
            await until(lambda n=num_blocks: p.decode.core.status().num_quarantined_blocks == n)
            settled.set_result(None)
            if how.endswith("early"):  # its lease is the producer's; who had the final one is gone
                await p.check_store(leases=1)
                leases = [reply.handle.runs[0].lease_id]
                p.prefill.core.connector.release_later(p.prefill.core.connector.client, leases)
            await until(lambda: p.decode.core.status().num_quarantined_blocks == 0)
            settled = asyncio.get_running_loop().create_future()
        client.get_blocks = real  # type: ignore[method-assign]
        await p.check()
        await assert_served(p)


async def test_no_room_is_refused_with_a_retry_time_and_too_long_for_good(tmp_path: Path) -> None:
    async with pair(tmp_path, decode_blocks=64) as p, p.stream() as stream:
        first = await stream.reserve(p.reserve(prompt_of(200), name="a", max_tokens=40))
        assert (await stream.next(first)).HasField("reserved")
        second = await stream.reserve(p.reserve(prompt_of(100), name="b"))
        refused = (await stream.next(second)).failed
        assert refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert refused.retry_after_s > 0
        third = await stream.reserve(p.reserve(prompt_of(300), name="c"))
        refused = (await stream.next(third)).failed
        assert refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert refused.message.startswith("prompt_token_ids")
        assert not refused.HasField("retry_after_s")
        await stream.cancel(first)
        assert (await stream.collect(first)).finished is not None
        again = await stream.reserve(p.reserve(prompt_of(100), name="b"))
        assert (await stream.next(again)).HasField("reserved")
        await stream.cancel(again)
        await stream.collect(again)
        await p.check()


async def test_too_many_that_wait_are_refused(tmp_path: Path) -> None:
    limits = WorkerLimits(
        max_waiting_requests=2, store_wait_s=WAIT_S, drain_s=0.2, stop_grace_s=0.05
    )
    async with pair(tmp_path, limits=limits) as p, p.stream() as stream:
        keys = [await stream.reserve(p.reserve(prompt_of(5), name=f"r{i}")) for i in range(3)]
        events = [await stream.next(key) for key in keys]
        assert [event.WhichOneof("event") for event in events] == ["reserved", "reserved", "failed"]
        assert events[2].failed.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        for key in keys[:2]:
            await stream.cancel(key)
            await stream.collect(key)
        await p.check()


async def test_commands_that_do_not_fit_are_answered_under_their_key(tmp_path: Path) -> None:
    async with pair(tmp_path) as p, p.stream() as stream:
        await stream.generate(77, prefill_pb2.PrefillReply())
        assert (await stream.next(77)).failed.code == grpc.StatusCode.NOT_FOUND.value[0]
        key = await stream.reserve(p.reserve(prompt_of(5)))
        await stream.next(key)
        await stream._write(
            decode_pb2.DecodeCommand(key=key, reserve=p.reserve(prompt_of(5), name="x"))
        )
        taken = (await stream.next(key)).failed
        assert taken.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
        await stream._write(decode_pb2.DecodeCommand(key=78))
        assert (await stream.next(78)).failed.message.startswith("command: ")
        await stream.cancel(79)  # over already, or never there: nothing to say
        await stream.cancel(key)
        assert (await stream.collect(key)).finished is not None
        await p.check()


async def test_outputs_that_do_not_fit_give_the_leases_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(40)
    released: set[str] = set()
    async with pair(tmp_path) as p, p.stream() as stream:
        connector = p.decode.core.connector
        release_later = connector.release_later

        def release(client: Any, lease_ids: Any) -> None:
            released.update(lease_ids)
            release_later(client, lease_ids)

        monkeypatch.setattr(connector, "release_later", release)
        key = await stream.reserve(p.reserve(prompt))
        await stream.next(key)
        call = PrefillCall(p.prefill_stub, p.prefill_request(prompt), timeout_s=WAIT_S)
        *firsts, account = await call.answer()
        command = handover(account, firsts)
        first = decode_pb2.SampleOutput(token_ids=command.output_token_ids)
        command.ClearField("output_token_ids")
        command.outputs.extend([first, first])
        await stream.generate_from(key, command)
        assert (await stream.next(key)).failed.message.startswith("outputs: ")
        leases = {run.lease_id for run in (*account.handle.runs, account.handle.tail)} - {""}
        assert leases and released == leases  # else they would only lapse, much later
        await p.check()


async def test_leases_are_given_back_for_the_request_that_they_were_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it is over by then; whoever sends them under another key takes nobody's."""
    async with pair(tmp_path) as p, p.stream() as stream:
        connector = p.decode.core.connector
        release_later, released = connector.release_later, set[str]()

        def release(client: Any, lease_ids: Any) -> None:
            released.update(lease_ids)
            release_later(client, lease_ids)

        monkeypatch.setattr(connector, "release_later", release)
        key = await stream.reserve(p.reserve(PROMPT, name="own"))
        await stream.next(key)
        await stream.cancel(key)
        await stream.collect(key)
        replies = {}
        for name, under in (("a", 7777), ("b", key), ("own", key)):
            reply = replies[name] = await p.run_prefill(prompt_of(40), name=name)
            await stream.generate(under, reply)
            assert (await stream.next(under)).failed.code == grpc.StatusCode.NOT_FOUND.value[0]
            assert bool(released) == (name == "own")
        leases = {
            name: {run.lease_id for run in (*reply.handle.runs, reply.handle.tail)} - {""}
            for name, reply in replies.items()
        }
        assert leases["own"] and released == leases["own"]
        release_later(connector.client, leases["a"] | leases["b"])
        await p.check()


async def test_a_router_that_only_stops_commanding_still_gets_its_tokens(tmp_path: Path) -> None:
    """Half-closed: the stream ends with its last request."""
    async with pair(tmp_path) as p, p.stream() as stream:
        key = await stream.reserve(p.reserve(PROMPT))
        await stream.next(key)
        reply = await p.run_prefill(PROMPT)
        await stream.generate(key, reply)
        await stream.half_close()
        answer = await stream.collect(key)
        assert [*reply.token_ids, *answer.token_ids] == p.expected(PROMPT, 8)
        assert await stream.ended() is grpc.StatusCode.OK
        await p.check()


async def test_one_message_carries_a_whole_step(tmp_path: Path) -> None:
    """Four requests that decode together: each message with tokens has all of them, once."""
    async with pair(tmp_path) as p, p.stream() as stream:
        keys = []
        for index in range(4):
            prompt = prompt_of(5, start=index)
            key = await stream.reserve(p.reserve(prompt, name=f"r{index}", max_tokens=40))
            await stream.next(key)
            keys.append((key, prompt))
        p.decode_model.hold()
        first = await stream.reserve(p.reserve(prompt_of(3), name="gate", max_tokens=1))
        await stream.next(first)
        await stream.generate(first, prefill_pb2.PrefillReply())
        await until(p.decode_model.is_held.is_set)
        for key, _ in keys:
            await stream.generate(key, prefill_pb2.PrefillReply())
        running = [DecodeState.RUNNING] * 5
        await until(lambda: list(p.decode_role.worker.states.values()) == running)
        p.decode_model.release()
        for key, prompt in keys:
            assert (await stream.collect(key)).token_ids == p.expected(prompt, 40)
        full = [m for m in stream.messages if sum(e.HasField("tokens") for e in m.events) >= 4]
        num_tokens = sum(len(e.tokens.token_ids) for m in full for e in m.events)
        assert num_tokens >= 4 * 30, "most steps of four requests must ride together"
        steps = [m.step for m in stream.messages]
        assert steps == sorted(steps)
        await p.check()
