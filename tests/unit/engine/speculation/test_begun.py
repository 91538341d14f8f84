"""Steps that verify drafts and are begun in the call that has booked the step before: when they
are, what keeps events back, whose blocks they hold, and that nobody can tell, but by time, whatever
befalls a sample, or the device, while one is under way."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.begun import BegunStep, may_be_early
from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import IntegrityError, NoBlocks, WrongState
from engine.outputs import RequestOutput
from engine.request import Beam, Request, RequestState, Sampling
from engine.sampling.host_device_copies import StreamMark
from engine.sampling.sampler import Sampler
from engine.scheduler import Scheduler
from engine.speculation.config import NgramConfig, SpeculationConfig
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Draft, DraftTask, HiddenStates, HiddenStateScope
from engine.speculation.token_tree import EMPTY
from engine.step_builder import Step
from engine.testing.ahead_model import AheadModel
from engine.testing.fake_model import FakeModel
from tests.harness.engines import (
    PROMPT,
    SIZE,
    all_events,
    fake_model,
    hasher,
    tokens_of,
    write_tokens,
)
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


def test_the_next_step_is_begun_before_the_events_of_the_last_are_told(
    late: LateFake, make_request: Make
) -> None:
    engine = late_engine(late)
    engine.submit(make_request("a", PROMPT, max_tokens=9))
    expected = late.generate(PROMPT, 9)
    seen = []
    while engine.has_work():
        told = tokens_of(engine.step().events)
        engine.check_integrity()
        seen.append((told, late.num_forwards, engine._in_flight.is_live))
    pairs = [expected[at : at + 2] for at in range(1, 9, 2)]
    # The prompt, then the right guess and what follows it; behind the last one nothing is guessed.
    assert [told for told, _, _ in seen] == [expected[:1], *pairs]
    # Whom proposers have not met yet they may have to catch up with: nothing is begun before the
    # first token is told.
    assert [num for _, num, _ in seen] == [1, 3, 4, 5, 5]
    assert [is_live for _, _, is_live in seen] == [False, True, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_waiting_reads_no_logits(dtype: torch.dtype) -> None:
    """numpy has no bfloat16."""
    logits = torch.zeros(1, 3, dtype=dtype)
    step = Step(Batch((), (), ()), (), frozenset(), 0, False, False, {})
    BegunStep([], {}, step, logits, None, None, Sampler()).wait()


@pytest.mark.parametrize("max_queued_tokens", [1 << 20, 0])
def test_where_a_pass_is_waited_for_nothing_is_begun_early(
    make_request: Make, max_queued_tokens: int
) -> None:
    """As on a CPU: events would come a step late."""
    model, fake = AheadModel(fake_model()), fake_model()
    model.max_queued_tokens = max_queued_tokens
    engine, _ = guessing_engine(model, fake)
    engine.submit(make_request("a", PROMPT, max_tokens=9))
    told = []
    while engine.has_work():
        told.append(tokens_of(engine.step().events))
        assert not engine._in_flight.is_live or max_queued_tokens
    assert [token for tokens in told for token in tokens] == fake.generate(PROMPT, 9)
    assert len(told) == 5


def test_what_is_launched_kernel_by_kernel_is_not_begun_early(
    late: LateFake, make_request: Make
) -> None:
    """The host takes longer for it than it saves. Whoever guesses is not asked in vain, but for the
    first such step; and a smaller one is begun early again."""
    model = LateModel(late)
    model.max_queued_tokens = 10
    engine, proposer = guessing_engine(model, late)
    events = decoding(engine, make_request("a", PROMPT, max_tokens=40))
    engine.submit(make_request("b", OTHER, max_tokens=12, root=b"b"))
    while len(told_of(events, "b")) < 3:
        events += engine.step().events
    num_steps, num_forwards, num_asked = 0, late.num_forwards, proposer.num_asked
    while len(told_of(events, "b")) < 10:
        assert not engine._in_flight.is_live
        events += engine.step().events
        engine.check_integrity()
        num_steps += 1
    assert late.num_forwards - num_forwards == proposer.num_asked - num_asked == num_steps > 2
    engine.abort("b")
    for _ in range(2):
        events += engine.step().events
    assert engine._in_flight.is_live
    events += rest_of(engine)
    assert told_of(events, "a") == late.generate(PROMPT, 40)
    assert told_of(events, "b") == late.generate(OTHER, 12)[: len(told_of(events, "b"))]


@pytest.mark.parametrize("max_queued_tokens", [10, 40])
def test_a_step_that_grows_beyond_the_graphs_is_computed_once(
    late: LateFake, make_request: Make, max_queued_tokens: int
) -> None:
    """What was guessed for it is taken back, and its blocks."""
    model = LateModel(late)
    model.max_queued_tokens = max_queued_tokens
    engine, proposer = guessing_engine(model, late, preemption="recompute")
    proposer.num_right = proposer.num_wrong = 0
    names = {"a": PROMPT, "b": OTHER}
    requests = [make_request(name, own, max_tokens=30) for name, own in names.items()]
    events = decoding(engine, *requests)
    proposer.num_right, proposer.num_wrong = 1, 6
    events += engine.step().events
    is_queued = max_queued_tokens == 40
    assert engine._in_flight.is_live == is_queued
    for name in names:
        sequence = engine._groups[name].prompt
        num_needed = -(-len(sequence.token_ids) // SIZE)
        assert (len(sequence.block_ids) > num_needed) == is_queued
    num_forwards = late.num_forwards
    events += engine.step().events
    assert late.num_forwards == num_forwards + 1
    events += rest_of(engine)
    for name, prompt in names.items():
        assert told_of(events, name) == late.generate(prompt, 30)


def test_who_hears_of_kept_guesses_waits_for_their_move_and_not_for_the_next_step(
    late: LateFake, make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right guess lies behind the wrong ones: what is kept of it is moved behind the draws."""
    marks: list[tuple[str, int]] = []

    class NotedMark(StreamMark):
        def __init__(self, device: torch.device | str) -> None:
            super().__init__(device)
            marks.append(("made", late.num_forwards))

        def wait(self) -> None:
            marks.append(("waited for", late.num_forwards))
            super().wait()

    monkeypatch.setattr("engine.step_start.StreamMark", NotedMark)
    engine, proposer = guessing_engine(LateModel(late), late)
    decoding(engine, make_request("a", PROMPT, max_tokens=40))
    for num_kept in (1, 1, 0, 1):
        proposer.num_right = num_kept
        engine.step()  # with what was guessed before
        marks.clear()
        num_forwards = late.num_forwards
        assert len(tokens_of(engine.step().events)) == 1 + num_kept
        assert engine._in_flight.is_live and not engine.is_device_behind
        expected = [("made", num_forwards), ("waited for", num_forwards + 1)]
        assert marks == (expected if num_kept else [])


