"""Blocks of steps that are begun early: whose they are, and what is told of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from engine.errors import IntegrityError, NoBlocks
from engine.request import Request
from engine.speculation.proposer import Draft, DraftTask
from engine.speculation.token_tree import EMPTY
from tests.harness.engines import PROMPT, SIZE, write_tokens
from tests.unit.engine.speculation.late_steps import (
    OTHER,
    Branches,
    LateFake,
    LateModel,
    decoding,
    guessing_engine,
    late_engine,
    rest_of,
    told_of,
)

Make = Callable[..., Request]


@pytest.mark.parametrize("others", [0, 1])
def test_what_is_told_as_free_can_be_had(late: LateFake, make_request: Make, others: int) -> None:
    """Blocks that are held for a row which was left over, too."""
    engine = late_engine(late, num_blocks=24, preemption="never")
    names = ["b"][:others]
    beside = [make_request(name, OTHER, max_tokens=12, root=name.encode()) for name in names]
    decoding(engine, make_request("a", PROMPT, max_tokens=30), *beside)
    engine.abort("a")
    prompt, num_reserved = tuple(range(60, 60 + SIZE - 1)), 0
    num_waits, seen_to_wait = late.num_waits, False
    while (stats := engine.stats()).num_free_blocks + stats.num_cached_blocks > 0:
        name = f"r{num_reserved}"
        request = make_request(name, prompt, max_tokens=1, root=name.encode())
        engine.reserve(request)
        num_reserved += 1
        seen_to_wait |= late.num_waits > num_waits
    assert seen_to_wait, "nothing had to be waited for"
    engine.check_integrity()


@pytest.mark.parametrize("preemption", ["never", "recompute"])
@pytest.mark.parametrize("is_held", [False, True])
def test_what_can_be_had_is_told_as_free(
    late: LateFake, make_request: Make, preemption: str, is_held: bool
) -> None:
    """Blocks for guesses of a step that is under way, too, unless they are promised, or somebody
    else touches them."""
    engine = late_engine(late, num_blocks=24, preemption=preemption)
    decoding(engine, make_request("a", PROMPT, max_tokens=30))
    told = engine.step().num_free_blocks
    sequence = engine._groups["a"].prompt
    num_for_guesses = len(sequence.block_ids) - -(-len(sequence.token_ids) // SIZE)
    assert num_for_guesses > 0 and engine._in_flight.is_live
    if is_held:
        engine.quarantine("a", sequence.block_ids[-1:])
        told -= preemption != "never"
    stats = engine.stats()
    assert told == stats.num_free_blocks + stats.num_cached_blocks
    assert stats.num_referenced_blocks == 24 - told
    assert engine.metrics().num_used_blocks == 24 - told - (is_held and preemption != "never")
    prompt = tuple(range(60, 60 + SIZE - 1))
    for num_left in range(told, 0, -1):
        assert engine._in_flight.is_live or num_left < told
        engine.reserve(make_request(f"r{num_left}", prompt, max_tokens=1, root=b"%d" % num_left))
        stats = engine.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks == num_left - 1
        engine.check_integrity()
    with pytest.raises(NoBlocks):
        engine.reserve(make_request("late", prompt, max_tokens=1, root=b"late"))
    assert engine._in_flight.is_live == (preemption == "never")


def test_guesses_are_not_given_up_for_a_block_that_is_kept(
    late: LateFake, make_request: Make
) -> None:
    """It would not be free either."""
    engine = late_engine(late, num_blocks=16, preemption="recompute")
    decoding(engine, make_request("a", PROMPT, max_tokens=30))
    sequence = engine._groups["a"].prompt
    num_needed = -(-len(sequence.token_ids) // SIZE)
    num_for_guesses = len(sequence.block_ids) - num_needed
    assert num_for_guesses > 0
    engine.quarantine("a", sequence.block_ids[num_needed:])
    prompt = tuple(1 + place % 90 for place in range((16 - num_needed) * SIZE - 1))
    with pytest.raises(NoBlocks):
        engine.reserve(make_request("b", prompt, max_tokens=1, root=b"b"))
    assert engine._in_flight.is_live
    engine.unquarantine(sequence.block_ids[num_needed:])
    engine.reserve(make_request("b", prompt, max_tokens=1, root=b"b"))
    assert not engine._in_flight.is_live
    engine.check_integrity()


def test_guesses_give_way_to_who_reserves(late: LateFake, make_request: Make) -> None:
    """The step that is under way is computed once more, without the blocks for its guesses."""
    num_own = -(-(len(PROMPT) + 20) // SIZE)
    engine = late_engine(late, num_blocks=2 * num_own, preemption="recompute")
    events = decoding(engine, make_request("a", PROMPT, max_tokens=20))
    sequence = engine._groups["a"].prompt
    num_needed = -(-len(sequence.token_ids) // SIZE)
    assert len(sequence.block_ids) > num_needed
    num_left = 2 * num_own - num_needed
    prompt = tuple(range(1, num_left * SIZE))
    other = make_request("b", prompt, max_tokens=1, root=b"b")
    assert len(engine.reserve(other).block_ids) == num_left
    engine.check_integrity()
    assert not engine._in_flight.is_live and not late._unwritten
    engine.abort("b")
    events += rest_of(engine)
    assert told_of(events, "a") == late.generate(PROMPT, 20)


def test_who_is_refused_costs_no_step(late: LateFake, make_request: Make) -> None:
    """Where blocks of guesses would not suffice either."""
    engine = late_engine(late, num_blocks=16, preemption="recompute")
    events = decoding(engine, make_request("a", PROMPT, max_tokens=30))
    huge = make_request(
        "huge", tuple(60 + place % 30 for place in range(15 * SIZE)), max_tokens=2, root=b"h"
    )
    num_steps, num_forwards = 0, late.num_forwards
    while engine.has_work():
        num_waits = late.num_waits
        if engine._in_flight.is_live:
            with pytest.raises(NoBlocks):
                engine.reserve(huge)
            assert late.num_waits == num_waits
        events += engine.step().events
        num_steps += 1
    assert told_of(events, "a") == late.generate(PROMPT, 30)
    assert late.num_forwards - num_forwards <= num_steps


def test_what_nobody_wants_any_more_keeps_its_blocks_no_longer_than_the_next_launch(
    late: LateFake, make_request: Make
) -> None:
    """That one comes after it on the device, and is waited for anyway."""
    model = LateModel(late)
    engine, _ = guessing_engine(model, late)
    decoding(engine, make_request("a", PROMPT, max_tokens=30))
    engine.abort("a")
    assert engine._pool.num_quarantined > 0
    block_ids = engine.reserve(make_request("b", OTHER, max_tokens=12)).block_ids
    write_tokens(engine, block_ids, OTHER)
    engine.start("b", num_loaded_tokens=len(OTHER))
    num_waits, num_launches = late.num_waits, model.launches.num_launches
    events = engine.step().events
    engine.check_integrity()
    assert model.launches.num_launches > num_launches
    assert engine._pool.num_quarantined == 0
    assert late.num_waits == num_waits
    assert told_of([*events, *rest_of(engine)], "b") == late.generate(OTHER, 12)


def test_where_nothing_is_computed_nothing_is_kept(late: LateFake, make_request: Make) -> None:
    engine = late_engine(late)
    decoding(engine, make_request("a", PROMPT, max_tokens=30))
    engine.abort("a")
    assert engine._pool.num_quarantined > 0
    engine.step()
    assert engine._pool.num_quarantined == 0 and not late._unwritten
    engine.check_integrity()


def test_who_is_taken_out_keeps_no_blocks_of_guesses(late: LateFake, make_request: Make) -> None:
    engine, proposer = guessing_engine(LateModel(late), late, preemption="recompute")
    proposer.num_right, proposer.num_wrong = 0, 8
    beside = make_request("b", OTHER, max_tokens=30, root=b"b")
    decoding(engine, make_request("a", PROMPT, max_tokens=30), beside)
    assert len(engine.block_ids("a")) > len(PROMPT) // SIZE + 1
    held = engine.detach("a")
    assert len(engine.block_ids("a")) == -(-len(held.token_ids) // SIZE)
    engine.check_integrity()
    engine.release("a")
    rest_of(engine)


def test_closed_while_a_step_is_under_way(late: LateFake, make_request: Make) -> None:
    engine = late_engine(late)
    decoding(engine, make_request("a", PROMPT, max_tokens=20))
    engine.abort("a")
    engine.close()
    assert not late._unwritten and engine._pool.num_quarantined == 0


def test_who_looks_sees_what_does_not_add_up(late: LateFake, make_request: Make) -> None:
    engine = late_engine(late)
    decoding(engine, make_request("a", PROMPT, max_tokens=20))
    engine._groups["a"].prompt.block_ids[-1] ^= 1
    with pytest.raises(IntegrityError):
        engine.check_integrity()
    engine._groups["a"].prompt.block_ids[-1] ^= 1


class Silent(Branches):
    """Has nothing to say of some."""

    silent: frozenset[str] = frozenset()

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        drafts = super().propose(tasks)
        return [
            Draft(EMPTY, {}) if task.key[0] in self.silent else draft
            for task, draft in zip(tasks, drafts, strict=True)
        ]


def test_the_next_guesses_take_the_blocks_of_the_last_ones(
    late: LateFake, make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is given back to be taken again; whoever is not guessed for has none left over."""
    proposer = Silent(late)
    proposer.num_right, proposer.num_wrong = 0, 8
    engine, _ = guessing_engine(LateModel(late), late, proposer=proposer, preemption="recompute")
    decoding(
        engine,
        make_request("a", PROMPT, max_tokens=30),
        make_request("b", OTHER, max_tokens=30, root=b"b"),
    )
    a, b = (engine._groups[name].prompt for name in "ab")
    given: list[int] = []
    put_back = engine._pool.put_back

    def spy(block_ids: Iterable[int]) -> None:
        ids = list(block_ids)
        given.extend(ids)
        put_back(ids)

    monkeypatch.setattr(engine._pool, "put_back", spy)
    for _ in range(6):
        block_ids = list(a.block_ids), list(b.block_ids)
        engine.step()
        assert engine._in_flight.is_live and not given
        for sequence, before in zip((a, b), block_ids, strict=True):
            assert sequence.block_ids[: len(before)] == before
            assert len(sequence.block_ids) == -(-(len(sequence.token_ids) + 8) // SIZE)
    proposer.silent = frozenset("a")
    engine.step()
    assert engine._in_flight.is_live and given
    assert len(a.block_ids) == -(-len(a.token_ids) // SIZE)
    assert len(b.block_ids) == -(-(len(b.token_ids) + 8) // SIZE)
    engine.check_integrity()
    rest_of(engine)
