"""One request's time as a picture: which process had it when, and when its tokens came.

Drawn from the account that its last message carries: stages follow one another and sum to the
whole, so a lane shows where the request was; what hid behind a stage (blocks that travelled while
the prompt was computed) is in the line above, not a bar. matplotlib comes with the extra `plots`
and is loaded only here. Draws into a file; opens no window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from baton.cli.render import format_bytes, format_seconds
from baton.errors import FailedPrecondition, InvalidArgument
from baton.messages import Completion, KvLeg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png", ".pdf")
ROUTER, PREFILL, DECODE = "router", "prefill", "decode"

_COLOURS = {
    ROUTER: ("#6c757d", "#adb5bd", "#495057"),
    PREFILL: ("#c9a227", "#e0c068", "#8f7119"),
    DECODE: ("#2a6f97", "#61a5c2", "#01497c"),
}
_TOKENS = "#b23a48"
_LEAST_LABELLED = 0.07
"""Of the width: a narrower bar has no room for its name."""


@dataclass(frozen=True)
class Bar:
    """A stage, in seconds from the sending."""

    lane: str
    stage: str
    begin_s: float
    end_s: float


def bars_of(times: Mapping[str, float], begin_s: float = 0.0) -> list[Bar]:
    """The stages one after the other, each in the lane of who had the request."""
    bars: list[Bar] = []
    at_s = begin_s
    for stage, seconds in times.items():
        bars.append(Bar(_lane(stage), stage, at_s, at_s + seconds))
        at_s += seconds
    return bars


def check(file: Path) -> None:
    """Raises: InvalidArgument for a kind of file that cannot be drawn; FailedPrecondition where
    matplotlib is missing. Asked before the request, not after it."""
    if file.suffix not in FORMATS:
        raise InvalidArgument("--timeline", f"{file.name}: name it *{', *'.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise FailedPrecondition(
            "--timeline: needs matplotlib: pip install 'baton[plots]'"
        ) from None


def draw(completion: Completion, arrivals_s: Sequence[float], ended_s: float, file: Path) -> None:
    """Write the picture.

    Args:
        arrivals_s: when each message with tokens came, in seconds from the sending.
        ended_s: when the last message came; what the router's account does not reach back to was
            the way there.
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
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)


def _names(legs: Iterable[KvLeg]) -> dict[str, str]:
    """Workers by role; of an answer that moved in their order."""
    names: dict[str, list[str]] = {}
    for leg in legs:
        names.setdefault(leg.role, []).append(leg.worker_id)
    return {role: " > ".join(workers) for role, workers in names.items()}


def _lane(stage: str) -> str:
    role = stage.partition("_")[0]
    return role if role in (PREFILL, DECODE) else ROUTER


def _colour(bars: Sequence[Bar], bar: Bar) -> str:
    """Neighbours of a lane differ."""
    same = [each.stage for each in bars if each.lane == bar.lane]
    shades = _COLOURS[bar.lane]
    return shades[same.index(bar.stage) % len(shades)]


def _panel(
    axes: Axes, bars: Sequence[Bar], names: Mapping[str, str], arrivals_s: Sequence[float],
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


def _legend(bars: Sequence[Bar]) -> Iterator[Any]:
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
    """In tokens of the prompt."""
    read = [
        f"{count} {how}"
        for count, how in (
            (leg.num_tokens_direct, "from the other's cache"),
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
