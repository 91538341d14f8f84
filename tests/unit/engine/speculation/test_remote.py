"""A verifier and its draft workers, in one process: whatever a worker does or sends, answers are
those of plain decoding; a worker that cannot be used costs its guesses, and the step no longer than
it may wait."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import IntegrityError, LoadError
from engine.request import Sampling
from engine.speculation.config import SpeculationConfig
from engine.speculation.draft_fake import FakeDraftChannel
from engine.speculation.draft_port import Answer, DraftPeer
from engine.speculation.draft_sessions import SESSION_BYTES, SessionLimits
from engine.speculation.draft_traces import DraftTraces
from engine.speculation.drafter import Task
from engine.speculation.load import load_drafters
from engine.speculation.remote import (
    GIVE_UP_S,
    MAX_LATE,
    MAX_LATE_REST_S,
    RemoteDrafter,
)
from engine.speculation.remote_state import FIRST_BACKOFF_S
from engine.testing.fake_model import FakeModel
from process.settings import SettingsError
from tests.harness import draft_workers as bench
from tests.harness.draft_workers import fake, outputs, plain, submit
from tests.harness.waiting import Clock


@pytest.fixture(scope="module")
def expected() -> tuple[bench.Outputs, int]:
    return plain()


def _task(name: str, token_ids: Sequence[int]) -> Task:
    return Task((name, 0), token_ids, 1, Sampling(max_tokens=9), 0, 6)


def _peers(*channels: FakeDraftChannel) -> list[DraftPeer]:
    return [DraftPeer(channel) for channel in channels]


def test_answers_are_the_plain_ones_in_fewer_steps(expected: tuple[bench.Outputs, int]) -> None:
    channels = [fake("a:1"), fake("b:1"), fake("c:1")]
    peers = _peers(*channels)
    engine = bench.engine(bench.remote(peers, Clock()))
    submit(engine)
    found, num_steps = outputs(engine)
    assert found == expected[0]
    assert num_steps < expected[1] / 2
    assert sum(channel.num_calls > 0 for channel in channels) > 1, "they share the sequences"
    # Each token is sent once: those of the prompts, and those of the answers.
    num_tokens = 1 + 2 * 12 + 23 + sum(len(tokens) for tokens in found.values())
    assert sum(channel.num_tokens_sent for channel in channels) <= num_tokens
    for peer, channel in zip(peers, channels, strict=True):
        assert peer.counts.num_answered == channel.num_calls
        assert peer.counts.num_late == peer.counts.num_failed == peer.counts.num_resent == 0
    submit(engine, 1, max_tokens=3)
    outputs(engine)
    assert sum(len(channel.sessions) for channel in channels) == 1, "what ended is forgotten"


def test_answers_are_the_plain_ones_whatever_fails_meanwhile(
    expected: tuple[bench.Outputs, int], seed: int
) -> None:
    rng = random.Random(f"draft workers {seed}")
    channels = [fake(f"{name}:1") for name in "abc"]
    clock = Clock()
    engine = bench.engine(bench.remote(_peers(*channels), clock))
    submit(engine)
    assert outputs(engine, lambda step: _disturb(rng, channels, clock))[0] == expected[0]


def test_whatever_fails_drafts_are_trees_and_all_is_accounted_for(
    seed: int, scale: Callable[[int], int]
) -> None:
    """200 verifiers, whose workers go, come back, restart, are late, lack room, or send
    nonsense."""
    num_nodes = num_failed = num_late = num_resent = 0
    for index in range(scale(200)):
        rng = random.Random(f"draft workers {seed} {index}")
        clock = Clock()
        channels = [
            fake(f"{name}:1", _small(rng), by=bench.CountsOn(), clock=clock) for name in "abc"
        ]
        peers = _peers(*channels)
        drafter = bench.remote(peers, clock)
        texts: dict[str, list[int]] = {}
        for step in range(40):
            _disturb(rng, channels, clock)
            if len(texts) < 5:
                texts[f"r{step}"] = [rng.randrange(97) for _ in range(rng.randint(1, 40))]
            for name in [name for name in texts if rng.random() < 0.05]:
                drafter.forget((name, 0))
                del texts[name]
            tasks = [_task(name, tokens) for name, tokens in texts.items() if rng.random() < 0.9]
            for task, draft in zip(tasks, drafter.propose(tasks), strict=True):
                assert len(draft.tree) <= task.num_nodes
                assert all(0 <= token_id < 97 for token_id in draft.tree.token_ids)
            for tokens in texts.values():
                tokens += [rng.randrange(97) for _ in range(rng.randint(0, 3))]
            drafter.check_integrity()
            for channel in channels:
                channel.sessions.check_integrity()
        num_nodes += sum(peer.counts.num_nodes for peer in peers)
        num_failed += sum(peer.counts.num_failed for peer in peers)
        num_late += sum(peer.counts.num_late for peer in peers)
        num_resent += sum(peer.counts.num_resent for peer in peers)
    assert num_nodes and num_failed and num_late and num_resent, "nothing was tried"


def _disturb(rng: random.Random, channels: list[FakeDraftChannel], clock: Clock) -> None:
    """Something happens to one of them, and what happened to it before is over."""
    clock.now_s += rng.choice([0.0, 0.1, FIRST_BACKOFF_S, 10 * GIVE_UP_S])
    channel = rng.choice(channels)
    what = rng.randrange(8)
    channel.is_away = what == 0
    channel.withholds = what == 1
    channel.spoil = (lambda answers: _nonsense(rng, answers)) if what == 2 else None
    if what == 3:
        channel.restart(bench.sessions(by=bench.CountsOn()))
    if what == 4:
        channel.let_go()


def _small(rng: random.Random) -> SessionLimits:
    """Sometimes without room for all."""
    return SessionLimits(rng.choice([1, 2, 64]), rng.choice([1200, 1 << 20]), 16, 8)


def _nonsense(rng: random.Random, answers: Sequence[Answer]) -> Sequence[Answer]:
    spoilt = list(answers)
    if rng.random() < 0.2:
        return spoilt[1:]
    for place, answer in enumerate(spoilt):
        num_nodes = rng.randint(0, 9)
        parents = [rng.randint(-2, num_nodes) for _ in range(num_nodes)]
        chains = list(range(-1, num_nodes - 1))
        spoilt[place] = Answer(
            rng.random() < 0.9,
            [rng.choice([5, 6, 7, 96, 97, 2**31]) for _ in range(num_nodes)],
            rng.choice([parents, chains, chains[1:]]),
            rng.choice([[0.5] * num_nodes, [rng.random() for _ in parents], list(answer.chances)]),
        )
    return spoilt


@pytest.mark.parametrize(
    "answer",
    [
        Answer(True, [97], [-1], [0.5]),  # no token of the vocabulary
        Answer(True, [-1], [-1], [0.5]),
        Answer(True, [1, 1], [-1, -1], [0.5, 0.5]),  # a sibling twice
        Answer(True, [1, 2], [1, -1], [0.5, 0.5]),  # a parent behind its child
        Answer(True, [1], [-2], [0.5]),
        Answer(True, [1, 2], [-1, 0], [0.5, 0.6]),  # likelier than its parent
        Answer(True, [1], [-1], [float("nan")]),
        Answer(True, [1, 2], [-1], [0.5, 0.5]),
        Answer(True, list(range(7)), list(range(-1, 6)), [0.5] * 7),  # more than was asked for
        Answer(False, [1], [-1], [0.5]),
    ],
)
def test_a_tree_that_is_none_is_not_used_and_its_worker_left_out(answer: Answer) -> None:
    channel = fake("a:1")
    peers, clock = _peers(channel), Clock()
    drafter = bench.remote(peers, clock)
    channel.spoil = lambda answers: [answer]
    (draft,) = drafter.propose([_task("r", [1, 2])])
    assert not len(draft.tree)
    assert (peers[0].counts.num_failed, peers[0].counts.is_ready) == (1, False)
    drafter.propose([_task("r", [1, 2])])
    assert channel.num_calls == 1
    channel.spoil = None
    clock.now_s += FIRST_BACKOFF_S
    (draft,) = drafter.propose([_task("r", [1, 2])])
    assert len(draft.tree) and peers[0].counts.is_ready
    drafter.check_integrity()


def test_a_worker_that_is_late_is_not_asked_meanwhile_and_rests_when_it_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It keeps its sessions, and is never away for more than some seconds: its first calls are slow
    where texts are new to it."""
    caplog.set_level(logging.INFO)
    channel = fake("a:1")
    peers, clock = _peers(channel), Clock()
    drafter = bench.remote(peers, clock)
    channel.withholds = True
    for num in range(1, MAX_LATE + 1):
        (draft,) = drafter.propose([_task("r", [1, 2])])
        assert not len(draft.tree)
        drafter.propose([_task("r", [1, 2])])
        assert channel.num_calls == peers[0].counts.num_late == num
        channel.let_go()
    for num in range(MAX_LATE, 20):  # late each time: rests after each, for longer
        (draft,) = drafter.propose([_task("r", [1, 2])])
        assert not len(draft.tree) and channel.num_calls == num and peers[0].counts.is_ready
        drafter.check_integrity()
        clock.now_s += min(FIRST_BACKOFF_S * 2 ** (num - MAX_LATE), MAX_LATE_REST_S)
        drafter.propose([_task("r", [1, 2])])
        assert channel.num_calls == num + 1
        channel.let_go()
    assert "answers, but later than draft_deadline_s" in caplog.text
    assert "left out" not in caplog.text
    drafter.propose([_task("r", [1, 2])])  # the last late answer is seen, and the rest begins
    channel.withholds = False
    clock.now_s += MAX_LATE_REST_S
    (draft,) = drafter.propose([_task("r", [1, 2])])
    assert len(draft.tree) and peers[0].counts.num_answered == 1


