"""Steps that verify guesses, begun in the call that has booked the step before: nobody can tell,
but by time, whatever befalls a sample while such a step is under way.

The device here writes as late as it may what a forward pass computes: when its draws are waited
for, or something is queued behind it. So a block that was given away too early is written when it
is another's, and the FakeModel's tokens show it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.begun import BegunStep, may_be_early
from engine.config import EngineConfig
from engine.errors import IntegrityError, NoBlocks, WrongState
from engine.fake import FakeModel
from engine.foresight import Foresight
from engine.kv.memory import KvMemory
from engine.loop import Engine
from engine.models.interface import LoadedModel
from engine.plain_ahead import AheadModel
from engine.request import Beam, Request, State
from engine.sampling import pipeline
from engine.sampling.copies import Mark
from engine.speculation.config import SpeculationConfig
from engine.speculation.drafter import Draft, Task
from engine.speculation.heads.hidden import Computed, Wants
from engine.speculation.tree import EMPTY, TokenTree, chain, merge
from engine.step_builder import Step
from engine.step_output import RequestEvent
from tests.unit.engine.launches import (
    PROMPT,
    SIZE,
    WINDOW,
    all_steps,
    tokens_of,
    write_tokens,
)

Make = Callable[..., Request]

OTHER = tuple(range(40, 51))


class LateFake(FakeModel):
    """Whose forward passes, where they are `late`, write when `settle` says so."""

    def __init__(self) -> None:
        super().__init__(context_window=WINDOW, block_size=SIZE)
        self.is_late = False
        self.num_waits = 0
        self.failure: Exception | None = None
        self._unwritten: list[tuple[int, int, torch.Tensor]] = []

    def attach(self, memory: KvMemory) -> None:
        super().attach(memory)
        for name in ("clear", "copy", "move_tokens", "clear_tokens"):
            setattr(memory, name, self._behind(getattr(memory, name)))

    def _behind(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def after(*args: Any) -> Any:
            self.settle()
            return call(*args)

        return after

    def forward(self, batch: Batch) -> torch.Tensor:
        self.settle()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        if not self.is_late:
            return super().forward(batch)
        places = [
            (span.block_ids[slot // SIZE], slot % SIZE)
            for span in batch.spans
            if span.block_ids
            for slot in range(span.start, span.end)
        ]
        cells = self._cells()
        before = [cells[block_id, :, slot].clone() for block_id, slot in places]
        logits = super().forward(batch)
        for (block_id, slot), old in zip(places, before, strict=True):
            self._unwritten.append((block_id, slot, cells[block_id, :, slot].clone()))
            cells[block_id, :, slot] = old
        return logits

    def settle(self) -> None:
        """What was computed is written."""
        for block_id, slot, values in self._unwritten:
            self._cells()[block_id, :, slot] = values
        self._unwritten = []


class LateModel(AheadModel):
    """Its forward passes are late, its launches are computed when they are read."""

    def __init__(self, fake: LateFake) -> None:
        super().__init__(fake, is_late=True)
        self.fake = fake

    def forward(self, batch: Batch) -> torch.Tensor:
        self.fake.settle()
        self.launches.compute_all()
        self.fake.is_late = True
        try:
            return super().forward(batch)
        finally:
            self.fake.is_late = False


class Branches:
    """A Drafter that knows what follows, and lies as well: a right path of `num_right` beside a
    wrong one."""

    name = "branches"

    def __init__(self, fake: FakeModel, rng: random.Random | None = None) -> None:
        self._fake = fake
        self._rng = rng
        self.num_right, self.num_wrong = 1, 6
        self.now_s, self.takes_s = 0.0, 0.0
        self.num_asked = 0

    def propose(self, tasks: Sequence[Task]) -> list[Draft]:
        self.num_asked += 1
        self.now_s += self.takes_s
        return [Draft(self._tree(task).best(task.num_nodes), {}) for task in tasks]

    def _tree(self, task: Task) -> TokenTree:
        num_right, num_wrong = self.num_right, self.num_wrong
        if self._rng is not None:
            num_right, num_wrong = self._rng.randint(0, 3), self._rng.randint(0, 6)
        right = self._fake.generate(task.token_ids, num_right)
        wrong = [(self._fake.next_token(task.token_ids) + 1) % 97] * num_wrong
        paths = [
            chain(path, [chance / (place + 1) for place in range(len(path))])
            for path, chance in ((wrong, 0.5), (right, 0.4))
            if path
        ]
        return merge(paths) if paths else EMPTY

    def forget(self, key: object) -> None:
        pass

    def check_integrity(self) -> None:
        pass


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateFake]:
    """A model that writes no sooner than its draws, or its end, are waited for."""
    fake = LateFake()
    begin = pipeline.begin

    def begin_late(*args: Any, **fields: Any) -> Callable[[], Any]:
        drawing = begin(*args, **fields)

        def wait() -> Any:
            fake.num_waits += 1
            fake.settle()
            return drawing()

        return wait

    class LateMark(Mark):
        def wait(self) -> None:
            fake.num_waits += 1
            fake.settle()
            super().wait()

    monkeypatch.setattr("engine.begun.pipeline.begin", begin_late)
    monkeypatch.setattr("engine.begun.Mark", LateMark)
    yield fake


def _engine(
    model: LoadedModel,
    fake: FakeModel,
    *,
    rng: random.Random | None = None,
    drafter: Branches | None = None,
    **config: Any,
) -> tuple[Engine, Branches]:
    drafter = drafter or Branches(fake, rng)
    defaults: dict[str, Any] = {
        "num_blocks": 64,
        "max_num_running": 8,
        "speculation": SpeculationConfig(max_num_nodes=8, always=True),
    }
    config = defaults | config
    engine = Engine(EngineConfig(**config), model, drafters=[drafter], clock=lambda: drafter.now_s)
    return engine, drafter


def _late_engine(fake: LateFake, **fields: Any) -> Engine:
    return _engine(LateModel(fake), fake, **fields)[0]


def _launching(fake: LateFake) -> tuple[Engine, LateModel]:
    model = LateModel(fake)
    return _engine(model, fake)[0], model


def _decoding(engine: Engine, *requests: Request) -> list[RequestEvent]:
    """These, and what was told until a step is under way that verifies guesses for all of them."""
    events: list[RequestEvent] = []
    for request in requests:
        engine.submit(request)
    while not engine._in_flight.is_live or engine.stats().num_waiting:
        events += engine.step().events
        engine.check_integrity()
    return events


def _rest(engine: Engine) -> list[RequestEvent]:
    events = [event for output in all_steps(engine) for event in output.events]
    stats = engine.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    return events


def _of(events: Sequence[RequestEvent], name: str) -> list[int]:
    return tokens_of([event for event in events if event.request_id == name])


def test_the_next_step_is_begun_before_the_events_of_the_last_are_told(
    late: LateFake, make_request: Make
) -> None:
    engine = _late_engine(late)
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
    # Whom drafters have not met yet they may have to catch up with: nothing is begun before the
    # first token is told.
    assert [num for _, num, _ in seen] == [1, 3, 4, 5, 5]
    assert [is_live for _, _, is_live in seen] == [False, True, True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_waiting_reads_no_logits(dtype: torch.dtype) -> None:
    """numpy has no bfloat16."""
    logits = torch.zeros(1, 3, dtype=dtype)
    step = Step(Batch((), (), ()), (), frozenset(), 0, False, False)
    BegunStep([], {}, step, logits, None, None).wait()


def test_where_a_pass_is_waited_for_nothing_is_begun_early(make_request: Make) -> None:
    """As on a CPU: events would come a step late."""
    for max_queued_tokens in (1 << 20, 0):
        model = AheadModel(FakeModel(context_window=WINDOW, block_size=SIZE))
        model.max_queued_tokens = max_queued_tokens
        fake = FakeModel(context_window=WINDOW, block_size=SIZE)
        engine, _ = _engine(model, fake)
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
    engine, drafter = _engine(model, late)
    events = _decoding(engine, make_request("a", PROMPT, max_tokens=40))
    engine.submit(make_request("b", OTHER, max_tokens=12, root=b"b"))
    while len(_of(events, "b")) < 3:
        events += engine.step().events
    num_steps, num_forwards, num_asked = 0, late.num_forwards, drafter.num_asked
    while len(_of(events, "b")) < 10:
        assert not engine._in_flight.is_live
        events += engine.step().events
        engine.check_integrity()
        num_steps += 1
    assert late.num_forwards - num_forwards == drafter.num_asked - num_asked == num_steps > 2
    engine.abort("b")
    for _ in range(2):
        events += engine.step().events
    assert engine._in_flight.is_live
    events += _rest(engine)
    assert _of(events, "a") == late.generate(PROMPT, 40)
    assert _of(events, "b") == late.generate(OTHER, 12)[: len(_of(events, "b"))]


@pytest.mark.parametrize("max_queued_tokens", [10, 40])
def test_a_step_that_grows_beyond_the_graphs_is_computed_once(
    late: LateFake, make_request: Make, max_queued_tokens: int
) -> None:
    """What was guessed for it is taken back, and its blocks."""
    model = LateModel(late)
    model.max_queued_tokens = max_queued_tokens
    engine, drafter = _engine(model, late, preemption="recompute")
    drafter.num_right = drafter.num_wrong = 0
    names = {"a": PROMPT, "b": OTHER}
    requests = [make_request(name, own, max_tokens=30) for name, own in names.items()]
    events = _decoding(engine, *requests)
    drafter.num_right, drafter.num_wrong = 1, 6
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
    events += _rest(engine)
    for name, prompt in names.items():
        assert _of(events, name) == late.generate(prompt, 30)


def test_who_hears_of_kept_guesses_waits_for_their_move_and_not_for_the_next_step(
    late: LateFake, make_request: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right guess lies behind the wrong ones: what is kept of it is moved behind the draws."""
    marks: list[tuple[str, int]] = []

    class NotedMark(Mark):
        def __init__(self, device: torch.device | str) -> None:
            super().__init__(device)
            marks.append(("made", late.num_forwards))

        def wait(self) -> None:
            marks.append(("waited for", late.num_forwards))
            super().wait()

    monkeypatch.setattr("engine.plain_steps.Mark", NotedMark)
    engine, drafter = _engine(LateModel(late), late)
    _decoding(engine, make_request("a", PROMPT, max_tokens=40))
    for num_kept in (1, 1, 0, 1):
        drafter.num_right = num_kept
        engine.step()  # with what was guessed before
        marks.clear()
        num_forwards = late.num_forwards
        assert len(tokens_of(engine.step().events)) == 1 + num_kept
        assert engine._in_flight.is_live and not engine.is_device_behind
        expected = [("made", num_forwards), ("waited for", num_forwards + 1)]
        assert marks == (expected if num_kept else [])


