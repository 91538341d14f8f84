"""Numbers as people read them, and what `baton up` shows."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from baton.answers import Completion, Usage, provenance_from
from baton.cli.render import format_bytes, format_seconds, provenance_block
from baton.cli.status import status_tables
from baton.cli.up import StartView
from baton.cluster.supervisor import ClusterEvent
from protos import common_pb2, inference_pb2


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 60, "1048576.0 TiB"),
    ],
)
def test_bytes(num_bytes: int, shown: str) -> None:
    assert format_bytes(num_bytes) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(0.0123, "12.3 ms"), (1.5, "1.50 s")])
def test_seconds(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


def _shown(*, terminal: bool) -> str:
    out = io.StringIO()
    view = StartView(Console(file=out, force_terminal=terminal, width=80))
    with view:
        view.on_event(ClusterEvent("prefill-0", "starting"))
        view.on_event(ClusterEvent("prefill-0", "loading", "weights", 5, 10))
        view.on_event(ClusterEvent("prefill-0", "ready", "127.0.0.1:1"))
    view.on_event(ClusterEvent("prefill-0", "died", "killed by signal 9"))
    view.silence()
    view.on_event(ClusterEvent("prefill-0", "stopped"))
    return out.getvalue()


def test_plain_lines_where_there_is_no_terminal() -> None:
    assert _shown(terminal=False).splitlines() == [
        "prefill-0 ready: 127.0.0.1:1",
        "prefill-0 died: killed by signal 9",
    ]


def test_bars_on_a_terminal_then_lines() -> None:
    shown = _shown(terminal=True)
    assert "━" in shown and "ready" in shown
    assert shown.rstrip().endswith("prefill-0 died: killed by signal 9")


def _rows(renderable: RenderableType) -> list[list[str]]:
    """The words of each line."""
    out = io.StringIO()
    Console(file=out, width=250).print(renderable)
    return [line.split() for line in out.getvalue().splitlines()]


def _legs(*legs: common_pb2.KvLeg) -> RenderableType:
    provenance = provenance_from(common_pb2.Provenance(model="m", num_prompt_tokens=40, legs=legs))
    return provenance_block(Completion("r", "", (), "eos", Usage(40, 1, 0), provenance))


def test_an_account_says_what_came_out_of_the_prefill_workers_own_cache() -> None:
    prefill = common_pb2.KvLeg(
        worker_id="p", handover=common_pb2.HANDOVER_PATH_DIRECT, num_blocks_behind=3
    )
    decode = common_pb2.KvLeg(worker_id="d", num_tokens_direct=40)
    decode.from_store.add(node_id="p/lent", tier=common_pb2.TIER_DEVICE, num_tokens=40)
    rows = _rows(_legs(prefill, decode))
    by_name = {row[0]: row for row in rows if row}
    assert by_name["worker"][-4:] == ["handover", "direct", "blocks", "behind"]
    assert by_name["p"][-3:] == ["direct", "0", "3"]
    assert by_name["d"][-3:] == ["-", "40", "0"]
    assert "40 device" in " ".join(by_name["d"])


def test_an_account_without_a_direct_handover_has_no_columns_for_it() -> None:
    leg = common_pb2.KvLeg(worker_id="p", handover=common_pb2.HANDOVER_PATH_STORE)
    by_name = {row[0]: row for row in _rows(_legs(leg)) if row}
    assert by_name["worker"][-1] == "handover" and by_name["p"][-1] == "store"


def test_an_account_names_the_transports_that_moved_its_bytes() -> None:
    prefill = common_pb2.KvLeg(worker_id="p", transport="grpc, shm")
    prefill.transports.add(transport="grpc", num_bytes_read=10)
    prefill.transports.add(transport="shm", num_bytes_read=10, num_bytes_written=10)
    decode = common_pb2.KvLeg(worker_id="d", transport="nixl")
    decode.transports.add(transport="nixl", num_bytes_read=10)
    by_name = {row[0]: " ".join(row) for row in _rows(_legs(prefill, decode)) if row}
    assert " grpc (read), shm (read, written) " in by_name["p"]
    assert " nixl " in by_name["d"]


def test_a_status_says_who_lends() -> None:
    worker = common_pb2.WorkerStatus(
        worker_id="p",
        lender_node_id="p/lent",
        num_lent_blocks=5,
        transport="shm",
        remote_transport="grpc",
        direct_transport="nixl",
    )
    other = common_pb2.WorkerStatus(worker_id="d")
    rows = _rows(status_tables(inference_pb2.GetClusterStatusReply(workers=[worker, other])))
    (lends,) = (row for row in rows if row[:1] == ["p"] and "p/lent" in row)
    assert lends[-5:] == ["shm", "grpc", "nixl", "p/lent", "ok"]
    (none,) = (row for row in rows if row[:1] == ["d"] and row[-1] == "ok")
    assert none[-4:] == ["-", "-", "-", "ok"]
    blocks = [row for row in rows if "quarantined" in row or row[:1] in (["p"], ["d"])]
    head = next(index for index, row in enumerate(blocks) if "quarantined" in row)
    place = blocks[head].index("lent") - len(blocks[head])
    assert {row[0]: row[place] for row in blocks[head + 1 : head + 3]} == {"d": "0", "p": "5"}
