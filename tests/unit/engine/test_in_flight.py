"""What a launch still writes is nobody else's; what it leaves over is nobody's loss."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from engine.engine import LLMEngine
from engine.errors import IntegrityError, NoBlocks
from engine.outputs import RequestOutput
from engine.testing.ahead_model import AheadModel
from tests.harness.engines import (
    PROMPT,
    SIZE,
    WINDOW,
    all_events,
    fake_model,
    finish,
    late_engine,
    make,
    make_request,
    recording_engine,
    tokens_of,
    write_tokens,
)

Make = Callable[..., Any]


# -- blocks


def _end_one(engine: LLMEngine, how: str) -> None:
    """Let "a" end, or lose its blocks, while a launch writes into its newest block."""
    if how == "abort":
        engine.abort("a")
    elif how == "finish_sample":
        engine.finish_sample("a", 0)
    elif how == "preempt":
        engine.preempt("a")
        engine.abort("a")
    else:
        while "a" in engine._groups:
            engine.step()


@pytest.mark.parametrize("how", ["stop", "error", "abort", "finish_sample", "preempt"])
@pytest.mark.parametrize("has_company", [False, True])
def test_nobody_gets_a_block_that_is_still_written(how: str, has_company: bool) -> None:
    """A transfer writes into every block that it can get; the launch comes after it, and must not
    hit what it wrote."""
    tokens = fake_model().generate(PROMPT, 8)
    fake = fake_model(poison=frozenset(tokens[4:5] if how == "error" else ()))
    engine = make(AheadModel(fake, is_late=True), num_blocks=32, preemption="recompute")
    stops = frozenset(tokens[4:5] if how == "stop" else ())
    engine.submit(make_request("a", PROMPT, max_tokens=40, stop_token_ids=stops))
    if has_company:
        engine.submit(make_request("c", range(40, 50), max_tokens=30))
    for _ in range(4):
        engine.step()
    _end_one(engine, how)
    engine.check_integrity()
    stats = engine.stats()
    assert engine._pool.num_quarantined == engine._in_flight.num_idle_blocks == 1
    assert stats.num_quarantined_blocks == 0  # nobody can tell
    num_blocks = engine._pool.num_available - 2 * has_company
    prompt = [90 - i % 7 for i in range(min(WINDOW - 2, num_blocks * SIZE))]
    block_ids = engine.reserve(make_request("b", prompt, max_tokens=2)).block_ids
    assert engine._in_flight.num_idle_blocks == 1
    write_tokens(engine, block_ids, prompt)
    engine.start("b", num_loaded_tokens=len(prompt))
    assert tokens_of(finish(engine)["b"]) == fake_model().generate(prompt, 2)
    assert engine._pool.num_quarantined == 0


@pytest.mark.parametrize("what", ["reserve", "refill", "start"])
def test_who_needs_a_held_block_waits_for_the_launch(what: str) -> None:
    """Rather than being refused."""
    engine, _ = late_engine(num_blocks=16, preemption="recompute")
    engine.submit(make_request("a", PROMPT, max_tokens=40))
    for _ in range(3):
        engine.step()
    num_own = len(engine.block_ids("a"))
    prompt = range(1, 1 + (16 - num_own) * SIZE)
    if what == "reserve":
        engine.abort("a")
        assert engine._pool.num_free + engine._pool.num_evictable == 15
        assert len(engine.reserve(make_request("b", range(60), max_tokens=4)).block_ids) == 15
        assert engine._in_flight.num_idle_blocks == 1
        given = engine.reserve(make_request("c", [1], max_tokens=4))
        assert len(given.block_ids) == 1
    else:
        given = engine.reserve(make_request("b", prompt, root=b"b", max_tokens=4))
        engine.quarantine("b", given.block_ids[:num_own])
        engine.abort("a")
        assert engine._pool.num_available == num_own - 1
        if what == "refill":
            assert -1 not in engine.refill("b")
        else:
            engine.start("b")
    engine.check_integrity()
    assert engine._in_flight.num_idle_blocks == 0


def test_more_than_there_is_is_still_refused() -> None:
    engine, _ = late_engine(num_blocks=16, preemption="recompute")
    engine.submit(make_request("a", PROMPT, max_tokens=40))
    engine.submit(make_request("b", range(30, 44), max_tokens=40))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    with pytest.raises(NoBlocks):
        engine.reserve(make_request("c", range(52), max_tokens=4))
    assert tokens_of(all_events(engine)) == fake_model().generate(range(30, 44), 40)[3:]


def test_a_block_that_is_read_and_written_is_kept_for_both() -> None:
    """Quarantined by a transfer that reads it, and held for the launch that writes it."""
    engine, _ = late_engine(num_blocks=16)
    engine.submit(make_request("a", PROMPT, max_tokens=20))
    for _ in range(3):
        engine.step()
    newest = engine.block_ids("a")[(len(PROMPT) + 2) // SIZE]
    engine.quarantine("a", [newest])
    engine.abort("a")
    assert engine._in_flight.num_idle_blocks == 0
    assert engine.stats().num_quarantined_blocks == 1
    engine._in_flight.settle()
    assert engine.stats().num_quarantined_blocks == 1
    engine.unquarantine([newest])
    assert engine.stats().num_quarantined_blocks == 0
    engine.check_integrity()


@pytest.mark.parametrize("takes_prompts", [False, True])
def test_what_a_launch_enters_is_cleared(takes_prompts: bool) -> None:
    """Of a block that is not full, a plain step may read what it does not use, with weight 0: 0
    times NaN is NaN."""
    engine, model = late_engine(takes_prompts=takes_prompts)
    engine.kv.cache.fill_(float("nan"))
    engine.submit(make_request("a", PROMPT, max_tokens=20))
    for _ in range(12):
        engine.step()
        num_blocks = -(-engine._groups["a"].prompt.num_computed_tokens // SIZE)
        assert not engine.kv.cache[list(engine.block_ids("a")[:num_blocks])].isnan().any()
    assert model.launches.num_launches == 12 + takes_prompts


@pytest.mark.parametrize("reads_unwritten", [True, False])
def test_nothing_is_cleared_for_a_model_that_reads_only_what_was_written(
    reads_unwritten: bool,
) -> None:
    """Each clear is a launch of its own, for every sequence and block."""
    model = AheadModel(fake_model(), is_late=True)
    model.reads_unwritten = reads_unwritten
    engine = make(model)
    cleared: list[int] = []
    engine.kv.clear = cleared.append  # type: ignore[method-assign]
    engine.submit(make_request("a", PROMPT, max_tokens=20))
    engine.step()
    cleared.clear()  # of the prompt's last block
    assert tokens_of(all_events(engine)) == fake_model().generate(PROMPT, 20)[1:]
    assert len(cleared) == (5 if reads_unwritten else 0)


# -- left over, errors, the end


def test_a_launch_that_nobody_waits_for_is_no_work() -> None:
    engine, model = late_engine()
    engine.submit(make_request("a", PROMPT, max_tokens=20))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    assert not engine.has_work() and engine._in_flight.num_left_over == 1
    stats = engine.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    engine.submit(make_request("a", PROMPT[3:], max_tokens=9))  # another of the same name
    assert tokens_of(all_events(engine)) == fake_model().generate(PROMPT[3:], 9)
    engine.submit(make_request("b", PROMPT, max_tokens=20))
    for _ in range(3):
        engine.step()
    engine.close()
    assert not model.launches._unread


@pytest.mark.parametrize(
    "fields", [{}, {"takes_prompts": True, "max_num_tokens_per_step": 8}], ids=["decodes", "mixed"]
)
@pytest.mark.parametrize("call", ["launch 0", "launch 1", "launch 3", "read 0", "read 2"])
def test_an_exception_leaves_every_request_as_it_was(call: str, fields: dict[str, Any]) -> None:
    engine, ahead = recording_engine(**fields)
    ahead.fails_at = call
    prompts = {"a": PROMPT, "b": tuple(range(50, 61))}
    for name, prompt in prompts.items():
        engine.submit(make_request(name, prompt, max_tokens=10))
    events: list[RequestOutput] = []
    num_failures = 0
    while engine.has_work():
        before = {
            name: (group.prompt.num_computed_tokens, list(group.prompt.token_ids))
            for name, group in engine._groups.items()
        }
        try:
            events += engine.step().events
        except RuntimeError:
            num_failures += 1
            ahead.fails_at = ""
            after = {
                name: (group.prompt.num_computed_tokens, list(group.prompt.token_ids))
                for name, group in engine._groups.items()
            }
            assert before == after and ahead.calls[-1] == "drain"
            assert not engine._in_flight.is_live
        engine.check_integrity()
    assert num_failures == 1
    for name, prompt in prompts.items():
        own = [event for event in events if event.request_id == name]
        assert tokens_of(own) == fake_model().generate(prompt, 10)


def test_a_plain_step_that_fails_beside_a_launch() -> None:
    """What is in flight stays so, and is told later."""
    engine, model = late_engine(takes_prompts=False)
    engine.submit(make_request("a", PROMPT, max_tokens=12))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    engine.submit(make_request("b", PROMPT[2:], max_tokens=12))
    plain_forward = model.forward

    def failing(batch: Any) -> Any:
        model.forward = plain_forward  # type: ignore[method-assign]
        raise RuntimeError("the device is gone")

    model.forward = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError):
        engine.step()
    engine.check_integrity()
    assert tokens_of(all_events(engine)) == fake_model().generate(PROMPT[2:], 12)


@pytest.mark.parametrize("is_decoding", [False, True])
def test_a_launch_left_over_that_fails(is_decoding: bool) -> None:
    """It is read beside a step of others, none of whose tokens may be lost."""
    engine, ahead = recording_engine()
    engine.submit(make_request("a", PROMPT, max_tokens=12))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    prompt = tuple(range(30, 40))
    request = make_request("b", prompt, max_tokens=12)
    block_ids = engine.reserve(request).block_ids
    write_tokens(engine, block_ids, prompt)
    engine.start("b", num_loaded_tokens=10 if is_decoding else 0)
    ahead.fails_at = f"read {sum(call.startswith('read') for call in ahead.calls)}"
    with pytest.raises(RuntimeError):
        engine.step()
    ahead.fails_at = ""
    engine.check_integrity()
    assert engine.stats().num_quarantined_blocks == engine._pool.num_quarantined == 0
    assert tokens_of(all_events(engine)) == fake_model().generate(prompt, 12)


def _swap(ids: list[int], first: int, second: int) -> None:
    ids[first], ids[second] = ids[second], ids[first]


@pytest.mark.parametrize("is_chunk", [False, True])
def test_what_is_in_flight_is_counted(is_chunk: bool) -> None:
    """Books that do not fit the launch are found."""
    engine, _ = late_engine(max_num_tokens_per_step=10 if is_chunk else 512)
    engine.submit(make_request("a", range(1, 25) if is_chunk else PROMPT, max_tokens=12))
    for _ in range(1 if is_chunk else 3):
        engine.step()
    engine.check_integrity()
    sequence = engine._groups["a"].prompt
    at = sequence.num_computed_tokens
    if is_chunk:
        cut = sequence.token_ids[20:]
        del sequence.token_ids[20:]
    else:
        sequence.num_computed_tokens -= 1
    with pytest.raises(IntegrityError, match="in flight"):
        engine.check_integrity()
    if is_chunk:
        sequence.token_ids += cut
    sequence.num_computed_tokens = at
    if not is_chunk:
        sequence.group.adapter_slot += 1
        with pytest.raises(IntegrityError, match="adapter slot 0"):
            engine.check_integrity()
        sequence.group.adapter_slot -= 1
    for index in (2, 4) if is_chunk else (at // SIZE,):
        _swap(sequence.block_ids, index, -1)
        with pytest.raises(IntegrityError, match="lost"):
            engine.check_integrity()
        _swap(sequence.block_ids, index, -1)
    engine.abort("a")
    engine.check_integrity()
    engine._pool.unhold([next(iter(engine._in_flight._held()))])
    with pytest.raises(IntegrityError, match="not held"):
        engine.check_integrity()


def test_a_copy_between_two_launches_is_behind_both() -> None:
    """The block that is copied from may be another's from here on: whoever writes into it must
    wait for the copy, which no draw has waited for."""
    engine, _ = recording_engine(num_blocks=32)
    copied: list[tuple[int, int]] = []
    copy = engine.kv.copy

    def noting(source: int, target: int) -> None:
        copied.append((source, target))
        copy(source, target)

    engine.kv.copy = noting  # type: ignore[method-assign]
    engine.submit(make_request("a", PROMPT, max_tokens=30))
    for _ in range(3):
        engine.step()
    assert not engine.is_device_behind  # only launches are under way
    prompt = [*range(30, 30 + SIZE), 1, 2]
    request = dataclasses.replace(make_request("b", prompt, max_tokens=6), num_samples=2)
    engine.reserve(request)
    engine.start("b", num_loaded_tokens=len(prompt), outputs=((3,), (4,)))
    was_behind = []
    while engine.has_work():
        num_before = len(copied)
        engine.step()
        was_behind.append((len(copied) > num_before, engine.is_device_behind))
    assert (True, True) in was_behind and (True, False) not in was_behind
    assert (False, False) in was_behind


@pytest.mark.parametrize("takes_prompts", [False, True])
def test_the_device_is_behind_where_the_last_it_got_is_waited_for_by_nobody(
    takes_prompts: bool, seed: int, scale: Callable[[int], int]
) -> None:
    """40 workloads that come at different times, on hardly enough blocks. Nothing goes to the
    device behind the last launch, and nothing for one that is not made; copies are told."""
    rng = random.Random(f"behind {takes_prompts} {seed}")
    seen: Counter[tuple[bool, bool]] = Counter()
    for _ in range(scale(40)):
        engine, ahead = recording_engine(
            takes_prompts=takes_prompts,
            num_blocks=rng.randint(16, 30),
            preemption="recompute",
            max_num_tokens_per_step=rng.randint(8, 16),
        )
        calls = ahead.calls
        for owner, name in ((engine.kv, "clear"), (engine.kv, "copy"), (ahead, "compute_all")):
            _note_calls(owner, name, calls)
        left = [
            dataclasses.replace(
                make_request(f"r{index}", _prompt(rng, 1 if index % 2 else 24), max_tokens=12),
                num_samples=rng.choice([1, 1, 2]),
            )
            for index in range(5)
        ]
        while left or engine.has_work():
            if left and (rng.random() < 0.4 or not engine.has_work()):
                engine.submit(left.pop())
            calls.clear()
            engine.step()
            if "compute_all" in calls or not any(call.startswith("read") for call in calls):
                continue  # a plain step
            launches = [at for at, call in enumerate(calls) if call.startswith("launch")]
            rest = calls[launches[-1] :] if launches else calls
            assert not {"clear", "copy"} & set(rest)
            is_copied = "copy" in calls
            assert engine.is_device_behind is is_copied
            seen[bool(launches), is_copied] += 1
    assert seen[True, False] and seen[False, False]


def _prompt(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(1, 97) for _ in range(rng.randint(1, num_tokens)))


def _note_calls(owner: Any, name: str, calls: list[str]) -> None:
    method = getattr(owner, name)

    def noting(*arguments: int) -> None:
        calls.append(name)
        method(*arguments)

    setattr(owner, name, noting)
