"""`baton models`: what is served, by which route, and why something is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton import cli
from checkpoints.architectures import PUBLISHED_REFUSED, REFUSED, SERVED
from checkpoints.resolve import bundled_names


def _checkpoint(folder: Path, **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_the_list_names_every_type_with_its_route(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith(f"{len(SERVED)} model types are served")
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    for name, (route, features) in SERVED.items():
        note = PUBLISHED_REFUSED.get(name, "")
        assert rows[name] == [route, *features.split(), *note.split()]
    assert f"published checkpoints of {len(PUBLISHED_REFUSED)}" in head


def test_the_refused_are_listed_with_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--refused"]) == 0
    out = capsys.readouterr().out
    for name, reason in REFUSED.items():
        assert any(line.split()[0] == name and reason in line for line in out.splitlines()), name


def test_json_has_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["served"]["deepseek_v2"] == {
        "route": "universal",
        "features": ["mla", "moe"],
        "published": "",
    }
    for name, kind in (("deepseek_v3", "fp8"), ("gpt_oss", "mxfp4")):
        assert f"({kind}) and refused" in value["served"][name]["published"]
    assert value["refused"] == REFUSED


@pytest.mark.parametrize("name", bundled_names())
def test_bundled_models_are_served(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", name]) == 0
    assert capsys.readouterr().out.startswith(f"{name}: served (")


def test_a_checkpoint_that_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = _checkpoint(tmp_path, model_type="gemma2")
    assert cli.main(["models", str(folder), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (
        answer["is_served"] and answer["route"] == "universal" and "softcap" in answer["features"]
    )


def test_a_checkpoint_that_is_not_served_says_why_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _checkpoint(tmp_path, model_type="bloom")
    assert cli.main(["models", str(folder)]) == 1
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err == (
        f"baton: {tmp_path.name}: model type 'bloom' is not supported: {REFUSED['bloom']}\n"
    )
    assert cli.main(["models", str(folder), "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["is_served"]


def test_no_checkpoint_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models", "/nowhere/at/all"]) == 1
    assert "/nowhere/at/all" in capsys.readouterr().err
