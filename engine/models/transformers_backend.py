"""The backend for transformers' modelling code, with our paged attention and none of transformers'
cache classes. Imported only for models that need it: importing transformers takes two CPU seconds.

`build` creates the model, and checks its logits against those of the plain model:

    probe -> logits of the plain model -> fuse -> logits again -> compare

`TransformersModel` runs it: all new tokens of all requests form one row [1, T]; position ids give
each token's position, TorchPagedAttention the KV that it attends to.

Transformers' code calls our attention as a registered attention function (`paged_attention`). All
state is passed in the keyword `baton_step` from `model(...)` to the function: a Recorder while
probing, a TorchPagedAttention while serving. Signature (stable
since transformers 5.0, source: its AttentionInterface documentation):

    fn(module, query [1, H, T, D], key [1, K, T, D], value, attention_mask, scaling=,
    sliding_window=, ...) -> ([1, T, H, D], None)

No cache object and no mask are used: transformers builds no mask for a mask name that is not
registered.

Latents (MLA) are what DeepSeek-style attention caches per token; attention is computed over them,
without ever expanding them. Transformers' code keeps, per token, one compressed vector c (rank R)
and one rotated key r, and expands c into keys and values by `kv_b_proj` = [W_K; W_V] in a method
`expand_kv(c, r)`. We replace that method by one that returns c and r, and move the matrices to the
other side:

    q . (W_K c) = (W_K^T q) . c        sum_t p_t W_V c_t = W_V sum_t p_t c_t

so that every query head attends to one shared "key" [c, r], whose first R columns are the "values"
(source: DeepSeek-V2, section 2.1.2). Works on modelling code since transformers 5.15.1.

It knows no checkpoint's name and no request. `build` is for load time, the model for the engine's
thread.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
import transformers
from baton_kernels.packed_linear import unavailable_reason
from torch import nn
from transformers import AttentionInterface

from checkpoints import architectures
from engine.batch import Batch, TokenSpan, warm_up
from engine.errors import LoadError
from engine.kv.layout import KvLayout, layout_of
from engine.kv.memory import TORCH_DTYPES, KvMemory, LayerView
from engine.layers.linear import PackedLinear
from engine.layers.quantized_attention import QuantizedAttention, Scales, calibrate_scales
from engine.layers.torch_attention import Attend, Scratch, TorchPagedAttention, scratch_for
from engine.lora.limits import LoraLimits
from engine.lora.manager import LoraManager
from engine.lora.stacked_weights import Linear, Site
from engine.models.fusion import FusedDecoderLayer, fuse
from engine.models.interface import DecodesAhead, Ends, Guesses, InOneProcess
from engine.models.self_check import probe_kv_layout
from engine.models.weight_streaming import (
    WHY_PLAIN,
    DeviceBytes,
    PackedLayer,
    StreamedLayers,
    make_plan,
    weights_of,
)
from engine.request import ModelInfo

# -- latents (MLA)


LATENTS = "baton_latents"
"""The attribute of an attention module that contains its Latents."""


@dataclass(frozen=True)
class Latents:
    """The two halves of one layer's `kv_b_proj`."""

    keys: torch.Tensor
    """W_K, [H, nope, R]."""

    values: torch.Tensor
    """W_V, [H, Dv, R]."""

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Multiply queries by W_K, so that they attend to [c, r] directly: [H, T, nope + rope] ->
        [H, T, R + rope]."""
        num_nope = self.keys.shape[1]
        return torch.cat((query[..., :num_nope] @ self.keys, query[..., num_nope:]), dim=-1)

    def expand(self, out: torch.Tensor) -> torch.Tensor:
        """Multiply weighted latents by W_V: [T, H, R] -> weighted values [T, H, Dv]."""
        return torch.matmul(out.transpose(0, 1), self.values.transpose(1, 2)).transpose(0, 1)


def cache_latents(model: Any) -> int:
    """Make every MLA attention of `model` cache latents. Returns: the number of such layers."""
    num_layers = 0
    for module in model.modules():
        if not hasattr(module, "expand_kv"):
            continue
        num_nope, num_values = int(module.qk_nope_head_dim), int(module.v_head_dim)
        weight = module.kv_b_proj.weight.detach()  # [H * (nope + Dv), R]
        heads = weight.view(-1, num_nope + num_values, weight.shape[1])
        latents = Latents(heads[:, :num_nope], heads[:, num_nope:])
        setattr(module, LATENTS, latents)
        module.expand_kv = _hand_on
        module.kv_b_proj = torch.nn.Identity()  # not called any more; `latents` has its weight
        num_layers += 1
    return num_layers


def _hand_on(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace `expand_kv`: [1, 1, T, R] and [1, 1, T, rope] -> keys [1, 1, T, R + rope], and
    values, their first R columns."""
    both = torch.cat((latent, rotated), dim=-1)
    return both, both[..., : latent.shape[-1]]


