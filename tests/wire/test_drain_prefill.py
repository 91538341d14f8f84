"""A prefill worker that is asked to stop: what was taken in is answered, blocks behind are stored,
lent ones are waited for, and only then it leaves the registry; what is new goes elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from process.errors import Unavailable
from protos import common_pb2
from services.worker.config import WorkerLimits
from tests.harness.gated_engine import prompt_of
from tests.harness.prefill_decode_pair import WAIT_S, Pair, PrefillCall, pair, whole
from tests.harness.waiting import Gate, until

PROMPT = prompt_of(30, start=3)
LONG = prompt_of(200, start=3)
LIMITS = WorkerLimits(store_wait_s=WAIT_S, attach_budget_s=5.0, drain_s=60.0)


class Beats:
    """Stands for a heartbeat: what the registry would have been told, in order."""

    def __init__(self, p: Pair) -> None:
        self._p = p
        self.told: list[str] = []
        p.prefill._life.heartbeat = self  # type: ignore[assignment]

    def beat_now(self) -> None:
        self.told.append("draining" if self._p.prefill.core.status().draining else "serving")

    async def stop(self) -> None:
        lent = self._p.prefill.core.status().num_lent_blocks
        self.told.append(f"gone, {self._p.prefill.core.num_live} live, {lent} lent")


async def decoded(
    p: Pair, reply: Any, prompt: tuple[int, ...] = PROMPT, name: str = "r"
) -> list[int]:
    """All tokens, of a handle that must be of use."""
    async with p.stream() as stream:
        key = await stream.reserve(p.reserve(prompt, name=name))
        await stream.next(key)
        await stream.generate(key, reply)
        answer = await stream.collect(key)
    assert answer.leg.num_tokens_computed == 0 and not answer.recomputed
    return [*reply.token_ids, *answer.token_ids]


async def test_what_was_taken_in_is_answered_and_what_is_new_is_not(tmp_path: Path) -> None:
    async with pair(tmp_path, limits=LIMITS, prefill_blocks=64) as p:
        beats = Beats(p)
        p.prefill_model.hold()
        calls = {}
        for name in ("running", "queued"):  # the second waits for the first one's blocks
            request = p.prefill_request(LONG, name=name)
            calls[name] = PrefillCall(p.prefill_stub, request, timeout_s=WAIT_S)
            await until(lambda: len(p.prefill_role.worker.states) == len(calls))
        await until(p.prefill_model.is_held.is_set)
        stopping = asyncio.create_task(p.prefill.stop())
        await until(lambda: p.prefill.core.draining)
        assert beats.told == ["draining"]
        with pytest.raises(Unavailable, match="draining") as refused:
            await p.run_prefill(PROMPT, name="new")
        assert refused.value.retry_after_s == 0
        p.prefill_model.release()
        for name, call in calls.items():
            tokens = await decoded(p, await whole(call), LONG, name)
            assert tokens == p.expected(LONG, 8)
        await stopping
        assert beats.told == ["draining", "gone, 0 live, 0 lent"]


@pytest.mark.parametrize("is_taken", [True, False])
async def test_lent_blocks_are_waited_for_as_long_as_there_is_time(
    tmp_path: Path, is_taken: bool
) -> None:
    limits = WorkerLimits(
        store_wait_s=WAIT_S, attach_budget_s=5.0, drain_s=60.0 if is_taken else 0.3
    )
    async with pair(tmp_path, limits=limits) as p:
        beats = Beats(p)
        reply = await p.run_prefill(PROMPT, handover=common_pb2.HANDOVER_PATH_DIRECT)
        stopping = asyncio.create_task(p.prefill.stop())
        await until(lambda: p.prefill.core.draining)
        if is_taken:
            await asyncio.sleep(0.1)
            assert not stopping.done() and beats.told == ["draining"]
            assert await decoded(p, reply) == p.expected(PROMPT, 8)
        await stopping
        num_lent = 0 if is_taken else 8
        assert beats.told == ["draining", f"gone, 0 live, {num_lent} lent"]


async def test_blocks_behind_the_answer_are_stored_before_it_ends(tmp_path: Path) -> None:
    async with pair(tmp_path, limits=LIMITS) as p:
        gate = Gate(p.prefill.core.connector.client, "put_blocks")
        reply = await p.run_prefill(PROMPT, handover=common_pb2.HANDOVER_PATH_DIRECT)
        assert reply.leg.num_blocks_behind == 7
        stopping = asyncio.create_task(p.prefill.stop())
        await until(lambda: p.prefill.core.draining)
        assert await decoded(p, reply) == p.expected(PROMPT, 8)
        gate.open()
        await stopping
        assert not p.prefill_role.worker.behind.not_stored
        assert len(p.store.node.present()) >= 7
