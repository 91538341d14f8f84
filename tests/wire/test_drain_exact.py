"""Streams move from decode worker to decode worker at random moments, and the tokens do not show
it: real workers on real gRPC, with a model whose tokens show each wrong byte, and with the
small bundled one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import third
from tests.harness.bundled_pair import alone, bundled_engine
from tests.harness.decode_movers import LEAVE_S, Movers, Told, fake_engines, movers
from tests.harness.gated_engine import GatedModel, prompt_of
from tests.harness.prefill_decode_pair import WAIT_S
from tests.harness.waiting import until

pytestmark = [pytest.mark.oracle, pytest.mark.usefixtures("one_compile_process")]

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'


async def drained_meanwhile(
    m: Movers, rng: random.Random, asks: list[tuple[list[int], dict[str, Any]]]
) -> list[Told]:
    """Run all at once; again and again, after some more tokens, whichever worker serves drains."""
    num_tokens = 0
    news = asyncio.Event()

    def on_tokens() -> None:
        nonlocal num_tokens
        num_tokens += 1
        news.set()

    async def drain() -> None:
        index = 0
        while True:
            wanted = num_tokens + rng.randint(1, 40)
            while num_tokens < wanted:
                news.clear()
                await news.wait()
            m.stay(1 - index)
            m.leave(index, LEAVE_S)
            await until(lambda index=index: not m.states(index), LEAVE_S + WAIT_S)
            index = 1 - index

    draining = asyncio.create_task(drain())
    told = await asyncio.gather(*(m.follow(prompt, on_tokens, **ask) for prompt, ask in asks))
    if draining.done():
        draining.result()  # its error
    draining.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await draining
    for index in range(2):
        m.stay(index)
    return told


def check_sums(told: Told, prompt: list[int]) -> None:
    """A leg that drew had all of the prompt by its own account; one that moved before it did, no
    more than that."""
    ends = [moved.num_output_tokens[0] for moved in told.moved] + [len(told.sample.token_ids)]
    for leg, before, end in zip(told.legs, [0, *ends], ends, strict=False):
        total = leg.num_tokens_computed + leg.num_tokens_local
        total += sum(count.num_tokens for count in leg.from_store)
        assert total == len(prompt) if end > before else total <= len(prompt), (leg, before, end)


def check_legs(told: Told, prompt: list[int]) -> None:
    """Every leg behind a move had the prompt's KV by the handle, and what each says sums up."""
    check_sums(told, prompt)
    legs = zip(told.moved, told.legs[1:], told.had_handle[1:], strict=True)
    for moved, leg, had_handle in legs:
        if moved.reason == "missing":  # nothing was computed yet
            assert moved.num_output_tokens[0] == 0 and not moved.HasField("handle")
            assert not moved.HasField("leg")
            continue
        assert moved.HasField("handle") and moved.reason == "draining", moved
        assert moved.HasField("leg")
        num_left = len(prompt) + moved.num_output_tokens[0] - 1 - moved.handle.num_tokens
        assert 0 <= num_left
        if had_handle and moved.handle.num_tokens >= len(prompt):
            assert leg.num_tokens_computed == 0 and not leg.recomputed, leg


@pytest.mark.parametrize(
    ("preemption", "is_ahead"),
    third(itertools.product(["never", "recompute", "swap"], [False, True])),
)
async def test_moved_streams_draw_what_they_would_have_drawn(
    tmp_path: Path,
    preemption: str,
    is_ahead: bool,
    seed: int,
    scale: Callable[[int], int],
) -> None:
    """60 rounds of 6 requests."""
    rng = random.Random(seed)
    fake, make_engine = GatedModel(), fake_engines(preemption=preemption, is_ahead=is_ahead)
    num_moved = num_whole = 0  # of those that had drawn something
    async with movers(tmp_path, make_engine=make_engine) as m:
        round_ = 0
        # A machine that is slow moves few; on and on until that shows something, too.
        while round_ < scale(60) or num_moved <= scale(60):
            assert round_ < 20 * scale(60), (num_moved, num_whole)
            round_ += 1
            asks = []
            for place in range(6):
                prompt = prompt_of(rng.randint(1, 40), start=rng.randint(1, 9) + place)
                asks.append((list(prompt), {"max_tokens": rng.randint(1, 60)}))
            told = await drained_meanwhile(m, rng, asks)
            for one, (prompt, ask) in zip(told, asks, strict=True):
                assert one.sample.token_ids == fake.generate(prompt, ask["max_tokens"]), round_
                drawn = [moved for moved in one.moved if moved.num_output_tokens[0] > 0]
                num_moved += len(drawn)
                num_whole += sum(moved.HasField("handle") for moved in drawn)
                if preemption == "never":
                    check_legs(one, prompt)
            await m.check()
    assert num_whole > num_moved / 2, (num_moved, num_whole)


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 7, "logprobs": 2},
    {"temperature": 0.8, "seed": 8, "min_p": 0.02, "top_k": 40, "repetition_penalty": 1.2},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4, "logprobs": 0, "trace": True},
    {"json_schema": SCHEMA, "ignore_eos": False, "temperature": 0.7, "seed": 3},
    {"regex": "(ab|cd){3,30} [0-9]+", "ignore_eos": False, "temperature": 1.0, "seed": 5},
    {"stop_token_ids": list(range(0, 2048, 17)), "temperature": 1.0, "seed": 11, "min_tokens": 9},
    {"no_repeat_ngram": 2, "temperature": 0.5, "seed": 12},
]


async def test_a_real_model_goes_on_exactly_with_every_kind_of_parameter(
    tmp_path: Path, seed: int, scale: Callable[[int], int]
) -> None:
    """20 rounds of all kinds at once, against one engine alone."""
    rng = random.Random(seed)
    reference = bundled_engine()
    num_moved = 0
    async with movers(tmp_path, make_engine=bundled_engine) as m:
        round_ = 0
        while round_ < scale(20) or num_moved < scale(20) * 4:
            assert round_ < 20 * scale(20), num_moved
            round_ += 1
            asks = []
            for kind in KINDS:
                length = rng.choice([5, 16, 21, 40])
                prompt = [rng.randrange(30, 2000) for _ in range(length)]
                asks.append((prompt, {"max_tokens": 40, **kind}))
            told = await drained_meanwhile(m, rng, asks)
            for one, (prompt, ask) in zip(told, asks, strict=True):
                # Not on the loop: what is under way there has deadlines.
                (expected,) = await asyncio.to_thread(alone, reference, prompt, **ask)
                assert one.sample.token_ids == expected.token_ids, (round_, ask)
                assert one.sample.finish_reason == expected.finish_reason, (round_, ask)
                num_tokens = len(one.sample.token_ids)
                assert len(one.sample.logprobs) == (num_tokens if "logprobs" in ask else 0)
                assert len(one.sample.traces) == (num_tokens if "trace" in ask else 0)
                num_moved += len(one.moved)
                check_legs(one, prompt)
            await m.check()
    reference.close()
