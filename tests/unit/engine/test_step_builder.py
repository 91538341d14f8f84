"""Which row of logits each draw of a step is made from."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.fake import FakeModel
from engine.loop import Engine
from engine.request import Beam, Request, Sampling
from tests.unit.engine.conftest import hasher


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4])
@pytest.mark.parametrize("num_beams", [2, 3])
def test_samples_are_drawn_from_their_own_rows_beside_beams(
    num_samples: int, num_beams: int
) -> None:
    """Beams have rows without draws, a prompt that forks has draws without rows: where as many are
    missing as are too many, draw i is still not row i's."""
    model = FakeModel(context_window=256)
    engine = Engine(EngineConfig(num_blocks=200), model)
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    searched = Request("beams", (5, 6, 7), sampling, hasher(), beam=Beam(num_beams))
    engine.reserve(searched)
    engine.start("beams")
    engine.step()
    prompt = (9, 8, 7, 6, 5)
    engine.reserve(Request("drawn", prompt, sampling, hasher(), num_samples=num_samples))
    engine.start("drawn")
    outputs: dict[int, list[int]] = {index: [] for index in range(num_samples)}
    while engine.has_work():
        for event in engine.step().events:
            assert event.error is None
            if event.request_id == "drawn":
                outputs[event.sample_index] += event.token_ids
        engine.check_integrity()
    expected = model.generate(prompt, 12)
    assert outputs == {index: expected for index in range(num_samples)}