class Reading(Branches):
    """That goes by hidden states."""

    hidden_state_scope = HiddenStateScope.SAMPLED
    aux_layers: tuple[int, ...] = ()

    def feed_hidden_states(self, computed: Sequence[HiddenStates]) -> None:
        pass


def test_who_goes_by_hidden_states_is_asked_when_it_has_seen_them(
    late: LateFake, make_request: Make
) -> None:
    engine, proposer = guessing_engine(LateModel(late), late, proposer=Reading(late))
    engine.submit(make_request("a", PROMPT, max_tokens=20))
    events: list[RequestOutput] = []
    while engine.has_work():
        events += engine.step().events
        assert not engine._in_flight.is_live
    assert proposer.num_asked > 5
    assert told_of(events, "a") == late.generate(PROMPT, 20)


def _with_beams(make_request: Make, name: str) -> Request:
    request: Request = make_request(name, OTHER, max_tokens=6, root=name.encode())
    return dataclasses.replace(request, beam=Beam(4))


def _found(engine: LLMEngine, events: Sequence[RequestOutput], name: str) -> list[object]:
    events = [*events, *rest_of(engine)]
    own = [event for event in events if event.request_id == name and event.token_ids]
    return [(event.token_ids, event.score) for event in own]


def _found_alone(request: Request) -> list[object]:
    engine = LLMEngine(EngineConfig(num_blocks=64), fake_model())
    engine.submit(request)
    return _found(engine, [], request.request_id)


