"""Steps with prompts, launched ahead: nobody can tell, but by time."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from engine.engine import LLMEngine
from engine.errors import WrongState
from engine.models.interface import DRAWN_BEFORE, MixedRow
from engine.outputs import RequestOutput
from engine.request import Request, Sampling
from engine.scheduler import Scheduler
from engine.testing.ahead_model import AheadModel
from tests.harness.engines import (
    PROMPT,
    SIZE,
    all_events,
    all_steps,
    arriving,
    fake_model,
    finish,
    hasher,
    late_engine,
    make,
    make_request,
    recording_engine,
    tokens_of,
    without_ids,
    write_tokens,
)

Make = Callable[..., Any]


# -- order


def test_a_step_with_prompts_is_launched_before_the_one_before_it_is_read() -> None:
    """A prompt in chunks of eight, and one that comes beside its second token."""
    engine, ahead = recording_engine(takes_prompts=True, max_num_tokens_per_step=8)
    engine.submit(make_request("a", PROMPT, max_tokens=6))
    other = tuple(range(40, 50))
    events = list(engine.step().events) + list(engine.step().events)
    engine.submit(make_request("b", other, max_tokens=2))
    events += all_events(engine)
    for name, prompt, num in (("a", PROMPT, 6), ("b", other, 2)):
        own = [event for event in events if event.request_id == name]
        assert tokens_of(own) == fake_model().generate(prompt, num)
    parts = [
        [(row.key[0], row.position, row.num_tokens) for row in rows] for rows in ahead.launched
    ]
    assert parts == [
        [("a", 0, 8)],
        [("a", 8, 6)],
        [("a", 14, 1)],
        [("a", 15, 1), ("b", 0, 7)],
        [("a", 16, 1), ("b", 7, 3)],
        [("a", 17, 1), ("b", 10, 1)],
        [("a", 18, 1)],
    ]
    mixed = ahead.launched[4]
    assert [type(row) for row in mixed] == [MixedRow, MixedRow]
    assert mixed[0].token_ids == (DRAWN_BEFORE,) and mixed[1].token_ids == other[7:]
    assert [row.draw is None for row in ahead.launched[3]] == [False, True]
    assert [row.token_id for row in ahead.launched[5]] == [DRAWN_BEFORE] * 2
    assert ahead.num_mixed == 4
    expected = ["launch 0"]
    for index in range(1, len(parts)):
        expected += [f"launch {index}", f"read {index - 1}"]
    assert ahead.calls == [*expected, "read 6"]


def _requests(rng: random.Random, *, stops: bool, shares: bool = False) -> list[Request]:
    """The first one has a prompt of more tokens than a step.

    Args:
        shares: they begin alike.
    """
    stem = tuple(rng.randrange(1, 97) for _ in range(24))
    requests = []
    for index in range(rng.randint(2, 6)):
        num_tokens = rng.randint(1, 30) if index else 30
        prompt = tuple(rng.randrange(1, 97) for _ in range(num_tokens))
        sampling = Sampling(
            rng.randint(1, 20),
            rng.choice([0.0, 1.0]),
            seed=rng.randrange(99),
            ignore_eos=not stops,
            stop_token_ids=frozenset(rng.sample(range(97), rng.choice([0, 12]) * stops)),
        )
        samples = rng.choice([1, 1, 1, 2]) if index else 1
        if shares:
            prompt = (*stem[: rng.randint(0, 24) if index else 24], *prompt[:6])
        root = b"" if shares else str(index).encode()
        requests.append(Request(f"r{index}", prompt, sampling, hasher(root), num_samples=samples))
    return requests


def _limits(rng: random.Random, index: int) -> dict[str, Any]:
    """Of the first workload such that its first step is one of a prompt alone."""
    return {
        "max_num_tokens_per_step": rng.randint(8, 24),
        "max_num_running": rng.choice([2, 3, 8]),
        "max_num_tokens_per_request_step": rng.choice([0, 0, 1, 5]) if index else 0,
    }


@pytest.mark.parametrize("is_late", [False, True])
def test_every_step_tells_what_a_plain_one_does(
    is_late: bool, seed: int, scale: Callable[[int], int]
) -> None:
    """40 workloads in which length alone ends a request: what is known before is all there is to
    know, so each step is the very same. Not of prompts that share a beginning: one that waits for
    blocks that another prompt computes is passed by the next one, and a launch is planned before
    they are booked, so another prompt may go first (BATON_TEST_SEED=895300434 had such a step)."""
    num_mixed = num_steps = 0
    for index in range(scale(40)):
        rng = random.Random(f"mixed {seed} {index}")
        requests = _requests(rng, stops=False, shares=False)
        limits = _limits(rng, index)
        model = AheadModel(fake_model(), is_late=is_late)
        engines = [make(one, num_blocks=200, **limits) for one in (fake_model(), model)]
        for engine in engines:
            for request in requests:
                engine.submit(request)
        plain, ahead = engines
        while plain.has_work():
            told = [without_ids(engine.step().events) for engine in engines]
            assert told[0] == told[1]
            ahead.check_integrity()
            num_steps += 1
        assert not ahead.has_work() and ahead.stats() == plain.stats()
        num_mixed += model.launches.num_mixed
    assert 0 < num_mixed <= num_steps


def _told(engine: LLMEngine, requests: Sequence[Request], rng: random.Random) -> dict[Any, Any]:
    """What each sample's events told together."""
    return {
        key: (
            tokens_of(events),
            [block for event in events for block in event.filled],
            [(e.finish_reason, e.stop_token_id, e.num_computed_tokens) for e in events[-1:]],
        )
        for key, events in arriving(engine, requests, rng).items()
    }


