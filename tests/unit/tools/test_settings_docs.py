"""docs/settings.md is what the settings classes make."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from tools import gen_settings_docs
from tools.gen_settings_docs import PROCESSES


def test_the_page_is_the_one_that_the_settings_make() -> None:
    assert gen_settings_docs.PAGE.read_text(encoding="utf-8") == gen_settings_docs.text(), (
        "run `make schema`"
    )
    assert gen_settings_docs.main(["--check"]) == 0


@pytest.mark.parametrize("part", PROCESSES)
def test_every_setting_has_a_row(part: str) -> None:
    """In its part's section, or in that of the group that its row links to."""
    sections = _sections(gen_settings_docs.text())
    for path in _paths(PROCESSES[part][0]):
        section, key = part, path
        while f"| `{key}` |" not in sections[section]:
            rows = re.findall(r"^\| `([\w.]+)` \| \[([\w.]+)\]\(#\w+\) \|", sections[section], re.M)
            links = {row: title for row, title in rows if key.startswith(f"{row}.")}
            assert links, f"{part}: {path}"
            ((row, section),) = links.items()
            key = key.removeprefix(f"{row}.")


def _sections(page: str) -> dict[str, str]:
    parts = re.split(r"^## (.*)$", page, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _paths(cls: Any) -> Iterator[str]:
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from (f"{field.name}.{inner}" for inner in _paths(hints[field.name]))
        else:
            yield field.name
