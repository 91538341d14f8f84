"""`baton adapter load|unload|list`: the LoRA adapters of a running cluster.

An adapter is loaded on every worker of its model or on none, by a folder that each of them can
read. When the command has ended well, every router serves it; workers that start later load it
themselves. Loaded again under the same name with other content, it replaces the old one: requests
that run end on what they began with, new ones get the new content.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from baton import command_options
from baton.errors import Unavailable
from protos import common_pb2, inference_pb2

_LOAD_S = 900.0
"""For a load: the router bounds it, by times.adapter_s."""
_WAIT_S = 3600.0
"""For requests to end: as long as one may take."""


def add_parser(commands: Any) -> None:
    """`baton adapter` and its actions."""
    parser = commands.add_parser("adapter", help="LoRA adapters", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    load = actions.add_parser("load", help="load one on every worker, or replace its content")
    load.add_argument("name")
    load.add_argument("folder", type=Path, help="as PEFT saves it, on the workers' machines")
    load.add_argument("--model", default="", help="that it adapts, where several are served")
    unload = actions.add_parser(
        "unload", help="take one off every worker; refused while requests use it"
    )
    unload.add_argument("name")
    unload.add_argument(
        "--wait",
        nargs="?",
        type=float,
        const=_WAIT_S,
        metavar="SECONDS",
        help="refuse new requests for it at once, and wait for those that use it to end",
    )
    for action, run in ((load, _load), (unload, _unload), (actions.add_parser("list"), _list)):
        command_options.add_address(action)
        action.set_defaults(run=run)


def _load(parsed: argparse.Namespace) -> int:
    with command_options.client_of(parsed) as client:
        reply = client.load_adapter(
            inference_pb2.LoadClusterAdapterRequest(
                name=parsed.name, folder=str(parsed.folder.resolve()), model=parsed.model
            ),
            timeout_s=_LOAD_S,
        )
    for worker_id in reply.worker_ids:
        sys.stdout.write(f"{worker_id}: loaded {parsed.name}\n")
    return 0


def _unload(parsed: argparse.Namespace) -> int:
    request = inference_pb2.UnloadClusterAdapterRequest(
        name=parsed.name, wait=parsed.wait is not None
    )
    with command_options.client_of(parsed) as client:
        reply = client.unload_adapter(request, timeout_s=parsed.wait or _LOAD_S)
    for worker_id in reply.worker_ids:
        sys.stdout.write(f"{worker_id}: unloaded {parsed.name}\n")
    return 0


def _list(parsed: argparse.Namespace) -> int:
    for worker_id, adapter in _adapters(parsed):
        sys.stdout.write(
            f"{worker_id}: {adapter.name}, content {adapter.digest[:16]}, rank {adapter.rank}\n"
        )
    return 0


def _adapters(parsed: argparse.Namespace) -> Iterator[tuple[str, common_pb2.AdapterStatus]]:
    with command_options.client_of(parsed) as client:
        workers = client.status().workers
    if not workers:
        raise Unavailable("the cluster has no workers")
    for worker in sorted(workers, key=lambda worker: worker.worker_id):
        for adapter in worker.adapters:
            yield worker.worker_id, adapter
