"""A load as one picture: when each request ran, and how long people waited for a first token and
between tokens.

matplotlib comes with the extra `plots` and is loaded only here. Draws into a file; opens no window.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.errors import FailedPrecondition, InvalidArgument
from baton.load.outcome import Outcome
from baton.load.report import Limits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".png", ".svg", ".pdf")

_WAIT, _STREAM, _FAILED = "#c9a227", "#2a6f97", "#b23a48"
_MAX_BARS = 2000
"""More lie on top of one another; then every n-th is drawn, and the title says so."""


def check(file: Path) -> None:
    """Raises: InvalidArgument for a kind of file that cannot be drawn; FailedPrecondition where
    matplotlib is missing. Asked before the load, not after it."""
    if file.suffix not in FORMATS:
        raise InvalidArgument("--plot", f"{file.name}: name it *{', *'.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise FailedPrecondition("--plot: needs matplotlib: pip install 'baton[plots]'") from None


def draw(outcomes: Sequence[Outcome], limits: Limits, file: Path, title: str) -> None:
    """Write the picture. Raises: OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8.5), layout="constrained")
    figure.suptitle(title)
    axes: dict[str, Any] = figure.subplot_mosaic(
        [["timeline", "timeline"], ["ttft", "itl"]], height_ratios=[1.5, 1]
    )
    _timeline(axes["timeline"], outcomes)
    served = [outcome for outcome in outcomes if outcome.is_served]
    ttfts_s = [outcome.ttft_s for outcome in served if outcome.ttft_s is not None]
    _distribution(axes["ttft"], "time to first token", ttfts_s, limits.ttft_ms)
    gaps_s = [gap for outcome in served for gap in outcome.gaps_s]
    _distribution(axes["itl"], "gap between chunks", gaps_s, limits.tpot_ms)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)


def _timeline(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    """A line a request in the order of sending: waiting, then streaming; a cross where it
    failed."""
    from matplotlib.ticker import MaxNLocator

    every = -(-len(outcomes) // _MAX_BARS)
    shown = sorted(outcomes, key=lambda outcome: outcome.sent_s)[::every]
    waits, streams = [], []
    for row, outcome in enumerate(shown):
        first_s = outcome.arrivals[0].at_s if outcome.arrivals else outcome.end_s
        waits.append((row, outcome.sent_s, first_s))
        streams.append((row, first_s, outcome.end_s))
    for name, bars, colour in (("waiting", waits, _WAIT), ("streaming", streams, _STREAM)):
        rows, begins, ends = zip(*bars, strict=True)
        axes.hlines(rows, begins, ends, colors=colour, linewidth=_width(len(shown)), label=name)
    failed = [(outcome.end_s, row) for row, outcome in enumerate(shown) if not outcome.is_served]
    if failed:
        axes.plot(*zip(*failed, strict=True), "x", color=_FAILED, label="failed")
    axes.set(xlabel="seconds since the load began", ylabel="request")
    axes.set_title("requests" if every == 1 else f"every {every}th request", loc="left")
    axes.invert_yaxis()
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="lower left", frameon=False)


def _distribution(axes: Axes, what: str, seconds: Sequence[float], limit_ms: float | None) -> None:
    axes.set_title(f"{what} ({len(seconds):,})", loc="left")
    axes.set(xlabel="milliseconds", ylabel="share of all", ylim=(0, 1.02))
    axes.grid(alpha=0.25)
    if not seconds:
        axes.text(0.5, 0.5, "none", ha="center", transform=axes.transAxes)
        return
    axes.ecdf([second * 1e3 for second in seconds], color=_STREAM)
    if max(seconds) > 20 * min(seconds) > 0:
        axes.set_xscale("log")
    if limit_ms is not None:
        axes.axvline(limit_ms, color=_FAILED, linestyle="--", linewidth=1, label="asked for")
        axes.legend(loc="lower right", frameon=False)


def _width(num_rows: int) -> float:
    return max(0.6, min(6.0, 300 / max(1, num_rows)))
