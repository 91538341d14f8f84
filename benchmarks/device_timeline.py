"""A timeline as an SVG drawing: one lane of bars per thing that was busy. Pure, no library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_LEFT, _TOP, _WIDTH, _LANE, _BAR = 300, 50, 900, 34, 22
_COLOURS = ("#4c78a8", "#f58518", "#54a24b")


@dataclass(frozen=True)
class Bar:
    """Busy from start to end, in milliseconds."""

    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Lane:
    """A name and its bars."""

    name: str
    bars: Sequence[Bar]


def draw(lanes: Sequence[Lane], title: str) -> str:
    """The drawing, as text; lanes take turns with three colours."""
    longest_ms = max((bar.end_ms for lane in lanes for bar in lane.bars), default=1.0)
    step_ms = _tick_ms(longest_ms)
    scale = _WIDTH / longest_ms
    bottom = _TOP + _LANE * len(lanes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 40}" '
        f'height="{bottom + 40}" font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for tick in range(int(longest_ms / step_ms) + 1):
        x = _LEFT + tick * step_ms * scale
        parts.append(f'<path d="M{x:.1f} {_TOP - 6}V{bottom}" stroke="#ddd"/>')
        label = f"{tick * step_ms:g} ms"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    for row, lane in enumerate(lanes):
        y = _TOP + row * _LANE
        name = escape(lane.name)
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 16}" text-anchor="end">{name}</text>')
        for number, bar in enumerate(lane.bars):
            x, width = _LEFT + bar.start_ms * scale, (bar.end_ms - bar.start_ms) * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(width, 1):.1f}" height="{_BAR}" '
                f'fill="{_COLOURS[row % 3]}" stroke="white"/>'
                f'<text x="{x + 3:.1f}" y="{y + 16}" fill="white">{number}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


def _tick_ms(longest_ms: float) -> float:
    """1, 2 or 5 times a power of ten, for about ten ticks."""
    power: float = 10.0 ** math.floor(math.log10(longest_ms / 10))
    return next(power * step for step in (1, 2, 5, 10) if longest_ms / (power * step) <= 12)
