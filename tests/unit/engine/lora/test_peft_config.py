"""adapter_config.json: ranks, scales and targets as PEFT defines them; the rest refused by name."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidAdapter
from engine.lora.adapter import CONFIG, Pattern, parse_config, read_config

Q0, V1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"


def _values(**others: Any) -> dict[str, Any]:
    """As PEFT 0.17 writes it."""
    return {
        "alpha_pattern": {}, "auto_mapping": None, "base_model_name_or_path": "a/b", "bias": "none",
        "corda_config": None, "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False,
        "inference_mode": True, "init_lora_weights": True, "layer_replication": None,
        "layers_pattern": None, "layers_to_transform": None, "loftq_config": {}, "lora_alpha": 16,
        "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None,
        "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA",
        "qalora_group_size": 16, "r": 8, "rank_pattern": {}, "revision": None,
        "target_modules": ["q_proj", "v_proj"], "target_parameters": None, "task_type": "CAUSAL_LM",
        "trainable_token_indices": None, "use_dora": False, "use_qalora": False,
        "use_rslora": False,
    } | others  # fmt: skip


def test_rank_and_scale() -> None:
    config = parse_config(_values())
    assert config.rank_of(Q0) == 8
    assert config.scale_of(Q0) == 2.0
    assert parse_config(_values(use_rslora=True)).scale_of(Q0) == 16 / math.sqrt(8)


def test_patterns_give_modules_their_own_rank_and_alpha() -> None:
    config = parse_config(
        _values(rank_pattern={"q_proj": 4, r"layers\.1\..*": 2}, alpha_pattern={r".*\.v_proj": 3.0})
    )
    assert (config.rank_of(Q0), config.rank_of(V1)) == (4, 2)
    assert (config.scale_of(Q0), config.scale_of(V1)) == (4.0, 1.5)


@pytest.mark.parametrize(
    ("fields", "on", "off"),
    [
        ({"target_modules": ["q_proj"]}, [Q0], [V1, "model.layers.0.self_attn.eq_proj"]),
        ({"target_modules": "all-linear"}, [Q0, V1], []),
        ({"target_modules": r".*\.layers\.1\..*(q|v)_proj"}, [V1], [Q0]),
        ({"target_modules": "q_proj"}, [], [Q0]),  # a pattern matches the whole name
        ({"layers_to_transform": [1]}, [V1], [Q0]),
        ({"layers_to_transform": 0}, [Q0], [V1]),
        ({"layers_to_transform": [0], "layers_pattern": "layers"}, [Q0], [V1]),
        ({"layers_to_transform": [0], "layers_pattern": ["blocks"]}, [], [Q0]),
        ({"exclude_modules": ["v_proj"]}, [Q0], [V1]),
        ({"exclude_modules": r".*\.1\..*", "target_modules": "all-linear"}, [Q0], [V1]),
        ({"target_modules": [Q0], "layers_to_transform": [1]}, [Q0], [V1]),
    ],
)
def test_targets(fields: dict[str, Any], on: list[str], off: list[str]) -> None:
    config = parse_config(_values(**fields))
    assert [name for name in (Q0, V1, *off) if config.is_target(name)] == on


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("task_type", "SEQ_CLS"),
        ("use_dora", True),
        ("bias", "all"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("trainable_token_indices", [1]),
        ("layer_replication", [[0, 4], [2, 5]]),
        ("alora_invocation_tokens", [5, 6]),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", 1.5),
        ("a_field_of_the_future", {"x": 1}),
        ("r", 0),
        ("r", "8"),
        ("r", None),
        ("lora_alpha", None),
        ("lora_alpha", float("nan")),
        ("target_modules", None),
        ("target_modules", [1]),
        ("target_modules", "(a*)*b"),
        ("target_modules", ".*" * 17),
        ("target_modules", ".?" * 100 + "X"),
        ("target_modules", ".{0,99}" * 70),
        ("target_modules", ".{5,2}"),
        ("target_modules", ".{0,999}"),
        ("target_modules", "(" * 40 + ")" * 40),
        ("target_modules", r"(q|v)\1"),
        ("target_modules", "(?i)Q_PROJ"),
        ("target_modules", "(?=q)q_proj"),
        ("target_modules", "*q"),
        ("target_modules", "q)"),
        ("target_modules", "[z-a]"),
        ("target_modules", "[[a]]"),
        ("lora_alpha", 10**400),
        ("target_modules", "x" * 600),
        ("target_modules", "("),
        ("rank_pattern", 7),
        ("rank_pattern", {"(": 3}),
        ("rank_pattern", {"x{99999999999}": 3}),
        ("rank_pattern", {f"(a|{i})": 3 for i in range(65)}),
        ("alpha_pattern", {"(?P<a>q)": 3.0}),
        ("alpha_pattern", {"(.+)+": 3.0}),
        ("layers_to_transform", ["0"]),
        ("layers_pattern", "(a|b)*"),
        ("layers_pattern", "(layers)"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidAdapter) as raised:
        parse_config(_values(**{field: value}))
    assert raised.value.field == field
    assert "\n" not in str(raised.value)


def test_a_nested_field_is_named() -> None:
    with pytest.raises(InvalidAdapter, match=r"^rank_pattern\.q_proj: 0"):
        parse_config(_values(rank_pattern={"q_proj": 0}))


def test_a_usual_pattern_of_a_training_library_is_taken() -> None:
    """Four lazy repeats and groups of words: as published adapters for language parts have it."""
    pattern = (
        r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|k_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))"
    )
    assert parse_config(_values(target_modules=pattern)).is_target(Q0)


@pytest.mark.parametrize(
    ("pattern", "is_match"),
    [
        (r"model\.layers\.\d+\.self_attn\.(q|v)_proj", True),
        (r".*\.(q_proj|k_proj)$", True),
        (r"^(?:.*\.)?(?:self_attn|mlp)\.(?:q_proj|up_proj)", True),
        (r"(?:model\.)?layers\.(0|[3-9])\.self_attn\.[qkv]_proj", True),
        (r".*self_attn.*(q|k|v|o)_proj", True),
        # What a matcher that goes back would not get to the end of:
        ("(.|.)" * 60, False),
        ("(.|.)" * len(Q0), True),
        (".*.*.*.*.*.*.*.*X", False),
        (".{0,99}" * 16, True),
        ("(a|a.|.|..)*X", False),
    ],
)
def test_patterns_are_matched_in_bounded_time(pattern: str, is_match: bool) -> None:
    assert parse_config(_values(target_modules=pattern)).is_target(Q0) == is_match


ATOMS = st.sampled_from(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\w", "(a|b)", "(?:ab|a|)", r"\b"])
REPEATS = st.sampled_from(["", "", "*", "+", "?", "*?", "{2}", "{1,}", "{0,2}"])


@given(
    rows=st.lists(st.lists(st.tuples(ATOMS, REPEATS), max_size=4), min_size=1, max_size=2),
    name=st.text("ab.", max_size=6),
)
def test_patterns_match_what_pythons_match(rows: list[list[tuple[str, str]]], name: str) -> None:
    text = "|".join(
        "".join(atom + ("" if atom == r"\b" else repeat) for atom, repeat in row) for row in rows
    )
    pattern = Pattern.parse(text)
    assert pattern.is_whole(name) == (re.fullmatch(text, name) is not None)
    assert pattern.is_end(name) == (re.match(rf"(.*\.)?({text})$", name) is not None)


def test_many_plain_names_may_have_ranks() -> None:
    """As adapters whose ranks were found by training have them."""
    names = {f"model.layers.{i}.self_attn.q_proj": i + 1 for i in range(99)}
    config = parse_config(_values(rank_pattern=names))
    assert [config.rank_of(name) for name in names] == list(names.values())


def test_what_is_no_file_is_no_config(tmp_path: Path) -> None:
    """A pipe would be read for ever."""
    os.mkfifo(tmp_path / CONFIG)
    with pytest.raises(InvalidAdapter, match="has none"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["", "[1]", "{", "\udcff", "[" * 100_000])
def test_no_config_no_adapter(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidAdapter, match=CONFIG):
        read_config(tmp_path)
    (tmp_path / CONFIG).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InvalidAdapter, match=CONFIG):
        read_config(tmp_path)


def test_a_huge_config_is_not_read(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps(_values(revision="x" * (1 << 20))))
    with pytest.raises(InvalidAdapter, match="above"):
        read_config(tmp_path)
