"""A request is cancelled, out of time, loses its stream or its store in each of its states: nothing
stays held or lent, tokens stay exact, what was computed again is counted by reason, and the next
request is served as if nothing had been."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from process.rpc_errors import Cancelled, DeadlineExceeded, NoCapacity
from protos import common_pb2
from tests.harness.gated_engine import BLOCK_SIZE, prompt_of
from tests.harness.handles import blocks_of, partial
from tests.harness.prefill_decode_pair import (
    WAIT_S,
    Pair,
    PrefillCall,
    RouterStream,
    pair,
    patient,
    whole,
)
from tests.harness.waiting import Deadlines, Gate, until

pytestmark = [pytest.mark.oracle, pytest.mark.asyncio(loop_scope="module")]

# ---- a prefill request, through the store or lending its own blocks


STORE = common_pb2.HANDOVER_PATH_STORE
DIRECT = common_pb2.HANDOVER_PATH_DIRECT
PREFILL_STATES = {
    "queued": "queued",
    "matching": "fetching",
    "copying": "fetching",
    "computing": "computing",
    "storing": "storing",
}
LENDING = {
    "queued": "queued",
    "matching": "fetching",
    "computing": "computing",
    "lending early": "computing",
    "lending": "storing",
}
CASES = [(STORE, state) for state in PREFILL_STATES] + [(DIRECT, state) for state in LENDING]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """One whose prefill worker has room for one long prompt."""
    async with pair(tmp_path_factory.mktemp("pair"), prefill_blocks=64) as made:
        yield made


@contextlib.asynccontextmanager
async def held_prefill(p: Pair, state: str, handover: int = STORE) -> AsyncIterator[PrefillCall]:
    """A call that stays in `state`; the way is free again at the end."""
    prompt, home = p.new_prompt(30), p.at_prefill.home
    gate: Gate | None = None
    filler: asyncio.Task[Any] | None = None
    if state == "queued":
        p.prefill_model.hold()
        filler = asyncio.create_task(
            p.run_prefill(p.new_prompt(250), name="filler", wants_handle=False)
        )
        await until(p.prefill_model.is_held.is_set)
    elif state == "matching":
        gate = home.hold("match")
    elif state == "copying":
        await p.run_prefill(prompt, name="before", wants_handle=False)
        await p.forget()
        gate = home.hold("get")
    elif state == "computing":
        p.prefill_model.hold()
    elif state == "storing":
        gate = home.hold("put")
    else:
        gate = p.at_prefill.hold_sealing()
        if state == "lending early":
            p.prefill_model.hold_at(2)
        else:
            prompt = prompt[:10]  # one step: there is no partial handle
    call = p.call(prompt, handover=handover)
    try:
        if gate is not None:
            await gate.wait_entered()
        await until(lambda: (PREFILL_STATES | LENDING)[state] in p.at_prefill.states())
        yield call
    finally:
        p.prefill_model.release()
        if gate is not None:
            gate.open()
        if filler is not None:
            await filler
        call.vanish()


async def assert_served(p: Pair, handover: int = 0) -> None:
    """The worker is as good as new."""
    await p.check()
    prompt = p.new_prompt(35)
    answer = await p.generate(prompt, name="after", handover=handover)
    assert answer.token_ids == p.expected(prompt, 8)
    assert answer.leg.num_tokens_computed == 0
    await p.check()


@pytest.mark.parametrize(("handover", "state"), CASES)
async def test_cancel_in_each_state_leaves_nothing(p: Pair, handover: int, state: str) -> None:
    async with held_prefill(p, state, handover) as call:
        call.cancel()
        assert isinstance(await call.error(), Cancelled)
        if "computing" not in (state, LENDING.get(state)):
            # There the abort comes after the step that is held.
            await until(lambda: (PREFILL_STATES | LENDING)[state] not in p.at_prefill.states())
    await assert_served(p, handover)


@pytest.mark.parametrize(("handover", "state"), CASES)
async def test_the_deadline_ends_it_in_each_state(
    p: Pair, handover: int, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is: the next test says whose it is."""
    deadlines = Deadlines(monkeypatch)
    async with held_prefill(p, state, handover) as call:
        deadlines.end_prefill()
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(whole(call), WAIT_S)
    await assert_served(p, handover)


