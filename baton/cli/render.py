"""Output of the commands: tables, JSON, sizes and times, a streamed answer and its provenance."""

from __future__ import annotations

import contextlib
import json
import operator
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from google.protobuf import json_format
from google.protobuf.message import Message
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from baton.answers import Chunk, Completion, KvLeg
from baton.client import collect_chunks

_WIDTH_WITHOUT_TERMINAL = 160
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Column(NamedTuple):
    """A column of a table: its title, and the value that it shows of each row's item."""

    title: str
    value: Callable[[Any], Any]
    is_number: bool = False


def text(title: str, value: str | Callable[[Any], Any]) -> Column:
    """Make a column of text. `value` may be the name of an attribute."""
    return Column(title, operator.attrgetter(value) if isinstance(value, str) else value)


def number(title: str, value: str | Callable[[Any], Any]) -> Column:
    """Make a column of numbers, aligned to the right."""
    return Column(title, text(title, value).value, is_number=True)


def show(renderable: RenderableType) -> None:
    """Print a rich object on standard output, 160 columns wide where that is not a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL)
    console.print(renderable)


def print_json(value: Any) -> None:
    """Print one line of JSON on standard output."""
    sys.stdout.write(json.dumps(value) + "\n")


def table(
    columns: Sequence[Column], items: Iterable[Any], *, header: str = "bold", no_wrap: bool = True
) -> Table:
    """Make a table with a row for each item.

    Args: header: the style of the titles. no_wrap: keep numbers on one line.
    """
    made = Table(box=None, pad_edge=False, header_style=header)
    for column in columns:
        if column.is_number:
            made.add_column(column.title, justify="right", no_wrap=no_wrap)
        else:
            made.add_column(column.title)
    for item in items:
        cells = (column.value(item) for column in columns)
        made.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in cells))
    return made


def progress(console: Console, name: str, *columns: ProgressColumn) -> Progress:
    """Make a progress bar with the elapsed time, shown only on a terminal."""
    return Progress(
        TextColumn(name),
        BarColumn(bar_width=24),
        *columns,
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )


def percent(part: int, whole: int) -> str:
    """Write a share in percent, such as "37 %"; "-" where the whole is 0."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def format_bytes(num_bytes: int) -> str:
    """Write a number of bytes with a unit: 1536 -> "1.5 KiB"."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def format_seconds(seconds: float) -> str:
    """Write a time with a unit: 0.0123 -> "12.3 ms"."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def to_dict(message: Message) -> dict[str, Any]:
    """Convert a message to JSON values with the names of the proto; 64-bit numbers are strings."""
    plain: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return plain


def stream(chunks: Generator[Chunk, None, None], *, as_ids: bool = False) -> Completion:
    """Print an answer while it arrives. Closes `chunks` in any case."""

    def written() -> Iterator[Chunk]:
        for chunk in chunks:
            text = "".join(f"{token} " for token in chunk.token_ids) if as_ids else chunk.text
            sys.stdout.write(text)
            sys.stdout.flush()
            yield chunk

    try:
        with contextlib.closing(chunks):
            return collect_chunks(written())
    finally:
        sys.stdout.write("\n")


def stream_with_provenance(
    chunks: Generator[Chunk, None, None], *, as_ids: bool = False
) -> Completion:
    """Print an answer while it arrives, then its provenance."""
    completion = stream(chunks, as_ids=as_ids)
    show(provenance_block(completion))
    return completion


def short_line(completion: Completion) -> str:
    """The provenance of an answer in one line, for a chat."""
    parts = [
        f"{leg.worker_id}: {leg.num_tokens_computed} computed, {leg.num_tokens_local} local, "
        f"{leg.num_tokens_from_store} from store"
        for leg in completion.provenance.legs
    ]
    moved = format_bytes(completion.provenance.num_bytes_moved)
    return (
        f"[{completion.usage.num_prompt_tokens} prompt tokens; {'; '.join(parts)}; {moved} moved]"
    )


def provenance_block(completion: Completion) -> RenderableType:
    """The lines that show an answer's usage, the source of its KV by worker, and the time of each
    stage."""
    times = "  ".join(
        f"{stage} {format_seconds(seconds)}" for stage, seconds in completion.times.items()
    )
    return Group(
        Text(_usage_line(completion), style="dim"),
        _legs(completion.provenance.legs),
        Text(times, style="dim"),
    )


def _usage_line(completion: Completion) -> str:
    usage = completion.usage
    return (
        f"{usage.num_prompt_tokens} prompt tokens ({usage.num_cached_tokens} cached), "
        f"{usage.num_output_tokens} output tokens, finished by {completion.finish_reason}, "
        f"model {completion.provenance.model}, seed {completion.seed}, "
        f"request {completion.request_id}"
    )


def _legs(legs: Sequence[KvLeg]) -> Table:
    """A row for each worker. The last columns are shown only where one has a value."""
    columns = [
        text("worker", "worker_id"),
        number("computed", "num_tokens_computed"),
        number("local", "num_tokens_local"),
        number("from store", _from_store),
        number("read", lambda leg: format_bytes(leg.num_bytes_read)),
        number("written", lambda leg: format_bytes(leg.num_bytes_written)),
        text("transport", _transport),
        text("dtype", "dtype"),
        text("handover", lambda leg: leg.handover or "-"),
    ]
    where_any = (
        ("num_tokens_early", number("early", "num_tokens_early")),
        ("num_tokens_direct", number("direct", "num_tokens_direct")),
        ("num_blocks_behind", number("blocks behind", "num_blocks_behind")),
        ("num_blocks_written_back", number("blocks written back", "num_blocks_written_back")),
        ("recomputed", text("recomputed", lambda leg: _by_reason(leg.recomputed))),
        ("not_stored", text("not stored", lambda leg: _by_reason(leg.not_stored))),
        ("ended_by", text("ended by", lambda leg: leg.ended_by or "-")),
    )
    columns += [column for name, column in where_any if any(getattr(leg, name) for leg in legs)]
    return table(columns, legs, header="dim", no_wrap=False)


def _by_reason(blocks: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in blocks.items())


def _from_store(leg: KvLeg) -> str:
    return " + ".join(f"{count.num_tokens} {count.tier}" for count in leg.from_store) or "0"


def _transport(leg: KvLeg) -> str:
    """The transport; of several each with its use."""
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
