"""What all tables of numbers share. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table


def table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """Without lines: text columns, then number columns, which stand to the right."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column)
    for column in numbers:
        made.add_column(column, justify="right", no_wrap=True)
    return made


def percent(part: int, whole: int) -> str:
    """A share, as people read it; "-" of nothing."""
    return f"{100 * part / whole:.0f} %" if whole else "-"