@pytest.mark.parametrize("whose", ["request", "worker"])
async def test_the_deadline_is_the_one_that_was_asked_for_or_the_workers(
    tmp_path: Path, whose: str
) -> None:
    limits = patient(default_budget_s=0.2 if whose == "worker" else 60.0)
    async with pair(tmp_path, limits=limits) as p:
        p.prefill_model.hold()
        request = p.prefill_request(p.new_prompt(30))
        timeout_s = 0.2 if whose == "request" else None
        call = p.call(request, timeout_s=timeout_s)
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(whole(call), WAIT_S)
        p.prefill_model.release()
        await p.check()


@pytest.mark.parametrize("state", PREFILL_STATES)
async def test_the_store_dies_in_each_state_and_the_answer_still_comes(p: Pair, state: str) -> None:
    async with held_prefill(p, state) as call:
        home = p.at_prefill.home
        await p.kill_store()
        await until(lambda: home.is_broken)
        p.prefill_model.release()
        Gate.open_all()
        reply = await asyncio.wait_for(whole(call), WAIT_S)
    assert list(reply.token_ids) == p.expected(call.prompt, 1)
    leg = reply.leg
    num_from_store = sum(count.num_tokens for count in leg.from_store)
    assert leg.num_tokens_computed + leg.num_tokens_local + num_from_store == len(call.prompt)
    await p.check()
    await p.start_store()
    await p.reattached()
    await assert_served(p)


async def test_a_router_that_is_gone_before_the_answer_is_a_cancel(p: Pair) -> None:
    p.prefill_model.hold()
    async with p.own_prefill_stub() as stub:
        call = PrefillCall(stub, p.prefill_request(p.new_prompt(30)), timeout_s=WAIT_S)
        await until(p.prefill_model.is_held.is_set)
    with pytest.raises((asyncio.CancelledError, Cancelled)):
        await whole(call)
    call.vanish()
    p.prefill_model.release()
    await until(lambda: not p.at_prefill.states())


async def test_first_come_first_served_even_when_a_later_one_would_fit(p: Pair) -> None:
    """Room for the small one is there while the large one waits before it."""
    p.prefill_model.hold()
    granted = p.at_prefill.watch_reservations()
    tasks = []
    for name, num_tokens in (("filler", 200), ("large", 240), ("small", 8)):
        num = len(p.at_prefill.states())
        asked = p.run_prefill(p.new_prompt(num_tokens), name=name, wants_handle=False)
        tasks.append(asyncio.create_task(asked))
        await until(lambda num=num: len(p.at_prefill.states()) == num + 1)
        if name == "filler":
            await until(p.prefill_model.is_held.is_set)
    p.prefill_model.release()
    await asyncio.gather(*tasks)
    assert granted.index("filler") < granted.index("large") < granted.index("small")


async def test_a_full_queue_refuses_with_a_retry_time(tmp_path: Path) -> None:
    limits = patient(max_waiting_requests=1)
    async with pair(tmp_path, prefill_blocks=64, limits=limits) as p:
        async with held_prefill(p, "queued") as call:
            with pytest.raises(NoCapacity) as caught:
                await p.run_prefill(p.new_prompt(100), name="one too many")
            assert caught.value.retry_after_s is not None
            call.cancel()
        await p.check()


async def test_room_for_whole_blocks_only_is_waited_for(p: Pair) -> None:
    """It comes without another request's help."""
    async with held_prefill(p, "queued") as call:
        p.prefill_model.release()
        reply = await asyncio.wait_for(whole(call), WAIT_S)
    assert list(reply.token_ids) == p.expected(call.prompt, 1)
    assert reply.handle.num_tokens == len(call.prompt)
    assert len(blocks_of(reply.handle.runs[0])) == len(call.prompt) // BLOCK_SIZE
    await p.check(leases=1)
    p.at_prefill.release_later(reply.handle)


