"""Faster layers for a loaded model, recognised by the shape of their attributes, not by family.

`fuse` replaces what it recognises exactly and leaves the rest as it is. It promises nothing about
numbers: models/built.py compares logits before and after, and goes back to the plain model where
they differ. Weights are replaced layer by layer, so the peak is one layer above the model's size.
Knows no engine. Load time only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine.layers.linear import PackedLinear
from engine.models.fused_layer import FusedDecoderLayer

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_LINEARS = {"gate_proj", "up_proj", "down_proj"}


def fuse(
    model: Any, *, is_packed: bool, windows: Sequence[int | None], with_layers: bool = True
) -> tuple[str, ...]:
    """Replace what can be in `model`, in place. Returns what was done, in words.

    Args:
        windows: how far each layer sees (`probe.Probed`). Code and config may disagree on it, and a
            short comparison of logits would not show it.
        with_layers: decoder layers, too; False where the type is known to have look-alikes.
    """
    done: list[str] = []
    for module in list(model.modules()) if with_layers else ():
        if not isinstance(module, nn.ModuleList) or not len(module):
            continue
        num_fused = 0
        layers: list[Any] = list(module)
        for index, layer in enumerate(layers):
            if is_plain_decoder_layer(layer) and _rotary_dim(model) == layer.self_attn.head_dim:
                module[index] = FusedDecoderLayer(
                    layer, window=windows[layer.self_attn.layer_idx], is_packed=is_packed
                )
                num_fused += 1
        if num_fused:
            done.append(f"{num_fused} of {len(module)} decoder layers")
    if is_packed:
        num_packed = _pack_linears(model)
        if num_packed:
            done.append(f"{num_packed} other linears")
    return tuple(done)


def is_plain_decoder_layer(layer: Any) -> bool:
    """Norm, attention with q/k/v/o, residual, norm, gated SiLU, residual: these children and no
    others."""
    if _children(layer) != _LAYER:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    names = _children(attention)
    if names not in (_PROJECTIONS, _PROJECTIONS | _HEAD_NORMS) or _children(mlp) != _MLP_LINEARS | {
        "act_fn"
    }:
        return False
    linears = [getattr(attention, name) for name in sorted(_PROJECTIONS)]
    linears += [getattr(mlp, name) for name in sorted(_MLP_LINEARS)]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in sorted(names & _HEAD_NORMS)]
    biases = {getattr(attention, f"{name}_proj").bias is None for name in "qkv"}
    return (
        all(type(linear) is nn.Linear for linear in linears)
        and len(biases) == 1
        and all(_is_rms_norm(norm) for norm in norms)
        and len({getattr(norm, "variance_epsilon", None) for norm in norms[2:]}) <= 1
        and _is_silu(mlp.act_fn)
        and isinstance(getattr(attention, "layer_idx", None), int)
        and isinstance(getattr(attention, "head_dim", None), int)
        and isinstance(getattr(attention, "scaling", None), float)
    )


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


@torch.inference_mode()
def _is_rms_norm(module: Any) -> bool:
    """It computes weight * x / rms(x): tried on numbers, so that a look-alike (1 + weight) is not
    taken for it."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, torch.Tensor) or not isinstance(eps, float):
        return False
    x = torch.linspace(-2.0, 3.0, weight.numel(), device=weight.device, dtype=weight.dtype)[None]
    expected = functional.rms_norm(x, weight.shape, weight, eps).float()
    return torch.allclose(module(x).float(), expected, rtol=2e-2, atol=1e-3)


@torch.inference_mode()
def _is_silu(function: Any) -> bool:
    x = torch.linspace(-4.0, 4.0, 33)
    return torch.allclose(function(x), functional.silu(x), rtol=1e-6, atol=1e-6)


def _rotary_dim(model: Any) -> int | None:
    """Dimensions that RoPE turns, where the model has one rotary embedding for all layers."""
    dims = {
        2 * module.inv_freq.numel()
        for module in model.modules()
        if isinstance(getattr(module, "inv_freq", None), torch.Tensor)
    }
    return dims.pop() if len(dims) == 1 else None


def _pack_linears(module: nn.Module) -> int:
    """Pack every plain nn.Linear below `module`; the language model's head is one."""
    num_packed = 0
    for name, child in list(module.named_children()):
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child.weight, child.bias))
            num_packed += 1
        else:
            num_packed += _pack_linears(child)
    return num_packed