def test_beams_are_booked_before_anything_is_begun(late: LateFake, make_request: Make) -> None:
    """Others beside them are guessed for."""
    request = _with_beams(make_request, "b")
    engine = late_engine(late)
    events = decoding(engine, make_request("a", PROMPT, max_tokens=20))
    engine.submit(request)
    events += engine.step().events  # what was under way
    while "b" in engine._groups:
        events += engine.step().events
        engine.check_integrity()
        assert not engine._in_flight.is_live or "b" not in engine._groups
    assert _found(engine, events, "b") == _found_alone(request) != []
    assert told_of(events, "a") == late.generate(PROMPT, 20)[: len(told_of(events, "a"))]


def test_nothing_is_begun_while_somebody_waits_to_be_let_in(
    late: LateFake, make_request: Make
) -> None:
    """As beams do for all their places."""
    request = _with_beams(make_request, "b")
    leg = LLMEngine(EngineConfig(num_blocks=64), fake_model())
    leg.reserve(dataclasses.replace(request, hold_after=1))
    leg.start("b")
    *_, last = all_events(leg)
    engine = late_engine(late, max_num_running=4)
    events = decoding(engine, make_request("a", PROMPT, max_tokens=20))
    write_tokens(engine, engine.reserve(request).block_ids, OTHER)
    engine.start("b", num_loaded_tokens=len(OTHER), beam_start=last.beam_start)
    events += engine.step().events  # what was under way
    while "a" in engine._groups:
        assert not engine._in_flight.is_live
        events += engine.step().events
        engine.check_integrity()
    assert _found(engine, events, "b") == _found_alone(request)
    assert told_of(events, "a") == late.generate(PROMPT, 20)


def test_who_was_cancelled_is_not_counted(late: LateFake, make_request: Make) -> None:
    engine = late_engine(late)
    beside = make_request("b", OTHER, max_tokens=20, root=b"b")
    decoding(engine, make_request("a", PROMPT, max_tokens=20), beside)
    for name, num_live in (("", 2), ("a", 1), ("", 1)):
        engine.abort(name)
        before = engine.stats()
        output = engine.step()
        num_told = len(tokens_of(output.events))
        assert num_told >= num_live == len(output.events)
        assert output.num_scheduled_tokens == num_told
        assert engine.stats().num_decode_tokens - before.num_decode_tokens == num_told
        num_computed = engine.stats().num_computed_tokens - before.num_computed_tokens
        assert num_computed == num_live * (1 + 7)  # the last token, and guesses


@pytest.mark.parametrize("what", [{}, {"grammar": "g"}, {"beam": "b"}, {"adapter_slot": 1}])
def test_what_else_keeps_events_back(what: dict[str, Any]) -> None:
    """Masks take their time, beams are booked last, and no graph takes an adapter."""

    def sample(grammar: object = None, beam: object = None, adapter_slot: int = 0) -> Any:
        request, group = SimpleNamespace(beam=beam), SimpleNamespace(adapter_slot=adapter_slot)
        return SimpleNamespace(grammar=grammar, request=request, group=group)

    assert may_be_early([sample(), sample(**what)]) == (not what)