@pytest.mark.parametrize("num_tokens", [BLOCK_SIZE - 1, BLOCK_SIZE])
async def test_a_store_is_asked_only_for_what_it_can_have(p: Pair, num_tokens: int) -> None:
    """Full blocks: a shorter prompt's first token waits for no answer of a store."""
    home, prompt = p.at_prefill.home, p.new_prompt(num_tokens)
    asked = home.watch("match")
    answer = await p.generate(prompt)
    home.restore("match")
    assert answer.token_ids == p.expected(prompt, 8)
    assert answer.leg.num_tokens_computed == 0  # it came by the store, its tail with it
    assert [len(hashes) for (hashes, *_), _ in asked] == [1] * (num_tokens // BLOCK_SIZE)


# ---- a decode request


DECODE_STATES = ["reserving", "reserved", "prefetching", "fetching", "running"]


@dataclass
class Held:
    """A request that stays in one state."""

    prompt: tuple[int, ...]
    stream: RouterStream
    key: int
    reply: Any
    """Of prefill."""
    state: str

    def is_there(self, p: Pair) -> bool:
        return self.state in p.at_decode.states()


@contextlib.asynccontextmanager
async def held_decode(p: Pair, state: str) -> AsyncIterator[Held]:
    """A request that stays in a state; the way is free again at the end."""
    prompt, other_prompt = p.new_prompt(30), p.new_prompt(5)
    reply = await p.run_prefill(prompt)
    async with p.stream() as other, p.stream() as stream:
        gate: Gate | None = None
        busy: int | None = None
        if state == "reserving":  # the engine is in the middle of another request's step
            p.decode_model.hold()
            busy = await other.begin(p.reserve(other_prompt, name="busy"))
            await other.compute(busy)
            await until(p.decode_model.is_held.is_set)
        key = await stream.reserve(p.reserve(prompt))
        if state != "reserving":
            assert (await stream.next(key)).HasField("reserved")
        if state in ("prefetching", "fetching"):
            gate = p.at_decode.home.hold("get")
        elif state == "running":
            p.decode_model.hold()
        if state == "prefetching":
            await stream.prefetch(key, partial(p, reply.handle, 4))
        if state in ("fetching", "running"):
            await stream.generate(key, reply)
        held = Held(prompt, stream, key, reply, state)
        try:
            if gate is not None:
                await gate.wait_entered()
            elif state == "running":
                await until(p.decode_model.is_held.is_set)
            await until(lambda: held.is_there(p))
            yield held
        finally:
            p.decode_model.release()
            if gate is not None:
                gate.open()
            if busy is not None:
                answer = await other.collect(busy)
                assert answer.token_ids == p.expected(other_prompt, 8)


async def assert_settled(p: Pair, held: Held) -> None:
    """After an end before the handle was taken in, its lease is given back here instead of
    waiting. Then the worker is as good as new."""
    p.at_decode.release_later(held.reply.handle)
    await assert_served(p)


@pytest.mark.parametrize("state", DECODE_STATES)
async def test_a_decode_request_that_is_cancelled_in_each_state_is_told_and_leaves_nothing(
    p: Pair, state: str
) -> None:
    async with held_decode(p, state) as held:
        answer = await held.stream.end(held.key)
        assert answer.finished.finish_reason == common_pb2.FINISH_REASON_CANCELLED
        assert not held.is_there(p)
    assert answer.token_ids == []
    await assert_settled(p, held)


@pytest.mark.parametrize("state", DECODE_STATES)
async def test_a_broken_stream_cancels_its_requests_in_each_state(p: Pair, state: str) -> None:
    async with held_decode(p, state) as held:
        await held.stream.close()
        await until(lambda: not held.is_there(p))
    await assert_settled(p, held)


@pytest.mark.parametrize("state", DECODE_STATES)
async def test_the_budget_ends_it_in_each_state(
    p: Pair, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reservation whose handle never comes expires, too."""
    deadlines = Deadlines(monkeypatch)
    async with held_decode(p, state) as held:
        await deadlines.end_decode(p.at_decode, held.key)
        answer = await held.stream.collect(held.key)
        assert answer.failed is not None
        assert answer.failed.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert not answer.failed.HasField("retry_after_s")
        assert not held.is_there(p)
    await assert_settled(p, held)


async def test_the_budget_is_the_one_that_was_asked_for(p: Pair) -> None:
    async with p.stream() as stream:
        key = await stream.reserve(p.reserve(p.new_prompt(30), budget_ms=200))
        answer = await stream.collect(key)
    assert answer.failed is not None
    assert answer.failed.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


@pytest.mark.parametrize("state", DECODE_STATES)
async def test_the_store_dies_in_each_state_of_decode_and_the_tokens_still_come(
    p: Pair, state: str
) -> None:
    async with held_decode(p, state) as held:
        home = p.at_decode.home
        await p.kill_store()
        await until(lambda: home.is_broken)
        p.decode_model.release()
        Gate.open_all()
        if state in ("reserving", "reserved", "prefetching"):
            await held.stream.generate(held.key, held.reply)
        answer = await held.stream.collect(held.key)
    assert [*held.reply.token_ids, *answer.token_ids] == p.expected(held.prompt, 8)
    if state in ("reserving", "reserved"):
        assert answer.recomputed == {"store_unavailable": 8}
    num_from_store = sum(count.num_tokens for count in answer.leg.from_store)
    assert answer.leg.num_tokens_computed + num_from_store == len(held.prompt)
    await p.check()
    await p.start_store()
    await p.reattached()
    await assert_served(p)


async def test_a_timed_out_transfer_keeps_its_blocks_out_of_use_until_it_is_over(
    tmp_path: Path,
) -> None:
    """The request goes on with other blocks; a write that lands late harms none."""
    async with pair(tmp_path) as p:
        home = p.at_decode.home
        late = home.late_gets()
        prompt = p.new_prompt(30)
        answer = await p.generate(prompt)
        assert answer.token_ids == p.expected(prompt, 8)
        assert answer.recomputed == {"deadline": 8}
        # Its own write-back holds blocks, too, until the store has them.
        await p.at_decode.quarantined(len(late.block_ids))
        assert len(late.block_ids) == 8
        home.restore("get")
        for index in range(3):  # more than the cache has
            prompt = p.new_prompt(100)
            async with p.reserved(prompt, name=f"r{index}", max_tokens=30) as (stream, key):
                p.at_decode.write_late(late.block_ids)
                await stream.compute(key)
                other = await stream.collect(key)
            assert other.token_ids == p.expected(prompt, 30)
        late.settle()
        await p.at_decode.quarantined(0)
        await assert_served(p)


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_an_end_in_the_middle_of_a_transfer_quarantines_before_it_frees(
    p: Pair, how: str, is_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines, home, prompt = Deadlines(monkeypatch), p.at_decode.home, p.new_prompt(30)
    late = home.uncallable_gets()
    reply = await p.run_prefill(prompt)
    async with p.reserved(prompt) as (stream, key):
        if is_early:
            await stream.prefetch(key, partial(p, reply.handle, 5))
        else:
            await stream.generate(key, reply)
        await late.wait_entered()
        if how == "cancel":
            await stream.cancel(key)
        else:
            await deadlines.end_decode(p.at_decode, key)
        answer = await stream.collect(key)
    assert (answer.finished is not None) == (how == "cancel")
    await p.at_decode.quarantined(5 if is_early else 8)
    late.settle()
    home.restore("get")
    if is_early:  # its lease is the producer's; what had the final one is gone
        await p.check_store(leases=1)
        p.at_prefill.release_later(reply.handle)
    await p.at_decode.quarantined(0)
    await assert_served(p)


async def test_no_room_is_refused_with_a_retry_time_and_too_long_for_good(tmp_path: Path) -> None:
    async with pair(tmp_path, decode_blocks=64) as p, p.stream() as stream:
        first = await stream.begin(p.reserve(p.new_prompt(200), name="a", max_tokens=40))
        second = await stream.reserve(p.reserve(p.new_prompt(100), name="b"))
        refused = (await stream.next(second)).failed
        assert refused.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert refused.retry_after_s > 0
        third = await stream.reserve(p.reserve(p.new_prompt(300), name="c"))
        refused = (await stream.next(third)).failed
        assert refused.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert refused.message.startswith("prompt_token_ids")
        assert not refused.HasField("retry_after_s")
        await stream.end(first)
        again = await stream.begin(p.reserve(p.new_prompt(100), name="b"))
        await stream.end(again)
        await p.check()


async def test_too_many_that_wait_are_refused(tmp_path: Path) -> None:
    limits = patient(max_waiting_requests=2)
    async with pair(tmp_path, limits=limits) as p, p.stream() as stream:
        keys = [await stream.reserve(p.reserve(p.new_prompt(5), name=f"r{i}")) for i in range(3)]
        events = [await stream.next(key) for key in keys]
        assert [event.WhichOneof("event") for event in events] == ["reserved", "reserved", "failed"]
        assert events[2].failed.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        for key in keys[:2]:
            await stream.end(key)
        await p.check()


async def test_a_request_that_decodes_no_longer_waits(tmp_path: Path) -> None:
    async with pair(tmp_path, limits=patient(max_waiting_requests=1)) as p, p.stream() as stream:
        first = await stream.begin(p.reserve(p.new_prompt(5), name="first", max_tokens=100))
        await stream.compute(first)
        assert (await stream.next(first)).HasField("tokens")
        second = await stream.begin(p.reserve(p.new_prompt(5), name="second"))
        for key in (first, second):
            await stream.end(key)
        await p.check()


async def test_commands_that_do_not_fit_are_answered_under_their_key(p: Pair) -> None:
    async with p.stream() as stream:
        await stream.compute(77_777)
        failed = (await stream.next(77_777)).failed
        assert failed.code == grpc.StatusCode.NOT_FOUND.value[0]
        key = await stream.begin(p.reserve(p.new_prompt(5)))
        await stream.reserve(p.reserve(p.new_prompt(5), name="x"), under=key)
        taken = (await stream.next(key)).failed
        assert taken.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
        await stream.in_order()  # by a command that says nothing
        await stream.cancel(77_778)  # over already, or never there: nothing to say
        await stream.end(key)


async def test_outputs_that_do_not_fit_give_the_leases_back(p: Pair) -> None:
    """Else they would only lapse, later than the check waits."""
    prompt = p.new_prompt(40)
    async with p.reserved(prompt) as (stream, key):
        first, account = await p.call(prompt).answer()
        assert (await p.store_status()).num_leases == 1
        await stream.go_on(key, [first.token_ids] * 2, handle=account.handle)
        assert (await stream.next(key)).failed.message.startswith("outputs: ")


async def test_leases_are_given_back_for_the_request_that_they_were_made_for(p: Pair) -> None:
    """Also when it is over by then; what sends them under another key takes none's."""
    async with p.reserved(p.new_prompt(30), name="own") as (stream, key):
        await stream.end(key)
        replies = []
        for name, under in (("a", 77_777), ("b", key), ("own", key)):
            replies.append(await p.run_prefill(p.new_prompt(40), name=name))
            await stream.generate(under, replies[-1])
            assert (await stream.next(under)).failed.code == grpc.StatusCode.NOT_FOUND.value[0]
            assert (await p.store_status()).num_leases >= min(len(replies), 2)
    await p.check(leases=2)
    p.at_prefill.release_later(replies[0].handle, replies[1].handle)


async def test_a_router_that_only_stops_commanding_still_gets_its_tokens(p: Pair) -> None:
    """Half-closed: the stream ends with its last request."""
    prompt = p.new_prompt(30)
    async with p.reserved(prompt) as (stream, key):
        reply = await p.run_prefill(prompt)
        await stream.generate(key, reply)
        await stream.half_close()
        answer = await stream.collect(key)
        assert [*reply.token_ids, *answer.token_ids] == p.expected(prompt, 8)
        assert await stream.ended() is grpc.StatusCode.OK


async def test_one_message_carries_a_whole_step(p: Pair) -> None:
    """Four requests that decode together: each message with tokens has all of them, once."""
    async with p.stream() as stream:
        keys = {}
        for index in range(4):
            prompt = p.new_prompt(5)
            keys[await stream.begin(p.reserve(prompt, name=f"r{index}", max_tokens=40))] = prompt
        p.decode_model.hold()
        first = await stream.begin(p.reserve(p.new_prompt(3), name="gate", max_tokens=1))
        await stream.compute(first)
        await until(p.decode_model.is_held.is_set)
        for key in keys:
            await stream.compute(key)
        await until(lambda: p.at_decode.states() == ["running"] * 5)
        p.decode_model.release()
        for key, prompt in keys.items():
            assert (await stream.collect(key)).token_ids == p.expected(prompt, 40)
        full = [m for m in stream.messages if sum(e.HasField("tokens") for e in m.events) >= 4]
        num_tokens = sum(len(e.tokens.token_ids) for m in full for e in m.events)
        assert num_tokens >= 4 * 30, "most steps of four requests must ride together"
        steps = [m.step for m in stream.messages]
        assert steps == sorted(steps)


async def test_a_long_prompt_holds_up_no_answer_that_is_drawn(p: Pair) -> None:
    """Each step that computes a part of it draws a token of the other request, too."""
    prompt, long_prompt = p.new_prompt(5), p.new_prompt(150)
    async with p.stream() as stream:
        key = await stream.begin(p.reserve(prompt, name="drawn", max_tokens=60))
        late = await stream.begin(p.reserve(long_prompt, name="long", max_tokens=2))
        p.decode_model.hold()
        await stream.compute(key)
        await until(p.decode_model.is_held.is_set)
        await stream.compute(late)
        await until(lambda: p.at_decode.states() == ["running"] * 2)
        p.decode_model.release()
        assert (await stream.collect(late)).token_ids == p.expected(long_prompt, 2)
        assert (await stream.collect(key)).token_ids == p.expected(prompt, 60)
        num_drawn = 0
        for event in (event for message in stream.messages for event in message.events):
            if event.key == late and event.HasField("tokens"):
                break
            num_drawn += len(event.tokens.token_ids)
        # 150 tokens in steps of at most 16.
        assert num_drawn >= 9


# ---- places in a decode worker's steps


NUM_PLACES = 8


async def _reserve(p: Pair, stream: RouterStream, number: int, **sampling: Any) -> int:
    return await stream.reserve(p.reserve(prompt_of(5, start=number), name=str(number), **sampling))


async def _kind(stream: RouterStream, key: int) -> str | None:
    return (await stream.next(key)).WhichOneof("event")


async def test_places_are_given_in_order_and_none_begins_without(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        async with p.stream() as stream:
            held = [await _reserve(p, stream, number) for number in range(NUM_PLACES)]
            for key in held:
                assert await _kind(stream, key) == "reserved"
            one = await _reserve(p, stream, 11)
            three = await _reserve(p, stream, 12, n=3)
            last = await _reserve(p, stream, 13)
            for key in (one, three, last):
                assert await _kind(stream, key) == "queued"
            assert (p.at_decode.status().num_free_places, p.at_decode.num_in_line) == (0, 3)
            await stream.end(held.pop())
            assert await _kind(stream, one) == "reserved"
            for _ in range(2):
                await stream.end(held.pop())
            # Two are free, the next in line needs three, and none passes it.
            newcomer = await _reserve(p, stream, 14)
            assert await _kind(stream, newcomer) == "queued"
            assert p.at_decode.num_in_line == 3
            await stream.end(held.pop())
            assert await _kind(stream, three) == "reserved"
            # What leaves the line holds up none behind it.
            await stream.end(last)
            await stream.end(three)
            assert await _kind(stream, newcomer) == "reserved"
            assert p.at_decode.num_in_line == 0
        await p.check()


async def test_an_answer_that_has_begun_has_blocks_at_once_and_the_next_place(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as p, p.stream() as stream:
        held = [await _reserve(p, stream, number) for number in range(NUM_PLACES)]
        for key in held:
            assert await _kind(stream, key) == "reserved"
        waiting = await _reserve(p, stream, 11)
        assert await _kind(stream, waiting) == "queued"
        prompt = prompt_of(9, start=12)
        first = p.expected(prompt, 8)[:1]
        moved = await stream.reserve(p.reserve(prompt, name="begun", has_begun=True))
        assert await _kind(stream, moved) == "reserved"
        await stream.compute(moved, first, is_told=True)
        await stream.end(held[0])
        answer = await stream.collect(moved)
        assert first + answer.token_ids == p.expected(prompt, 8)
        assert await _kind(stream, waiting) == "reserved"
        keys = [event.key for message in stream.messages for event in message.events]
        assert keys.index(moved) < len(keys) - 1 == keys.index(waiting, keys.index(moved))
        for key in (*held[1:], waiting):
            await stream.end(key)
