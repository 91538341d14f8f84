"""`baton adapter`: loads, unloads and lists the LoRA adapters of a running cluster."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from baton.cli import options
from baton.cli.options import FILE, RouterTarget, value
from baton.errors import Unavailable
from protos import inference_pb2

_LOAD_S = 900.0
"""Limit of a load here; the router's own is times.adapter_s."""
_WAIT_S = 3600.0
"""Limit of the wait for requests to end: the longest time of one."""


@options.group("adapter")
def adapter() -> None:
    """Load, unload or list the LoRA adapters of a running cluster.

    An adapter is loaded on every worker of its model or on none, from a folder that each of them
    can read. When `load` has succeeded, every router serves the adapter, and workers that start
    later load it themselves. An adapter that is loaded again under the same name replaces the old
    one: running requests end with the old content, new ones get the new content.
    """


@adapter.command("load")
@click.argument("name")
@click.argument("folder", type=FILE)
@value("--model", "NAME", "The model that it adapts, if the cluster serves several.", "")
@options.router_target()
def _load(name: str, folder: Path, model: str, target: RouterTarget) -> None:
    """Load adapter NAME on every worker, or replace its content.

    FOLDER is a folder that PEFT saved, at the same path on the machine of each worker.
    """
    request = inference_pb2.LoadClusterAdapterRequest(
        name=name, folder=str(folder.resolve()), model=model
    )
    with target.client() as client:
        reply = client.load_adapter(request, timeout_s=_LOAD_S)
    for worker_id in reply.worker_ids:
        sys.stdout.write(f"{worker_id}: loaded {name}\n")


@adapter.command("unload")
@click.argument("name")
@value(
    "--wait",
    "[SECONDS]",
    "Refuse new requests for it, and wait until the running ones end; by default at most "
    f"{_WAIT_S:.0f} s.",
    type=float,
    is_flag=False,
    flag_value=_WAIT_S,
)
@options.router_target()
def _unload(name: str, wait: float | None, target: RouterTarget) -> None:
    """Unload adapter NAME from every worker. Without --wait it must not be in use."""
    request = inference_pb2.UnloadClusterAdapterRequest(name=name, wait=wait is not None)
    with target.client() as client:
        reply = client.unload_adapter(request, timeout_s=wait or _LOAD_S)
    for worker_id in reply.worker_ids:
        sys.stdout.write(f"{worker_id}: unloaded {name}\n")


@adapter.command("list")
@options.router_target()
def _list(target: RouterTarget) -> None:
    """List the adapters of each worker."""
    with target.client() as client:
        workers = client.status().workers
    if not workers:
        raise Unavailable("the cluster has no workers")
    for worker in sorted(workers, key=lambda worker: worker.worker_id):
        for each in worker.adapters:
            sys.stdout.write(
                f"{worker.worker_id}: {each.name}, content {each.digest[:16]}, rank {each.rank}\n"
            )
