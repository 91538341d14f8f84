"""docs/library.md is true: every snippet runs, in its order. Those that start engines in processes
of their own are only compiled where the run is not the long one: what they show is
tests/conformance/test_engine_client.py's.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import LONG

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "library.md"
STARTS_PROCESSES = ("num_engines=2", "AsyncProcessClient.start(")


def test_every_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 8
    assert sum(any(words in each for words in STARTS_PROCESSES) for each in snippets) == 2
    names: dict[str, object] = {"__name__": "snippets"}
    try:
        for snippet in snippets:
            code = compile(snippet, str(PAGE), "exec")
            if LONG or not any(words in snippet for words in STARTS_PROCESSES):
                exec(code, names)
    finally:
        llm = names.get("llm")
        if llm is not None:
            llm.close()  # type: ignore[attr-defined]
    out = capsys.readouterr().out
    assert "Once upon a time ->" in out and "prompts[1].top_p: 2.0" in out
