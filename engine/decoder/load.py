"""What models/load.py needs to load our own decoder: whether it does a config, and by what, its
weights, and whether the kernels give what plain torch gives on this device. Start-up only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from baton_kernels.packed_linear import unavailable_reason

from engine.batch import Batch
from engine.config import EngineConfig
from engine.decoder.decoder import Decoder
from engine.decoder.inputs import attending_inputs, mixed_inputs, singles_first
from engine.decoder.model import block_rows, on_device
from engine.decoder.shape import DecoderShape, rope_table
from engine.decoder.sources import Progress, read_weights
from engine.decoder.verify import NUM_TOKENS, check_close, verify_logits
from engine.errors import LoadError, ModelNotSupported
from engine.kv.layout import KvLayout
from engine.kv.memory import TORCH_DTYPES, KvMemory
from engine.layers.quantized_attention import Scales, calibrate_scales
from engine.layers.torch_attention import TorchPagedAttention
from engine.models.checkpoint_config import CheckpointConfig

MIN_HEAD_DIM = 16
"""The least that one product of the matrix units takes."""

Forward = Callable[[Batch], torch.Tensor]
"""Computes a batch; logits [R, V]."""


def why_not(
    config: EngineConfig, model_config: CheckpointConfig, device: str, name: str
) -> str | None:
    """Why transformers' code runs this model; None: our own decoder does.

    Raises: ModelNotSupported, LoadError for settings that only our own decoder has, where it does
        not do the model.
    """
    is_cuda = torch.device(device).type == "cuda"
    shape = model_config.shape
    reason: str | None = None
    if config.decoder == "transformers":
        reason = "decoder=transformers"
    elif shape is None:
        reason = model_config.refusal
    elif is_cuda and shape.head_dim < MIN_HEAD_DIM:
        reason = f"heads of {shape.head_dim} dimensions: kernels want {MIN_HEAD_DIM}"
    if config.num_ranks > 1 and reason is not None:
        raise LoadError(
            f"tensor_parallel, pipeline_parallel: only our own decoder is computed by several "
            f"processes, and it does not run {name} ({reason})"
        )
    if reason is None:
        return None
    if config.decoder == "own":
        raise ModelNotSupported(
            f"{name}: decoder=own does not do it: {reason}; use decoder=transformers"
        )
    for setting, is_set in (
        ("exact", config.exact),
        (f"weight_dtype={config.weight_dtype}", config.weight_dtype != "auto"),
    ):
        if is_set:
            raise LoadError(
                f"{setting}: needs our own decoder, which does not run {name} ({reason}); "
                "use decoder=own where that can be"
            )
    return reason


def uses_kernels(config: EngineConfig, device: str) -> bool:
    """Whether our own decoder's attention and products are the kernels'. On a CPU they are the
    kernels' reference, row by row and slow: taken where `exact` or several ranks need it, and for
    decoder=own, which computes there what a GPU would."""
    is_cuda = torch.device(device).type == "cuda"
    return is_cuda or config.decoder == "own" or config.exact or config.num_ranks > 1


def pack(decoder: Decoder, dtype: str) -> str:
    """Reorder a decoder's weights for this CPU, where that can be. Returns how products are
    computed, in words."""
    reason = unavailable_reason(TORCH_DTYPES[dtype], "cpu")
    if reason is not None:
        return f"plain ({reason})"
    for projection in decoder.weights.projections:
        projection.pack()
    return "packed"


def attending(decoder: Decoder, memory: KvMemory) -> Forward:
    """`decoder` with torch's attention, as a function of batches."""
    views, block_size = memory.layer_views(), memory.layout.block_size
    device = memory.cache.device

    @torch.inference_mode()
    def forward(batch: Batch) -> torch.Tensor:
        step = TorchPagedAttention(batch, views, block_size)
        return decoder.forward_attending(*attending_inputs(batch, device), step)

    return forward


def attached(decoder: Decoder, memory: KvMemory) -> Forward:
    """`decoder` on a cache that is not quantized, as a function of batches. Whole models only."""
    decoder.attach([block_rows(view, memory.layout) for view in memory.layer_views()])
    device = memory.cache.device

    @torch.inference_mode()
    def forward(batch: Batch) -> torch.Tensor:
        with on_device(device):
            return decoder.forward(mixed_inputs(singles_first(batch), device))

    return forward


def load_decoder(
    folder: Path,
    shape: DecoderShape,
    *,
    device: str,
    dtype: str,
    num_positions: int,
    is_exact: bool,
    weight_dtype: str,
    progress: Progress | None,
) -> Decoder:
    """Weights from `folder`, on the device, ready to run.

    Args:
        num_positions: of the longest request.
        weight_dtype: of EngineConfig.
    Raises: LoadError, CheckpointError.
    """
    on = torch.device(device)
    with on_device(on):
        try:
            weights = read_weights(
                folder,
                shape,
                dtype=TORCH_DTYPES[dtype],
                device=on,
                weight_dtype="" if weight_dtype == "auto" else weight_dtype,
                progress=progress,
            )
        except torch.cuda.OutOfMemoryError as error:
            raise LoadError(
                f"the weights need {shape.num_parameters * TORCH_DTYPES[dtype].itemsize} bytes, "
                f"which {device} has not free ({str(error).splitlines()[0]})"
            ) from error
        return Decoder(weights, rope_table(shape, num_positions, on), is_exact=is_exact)


def check_kernels(decoder: Decoder, layout: KvLayout, device: str, dtype: str) -> None:
    """Compare logits through this device's kernels with those of plain torch, same weights. Nothing
    to compare on CPU.

    Raises: LoadError where they differ by more than rounding.
    """
    if torch.device(device).type != "cuda":
        return
    raw, vocab_size = layout.raw, decoder.shape.vocab_size
    forward = attached(decoder, KvMemory(raw, raw.num_blocks_for(NUM_TOKENS), device))
    actual = verify_logits(forward, vocab_size, raw)
    decoder.use_backend("reference")
    expected = verify_logits(forward, vocab_size, raw)
    decoder.use_backend("auto")
    is_fp8 = decoder.weights.is_fp8
    check_close(actual, expected, dtype=dtype, is_fp8=is_fp8, device=device)


def fixed_scales(
    decoder: Decoder, layout: KvLayout, *, num_positions: int, device: str
) -> tuple[Scales, ...]:
    """One pair per layer where the layout has such scales; else none."""
    if layout.scale != "tensor":
        return ()
    on = torch.device(device)

    def forward(batch: Batch, step: Any) -> torch.Tensor:
        token_ids, positions, draw_indices = (
            torch.tensor(values, dtype=torch.int32, device=on)
            for values in (batch.token_ids, batch.positions, batch.draw_indices)
        )
        return decoder.forward_attending(token_ids, positions, draw_indices, step)

    with on_device(on):
        return calibrate_scales(
            forward,
            layout,
            vocab_size=decoder.shape.vocab_size,
            num_positions=num_positions,
            device=device,
        )