class Reading(Branches):
    """That goes by hidden states."""

    wants = Wants.DRAWN
    layers: tuple[int, ...] = ()

    def see(self, computed: Sequence[Computed]) -> None:
        pass


def test_who_goes_by_hidden_states_is_asked_when_it_has_seen_them(
    late: LateFake, make_request: Make
) -> None:
    engine, drafter = _engine(LateModel(late), late, drafter=Reading(late))
    engine.submit(make_request("a", PROMPT, max_tokens=20))
    events: list[RequestEvent] = []
    while engine.has_work():
        events += engine.step().events
        assert not engine._in_flight.is_live
    assert drafter.num_asked > 5
    assert _of(events, "a") == late.generate(PROMPT, 20)


def _with_beams(make_request: Make, name: str) -> Request:
    request: Request = make_request(name, OTHER, max_tokens=6, root=name.encode())
    return dataclasses.replace(request, beam=Beam(4))


def _found(engine: Engine, events: Sequence[RequestEvent], name: str) -> list[object]:
    events = [*events, *_rest(engine)]
    own = [event for event in events if event.request_id == name and event.token_ids]
    return [(event.token_ids, event.score) for event in own]


def test_beams_are_booked_before_anything_is_begun(late: LateFake, make_request: Make) -> None:
    """Others beside them are guessed for."""
    plain = Engine(EngineConfig(num_blocks=64), FakeModel(context_window=WINDOW, block_size=SIZE))
    plain.submit(_with_beams(make_request, "b"))
    expected = _found(plain, [], "b")
    engine = _late_engine(late)
    events = _decoding(engine, make_request("a", PROMPT, max_tokens=20))
    engine.submit(_with_beams(make_request, "b"))
    events += engine.step().events  # what was under way
    while "b" in engine._groups:
        output = engine.step()
        events += output.events
        engine.check_integrity()
        assert not engine._in_flight.is_live or "b" not in engine._groups
    assert expected and _found(engine, events, "b") == expected
    assert _of(events, "a") == late.generate(PROMPT, 20)[: len(_of(events, "a"))]


