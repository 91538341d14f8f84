"""What a body's `model` names: a model, or a loaded adapter of one, as other servers have it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from process.errors import InvalidArgument
from services.router.http_errors import ModelNotFound
from services.router.served_models import OneModel, ServedModels


def adapters_of(model: OneModel) -> set[str]:
    """Names of its adapters that requests may ask for."""
    return set(model.candidates.adapter_names())


def with_model(
    fields: Mapping[str, Any], models: ServedModels
) -> tuple[Mapping[str, Any], OneModel]:
    """A body's fields with model and adapter told apart, and the model.

    Raises: ModelNotFound for a name that is neither; InvalidArgument for two adapters.
    """
    name = fields.get("model", "")
    for model in models:
        if name in adapters_of(model) - models.all_names:
            own = fields.get("baton", {})
            if own.get("adapter", name) != name:
                raise InvalidArgument("baton.adapter", "differs from the adapter that model names")
            return {**fields, "model": model.name, "baton": {**own, "adapter": name}}, model
    try:
        return fields, models.find(name)
    except InvalidArgument as error:
        raise ModelNotFound(str(error).removeprefix("model: ")) from None