def test_nobody_waits_for_a_slow_proposer_with_a_first_token(
    late: LateFake, make_request: Make
) -> None:
    """It may have to catch up with the prompt; so with each that comes, and after a step in which
    nobody was asked."""
    engine, proposer = guessing_engine(LateModel(late), late)
    for name, takes_s in (("a", 0.2), ("b", 0.2), ("c", 0.0), ("d", 0.2)):
        began_s, proposer.takes_s = proposer.now_s, takes_s
        engine.submit(make_request(name, PROMPT, max_tokens=6, root=name.encode()))
        assert told_of(engine.step().events, name) == late.generate(PROMPT, 1)
        assert proposer.now_s == began_s
        rest_of(engine)


def test_a_slow_proposer_keeps_no_events_back(late: LateFake, make_request: Make) -> None:
    engine, proposer = guessing_engine(LateModel(late), late)
    events = decoding(engine, make_request("a", PROMPT, max_tokens=20))
    proposer.takes_s = 0.005
    events += engine.step().events  # it is known behind the first one
    for _ in range(2):
        events += engine.step().events
        assert not engine._in_flight.is_live
    proposer.takes_s = 0.0001
    events += engine.step().events
    assert engine._in_flight.is_live
    events += rest_of(engine)
    assert told_of(events, "a") == late.generate(PROMPT, 20)


def test_who_comes_waits_for_no_more_than_the_step_that_is_under_way(
    late: LateFake, make_request: Make
) -> None:
    engine = late_engine(late)
    events = decoding(engine, make_request("a", PROMPT, max_tokens=20))
    engine.submit(make_request("b", OTHER, max_tokens=5))
    first = engine.step().events
    assert [event.request_id for event in first] == ["a"]
    assert not engine._in_flight.is_live  # it would be one step more
    second = engine.step().events
    assert {event.request_id for event in second} == {"a", "b"}
    events += [*first, *second, *rest_of(engine)]
    assert told_of(events, "a") == late.generate(PROMPT, 20)
    assert told_of(events, "b") == late.generate(OTHER, 5)


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