# -- the attention function that their code calls


ATTENTION_NAME = "baton_paged"

_IGNORED_KEYWORDS = frozenset({"dropout", "position_ids", "is_causal", "use_cache"})
"""Keywords that do not affect paged attention. Any other one that is set may change attention, and
is rejected."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    baton_step: Attend | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for transformers' code, as its registered attention function. Raises:
    TypeError for arguments that would be computed wrongly; the probe reports it as
    ModelNotSupported."""
    if baton_step is None:
        raise TypeError("this model's code does not hand keywords on to its attention")
    if attention_mask is not None:
        raise TypeError("this model's code builds an attention mask of its own")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise TypeError(f"{type(module).__name__} is not causal")
    unknown = [
        name
        for name, value in others.items()
        if name not in _IGNORED_KEYWORDS and value is not None and value is not False
    ]
    if unknown:
        raise TypeError(f"attention with {', '.join(sorted(unknown))}")
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise TypeError(f"{type(module).__name__} has no layer_idx")
    latents: Latents | None = getattr(module, LATENTS, None)
    out = baton_step.attend(
        layer,
        query[0] if latents is None else latents.absorb(query[0]),
        key[0],
        value[0],
        scaling,
        sliding_window,
        softcap,
        s_aux,
        latents is not None,
    )
    if latents is not None:
        out = latents.expand(out)
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


# -- decoder layers, and linear layers that adapters can add to


def layer_lists(model: Any) -> list[nn.ModuleList]:
    """Return the nn.ModuleLists with as many modules as the model has layers, none inside of
    another. If there is one, it contains the decoder layers in the order of their calls. Fusing
    replaces its modules."""
    num_layers = int(getattr(model.config, "num_hidden_layers", 0))
    found: dict[str, nn.ModuleList] = {}
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and not is_inside:
            found[path] = module
    return list(found.values()) if num_layers else []


NUM_PROBE_TOKENS = 3
_EXPERTS = "experts"


def find_sites(model: Any, forward: Callable[[Batch], torch.Tensor]) -> dict[str, Site]:
    """Return the linear layers of `model` that adapters can be added to, by name.

    Args:
        model: a transformers causal language model, fused or not.
        forward: computes a Batch with it; called once, with a warm-up.
    """
    sites: dict[str, Site] = {}
    others: dict[str, Linear] = {}
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, FusedDecoderLayer):
            for part, (fused, column, out_features) in module.parts().items():
                sites[f"{name}.{part}"] = Site(fused, column, fused.in_features, out_features)
            inside.update(module.modules())
        elif _is_linear(module) and module not in inside:
            if _EXPERTS not in name.split(".") and module is not model.get_output_embeddings():
                others[name] = cast(Linear, module)
    counts = _num_rows_seen(others, forward)
    for name, linear in others.items():
        if counts[name] == [NUM_PROBE_TOKENS]:
            sites[name] = Site(linear, 0, linear.in_features, linear.out_features)
    return sites


def _is_linear(module: nn.Module) -> bool:
    """Whether the module is a linear layer; subclasses of nn.Linear, which may compute something
    else, are not."""
    return type(module) is nn.Linear or isinstance(module, PackedLinear)


