"""Draft workers for tests: models, sessions, and an engine that is guessed for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.request import Request, Sampling
from engine.sequence import Key
from engine.speculation.config import SpeculationConfig
from engine.speculation.draft_model import DraftModelProposer
from engine.speculation.draft_protocol import DraftModelInfo
from engine.speculation.draft_sessions import CachingProposer, DraftSessions, SessionLimits
from engine.speculation.proposer import Draft, DraftTask, Proposer
from engine.speculation.remote import MAX_BACKOFF_S, DraftPeer, RemoteProposer
from engine.speculation.token_tree import chain
from engine.testing.fake_draft_channel import FakeDraftChannel
from engine.testing.fake_model import FakeModel
from tests.harness.engines import hasher
from tests.harness.waiting import Clock

EXPANSION = (2, 1, 1)
LIMITS = SessionLimits(
    max_num_sessions=64, max_session_bytes=1 << 20, max_num_nodes=16, catch_up_tokens=8
)
CONFIG = EngineConfig(
    num_blocks=200,
    block_size=4,
    context_window=256,
    speculation=SpeculationConfig(always=True, max_num_nodes=6),
)


def about(model: FakeModel | None = None) -> DraftModelInfo:
    info = (model or FakeModel()).info
    return DraftModelInfo(info.model, info.tokenizer_digest, info.vocab_size)


def proposer() -> DraftModelProposer:
    """It guesses what a FakeModel draws, and is always right."""
    return DraftModelProposer(FakeModel(), EXPANSION, num_blocks=512, max_num_tokens=64)


class Wrapped:
    """A proposer in another one's place."""

    name = "wrapped"

    def __init__(self, inner: CachingProposer) -> None:
        self.inner = inner

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return self.inner.propose(tasks)

    def forget(self, key: Key) -> None:
        self.inner.forget(key)

    def num_cached(self, key: Key) -> int:
        return self.inner.num_cached(key)

    def has_room(self, key: Key, num_tokens: int) -> bool:
        return self.inner.has_room(key, num_tokens)

    def check_integrity(self) -> None:
        self.inner.check_integrity()


class CountsOn:
    """A Proposer that costs nothing: each number is followed by the next one."""

    name = "counts on"

    def __init__(self) -> None:
        self.known: dict[Key, int] = {}

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        drafts = []
        for task in tasks:
            self.known[task.key] = len(task.token_ids)
            num_nodes = min(task.num_nodes, 3)
            following = [(task.token_ids[-1] + 1 + depth) % 97 for depth in range(num_nodes)]
            drafts.append(Draft(chain(following, [0.5] * num_nodes), {}))
        return drafts

    def forget(self, key: Key) -> None:
        self.known.pop(key, None)

    def num_cached(self, key: Key) -> int:
        return self.known.get(key, 0)

    def has_room(self, key: Key, num_tokens: int) -> bool:
        return True

    def check_integrity(self) -> None:
        pass


def sessions(
    limits: SessionLimits = LIMITS,
    *,
    by: CachingProposer | None = None,
    clock: Clock | None = None,
) -> DraftSessions:
    vocab_size = FakeModel().info.vocab_size
    return DraftSessions(by or proposer(), vocab_size, limits, clock or Clock())


def fake(
    name: str,
    limits: SessionLimits = LIMITS,
    *,
    by: CachingProposer | None = None,
    clock: Clock | None = None,
) -> FakeDraftChannel:
    return FakeDraftChannel(name, about(), sessions(limits, by=by, clock=clock))


def remote(
    peers: Sequence[DraftPeer], clock: Clock, deadline_s: float = 0.0, **options: Any
) -> RemoteProposer:
    """One that has met its workers."""
    made = RemoteProposer(
        peers, FakeModel().info, deadline_s=deadline_s, clock=clock, verifier=bytes(16), **options
    )
    made.connect()
    return made


def meet(proposer: RemoteProposer, peer: DraftPeer, clock: Clock) -> None:
    """On a slow machine it may take more than one try."""
    for _ in range(20):
        if peer.counts.is_ready:
            return
        clock.now_s += MAX_BACKOFF_S
        proposer.connect()
    raise AssertionError("they do not meet")


def engine(*proposers: Proposer, config: EngineConfig = CONFIG) -> LLMEngine:
    return LLMEngine(config, FakeModel(), proposers=list(proposers))


def submit(into: LLMEngine, num_requests: int = 3, max_tokens: int = 24) -> None:
    """Greedy and sampled ones, short and long prompts, one of two samples."""
    for index in range(num_requests):
        prompt = tuple((7 * index + 3 * place) % 90 + 1 for place in range(1 + 11 * index))
        sampling = Sampling(
            max_tokens=max_tokens, temperature=(0.0, 0.9)[index % 2], seed=index, ignore_eos=True
        )
        request = Request(f"r{index}", prompt, sampling, hasher())
        into.submit(replace(request, num_samples=1 + (index == 1)))


Outputs = dict[tuple[str, int], list[int]]


def outputs(
    of: LLMEngine, each_step: Callable[[int], None] = lambda step: None
) -> tuple[Outputs, int]:
    """(tokens by request and sample, steps) of what was submitted. Its laws are checked each
    step."""
    found: Outputs = {}
    num_steps = 0
    while of.has_work():
        each_step(num_steps)
        for event in of.step().events:
            found.setdefault((event.request_id, event.sample_index), []).extend(event.token_ids)
        num_steps += 1
        of.check_integrity()
    return found, num_steps


def plain(num_requests: int = 3, max_tokens: int = 24) -> tuple[Outputs, int]:
    """Without any guess."""
    without = LLMEngine(replace(CONFIG, speculation=SpeculationConfig()), FakeModel())
    submit(without, num_requests, max_tokens)
    return outputs(without)
