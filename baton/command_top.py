"""`baton top`: workers, stores and requests as they are now, until Ctrl-C.

As the last heartbeats say, so that looking costs the workers nothing; `baton status` asks each of
them. A router that does not answer is asked again: the last frame stays, and says so. Where the
output is no terminal, one frame is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from typing import Any

from rich.console import Console
from rich.live import Live

from baton import command_options, provenance_view, top_view
from baton.client import SyncClient
from baton.errors import Unavailable
from process.errors import DeadlineExceeded
from protos import inference_pb2

NUM_REQUESTS = 64
NUM_AT_ONCE = 16
"""In a single frame, which has no screen to fill."""
_TIMEOUT_S = 3.0


def add_parser(commands: Any) -> None:
    """`baton top` and its options."""
    parser = commands.add_parser(
        "top", help="watch the cluster in the terminal", description=__doc__
    )
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.add_argument(
        "--interval",
        type=command_options.seconds,
        default=1.0,
        metavar="SECONDS",
        help="between two looks; default: 1",
    )
    command_options.add_address(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Returns: 0. Raises: what the client raises, for the first frame."""
    console = Console(highlight=False)
    with command_options.client_of(parsed) as client:
        is_once = parsed.once or not console.is_terminal
        status = _status(client, NUM_AT_ONCE if is_once else NUM_REQUESTS)
        if is_once:
            provenance_view.show(top_view.frame(status))
            return 0
        with contextlib.suppress(KeyboardInterrupt):
            _watch(console, client, status, parsed.interval)
    return 0


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
            live.update(top_view.frame(status, height=height, note=note), refresh=True)
            time.sleep(interval_s)
            try:
                status, note = _status(client), "Ctrl-C ends it"
            except (Unavailable, DeadlineExceeded) as error:
                note = f"as last heard of; trying again: {error}"


def _status(
    client: SyncClient, num_requests: int = NUM_REQUESTS
) -> inference_pb2.GetClusterStatusReply:
    request = inference_pb2.GetClusterStatusRequest(
        as_heard=True, num_requests=num_requests, with_history=True
    )
    return client.status(_TIMEOUT_S, request)
