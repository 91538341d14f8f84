"""docs/library.md is true: every snippet runs, in its order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "library.md"


def test_every_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 8
    names: dict[str, object] = {"__name__": "snippets"}
    try:
        for snippet in snippets:
            exec(compile(snippet, str(PAGE), "exec"), names)
    finally:
        llm = names.get("llm")
        if llm is not None:
            llm.close()  # type: ignore[attr-defined]
    out = capsys.readouterr().out
    assert "Once upon a time ->" in out and "prompts[1].top_p: 2.0" in out


def test_every_command_is_one() -> None:
    """Arguments are parsed, not run."""
    from baton import cli

    commands = re.findall(r"^    baton (.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        cli.build_parser().parse_args(command.split())
