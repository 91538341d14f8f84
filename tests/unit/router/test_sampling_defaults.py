"""What a field means that the client left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from process.settings import SettingsError
from protos import common_pb2
from services.router.request import SamplingDefaults, fill_sampling_defaults, read_defaults


def _read(folder: Path, config: Any) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return read_defaults(folder)


def test_greedy_unless_the_model_says_otherwise(tmp_path: Path) -> None:
    assert read_defaults(tmp_path) == SamplingDefaults(0.0, 1.0, 0, 0.0)
    assert _read(tmp_path, {"temperature": 0.7}) == SamplingDefaults()
    sampled = _read(tmp_path, {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8})
    assert sampled == SamplingDefaults(0.7, 0.8, 20, 0.0)
    assert _read(tmp_path, {"do_sample": True, "top_k": None}) == SamplingDefaults(1.0)


@pytest.mark.parametrize(
    "config",
    [
        {"do_sample": True, "temperature": "hot"},
        {"do_sample": True, "top_p": 0},
        {"do_sample": True, "top_k": -1},
        {"do_sample": True, "min_p": float("nan")},
    ],
)
def test_nonsense_stops_the_start(config: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"generation_config\.json"):
        _read(tmp_path, config)


def test_a_broken_file_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(SettingsError, match=r"generation_config\.json: cannot be read"):
        read_defaults(tmp_path)


def test_asked_wins_and_all_is_filled() -> None:
    asked = common_pb2.SamplingParams(
        temperature=0.0, stop=["x"], include_stop_text=True, n=1, ignore_eos=True
    )
    filled = fill_sampling_defaults(
        asked, SamplingDefaults(0.7, 0.8, 20, 0.1), max_tokens=9, seed=2**64 - 1
    )
    assert filled.temperature == 0.0 and filled.HasField("temperature")
    assert (filled.top_p, filled.top_k, filled.min_p) == (0.8, 20, 0.1)
    assert (filled.max_tokens, filled.seed, filled.ignore_eos) == (9, 2**64 - 1, True)
    assert not filled.stop and not filled.include_stop_text and filled.n == 1
    assert asked.stop  # the request itself is untouched
