"""Plots as SVG, PNG or PDF files: a timeline of one request (`draw_timeline`), and the latencies of
a load of requests (`draw_load`).

A timeline has a lane for each process that worked on the request. The stages that the router
measured follow one another and sum to the whole time; work that ran beside a stage (blocks that
were read while the prompt was computed) is in the text above, not a bar. A load's picture shows
when each request ran, and how the times to the first token and between chunks are distributed.

matplotlib comes with the extra `plots` and is imported only here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.answers import Completion, KvLeg
from baton.cli.render import format_bytes, format_seconds
from baton.errors import FailedPrecondition, InvalidArgument
from baton.load.report import Limits
from baton.load.runner import RequestOutcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".svg", ".png", ".pdf")
ROUTER, PREFILL, DECODE = "router", "prefill", "decode"

_COLOURS = {
    ROUTER: ("#6c757d", "#adb5bd", "#495057"),
    PREFILL: ("#c9a227", "#e0c068", "#8f7119"),
    DECODE: ("#2a6f97", "#61a5c2", "#01497c"),
}
_TOKENS = _FAILED = "#b23a48"
_WAIT, _STREAM = _COLOURS[PREFILL][0], _COLOURS[DECODE][0]
_LEAST_LABELLED = 0.07
"""Share of the width: a narrower bar has no room for its name."""
_MAX_BARS = 2000
"""Most requests that are drawn; of more, every n-th is drawn, and the title says so."""


def check(option: str, file: Path) -> None:
    """Check before a request or load that its picture can be written afterwards. Raises:
    InvalidArgument for a file name that says no format; FailedPrecondition where matplotlib is
    missing."""
    if file.suffix not in FORMATS:
        raise InvalidArgument(option, f"{file.name}: name it *{', *'.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise FailedPrecondition(
            f"{option}: needs matplotlib: pip install 'baton[plots]'"
        ) from None


def _save(figure: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)


# -- a request


@dataclass(frozen=True)
class PlotBar:
    """A bar of the timeline: one stage of a request, in seconds since it was sent."""

    lane: str
    stage: str
    begin_s: float
    end_s: float


def bars_of(times: Mapping[str, float], begin_s: float = 0.0) -> list[PlotBar]:
    """The bars of a request's stages, one after the other, each in the lane of its process."""
    bars: list[PlotBar] = []
    at_s = begin_s
    for stage, seconds in times.items():
        bars.append(PlotBar(_lane(stage), stage, at_s, at_s + seconds))
        at_s += seconds
    return bars


def draw_timeline(
    completion: Completion, arrivals_s: Sequence[float], ended_s: float, file: Path
) -> None:
    """Write the timeline picture of one request.

    Args: arrivals_s: when each message with tokens arrived, in seconds since the sending. ended_s:
        when the last message arrived. What the router does not account for was the way to the
        router.
    Raises: OSError.
    """
    from matplotlib.figure import Figure

    way_s = max(0.0, ended_s - sum(completion.times.values()))
    bars = bars_of(completion.times, way_s)
    end_s = max([ended_s, *(bar.end_s for bar in bars)])
    names = _names(completion.provenance.legs)
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    figure.suptitle("\n".join(_title(completion, arrivals_s)), fontsize=10, x=0.01, ha="left")
    whole, zoomed = figure.subplots(2, 1, height_ratios=[1, 1.3])
    _panel(whole, bars, names, arrivals_s, end_s or 1.0)
    whole.set_title("the whole request", loc="left", fontsize=9)
    until_s = arrivals_s[1] if len(arrivals_s) > 1 else end_s
    _panel(zoomed, bars, names, arrivals_s, 1.05 * min(until_s, end_s) or 1.0)
    zoomed.set_title("until its second token", loc="left", fontsize=9)
    zoomed.set_xlabel("ms since it was sent", fontsize=9)
    figure.legend(
        handles=list(_legend(bars)), loc="outside lower left", ncols=5, frameon=False, fontsize=8
    )
    _save(figure, file)


def _names(legs: Iterable[KvLeg]) -> dict[str, str]:
    """Workers by role, in their order where the answer moved to another worker."""
    names: dict[str, list[str]] = {}
    for leg in legs:
        names.setdefault(leg.role, []).append(leg.worker_id)
    return {role: " > ".join(workers) for role, workers in names.items()}


def _lane(stage: str) -> str:
    role = stage.partition("_")[0]
    return role if role in (PREFILL, DECODE) else ROUTER


