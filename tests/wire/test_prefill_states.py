"""A prefill request is cancelled, out of time, or loses its store in each of its states: nothing
stays held, and the next request is served as if nothing had been.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.request import Request, Reservation
from process import serving
from process.errors import Cancelled, DeadlineExceeded, NoCapacity
from protos import prefill_pb2_grpc
from services.prefill.job import PrefillState
from services.worker.config import WorkerLimits
from tests.harness.gated_engine import BLOCK_SIZE, prompt_of
from tests.harness.handles import blocks_of
from tests.harness.prefill_decode_pair import KEY, WAIT_S, Pair, PrefillCall, pair, whole
from tests.harness.waiting import Deadlines, Gate, until

STATES = ["queued", "matching", "copying", "computing", "storing"]
NAMES = {
    "queued": PrefillState.QUEUED,
    "matching": PrefillState.FETCHING,
    "copying": PrefillState.FETCHING,
    "computing": PrefillState.COMPUTING,
    "storing": PrefillState.STORING,
}
PROMPT = prompt_of(30, start=3)


async def forget_prompt(p: Pair) -> None:
    """Push everything out of the prefill worker's device cache; the store keeps it."""
    for start in range(60, 63):
        await p.run_prefill(prompt_of(200, start=start), name=f"f{start}", wants_handle=False)


@contextlib.asynccontextmanager
async def held_in(p: Pair, state: str, **options: Any) -> AsyncIterator[Any]:
    """A Prefill call on PROMPT that stays in `state`; the way is free again at the end."""
    client = p.prefill.core.connector.client
    gate: Gate | None = None
    filler: asyncio.Task[Any] | None = None
    if state == "queued":
        p.prefill_model.hold()
        long = prompt_of(250, start=9)
        filler = asyncio.create_task(p.run_prefill(long, name="filler", wants_handle=False))
        await until(p.prefill_model.is_held.is_set)
    elif state == "matching":
        gate = Gate(client, "match")
    elif state == "copying":
        await p.run_prefill(PROMPT, name="before", wants_handle=False)
        await forget_prompt(p)
        gate = Gate(client, "get_blocks")
    elif state == "computing":
        p.prefill_model.hold()
    elif state == "storing":
        gate = Gate(client, "put_blocks")
    options.setdefault("timeout_s", WAIT_S)
    timeout_s = options.pop("timeout_s")
    call = PrefillCall(p.prefill_stub, p.prefill_request(PROMPT, **options), timeout_s=timeout_s)
    try:
        if gate is not None:
            await gate.wait_entered()
        await until(lambda: NAMES[state] in p.prefill_role.worker.states.values())
        yield call
    finally:
        p.prefill_model.release()
        if gate is not None:
            gate.open()
        if filler is not None:
            await filler
        call.vanish()


async def assert_served(p: Pair) -> None:
    """The worker is as good as new."""
    prompt = prompt_of(35, start=8)
    answer = await p.generate(prompt, name="after")
    assert answer.token_ids == p.expected(prompt, 8)
    assert answer.leg.num_tokens_computed == 0
    await p.check()


@pytest.mark.parametrize("state", STATES)
async def test_cancel_in_each_state_leaves_nothing(tmp_path: Path, state: str) -> None:
    async with pair(tmp_path, prefill_blocks=64) as p:
        async with held_in(p, state) as call:
            call.cancel()
            assert isinstance(await call.error(), Cancelled)
            if state != "computing":  # there the abort comes after the step that is held
                await until(lambda: NAMES[state] not in p.prefill_role.worker.states.values())
        await p.check()
        await assert_served(p)