def test_nothing_is_begun_while_somebody_waits_to_be_let_in(
    late: LateFake, make_request: Make
) -> None:
    """As beams do for all their places."""
    request = _with_beams(make_request, "b")
    leg = Engine(EngineConfig(num_blocks=64), FakeModel(context_window=WINDOW, block_size=SIZE))
    leg.reserve(dataclasses.replace(request, hold_after=1))
    leg.start("b")
    begun = _found_start(leg)
    engine = _late_engine(late, max_num_running=4)
    events = _decoding(engine, make_request("a", PROMPT, max_tokens=20))
    write_tokens(engine, engine.reserve(request).block_ids, OTHER)
    engine.start("b", num_loaded_tokens=len(OTHER), beam_start=begun)
    events += engine.step().events  # what was under way
    while "a" in engine._groups:
        assert not engine._in_flight.is_live
        events += engine.step().events
        engine.check_integrity()
    plain = Engine(EngineConfig(num_blocks=64), FakeModel(context_window=WINDOW, block_size=SIZE))
    plain.submit(request)
    assert _found(engine, events, "b") == _found(plain, [], "b")
    assert _of(events, "a") == late.generate(PROMPT, 20)


def _found_start(leg: Engine) -> tuple[tuple[int, float], ...]:
    *_, last = (event for output in all_steps(leg) for event in output.events)
    return last.beam_start