@pytest.mark.parametrize("ends", [LLMEngine.step, LLMEngine.close])
def test_blocks_that_nobody_wants_go_back_with_the_next_step_or_the_engine(
    late: LateFake, make_request: Make, ends: Callable[[LLMEngine], object]
) -> None:
    engine = late_engine(late)
    decoding(engine, make_request("a", PROMPT, max_tokens=30))
    engine.abort("a")
    assert engine._pool.num_quarantined > 0
    ends(engine)
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
    late: LateFake, make_request: Make
) -> None:
    """Nothing is given back to be taken again; whoever is not guessed for has none left over."""
    proposer = Silent(late)
    proposer.num_right, proposer.num_wrong = 0, 8
    engine, _ = guessing_engine(LateModel(late), late, proposer=proposer, preemption="recompute")
    beside = make_request("b", OTHER, max_tokens=30, root=b"b")
    decoding(engine, make_request("a", PROMPT, max_tokens=30), beside)
    a, b = (engine._groups[name].prompt for name in "ab")
    for _ in range(6):
        block_ids = list(a.block_ids), list(b.block_ids)
        engine.step()
        assert engine._in_flight.is_live
        for sequence, before in zip((a, b), block_ids, strict=True):
            assert sequence.block_ids[: len(before)] == before
            assert len(sequence.block_ids) == -(-(len(sequence.token_ids) + 8) // SIZE)
    proposer.silent = frozenset("a")
    engine.step()
    assert engine._in_flight.is_live
    assert len(a.block_ids) == -(-len(a.token_ids) // SIZE)
    assert len(b.block_ids) == -(-(len(b.token_ids) + 8) // SIZE)
    engine.check_integrity()
    rest_of(engine)


def _others(make_request: Make, number: int) -> list[Request]:
    return [make_request("b", OTHER, max_tokens=12, root=b"b")][:number]


@pytest.mark.parametrize("num_others", [0, 1])
def test_cancelled(late: LateFake, make_request: Make, num_others: int) -> None:
    """Nobody waits for the device, and nobody gets what it still writes into."""
    engine = late_engine(late, num_blocks=24, preemption="recompute")
    others = _others(make_request, num_others)
    events = decoding(engine, make_request("a", PROMPT, max_tokens=30), *others)
    num_waits = late.num_waits
    engine.abort("a")
    engine.check_integrity()
    assert late.num_waits == num_waits
    assert engine._pool.num_quarantined > 0
    assert engine.stats().num_quarantined_blocks == 0  # free, for who asks
    prompt = tuple(range(60, 60 + 4 * SIZE + 1))
    for name in "cde":
        request = make_request(name, prompt, max_tokens=6, root=name.encode())
        block_ids = engine.reserve(request).block_ids
        write_tokens(engine, block_ids, prompt)
        engine.start(name, num_loaded_tokens=len(prompt))
    events += rest_of(engine)
    for name in "cde":
        assert told_of(events, name) == late.generate(prompt, 6)
    for other in others:
        assert told_of(events, other.request_id) == late.generate(OTHER, 12)


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


@pytest.mark.parametrize("num_others", [0, 1])
def test_blocks_of_a_cancelled_one_can_be_had(
    late: LateFake, make_request: Make, num_others: int
) -> None:
    """To the last one, which is waited for."""
    engine = late_engine(late, num_blocks=24, preemption="never")
    others = _others(make_request, num_others)
    decoding(engine, make_request("a", PROMPT, max_tokens=30), *others)
    engine.abort("a")
    num_waits = late.num_waits
    _take_all(engine, make_request)
    assert late.num_waits > num_waits


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("num_others", [0, 1])
def test_preempted(late: LateFake, make_request: Make, preemption: str, num_others: int) -> None:
    engine = late_engine(late, preemption=preemption)
    others = _others(make_request, num_others)
    events = decoding(engine, make_request("a", PROMPT, max_tokens=20), *others)
    engine.preempt("a")
    engine.check_integrity()
    assert engine._in_flight.is_live == bool(others)
    events += rest_of(engine)
    assert told_of(events, "a") == late.generate(PROMPT, 20)
    for other in others:
        assert told_of(events, other.request_id) == late.generate(OTHER, 12)


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
    events += all_events(engine)
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


LAUNCHED_S, PAUSE_S, LOOKUP_S = 0.007, 0.003, 0.0001


def test_behind_steps_that_cannot_be_launched() -> None:
    now = 0.0

    class Lookup(NgramProposer):
        def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Draft]:
            nonlocal now
            now += LOOKUP_S
            return super().propose(tasks)

    class Model(FakeModel):
        def forward(self, batch: Batch):  # type: ignore[no-untyped-def]  # as of FakeModel
            nonlocal now
            now += LAUNCHED_S
            return super().forward(batch)

    class Ahead(AheadModel):
        def forward(self, batch: Batch):  # type: ignore[no-untyped-def]
            nonlocal now
            now += PAUSE_S
            return super().forward(batch)

    inner = Model(vocab_size=20_000, context_window=1024, block_size=16)
    model = Ahead(inner, takes=lambda draw: draw.sampling.logprobs is None, takes_prompts=False)
    config = EngineConfig(
        num_blocks=200,
        max_num_running=2,
        overlap_prompts=False,
        speculation=SpeculationConfig(drafters=("ngram",)),
    )
    engine = LLMEngine(config, model, proposers=[Lookup(NgramConfig())], clock=lambda: now)

    def num_launched(name: str, sampling: Sampling) -> int:
        before = model.launches.num_launches
        engine.submit(Request(name, tuple(range(1, 30)), sampling, hasher(name.encode())))
        while engine.has_work():
            engine.step()
        return model.launches.num_launches - before

    assert num_launched("probabilities", Sampling(max_tokens=30, ignore_eos=True, logprobs=1)) == 0
    assert num_launched("none", Sampling(max_tokens=300, ignore_eos=True)) > 150
    engine.check_integrity()
    engine.close()