def _num_rows_seen(
    linears: dict[str, Linear], forward: Callable[[Batch], torch.Tensor]
) -> dict[str, list[int]]:
    """Return the numbers of rows of each linear layer's calls in one forward pass."""
    counts: dict[str, list[int]] = {name: [] for name in linears}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            is_plain = len(args) == 1 and isinstance(args[0], torch.Tensor)
            counts[name].append(args[0].numel() // args[0].shape[-1] if is_plain else 0)

        return hook

    handles = [linear.register_forward_pre_hook(note(name)) for name, linear in linears.items()]
    try:
        forward(warm_up(NUM_PROBE_TOKENS))
    finally:
        for handle in handles:
            handle.remove()
    return counts


# -- a model whose layers are streamed


class OnHost:
    """A model whose decoder layers lie in host memory, and everything else on the device.

    Args:
        model: a transformers model, wholly in host memory.
        device: the device that computes.
        device_bytes: the device memory that its weights may use.
    Raises: LoadError naming a model whose layers cannot be streamed, or if `device_bytes` is too
        small.
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
        """Return the present decoder layers; fusing replaces them."""
        return find_layers(self._model)

    @contextlib.contextmanager
    def visiting(self) -> Iterator[None]:
        """Return a context in which the model computes on the device: each layer is copied there
        for each call."""
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

    def settle(self) -> StreamedLayers:
        """Move every layer to its final place. Called once, after all else.

        Raises: LoadError if the device or the host lacks the memory.
        """
        layers = self._layers()
        packed = [PackedLayer(layer) for layer in layers]
        sizes = [one.num_bytes for one in packed]
        plan = make_plan(sizes, self._rest_bytes, self._account.limit)
        try:
            return StreamedLayers(layers, packed, plan, self._device, self._account)
        except torch.OutOfMemoryError as error:
            raise LoadError(
                f"weights_device_bytes: {plan.device_bytes} bytes of weights do not fit on "
                f"{self._device} ({str(error).splitlines()[0]}); lower it"
            ) from error


def find_layers(model: Any) -> list[nn.Module]:
    """Return the decoder layers of a transformers model, in the order of their calls.

    Raises: LoadError for a model that does not keep them in one list, or whose layers share weights
        or have weights that cannot be moved.
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
    """Return the parameters that belong to no layer, and all buffers."""
    own = {id(tensor) for layer in layers for tensor in weights_of(layer)}
    every = [*model.parameters(), *model.buffers()]
    return [tensor for tensor in every if id(tensor) not in own]


# -- the model


class TransformersModel(InOneProcess):
    """A LoadedModel (models/interface.py) over a model that `build` probed, fused and verified.

    Attributes: stream: the copies of the model's layers to the device; None: all layers lie on the
        device.
    """

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        layout: KvLayout,
        lora: LoraLimits | None = None,
        fixed_scales: Sequence[Scales] = (),
        stream: StreamedLayers | None = None,
    ) -> None:
        has_head = model.get_output_embeddings() is not None
        self.info = replace(info, gives_embeddings=info.gives_embeddings and has_head)
        self.layout = layout
        self._model = model
        self._device = torch.device(info.device)
        self._fixed_scales = fixed_scales
        self.stream = stream
        self._memory: KvMemory | None = None
        self._views: list[LayerView] = []
        self._scratch: Scratch | None = None
        self._has_body_before_head = model.base_model is not model
        self._is_body_checked = False
        self.ahead: DecodesAhead | None = None
        self.guesses = Guesses.TREES
        is_cpu = self._device.type == "cpu"
        self.adapters = LoraManager(
            lora or LoraLimits(),
            lambda: find_sites(model, self.forward),
            dtype=torch.float32 if is_cpu else TORCH_DTYPES[info.dtype],
            device=self._device,
        )

    def attach(self, memory: KvMemory) -> None:
        """Use this KV cache from now on."""
        self._memory = memory
        self._views = memory.layer_views()
        self._scratch = scratch_for(memory, self.info.dtype)

    @property
    def ends(self) -> Ends | None:
        """The embedding and the LM head; None if the model lacks one of them."""
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        if embedding is None or head is None:
            return None
        return Ends(int(embedding.weight.shape[1]), embedding, head, len(self._layers))

    @cached_property
    def _layers(self) -> tuple[torch.nn.Module, ...]:
        """The decoder layers; empty if the model keeps them in several lists."""
        found = layer_lists(self._model)
        return tuple(found[0]) if len(found) == 1 else ()

    @torch.inference_mode()
    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute the batch (LoadedModel.forward). Logits have the model's dtype."""
        self.adapters.begin(batch)
        if self._memory is None or self._memory.tails is None:
            step = TorchPagedAttention(batch, self._views, self.layout.block_size, self._scratch)
            return self._run(batch, step)
        quantized = QuantizedAttention(batch, self._memory, self._views, self._fixed_scales)
        return self._run(batch, quantized)

    def check_integrity(self) -> None:
        """Check streamed layers and the memory into which steps gather KV. Raises: IntegrityError
        where their accounting is wrong."""
        if self._scratch is not None:
            self._scratch.check_integrity()
        if self.stream is not None:
            self.stream.check_integrity()

    def close(self) -> None:
        """Free the memory into which steps gather KV, and stop streaming layers."""
        if self._scratch is not None:
            self._scratch.close()
        if self.stream is not None:
            self.stream.close()

    def _run(self, batch: Batch, step: Attend) -> torch.Tensor:
        self.kept_hidden = self.kept_every_hidden = None
        self.kept_layer_inputs = {}
        if not batch.wants_hidden:
            return run(self._model, batch, step, self._device)

        def keep(head: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            rows = inputs[0].reshape(-1, inputs[0].shape[-1])
            # Most code of theirs takes the wanted rows before the head; some after it.
            if len(rows) != len(batch.draw_indices):
                rows = rows[list(batch.draw_indices)]
            self.kept_hidden = rows.clone()

        def keep_every(body: torch.nn.Module, inputs: object, output: Any) -> None:
            self.kept_every_hidden = output[0][0].clone()

        layer_inputs: dict[int, torch.Tensor] = {}

        def keep_input(
            index: int, layer: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
        ) -> None:
            rows = inputs[0] if inputs else named.get("hidden_states")
            # Some code has several streams between its layers: no head was trained for those.
            if rows is not None and rows.shape[:-1] == (1, len(batch.token_ids)):
                layer_inputs[index] = rows[0].clone()

        watches = [self._model.get_output_embeddings().register_forward_pre_hook(keep)]
        if batch.wants_every_hidden and self._has_body_before_head:
            watches.append(self._model.base_model.register_forward_hook(keep_every))
        for index in batch.wants_layers:
            keep_it, layer = partial(keep_input, index), self._layers[index]
            watches.append(layer.register_forward_pre_hook(keep_it, with_kwargs=True))
        try:
            logits = run(self._model, batch, step, self._device)
        finally:
            for watch in watches:
                watch.remove()
        self.kept_layer_inputs = layer_inputs
        self._check_body(batch)
        return logits

    def _check_body(self, batch: Batch) -> None:
        """Check once that the model's body returns the LM head's input. Code that computes
        something between its last norm and its head fails this, and only hidden states of
        `draw_indices` are kept from then on."""
        if self._is_body_checked or self.kept_every_hidden is None or not batch.draw_indices:
            return
        if not any(span.block_ids for span in batch.spans):
            return  # a warm-up's numbers say nothing
        drawn = self.kept_every_hidden[list(batch.draw_indices)]
        self._is_body_checked = True
        # What is no number is none in both.
        self._has_body_before_head = self.kept_hidden is not None and torch.equal(
            drawn.nan_to_num(), self.kept_hidden.nan_to_num()
        )
        if not self._has_body_before_head:
            self.kept_every_hidden = None


def run(model: Any, batch: Batch, step: Attend, device: torch.device) -> torch.Tensor:
    """Run one forward pass of a transformers model over a batch. Returns: logits [R, V]."""
    token_ids = torch.tensor([batch.token_ids], device=device)
    positions = torch.tensor([batch.positions], device=device)
    logits: torch.Tensor = model(
        input_ids=token_ids,
        position_ids=positions,
        use_cache=False,
        past_key_values=None,
        logits_to_keep=torch.tensor(batch.draw_indices, dtype=torch.int64, device=device),
        baton_step=step,
    ).logits
    return logits[0]


# -- build


_MAX_RELATIVE_ERROR = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest relative error (L2) of fused against plain logits, by dtype. Measured: 1e-6 and 0.01 to
0.07; a look-alike module is off by 0.5 and more."""

_NUM_VERIFY_TOKENS = 16

Weights = Callable[[], dict[str, torch.Tensor]]
"""Reads a checkpoint's tensors. It is called again if the plain model is needed a second time, so
that no second copy is kept."""


@dataclass(frozen=True)
class Built:
    """A model that is ready to run."""

    model: Any
    layout: KvLayout
    linear: str
    fused: tuple[str, ...]
    num_parameters: int
    fixed_scales: tuple[Scales, ...]
    stream: StreamedLayers | None = None
    """The copies of the model's layers to the device; None: all layers lie on the device."""


def build(
    model_config: Any,
    read: Weights,
    *,
    device: str,
    dtype: str,
    block_size: int,
    kv_dtype: str = "",
    kv_scale: str = "",
    streamed_to_bytes: int = 0,
) -> Built:
    """Build, probe and fuse a model, and compare the fused logits with the plain ones. If they
    differ by more than rounding, the plain model is used, and `fused` says so.

    Args: streamed_to_bytes: the device memory that weights may use, while other layers are streamed
        from host memory; 0: all weights lie on the device.
    Raises: LoadError for weights that do not fit, ModelNotSupported by the probe.
    """
    is_fused = architectures.SERVED[model_config.model_type][0] == architectures.FUSED

    def plain() -> tuple[Any, OnHost | None]:
        model = _plain(model_config, read(), "cpu" if streamed_to_bytes else device, dtype)
        cache_latents(model)
        return model, OnHost(model, device, streamed_to_bytes) if streamed_to_bytes else None

    model, on_host = plain()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    with on_host.visiting() if on_host else contextlib.nullcontext():
        probed = probe_kv_layout(model, num_layers=model_config.num_hidden_layers, device=device)
        layout = layout_of(
            probed.layers, block_size=block_size, dtype=dtype, kv_dtype=kv_dtype, scale=kv_scale
        )
        expected = _verify_logits(model, layout, device)
    reason = WHY_PLAIN if on_host else unavailable_reason(TORCH_DTYPES[dtype], device)
    linear = "packed" if reason is None else f"plain ({reason})"
    fused = fuse(model, is_packed=reason is None, windows=probed.windows, with_layers=is_fused)
    stream = on_host.settle() if on_host else None
    why = _difference(model, layout, device, expected, _MAX_RELATIVE_ERROR[dtype])
    if why is not None:
        if stream is not None:
            stream.close()
        del model, on_host, stream  # two of them may be more than there is room for
        why = f"nothing: {why}"
        linear, fused = f"plain ({why})", (why,)
        model, on_host = plain()
        stream = on_host.settle() if on_host else None
    fixed_scales: tuple[Scales, ...] = ()
    if layout.scale == "tensor":
        fixed_scales = calibrate_scales(
            lambda batch, step: run(model, batch, step, torch.device(device)),
            layout,
            vocab_size=int(model_config.vocab_size),
            num_positions=getattr(model_config, "max_position_embeddings", None),
            device=device,
        )
    return Built(model, layout, linear, fused, num_parameters, fixed_scales, stream)


def _plain(model_config: Any, weights: dict[str, torch.Tensor], device: str, dtype: str) -> Any:
    """Create the unmodified transformers model with our attention. Raises: LoadError naming tensors
    that are missing or have another shape."""
    config = copy.deepcopy(
        model_config
    )  # the attention's name lies on the config: two models must not share one
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    transformers.utils.logging.disable_progress_bar()  # `progress` has its place
    transformers.utils.logging.set_verbosity_error()  # what its report says is raised below
    try:
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=TORCH_DTYPES[dtype],
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # so that they are named in the report, not in a table
        )
    except (RuntimeError, ValueError) as error:
        raise LoadError(f"weights do not fit config.json: {str(error).splitlines()[0]}") from error
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if report[what]:
            names = sorted(key if isinstance(key, str) else str(key[0]) for key in report[what])
            raise LoadError(
                f"weights do not fit config.json: {what.replace('_', ' ')}: {len(names)}, first "
                f"{names[0]}; fetch the checkpoint again"
            )
    return model.eval().requires_grad_(False).to(device)