def test_who_was_cancelled_is_not_counted(late: LateFake, make_request: Make) -> None:
    engine = _late_engine(late)
    beside = make_request("b", OTHER, max_tokens=20, root=b"b")
    _decoding(engine, make_request("a", PROMPT, max_tokens=20), beside)
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


def test_nobody_waits_for_a_slow_drafter_with_a_first_token(
    late: LateFake, make_request: Make
) -> None:
    """It may have to catch up with the prompt; so with each that comes, and after a step in which
    nobody was asked."""
    engine, drafter = _engine(LateModel(late), late)
    for name, takes_s in (("a", 0.2), ("b", 0.2), ("c", 0.0), ("d", 0.2)):
        began_s, drafter.takes_s = drafter.now_s, takes_s
        engine.submit(make_request(name, PROMPT, max_tokens=6, root=name.encode()))
        assert _of(engine.step().events, name) == late.generate(PROMPT, 1)
        assert drafter.now_s == began_s
        _rest(engine)


def test_a_slow_drafter_keeps_no_events_back(late: LateFake, make_request: Make) -> None:
    engine, drafter = _engine(LateModel(late), late)
    events = _decoding(engine, make_request("a", PROMPT, max_tokens=20))
    drafter.takes_s = 0.005
    events += engine.step().events  # it is known behind the first one
    for _ in range(2):
        events += engine.step().events
        assert not engine._in_flight.is_live
    drafter.takes_s = 0.0001
    events += engine.step().events
    assert engine._in_flight.is_live
    events += _rest(engine)
    assert _of(events, "a") == late.generate(PROMPT, 20)


