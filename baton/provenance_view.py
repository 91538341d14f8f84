"""Where an answer came from, as the small block under it: values in, renderables out."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.messages import Completion, KvLeg

_WIDTH_WITHOUT_TERMINAL = 160
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def provenance_block(completion: Completion) -> RenderableType:
    """Usage, the account of KV by worker, and the time of each stage."""
    return Group(
        Text(_usage_line(completion), style="dim"),
        _legs(completion),
        Text(_times_line(completion.times), style="dim"),
    )


def show(renderable: RenderableType) -> None:
    """Print on standard output; wide enough for our tables where that is no terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL)
    console.print(renderable)


def short_line(completion: Completion) -> str:
    """The account in one line, for a chat."""
    legs = completion.provenance.legs
    parts = [
        f"{leg.worker_id}: {leg.num_tokens_computed} computed, {leg.num_tokens_local} local, "
        f"{leg.num_tokens_from_store} from store"
        for leg in legs
    ]
    moved = format_bytes(completion.provenance.num_bytes_moved)
    return (
        f"[{completion.usage.num_prompt_tokens} prompt tokens; {'; '.join(parts)}; {moved} moved]"
    )


def format_bytes(num_bytes: int) -> str:
    """1536 -> "1.5 KiB"."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def format_seconds(seconds: float) -> str:
    """0.0123 -> "12.3 ms"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _usage_line(completion: Completion) -> str:
    usage = completion.usage
    return (
        f"{usage.num_prompt_tokens} prompt tokens ({usage.num_cached_tokens} cached), "
        f"{usage.num_output_tokens} output tokens, finished by {completion.finish_reason}, "
        f"model {completion.provenance.model}, seed {completion.seed}, "
        f"request {completion.request_id}"
    )


def _legs(completion: Completion) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("worker")
    for name in ("computed", "local", "from store", "read", "written"):
        table.add_column(name, justify="right")
    for name in ("transport", "dtype", "handover"):
        table.add_column(name)
    legs = completion.provenance.legs
    # Only shown when there is something to show.
    extras = [
        (name, [str(getattr(leg, field)) for leg in legs])
        for name, field in (
            ("early", "num_tokens_early"),
            ("direct", "num_tokens_direct"),
            ("blocks behind", "num_blocks_behind"),
            ("blocks written back", "num_blocks_written_back"),
        )
        if any(getattr(leg, field) for leg in legs)
    ]
    for name, _ in extras:
        table.add_column(name, justify="right")
    troubles = [
        (name, [_by_reason(getattr(leg, field)) for leg in legs])
        for name, field in (("recomputed", "recomputed"), ("not stored", "not_stored"))
        if any(getattr(leg, field) for leg in legs)
    ]
    if any(leg.ended_by for leg in legs):
        troubles.append(("ended by", [leg.ended_by or "-" for leg in legs]))
    for name, _ in troubles:
        table.add_column(name)
    for index, leg in enumerate(legs):
        table.add_row(
            leg.worker_id,
            str(leg.num_tokens_computed),
            str(leg.num_tokens_local),
            _from_store(leg),
            format_bytes(leg.num_bytes_read),
            format_bytes(leg.num_bytes_written),
            _transport(leg),
            leg.dtype,
            leg.handover or "-",
            *(counts[index] for _, counts in extras),
            *(reasons[index] for _, reasons in troubles),
        )
    return table


def _by_reason(blocks: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in blocks.items())


def _from_store(leg: KvLeg) -> str:
    return " + ".join(f"{count.num_tokens} {count.tier}" for count in leg.from_store) or "0"


def _transport(leg: KvLeg) -> str:
    """One name; of several each with what it was used for."""
    if len(leg.transports) < 2:
        return leg.transport or "-"
    return ", ".join(
        f"{each.transport} ({_use(each.num_bytes_read, each.num_bytes_written)})"
        for each in leg.transports
    )


def _use(num_bytes_read: int, num_bytes_written: int) -> str:
    if num_bytes_read and num_bytes_written:
        return "read, written"
    return "read" if num_bytes_read else "written"


def _times_line(times: Mapping[str, float]) -> str:
    return "  ".join(f"{stage} {format_seconds(seconds)}" for stage, seconds in times.items())
