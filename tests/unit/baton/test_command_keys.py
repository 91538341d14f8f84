"""`baton keys`, from the command line to the file."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from baton import cli
from process import signing_keys


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code and what was printed."""
    code = cli.main(["keys", *arguments])
    shown = capsys.readouterr()
    return code, shown.out + shown.err


def test_a_file_is_made_once_and_no_secret_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys"
    code, shown = run(capsys, "new", str(path))
    (key,) = signing_keys.load(path)
    assert code == 0 and key.key_id in shown and f"handle_keys_file={path}" in shown
    assert key.secret.hex() not in shown
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    code, shown = run(capsys, "new", str(path))
    assert code == 1 and "is there already" in shown and len(shown.splitlines()) == 1
    assert signing_keys.load(path) == (key,)


def test_rotation_in_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    old = signing_keys.create(path)
    code, shown = run(capsys, "rotate", str(path))
    new, *rest = signing_keys.load(path)
    assert code == 0 and rest == [old] and new.key_id in shown
    assert new.secret.hex() not in shown


def test_rotation_in_three_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    old = signing_keys.create(path)
    found = []
    for step in ("add", "use", "drop"):
        code, shown = run(capsys, "rotate", str(path), "--step", step)
        assert code == 0
        found.append(signing_keys.load(path))
    new = found[0][1]
    assert found == [(old, new), (new, old), (new,)]
    assert new.key_id in shown and "only key" in shown


@pytest.mark.parametrize("arguments", [["rotate"], ["rotate", "--step", "add"]])
def test_what_is_wrong_with_a_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    path = tmp_path / "keys"
    code, shown = run(capsys, *arguments, str(path))
    assert code == 1 and f"`baton keys new {path}`" in shown and len(shown.splitlines()) == 1
    signing_keys.create(path)
    path.chmod(0o644)
    code, shown = run(capsys, *arguments, str(path))
    assert code == 1 and f"chmod 600 {path}" in shown
