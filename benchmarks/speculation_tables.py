"""The tables of `benchmarks.speculation_report` as Markdown and as a picture; the latter needs
matplotlib. Knows no models.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WIDTHS = (1, 2, 3, 4, 5)
"""k: tokens of one draft model after one token; the paper's."""

_TITLES = {
    "hit_rate": "The target's token among the draft's k likeliest",
    "kept_rate": "One of k independent draws is kept",
    "tokens_per_step": "Tokens per step of the target, trees <k, 1, 1, 1>",
}


def markdown(found: Mapping[str, Any]) -> str:
    """The tables of `report`, and of speed if there is one."""
    lines: list[str] = []
    for key, title in _TITLES.items():
        heads = " | ".join(f"k = {width}" for width in WIDTHS)
        lines += [f"{title}:", "", f"| | {heads} |", "|---|" + "---:|" * len(WIDTHS)]
        for how, rows in found[key].items():
            for name, values in rows.items():
                shown = [
                    f"{one:.2f}" if key == "tokens_per_step" else f"{100 * one:.1f} %"
                    for one in values
                ]
                lines.append(f"| {how}: {name} | {' | '.join(shown)} |")
        lines.append("")
    if speed := found.get("speed"):
        ways = list(next(iter(speed.values())))
        title = "Speed against plain decoding by the clock, median (least to greatest round):"
        lines += [title, "", f"| | {' | '.join(ways)} |"]
        lines.append("|---|" + "---:|" * len(ways))
        for name, by_way in speed.items():
            shown = []
            for one in (by_way[way] for way in ways):
                low, high = one["wall_speed_range"]
                shown.append(f"{one['wall_speed']:.2f} ({low:.2f} to {high:.2f})")
            lines.append(f"| {name} | {' | '.join(shown)} |")
        lines.append("")
    return "\n".join(lines)


_STYLES = ("-", "--", ":", "-.", (0, (5, 1)))
_COLOURS = ("#2a6f97", "#b23a48", "#c9a227", "#3a7d44", "#6b4c9a", "#444444")


def draw(found: Mapping[str, Any], file: Path) -> None:
    """The three tables as one picture. Raises: OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    for axes, (key, title) in zip(figure.subplots(1, len(_TITLES)), _TITLES.items(), strict=True):
        for style, (how, rows) in zip(itertools.cycle(_STYLES), found[key].items(), strict=False):
            for colour, (name, values) in zip(
                itertools.cycle(_COLOURS), rows.items(), strict=False
            ):
                label = f"{how}: {name}"
                axes.plot(WIDTHS, values, ls=style, marker=".", lw=1, color=colour, label=label)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("k")
        axes.set_xticks(WIDTHS)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=6, frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)
