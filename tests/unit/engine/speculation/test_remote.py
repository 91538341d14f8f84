"""RemoteProposer: whatever draft workers do, a verifier's answers are those of plain decoding; a
worker that cannot be used costs its drafts, and the step no longer than its deadline. Texts arrive
in parts, and a text without room is neither sent for ever nor given up."""

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
from engine.speculation.draft_protocol import MAX_NEW_TOKENS, DraftResponse
from engine.speculation.draft_sessions import SESSION_BYTES, SessionLimits
from engine.speculation.loader import load_proposers
from engine.speculation.proposer import DraftTask
from engine.speculation.remote import (
    FIRST_BACKOFF_S,
    GIVE_UP_S,
    MAX_BACKOFF_S,
    MAX_LATE,
    MAX_LATE_REST_S,
    DraftPeer,
    DraftTraces,
    RemoteProposer,
    RemoteSession,
    make_request,
    num_tokens_to_send,
)
from engine.testing.fake_draft_channel import FakeDraftChannel
from engine.testing.fake_model import FakeModel
from process.rpc import MAX_MESSAGE_BYTES
from process.settings import SettingsError
from services.worker.draft_channel import _request
from tests.harness import draft_workers as bench
from tests.harness.draft_workers import fake, outputs, plain, submit
from tests.harness.waiting import Clock


@pytest.fixture(scope="module")
def expected() -> tuple[bench.Outputs, int]:
    return plain()


def _task(name: str, token_ids: Sequence[int]) -> DraftTask:
    return DraftTask((name, 0), token_ids, 1, Sampling(max_tokens=9), 0, 6)


def _peers(*channels: FakeDraftChannel) -> list[DraftPeer]:
    return [DraftPeer(channel) for channel in channels]


def _met(*channels: FakeDraftChannel) -> tuple[RemoteProposer, list[DraftPeer], Clock]:
    """A proposer that has met these workers."""
    peers, clock = _peers(*channels), Clock()
    return bench.remote(peers, clock), peers, clock


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
        proposer = bench.remote(peers, clock)
        texts: dict[str, list[int]] = {}
        for step in range(40):
            _disturb(rng, channels, clock)
            if len(texts) < 5:
                texts[f"r{step}"] = [rng.randrange(97) for _ in range(rng.randint(1, 40))]
            for name in [name for name in texts if rng.random() < 0.05]:
                proposer.forget((name, 0))
                del texts[name]
            tasks = [_task(name, tokens) for name, tokens in texts.items() if rng.random() < 0.9]
            for task, draft in zip(tasks, proposer.propose(tasks), strict=True):
                assert len(draft.tree) <= task.num_nodes
                assert all(0 <= token_id < 97 for token_id in draft.tree.token_ids)
            for tokens in texts.values():
                tokens += [rng.randrange(97) for _ in range(rng.randint(0, 3))]
            proposer.check_integrity()
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


def _nonsense(rng: random.Random, answers: Sequence[DraftResponse]) -> Sequence[DraftResponse]:
    spoilt = list(answers)
    if rng.random() < 0.2:
        return spoilt[1:]
    for place, answer in enumerate(spoilt):
        num_nodes = rng.randint(0, 9)
        parents = [rng.randint(-2, num_nodes) for _ in range(num_nodes)]
        chains = list(range(-1, num_nodes - 1))
        spoilt[place] = DraftResponse(
            rng.random() < 0.9,
            [rng.choice([5, 6, 7, 96, 97, 2**31]) for _ in range(num_nodes)],
            rng.choice([parents, chains, chains[1:]]),
            rng.choice([[0.5] * num_nodes, [rng.random() for _ in parents], list(answer.chances)]),
        )
    return spoilt


@pytest.mark.parametrize(
    "answer",
    [
        DraftResponse(True, [97], [-1], [0.5]),  # no token of the vocabulary
        DraftResponse(True, [-1], [-1], [0.5]),
        DraftResponse(True, [1, 1], [-1, -1], [0.5, 0.5]),  # a sibling twice
        DraftResponse(True, [1, 2], [1, -1], [0.5, 0.5]),  # a parent behind its child
        DraftResponse(True, [1], [-2], [0.5]),
        DraftResponse(True, [1, 2], [-1, 0], [0.5, 0.6]),  # likelier than its parent
        DraftResponse(True, [1], [-1], [float("nan")]),
        DraftResponse(True, [1, 2], [-1], [0.5, 0.5]),
        DraftResponse(
            True, list(range(7)), list(range(-1, 6)), [0.5] * 7
        ),  # more than was asked for
        DraftResponse(False, [1], [-1], [0.5]),
    ],
)
def test_a_tree_that_is_none_is_not_used_and_its_worker_left_out(answer: DraftResponse) -> None:
    channel = fake("a:1")
    proposer, peers, clock = _met(channel)
    channel.spoil = lambda answers: [answer]
    (draft,) = proposer.propose([_task("r", [1, 2])])
    assert not len(draft.tree)
    assert (peers[0].counts.num_failed, peers[0].counts.is_ready) == (1, False)
    proposer.propose([_task("r", [1, 2])])
    assert channel.num_calls == 1
    channel.spoil = None
    clock.now_s += FIRST_BACKOFF_S
    (draft,) = proposer.propose([_task("r", [1, 2])])
    assert len(draft.tree) and peers[0].counts.is_ready
    proposer.check_integrity()


