"""What the chart's schema refuses of a draft worker's engine, such a worker would not heed."""

from __future__ import annotations

import operator
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.speculation import load
from engine.speculation.config import NgramConfig, SpeculationConfig
from tools.gen_values_schema import MANAGED

PLAIN = EngineConfig(model="small", device="cpu")
OTHER = EngineConfig(
    model="small",
    device="cpu",
    context_window=64,
    weight_dtype="fp8_e4m3",
    kv_dtype="int8",
    tensor_parallel=2,
    pipeline_parallel=2,
    exact=True,
    overlap=False,
    speculation=SpeculationConfig(
        drafters=("ngram",),
        draft_models=("smaller",),
        draft_heads=("heads",),
        draft_workers=("x:1",),
        draft_deadline_s=1.0,
        acceptance="naive",
        always=True,
        ngram=NgramConfig(max_matches=2),
    ),
)


class Told(Exception):
    """In place of a model."""


def test_a_draft_worker_heeds_nothing_that_the_chart_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def model_of(config: EngineConfig, **_: Any) -> None:
        raise Told(config)

    monkeypatch.setattr(load, "load_model", model_of)
    _, managed = MANAGED["draft"]
    own = {"engine.model", "engine.device"}  # the chart sets them
    keys = [key for key in managed if key.startswith("engine.") and key not in own]
    for key in keys:
        value = operator.attrgetter(key.removeprefix("engine."))
        assert value(PLAIN) != value(OTHER), key
    heeded = []
    for config in (PLAIN, OTHER):
        with pytest.raises(Told) as told:
            load.load_draft_model(config)
        heeded.append(told.value.args[0])
    assert heeded[0] == heeded[1]
