"""EngineCore under random orders of its calls: every ask ends exactly once, with the tokens that it
would have alone; the laws hold after each call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import AdapterInUse, NoBlocks, RankFailed
from engine.lora.manager import AdapterInfo
from engine.request import Request, Sampling
from engine.testing.fake_model import FakeModel
from engine_client import engine_core
from engine_client.engine_core import EngineCore
from engine_client.interface import Ask, News
from tests.conftest import examples

PROMPTS = st.lists(st.integers(1, 96), min_size=1, max_size=30)


class CoreMachine(RuleBasedStateMachine):
    """Asks come, end and are ended in any order."""

    asks = Bundle("asks")

    def __init__(self) -> None:
        super().__init__()
        self.model = FakeModel(context_window=96)
        config = EngineConfig(num_blocks=40, max_num_running=2, max_num_tokens_per_step=8)
        self.core = EngineCore(LLMEngine(config, self.model))
        self.submitted: dict[str, Ask] = {}
        self.outputs: dict[tuple[str, int], list[int]] = {}
        self.ended: set[tuple[str, int]] = set()
        self.over: Counter[str] = Counter()

    @rule(
        target=asks,
        prompt=PROMPTS,
        max_tokens=st.integers(1, 12),
        num_samples=st.integers(1, 2),
        priority=st.integers(0, 2),
    )
    def submit(self, prompt: list[int], max_tokens: int, num_samples: int, priority: int) -> str:
        name = f"ask-{len(self.submitted)}"
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        ask = Ask(name, tuple(prompt), sampling, num_samples=num_samples, priority=priority)
        self.submitted[name] = ask
        self.core.submit(ask)
        return name

    @rule(name=asks)
    def cancel(self, name: str) -> None:
        self.core.cancel(name)

    @rule(name=asks, index=st.integers(0, 1))
    def end_sample(self, name: str, index: int) -> None:
        self.core.end_sample(name, index)
        self.ended.add((name, index))

    @precondition(lambda self: self.core.has_work())
    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            for news in self.core.step():
                self.take(news)

    def take(self, news: News) -> None:
        assert self.over[news.request_id] == 0, "news after the last"
        self.over[news.request_id] += news.is_over
        key = (news.request_id, news.sample_index)
        output = self.outputs.setdefault(key, [])
        output += news.token_ids
        ask = self.submitted[news.request_id]
        expected = self.model.generate(ask.prompt_token_ids, ask.sampling.max_tokens)
        assert output == expected[: len(output)]
        if news.finish_reason is not None:
            assert output == expected
        if news.failure is not None:
            assert news.failure.kind == "Cancelled" and news.is_over and not news.token_ids

    @invariant()
    def laws(self) -> None:
        self.core.check_integrity()

    def teardown(self) -> None:
        for _ in range(5_000):
            if not self.core.has_work():
                break
            self.step(1)
        assert set(self.submitted) == {name for name, count in self.over.items() if count == 1}
        assert self.core.stats().num_referenced_blocks == 0
        self.core.check_integrity()


TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=examples(25), stateful_step_count=30, deadline=None)


def test_an_engine_without_room_is_asked_again() -> None:
    """NoCapacity is no end while others run: it is tried again when they have gone."""

    class Full(LLMEngine):
        num_refused = 0

        def submit(self, request: Request) -> None:
            if self.stats().num_waiting + self.stats().num_running >= 2:
                self.num_refused += 1
                raise NoBlocks("full")
            super().submit(request)

    engine = Full(EngineConfig(num_blocks=80), FakeModel())
    served = EngineCore(engine)
    for index in range(6):
        sampling = Sampling(max_tokens=3, ignore_eos=True)
        served.submit(Ask(f"{index}", (5, index + 1), sampling))
    over: list[str] = []
    while served.has_work():
        served.check_integrity()
        over += [news.request_id for news in served.step() if news.is_over]
    assert sorted(over) == [str(index) for index in range(6)] and engine.num_refused > 0


def test_an_engine_without_room_for_anyone_says_so() -> None:
    class Full(LLMEngine):
        def submit(self, request: Request) -> None:
            raise NoBlocks("full")

    served = EngineCore(Full(EngineConfig(num_blocks=80), FakeModel()))
    served.submit(Ask("a", (5,), Sampling(max_tokens=3)))
    (news,) = served.step()
    assert news.failure is not None and news.failure.kind == "NoBlocks"


def test_an_ask_that_trips_the_engine_hears_of_it() -> None:
    """It is between the queue and the engine when the engine fails."""

    class Tripping(LLMEngine):
        def submit(self, request: Request) -> None:
            raise RuntimeError("tripped")

    served = EngineCore(Tripping(EngineConfig(num_blocks=80), FakeModel()))
    for name in ("a", "b"):
        served.submit(Ask(name, (5,), Sampling(max_tokens=3)))
    news = served.step()
    assert sorted(each.request_id for each in news) == ["a", "b"]
    for each in news:
        assert each.is_over and each.failure is not None
        assert "RuntimeError: tripped" in each.failure.message


def test_an_engine_that_lost_a_process_fails_though_nobody_asks() -> None:
    engine = LLMEngine(EngineConfig(num_blocks=80), FakeModel())
    served = EngineCore(engine)
    served.check_alive()
    assert served.failure is None

    def gone() -> None:
        raise RankFailed("rank 1 ended (signal 9)")

    engine.check_alive = gone  # type: ignore[method-assign]
    served.check_alive()
    assert "rank 1 ended (signal 9)" in str(served.failure)


def test_cancelled_asks_do_not_pile_up_in_the_queue() -> None:
    served = EngineCore(LLMEngine(EngineConfig(num_blocks=80), FakeModel()))
    served.submit(Ask("last", (5,), Sampling(max_tokens=3), priority=-1))
    for index in range(1_000):
        served.submit(Ask(f"{index}", (5,), Sampling(max_tokens=3)))
        served.cancel(f"{index}")
        served.check_integrity()
    assert len(served._queue) <= 2 + 64
    over = [news for _ in range(9) for news in served.step() if news.request_id == "last"]
    assert over[-1].is_over and over[-1].failure is None


@pytest.fixture
def adapted() -> Iterator[LLMEngine]:
    """An engine whose adapters are names and digests, changed by loading a "folder"."""
    digests: dict[str, str] = {}

    class Adapted(LLMEngine):
        def load_adapter(self, name: str, folder: Path, progress: object = None) -> AdapterInfo:
            digests[name] = folder.name * 16
            return AdapterInfo(name, digests[name], 1, 1, ())

        def unload_adapter(self, name: str) -> None:
            del digests[name]

        def adapters(self) -> tuple[AdapterInfo, ...]:
            return tuple(AdapterInfo(name, each, 1, 1, ()) for name, each in digests.items())

        def submit(self, request: Request) -> None:
            super().submit(replace(request, adapter=""))  # the model itself has none

    engine = Adapted(EngineConfig(num_blocks=80, max_num_running=1), FakeModel())
    yield engine
    engine.check_integrity()
    engine.close()


def test_an_adapter_that_asks_wait_for_stays(adapted: LLMEngine) -> None:
    served = EngineCore(adapted)
    served.load_adapter("style", "ab")
    served.submit(Ask("a", (5,), Sampling(max_tokens=2), adapter="style"))
    with pytest.raises(AdapterInUse, match="1 asks"):
        served.unload_adapter("style")
    assert served.adapters()
    served.cancel("a")
    served.unload_adapter("style")
    assert not served.adapters()


def test_an_ask_is_not_served_by_what_took_its_adapters_name(adapted: LLMEngine) -> None:
    served = EngineCore(adapted)
    for folder, failure in (("ab", None), ("cd", "InvalidArgument")):
        served.load_adapter("style", "ab")
        served.submit(Ask(folder, (5,), Sampling(max_tokens=2, ignore_eos=True), adapter="style"))
        served.load_adapter("style", folder)
        last = [news for _ in range(5) for news in served.step()][-1]
        assert last.is_over and (last.failure and last.failure.kind) == failure
        assert last.failure is None or last.failure.field == "adapter"
    served.check_integrity()


def test_the_engine_gets_no_more_than_it_should_choose_from() -> None:
    """Its work per step must not grow with what is asked."""
    engine = LLMEngine(EngineConfig(num_blocks=80, max_num_running=2), FakeModel())
    served = EngineCore(engine)
    for index in range(100):
        served.submit(Ask(f"{index}", (5,), Sampling(max_tokens=9, ignore_eos=True)))
    served.step()
    stats = engine.stats()
    assert stats.num_waiting + stats.num_running == engine_core.NUM_AHEAD * 2
