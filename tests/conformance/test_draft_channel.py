"""The way to a draft worker: the fake one that ships, and a real one over gRPC, do the same. And a
stream that is guessed for goes on when its draft worker ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeVar

import pytest

from engine.config import EngineConfig
from engine.request import Sampling
from engine.speculation.draft_protocol import DraftChannel, DraftRequest, DraftResponse
from engine.speculation.draft_sessions import DraftSessions
from engine.speculation.proposer import Draft, DraftTask
from engine.speculation.remote import DraftPeer, EndpointState
from engine.testing.fake_draft_channel import FakeDraftChannel
from engine.testing.fake_model import FakeModel
from process.rpc import PLAIN
from services.draft.config import DraftLimits, DraftSettings
from services.draft.server import DraftWorker, serving_drafts
from services.worker.draft_channel import GrpcDraftChannel
from tests.harness import draft_workers as bench
from tests.harness.draft_workers import LIMITS, meet, outputs, plain, submit
from tests.harness.waiting import Clock

CALL_S = 30.0
VERIFIER = bytes(range(16))
T = TypeVar("T")


class Case(Protocol):
    """A worker, and the way to it."""

    channel: DraftChannel

    def kill(self) -> None:
        """From now on nobody is there."""

    def start(self) -> None:
        """A new life, under the same address."""

    def hold(self) -> None:
        """It does not answer, but is there."""

    def let_go(self) -> None:
        """It does."""

    def look(self, at: Callable[[DraftSessions], T]) -> T:
        """At what it keeps, behind all that it was asked; of what it is to forget it may hear later
        (draft_protocol.py)."""


class FakeCase:
    def __init__(self) -> None:
        self.channel = FakeDraftChannel("fake:1", bench.about(), bench.sessions())

    def kill(self) -> None:
        self.channel.is_away = True

    def start(self) -> None:
        self.channel.restart(bench.sessions())
        self.channel.is_away = False

    def hold(self) -> None:
        self.channel.withholds = True

    def let_go(self) -> None:
        self.channel.withholds = False
        self.channel.let_go()

    def look(self, at: Callable[[DraftSessions], T]) -> T:
        self.channel.sessions.check_integrity()
        return at(self.channel.sessions)

    def close(self) -> None:
        """Nothing is left."""


class Gated(bench.Wrapped):
    """A proposer that waits while its gate is closed."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__(bench.proposer())
        self._gate = gate

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        assert self._gate.wait(CALL_S)
        return super().propose(tasks)