@pytest.mark.parametrize("others", [0, 1])
def test_cancelled(late: LateFake, make_request: Make, others: int) -> None:
    """Nobody waits for the device, and nobody gets what it still writes into."""
    engine = _late_engine(late, num_blocks=24, preemption="recompute")
    names = ["b"][:others]
    beside = [make_request(name, OTHER, max_tokens=12, root=name.encode()) for name in names]
    events = _decoding(engine, make_request("a", PROMPT, max_tokens=30), *beside)
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
    events += _rest(engine)
    for name in "cde":
        assert _of(events, name) == late.generate(prompt, 6)
    for name in names:
        assert _of(events, name) == late.generate(OTHER, 12)


@pytest.mark.parametrize("others", [0, 1])
def test_what_is_told_as_free_can_be_had(late: LateFake, make_request: Make, others: int) -> None:
    """Blocks that are held for a row which was left over, too."""
    engine = _late_engine(late, num_blocks=24, preemption="never")
    names = ["b"][:others]
    beside = [make_request(name, OTHER, max_tokens=12, root=name.encode()) for name in names]
    _decoding(engine, make_request("a", PROMPT, max_tokens=30), *beside)
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


def test_what_nobody_wants_any_more_keeps_its_blocks_no_longer_than_the_next_launch(
    late: LateFake, make_request: Make
) -> None:
    """That one comes after it on the device, and is waited for anyway."""
    engine, model = _launching(late)
    _decoding(engine, make_request("a", PROMPT, max_tokens=30))
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
    assert _of([*events, *_rest(engine)], "b") == late.generate(OTHER, 12)


def test_where_nothing_is_computed_nothing_is_kept(late: LateFake, make_request: Make) -> None:
    engine = _late_engine(late)
    _decoding(engine, make_request("a", PROMPT, max_tokens=30))
    engine.abort("a")
    assert engine._pool.num_quarantined > 0
    engine.step()
    assert engine._pool.num_quarantined == 0 and not late._unwritten
    engine.check_integrity()


@pytest.mark.parametrize("preemption", ["never", "recompute"])
@pytest.mark.parametrize("is_held", [False, True])
def test_what_can_be_had_is_told_as_free(
    late: LateFake, make_request: Make, preemption: str, is_held: bool
) -> None:
    """Blocks for guesses of a step that is under way, too, unless they are promised, or somebody
    else touches them."""
    engine = _late_engine(late, num_blocks=24, preemption=preemption)
    _decoding(engine, make_request("a", PROMPT, max_tokens=30))
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
    engine = _late_engine(late, num_blocks=16, preemption="recompute")
    _decoding(engine, make_request("a", PROMPT, max_tokens=30))
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


def test_who_is_refused_costs_no_step(late: LateFake, make_request: Make) -> None:
    """Where blocks of guesses would not suffice either."""
    engine = _late_engine(late, num_blocks=16, preemption="recompute")
    events = _decoding(engine, make_request("a", PROMPT, max_tokens=30))
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
    assert _of(events, "a") == late.generate(PROMPT, 30)
    assert late.num_forwards - num_forwards <= num_steps


def test_another_one_of_the_same_name(late: LateFake, make_request: Make) -> None:
    """What was under way is not its own."""
    engine = _late_engine(late)
    beside = make_request("b", OTHER, max_tokens=12, root=b"b")
    events = _decoding(engine, make_request("a", PROMPT, max_tokens=30), beside)
    engine.abort("a")
    before = len(_of(events, "a"))
    engine.submit(make_request("a", OTHER[2:], max_tokens=7, root=b"a"))
    events += _rest(engine)
    assert _of(events, "a")[before:] == late.generate(OTHER[2:], 7)
    assert _of(events, "b") == late.generate(OTHER, 12)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("others", [0, 1])
