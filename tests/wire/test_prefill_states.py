"""A prefill request, through the store or lending its own blocks, is cancelled, out of time, or
loses its store in each of its states: nothing stays held or lent, and the next request is served as
if nothing had been.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from process.errors import Cancelled, DeadlineExceeded, NoCapacity
from protos import common_pb2
from tests.harness.gated_engine import BLOCK_SIZE
from tests.harness.handles import blocks_of
from tests.harness.prefill_decode_pair import WAIT_S, Pair, PrefillCall, pair, patient, whole
from tests.harness.waiting import Deadlines, Gate, until

pytestmark = [pytest.mark.oracle, pytest.mark.asyncio(loop_scope="module")]

STORE = common_pb2.HANDOVER_PATH_STORE
DIRECT = common_pb2.HANDOVER_PATH_DIRECT
STATES = {
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
CASES = [(STORE, state) for state in STATES] + [(DIRECT, state) for state in LENDING]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def p(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """One whose prefill worker has room for one long prompt."""
    async with pair(tmp_path_factory.mktemp("pair"), prefill_blocks=64) as made:
        yield made


@contextlib.asynccontextmanager
async def held_in(p: Pair, state: str, handover: int = STORE) -> AsyncIterator[PrefillCall]:
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
    call = PrefillCall(
        p.prefill_stub, p.prefill_request(prompt, handover=handover), timeout_s=WAIT_S
    )
    try:
        if gate is not None:
            await gate.wait_entered()
        await until(lambda: (STATES | LENDING)[state] in p.at_prefill.states())
        yield call
    finally:
        p.prefill_model.release()
        if gate is not None:
            gate.open()
        if filler is not None:
            await filler
        call.vanish()


async def assert_served(p: Pair, handover: int = STORE) -> None:
    """The worker is as good as new."""
    await p.check()
    prompt = p.new_prompt(35)
    answer = await p.generate(prompt, name="after", handover=handover)
    assert answer.token_ids == p.expected(prompt, 8)
    assert answer.leg.num_tokens_computed == 0
    await p.check()


@pytest.mark.parametrize(("handover", "state"), CASES)
async def test_cancel_in_each_state_leaves_nothing(p: Pair, handover: int, state: str) -> None:
    async with held_in(p, state, handover) as call:
        call.cancel()
        assert isinstance(await call.error(), Cancelled)
        if "computing" not in (state, LENDING.get(state)):
            # There the abort comes after the step that is held.
            await until(lambda: (STATES | LENDING)[state] not in p.at_prefill.states())
    await assert_served(p, handover)


@pytest.mark.parametrize(("handover", "state"), CASES)
async def test_the_deadline_ends_it_in_each_state(
    p: Pair, handover: int, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever it is: the next test says whose it is."""
    deadlines = Deadlines(monkeypatch)
    async with held_in(p, state, handover) as call:
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
        call = PrefillCall(p.prefill_stub, request, timeout_s=timeout_s)
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(whole(call), WAIT_S)
        p.prefill_model.release()
        await p.check()


@pytest.mark.parametrize("state", STATES)
async def test_the_store_dies_in_each_state_and_the_answer_still_comes(p: Pair, state: str) -> None:
    async with held_in(p, state) as call:
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
    await p.check()


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
    await p.check()


async def test_a_full_queue_refuses_with_a_retry_time(tmp_path: Path) -> None:
    limits = patient(max_waiting_requests=1)
    async with pair(tmp_path, prefill_blocks=64, limits=limits) as p:
        async with held_in(p, "queued") as call:
            with pytest.raises(NoCapacity) as caught:
                await p.run_prefill(p.new_prompt(100), name="one too many")
            assert caught.value.retry_after_s is not None
            call.cancel()
        await p.check()


async def test_room_for_whole_blocks_only_is_waited_for(p: Pair) -> None:
    """A request that waits is served as soon as blocks come back, without another request's
    help.
    """
    async with held_in(p, "queued") as call:
        p.prefill_model.release()
        reply = await asyncio.wait_for(whole(call), WAIT_S)
    assert list(reply.token_ids) == p.expected(call.prompt, 1)
    assert reply.handle.num_tokens == len(call.prompt)
    assert len(blocks_of(reply.handle.runs[0])) == len(call.prompt) // BLOCK_SIZE
    await p.check(leases=1)
    p.at_prefill.release_later(reply.handle)
    await p.check()


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
    await p.check()
