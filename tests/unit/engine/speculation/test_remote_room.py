"""How much a verifier sends its draft workers, and when it tries again: a step is not held up by
whole texts, and who has no room is not sent them again and again."""

from __future__ import annotations

from collections.abc import Sequence

from engine.request import Sampling
from engine.speculation.draft_fake import FakeDraftChannel
from engine.speculation.draft_port import MAX_NEW_TOKENS, DraftPeer
from engine.speculation.draft_sessions import SESSION_BYTES, SessionLimits
from engine.speculation.drafter import Task
from engine.speculation.remote import RemoteDrafter
from engine.speculation.remote_state import (
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    Session,
    ask_of,
    shares,
)
from engine.testing.fake_model import FakeModel
from process.rpc import MAX_MESSAGE_BYTES
from services.worker.draft_channel import _request
from tests.harness import draft_workers as bench
from tests.harness.draft_workers import fake
from tests.harness.waiting import Clock


def _task(name: str, token_ids: Sequence[int]) -> Task:
    return Task((name, 0), token_ids, 1, Sampling(max_tokens=9), 0, 6)


def _peers(*channels: FakeDraftChannel) -> list[DraftPeer]:
    return [DraftPeer(channel) for channel in channels]


def test_a_text_without_room_is_not_sent_again_and_again_and_not_given_up() -> None:
    channel = fake("a:1", SessionLimits(64, 2 * SESSION_BYTES, 16, 8), by=bench.CountsOn())
    clock = Clock()
    drafter = bench.remote(_peers(channel), clock)
    task = _task("r", [1] * 1000)
    sent = []
    for _ in range(8):
        for _ in range(3):
            drafter.propose([task])
        sent.append(channel.num_tokens_sent)
        clock.now_s += FIRST_BACKOFF_S
    assert sent == [1000, 2000, 2000, 3000, 3000, 3000, 3000, 4000], "after 0.5, 1 and 2 s"
    channel.restart(bench.sessions(by=bench.CountsOn()))  # with more room
    clock.now_s += 8 * FIRST_BACKOFF_S
    drafter.propose([task])
    (draft,) = drafter.propose([task])
    assert len(draft.tree) and channel.num_tokens_sent == 5000
    drafter.check_integrity()


def test_whole_texts_arrive_in_parts_and_hold_no_step_up() -> None:
    """Three new ones of different length beside one that is guessed for."""
    channels = [fake(f"{name}:1", by=bench.CountsOn()) for name in "ab"]
    drafter = bench.remote(_peers(*channels), Clock())
    short = [5]
    texts = {"long": [1] * 20000, "other": [2] * 9000, "third": [3] * 40}
    drafter.propose([_task("short", short)])
    guessed: dict[str, int] = {}
    for step in range(6):
        before = sum(channel.num_tokens_sent for channel in channels)
        short.append(6)
        tasks = [_task(name, tokens) for name, tokens in {**texts, "short": short}.items()]
        drafts = drafter.propose(tasks)
        assert sum(channel.num_tokens_sent for channel in channels) - before <= MAX_NEW_TOKENS
        assert len(drafts[-1].tree), "what is known waits for nobody"
        for name, draft in zip(texts, drafts, strict=False):
            if len(draft.tree):
                guessed.setdefault(name, step)
        drafter.check_integrity()
    # Sent whole after 3, 4 and 4 steps, and computed between calls.
    assert guessed == {"long": 3, "other": 4, "third": 4}
    assert sum(channel.num_tokens_sent for channel in channels) == 7 + 29040


def test_no_call_is_larger_than_one_may_be() -> None:
    """However many sequences: each is a part of the message, even without a new token."""
    session, task = Session(0), _task("r", [1] * 9)
    session.num_sent = 9
    found = shares([(session, task)] * (2 * MAX_NEW_TOKENS))
    assert sum(one is not None for one in found) == MAX_NEW_TOKENS
    ask = ask_of(session, task, 0)._replace(session=2**64 - 1, start=2**32 - 1, seed=2**64 - 1)
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
    drafters = [
        RemoteDrafter(
            [one], FakeModel().info, deadline_s=0.0, clock=clock, verifier=bytes([n] * 16)
        )
        for n, one in enumerate(peers)
    ]
    texts = [[[n] * 40 for _ in range(10)] for n in range(2)]
    for drafter in drafters:
        drafter.meet()
    for step in range(40):
        num_guessed = 0
        for drafter, own in zip(drafters, texts, strict=True):
            tasks = [_task(f"r{place}", tokens) for place, tokens in enumerate(own)]
            num_guessed += sum(len(draft.tree) > 0 for draft in drafter.propose(tasks))
            for tokens in own:
                tokens.append(5)
        assert step == 0 or num_guessed == 12
        clock.now_s += 0.05
    assert channel.sessions.num_evicted == 0
    assert [peer.counts.num_resent for peer in peers] == [0, 0]
    # In 2 s each of the 8 newcomers has tried at 0, 0.5 and 1.5 s.
    assert channel.sessions.num_unknown == 8 * 3
    for place in range(10):
        drafters[0].forget((f"r{place}", 0))
    clock.now_s += MAX_BACKOFF_S
    tasks = [_task(f"r{place}", tokens) for place, tokens in enumerate(texts[1])]
    drafters[1].propose(tasks)
    assert all(len(draft.tree) for draft in drafters[1].propose(tasks)), "there is room again"