def test_preempted(late: LateFake, make_request: Make, preemption: str, others: int) -> None:
    engine = _late_engine(late, preemption=preemption)
    names = ["b"][:others]
    beside = [make_request(name, OTHER, max_tokens=12, root=name.encode()) for name in names]
    events = _decoding(engine, make_request("a", PROMPT, max_tokens=20), *beside)
    engine.preempt("a")
    engine.check_integrity()
    assert engine._in_flight.is_live == bool(others)
    events += _rest(engine)
    assert _of(events, "a") == late.generate(PROMPT, 20)
    for name in names:
        assert _of(events, name) == late.generate(OTHER, 12)


def test_a_sample_that_nobody_wants_any_more(late: LateFake, make_request: Make) -> None:
    """Of blocks that were taken before it began."""
    engine = _late_engine(late)
    one = make_request("a", PROMPT, max_tokens=20)
    request = Request(
        "a", one.prompt_token_ids, one.sampling, one.block_hasher, num_samples=2, cache_root=b""
    )
    events = _decoding(engine, request)
    engine.finish_sample("a", 0)
    engine.check_integrity()
    events += _rest(engine)
    own = tokens_of([event for event in events if event.sample_index == 1])
    assert own == late.generate(PROMPT, 20)


def test_taken_out_to_go_on_elsewhere(late: LateFake, make_request: Make) -> None:
    """Its blocks stay as they are, and what was under way is drawn again there."""
    engine = _late_engine(late)
    events = _decoding(engine, make_request("a", PROMPT, max_tokens=20))
    held = engine.hold("a")
    engine.check_integrity()
    assert held.token_ids == (*PROMPT, *_of(events, "a"))
    assert held.num_computed_tokens == len(held.token_ids) - 1
    engine.submit(make_request("b", OTHER, max_tokens=12))
    events += [event for output in all_steps(engine) for event in output.events]
    assert len(engine.block_ids("a")) == -(-len(held.token_ids) // SIZE)
    for place in range(held.num_computed_tokens):
        cell = engine.kv.cache[held.block_ids[place // SIZE], 0, 0, :, place % SIZE, 0]
        assert cell.tolist() == [held.token_ids[place], place]
    assert _of(events, "b") == late.generate(OTHER, 12)
    engine.release("a")
    engine.check_integrity()


def test_who_is_taken_out_keeps_no_blocks_of_guesses(late: LateFake, make_request: Make) -> None:
    engine, drafter = _engine(LateModel(late), late, preemption="recompute")
    drafter.num_right, drafter.num_wrong = 0, 8
    beside = make_request("b", OTHER, max_tokens=30, root=b"b")
    _decoding(engine, make_request("a", PROMPT, max_tokens=30), beside)
    assert len(engine.block_ids("a")) > len(PROMPT) // SIZE + 1
    held = engine.hold("a")
    assert len(engine.block_ids("a")) == -(-len(held.token_ids) // SIZE)
    engine.check_integrity()
    engine.release("a")
    _rest(engine)


def test_who_comes_waits_for_no_more_than_the_step_that_is_under_way(
    late: LateFake, make_request: Make
) -> None:
    engine = _late_engine(late)
    events = _decoding(engine, make_request("a", PROMPT, max_tokens=20))
    engine.submit(make_request("b", OTHER, max_tokens=5))
    first = engine.step().events
    assert [event.request_id for event in first] == ["a"]
    assert not engine._in_flight.is_live  # it would be one step more
    second = engine.step().events
    assert {event.request_id for event in second} == {"a", "b"}
    events += [*first, *second, *_rest(engine)]
    assert _of(events, "a") == late.generate(PROMPT, 20)
    assert _of(events, "b") == late.generate(OTHER, 5)


def test_guesses_give_way_to_who_reserves(late: LateFake, make_request: Make) -> None:
    """The step that is under way is computed once more, without the blocks for its guesses."""
    num_own = -(-(len(PROMPT) + 20) // SIZE)
    engine = _late_engine(late, num_blocks=2 * num_own, preemption="recompute")
    events = _decoding(engine, make_request("a", PROMPT, max_tokens=20))
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
    events += _rest(engine)
    assert _of(events, "a") == late.generate(PROMPT, 20)


def test_a_pass_that_fails_early_fails_the_step_that_it_is_of(
    late: LateFake, make_request: Make
) -> None:
    """What was booked before is told."""
    engine = _late_engine(late)
    events = _decoding(engine, make_request("a", PROMPT, max_tokens=20))
    late.failure = RuntimeError("the device is gone")
    told = engine.step().events
    assert told and not engine._in_flight.is_live
    engine.check_integrity()
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    engine.check_integrity()
    events += [*told, *_rest(engine)]
    assert _of(events, "a") == late.generate(PROMPT, 20)


def test_a_pass_that_fails_early_is_nobody_elses(
    late: LateFake, make_request: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = _late_engine(late)
    _decoding(engine, make_request("a", PROMPT, max_tokens=20))
    late.failure = RuntimeError("the device is gone")
    engine.step()
    engine.abort("a")
    events = _decoding(engine, make_request("b", OTHER, max_tokens=9, root=b"b"))
    assert _of(events + _rest(engine), "b") == late.generate(OTHER, 9)
    assert "the device is gone" in caplog.text


@pytest.mark.parametrize("owner, name", [(BegunStep, "draws"), (Foresight, "use_wait")])
def test_what_fails_while_a_step_is_waited_for_leaves_nothing_in_flight(
    late: LateFake,
    make_request: Make,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
) -> None:
    engine = _late_engine(late, preemption="recompute")
    events = _decoding(engine, make_request("a", PROMPT, max_tokens=20))

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
    assert _of([*events, *_rest(engine)], "a") == late.generate(PROMPT, 20)


def test_closed_while_a_step_is_under_way(late: LateFake, make_request: Make) -> None:
    engine = _late_engine(late)
    _decoding(engine, make_request("a", PROMPT, max_tokens=20))
    engine.abort("a")
    engine.close()
    assert not late._unwritten and engine._pool.num_quarantined == 0


def test_who_looks_sees_what_does_not_add_up(late: LateFake, make_request: Make) -> None:
    engine = _late_engine(late)
    _decoding(engine, make_request("a", PROMPT, max_tokens=20))
    engine._groups["a"].prompt.block_ids[-1] ^= 1
    with pytest.raises(IntegrityError):
        engine.check_integrity()
    engine._groups["a"].prompt.block_ids[-1] ^= 1


def test_anything_at_any_time(late: LateFake, make_request: Make, seed: int) -> None:
    """Requests come, are cancelled, lose their blocks and are taken out at random, and others'
    bytes are written into blocks as soon as those are handed out."""
    rng = random.Random(f"begun {seed}")
    num_early = 0
    for _ in range(6):
        num_early += _anything(late, make_request, rng)
    assert num_early > 20


def _anything(late: LateFake, make_request: Make, rng: random.Random) -> int:
    engine = _late_engine(
        late,
        rng=random.Random(rng.random()),
        num_blocks=rng.randint(20, 40),
        max_num_running=rng.randint(2, 4),
        preemption=rng.choice(["never", "recompute", "swap"]),
    )
    expected: dict[str, list[int]] = {}
    events: list[RequestEvent] = []
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
        for name, group in [*engine._groups.items()]:
            if group.state is State.HOLDING and rng.random() < 0.3:
                engine.release(name)
    for name, group in [*engine._groups.items()]:
        assert group.state is State.HOLDING
        engine.release(name)
    for name, tokens in expected.items():
        told = _of(events, name)
        assert told == tokens[: len(told)]
        ended = [event for event in events if event.request_id == name and event.is_request_over]
        assert not ended or told == tokens
    _rest(engine)
    engine.close()
    return num_early


def _disturb(engine: Engine, name: str, rng: random.Random) -> None:
    what = rng.choice([engine.abort, engine.preempt, engine.hold])
    try:
        what(name)
    except WrongState:
        pass  # its blocks may not be taken
