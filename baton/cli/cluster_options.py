"""The options of a local cluster, made from the fields of `ClusterConfig`. Apart from the others,
for a command that only calls a router starts sooner without them."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

from baton.cli.options import Decorator, as_argument, flag, value
from baton.cluster.config import DEFAULT_PORT, ClusterConfig
from baton.errors import ClusterError
from process.settings import field_docstrings


def cluster_config(*, port: int = DEFAULT_PORT, model: str = ClusterConfig.model) -> Decorator:
    """Add the options of a local cluster to a command, which gets `config: ClusterConfig`. Each
    field is an option, its docstring the help. The command raises ClusterError for a wrong value.
    """
    fields = {each.name: each for each in dataclasses.fields(ClusterConfig)}
    kinds, explained = typing.get_type_hints(ClusterConfig), field_docstrings(ClusterConfig)
    defaults = {"port": port, "model": (model,) if model else ()}
    explained["model"] += " Each further model gets workers of its own."

    def help_of(name: str) -> str:
        return re.sub(
            r"`(\w+)`",
            lambda found: _option_name(fields[found[1]]) if found[1] in fields else found[0],
            explained[name],
        )

    made = [
        _field_option(field, kinds[name], defaults.get(name, field.default), help_of(name))
        for name, field in fields.items()
        if name != "more_models"
    ]
    return as_argument("config", _make_config, *made)


def _option_name(field: dataclasses.Field[Any]) -> str:
    name: str = field.metadata.get("option", "")
    return name or "--" + field.name.removeprefix("num_").replace("_", "-")


def _field_option(field: dataclasses.Field[Any], kind: Any, default: Any, help: str) -> Decorator:
    name, dest, metavar = _option_name(field), field.name, field.metadata.get("metavar", "N")
    if kind is bool:
        return flag(name, help, dest=dest)
    if "choices" in field.metadata:
        choice = click.Choice(field.metadata["choices"])
        return value(name, None, help, default or None, dest=dest, type=choice)
    if isinstance(default, tuple):
        return value(name, metavar, help, default, dest=dest, multiple=True)
    kind = int if kind == int | None else kind
    return value(name, metavar, help, default, dest=dest, type=kind)


def _make_config(model: Sequence[str], **values: Any) -> ClusterConfig:
    context = click.get_current_context()
    for role in ("prefill", "decode"):
        for bound in ("min", "max"):
            name = f"num_{role}_{bound}"
            is_given = context.get_parameter_source(name) is ParameterSource.COMMANDLINE
            if is_given and not values["autoscale"]:
                raise ClusterError(
                    f"--{bound}-{role} {values[name]}: goes with --autoscale; without it there are "
                    f"as many as --{role} says"
                )
    return ClusterConfig(
        model="".join(model[:1]),
        more_models=tuple(model[1:]),
        **{name: each for name, each in values.items() if each is not None},
    )
