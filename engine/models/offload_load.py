"""Loading a model whose layers are streamed (`offload`): built in host memory, looked at layer by
layer on the device, and settled there. Never is more of it on the device than will be when it
serves. Start-up only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from engine.errors import LoadError
from engine.models.latent import LATENTS
from engine.models.layer_lists import layer_lists
from engine.models.offload import DeviceBytes, LayerStream
from engine.models.offload_packed import PackedLayer, weights_of
from engine.models.offload_plan import make_plan

WHY_PLAIN = "layers are streamed"
"""Why linear layers are not packed: an opaque tensor cannot be copied to where another one lies."""


class OnHost:
    """A model whose layers lie in host memory, and all the rest on the device.

    Args:
        model: of transformers, wholly in host memory.
        device: that computes.
        device_bytes: that its weights may take there.
    Raises: LoadError, by name, for a model whose layers cannot be streamed, and where
        `device_bytes` are too few.
    """

    def __init__(self, model: Any, device: str, device_bytes: int) -> None:
        self._model = model
        self._device = torch.device(device)
        self._account = DeviceBytes(device_bytes)
        layers = self._layers()
        rest = _rest_of(model, layers)
        self._rest_bytes = sum(tensor.nbytes for tensor in rest)
        make_plan(
            [PackedLayer(layer).num_bytes for layer in layers], self._rest_bytes, device_bytes
        )
        self._account.take(self._rest_bytes)
        for tensor in rest:
            tensor.data = tensor.data.to(self._device)

    def _layers(self) -> list[nn.Module]:
        """As they are now: fusing replaces them."""
        return find_layers(self._model)

    @contextlib.contextmanager
    def visiting(self) -> Iterator[None]:
        """Meanwhile the model computes on the device: each layer is there while it is called."""
        hooks: list[Any] = []
        away: dict[PackedLayer, list[torch.Tensor]] = {}

        def enter(one: PackedLayer, *_: object) -> None:
            self._account.take(one.num_bytes)
            with torch.inference_mode(False):  # a weight cannot be pointed to an inference tensor
                away[one] = [tensor.data for tensor in one.tensors]
                one.point([tensor.to(self._device) for tensor in away[one]])

        def leave(one: PackedLayer, *_: object) -> None:
            one.point(away.pop(one))
            self._account.give_back(one.num_bytes)

        for layer in self._layers():
            one = PackedLayer(layer)
            hooks.append(layer.register_forward_pre_hook(partial(enter, one)))
            hooks.append(layer.register_forward_hook(partial(leave, one)))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for one in list(away):  # of a call that failed
                leave(one)

    def settle(self) -> LayerStream:
        """Every layer where it will serve. Once, last.

        Raises: LoadError where the device or the host has no room.
        """
        layers = self._layers()
        packed = [PackedLayer(layer) for layer in layers]
        sizes = [one.num_bytes for one in packed]
        plan = make_plan(sizes, self._rest_bytes, self._account.limit)
        try:
            return LayerStream(layers, packed, plan, self._device, self._account)
        except torch.OutOfMemoryError as error:
            raise LoadError(
                f"weights_device_bytes: {plan.device_bytes} bytes of weights do not fit on "
                f"{self._device} ({str(error).splitlines()[0]}); lower it"
            ) from error


def find_layers(model: Any) -> list[nn.Module]:
    """The decoder layers of a transformers model, in the order of their calls.

    Raises: LoadError for a model that does not keep them in one list, or whose layers share weights
        or keep some where they cannot be moved.
    """
    name, num_layers = type(model).__name__, int(model.config.num_hidden_layers)
    found = layer_lists(model)
    if len(found) != 1:
        raise LoadError(
            f"weights_device_bytes: {name} keeps its {num_layers} layers in {len(found)} lists; "
            "only layers of one list can be streamed: leave it 0"
        )
    layers = list(found[0])
    if any(hasattr(module, LATENTS) for layer in layers for module in layer.modules()):
        raise LoadError(
            f"weights_device_bytes: {name} caches latents (MLA), and matrices that belong to them "
            "are kept apart from its layers: they cannot be streamed; leave it 0"
        )
    addresses = [
        tensor.data_ptr() for layer in layers for tensor in weights_of(layer) if tensor.numel()
    ]
    inside = set(addresses)
    outside = {tensor.data_ptr() for tensor in _rest_of(model, layers) if tensor.numel()}
    if len(inside) < len(addresses) or inside & outside:
        raise LoadError(
            f"weights_device_bytes: layers of {name} share weights: they cannot be streamed one by "
            "one; leave it 0"
        )
    return layers


def _rest_of(model: Any, layers: list[nn.Module]) -> list[torch.Tensor]:
    """Parameters that belong to no layer, and all buffers."""
    own = {id(tensor) for layer in layers for tensor in weights_of(layer)}
    every = [*model.parameters(), *model.buffers()]
    return [tensor for tensor in every if id(tensor) not in own]
