"""What the host does while the device computes: hashes are made between the forward pass and the
read of its draws, so that nothing is hashed while the device waits; and an error there spoils
nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.request import Request, Sampling
from engine.sampling.sampler import PendingSample
from engine.testing.fake_model import FakeModel
from tests.harness.engines import all_steps, hasher

SIZE = 4
BUDGET = 40


def _engine(preemption: str = "never") -> LLMEngine:
    config = EngineConfig(
        num_blocks=256,
        max_num_tokens_per_step=BUDGET,
        max_num_running=12,
        preemption=preemption,
    )
    return LLMEngine(config, FakeModel(block_size=SIZE))


def _request(number: int, hash_block: Callable[[bytes, Sequence[int]], bytes]) -> Request:
    prompt = tuple((number * 31 + at * 7) % 90 + 1 for at in range(17))
    return Request(f"r{number}", prompt, Sampling(max_tokens=9, ignore_eos=True), hash_block)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of every engine: "forward", "draw", "hash", in their order."""
    told: list[str] = []
    forward, draw = FakeModel.forward, PendingSample.result

    def logged_forward(model: FakeModel, batch: Any) -> Any:
        told.append("forward")
        return forward(model, batch)

    def logged_draw(*args: Any) -> Any:
        told.append("draw")
        return draw(*args)

    monkeypatch.setattr(FakeModel, "forward", logged_forward)
    monkeypatch.setattr(PendingSample, "result", logged_draw)
    return told


@pytest.mark.parametrize("preemption", ["never", "recompute"])
def test_nothing_is_hashed_while_the_device_waits(log: list[str], preemption: str) -> None:
    """Of twenty prompts at once, after the first step, which nothing comes before. Their draws are
    read when `draw` is logged: what follows until the next forward pass keeps a device waiting."""

    def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
        log.append("hash")
        return hasher()(parent, token_ids)

    engine = _engine(preemption)
    for number in range(20):
        engine.submit(_request(number, hash_block))
    engine.step()
    assert log.index("forward") < log.index("draw")
    del log[: log.index("forward")]
    all_steps(engine)
    assert "hash" in log
    waits = False
    for what in log:
        waits = what == "draw" or (waits and what != "forward")
        assert not (waits and what == "hash")


def test_no_more_of_who_comes_next_is_hashed_than_is_computed() -> None:
    """A short step is not waited for until all prompts are hashed."""
    num_hashed = 0

    def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
        nonlocal num_hashed
        num_hashed += 1
        return hasher()(parent, token_ids)

    engine = _engine()
    for number in range(20):
        engine.submit(_request(number, hash_block))
    scheduler = engine._scheduler
    line = scheduler.next_in_line()
    assert [one.request.request_id for one in line] == [f"r{number}" for number in range(20)]
    for num_tokens in (1, SIZE, 2 * SIZE + 3):
        num_hashed = 0
        scheduler.precompute_block_hashes([(line[0], num_tokens)])
        assert num_hashed <= 2 * (num_tokens // SIZE)  # of its own, and of others
    num_steps = 0
    while any(len(one.chain_hashes) < 4 for one in line):
        num_hashed = 0
        scheduler.precompute_block_hashes([(line[0], 4 * SIZE)])
        assert 0 < num_hashed <= 2 * 4
        num_steps += 1
    assert num_steps >= 10


def _failing(times: Iterator[bool]) -> Callable[[bytes, Sequence[int]], bytes]:
    def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
        if next(times, False):
            raise RuntimeError("no hash today")
        return hasher()(parent, token_ids)

    return hash_block


def test_a_hasher_that_fails_leaves_every_sequence_as_it_was(seed: int) -> None:
    """The step is done again, and nobody's tokens differ."""
    model = FakeModel(block_size=SIZE)
    engine = _engine()
    # Of the second block that is hashed: the first step hashes four for the prefix cache alone.
    engine.submit(_request(seed % 7, _failing(iter([False] * 4 + [True, False, True]))))
    token_ids: list[int] = []
    num_failed = 0
    while engine.has_work():
        before = engine.stats().num_computed_tokens, engine.stats().num_output_tokens
        try:
            events = engine.step().events
        except RuntimeError:
            num_failed += 1
            assert before == (engine.stats().num_computed_tokens, engine.stats().num_output_tokens)
        else:
            token_ids += [token_id for event in events for token_id in event.token_ids]
        engine.check_integrity()
    assert num_failed == 2
    assert token_ids == model.generate(_request(seed % 7, hasher()).prompt_token_ids, 9)
