"""Arrival: the last word is looked at where it comes in, while somebody waits for it; what is wrong
with it is its own request's trouble."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from process.deadline import Deadline
from process.errors import Internal
from services.decode.kv_loader import GenerateCommand, KvArrival, KvLoader
from services.worker.provenance import LegProvenance
from tests.harness.waiting import settled

HANDOVER = GenerateCommand(None, ((),), computes_prompt=True)


class Waiting:
    """A request that waits for its last word, and how often that was looked at."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, problem: Exception | None = None) -> None:
        self.num_looks = 0
        core: Any = SimpleNamespace(
            model=SimpleNamespace(block_size=16), connector=SimpleNamespace(client=None)
        )
        reservation: Any = SimpleNamespace(block_ids=(1,), num_local_tokens=0, chain_hashes=())
        ask: Any = SimpleNamespace(
            request_id="r", tenant="t", adapter="", prompt_token_ids=(1, 2), beam=None
        )
        self.intake = KvLoader(core, ask, "e", reservation, LegProvenance(2))
        named = self.intake._named

        def look(*arguments: Any) -> Any:
            self.num_looks += 1
            if problem is not None:
                raise problem
            return named(*arguments)

        monkeypatch.setattr(self.intake, "_named", look)
        self.arrival = KvArrival()
        self.task = asyncio.create_task(
            self.arrival.wait(
                self.intake,
                Deadline.after(30),
                move=lambda _: None,
                standing_back=contextlib.nullcontext,
            )
        )


async def test_what_the_look_raises_is_raised_in_the_requests_own_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever brings the word brings that of all other requests too."""
    waiting = Waiting(monkeypatch, Internal("the test says so"))
    await settled()
    waiting.arrival.hand_over(HANDOVER)
    assert waiting.num_looks == 1, "where it came in"
    assert await waiting.task is HANDOVER
    with pytest.raises(Internal, match="the test says so"):
        await waiting.intake.load(HANDOVER, Deadline.after(30))
    with pytest.raises(Internal, match="the test says so"):
        waiting.intake.look_at(HANDOVER)
    assert waiting.num_looks == 1


async def test_the_last_word_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting(monkeypatch)
    await settled()
    waiting.arrival.hand_over(HANDOVER)
    assert waiting.num_looks == 1
    await waiting.task
    assert await waiting.intake.load(HANDOVER, Deadline.after(30)) == 0
    assert waiting.intake.look_at(HANDOVER) == (1, 2) and waiting.num_looks == 1


async def test_nobody_looks_for_a_request_that_waits_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was cancelled; the word comes behind that."""
    waiting = Waiting(monkeypatch)
    await settled()
    waiting.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting.task
    waiting.arrival.hand_over(HANDOVER)
    assert waiting.num_looks == 0