@pytest.mark.parametrize("state", STATES)
async def test_the_deadline_ends_it_in_each_state(
    tmp_path: Path, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is: the next test says whose it is."""
    deadlines = Deadlines(monkeypatch)
    async with pair(tmp_path, prefill_blocks=64) as p:
        async with held_in(p, state) as call:
            deadlines.end_newest(f"prefill {KEY}")
            with pytest.raises(DeadlineExceeded):
                await asyncio.wait_for(whole(call), WAIT_S)
        await p.check()
        await assert_served(p)


@pytest.mark.parametrize("whose", ["request", "worker"])
async def test_the_deadline_is_the_one_that_was_asked_for_or_the_workers(
    tmp_path: Path, whose: str
) -> None:
    default_s = 0.2 if whose == "worker" else 60.0
    limits = WorkerLimits(
        default_budget_s=default_s, store_wait_s=WAIT_S, drain_s=0.2, stop_grace_s=0.05
    )
    async with pair(tmp_path, limits=limits) as p:
        p.prefill_model.hold()
        timeout_s = 0.2 if whose == "request" else None
        call = PrefillCall(p.prefill_stub, p.prefill_request(PROMPT), timeout_s=timeout_s)
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(whole(call), WAIT_S)
        p.prefill_model.release()
        await p.check()


@pytest.mark.parametrize("state", STATES)
async def test_the_store_dies_in_each_state_and_the_answer_still_comes(
    tmp_path: Path, state: str
) -> None:
    async with pair(tmp_path, prefill_blocks=64) as p:
        expected = p.expected(PROMPT, 8)
        async with held_in(p, state) as call:
            client = p.prefill.core.connector.client
            await p.kill_store()
            assert client is not None
            await until(lambda: client.broken is not None)
            reply = await answered(p, call)
        assert list(reply.token_ids) == expected[:1]
        leg = reply.leg
        num_from_store = sum(count.num_tokens for count in leg.from_store)
        assert leg.num_tokens_computed + leg.num_tokens_local + num_from_store == len(PROMPT)
        await p.check()
        await p.start_store()
        await p.reattached()
        await assert_served(p)


async def answered(p: Pair, call: Any) -> Any:
    """Let everything that is held go on, and wait for the reply."""
    p.prefill_model.release()
    for gate in list(Gate.closed):
        gate.open()
    return await asyncio.wait_for(whole(call), WAIT_S)


async def test_a_router_that_is_gone_before_the_answer_is_a_cancel(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        p.prefill_model.hold()
        async with serving.channel(p.prefill.address) as channel:
            stub = prefill_pb2_grpc.PrefillStub(channel)
            call = PrefillCall(stub, p.prefill_request(PROMPT), timeout_s=WAIT_S)
            await until(p.prefill_model.is_held.is_set)
        with pytest.raises((asyncio.CancelledError, Cancelled)):
            await whole(call)
        call.vanish()
        p.prefill_model.release()
        await until(lambda: not p.prefill_role.worker.states)
        await p.check()


async def test_first_come_first_served_even_when_a_later_one_would_fit(tmp_path: Path) -> None:
    """Room for the small one is there while the large one waits before it."""
    async with pair(tmp_path, prefill_blocks=64) as p:
        p.prefill_model.hold()
        done: list[str] = []
        granted: list[str] = []
        reserve = p.prefill.core.thread._engine.reserve

        def watched(request: Request) -> Reservation:
            reservation = reserve(request)
            granted.append(request.request_id.partition("#")[0])
            return reservation

        p.prefill.core.thread._engine.reserve = watched  # type: ignore[method-assign]

        async def one(name: str, num_tokens: int) -> None:
            prompt = prompt_of(num_tokens, start=num_tokens)
            await p.run_prefill(prompt, name=name, wants_handle=False)
            done.append(name)

        states = p.prefill_role.worker
        tasks = [asyncio.create_task(one("filler", 200))]
        await until(p.prefill_model.is_held.is_set)
        for name, num_tokens in (("large", 240), ("small", 8)):
            num = len(states.states)
            tasks.append(asyncio.create_task(one(name, num_tokens)))
            await until(lambda num=num: len(states.states) == num + 1)
        p.prefill_model.release()
        await asyncio.gather(*tasks)
        assert done[0] == "filler"
        assert granted.index("large") < granted.index("small")
        await p.check()


async def test_a_full_queue_refuses_with_a_retry_time(tmp_path: Path) -> None:
    limits = WorkerLimits(
        max_waiting_requests=1, store_wait_s=WAIT_S, drain_s=0.2, stop_grace_s=0.05
    )
    async with pair(tmp_path, prefill_blocks=64, limits=limits) as p:
        async with held_in(p, "queued") as call:
            with pytest.raises(NoCapacity) as caught:
                await p.run_prefill(prompt_of(100), name="one too many")
            assert caught.value.retry_after_s is not None
            call.cancel()
        await p.check()


async def test_room_for_whole_blocks_only_is_waited_for(tmp_path: Path) -> None:
    """A request that waits is served as soon as blocks come back, without another request's
    help.
    """
    async with pair(tmp_path, prefill_blocks=64) as p:
        async with held_in(p, "queued") as call:
            p.prefill_model.release()
            reply = await asyncio.wait_for(whole(call), WAIT_S)
        assert list(reply.token_ids) == p.expected(PROMPT, 1)
        assert reply.handle.num_tokens == len(PROMPT)
        assert len(blocks_of(reply.handle.runs[0])) == len(PROMPT) // BLOCK_SIZE
        await p.check(leases=1)


@pytest.mark.parametrize("num_tokens", [BLOCK_SIZE - 1, BLOCK_SIZE])
async def test_a_store_is_asked_only_for_what_it_can_have(tmp_path: Path, num_tokens: int) -> None:
    """Full blocks: a shorter prompt's first token waits for no answer of a store."""
    async with pair(tmp_path) as p:
        client: Any = p.prefill.core.connector.client
        match, asked = client.match, []

        async def noting(chain_hashes: Any, **options: Any) -> Any:
            asked.append(len(chain_hashes))
            return await match(chain_hashes, **options)

        client.match = noting
        prompt = prompt_of(num_tokens, start=5)
        answer = await p.generate(prompt)
        assert answer.token_ids == p.expected(prompt, 8)
        assert answer.leg.num_tokens_computed == 0  # it came by the store, its tail with it
        assert asked == [1] * (num_tokens // BLOCK_SIZE)
        await p.check()