def test_each_samples_events_are_those_of_plain_steps(
    seed: int, scale: Callable[[int], int]
) -> None:
    """60 workloads with arrivals, ended by tokens, too: how prompts were cut is all that may
    differ."""
    num_mixed = 0
    for index in range(scale(60)):
        rng = random.Random(f"mixed arriving {seed} {index}")
        requests, limits = _requests(rng, stops=True), _limits(rng, index)
        model = AheadModel(fake_model(), is_late=rng.random() < 0.5)
        engines = [make(one, num_blocks=200, **limits) for one in (fake_model(), model)]
        told = [_told(engine, requests, random.Random(index)) for engine in engines]
        assert told[0] == told[1]
        num_mixed += model.launches.num_mixed
    assert num_mixed > 0


def test_a_row_has_the_blocks_of_its_step_alone() -> None:
    """A prompt has all of its own from the beginning; others are of a step's table for nothing."""
    engine, ahead = recording_engine(takes_prompts=True, max_num_tokens_per_step=8)
    engine.submit(make_request("a", range(1, 31), max_tokens=6))
    engine.step()
    assert len(engine._groups["a"].prompt.block_ids) >= 30 // SIZE
    engine.submit(make_request("b", range(40, 60), max_tokens=6))
    all_steps(engine)
    mixed = [row for rows in ahead.launched for row in rows if isinstance(row, MixedRow)]
    assert {row.key[0] for row in mixed} == {"a", "b"}
    assert all(len(row.block_ids) == -(-(row.position + row.num_tokens) // SIZE) for row in mixed)


def test_no_draw_is_made_for_a_step_that_is_plain() -> None:
    """One of many that cannot be launched is found before."""
    asked: list[Any] = []

    def takes(draw: Any) -> bool:
        asked.append(draw)
        return True

    engine = make(AheadModel(fake_model(), takes=takes))
    for name in "abc":
        engine.submit(make_request(name, PROMPT, max_tokens=6))
    penalized = Sampling(12, repetition_penalty=1.3, ignore_eos=True)
    engine.submit(Request("d", PROMPT, penalized, hasher()))
    while "d" in engine._groups:
        engine.step()
    assert not asked
    engine.submit(make_request("e", PROMPT, max_tokens=6))
    engine.step()
    assert asked


# -- whatever disturbs


def _sharing(rng: random.Random) -> list[Request]:
    """As `_requests`, with priorities."""
    return [
        dataclasses.replace(one, priority=rng.choice([0, 0, 1]) if index else 1)
        for index, one in enumerate(_requests(rng, stops=True, shares=True))
    ]


def _interrupt(engine: LLMEngine, request: Request, rng: random.Random) -> set[Any]:
    """Returns: which samples nobody lets come to their end."""
    name, index = request.request_id, rng.randrange(request.num_samples)
    how = rng.choice(["abort", "finish", "preempt", "preempt"])
    if how == "abort":
        engine.abort(name)
        return {(name, sample) for sample in range(request.num_samples)}
    if how == "finish":
        engine.finish_sample(name, index)
        return {(name, index)}
    with contextlib.suppress(WrongState):  # it has no blocks just now
        engine.preempt(name, index)
    return set()


def _interrupted(
    engine: LLMEngine, requests: Sequence[Request], rng: random.Random
) -> tuple[dict[Any, list[int]], set[Any]]:
    """All samples' tokens, and which of them were cut short."""
    tokens: dict[Any, list[int]] = {}
    cut: set[Any] = set()
    left = list(requests)
    live: dict[str, Request] = {}
    while left or engine.has_work():
        while left and (rng.random() < 0.3 or not engine.has_work()):
            request = left.pop(0)
            engine.submit(request)
            live[request.request_id] = request
        for event in engine.step().events:
            tokens.setdefault((event.request_id, event.sample_index), []).extend(event.token_ids)
            if event.is_request_over:
                del live[event.request_id]
        engine.check_integrity()
        if live and rng.random() < 0.3:
            cut |= _interrupt(engine, rng.choice(list(live.values())), rng)
            live = {name: one for name, one in live.items() if name in engine._groups}
            engine.check_integrity()
    return tokens, cut


def test_no_interruption_changes_a_token(seed: int, scale: Callable[[int], int]) -> None:
    """100 workloads on hardly enough blocks, aborted, cut short and preempted at random, with
    logits that are no numbers: tokens are those of each request alone, and all blocks come back."""
    num_mixed = 0
    poison = frozenset(range(5))
    for index in range(scale(100)):
        rng = random.Random(f"mixed interrupted {seed} {index}")
        requests, limits = _sharing(rng), _limits(rng, index)
        expected: dict[Any, list[int]] = {}
        unequal: set[Any] = set()  # an error of one ends the others, wherever they are
        for request in requests:
            alone = make(fake_model(poison=poison))
            alone.submit(request)
            for output in all_steps(alone):
                for event in output.events:
                    key = (event.request_id, event.sample_index)
                    expected.setdefault(key, []).extend(event.token_ids)
                    if event.error is not None and request.num_samples > 1:
                        unequal |= {(request.request_id, one) for one in range(request.num_samples)}
        model = AheadModel(
            fake_model(poison=poison), is_late=rng.random() < 0.7, max_rows=rng.choice([3, 100])
        )
        engine = make(
            model,
            num_blocks=rng.randint(16, 30),
            preemption=rng.choice(["recompute", "swap"]),
            policy=rng.choice(["fcfs", "priority", "cache_aware"]),
            **limits,
        )
        found, cut = _interrupted(engine, requests, rng)
        for key, tokens in found.items():
            num_common = len(tokens)
            if key in unequal:
                num_common = min(num_common, len(expected[key]))
            assert tokens[:num_common] == expected[key][:num_common]
            assert key in cut | unequal or len(tokens) == len(expected[key])
        assert found.keys() | cut >= expected.keys()
        engine._in_flight.settle()
        stats = engine.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
        assert engine._pool.num_quarantined == 0
        num_mixed += model.launches.num_mixed
    assert num_mixed > 0


def test_who_comes_next_waits_for_blocks_that_are_being_filled() -> None:
    """Two prompts that begin alike, the first of which fills a step: the other one shares what that
    step computes, as if nothing were launched ahead."""
    stem = tuple(range(1, 17))
    told = []
    for model in (fake_model(), AheadModel(fake_model(), is_late=True)):
        engine = make(model, max_num_tokens_per_step=16)
        for name in "ab":
            engine.submit(make_request(name, (*stem, 90 + (name == "b")), max_tokens=4))
        outputs = all_steps(engine)
        told.append([without_ids(output.events) for output in outputs])
        assert sum(output.num_scheduled_tokens for output in outputs) == len(stem) + 2 + 2 * 3
    assert told[0] == told[1]


@pytest.mark.parametrize("how", ["abort", "preempt", "hold"])
def test_nobody_gets_the_blocks_that_a_chunk_is_written_into(how: str) -> None:
    """Another's tokens are written into every block that there is; the launch comes after that."""
    engine, _ = late_engine(num_blocks=16, preemption="recompute", max_num_tokens_per_step=10)
    engine.submit(make_request("a", range(1, 25), max_tokens=4))
    engine.step()  # [0, 10) is told; [10, 20) is under way, in three blocks
    if how == "hold":
        engine.detach("a")
        assert engine._pool.num_quarantined == 0  # it has waited for it
        engine.release("a")
    elif how == "preempt":
        engine.preempt("a")
        assert engine._pool.num_quarantined == engine._in_flight.num_idle_blocks == 3
        engine.abort("a")
    else:
        engine.abort("a")
        assert engine._pool.num_quarantined == engine._in_flight.num_idle_blocks == 3
    engine.check_integrity()
    prompt = [90 - i % 7 for i in range(13 * SIZE)]
    block_ids = engine.reserve(make_request("b", prompt, max_tokens=2)).block_ids
    write_tokens(engine, block_ids, prompt)
    engine.start("b", num_loaded_tokens=len(prompt))
    assert tokens_of(finish(engine)["b"]) == fake_model().generate(prompt, 2)
    assert engine._pool.num_quarantined == 0


def test_nobody_loses_blocks_for_a_step_that_is_planned_ahead() -> None:
    """Where they do not suffice, the step in flight is told first."""
    engine, _ = recording_engine(
        takes_prompts=True, num_blocks=16, preemption="recompute", max_num_tokens_per_step=20
    )
    prompts = {"a": tuple(range(1, 31)), "b": tuple(range(40, 65))}
    for name, prompt in prompts.items():
        engine.submit(make_request(name, prompt, max_tokens=20))
    events: list[RequestOutput] = []
    was_preempted = False
    while engine.has_work():
        num_before = engine.stats().num_preempted
        is_live = engine._in_flight.is_live
        events += engine.step().events
        engine.check_integrity()
        if engine.stats().num_preempted > num_before:
            was_preempted = True
            assert not is_live  # by a step that was planned on what is known
    assert was_preempted
    for name, prompt in prompts.items():
        own = [event for event in events if event.request_id == name]
        assert tokens_of(own) == fake_model().generate(prompt, 20)


# -- errors


def test_a_hasher_that_fails_leaves_nothing_in_flight() -> None:
    """It is asked while a step is waited for."""
    engine, _ = late_engine(max_num_tokens_per_step=8)
    block_hash, is_failing = hasher(), [False]

    def failing(parent: bytes, token_ids: Sequence[int]) -> bytes:
        if is_failing[0]:
            raise RuntimeError("no hash")
        return block_hash(parent, token_ids)

    request = make_request("a", range(1, 25), max_tokens=4)
    engine.submit(dataclasses.replace(request, block_hasher=failing))
    events = list(engine.step().events)
    engine._groups["a"].prompt.chain_hashes.clear()
    is_failing[0] = True
    with pytest.raises(RuntimeError, match="no hash"):
        engine.step()
    assert not engine._in_flight.is_live
    engine.check_integrity()
    is_failing[0] = False
    events += all_events(engine)
    assert tokens_of(events) == fake_model().generate(range(1, 25), 4)


@pytest.mark.parametrize("overlap_prompts", [False, True])
def test_where_prompts_are_not_launched_nobody_is_let_in_by_what_is_in_flight(
    overlap_prompts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever comes waits for a plain step there, and the step in flight is read before that."""
    looked: list[int] = []
    would_miss = Scheduler._would_miss

    def noted(self: Scheduler, keys: Any, live: Any) -> bool:
        looked.append(len(live))
        return would_miss(self, keys, live)

    monkeypatch.setattr(Scheduler, "_would_miss", noted)
    engine, _ = late_engine(overlap_prompts=overlap_prompts)
    for name in "abcd":
        engine.submit(make_request(name, PROMPT, max_tokens=12))
        for _ in range(3):
            engine.step()
    all_steps(engine)
    assert bool(looked) is overlap_prompts
