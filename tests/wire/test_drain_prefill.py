"""A prefill worker that is asked to stop: what was taken in is answered, blocks behind are stored,
lent ones are waited for, and only then it leaves the registry; what is new goes elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from process.errors import Unavailable
from protos import common_pb2
from tests.harness.gated_engine import prompt_of
from tests.harness.prefill_decode_pair import WAIT_S, Pair, PrefillCall, pair, patient, whole
from tests.harness.waiting import until
from tests.harness.worker_probe import Beats

pytestmark = pytest.mark.oracle

PROMPT = prompt_of(30, start=3)
LONG = prompt_of(200, start=3)
DIRECT = common_pb2.HANDOVER_PATH_DIRECT


async def decoded(
    p: Pair, reply: Any, prompt: tuple[int, ...] = PROMPT, name: str = "r"
) -> list[int]:
    """All tokens, of a handle that must be of use."""
    answer = await p.decode_from(reply, prompt, name=name)
    assert answer.leg.num_tokens_computed == 0 and not answer.recomputed
    return answer.token_ids


async def test_what_was_taken_in_is_answered_and_what_is_new_is_not(tmp_path: Path) -> None:
    async with pair(tmp_path, limits=patient(drain_s=60.0), prefill_blocks=64) as p:
        beats = Beats(p.at_prefill)
        p.prefill_model.hold()
        calls = {}
        for name in ("running", "queued"):  # the second waits for the first one's blocks
            request = p.prefill_request(LONG, name=name)
            calls[name] = PrefillCall(p.prefill_stub, request, timeout_s=WAIT_S)
            await until(lambda: len(p.at_prefill.states()) == len(calls))
        await until(p.prefill_model.is_held.is_set)
        stopping = asyncio.create_task(p.prefill.stop())
        await until(lambda: p.at_prefill.is_draining)
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
    async with pair(tmp_path, limits=patient(drain_s=60.0 if is_taken else 0.3)) as p:
        beats = Beats(p.at_prefill)
        reply = await p.run_prefill(PROMPT, handover=DIRECT)
        stopping = asyncio.create_task(p.prefill.stop())
        await until(lambda: p.at_prefill.is_draining)
        if is_taken:
            assert beats.told == ["draining"]
            assert await decoded(p, reply) == p.expected(PROMPT, 8)
        await stopping
        num_lent = 0 if is_taken else 8
        assert beats.told == ["draining", f"gone, 0 live, {num_lent} lent"]


async def test_a_prompt_without_a_handle_is_stored_before_it_ends(tmp_path: Path) -> None:
    async with pair(tmp_path, limits=patient(drain_s=60.0)) as p:
        gate = p.at_prefill.home.hold("put")
        asked = p.prefill_request(PROMPT, max_tokens=1, wants_handle=False)
        await whole(PrefillCall(p.prefill_stub, asked, timeout_s=WAIT_S))
        stopping = asyncio.create_task(p.prefill.stop())
        await until(lambda: p.at_prefill.is_draining)
        gate.open()
        await stopping
        assert not p.at_prefill.not_stored_behind
        assert p.num_stored(PROMPT) == 7


async def test_blocks_behind_the_answer_are_stored_before_it_ends(tmp_path: Path) -> None:
    async with pair(tmp_path, limits=patient(drain_s=60.0)) as p:
        gate = p.at_prefill.home.hold("put")
        reply = await p.run_prefill(PROMPT, handover=DIRECT)
        assert reply.leg.num_blocks_behind == 7
        stopping = asyncio.create_task(p.prefill.stop())
        await until(lambda: p.at_prefill.is_draining)
        assert await decoded(p, reply) == p.expected(PROMPT, 8)
        gate.open()
        await stopping
        assert not p.at_prefill.not_stored_behind
        assert p.num_stored(PROMPT) == 7
