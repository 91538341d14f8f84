"""One frame of `baton top`: a cluster's status as a screen of text. Pure.

As many requests as fit into the height are shown, those under way first; everything else is always
there. Bars and colours are those of the live page: what is in use, what is kept for later, what is
out of use; where a request's time went.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from baton.provenance_view import format_bytes, format_seconds
from baton.status_view import failed
from baton.tables import percent, table
from protos import common_pb2, inference_pb2

_SPARKS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 24
_SPARK_WIDTH = 30
_TIME_WIDTH = 30
_LATE_POINTS = 30
"""The figures are of the last minute."""
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


def frame(
    status: inference_pb2.GetClusterStatusReply, *, height: int = 0, note: str = ""
) -> RenderableType:
    """height: lines of the screen; 0: as many as it takes. note: what to say in the last line."""
    workers = sorted(
        status.workers, key=lambda worker: (worker.role != "prefill", worker.worker_id)
    )
    stores = sorted(status.stores, key=lambda store: store.node_id)
    problems = [Text(f"problem: {problem}", style="bold red") for problem in status.problems]
    parts: list[RenderableType] = [
        _head(status),
        *problems,
        Padding(_figures(status), (1, 0, 0, 0)),
        Padding(_workers(workers), (1, 0, 0, 0)),
        Padding(_stores(stores), (1, 0, 0, 0)),
    ]
    # Heads and the lines between: 1 head, 2 figures, and 2 lines of each table.
    taken = 1 + len(problems) + 3 + 2 + max(1, len(workers)) + 2 + max(1, len(stores)) + 2 + 2
    room = max(3, height - taken) if height else len(status.requests)
    parts.append(Padding(_requests(status.requests[:room]), (1, 0, 0, 0)))
    if note:
        parts.append(Padding(Text(note, style="dim"), (1, 0, 0, 0)))
    return Group(*parts)


def _head(status: inference_pb2.GetClusterStatusReply) -> Text:
    models = ", ".join(sorted({worker.model for worker in status.workers}))
    head = Text.assemble(
        ("Baton", "bold"), f"  {models or 'no model'}", (f"  {status.router_id}", "dim")
    )
    if not status.redis_reachable:
        head.append("  Redis NOT reachable", style="bold red")
    return head


def _figures(status: inference_pb2.GetClusterStatusReply) -> Table:
    """Of the last minute, with the last ten as a line."""
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
    """The values as a line of blocks, newest right, the largest as high as a block gets; one that
    is None is a gap. More than fit are put together, by their largest."""
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
    """(colour, size) side by side, in the ratio of their sizes to `whole`; what is left is free."""
    made = Text()
    at = 0.0
    for colour, size in parts:
        begin, at = round(at * width), at + (size / whole if whole > 0 else 0.0)
        num = min(width, round(at * width)) - begin
        # What is there is seen, however little it is.
        num = max(num, int(size > 0 and len(made) < width))
        made.append("█" * min(num, width - len(made)), style=colour)
    made.append("░" * (width - len(made)), style=_FREE)
    return made


def _workers(workers: Sequence[common_pb2.WorkerStatus]) -> Table:
    made = table("worker", "cache", numbers=("in use", "kept", "blocks", "running", "waiting"))
    made.add_column("hit rate", justify="right")
    made.add_column("state")
    for worker in workers:
        num_out = worker.num_quarantined_blocks
        in_use = worker.num_blocks - worker.num_free_blocks - worker.num_cached_blocks - num_out
        parts = ((_USED, in_use), (_KEPT, worker.num_cached_blocks), (_OUT, num_out))
        hits = worker.num_prompt_tokens_local + worker.num_prompt_tokens_from_store
        made.add_row(
            Text(worker.worker_id),
            bar(parts, worker.num_blocks),
            str(in_use),
            str(worker.num_cached_blocks),
            str(worker.num_blocks),
            str(worker.num_running),
            str(worker.num_waiting),
            percent(hits, hits + worker.num_prompt_tokens_computed)
            if worker.role == "prefill"
            else "",
            _worker_state(worker),
        )
    if not workers:
        made.add_row(Text("none is registered", style="dim"))
    return made


def _worker_state(worker: common_pb2.WorkerStatus) -> Text:
    if worker.integrity_error:
        return Text(worker.integrity_error, style="bold red")
    if worker.draining:
        return Text("draining", style="yellow")
    return Text("busy" if worker.num_running else "idle", style="" if worker.num_running else "dim")


def _stores(stores: Sequence[inference_pb2.StoreStatus]) -> Table:
    made = table("store", "memory", numbers=("pinned", "blocks", "frames", "pages", "leases"))
    for name in ("hit rate", "written", "read"):
        made.add_column(name, justify="right")
    made.add_column("state")
    for store in stores:
        parts = (
            (_PINNED, store.num_pinned),
            (_KEPT, store.num_committed - store.num_pinned),
            (_WRITING, store.num_writing),
            (_OUT, store.num_quarantined),
        )
        problem = store.integrity_error or store.file_tier_problem
        made.add_row(
            Text(store.node_id),
            bar(parts, store.num_frames),
            str(store.num_pinned),
            str(store.num_committed),
            str(store.num_frames),
            f"{store.num_pages_used}/{store.num_pages}" if store.num_pages else "-",
            str(store.num_leases),
            percent(store.num_blocks_matched, store.num_blocks_asked),
            format_bytes(store.num_bytes_written),
            format_bytes(store.num_bytes_read),
            Text(problem or "ok", style="bold red" if problem else "dim"),
        )
    if not stores:
        made.add_row(Text("none: every prompt is computed", style="dim"))
    return made


def _requests(requests: Sequence[inference_pb2.RequestInfo]) -> Table:
    made = table("request", "tenant", "state", "ran on")
    for name in ("prompt", "output", "first token", "time"):
        made.add_column(name, justify="right")
    made.add_column("where the time went")
    for request in requests:
        parts = [(_colour(span.stage), span.end_s - span.begin_s) for span in request.spans]
        ran_on = " > ".join(filter(None, (request.prefill_id, request.decode_id)))
        made.add_row(
            Text(_shortened(request.request_id)),
            Text(_shortened(request.tenant)),
            _request_state(request),
            ran_on or "-",
            str(request.num_prompt_tokens),
            str(request.num_output_tokens),
            format_seconds(request.first_token_s) if request.first_token_s else "-",
            format_seconds(request.elapsed_s),
            bar(parts, request.elapsed_s, width=_TIME_WIDTH),
        )
    if not requests:
        made.add_row(Text('none yet; try: baton generate "Once upon a time"', style="dim"))
    return made


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
    """Prompt tokens that some cache had, and all."""
    found = computed = 0
    for point in points:
        found += point.num_tokens_local + point.num_tokens_from_store
        computed += point.num_tokens_computed
    return found, found + computed


def _hit_share(point: inference_pb2.UsagePoint) -> float | None:
    found, asked = _hits([point])
    return found / asked if asked else None


def _shortened(name: str, most: int = 24) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"
