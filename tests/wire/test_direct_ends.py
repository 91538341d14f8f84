"""All lent blocks come back, however a direct handover ends."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Batch
from kvstore import errors
from process import serving
from process.deadline import Deadline
from process.errors import Cancelled, DeadlineExceeded
from protos import prefill_pb2_grpc
from services.prefill.handover import PrefillAnswer
from services.prefill.job import Firsts, PrefillState
from services.prefill.pins import Pins
from services.prefill.role import PrefillRole
from services.worker import handle as handles
from services.worker import main, request_spans
from services.worker.config import WorkerLimits
from tests.harness.direct_pair import DIRECT, FULL, PROMPT, all_back, direct, generate
from tests.harness.gated_engine import GATE_S, fake_engine, prompt_of
from tests.harness.prefill_decode_pair import KEY, WAIT_S, Pair, PrefillCall, pair, whole
from tests.harness.waiting import Deadlines, Gate, until

STATES = {
    "queued": PrefillState.QUEUED,
    "matching": PrefillState.FETCHING,
    "computing": PrefillState.COMPUTING,
    "early": PrefillState.COMPUTING,
    "lending": PrefillState.STORING,
}


@contextlib.asynccontextmanager
async def held_in(p: Pair, state: str) -> AsyncIterator[Any]:
    """A Prefill call on PROMPT that stays in `state`; the way is free again at the end."""
    gate: Gate | None = None
    filler: asyncio.Task[Any] | None = None
    if state == "queued":
        p.prefill_model.hold()
        long = prompt_of(250, start=9)
        filler = asyncio.create_task(p.run_prefill(long, name="filler", wants_handle=False))
        await until(p.prefill_model.is_held.is_set)
    elif state == "matching":
        gate = Gate(p.prefill.core.connector.client, "match")
    elif state == "computing":
        p.prefill_model.hold()
    else:
        gate = Gate(p.prefill.core.lender, "seal")
    steps = threading.Semaphore(1 if state == "early" else 1000)
    forward = p.prefill_model.forward

    def in_turn(batch: Batch) -> torch.Tensor:
        assert steps.acquire(timeout=GATE_S)
        return forward(batch)

    p.prefill_model.forward = in_turn  # type: ignore[method-assign]
    # One step: there is no partial handle.
    prompt = PROMPT[:10] if state == "lending" else PROMPT
    ask = p.prefill_request(prompt, handover=DIRECT)
    call = PrefillCall(p.prefill_stub, ask, timeout_s=WAIT_S)
    try:
        if gate is not None:
            await gate.wait_entered()
        await until(lambda: STATES[state] in p.prefill_role.worker.states.values())
        yield call
    finally:
        p.prefill_model.release()
        steps.release(1000)
        if gate is not None:
            gate.open()
        if filler is not None:
            await filler
        call.vanish()


async def assert_served(p: Pair) -> None:
    """The worker is as good as new."""
    prompt = prompt_of(35, start=8)
    answer = await generate(p, prompt, name="after")
    assert answer.token_ids == p.expected(prompt, 8)
    assert answer.leg.num_tokens_computed == 0


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("state", STATES)
async def test_ended_in_each_state_nothing_stays_lent(
    tmp_path: Path, state: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch)
    async with direct(tmp_path, prefill_blocks=64) as p:
        async with held_in(p, state) as call:
            if how == "cancel":
                call.cancel()
            else:
                deadlines.end_newest(f"prefill {KEY}")
            with pytest.raises(Cancelled if how == "cancel" else DeadlineExceeded):
                await asyncio.wait_for(whole(call), WAIT_S)
        await all_back(p)
        await assert_served(p)


@pytest.mark.parametrize("transport", ["grpc", "nixl"])
async def test_many_at_once_with_little_room_and_some_that_leave(
    tmp_path: Path, transport: str, seed: int, scale: Callable[[int], int]
) -> None:
    """Prompts that share prefixes, more of them than fit, and a third is cancelled or never taken
    up: every answer is exact, and every block comes back."""
    limits = WorkerLimits(
        store_wait_s=WAIT_S, attach_budget_s=5.0, drain_s=0.2, stop_grace_s=0.05, lease_ttl_s=1.0
    )
    draw = random.Random(seed)
    options: dict[str, Any] = {"prefill_blocks": 64, "remote_transport": transport}
    async with direct(tmp_path, limits=limits, **options) as p:

        async def one(number: int, num_shared: int, num_own: int, fate: float) -> None:
            prompt = (*prompt_of(num_shared, start=2), *prompt_of(num_own, start=number))
            name = f"r{number}"
            if fate > 0.7:
                answer = await generate(p, prompt, name=name)
                assert answer.token_ids == p.expected(prompt, 8)
                return
            ask = p.prefill_request(prompt, name=name, handover=DIRECT)
            call = PrefillCall(p.prefill_stub, ask, timeout_s=WAIT_S)
            if fate > 0.5:
                await whole(call)  # the lease lapses
                return
            await asyncio.sleep(fate / 20)
            call.cancel()
            await call.error()  # or the account crossed it: then its lease lapses, too

        lender = p.prefill.core.lender
        assert lender is not None
        num_rounds = 0
        while num_rounds < scale(60) or lender.loans.counters.num_blocks_lent <= 100:
            assert num_rounds < 20 * scale(60), lender.loans.counters.num_blocks_lent
            num_rounds += 1
            fates = [draw.choice([0.1, 0.3, 0.6, 0.8, 0.8, 0.8]) for _ in range(8)]
            asked = [(draw.randint(0, 40), draw.randint(1, 60), fate) for fate in fates]
            await asyncio.gather(*(one(number, *each) for number, each in enumerate(asked)))


class Deaf:
    async def show_firsts(self, firsts: Firsts) -> None: ...
    async def show_partial(self, handle: handles.Handle) -> None: ...


async def test_a_handle_that_nobody_could_be_told_of_is_taken_back(tmp_path: Path) -> None:
    async with direct(tmp_path) as p:
        servicer = p.prefill_role._servicer
        ask = servicer._ask(p.prefill_request(PROMPT, handover=DIRECT))
        answer = await p.prefill_role.worker.prefill(ask, Deadline.after(WAIT_S), Deaf())
        lender = p.prefill.core.lender
        assert lender is not None and lender.loans.num_leases == 1
        answer.take_back()
        answer.take_back()
        assert lender.loans.num_leases == 0


async def test_a_handle_whose_telling_failed_is_taken_back_and_its_prompt_is_stored(
    tmp_path: Path,
) -> None:
    def tell(answer: PrefillAnswer) -> None:
        assert answer.handle is not None
        raise Cancelled("the stream is gone")

    async with direct(tmp_path) as p:
        ask = p.prefill_role._servicer._ask(p.prefill_request(PROMPT, handover=DIRECT))
        worker, lender = p.prefill_role.worker, p.prefill.core.lender
        with pytest.raises(Cancelled):
            await worker.prefill(ask, Deadline.after(WAIT_S), Deaf(), tell)
        assert lender is not None and lender.loans.num_leases == 0 and not worker.states
        await all_back(p)
        assert not worker.behind.not_stored


async def test_a_stream_that_breaks_as_the_account_is_told_costs_the_store_no_block(
    tmp_path: Path,
) -> None:
    """Its end takes the leases back before anything that the request leaves on the loop has run."""
    async with direct(tmp_path) as p:
        ask = p.prefill_role._servicer._ask(p.prefill_request(PROMPT, handover=DIRECT))
        worker, lender = p.prefill_role.worker, p.prefill.core.lender
        assert lender is not None
        gate = Gate(p.prefill.core.connector.client, "put_blocks")
        answers: list[PrefillAnswer] = []
        num_lent: list[int] = []

        def break_off() -> None:
            answers[0].take_back()
            num_lent.append(lender.num_lent_blocks)

        def tell(answer: PrefillAnswer) -> None:
            answers.append(answer)
            asyncio.get_running_loop().call_soon(break_off)

        await worker.prefill(ask, Deadline.after(WAIT_S), Deaf(), tell)
        await until(lambda: bool(num_lent))
        assert lender.loans.num_leases == 0 and num_lent == [FULL]
        gate.open()
        await all_back(p)
        assert not worker.behind.not_stored


async def test_an_end_that_fails_in_part_still_gives_back_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Exception):
        pass

    def broken(*_: object) -> None:
        raise Broken

    def deaf(answer: PrefillAnswer) -> None:
        raise Cancelled("the stream is gone")

    async with direct(tmp_path) as p:
        worker, lender = p.prefill_role.worker, p.prefill.core.lender
        assert lender is not None
        ask = p.prefill_role._servicer._ask(p.prefill_request(PROMPT, handover=DIRECT))
        with monkeypatch.context() as patched, pytest.raises(Broken):
            patched.setattr(Pins, "hand_over", broken)
            await worker.prefill(ask, Deadline.after(WAIT_S), Deaf(), deaf)
        assert lender.loans.num_leases == 0
        await all_back(p)
        told: list[PrefillAnswer] = []
        with monkeypatch.context() as patched, pytest.raises(Broken):
            patched.setattr(request_spans, "tell", broken)
            await worker.prefill(ask, Deadline.after(WAIT_S), Deaf(), told.append)
        await until(lambda: not worker.states)
        told[0].take_back()
        await all_back(p)


@pytest.mark.parametrize("how", ["never taken", "given up by decode"])
async def test_a_dead_decode_workers_blocks_come_back(tmp_path: Path, how: str) -> None:
    """Nobody releases the lease: it lapses. Somebody who was cancelled with the handle in hand
    does."""
    ttl_s = 0.5 if how == "never taken" else 300.0
    limits = WorkerLimits(
        store_wait_s=WAIT_S, attach_budget_s=5.0, drain_s=0.2, stop_grace_s=0.05, lease_ttl_s=ttl_s
    )
    async with direct(tmp_path, limits=limits) as p, p.stream() as stream:
        reply = await p.run_prefill(PROMPT, handover=DIRECT)
        assert reply.leg.handover == DIRECT
        if how == "given up by decode":
            key = await stream.reserve(p.reserve(PROMPT))
            await stream.next(key)
            p.decode_model.hold()
            await stream.generate(key, reply)
            await stream.cancel(key)
            await stream.collect(key)
            p.decode_model.release()
        await all_back(p)
        await assert_served(p)


async def test_a_prefill_worker_that_stops_has_all_blocks_back(tmp_path: Path) -> None:
    """With a handle out that nobody took, and a put behind under way."""
    async with pair(tmp_path) as p:
        gate = Gate(p.prefill.core.connector.client, "put_blocks")
        await p.run_prefill(PROMPT, handover=DIRECT)
        lender = p.prefill.core.lender
        assert lender is not None and lender.num_lent_blocks == FULL + 1
        stopping = asyncio.create_task(p.prefill.stop())
        await until(lambda: p.prefill.core.draining)
        gate.open()
        await stopping
        assert lender.num_lent_blocks == lender.loans.num_leases == 0
        engine = p.prefill.core.thread._engine
        engine.check_integrity()
        stats = engine.stats()
        assert stats.num_quarantined_blocks == stats.num_referenced_blocks == 0


async def test_a_prefill_worker_that_is_gone_costs_recomputation_only(tmp_path: Path) -> None:
    """Between the handle and its use; and then a new life under the same name and address is met,
    which an old handle never reads from."""
    async with pair(tmp_path) as p, p.stream() as stream:
        warm = await generate(p, prompt_of(20, start=50), name="warm")
        assert warm.leg.num_tokens_computed == 0
        replies = {}
        for name in ("away", "another"):
            replies[name] = await p.run_prefill(PROMPT, name=name, handover=DIRECT)
        settings = p.prefill.core.settings
        address = p.prefill.address
        await p.prefill.stop()
        await decoded(p, stream, "away", replies["away"], {errors.STORE_UNAVAILABLE})
        again = await main.start(
            fake_engine(),
            type(settings)(**{**vars(settings), "listen": address}),
            "prefill",
            PrefillRole,
        )
        try:
            async with serving.channel(again.address) as channel:
                stub = prefill_pb2_grpc.PrefillStub(channel)
                await decoded(
                    p,
                    stream,
                    "another",
                    replies["another"],
                    {errors.INCARNATION, errors.STORE_UNAVAILABLE},
                )
                reply = await whole(
                    PrefillCall(
                        stub,
                        p.prefill_request(PROMPT, name="new", handover=DIRECT),
                        timeout_s=WAIT_S,
                    )
                )
                assert reply.leg.handover == DIRECT
                await decoded(p, stream, "new", reply, set(), is_patient=True)
        finally:
            await again.stop()


async def decoded(
    p: Pair,
    stream: Any,
    name: str,
    reply: Any,
    reasons: set[str],
    *,
    is_patient: bool = False,
) -> None:
    """The answer is exact, whatever could not be read; that is counted under one of `reasons`."""
    if is_patient:  # the way to the new life is tried again after a back-off
        run = reply.handle.runs[0]

        async def met() -> bool:
            try:
                await p.decode.core.remote_stores.client(
                    run.node_id, run.store_address, run.store_incarnation, Deadline.after(2.0)
                )
            except Exception:
                return False
            return True

        await until(met)
    key = await stream.reserve(p.reserve(PROMPT, name=name))
    await stream.next(key)
    await stream.generate(key, reply)
    answer = await stream.collect(key)
    assert [*reply.token_ids, *answer.token_ids] == p.expected(PROMPT, 8)
    assert set(answer.recomputed) <= reasons
    assert bool(answer.recomputed) == bool(reasons)
