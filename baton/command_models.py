"""`baton models`: which model types are served and by which route, or whether one checkpoint is."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from baton.errors import ModelError
from baton.provenance_view import show
from checkpoints import architectures
from checkpoints.errors import CheckpointError
from checkpoints.files import read_config
from checkpoints.resolve import bundled_names, resolve


def add_parser(commands: Any) -> None:
    """`baton models` and its options."""
    parser = commands.add_parser(
        "models",
        help="list what is served, or ask about one checkpoint",
        description=f"{__doc__} Exit code 1: that checkpoint is not served.",
    )
    parser.add_argument(
        "checkpoint",
        nargs="?",
        help="a bundled model's name, a folder, or a hub name: is it served, and if not, why",
    )
    parser.add_argument("--refused", action="store_true", help="what is not served, and why")
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Returns: 0. Raises: ModelError for a checkpoint that is not served, or cannot be read."""
    if parsed.checkpoint:
        return _one(parsed.checkpoint, as_json=parsed.json)
    if parsed.json:
        served = {
            name: {
                "route": route,
                "features": features.split(),
                "published": architectures.PUBLISHED_REFUSED.get(name, ""),
            }
            for name, (route, features) in architectures.SERVED.items()
        }
        everything = {"served": served, "refused": architectures.REFUSED}
        sys.stdout.write(json.dumps(everything) + "\n")
    else:
        show(_refused() if parsed.refused else _served())
    return 0


def _one(name: str, *, as_json: bool) -> int:
    """Only its config.json is looked at; the engine rehearses the architecture when it starts."""
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
        sys.stdout.write(json.dumps(answer) + "\n")
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
    table = _table("model type", "route", "features", "")
    for name, (route, features) in sorted(architectures.SERVED.items()):
        table.add_row(name, route, features, architectures.PUBLISHED_REFUSED.get(name, ""))
    return Group(head, table)


def _refused() -> RenderableType:
    table = _table("model type", "why it is not served")
    for name, reason in sorted(architectures.REFUSED.items()):
        table.add_row(name, reason)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
