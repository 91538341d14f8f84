"""`baton models`: the model types that Baton can serve, and whether it can serve a checkpoint."""

from __future__ import annotations

import sys
from collections import Counter

import click
from rich.console import Group, RenderableType
from rich.text import Text

from baton.cli import options, render
from baton.cli.options import flag
from baton.cli.render import text
from baton.errors import ModelError
from checkpoints import architectures
from checkpoints.errors import CheckpointError
from checkpoints.files import read_config
from checkpoints.resolve import bundled_names, resolve


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