def test_a_worker_that_is_late_is_not_asked_meanwhile_and_rests_when_it_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It keeps its sessions, and is never away for more than some seconds: its first calls are slow
    where texts are new to it."""
    caplog.set_level(logging.INFO)
    channel = fake("a:1")
    proposer, peers, clock = _met(channel)
    channel.withholds = True
    for num in range(1, MAX_LATE + 1):
        (draft,) = proposer.propose([_task("r", [1, 2])])
        assert not len(draft.tree)
        proposer.propose([_task("r", [1, 2])])
        assert channel.num_calls == peers[0].counts.num_late == num
        channel.let_go()
    for num in range(MAX_LATE, 20):  # late each time: rests after each, for longer
        (draft,) = proposer.propose([_task("r", [1, 2])])
        assert not len(draft.tree) and channel.num_calls == num and peers[0].counts.is_ready
        proposer.check_integrity()
        clock.now_s += min(FIRST_BACKOFF_S * 2 ** (num - MAX_LATE), MAX_LATE_REST_S)
        proposer.propose([_task("r", [1, 2])])
        assert channel.num_calls == num + 1
        channel.let_go()
    assert "responds, but later than draft_deadline_s" in caplog.text
    assert "left out" not in caplog.text
    proposer.propose([_task("r", [1, 2])])  # the last late answer is seen, and the rest begins
    channel.withholds = False
    clock.now_s += MAX_LATE_REST_S
    (draft,) = proposer.propose([_task("r", [1, 2])])
    assert len(draft.tree) and peers[0].counts.num_answered == 1


def test_one_that_never_answers_is_left_out_too() -> None:
    """Neither what it was asked, nor who it is."""
    channels = [fake("a:1"), fake("b:1")]
    proposer, peers, clock = _met(*channels)
    tasks = [_task(f"r{index}", [1, 2]) for index in range(16)]
    for channel in channels:
        channel.withholds = True
    proposer.propose(tasks)
    channels[0].withholds = False
    for _ in range(2):
        clock.now_s += 10 * GIVE_UP_S
        proposer.propose(tasks)
    drafts = proposer.propose(tasks)
    assert all(len(draft.tree) for draft in drafts), "all are at the other one"
    assert [peer.counts.is_ready for peer in peers] == [True, False]
    proposer.check_integrity()


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(2, 5), st.integers(0, 4))
def test_a_worker_that_goes_moves_no_sessions_but_its_own(
    num_sessions: int, num_workers: int, gone: int
) -> None:
    channels = [fake(f"{index}:1", by=bench.CountsOn()) for index in range(num_workers)]
    proposer, *_ = _met(*channels)
    tasks = [_task(f"r{index}", [1, 2]) for index in range(num_sessions)]

    def places() -> list[str]:
        found = [proposer._sessions[task.key].endpoint for task in tasks]
        return ["" if one is None else one.channel.address for one in found]

    proposer.propose(tasks)
    before = places()
    leaver = channels[gone % num_workers]
    leaver.is_away = True
    proposer.propose(tasks)
    proposer.propose(tasks)
    after = places()
    assert "" not in after and leaver.address not in after
    for old, new in zip(before, after, strict=True):
        assert old in (new, leaver.address)
    proposer.check_integrity()
    for task in tasks:
        proposer.forget(task.key)
    proposer.check_integrity()


def test_who_moves_is_sent_whole_at_once_and_has_a_new_chance() -> None:
    """What its worker knew, or had no room for, says nothing about the next one."""
    small = SessionLimits(64, 2 * SESSION_BYTES, 16, 64)
    channels = [fake("a:1", small, by=bench.CountsOn()), fake("b:1", by=bench.CountsOn())]
    channels[1].is_away = True
    proposer, peers, clock = _met(*channels)
    short, long = _task("short", [1, 2]), _task("long", [1] * 1000)
    drafts = proposer.propose([short, long])
    assert [len(draft.tree) > 0 for draft in drafts] == [True, False]
    channels[1].is_away, channels[0].is_away = False, True
    clock.now_s += FIRST_BACKOFF_S
    proposer.propose([short, long])
    proposer.propose([short, long])
    drafts = proposer.propose([short, long])  # the long one was caught up with
    assert all(len(draft.tree) for draft in drafts)
    assert channels[1].num_tokens_sent == 1002 and peers[1].counts.num_resent == 0
    proposer.check_integrity()


def test_sessions_are_spread_over_all_workers() -> None:
    channels = [fake(f"{index}:1", by=bench.CountsOn()) for index in range(4)]
    proposer = bench.remote(_peers(*channels), Clock())  # with a fixed name: no luck in it
    proposer.propose([_task(f"r{index}", [1]) for index in range(64)])
    assert min(len(channel.sessions) for channel in channels) >= 8


def test_a_worker_with_another_tokenizer_is_refused_by_name() -> None:
    """At the start it is an error; one that comes later is not asked."""
    channel = fake("a:1")
    channel.info = channel.info._replace(tokenizer_digest="other", model="stranger")
    with pytest.raises(LoadError, match="a:1 serves stranger, which has another tokenizer"):
        bench.remote(_peers(channel), Clock())
    channel.is_away = True
    proposer, _, clock = _met(channel)
    channel.is_away = False
    clock.now_s += FIRST_BACKOFF_S
    proposer.propose([_task("r", [1, 2])])
    assert channel.num_calls == 0
    channel.info = bench.about()
    clock.now_s += 4 * FIRST_BACKOFF_S
    proposer.propose([_task("r", [1, 2])])
    assert channel.num_calls == 1


def test_back_offs_double() -> None:
    channel = fake("a:1")
    proposer, _, clock = _met(channel)
    channel.is_away = True
    moments = []
    described = channel.describe

    def describe(timeout_s: float) -> Any:
        moments.append(clock.now_s)
        return described(timeout_s)

    channel.describe = describe  # type: ignore[method-assign]
    for _ in range(80):
        proposer.propose([_task("r", [1, 2])])
        clock.now_s += FIRST_BACKOFF_S / 2
    gaps = [late - early for early, late in itertools.pairwise(moments)]
    assert gaps[:4] == [2 * FIRST_BACKOFF_S * 2**index for index in range(4)]


def test_calls_for_traced_requests_are_noted() -> None:
    """By request, whatever the sample; those of others are not."""
    clock, traces = Clock(), DraftTraces()
    channel, other = fake("a:1"), fake("b:1")
    peers = [DraftPeer(one, traces=traces) for one in (channel, other)]
    proposer = bench.remote(peers, clock)
    tasks = [_task("r", [1, 2]), _task("s", [3])]
    proposer.propose(tasks)
    assert not traces.is_on
    traces.watch("r")
    trees = [len(draft.tree) for draft in proposer.propose(tasks)]
    began_s = clock.now_s
    place = proposer._sessions["r", 0].endpoint
    assert place is not None
    for one in (channel, other):
        one.withholds = True
    proposer.propose(tasks)  # too late
    for one in (channel, other):
        one.let_go()
        one.withholds = False
        one.is_away = True
    clock.now_s += 1.0
    proposer.propose(tasks)  # fails
    found = traces.take("r")
    assert found is not None and not traces.is_on and traces.take("r") is None
    assert (found.num_calls, found.num_late, found.num_failed) == (3, 1, 1)
    assert found.num_nodes == trees[0] > 0
    assert (found.first_s, found.last_s) == (began_s, clock.now_s)
    assert found.addresses == [place.channel.address]
    traces.watch("nobody guessed")
    assert traces.take("nobody guessed") is None


def test_laws_that_do_not_hold_are_told() -> None:
    proposer = bench.remote(_peers(fake("a:1")), Clock())
    proposer.propose([_task("r", [1])])
    proposer._endpoints[0].num_sessions = 0
    with pytest.raises(IntegrityError, match="0 sessions counted, 1"):
        proposer.check_integrity()


def test_who_cannot_connect_them_refuses_draft_workers_by_name() -> None:
    speculation = SpeculationConfig(draft_workers=("127.0.0.1:1",))
    config = EngineConfig(speculation=speculation)
    model = FakeModel(block_size=16)
    with pytest.raises(LoadError, match="draft_workers: are for prefill and decode workers"):
        load_proposers(config, model.info)
    with pytest.raises(SettingsError, match="draft_models: load them"):
        LLMEngine(config, model)


def test_without_any_worker_there_is_plain_decoding(expected: tuple[bench.Outputs, int]) -> None:
    channel = fake("a:1")
    channel.is_away = True
    proposer: RemoteProposer = bench.remote(_peers(channel), Clock())
    engine = bench.engine(proposer)
    submit(engine)
    assert outputs(engine) == expected


def test_a_text_without_room_is_not_sent_again_and_again_and_not_given_up() -> None:
    channel = fake("a:1", SessionLimits(64, 2 * SESSION_BYTES, 16, 8), by=bench.CountsOn())
    proposer, _, clock = _met(channel)
    task = _task("r", [1] * 1000)
    sent = []
    for _ in range(8):
        for _ in range(3):
            proposer.propose([task])
        sent.append(channel.num_tokens_sent)
        clock.now_s += FIRST_BACKOFF_S
    assert sent == [1000, 2000, 2000, 3000, 3000, 3000, 3000, 4000], "after 0.5, 1 and 2 s"
    channel.restart(bench.sessions(by=bench.CountsOn()))  # with more room
    clock.now_s += 8 * FIRST_BACKOFF_S
    proposer.propose([task])
    (draft,) = proposer.propose([task])
    assert len(draft.tree) and channel.num_tokens_sent == 5000
    proposer.check_integrity()


def test_whole_texts_arrive_in_parts_and_hold_no_step_up() -> None:
    """Three new ones of different length beside one that is guessed for."""
    channels = [fake(f"{name}:1", by=bench.CountsOn()) for name in "ab"]
    proposer, *_ = _met(*channels)
    short = [5]
    texts = {"long": [1] * 20000, "other": [2] * 9000, "third": [3] * 40}
    proposer.propose([_task("short", short)])
    guessed: dict[str, int] = {}
    for step in range(6):
        before = sum(channel.num_tokens_sent for channel in channels)
        short.append(6)
        tasks = [_task(name, tokens) for name, tokens in {**texts, "short": short}.items()]
        drafts = proposer.propose(tasks)
        assert sum(channel.num_tokens_sent for channel in channels) - before <= MAX_NEW_TOKENS
        assert len(drafts[-1].tree), "what is known waits for nobody"
        for name, draft in zip(texts, drafts, strict=False):
            if len(draft.tree):
                guessed.setdefault(name, step)
        proposer.check_integrity()
    # Sent whole after 3, 4 and 4 steps, and computed between calls.
    assert guessed == {"long": 3, "other": 4, "third": 4}
    assert sum(channel.num_tokens_sent for channel in channels) == 7 + 29040


def test_no_call_is_larger_than_one_may_be() -> None:
    """However many sequences: each is a part of the message, even without a new token."""
    session, task = RemoteSession(0), _task("r", [1] * 9)
    session.num_sent = 9
    found = num_tokens_to_send([(session, task)] * (2 * MAX_NEW_TOKENS))
    assert sum(one is not None for one in found) == MAX_NEW_TOKENS
    ask = make_request(session, task, 0)._replace(
        session=2**64 - 1, start=2**32 - 1, seed=2**64 - 1
    )
    ask = ask._replace(num_prompt_tokens=2**32 - 1, num_nodes=2**32 - 1, sample_index=2**32 - 1)
    ask = ask._replace(
        temperature=0.7, top_p=0.5, top_k=2**32 - 1, min_p=0.5, token_ids=[2**32 - 1]
    )
    size = _request(bytes(16), [ask]).ByteSize()
    assert MAX_NEW_TOKENS * size < MAX_MESSAGE_BYTES


def test_more_live_sequences_than_a_worker_keeps_do_not_take_turns() -> None:
    """Of two verifiers that ask in turn: those that are kept are guessed for in every step."""
    clock = Clock()
    channel = fake("a:1", SessionLimits(12, 1 << 20, 16, 64), by=bench.CountsOn(), clock=clock)
    peers = [DraftPeer(channel), DraftPeer(channel)]
    proposers = [
        RemoteProposer(
            [one], FakeModel().info, deadline_s=0.0, clock=clock, verifier=bytes([n] * 16)
        )
        for n, one in enumerate(peers)
    ]
    texts = [[[n] * 40 for _ in range(10)] for n in range(2)]
    for proposer in proposers:
        proposer.connect()
    for step in range(40):
        num_guessed = 0
        for proposer, own in zip(proposers, texts, strict=True):
            tasks = [_task(f"r{place}", tokens) for place, tokens in enumerate(own)]
            num_guessed += sum(len(draft.tree) > 0 for draft in proposer.propose(tasks))
            for tokens in own:
                tokens.append(5)
        assert step == 0 or num_guessed == 12
        clock.now_s += 0.05
    assert channel.sessions.num_evicted == 0
    assert [peer.counts.num_resent for peer in peers] == [0, 0]
    # In 2 s each of the 8 newcomers has tried at 0, 0.5 and 1.5 s.
    assert channel.sessions.num_unknown == 8 * 3
    for place in range(10):
        proposers[0].forget((f"r{place}", 0))
    clock.now_s += MAX_BACKOFF_S
    tasks = [_task(f"r{place}", tokens) for place, tokens in enumerate(texts[1])]
    proposers[1].propose(tasks)
    assert all(len(draft.tree) for draft in proposers[1].propose(tasks)), "there is room again"
