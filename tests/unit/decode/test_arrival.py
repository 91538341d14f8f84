"""Arrival: the last word is looked at where it comes in; what is wrong with it is its own request's
trouble."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from process.deadline import Deadline
from process.rpc_errors import Internal
from services.decode.kv_loader import GenerateCommand, KvArrival, KvLoader
from services.worker.provenance import LegProvenance
from tests.harness.waiting import settled

HANDOVER = GenerateCommand(None, ((),), computes_prompt=True)


async def test_what_the_look_raises_is_raised_in_the_requests_own_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller that brings the word brings that of all other requests too."""
    core: Any = SimpleNamespace(
        model=SimpleNamespace(block_size=16), connector=SimpleNamespace(client=None)
    )
    reservation: Any = SimpleNamespace(block_ids=(1,), num_local_tokens=0, chain_hashes=())
    ask: Any = SimpleNamespace(
        request_id="r", tenant="t", adapter="", prompt_token_ids=(1, 2), beam=None
    )
    intake, arrival, num_looks = (
        KvLoader(core, ask, "e", reservation, LegProvenance(2)),
        KvArrival(),
        0,
    )

    def look(*_: Any) -> Any:
        nonlocal num_looks
        num_looks += 1
        raise Internal("the test says so")

    monkeypatch.setattr(intake, "_named", look)
    wait = arrival.wait(
        intake, Deadline.after(30), move=lambda _: None, standing_back=contextlib.nullcontext
    )
    waiting = asyncio.create_task(wait)
    await settled()
    arrival.hand_over(HANDOVER)
    assert num_looks == 1, "where it came in"
    assert await waiting is HANDOVER
    with pytest.raises(Internal, match="the test says so"):
        await intake.load(HANDOVER, Deadline.after(30))
    with pytest.raises(Internal, match="the test says so"):
        intake.look_at(HANDOVER)
    assert num_looks == 1
