"""The key file: made for nobody else's eyes, read strictly, rotated without a gap."""

from __future__ import annotations

import itertools
import os
import resource
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from process import signing_keys
from process.settings import SettingsError

DIGITS = "ab" * 32


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_is_for_its_owner_only_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    before = os.umask(0)
    try:
        made = signing_keys.create(path)
    finally:
        os.umask(before)
    assert mode_of(path) == 0o600
    assert signing_keys.load(path) == (made,)
    assert made.secret.hex() not in repr(made)


def test_a_file_that_is_there_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    made = signing_keys.create(path)
    with pytest.raises(SettingsError, match="is there already; `baton keys rotate"):
        signing_keys.create(path)
    assert signing_keys.load(path) == (made,)
    with pytest.raises(SettingsError, match="No such file"):
        signing_keys.create(tmp_path / "none" / "keys")


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o644, 0o666, 0o620, 0o610, 0o777])
def test_a_file_that_others_can_get_at_is_refused_with_the_fix(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    signing_keys.create(path)
    path.chmod(mode)
    with pytest.raises(SettingsError, match=f"run `chmod 600 {path}`"):
        signing_keys.load(path)


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o440, 0o640])
def test_the_owner_and_a_group_that_reads_are_allowed(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys"
    made = signing_keys.create(path)
    path.chmod(mode)
    assert signing_keys.load(path) == (made,)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "holds no key"),
        ("# nothing\n\n", "holds no key"),
        (f"a:{DIGITS}\nb:{DIGITS[:-2]}\n", "line 2"),
        (f"a {DIGITS}", "line 1"),
        (f":{DIGITS}", "line 1"),
        (f"a b:{DIGITS}", "line 1"),
        (f"{'a' * 65}:{DIGITS}", "line 1"),
        (f"a:{DIGITS[:-1]}g", "line 1"),
        (f"a:{DIGITS}\na:{'cd' * 32}", "the same key id twice"),
        (f"a:{DIGITS}\nb:{DIGITS.upper()}", "the same key under two ids"),
        ("".join(f"k{i}:{i:064x}\n" for i in range(5)), "5 keys, at most 4"),
    ],
)
def test_what_is_wrong_is_named_and_no_key_is_shown(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(SettingsError) as caught:
        signing_keys.load(path)
    assert what in str(caught.value) and str(path) in str(caught.value)
    assert DIGITS[:8] not in str(caught.value)


def test_what_is_no_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"`baton keys new {tmp_path / 'none'}`"):
        signing_keys.load(tmp_path / "none")
    with pytest.raises(SettingsError, match="Is a directory"):
        signing_keys.load(tmp_path)
    path = tmp_path / "keys"
    path.write_bytes(bytes(range(256)))
    path.chmod(0o600)
    with pytest.raises(SettingsError, match="no text"):
        signing_keys.load(path)
    path.write_bytes(b"#" * (signing_keys.MAX_FILE_BYTES + 1))
    with pytest.raises(SettingsError, match="longer than"):
        signing_keys.load(path)


def test_comments_and_spaces_are_no_part_of_a_key() -> None:
    (key,) = signing_keys.parse(f"# top\n\n  a : {DIGITS}  # why\n", where="text")
    assert (key.key_id, key.secret.hex()) == ("a", DIGITS)


@given(st.text(max_size=200))
def test_any_text_is_keys_or_refused(text: str) -> None:
    try:
        found = signing_keys.parse(text, where="text")
    except SettingsError:
        return
    assert 1 <= len(found) <= signing_keys.MAX_KEYS


def test_a_rotation_keeps_the_key_before_and_drops_older_ones(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    first = signing_keys.create(path)
    second = signing_keys.rotate(path)
    assert signing_keys.load(path) == (second, first)
    third = signing_keys.rotate(path)
    assert signing_keys.load(path) == (third, second)
    assert mode_of(path) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys"]


def test_in_three_steps_nobody_meets_a_key_that_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    old = signing_keys.create(path)
    with pytest.raises(SettingsError, match="add the next one first"):
        signing_keys.use_next(path)
    new = signing_keys.add_next(path)
    versions = [(old,), signing_keys.load(path)]
    assert signing_keys.use_next(path) == new
    versions.append(signing_keys.load(path))
    assert signing_keys.drop_old(path) == new
    versions.append(signing_keys.load(path))
    assert versions == [(old,), (old, new), (new, old), (new,)]
    # A process may be one step behind another, either way: what one signs the other verifies.
    for one, other in itertools.pairwise(versions):
        assert one[0] in other and other[0] in one


def test_more_keys_than_may_be_are_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    signing_keys.create(path)
    for _ in range(signing_keys.MAX_KEYS - 1):
        signing_keys.add_next(path)
    before = path.read_text()
    with pytest.raises(SettingsError, match="at most 4"):
        signing_keys.add_next(path)
    assert path.read_text() == before


@pytest.mark.parametrize(
    "change",
    [signing_keys.rotate, signing_keys.add_next, signing_keys.use_next, signing_keys.drop_old],
)
def test_a_change_goes_through_a_link_and_keeps_the_mode(
    tmp_path: Path, change: Callable[[Path], signing_keys.SigningKey]
) -> None:
    path, link = tmp_path / "keys", tmp_path / "link"
    signing_keys.create(path)
    signing_keys.add_next(path)
    path.chmod(0o640)
    link.symlink_to(path)
    change(link)
    assert link.is_symlink() and mode_of(path) == 0o640
    signing_keys.load(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
@pytest.mark.parametrize(
    "change",
    [signing_keys.rotate, signing_keys.add_next, signing_keys.use_next, signing_keys.drop_old],
)
def test_a_change_by_root_leaves_the_file_to_its_owner(
    tmp_path: Path, change: Callable[[Path], signing_keys.SigningKey]
) -> None:
    path = tmp_path / "keys"
    signing_keys.create(path)
    signing_keys.add_next(path)
    path.chmod(0o640)
    os.chown(path, 12345, 23456)
    change(path)
    found = path.stat()
    assert (found.st_uid, found.st_gid, mode_of(path)) == (12345, 23456, 0o640)


def test_a_change_that_would_take_the_file_from_its_owner_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys"
    made = signing_keys.create(path)
    path.chmod(0o640)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(SettingsError, match="not permitted; change it as its owner"):
        signing_keys.rotate(path)
    assert signing_keys.load(path) == (made,)
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys"]


def test_a_pipe_is_no_key_file_and_nobody_waits_for_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    os.mkfifo(path, 0o600)
    answers: list[str] = []

    def look() -> None:
        try:
            signing_keys.load(path)
        except SettingsError as error:
            answers.append(str(error))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(30)
    assert answers == [f"key file {path}: is no file"]


@pytest.mark.parametrize("change", [signing_keys.create, signing_keys.rotate])
def test_a_full_disk_leaves_no_half_of_a_file(
    tmp_path: Path, change: Callable[[Path], signing_keys.SigningKey]
) -> None:
    path = tmp_path / "keys"
    before = () if change is signing_keys.create else (signing_keys.create(path),)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, limits[1]))  # Python ignores its signal
    try:
        with pytest.raises(SettingsError, match="File too large"):
            change(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [entry.name for entry in tmp_path.iterdir()] == ["keys"][: len(before)]
    if before:
        assert signing_keys.load(path) == before
    else:
        signing_keys.create(path)
