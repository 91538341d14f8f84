"""Which row of logits each draw of a step is made from."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.request import Beam, Request, Sampling
from engine.testing.fake_model import FakeModel
from tests.harness.engines import all_events, hasher


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4])
@pytest.mark.parametrize("num_beams", [2, 3])
def test_samples_are_drawn_from_their_own_rows_beside_beams(
    num_samples: int, num_beams: int
) -> None:
    """Beams have rows without draws, a prompt that forks has draws without rows: where as many are
    missing as are too many, draw i is still not row i's."""
    model = FakeModel(context_window=256)
    engine = LLMEngine(EngineConfig(num_blocks=200), model)
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    searched = Request("beams", (5, 6, 7), sampling, hasher(), beam=Beam(num_beams))
    engine.reserve(searched)
    engine.start("beams")
    engine.step()
    prompt = (9, 8, 7, 6, 5)
    engine.reserve(Request("drawn", prompt, sampling, hasher(), num_samples=num_samples))
    engine.start("drawn")
    outputs: dict[int, list[int]] = {index: [] for index in range(num_samples)}
    for event in all_events(engine):
        assert event.error is None
        if event.request_id == "drawn":
            outputs[event.sample_index] += event.token_ids
    expected = model.generate(prompt, 12)
    assert outputs == {index: expected for index in range(num_samples)}


@pytest.mark.parametrize("clears_entered", [True, False])
def test_blocks_are_cleared_for_models_that_read_them(
    clears_entered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's last block always, as others may get it with the prompt; those that a decode
    enters only for a model that reads what was not written."""
    model = FakeModel(block_size=4, context_window=64)
    model.reads_unwritten = clears_entered
    engine = LLMEngine(EngineConfig(num_blocks=16, overlap=False), model)
    cleared: list[int] = []
    monkeypatch.setattr(engine.kv, "clear", cleared.append)
    sampling = Sampling(max_tokens=10, ignore_eos=True)
    engine.submit(Request("r", tuple(range(1, 7)), sampling, hasher()))
    engine.step()
    block_ids = engine.block_ids("r")
    assert cleared == [block_ids[1]]  # of tokens 4 to 7, two of which are there
    while engine.has_work():
        engine.step()
    entered = list(block_ids[2:4]) if clears_entered else []  # at tokens 8 and 12
    assert cleared == [block_ids[1], *entered]
