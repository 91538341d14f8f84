"""Whatever befalls a sample, or the device, while a step is under way that was begun early: nobody
can tell, but by time.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.begun import BegunStep
from engine.engine import LLMEngine
from engine.errors import NoBlocks, WrongState
from engine.outputs import RequestOutput
from engine.request import Request, RequestState
from engine.scheduler import Scheduler
from tests.harness.engines import PROMPT, SIZE, all_steps, tokens_of, write_tokens
from tests.unit.engine.speculation.late_steps import (
    OTHER,
    LateFake,
    decoding,
    late_engine,
    rest_of,
    told_of,
)

Make = Callable[..., Request]


@pytest.mark.parametrize("others", [0, 1])
def test_cancelled(late: LateFake, make_request: Make, others: int) -> None:
    """Nobody waits for the device, and nobody gets what it still writes into."""
    engine = late_engine(late, num_blocks=24, preemption="recompute")
    names = ["b"][:others]
    beside = [make_request(name, OTHER, max_tokens=12, root=name.encode()) for name in names]
    events = decoding(engine, make_request("a", PROMPT, max_tokens=30), *beside)
    num_waits = late.num_waits
    engine.abort("a")
    engine.check_integrity()
    assert late.num_waits == num_waits
    assert engine._pool.num_quarantined > 0
    assert engine.stats().num_quarantined_blocks == 0  # free, for who asks
    prompt = tuple(range(60, 60 + 4 * SIZE + 1))
    for name in "cde":  # more than are free without waiting
        request = make_request(name, prompt, max_tokens=6, root=name.encode())
        block_ids = engine.reserve(request).block_ids
        write_tokens(engine, block_ids, prompt)
        engine.start(name, num_loaded_tokens=len(prompt))
    events += rest_of(engine)
    for name in "cde":
        assert told_of(events, name) == late.generate(prompt, 6)
    for name in names:
        assert told_of(events, name) == late.generate(OTHER, 12)


def test_another_one_of_the_same_name(late: LateFake, make_request: Make) -> None:
    """What was under way is not its own."""
    engine = late_engine(late)
    beside = make_request("b", OTHER, max_tokens=12, root=b"b")
    events = decoding(engine, make_request("a", PROMPT, max_tokens=30), beside)
    engine.abort("a")
    before = len(told_of(events, "a"))
    engine.submit(make_request("a", OTHER[2:], max_tokens=7, root=b"a"))
    events += rest_of(engine)
    assert told_of(events, "a")[before:] == late.generate(OTHER[2:], 7)
    assert told_of(events, "b") == late.generate(OTHER, 12)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("others", [0, 1])
def test_preempted(late: LateFake, make_request: Make, preemption: str, others: int) -> None:
    engine = late_engine(late, preemption=preemption)
    names = ["b"][:others]
    beside = [make_request(name, OTHER, max_tokens=12, root=name.encode()) for name in names]
    events = decoding(engine, make_request("a", PROMPT, max_tokens=20), *beside)
    engine.preempt("a")
    engine.check_integrity()
    assert engine._in_flight.is_live == bool(others)
    events += rest_of(engine)
    assert told_of(events, "a") == late.generate(PROMPT, 20)
    for name in names:
        assert told_of(events, name) == late.generate(OTHER, 12)


def test_a_sample_that_nobody_wants_any_more(late: LateFake, make_request: Make) -> None:
    """Of blocks that were taken before it began."""
    engine = late_engine(late)
    one = make_request("a", PROMPT, max_tokens=20)
    request = Request(
        "a", one.prompt_token_ids, one.sampling, one.block_hasher, num_samples=2, cache_root=b""
    )
    events = decoding(engine, request)
    engine.finish_sample("a", 0)
    engine.check_integrity()
    events += rest_of(engine)
    own = tokens_of([event for event in events if event.sample_index == 1])
    assert own == late.generate(PROMPT, 20)


def test_taken_out_to_go_on_elsewhere(late: LateFake, make_request: Make) -> None:
    """Its blocks stay as they are, and what was under way is drawn again there."""
    engine = late_engine(late)
    events = decoding(engine, make_request("a", PROMPT, max_tokens=20))
    held = engine.detach("a")
    engine.check_integrity()
    assert held.token_ids == (*PROMPT, *told_of(events, "a"))
    assert held.num_computed_tokens == len(held.token_ids) - 1
    engine.submit(make_request("b", OTHER, max_tokens=12))
    events += [event for output in all_steps(engine) for event in output.events]
    assert len(engine.block_ids("a")) == -(-len(held.token_ids) // SIZE)
    for place in range(held.num_computed_tokens):
        cell = engine.kv.cache[held.block_ids[place // SIZE], 0, 0, :, place % SIZE, 0]
        assert cell.tolist() == [held.token_ids[place], place]
    assert told_of(events, "b") == late.generate(OTHER, 12)
    engine.release("a")
    engine.check_integrity()


def test_a_pass_that_fails_early_fails_the_step_that_it_is_of(
    late: LateFake, make_request: Make
) -> None:
    """What was booked before is told."""
    engine = late_engine(late)
    events = decoding(engine, make_request("a", PROMPT, max_tokens=20))
    late.failure = RuntimeError("the device is gone")
    told = engine.step().events
    assert told and not engine._in_flight.is_live
    engine.check_integrity()
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    engine.check_integrity()
    events += [*told, *rest_of(engine)]
    assert told_of(events, "a") == late.generate(PROMPT, 20)


def test_a_pass_that_fails_early_is_nobody_elses(
    late: LateFake, make_request: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = late_engine(late)
    decoding(engine, make_request("a", PROMPT, max_tokens=20))
    late.failure = RuntimeError("the device is gone")
    engine.step()
    engine.abort("a")
    events = decoding(engine, make_request("b", OTHER, max_tokens=9, root=b"b"))
    assert told_of(events + rest_of(engine), "b") == late.generate(OTHER, 9)
    assert "the device is gone" in caplog.text


@pytest.mark.parametrize(
    "owner, name", [(BegunStep, "draws"), (Scheduler, "precompute_block_hashes")]
)
def test_what_fails_while_a_step_is_waited_for_leaves_nothing_in_flight(
    late: LateFake,
    make_request: Make,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
) -> None:
    engine = late_engine(late, preemption="recompute")
    events = decoding(engine, make_request("a", PROMPT, max_tokens=20))

    def fail(*_: object) -> None:
        raise RuntimeError("it failed")

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        with pytest.raises(RuntimeError, match="it failed"):
            engine.step()
    assert not engine._in_flight.is_live and not late._unwritten
    engine.check_integrity()
    tokens = engine._groups["a"].prompt.token_ids
    assert len(engine.block_ids("a")) == -(-len(tokens) // SIZE)
    assert told_of([*events, *rest_of(engine)], "a") == late.generate(PROMPT, 20)


def test_anything_at_any_time(late: LateFake, make_request: Make, seed: int) -> None:
    """Requests come, are cancelled, lose their blocks and are taken out at random, and others'
    bytes are written into blocks as soon as those are handed out."""
    rng = random.Random(f"begun {seed}")
    num_early = 0
    for _ in range(6):
        num_early += _anything(late, make_request, rng)
    assert num_early > 20


def _anything(late: LateFake, make_request: Make, rng: random.Random) -> int:
    engine = late_engine(
        late,
        rng=random.Random(rng.random()),
        num_blocks=rng.randint(20, 40),
        max_num_running=rng.randint(2, 4),
        preemption=rng.choice(["never", "recompute", "swap"]),
    )
    expected: dict[str, list[int]] = {}
    events: list[RequestOutput] = []
    num_early = num_made = 0
    while num_made < 12 or engine.has_work():
        if num_made < 12 and (rng.random() < 0.2 or not engine.has_work()):
            name, num_tokens = f"r{num_made}", rng.randint(1, 20)
            prompt = tuple(rng.randrange(1, 97) for _ in range(rng.randint(1, 20)))
            request = make_request(name, prompt, max_tokens=num_tokens, root=name.encode())
            try:
                block_ids = engine.reserve(request).block_ids
            except NoBlocks:
                pass  # till somebody ends, or is released
            else:
                num_made += 1
                write_tokens(engine, block_ids, prompt)
                engine.start(name, num_loaded_tokens=len(prompt))
                expected[name] = late.generate(prompt, num_tokens)
        events += engine.step().events
        engine.check_integrity()
        num_early += engine._in_flight.is_live
        live = [name for name, group in engine._groups.items() if group.prompt.block_ids]
        if live and rng.random() < 0.15:
            name = rng.choice(live)
            _disturb(engine, name, rng)
            engine.check_integrity()
        if rng.random() < 0.05:
            _take_all(engine, make_request)
        for name, group in [*engine._groups.items()]:
            if group.state is RequestState.HOLDING and rng.random() < 0.3:
                engine.release(name)
    for name, group in [*engine._groups.items()]:
        assert group.state is RequestState.HOLDING
        engine.release(name)
    for name, tokens in expected.items():
        told = told_of(events, name)
        assert told == tokens[: len(told)]
        ended = [event for event in events if event.request_id == name and event.is_request_over]
        assert not ended or told == tokens
    rest_of(engine)
    engine.close()
    return num_early


def _take_all(engine: LLMEngine, make_request: Make) -> None:
    """As many blocks can be had as are told of, until they are given back."""
    stats = engine.stats()
    if stats.num_preempted:
        return  # they come first
    names = [f"all {index}" for index in range(stats.num_free_blocks + stats.num_cached_blocks)]
    for index, name in enumerate(names):
        prompt = (1 + index,) * (SIZE - 1)
        engine.reserve(make_request(name, prompt, max_tokens=1, root=name.encode()))
    with pytest.raises(NoBlocks):
        engine.reserve(make_request("more", (1,), max_tokens=1, root=b"more"))
    engine.check_integrity()
    for name in names:
        engine.abort(name)
    engine.check_integrity()


def _disturb(engine: LLMEngine, name: str, rng: random.Random) -> None:
    what = rng.choice([engine.abort, engine.preempt, engine.detach])
    try:
        what(name)
    except WrongState:
        pass  # its blocks may not be taken
