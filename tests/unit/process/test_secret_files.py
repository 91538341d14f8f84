"""A value read from files: taken up when they change, kept when they cannot be read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from process.secret_files import RETRY_S, WatchedFile, replace_file
from process.settings import SettingsError
from tests.harness.waiting import Clock


def watched(path: Path, clock: Clock) -> WatchedFile[str]:
    def read() -> str:
        try:
            text = path.read_text()
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror}") from error
        if text == "broken":
            raise SettingsError(f"{path}: is broken")
        return text

    return WatchedFile("a test", [path], read, clock)


def test_a_change_is_seen_at_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("one")
    value = watched(path, Clock(0.0))
    assert value.get() == "one" and value.num_reloads == 0
    path.write_text("other")
    assert value.get() == "other" and value.get() == "other" and value.num_reloads == 1
    # Put in its place as editors and Kubernetes do it.
    new = tmp_path / "new"
    new.write_text("third")
    os.replace(new, path)
    assert value.get() == "third" and value.num_reloads == 2


def test_what_cannot_be_read_changes_nothing_and_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "file", Clock(0.0)
    path.write_text("one")
    value = watched(path, clock)
    path.write_text("broken")
    assert value.get() == "one"
    path.write_text("better")
    assert value.get() == "one"  # not read again at once
    clock.now_s += RETRY_S
    assert value.get() == "better"
    path.unlink()
    assert value.get() == "better"
    assert [record.message for record in caplog.records].count("file_not_reloaded") == 2


def test_the_first_reading_fails_loudly(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        watched(tmp_path / "absent", Clock(0.0))


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_is_its_owners_alone_and_a_replaced_one_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, "one")
    assert (path.read_text(), _mode(path)) == ("one", 0o600)
    path.chmod(0o640)
    replace_file(path, b"two")
    assert (path.read_text(), _mode(path)) == ("two", 0o640)
    replace_file(path, "three", mode=0o600)
    assert (path.read_text(), _mode(path)) == ("three", 0o600)


def test_a_link_stays_one_when_its_file_is_replaced(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("one")
    link.symlink_to(path)
    replace_file(link, "two")
    assert link.is_symlink() and path.read_text() == "two"


def test_a_file_that_cannot_be_replaced_stays_and_nothing_is_left_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("one")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, "two")
    assert path.read_text() == "one" and list(tmp_path.iterdir()) == [path]


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    pipe, circle = tmp_path / "pipe", tmp_path / "circle"
    os.mkfifo(pipe)
    circle.symlink_to(circle)
    with pytest.raises(OSError, match=r"no regular file.*pipe"):
        replace_file(pipe, "one")
    with pytest.raises(OSError, match="circle"):
        replace_file(circle, "one")
    assert sorted(tmp_path.iterdir()) == [circle, pipe]


def test_the_error_for_a_folder_that_is_missing_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        replace_file(tmp_path / "no" / "file", "one")
    assert caught.value.filename == str(tmp_path / "no" / "file")
