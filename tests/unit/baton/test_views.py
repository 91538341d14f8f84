"""Numbers as people read them, and what `baton up` shows."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from baton.provenance_view import format_bytes, format_seconds
from baton.start_view import StartView
from baton.supervisor import ClusterEvent


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 60, "1048576.0 TiB"),
    ],
)
def test_bytes(num_bytes: int, shown: str) -> None:
    assert format_bytes(num_bytes) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(0.0123, "12.3 ms"), (1.5, "1.50 s")])
def test_seconds(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


def _shown(*, terminal: bool) -> str:
    out = io.StringIO()
    view = StartView(Console(file=out, force_terminal=terminal, width=80))
    with view:
        view.on_event(ClusterEvent("prefill-0", "starting"))
        view.on_event(ClusterEvent("prefill-0", "loading", "weights", 5, 10))
        view.on_event(ClusterEvent("prefill-0", "ready", "127.0.0.1:1"))
    view.on_event(ClusterEvent("prefill-0", "died", "killed by signal 9"))
    view.silence()
    view.on_event(ClusterEvent("prefill-0", "stopped"))
    return out.getvalue()


def test_plain_lines_where_there_is_no_terminal() -> None:
    assert _shown(terminal=False).splitlines() == [
        "prefill-0 ready: 127.0.0.1:1",
        "prefill-0 died: killed by signal 9",
    ]


def test_bars_on_a_terminal_then_lines() -> None:
    shown = _shown(terminal=True)
    assert "━" in shown and "ready" in shown
    assert shown.rstrip().endswith("prefill-0 died: killed by signal 9")
