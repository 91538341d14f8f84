"""`baton status` and `baton top`: the status of a cluster as tables, as JSON, and as a live screen.

The bars have the colours of the live page: blocks in use, cached and quarantined; and the stages of
a request's time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from baton.cli import options, render
from baton.cli.options import RouterTarget, flag, seconds, value
from baton.cli.render import format_bytes, format_seconds, number, percent, text
from baton.client import SyncClient
from baton.errors import Unavailable
from process.rpc_errors import DeadlineExceeded
from protos import common_pb2, inference_pb2

NUM_REQUESTS = 64
_MAX_NAME_CHARS = 24
NUM_AT_ONCE = 16
"""Most requests that `baton top` shows in a single frame where the output is not a terminal."""
_TIMEOUT_S = 3.0
_NO_TENANT = "(none)"
_SPARKS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 24
_SPARK_WIDTH = 30
_TIME_WIDTH = 30
_LATE_POINTS = 30
"""Points of the last minute, of which the figures are."""
_USED, _KEPT, _OUT, _FREE = "dodger_blue2", "steel_blue", "red3", "grey35"
_PINNED, _WRITING = "medium_purple3", "dark_orange3"
_ROUTER, _WAIT, _PREFILL = "grey62", "grey42", "dark_orange3"
_HANDOVER, _DECODE, _STREAM = "medium_purple3", "dodger_blue2", "cadet_blue"
_WAITING = (
    "queue",
    "admission",
    "prefill_queue",
    "decode_queue",
    "waiting for decode blocks",
    "waiting for a prefill worker",
    "waiting for a decode worker",
    "waiting for a decode place",
)
_MOVING = ("handover", "decode_fetch")


@options.command("status")
@options.as_json()
@options.router_target()
def status(as_json: bool, target: RouterTarget) -> None:
    """Show workers and their blocks, stores and their leases, and hit rates."""
    with target.client() as client:
        reply = client.status()
    if as_json:
        render.print_json(to_plain(reply))
    else:
        render.show(status_tables(reply))


@options.command("top")
@flag("--once", "Print one frame and end.")
@value("--interval", "SECONDS", "Refresh after this time.", 1.0, type=seconds)
@options.router_target()
def top(once: bool, interval: float, target: RouterTarget) -> None:
    """Show workers, stores and requests, refreshed until Ctrl-C.

    The figures are those of the last heartbeats, so that watching costs the workers nothing (`baton
    status` asks each worker). While the router does not answer, the last frame stays with a line
    that says so. Where the output is not a terminal, one frame is printed.
    """
    console = Console(highlight=False)
    with target.client() as client:
        is_once = once or not console.is_terminal
        reply = _from_heartbeats(client, NUM_AT_ONCE if is_once else NUM_REQUESTS)
        if is_once:
            render.show(frame(reply))
            return
        with contextlib.suppress(KeyboardInterrupt):
            _watch(console, client, reply, interval)


def _watch(
    console: Console,
    client: SyncClient,
    status: inference_pb2.GetClusterStatusReply,
    interval_s: float,
) -> None:
    note = "Ctrl-C ends it"
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            height = console.size.height
            live.update(frame(status, height=height, note=note), refresh=True)
            time.sleep(interval_s)
            try:
                status, note = _from_heartbeats(client, NUM_REQUESTS), "Ctrl-C ends it"
            except (Unavailable, DeadlineExceeded) as error:
                note = f"not up to date; trying again: {error}"


def _from_heartbeats(client: SyncClient, num_requests: int) -> inference_pb2.GetClusterStatusReply:
    request = inference_pb2.GetClusterStatusRequest(
        as_heard=True, num_requests=num_requests, with_history=True
    )
    return client.status(_TIMEOUT_S, request)


def to_plain(message: Message) -> dict[str, Any]:
    """Convert a message to JSON values: all fields, with numbers as numbers and bytes as hex."""
    return {field.name: _plain(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return to_plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value]


# -- columns that both commands show


def failed(status: inference_pb2.GetClusterStatusReply) -> str:
    """A text with the number of failed requests, by status code."""
    by_code = sorted(status.num_requests_failed_by_code.items())
    codes = ", ".join(f"{num} {code}" for code, num in by_code)
    return f"{status.num_requests_failed} failed" + (f" ({codes})" if codes else "")


def _problems(status: inference_pb2.GetClusterStatusReply) -> list[Text]:
    return [Text(f"problem: {problem}", style="bold red") for problem in status.problems]


def _num_in_use(worker: common_pb2.WorkerStatus) -> int:
    num_unused = worker.num_free_blocks + worker.num_cached_blocks + worker.num_quarantined_blocks
    return worker.num_blocks - num_unused


def _prompt_hit_rate(worker: common_pb2.WorkerStatus) -> str:
    hits = worker.num_prompt_tokens_local + worker.num_prompt_tokens_from_store
    return percent(hits, hits + worker.num_prompt_tokens_computed)


_IN_USE = number("in use", _num_in_use)
_RUNNING = number("running", "num_running")
_WAITING_REQUESTS = number("waiting", "num_waiting")
_LEASES = number("leases", "num_leases")
_STORE_TRAFFIC = (
    number("hit rate", lambda store: percent(store.num_blocks_matched, store.num_blocks_asked)),
    number("written", lambda store: format_bytes(store.num_bytes_written)),
    number("read", lambda store: format_bytes(store.num_bytes_read)),
)


# -- the tables of `baton status`


def status_tables(status: inference_pb2.GetClusterStatusReply) -> RenderableType:
    """The tables of `baton status`: requests, problems, workers with their blocks and hit rates,
    stores with their frames, leases, tiers and tenants, and the links between them. Pure."""
    redis = "reachable" if status.redis_reachable else "NOT reachable: no remote prefix hits"
    head = Text(
        f"{status.num_requests_in_flight} requests in flight, {status.num_requests_finished} "
        f"finished, {failed(status)}; Redis {redis}"
    )
    workers = sorted(status.workers, key=lambda worker: worker.worker_id)
    stores = sorted(status.stores, key=lambda store: store.node_id)
    with_pages = [store for store in stores if store.num_pages or store.num_demoted]
    tenants = [
        (store.node_id, usage)
        for store in stores
        for usage in sorted(store.tenants, key=lambda usage: usage.tenant)
    ]
    links = [(worker.worker_id, link) for worker in workers for link in worker.links]
    tables = [
        *(render.table(columns, workers) for columns in (_PLACES, _BLOCKS, _PROMPT_TOKENS)),
        *(render.table(columns, stores) for columns in (_FRAMES, _STORE_BLOCKS)),
        *(
            render.table(columns, items)
            for columns, items in ((_PAGES, with_pages), (_TENANTS, tenants), (_LINKS, links))
            if items
        ),
    ]
    return Group(head, *_problems(status), *(Padding(shown, (1, 0, 0, 0)) for shown in tables))


def _store_of(worker: common_pb2.WorkerStatus) -> str:
    if not worker.store_address:
        return "none"
    return worker.store_node_id or "not attached"


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(int(bytes_per_s))}/s" if bytes_per_s else "-"


def _link_state(link: common_pb2.LinkStatus) -> str:
    if link.problem:
        return f"not measured: {link.problem}"
    return "DEGRADED" if link.degraded else "ok"


_PLACES = (
    text("worker", "worker_id"),
    text("role", "role"),
    text("model", "model"),
    text("dtype", "dtype"),
    text("device", "device"),
    text("store", _store_of),
    text("own store over", "transport"),
    text("other stores over", lambda worker: worker.remote_transport or "-"),
    text("lenders over", lambda worker: worker.direct_transport or "-"),
    text("lends as", lambda worker: worker.lender_node_id or "-"),
    text(
        "state", lambda worker: worker.integrity_error or ("draining" if worker.draining else "ok")
    ),
)
_BLOCKS = (
    text("blocks of", "worker_id"),
    number("all", "num_blocks"),
    number("free", "num_free_blocks"),
    number("cached", "num_cached_blocks"),
    _IN_USE,
    number("quarantined", "num_quarantined_blocks"),
    number("lent", "num_lent_blocks"),
    _WAITING_REQUESTS,
    _RUNNING,
)
_PROMPT_TOKENS = (
    text("prompt tokens of", "worker_id"),
    number("computed", "num_prompt_tokens_computed"),
    number("local", "num_prompt_tokens_local"),
    number("from store", "num_prompt_tokens_from_store"),
    number("hit rate", _prompt_hit_rate),
    number(
        "device hit rate",
        lambda worker: percent(worker.num_prefix_tokens_cached, worker.num_prefix_tokens_asked),
    ),
    number("output", "num_output_tokens"),
)
_FRAMES = (
    text("frames of", "node_id"),
    number("all", "num_frames"),
    number("free", "num_free"),
    number("writing", "num_writing"),
    number("committed", "num_committed"),
    number("pinned", "num_pinned"),
    number("quarantined", "num_quarantined"),
    _LEASES,
    text(
        "state",
        lambda store: store.integrity_error or ("ok" if store.reachable else "not reachable"),
    ),
)
_STORE_BLOCKS = (
    text("blocks in", "node_id"),
    number("asked for", "num_blocks_asked"),
    number("found", "num_blocks_matched"),
    *_STORE_TRAFFIC,
    number("evicted", "num_evictions"),
)
_PAGES = (
    text("pages of", "node_id"),
    number("all", "num_pages"),
    number("used", "num_pages_used"),
    number("demoted", "num_demoted"),
    number("promoted", "num_promoted"),
    number("bad", "num_pages_bad"),
)
_TENANTS = (
    text("tenants of", lambda item: item[0]),
    text("tenant", lambda item: item[1].tenant or _NO_TENANT),
    number("blocks", lambda item: item[1].num_blocks),
    number("guaranteed", lambda item: item[1].num_blocks_guaranteed or "-"),
)
_LINKS = (
    text("links of", lambda item: item[0]),
    text("to", lambda item: item[1].node_id or item[1].store_address),
    text("transport", lambda item: item[1].transport),
    number("write", lambda item: _rate(item[1].write_bytes_per_s)),
    number("read", lambda item: _rate(item[1].read_bytes_per_s)),
    number(
        "latency of a block",
        lambda item: format_seconds(item[1].latency_s) if item[1].latency_s else "-",
    ),
    number("floor", lambda item: _rate(item[1].floor_bytes_per_s)),
    text("state", lambda item: _link_state(item[1])),
)


# -- the screen of `baton top`


def frame(
    status: inference_pb2.GetClusterStatusReply, *, height: int = 0, note: str = ""
) -> RenderableType:
    """One screen of `baton top`. It shows as many requests as fit, those in flight first. Pure.

    Args: height: lines of the screen; 0: no limit. note: the last line.
    """
    workers = sorted(
        status.workers, key=lambda worker: (worker.role != "prefill", worker.worker_id)
    )
    stores = sorted(status.stores, key=lambda store: store.node_id)
    problems = _problems(status)
    # 1 line of the head, 2 of figures, 2 around each table, and empty lines between them.
    taken = 1 + len(problems) + 3 + 2 + max(1, len(workers)) + 2 + max(1, len(stores)) + 2 + 2
    room = max(3, height - taken) if height else len(status.requests)
    parts: list[RenderableType] = [
        _figures(status),
        _or_note(_TOP_WORKERS, workers, "none is registered"),
        _or_note(_TOP_STORES, stores, "none: every prompt is computed"),
        _or_note(
            _REQUESTS, status.requests[:room], 'none yet; try: baton generate "Once upon a time"'
        ),
    ]
    if note:
        parts.append(Text(note, style="dim"))
    return Group(_head(status), *problems, *(Padding(part, (1, 0, 0, 0)) for part in parts))


def _or_note(columns: Sequence[render.Column], items: Sequence[Any], note: str) -> Table:
    """A table, or its titles and a line that says why it is empty."""
    made = render.table(columns, items)
    if not items:
        made.add_row(Text(note, style="dim"))
    return made


def _head(status: inference_pb2.GetClusterStatusReply) -> Text:
    models = ", ".join(sorted({worker.model for worker in status.workers}))
    head = Text.assemble(
        ("Baton", "bold"), f"  {models or 'no model'}", (f"  {status.router_id}", "dim")
    )
    if not status.redis_reachable:
        head.append("  Redis NOT reachable", style="bold red")
    return head


def _figures(status: inference_pb2.GetClusterStatusReply) -> Table:
    """Figures of the last minute, above sparklines of the last ten."""
    points = list(status.history)
    late = points[-_LATE_POINTS:]
    interval_s = status.history_interval_ms / 1000 or 1.0
    num_output = sum(point.num_output_tokens for point in late)
    firsts = [point.first_token_s for point in late if point.first_token_s]
    hits, asked = _hits(late)
    rate = num_output / (interval_s * len(late)) if late else 0.0
    first = format_seconds(sum(firsts) / len(firsts)) if firsts else "-"
    made = Table.grid(padding=(0, 3))
    made.add_row(
        f"{status.num_requests_in_flight} in flight",
        f"{rate:.1f} tokens/s",
        f"first token {first}",
        f"hit rate {percent(hits, asked)}",
        f"{status.num_requests_finished} finished, {failed(status)}",
    )
    made.add_row(
        sparks([point.num_in_flight for point in points]),
        sparks([point.num_output_tokens for point in points]),
        sparks([point.first_token_s or None for point in points]),
        sparks([_hit_share(point) for point in points], top=1.0),
        sparks([point.num_finished for point in points]),
    )
    return made


def sparks(values: Sequence[float | None], *, top: float = 0.0) -> Text:
    """A sparkline of the values, the newest on the right; None is a gap. Where there are too many,
    neighbours are shown as their largest value.

    Args: top: the value of a full block; 0.0: the largest value.
    """
    step = -(-len(values) // _SPARK_WIDTH) or 1
    groups = [values[max(0, end - step) : end] for end in range(len(values), 0, -step)][::-1]
    peaks = [max((v for v in group if v is not None), default=None) for group in groups]
    highest = top or max((peak for peak in peaks if peak is not None), default=0.0)
    line = ""
    for peak in peaks:
        if peak is None:
            line += " "
        elif highest <= 0:
            line += _SPARKS[0]
        else:
            line += _SPARKS[min(len(_SPARKS) - 1, int(peak / highest * (len(_SPARKS) - 1) + 0.5))]
    return Text(line, style=_USED)


def bar(parts: Iterable[tuple[str, float]], whole: float, *, width: int = _BAR_WIDTH) -> Text:
    """A bar of (colour, size) parts, as wide as their shares of `whole`; the rest is free."""
    made = Text()
    at = 0.0
    for colour, size in parts:
        begin, at = round(at * width), at + (size / whole if whole > 0 else 0.0)
        num = min(width, round(at * width)) - begin
        # A part that is not empty has at least one character.
        num = max(num, int(size > 0 and len(made) < width))
        made.append("█" * min(num, width - len(made)), style=colour)
    made.append("░" * (width - len(made)), style=_FREE)
    return made


def _worker_bar(worker: common_pb2.WorkerStatus) -> Text:
    parts = (
        (_USED, _num_in_use(worker)),
        (_KEPT, worker.num_cached_blocks),
        (_OUT, worker.num_quarantined_blocks),
    )
    return bar(parts, worker.num_blocks)


def _worker_state(worker: common_pb2.WorkerStatus) -> Text:
    if worker.integrity_error:
        return Text(worker.integrity_error, style="bold red")
    if worker.draining:
        return Text("draining", style="yellow")
    return Text("busy" if worker.num_running else "idle", style="" if worker.num_running else "dim")


def _store_bar(store: inference_pb2.StoreStatus) -> Text:
    parts = (
        (_PINNED, store.num_pinned),
        (_KEPT, store.num_committed - store.num_pinned),
        (_WRITING, store.num_writing),
        (_OUT, store.num_quarantined),
    )
    return bar(parts, store.num_frames)


def _store_state(store: inference_pb2.StoreStatus) -> Text:
    problem = store.integrity_error or store.file_tier_problem
    return Text(problem or "ok", style="bold red" if problem else "dim")


def _request_bar(request: inference_pb2.RequestInfo) -> Text:
    parts = [(_colour(span.stage), span.end_s - span.begin_s) for span in request.spans]
    return bar(parts, request.elapsed_s, width=_TIME_WIDTH)


def _request_state(request: inference_pb2.RequestInfo) -> Text:
    if not request.outcome:
        return Text(request.state, style=_DECODE)
    styles = {"finished": "green", "failed": "bold red"}
    said = request.outcome
    if request.code and request.outcome == "failed":
        said = f"{said}: {request.code.replace('_', ' ')}"
    return Text(said, style=styles.get(request.outcome, "yellow"))


_COLOURS: Sequence[tuple[Callable[[str], bool], str]] = (
    (lambda stage: stage in _WAITING, _WAIT),
    (lambda stage: stage in _MOVING, _HANDOVER),
    (lambda stage: stage.startswith("prefill"), _PREFILL),
    (lambda stage: stage.startswith("decod"), _DECODE),
    (lambda stage: stage == "stream", _STREAM),
)


def _colour(stage: str) -> str:
    return next((colour for fits, colour in _COLOURS if fits(stage)), _ROUTER)


def _hits(points: Iterable[inference_pb2.UsagePoint]) -> tuple[int, int]:
    """Prompt tokens that came from a cache, and all prompt tokens."""
    found = computed = 0
    for point in points:
        found += point.num_tokens_local + point.num_tokens_from_store
        computed += point.num_tokens_computed
    return found, found + computed


def _hit_share(point: inference_pb2.UsagePoint) -> float | None:
    found, asked = _hits([point])
    return found / asked if asked else None


def _shortened(name: str) -> str:
    return name if len(name) <= _MAX_NAME_CHARS else f"{name[: _MAX_NAME_CHARS - 1]}…"


_TOP_WORKERS = (
    text("worker", "worker_id"),
    text("cache", _worker_bar),
    _IN_USE,
    number("kept", "num_cached_blocks"),
    number("blocks", "num_blocks"),
    _RUNNING,
    _WAITING_REQUESTS,
    number("hit rate", lambda worker: _prompt_hit_rate(worker) if worker.role == "prefill" else ""),
    text("state", _worker_state),
)
_TOP_STORES = (
    text("store", "node_id"),
    text("memory", _store_bar),
    number("pinned", "num_pinned"),
    number("blocks", "num_committed"),
    number("frames", "num_frames"),
    number(
        "pages",
        lambda store: f"{store.num_pages_used}/{store.num_pages}" if store.num_pages else "-",
    ),
    _LEASES,
    *_STORE_TRAFFIC,
    text("state", _store_state),
)
_REQUESTS = (
    text("request", lambda request: _shortened(request.request_id)),
    text("tenant", lambda request: _shortened(request.tenant)),
    text("state", _request_state),
    text(
        "ran on",
        lambda request: " > ".join(filter(None, (request.prefill_id, request.decode_id))) or "-",
    ),
    number("prompt", "num_prompt_tokens"),
    number("output", "num_output_tokens"),
    number(
        "first token",
        lambda request: format_seconds(request.first_token_s) if request.first_token_s else "-",
    ),
    number("time", lambda request: format_seconds(request.elapsed_s)),
    text("where the time went", _request_bar),
)
