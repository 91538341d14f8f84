"""`baton adapter load|unload|list`: the LoRA adapters of a running cluster's workers.

An adapter is loaded on every worker, by a folder that each of them can read; routers hear of it
with the workers' next heartbeat. Loaded again under the same name with other content it is another
adapter: no KV of the old one is met again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc.aio

from baton import command_options
from baton.errors import Unavailable
from process.access import Role
from process.serving import Dialer
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
    with command_options.client_of(parsed) as client:
        workers = client.status().workers
    if not workers:
        raise Unavailable("the cluster has no workers")
    return sorted(workers, key=lambda worker: worker.worker_id)


def _on_each(
    parsed: argparse.Namespace, call: Callable[[Any], Awaitable[object]], done: str
) -> int:
    """One call to every worker; who refuses is named, the others have done it.

    Returns: 0 if all did, else 1.
    """
    dial, workers = command_options.dialer_of(parsed), _workers(parsed)
    return asyncio.run(_call_each(dial, workers, call, f"{done} {parsed.name}"))


async def _call_each(
    dial: Dialer,
    workers: Sequence[common_pb2.WorkerStatus],
    call: Callable[[Any], Awaitable[object]],
    done: str,
) -> int:
    code = 0
    for worker in workers:
        role = Role(worker.role)
        make_stub: Callable[[grpc.aio.Channel], Any] = (
            prefill_pb2_grpc.PrefillStub if role is Role.PREFILL else decode_pb2_grpc.DecodeStub
        )
        async with dial(worker.address, role) as channel:
            try:
                await call(make_stub(channel))
                sys.stdout.write(f"{worker.worker_id}: {done}\n")
            except grpc.aio.AioRpcError as error:
                why = error.details() or error.code().name
                sys.stderr.write(f"baton: {worker.worker_id}: {why}\n")
                code = 1
    return code