class GrpcCase:
    """A worker on a loop of its own, in a thread: the test has an engine's."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._life = AsyncExitStack()
        self._worker: DraftWorker | None = None
        self._listen = "127.0.0.1:0"
        self._gate = threading.Event()
        self._gate.set()
        self.start()
        self.channel: GrpcDraftChannel = self._do(self._connect())

    def kill(self) -> None:
        self._do(self._life.aclose())

    def start(self) -> None:
        self._do(self._start())

    def hold(self) -> None:
        self._gate.clear()

    def let_go(self) -> None:
        self._gate.set()

    def look(self, at: Callable[[DraftSessions], T]) -> T:
        assert self._worker is not None
        ask = DraftRequest(
            2**64 - 1, 1, [], 1, 0, 0.0, 1.0, 0, 0.0, 0, 0
        )  # unknown: it changes nothing
        self.channel.propose(VERIFIER, [ask], CALL_S).result(CALL_S)
        return at(self._worker.thread.sessions)

    def close(self) -> None:
        self.let_go()
        self._do(self.channel.close())
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_S)
        self._loop.close()

    async def _connect(self) -> GrpcDraftChannel:
        return GrpcDraftChannel(self._listen, PLAIN)

    async def _start(self) -> None:
        limits = DraftLimits(
            max_num_sessions=LIMITS.max_num_sessions,
            max_session_bytes=LIMITS.max_session_bytes,
            catch_up_tokens=LIMITS.catch_up_tokens,
            max_call_s=CALL_S,
            drain_s=0.0,
        )
        settings = DraftSettings(
            listen=self._listen, engine=EngineConfig(model="fake"), limits=limits
        )
        self._life = AsyncExitStack()
        self._worker = await self._life.enter_async_context(
            serving_drafts(Gated(self._gate), bench.about(), settings)
        )
        self._listen = self._worker.address

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S)


@pytest.fixture(params=[FakeCase, GrpcCase], ids=["fake", "grpc"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    made = request.param()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def unguessed() -> tuple[bench.Outputs, int]:
    return plain(2, max_tokens=40)


def _ask(session: int, token_ids: Sequence[int], start: int = 0, **fields: Any) -> DraftRequest:
    made = DraftRequest(session, start, token_ids, 1, 6, 0.0, 1.0, 0, 0.0, 0, 0)
    return made._replace(**fields)


def _propose(
    case: Case, *asks: DraftRequest, verifier: bytes = VERIFIER
) -> Sequence[DraftResponse]:
    return case.channel.propose(verifier, asks, CALL_S).result(CALL_S)


def test_it_says_who_guesses(case: Case) -> None:
    assert case.channel.describe(CALL_S).result(CALL_S) == bench.about()


def test_guesses_are_those_of_the_model_itself(case: Case) -> None:
    """Greedy and sampled; of several sequences at once."""
    own = bench.proposer()
    asks, tasks = [], []
    for index in range(6):
        tokens = [3 + index, 5, 90 - index]
        heat = {"temperature": 0.4 * index, "seed": 2**64 - 1 - index}
        asks.append(_ask(index, tokens, sample_index=index, num_nodes=1 + index, **heat))
        sampling = Sampling(max_tokens=9, **heat)  # type: ignore[arg-type]
        tasks.append(DraftTask((f"r{index}", 0), tokens, 1, sampling, index, 1 + index))
    answers = _propose(case, *asks)
    for answer, draft in zip(answers, own.propose(tasks), strict=True):
        tree = draft.tree
        assert answer.is_known and len(tree)
        assert tuple(answer.token_ids) == tree.token_ids
        assert tuple(answer.parents) == tree.parents
        assert list(answer.chances) == pytest.approx(list(tree.chances), rel=1e-6)


def test_what_is_new_is_enough(case: Case) -> None:
    model = FakeModel()
    tokens = [1, 2, 3]
    start = 0
    for _ in range(20):
        (answer,) = _propose(case, _ask(1, tokens[start:], start))
        assert answer.is_known
        wanted = model.next_token(tokens)
        assert wanted in answer.token_ids
        start = len(tokens)
        tokens.append(wanted)
    assert case.look(lambda kept: (len(kept), kept.num_unknown)) in ((1, 0), (1, 1))


def test_who_does_not_know_the_text_says_so(case: Case) -> None:
    (answer,) = _propose(case, _ask(1, [3], start=2))
    assert not answer.is_known and not len(answer.token_ids)
    (answer,) = _propose(case, _ask(1, [1, 2, 3]))
    assert answer.is_known and len(answer.token_ids)


def test_a_new_life_knows_nothing(case: Case) -> None:
    assert _propose(case, _ask(1, [1, 2]))[0].is_known
    case.kill()
    with pytest.raises(Exception, match=r"."):
        _propose(case, _ask(1, [3], start=2))
    with pytest.raises(Exception, match=r"."):
        case.channel.describe(CALL_S).result(CALL_S)
    case.channel.forget(VERIFIER, [1])  # nobody hears it
    case.start()
    assert case.channel.describe(CALL_S).result(CALL_S) == bench.about()
    assert not _propose(case, _ask(1, [3], start=2))[0].is_known


def test_what_is_over_is_forgotten_and_nothing_else(case: Case) -> None:
    _propose(case, *(_ask(index, [1]) for index in range(5)))
    _propose(case, _ask(1, [1]), verifier=bytes(16))
    assert case.look(len) == 6
    case.channel.forget(VERIFIER, [1, 2, 77])
    until = time.monotonic() + CALL_S
    while (num_kept := case.look(len)) == 6 and time.monotonic() < until:
        time.sleep(0.002)
    assert num_kept == 4


def test_nonsense_is_refused_and_does_no_harm(case: Case) -> None:
    for asks, problem in (
        ([_ask(1, [97])], "token_ids"),
        ([_ask(1, [])], "token_ids"),
        ([_ask(1, [1], temperature=float("inf"))], "temperature"),
        ([_ask(1, [1]), _ask(1, [1])], "session"),
    ):
        with pytest.raises(Exception, match=problem):
            _propose(case, *asks)
    with pytest.raises(Exception, match="verifier"):
        _propose(case, _ask(1, [1]), verifier=b"short")
    assert case.look(len) == 0
    assert _propose(case, _ask(1, [1]))[0].is_known


def test_a_stream_goes_on_without_its_draft_worker_and_with_the_next_one(
    case: Case, unguessed: tuple[bench.Outputs, int]
) -> None:
    """Tokens are the same throughout; guesses end, and begin again."""
    expected, num_plain = unguessed
    clock = Clock()
    peer = DraftPeer(case.channel)
    proposer = bench.remote([peer], clock, deadline_s=CALL_S)
    meet(proposer, peer, clock)
    engine = bench.engine(proposer)
    submit(engine, 2, max_tokens=40)
    counted: dict[str, int] = {}

    def each_step(step: int) -> None:
        if step == 5:
            counted["at first"] = peer.counts.num_nodes
            case.kill()
        if step == 10:
            counted["alone"] = peer.counts.num_nodes
            assert not peer.counts.is_ready
            case.start()
            meet(proposer, peer, clock)

    found, num_steps = outputs(engine, each_step)
    assert found == expected
    assert 0 < counted["at first"] == counted["alone"] < peer.counts.num_nodes
    assert num_steps < num_plain
    assert peer.counts.num_failed == 1 and peer.counts.num_late == 0


def test_a_stream_goes_on_while_its_draft_worker_hangs(
    case: Case, unguessed: tuple[bench.Outputs, int]
) -> None:
    """No step waits longer than it may; when answers come again, there are guesses again."""
    expected, _ = unguessed
    clock = Clock()
    peer = DraftPeer(case.channel)
    # However slow this machine is, the late answer is waited for.
    proposer = bench.remote([peer], clock, deadline_s=CALL_S, give_up_s=CALL_S)
    meet(proposer, peer, clock)
    engine = bench.engine(proposer)
    submit(engine, 2, max_tokens=40)
    counted: dict[str, int] = {}

    def each_step(step: int) -> None:
        if step == 5:
            counted["at first"] = peer.counts.num_nodes
            proposer._deadline_s = 0.001
            case.hold()
        if step == 10:
            counted["alone"] = peer.counts.num_nodes
            case.let_go()
            for worker in proposer._endpoints:
                assert worker.state is EndpointState.LATE and worker.late is not None
                wait([worker.late], CALL_S)
            proposer._deadline_s = CALL_S

    found, _ = outputs(engine, each_step)
    assert found == expected
    assert 0 < counted["at first"] == counted["alone"] < peer.counts.num_nodes
    assert peer.counts.num_late == 1
