"""`baton models` and `baton adapter`: the model types that are served, and LoRA adapters."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import click
from rich.console import Group, RenderableType
from rich.text import Text

from baton.cli import options, render
from baton.cli.options import FILE, RouterTarget, flag, value
from baton.cli.render import text
from baton.errors import ModelError, Unavailable
from checkpoints import architectures
from checkpoints.errors import CheckpointError
from checkpoints.files import read_config
from checkpoints.resolve import bundled_names, resolve
from protos import inference_pb2

_LOAD_S = 900.0
"""Limit of a load here; the router's own is times.adapter_s."""
_WAIT_S = 3600.0
"""Limit of the wait for requests to end: the longest time of one."""


@options.command("models")
@click.argument("checkpoint", default="")
@flag("--refused", "List the known model types that are not served, and why.")
@options.as_json()
def models(checkpoint: str, refused: bool, as_json: bool) -> int:
    """List the model types that are served; or say whether CHECKPOINT is served, and if not, why.

    CHECKPOINT is the name of a bundled model, a folder, or a name on the Hugging Face hub. Exit
    code 1: it is not served.
    """
    if checkpoint:
        return _one(checkpoint, as_json=as_json)
    if as_json:
        served = {
            name: {
                "route": route,
                "features": features.split(),
                "published": architectures.PUBLISHED_REFUSED.get(name, ""),
            }
            for name, (route, features) in architectures.SERVED.items()
        }
        everything = {"served": served, "refused": architectures.REFUSED}
        render.print_json(everything)
    else:
        render.show(_refused() if refused else _served())
    return 0


def _one(name: str, *, as_json: bool) -> int:
    """Reads only config.json; the engine itself checks the architecture when it starts."""
    try:
        checkpoint = resolve(name, files="tokenizer")
        config = read_config(checkpoint.path)
    except CheckpointError as error:
        raise ModelError(str(error)) from error
    reason = architectures.refusal(config)
    model_type = config.get("model_type")
    route, features = architectures.SERVED.get(str(model_type), ("", ""))
    if as_json:
        answer = {
            "checkpoint": checkpoint.name,
            "model_type": model_type,
            "is_served": reason is None,
            "reason": reason or "",
            "route": route if reason is None else "",
            "features": features.split() if reason is None else [],
        }
        render.print_json(answer)
        return int(reason is not None)
    if reason is not None:
        raise ModelError(f"{checkpoint.name}: {reason}")
    words = f", {features.replace(' ', ', ')}" if features else ""
    sys.stdout.write(f"{checkpoint.name}: served ({model_type}, {route}{words})\n")
    return 0


def _served() -> RenderableType:
    routes = Counter(route for route, _ in architectures.SERVED.values())
    head = Text(
        f"{len(architectures.SERVED)} model types are served, {routes[architectures.FUSED]} of "
        f"them with fused layers; the published checkpoints of "
        f"{len(architectures.PUBLISHED_REFUSED)} are quantized, and refused; "
        f"{len(architectures.REFUSED)} are known and refused (--refused). "
        f"Bundled models: {', '.join(bundled_names())}"
    )
    columns = (
        text("model type", lambda item: item[0]),
        text("route", lambda item: item[1][0]),
        text("features", lambda item: item[1][1]),
        text("", lambda item: architectures.PUBLISHED_REFUSED.get(item[0], "")),
    )
    return Group(head, render.table(columns, sorted(architectures.SERVED.items())))


def _refused() -> RenderableType:
    columns = (
        text("model type", lambda item: item[0]),
        text("why it is not served", lambda item: item[1]),
    )
    return render.table(columns, sorted(architectures.REFUSED.items()))


# -- adapters


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