def _colour(bars: Sequence[PlotBar], bar: PlotBar) -> str:
    """Stages that are neighbours in a lane have different shades."""
    same = [each.stage for each in bars if each.lane == bar.lane]
    shades = _COLOURS[bar.lane]
    return shades[same.index(bar.stage) % len(shades)]


def _panel(
    axes: Axes, bars: Sequence[PlotBar], names: Mapping[str, str], arrivals_s: Sequence[float],
    end_s: float,
) -> None:  # fmt: skip
    lanes = (ROUTER, PREFILL, DECODE)
    for bar in bars:
        row, width_ms = lanes.index(bar.lane), (bar.end_s - bar.begin_s) * 1e3
        axes.barh(row, width_ms, left=bar.begin_s * 1e3, height=0.7, color=_colour(bars, bar))
        visible_s = min(bar.end_s, end_s) - bar.begin_s
        if visible_s > _LEAST_LABELLED * end_s:
            middle_ms = (bar.begin_s + visible_s / 2) * 1e3
            axes.text(
                middle_ms, row, bar.stage.removeprefix(bar.lane + "_"),
                ha="center", va="center", fontsize=8, color="white",
            )  # fmt: skip
    axes.plot(
        [at_s * 1e3 for at_s in arrivals_s], [len(lanes)] * len(arrivals_s), "|", color=_TOKENS,
        markersize=11,
    )  # fmt: skip
    if arrivals_s:
        axes.axvline(arrivals_s[0] * 1e3, color=_TOKENS, linewidth=0.8, linestyle=":")
    labels = [names.get(lane, lane) for lane in lanes]
    axes.set_yticks(range(len(lanes) + 1), [*labels, "tokens"], fontsize=9)
    axes.set(xlim=(0, end_s * 1e3), ylim=(len(lanes) + 0.5, -0.5))
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(bars: Sequence[PlotBar]) -> Iterator[Any]:
    from matplotlib.patches import Patch

    for bar in bars:
        label = f"{bar.stage} {format_seconds(bar.end_s - bar.begin_s)}"
        yield Patch(color=_colour(bars, bar), label=label)


def _title(completion: Completion, arrivals_s: Sequence[float]) -> Iterator[str]:
    usage = completion.usage
    first = f", the first after {format_seconds(arrivals_s[0])}" if arrivals_s else ""
    yield (
        f"{completion.request_id}: {usage.num_prompt_tokens} prompt tokens, "
        f"{usage.num_output_tokens} output tokens{first}"
    )
    yield from (_leg_line(leg) for leg in completion.provenance.legs)


def _leg_line(leg: KvLeg) -> str:
    """Where one worker's prompt tokens came from."""
    read = [
        f"{count} {how}"
        for count, how in (
            (leg.num_tokens_direct, "from the other worker's cache"),
            (leg.num_tokens_early, "while prefill ran"),
        )
        if count
    ]
    moved = f"{format_bytes(leg.num_bytes_read)} in, {format_bytes(leg.num_bytes_written)} out"
    how = f" ({', '.join(read)})" if read else ""
    handover = f"; handover {leg.handover}" if leg.handover else ""
    return (
        f"{leg.worker_id}: {leg.num_tokens_computed} computed, {leg.num_tokens_local} local, "
        f"{leg.num_tokens_from_store} read{how}; {moved}"
        f"{handover}"
    )


# -- a load


def draw_load(outcomes: Sequence[RequestOutcome], limits: Limits, file: Path, title: str) -> None:
    """Write the picture of a load: its requests, rates and latencies over time. Raises: OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8.5), layout="constrained")
    figure.suptitle(title)
    axes: dict[str, Any] = figure.subplot_mosaic(
        [["timeline", "timeline"], ["ttft", "itl"]], height_ratios=[1.5, 1]
    )
    _requests(axes["timeline"], outcomes)
    served = [outcome for outcome in outcomes if outcome.is_served]
    ttfts_s = [outcome.ttft_s for outcome in served if outcome.ttft_s is not None]
    _distribution(axes["ttft"], "time to first token", ttfts_s, limits.ttft_ms)
    gaps_s = [gap for outcome in served for gap in outcome.gaps_s]
    _distribution(axes["itl"], "gap between chunks", gaps_s, limits.tpot_ms)
    _save(figure, file)


def _requests(axes: Axes, outcomes: Sequence[RequestOutcome]) -> None:
    """A line for each request in the order of sending: waiting, then streaming; a cross: failed."""
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
        axes.axvline(limit_ms, color=_FAILED, linestyle="--", linewidth=1, label="limit")
        axes.legend(loc="lower right", frameon=False)


def _width(num_rows: int) -> float:
    return max(0.6, min(6.0, 300 / max(1, num_rows)))
