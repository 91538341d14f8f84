"""`baton adapter load|unload|list`: the LoRA adapters of a running cluster's workers.

An adapter is loaded on every worker, by a folder that each of them can read; routers hear of it
with the workers' next heartbeat. Loaded again under the same name with other content it is another
adapter: no KV of the old one is met again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from baton import command_options
from baton.client import SyncClient
from baton.errors import Unavailable
from protos import common_pb2, decode_pb2_grpc, prefill_pb2_grpc

_TIMEOUT_S = 120.0
"""For one worker: reading a large adapter from a slow disk."""


def add_parser(commands: Any) -> None:
    """`baton adapter` and its actions."""
    parser = commands.add_parser("adapter", help="LoRA adapters", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    load = actions.add_parser("load", help="load one on every worker")
    load.add_argument("name")
    load.add_argument("folder", type=Path, help="as PEFT saves it, on the workers' machines")
    unload = actions.add_parser("unload", help="take one off every worker")
    unload.add_argument("name")
    for action, run in ((load, _load), (unload, _unload), (actions.add_parser("list"), _list)):
        command_options.add_address(action)
        action.set_defaults(run=run)


def _load(parsed: argparse.Namespace) -> int:
    request = common_pb2.LoadAdapterRequest(name=parsed.name, folder=str(parsed.folder.resolve()))
    return _on_each(parsed, lambda stub: stub.LoadAdapter(request, timeout=_TIMEOUT_S), "loaded")


def _unload(parsed: argparse.Namespace) -> int:
    request = common_pb2.UnloadAdapterRequest(name=parsed.name)
    return _on_each(
        parsed, lambda stub: stub.UnloadAdapter(request, timeout=_TIMEOUT_S), "unloaded"
    )


def _list(parsed: argparse.Namespace) -> int:
    for worker in _workers(parsed):
        for adapter in worker.adapters:
            sys.stdout.write(
                f"{worker.worker_id}: {adapter.name}, content {adapter.digest[:16]}, rank "
                f"{adapter.rank}\n"
            )
    return 0


def _workers(parsed: argparse.Namespace) -> Sequence[common_pb2.WorkerStatus]:
    with SyncClient(command_options.address_of(parsed)) as client:
        workers = client.status().workers
    if not workers:
        raise Unavailable("the cluster has no workers")
    return sorted(workers, key=lambda worker: worker.worker_id)


def _on_each(parsed: argparse.Namespace, call: Callable[[Any], object], done: str) -> int:
    """One call to every worker; who refuses is named, the others have done it.

    Returns: 0 if all did, else 1.
    """
    code = 0
    for worker in _workers(parsed):
        make_stub: Callable[[grpc.Channel], Any] = (
            prefill_pb2_grpc.PrefillStub if worker.role == "prefill" else decode_pb2_grpc.DecodeStub
        )
        with grpc.insecure_channel(worker.address) as channel:
            try:
                call(make_stub(channel))
                sys.stdout.write(f"{worker.worker_id}: {done} {parsed.name}\n")
            except grpc.RpcError as error:
                sys.stderr.write(f"baton: {worker.worker_id}: {_why(error)}\n")
                code = 1
    return code


def _why(error: grpc.RpcError) -> str:
    details = error.details() if isinstance(error, grpc.Call) else None
    return str(details or error)
