"""A value read from files: taken up when they change, kept when they cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from process.settings import SettingsError
from process.watched_file import RETRY_S, Watched
from tests.harness.waiting import Clock


def watched(path: Path, clock: Clock) -> Watched[str]:
    def read() -> str:
        try:
            text = path.read_text()
        except OSError as error:
            raise SettingsError(f"{path}: {error.strerror}") from error
        if text == "broken":
            raise SettingsError(f"{path}: is broken")
        return text

    return Watched("a test", [path], read, clock)


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
