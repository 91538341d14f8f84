"""Settings of speculation that are out of range are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from engine.speculation.config import NgramConfig, SpeculationConfig
from process.settings import SettingsError


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"drafters": ("ngrams",)}, "drafters: 'ngrams' is none of ngram"),
        ({"drafters": ("ngram", "ngram")}, "named twice"),
        ({"draft_heads": ("x", "x")}, "draft_heads: one is named twice"),
        ({"draft_workers": ("nowhere",)}, "draft_workers: 'nowhere' is not host:port"),
        ({"draft_workers": ("a:1", "a:1")}, "named twice"),
        ({"draft_deadline_s": 0.0}, "draft_deadline_s"),
        ({"draft_kv_bytes": 0}, "draft_kv_bytes"),
        ({"max_num_nodes": 0}, "max_num_nodes"),
        ({"expansion": ()}, "expansion"),
        ({"expansion": (2, 0)}, "expansion"),
        ({"acceptance": "mss"}, "acceptance: 'mss' is none of exact, multi_step"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        SpeculationConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [({"max_length": 2, "min_length": 3}, "min_length"), ({"max_matches": 0}, "max_matches")],
    ids=str,
)
def test_settings_of_lookups_out_of_range_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        NgramConfig(**fields)
