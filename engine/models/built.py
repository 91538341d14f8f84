"""transformers' code made a model of ours: built, probed, fused, and believed only after its logits
were compared with those of the plain model.

    probe -> logits of the plain model -> fuse -> logits again -> compare

Knows no checkpoint's name and no request. Start-up only.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from baton_kernels.packed_linear import unavailable_reason

from checkpoints import architectures
from engine.batch import Batch, Span
from engine.errors import LoadError
from engine.kv.layout import KvLayout, layout_of
from engine.kv.memory import TORCH_DTYPES, KvMemory
from engine.layers.quantized_attention import Scales, calibrate_scales
from engine.layers.torch_attention import TorchPagedAttention
from engine.models import attention_hook
from engine.models.fuse import fuse
from engine.models.hugging_face import run
from engine.models.latent import cache_latents
from engine.models.offload import LayerStream
from engine.models.offload_load import WHY_PLAIN, OnHost
from engine.models.probe import probe

_MAX_RELATIVE_ERROR = {"float32": 1e-4, "bfloat16": 0.1}
"""Of fused against plain logits (L2). Measured: 1e-6 and 0.01-0.07; a look-alike module is off by
0.5 and more."""

_NUM_VERIFY_TOKENS = 16

Weights = Callable[[], dict[str, torch.Tensor]]
"""Reads a checkpoint's tensors. Called again if the plain model is needed a second time: nothing
keeps two copies."""


@dataclass(frozen=True)
class Built:
    """A model that is ready to run."""

    model: Any
    layout: KvLayout
    linear: str
    fused: tuple[str, ...]
    num_parameters: int
    fixed_scales: tuple[Scales, ...]
    stream: LayerStream | None = None
    """What brings its layers to the device, where not all of them lie there."""


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
    """Build, probe, fuse, and compare the fused logits with the plain ones.

    Where they differ more than rounding explains, the plain model is taken, and `fused` says so.

    Args:
        streamed_to_bytes: that the weights may take on the device, layers beyond them being
            streamed from host memory; 0: all of the weights lie there.
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
        probed = probe(model, num_layers=model_config.num_hidden_layers, device=device)
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
    """The unmodified transformers model with our attention.

    Raises: LoadError naming tensors that are missing or have another shape.
    """
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
            attn_implementation=attention_hook.NAME,
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
    """In what the fused model is not the plain one; None: in nothing."""
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
    """float32 logits [16, V] of a fixed prompt in a chunk and a decode, through the paged cache."""
    layout = layout.raw  # what the weights do, whatever is stored
    memory = KvMemory(layout, layout.num_blocks_for(_NUM_VERIFY_TOKENS), device)
    views = memory.layer_views()
    vocab_size = int(model.config.vocab_size)
    token_ids = tuple((7919 * i + 17) % vocab_size for i in range(_NUM_VERIFY_TOKENS))
    cut = _NUM_VERIFY_TOKENS - 1
    parts: list[torch.Tensor] = []
    for start, end in ((0, cut), (cut, _NUM_VERIFY_TOKENS)):
        span = Span(start, end - start, tuple(range(layout.num_blocks_for(end))))
        batch = Batch(token_ids[start:end], (span,), tuple(range(end - start)))
        step = TorchPagedAttention(batch, views, layout.block_size)
        parts.append(run(model, batch, step, torch.device(device)).float())
    return torch.cat(parts)
