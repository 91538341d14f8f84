"""Steps that verify guesses, begun in the call that has booked the step before: when they are, and
what keeps events back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch

from engine.batch import Batch
from engine.begun import BegunStep, may_be_early
from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.outputs import RequestOutput
from engine.request import Beam, Request
from engine.sampling.host_device_copies import StreamMark
from engine.sampling.sampler import Sampler
from engine.speculation.proposer import HiddenStates, HiddenStateScope
from engine.step_builder import Step
from engine.testing.ahead_model import AheadModel
from engine.testing.fake_model import FakeModel
from tests.harness.engines import PROMPT, SIZE, WINDOW, all_steps, tokens_of, write_tokens
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


def test_where_a_pass_is_waited_for_nothing_is_begun_early(make_request: Make) -> None:
    """As on a CPU: events would come a step late."""
    for max_queued_tokens in (1 << 20, 0):
        model = AheadModel(FakeModel(context_window=WINDOW, block_size=SIZE))
        model.max_queued_tokens = max_queued_tokens
        fake = FakeModel(context_window=WINDOW, block_size=SIZE)
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

    monkeypatch.setattr("engine.plain_steps.Mark", NotedMark)
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


def test_beams_are_booked_before_anything_is_begun(late: LateFake, make_request: Make) -> None:
    """Others beside them are guessed for."""
    plain = LLMEngine(
        EngineConfig(num_blocks=64), FakeModel(context_window=WINDOW, block_size=SIZE)
    )
    plain.submit(_with_beams(make_request, "b"))
    expected = _found(plain, [], "b")
    engine = late_engine(late)
    events = decoding(engine, make_request("a", PROMPT, max_tokens=20))
    engine.submit(_with_beams(make_request, "b"))
    events += engine.step().events  # what was under way
    while "b" in engine._groups:
        output = engine.step()
        events += output.events
        engine.check_integrity()
        assert not engine._in_flight.is_live or "b" not in engine._groups
    assert expected and _found(engine, events, "b") == expected
    assert told_of(events, "a") == late.generate(PROMPT, 20)[: len(told_of(events, "a"))]


def test_nothing_is_begun_while_somebody_waits_to_be_let_in(
    late: LateFake, make_request: Make
) -> None:
    """As beams do for all their places."""
    request = _with_beams(make_request, "b")
    leg = LLMEngine(EngineConfig(num_blocks=64), FakeModel(context_window=WINDOW, block_size=SIZE))
    leg.reserve(dataclasses.replace(request, hold_after=1))
    leg.start("b")
    begun = _found_start(leg)
    engine = late_engine(late, max_num_running=4)
    events = decoding(engine, make_request("a", PROMPT, max_tokens=20))
    write_tokens(engine, engine.reserve(request).block_ids, OTHER)
    engine.start("b", num_loaded_tokens=len(OTHER), beam_start=begun)
    events += engine.step().events  # what was under way
    while "a" in engine._groups:
        assert not engine._in_flight.is_live
        events += engine.step().events
        engine.check_integrity()
    plain = LLMEngine(
        EngineConfig(num_blocks=64), FakeModel(context_window=WINDOW, block_size=SIZE)
    )
    plain.submit(request)
    assert _found(engine, events, "b") == _found(plain, [], "b")
    assert told_of(events, "a") == late.generate(PROMPT, 20)


def _found_start(leg: LLMEngine) -> tuple[tuple[int, float], ...]:
    *_, last = (event for output in all_steps(leg) for event in output.events)
    return last.beam_start


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


@pytest.mark.parametrize(
    "grammar, beam, adapter_slot",
    [(None, None, 0), ("g", None, 0), (None, "b", 0), (None, None, 1)],
)
def test_what_else_keeps_events_back(
    grammar: str | None, beam: str | None, adapter_slot: int
) -> None:
    """Masks take their time, beams are booked last, and no graph takes an adapter."""
    plain = SimpleNamespace(
        grammar=None, request=SimpleNamespace(beam=None), group=SimpleNamespace(adapter_slot=0)
    )
    one = SimpleNamespace(
        grammar=grammar,
        request=SimpleNamespace(beam=beam),
        group=SimpleNamespace(adapter_slot=adapter_slot),
    )
    assert may_be_early([plain, one]) == (one == plain)  # type: ignore[list-item]


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