def test_one_that_never_answers_is_left_out_too() -> None:
    """Neither what it was asked, nor who it is."""
    channels = [fake("a:1"), fake("b:1")]
    peers, clock = _peers(*channels), Clock()
    drafter = bench.remote(peers, clock)
    tasks = [_task(f"r{index}", [1, 2]) for index in range(16)]
    for channel in channels:
        channel.withholds = True
    drafter.propose(tasks)
    channels[0].withholds = False
    for _ in range(2):
        clock.now_s += 10 * GIVE_UP_S
        drafter.propose(tasks)
    drafts = drafter.propose(tasks)
    assert all(len(draft.tree) for draft in drafts), "all are at the other one"
    assert [peer.counts.is_ready for peer in peers] == [True, False]
    drafter.check_integrity()


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(2, 5), st.integers(0, 4))
def test_a_worker_that_goes_moves_no_sessions_but_its_own(
    num_sessions: int, num_workers: int, gone: int
) -> None:
    channels = [fake(f"{index}:1", by=bench.CountsOn()) for index in range(num_workers)]
    drafter = bench.remote(_peers(*channels), Clock())
    tasks = [_task(f"r{index}", [1, 2]) for index in range(num_sessions)]

    def places() -> list[str]:
        found = [drafter._sessions[task.key].worker for task in tasks]
        return ["" if one is None else one.channel.address for one in found]

    drafter.propose(tasks)
    before = places()
    leaver = channels[gone % num_workers]
    leaver.is_away = True
    drafter.propose(tasks)
    drafter.propose(tasks)
    after = places()
    assert "" not in after and leaver.address not in after
    for old, new in zip(before, after, strict=True):
        assert old in (new, leaver.address)
    drafter.check_integrity()
    for task in tasks:
        drafter.forget(task.key)
    drafter.check_integrity()


