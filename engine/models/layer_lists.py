"""Where a transformers model keeps its decoder layers: found by their number, not by family."""

from __future__ import annotations

from typing import Any

from torch import nn


def layer_lists(model: Any) -> list[nn.ModuleList]:
    """Lists of as many modules as the model has layers, none inside of another such list. One: its
    decoder layers, in the order of their calls. As they are now: fusing replaces them."""
    num_layers = int(getattr(model.config, "num_hidden_layers", 0))
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and not is_inside:
            found[path] = module
    return list(found.values()) if num_layers else []
