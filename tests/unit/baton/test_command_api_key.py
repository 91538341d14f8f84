"""`baton api-key`, from the command line to the file that a router reads."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from baton import cli
from process import api_keys


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["api-key", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_key_is_shown_once_and_its_digest_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "keys.toml"
    code, out, err = run(capsys, "add", "--tenant", "acme", "--file", str(path))
    key = out.strip()
    secret = key.split("-", 2)[2]
    assert code == 0 and secret not in err
    assert secret not in path.read_text() and stat.S_IMODE(path.stat().st_mode) == 0o600
    ((key_id, entry),) = api_keys.load(path).keys.items()
    assert key == f"baton-{key_id}-{secret}" and entry.digest == api_keys.digest_of(secret)


def test_what_its_owner_wrote_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    run(capsys, "add", "--tenant", "a", "--file", str(path))
    path.write_text(path.read_text() + "\n# mine\n[tenants.a]\nweight = 3.0  # three\n")
    options = ("--admin", "--max-priority", "7", "--expires", "2030-01-31")
    run(capsys, "add", "--tenant", "b", "--file", str(path), *options)
    run(capsys, "add", "--tenant", "c", "--file", str(path))
    found = api_keys.load(path)
    assert {key.tenant for key in found.keys.values()} == {"a", "b", "c"}
    (of_b,) = [key_id for key_id, key in found.keys.items() if key.tenant == "b"]
    _, listed, _ = run(capsys, "list", "--file", str(path))
    assert f"{of_b}: tenant b, priority -100 to 7, admin, expires 2030-01-31\n" in listed
    code, _, _ = run(capsys, "remove", of_b, "--file", str(path))
    left = api_keys.load(path)
    assert code == 0 and {key.tenant for key in left.keys.values()} == {"a", "c"}
    assert left.tenants["a"].weight == 3.0 and "# three" in path.read_text()


def test_what_does_not_go_is_one_line_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.toml"
    run(capsys, "add", "--tenant", "a", "--file", str(path))
    before = path.read_bytes()
    for arguments, said in (
        (("add", "--tenant", "a b", "--file", str(path)), "is no tenant's name"),
        (("add", "--tenant", "a", "--expires", "soon", "--file", str(path)), "is no date"),
        (
            ("add", "--tenant", "a", "--expires", "2020-01-01", "--file", str(path)),
            "--expires: 2020-01-01 is in the past",
        ),
        (("add", "--tenant", "a", "--min-priority", "5", "--file", str(path)), "above max"),
        (("add", "--tenant", "a", "--file", str(tmp_path / "no" / "file")), "No such file"),
        (("remove", "0" * 12, "--file", str(path)), "has no key"),
        (("list", "--file", str(tmp_path / "absent")), "No such file"),
    ):
        code, out, err = run(capsys, *arguments)
        assert code == 1 and not out and said in err and len(err.splitlines()) == 1
    assert path.read_bytes() == before
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    code, _, err = run(capsys, "list")
    assert code == 1 and "no cluster of yours runs" in err
    path.write_text("[")
    assert run(capsys, "add", "--tenant", "a", "--file", str(path))[0] == 1
    assert path.read_text() == "["