def test_who_moves_is_sent_whole_at_once_and_has_a_new_chance() -> None:
    """What its worker knew, or had no room for, says nothing about the next one."""
    small = SessionLimits(64, 2 * SESSION_BYTES, 16, 64)
    channels = [fake("a:1", small, by=bench.CountsOn()), fake("b:1", by=bench.CountsOn())]
    channels[1].is_away = True
    peers, clock = _peers(*channels), Clock()
    drafter = bench.remote(peers, clock)
    short, long = _task("short", [1, 2]), _task("long", [1] * 1000)
    drafts = drafter.propose([short, long])
    assert [len(draft.tree) > 0 for draft in drafts] == [True, False]
    channels[1].is_away, channels[0].is_away = False, True
    clock.now_s += FIRST_BACKOFF_S
    drafter.propose([short, long])
    drafter.propose([short, long])
    drafts = drafter.propose([short, long])  # the long one was caught up with
    assert all(len(draft.tree) for draft in drafts)
    assert channels[1].num_tokens_sent == 1002 and peers[1].counts.num_resent == 0
    drafter.check_integrity()


def test_sessions_are_spread_over_all_workers() -> None:
    channels = [fake(f"{index}:1", by=bench.CountsOn()) for index in range(4)]
    drafter = bench.remote(_peers(*channels), Clock())  # with a fixed name: no luck in it
    drafter.propose([_task(f"r{index}", [1]) for index in range(64)])
    assert min(len(channel.sessions) for channel in channels) >= 8


