"""The values at the engine's surface: states, settings, fingerprints."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
from pathlib import Path

import pytest

import engine.config
import engine.request
from engine.config import EngineConfig
from engine.models.loader import fingerprint, normalised_config
from engine.request import ALLOWED, Request, RequestState, Sampling
from process.settings import SettingsError


def test_every_state_can_be_aborted_and_the_ends_are_ends() -> None:
    ends = {RequestState.FINISHED, RequestState.ABORTED}
    assert set(ALLOWED) == set(RequestState)
    for state, after in ALLOWED.items():
        assert (state in ends) == (after == frozenset())
        assert state in ends or RequestState.ABORTED in after


def test_whoever_makes_a_request_knows_the_range_of_its_tokens() -> None:
    made = Request("r", (7, 3, 96, 5), Sampling(max_tokens=1), block_hasher=lambda *_: b"")
    assert made.token_id_range == (3, 96)
    assert dataclasses.replace(made, prompt_token_ids=(-1,)).token_id_range == (-1, -1)
    assert dataclasses.replace(made, prompt_token_ids=(2**40, 1)).token_id_range == (1, 2**40)
    assert dataclasses.replace(made, prompt_token_ids=()).token_id_range == (0, 0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"device": "tpu"}, "device: 'tpu'"),
        ({"dtype": "float16"}, "dtype: 'float16'"),
        ({"block_size": 0}, "block_size: .* 0"),
        ({"num_blocks": -1}, "num_blocks: .*-1"),
        ({"num_threads": -2}, "num_threads: .*-2"),
        ({"max_num_running": 65, "max_num_tokens_per_step": 64}, "max_num_running: 65"),
    ],
)
def test_settings_out_of_range_are_named(fields: dict[str, int], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        EngineConfig(**fields)  # type: ignore[arg-type]


def test_every_setting_says_what_it_means() -> None:
    source = Path(inspect.getfile(engine.config)).read_text()
    (body,) = (n.body for n in ast.parse(source).body if isinstance(n, ast.ClassDef))
    documented = {
        field.target.id
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
    }
    assert documented == {field.name for field in dataclasses.fields(EngineConfig)}


PARTS = {
    "weights_digest": "aa",
    "config": {"hidden_size": 8},
    "tokenizer_digest": "bb",
    "layout": "cc",
}


@pytest.mark.parametrize(
    "other",
    [
        {"weights_digest": "ab"},
        {"config": {"hidden_size": 9}},
        {"tokenizer_digest": "bc"},
        {"layout": "cd"},
        {"weights_digest": "aab", "tokenizer_digest": "b"},  # parts do not run into one another
    ],
)
def test_each_part_changes_the_fingerprint(other: dict[str, object]) -> None:
    assert fingerprint(**(PARTS | other)) != fingerprint(**PARTS)  # type: ignore[arg-type]


def test_who_saved_a_config_and_in_which_order_does_not_count() -> None:
    one = {"a": 1, "b": [1, 2], "transformers_version": "5.0", "_name_or_path": "x"}
    two = {"b": [1, 2], "a": 1, "transformers_version": "5.9"}
    assert normalised_config(one) == normalised_config(two)
    assert normalised_config(one) != normalised_config(two | {"b": [2, 1]})
