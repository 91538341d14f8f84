"""A model's own sampling defaults, as transformers would read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoints.errors import CheckpointError
from checkpoints.sampling_defaults import SamplingDefaults, read_sampling_defaults


def read(folder: Path, **config: object) -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(config))
    return read_sampling_defaults(folder)


def test_without_sampling_it_is_greedy(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingDefaults(0.0, 1.0, 0, 0.0)
    assert read(tmp_path, temperature=0.7) == SamplingDefaults()


def test_with_sampling_it_is_what_the_file_says(tmp_path: Path) -> None:
    assert read(tmp_path, do_sample=True) == SamplingDefaults(1.0, 1.0, 0, 0.0)
    found = read(tmp_path, do_sample=True, temperature=0.7, top_p=0.8, top_k=20, min_p=0.05)
    assert found == SamplingDefaults(0.7, 0.8, 20, 0.05)


@pytest.mark.parametrize("config", [{"top_p": 0}, {"temperature": "hot"}, {"top_k": -1}])
def test_what_makes_no_sense_is_refused(tmp_path: Path, config: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read(tmp_path, do_sample=True, **config)