def test_a_worker_with_another_tokenizer_is_refused_by_name() -> None:
    """At the start it is an error; one that comes later is not asked."""
    channel = fake("a:1")
    channel.about = channel.about._replace(tokenizer_digest="other", model="stranger")
    with pytest.raises(LoadError, match="a:1 serves stranger, which has another tokenizer"):
        bench.remote(_peers(channel), Clock())
    channel.is_away = True
    clock = Clock()
    drafter = bench.remote(_peers(channel), clock)
    channel.is_away = False
    clock.now_s += FIRST_BACKOFF_S
    drafter.propose([_task("r", [1, 2])])
    assert channel.num_calls == 0
    channel.about = bench.about()
    clock.now_s += 4 * FIRST_BACKOFF_S
    drafter.propose([_task("r", [1, 2])])
    assert channel.num_calls == 1


def test_back_offs_double() -> None:
    channel = fake("a:1")
    clock = Clock()
    drafter = bench.remote(_peers(channel), clock)
    channel.is_away = True
    moments = []
    described = channel.describe

    def describe(timeout_s: float) -> Any:
        moments.append(clock.now_s)
        return described(timeout_s)

    channel.describe = describe  # type: ignore[method-assign]
    for _ in range(80):
        drafter.propose([_task("r", [1, 2])])
        clock.now_s += FIRST_BACKOFF_S / 2
    gaps = [late - early for early, late in itertools.pairwise(moments)]
    assert gaps[:4] == [2 * FIRST_BACKOFF_S * 2**index for index in range(4)]


def test_calls_for_traced_requests_are_noted() -> None:
    """By request, whatever the sample; those of others are not."""
    clock, traces = Clock(), DraftTraces()
    channel, other = fake("a:1"), fake("b:1")
    peers = [DraftPeer(one, traces=traces) for one in (channel, other)]
    drafter = bench.remote(peers, clock)
    tasks = [_task("r", [1, 2]), _task("s", [3])]
    drafter.propose(tasks)
    assert not traces.is_on
    traces.watch("r")
    trees = [len(draft.tree) for draft in drafter.propose(tasks)]
    began_s = clock.now_s
    place = drafter._sessions["r", 0].worker
    assert place is not None
    for one in (channel, other):
        one.withholds = True
    drafter.propose(tasks)  # too late
    for one in (channel, other):
        one.let_go()
        one.withholds = False
        one.is_away = True
    clock.now_s += 1.0
    drafter.propose(tasks)  # fails
    found = traces.take("r")
    assert found is not None and not traces.is_on and traces.take("r") is None
    assert (found.num_calls, found.num_late, found.num_failed) == (3, 1, 1)
    assert found.num_nodes == trees[0] > 0
    assert (found.first_s, found.last_s) == (began_s, clock.now_s)
    assert found.addresses == [place.channel.address]
    traces.watch("nobody guessed")
    assert traces.take("nobody guessed") is None


def test_laws_that_do_not_hold_are_told() -> None:
    drafter = bench.remote(_peers(fake("a:1")), Clock())
    drafter.propose([_task("r", [1])])
    drafter._workers[0].num_sessions = 0
    with pytest.raises(IntegrityError, match="0 sessions counted, 1"):
        drafter.check_integrity()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"draft_workers": ("nowhere",)}, "draft_workers: 'nowhere' is not host:port"),
        ({"draft_workers": ("a:1", "a:1")}, "named twice"),
        ({"draft_deadline_s": 0.0}, "draft_deadline_s"),
    ],
)
def test_settings_out_of_range_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        SpeculationConfig(**fields)


def test_who_cannot_connect_them_refuses_draft_workers_by_name() -> None:
    speculation = SpeculationConfig(draft_workers=("127.0.0.1:1",))
    config = EngineConfig(speculation=speculation)
    model = FakeModel(block_size=16)
    with pytest.raises(LoadError, match="draft_workers: are for prefill and decode workers"):
        load_drafters(config, model.info)
    with pytest.raises(SettingsError, match="whoever makes the engine"):
        LLMEngine(config, model)


def test_without_any_worker_there_is_plain_decoding(expected: tuple[bench.Outputs, int]) -> None:
    channel = fake("a:1")
    channel.is_away = True
    drafter: RemoteDrafter = bench.remote(_peers(channel), Clock())
    engine = bench.engine(drafter)
    submit(engine)
    assert outputs(engine) == expected
