"""A change of role that meets a stop in each of its moments, blocks that are still written into,
or a role that cannot begin: what only the inside of a worker can bring about. What a router and an
operator see of a change is told in test_set_role.py.
"""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine.request import Request, Sampling
from kvstore.errors import Quarantine
from process import rpc
from process.errors import FailedPrecondition, Internal
from protos import (
    worker_control_pb2,
    worker_control_pb2_grpc,
)
from services.worker import main, server
from services.worker.config import WorkerLimits
from services.worker.server import RoleSession
from tests.harness.decode_movers import Movers, movers
from tests.harness.gated_engine import SALT, prompt_of
from tests.harness.prefill_decode_pair import WAIT_S
from tests.harness.waiting import until

PROMPT = prompt_of(30, start=3)
SHORT = PROMPT[:10]
"""One step."""


async def set_role(made: main.Worker, role: str) -> worker_control_pb2.SetRoleReply:
    async with rpc.channel(made.address) as channel:
        stub = worker_control_pb2_grpc.WorkerControlStub(channel)
        return await stub.SetRole(worker_control_pb2.SetRoleRequest(role=role), timeout=WAIT_S)


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def busy(m: Movers) -> int:
    """A request of worker 0 in a step that does not end."""
    model = m.at(0).model
    model.hold()
    key = await m.begin(0, SHORT, max_tokens=40)
    await until(model.is_held.is_set)
    return key


@pytest.mark.parametrize("when", ["drains", "ends", "begins"])
async def test_who_is_told_to_stop_while_it_changes_is_not_announced_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It drains once, and its engine is closed once, by whoever has it then."""
    limits = WorkerLimits(store_wait_s=WAIT_S, attach_budget_s=5.0, drain_s=1.0)
    async with movers(tmp_path, limits=limits) as m:
        made, engine = m.workers[0], m.engine(0)
        told: list[str] = []
        stops: list[asyncio.Task[None]] = []
        close, begin, drain, end = engine.close, server.begin, RoleSession.drain, RoleSession.end

        async def late_end(life: RoleSession, **options: Any) -> None:
            if not stops:
                stops.append(asyncio.create_task(made.stop()))
                await asyncio.sleep(0)
            await end(life, **options)

        async def late_begin(*arguments: Any, **options: Any) -> RoleSession:
            life = await begin(*arguments, **options)
            stops.append(asyncio.create_task(made.stop()))
            await asyncio.sleep(0)
            return life

        async def counted_drain(life: RoleSession) -> None:
            told.append("drained")
            await drain(life)

        def counted_close() -> None:
            told.append("closed")
            close()

        engine.close = counted_close
        monkeypatch.setattr(RoleSession, "drain", counted_drain)
        monkeypatch.setattr(
            RoleSession, "announce", lambda life, *addresses: told.append("announced")
        )
        if when == "begins":
            monkeypatch.setattr(server, "begin", late_begin)
        elif when == "ends":
            monkeypatch.setattr(RoleSession, "end", late_end)
        else:
            await busy(m)
        changing = asyncio.create_task(set_role(made, "prefill"))
        if when == "drains":
            await until(lambda: made.core.draining)
            stops.append(asyncio.create_task(made.stop()))
            await until(lambda: made._is_stopping)
            engine._model.release()
        assert (await code_of(changing))[0] is grpc.StatusCode.UNAVAILABLE
        await stops[0]
        assert told == ["drained", "closed"] and not made.core.failed.is_set()


@pytest.mark.parametrize("settles", [True, False])
async def test_blocks_that_are_still_written_into_come_back_or_the_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settles: bool
) -> None:
    """A store stalled in the middle of a copy, and its request ended before the role did."""
    async with movers(tmp_path) as m:
        made = m.workers[0]
        core, engine = made.core, m.engine(0)
        monkeypatch.setattr(core, "stop", functools.partial(core.stop, 5.0 if settles else 0.2))
        chain = core.chain(SALT, "")
        asked = Request(
            request_id="x",
            prompt_token_ids=PROMPT,
            sampling=Sampling(max_tokens=4),
            block_hasher=chain.hasher,
            prompt_hashes=tuple(chain.hashes(PROMPT)),
            cache_root=chain.root,
        )
        reservation = await core.thread.call(lambda engine: engine.reserve(asked))
        settled = asyncio.get_running_loop().create_future()
        core.connector._quarantine("x", Quarantine(reservation.block_ids[:3], settled))
        core.drop("x")
        await until(lambda: core.thread.stats.num_quarantined_blocks == 3)
        changing = asyncio.create_task(made.set_role("prefill"))
        await asyncio.sleep(0.3)
        if not settles:
            with pytest.raises(Internal, match="0 requests and 3 of their blocks are left"):
                await changing
            assert made.failure is not None and core.failed.is_set()
            return
        assert not changing.done()
        settled.set_result(None)
        await changing
        assert engine.stats().num_quarantined_blocks == 0
        await made.core.thread.call(lambda engine: engine.check_integrity())


async def test_a_worker_that_cannot_become_the_other_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with movers(tmp_path) as m:
        made = m.workers[0]

        async def fails(*arguments: Any, **options: Any) -> None:
            raise FailedPrecondition("the store has frames of another size")

        monkeypatch.setattr(server, "begin", fails)
        with pytest.raises(Internal, match="could not become prefill: the store has frames"):
            await made.set_role("prefill")
        assert made.core.failed.is_set() and made.failure is not None
        assert made.why_not_ready()