def _difference(
    model: Any, layout: KvLayout, device: str, expected: torch.Tensor, max_error: float
) -> str | None:
    """Return a description of how the fused model differs from the plain one; None if it does
    not."""
    try:
        actual = _verify_logits(model, layout, device)
    except (AttributeError, RuntimeError) as error:  # code that wants a weight that is packed
        return f"the fused model cannot run ({str(error).splitlines()[0]})"
    error_norm = float((actual - expected).norm() / expected.norm())
    if error_norm <= max_error:  # NaN is not
        return None
    return f"fused logits were {error_norm:.2g} off the plain model's"


@torch.inference_mode()
def _verify_logits(model: Any, layout: KvLayout, device: str) -> torch.Tensor:
    """Compute float32 logits [16, V] of a fixed prompt, by a chunk and a decode, through the paged
    cache."""
    layout = layout.raw  # what the weights do, whatever is stored
    memory = KvMemory(layout, layout.num_blocks_for(_NUM_VERIFY_TOKENS), device)
    views = memory.layer_views()
    vocab_size = int(model.config.vocab_size)
    token_ids = tuple((7919 * i + 17) % vocab_size for i in range(_NUM_VERIFY_TOKENS))
    cut = _NUM_VERIFY_TOKENS - 1
    parts: list[torch.Tensor] = []
    for start, end in ((0, cut), (cut, _NUM_VERIFY_TOKENS)):
        span = TokenSpan(start, end - start, tuple(range(layout.num_blocks_for(end))))
        batch = Batch(token_ids[start:end], (span,), tuple(range(end - start)))
        step = TorchPagedAttention(batch, views, layout.block_size)
        parts.append(run(model, batch, step, torch.device(device)).float())
    return torch.cat(parts)
