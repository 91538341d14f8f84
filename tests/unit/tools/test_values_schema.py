"""What the chart's schema takes of a draft worker's engine is what such a worker heeds; the rest is
refused by both, by name."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.speculation import loader
from engine.speculation.config import SpeculationConfig
from engine.testing.fake_model import FakeModel
from kvstore.config import KvStoreSettings
from process.settings import SettingsError
from services.draft.config import HEEDED, HEEDED_SPECULATION, DraftSettings
from tools.gen_values_schema import MANAGED, of_settings

PLAIN = EngineConfig(model="small", device="cpu")
OTHER = EngineConfig(
    model="other",
    device="cuda",
    dtype="bfloat16",
    decoder="own",
    weight_dtype="fp8_e4m3",
    block_size=8,
    max_num_tokens_per_step=64,
    max_num_running=2,
    context_window=64,
    num_threads=1,
    speculation=SpeculationConfig(expansion=(1,), draft_kv_bytes=1 << 20, max_num_nodes=3),
)
"""All that is heeded."""


def _others(plain: Any) -> list[tuple[str, Any]]:
    """A value for each field, unlike its own; it may be out of range."""
    found = []
    for one in dataclasses.fields(plain):
        value = getattr(plain, one.name)
        if isinstance(value, bool):
            other: Any = not value
        elif isinstance(value, int | float):
            other = type(value)(value + 1)
        elif isinstance(value, str):
            other = f"{value} else"
        else:
            other = ("else",)
        found.append((one.name, other))
    return found


def _with(plain: Any, name: str, value: Any) -> Any:
    """Without a look at what fits."""
    made = dataclasses.replace(plain)
    object.__setattr__(made, name, value)
    return made


def test_a_draft_worker_refuses_what_the_chart_does() -> None:
    own = {"engine.model", "engine.device"}  # the chart sets them
    _, managed = MANAGED["draft"]
    refused = {key for key in managed if key.startswith("engine.")} - own
    for name, value in _others(PLAIN):
        if name not in HEEDED:
            assert f"engine.{name}" in refused
            with pytest.raises(SettingsError, match=f"^engine.{name}: a draft worker does not"):
                DraftSettings(engine=_with(PLAIN, name, value))
    for name, value in _others(SpeculationConfig()):
        if name not in HEEDED_SPECULATION:
            assert f"engine.speculation.{name}" in refused
            speculation = _with(SpeculationConfig(), name, value)
            with pytest.raises(SettingsError, match=rf"^engine.speculation(.{name})?: a draft"):
                DraftSettings(engine=_with(PLAIN, "speculation", speculation))
    heeded = {f"engine.{name}" for name in HEEDED}
    heeded |= {f"engine.speculation.{name}" for name in HEEDED_SPECULATION}
    assert not heeded & refused


def test_what_it_takes_gets_to_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[EngineConfig] = []

    def model_of(config: EngineConfig, **_: Any) -> FakeModel:
        told.append(config)
        return FakeModel(block_size=8)

    monkeypatch.setattr(loader, "load_model", model_of)
    settings = DraftSettings(engine=OTHER)
    proposer = loader.load_draft_model(settings.engine)
    for name in HEEDED:
        assert getattr(OTHER, name) != getattr(PLAIN, name), name
        if name != "speculation":
            assert operator.attrgetter(name)(told[0]) == getattr(OTHER, name), name
    assert told[0].speculation.max_num_nodes == 3
    assert proposer._expansion == (1,)


def test_the_schema_has_the_ranges_of_the_settings() -> None:
    made = of_settings(KvStoreSettings, ())["properties"]
    share = made["demote_below_free"]
    assert (share["exclusiveMinimum"], share["maximum"]) == (0, 1)
    assert made["file_tier_bytes"]["minimum"] == 1 and made["drain_s"]["minimum"] == 0
