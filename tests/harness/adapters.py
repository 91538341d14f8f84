"""Random LoRA adapters in PEFT's format, and models with one merged into their weights.

Written from the format, not from engine/lora: the oracle shares no code with what it judges.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def linear_names(model: Any, targets: Iterable[str] | None = None) -> list[str]:
    """Names of the linear layers that `targets` holds, whole or by their last part; None: all."""
    wanted = None if targets is None else set(targets)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and (wanted is None or not wanted.isdisjoint({name, name.rpartition(".")[2]}))
    ]


def save_adapter(
    folder: Path,
    model: Any,
    seed: int,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Iterable[str] = ALL,
    layers: Iterable[int] | None = None,
    dtype: torch.dtype = torch.float32,
    strength: float = 0.5,
    **config: Any,
) -> Path:
    """Write a random adapter for `model`, which shares its linear layers' names and shapes.

    Args:
        layers: only in these; None: in all.
        strength: the size of what it adds, against the weights it is added to.
        config: further fields of adapter_config.json; `rank_pattern` and `alpha_pattern` count.
    """
    generator = torch.Generator().manual_seed(seed)
    targets = list(targets)
    tensors: dict[str, torch.Tensor] = {}
    modules = dict(model.named_modules())
    for name in linear_names(model, targets):
        if layers is not None and not any(f".{layer}." in name for layer in layers):
            continue
        weight = modules[name].weight
        own_rank = config.get("rank_pattern", {}).get(name.rpartition(".")[2], rank)
        a = torch.randn(own_rank, weight.shape[1], generator=generator)
        b = torch.randn(weight.shape[0], own_rank, generator=generator)
        size = (
            strength * float(weight.detach().float().std()) / math.sqrt(own_rank) / (alpha / rank)
        )
        key = f"base_model.model.{name}.lora_"
        tensors[f"{key}A.weight"] = a.to(dtype)
        tensors[f"{key}B.weight"] = (b * size).to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "random",
        "inference_mode": True,
        "lora_dropout": 0.1,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": targets,
        "layers_to_transform": None if layers is None else list(layers),
    } | config
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder


def merged(model: Any, folder: Path) -> Any:
    """A copy of `model` with the adapter's W + scale * B @ A, in the model's dtype."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    model = copy.deepcopy(model)
    modules = dict(model.named_modules())
    for key, a in tensors.items():
        if not key.endswith(".lora_A.weight"):
            continue
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        last = name.rpartition(".")[2]
        alpha = config.get("alpha_pattern", {}).get(last, config["lora_alpha"])
        rank = a.shape[0]
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        b = tensors[key.replace("lora_A", "lora_B")]
        weight = modules[name].weight
        with torch.no_grad():
            weight.copy_(weight.double() + scale * b.double() @ a.double())
    return model
