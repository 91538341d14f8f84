"""Prefill attention by cuDNN's kernel, through torch, and where it runs.

It knows no blocks, and one kind of mask: causal, from the first key on. Its plans are made once per
shape and thread. Knows no model.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from baton_kernels.block_rows import BlockRows
from baton_kernels.prefill_attention import LIBRARY_HEAD_DIMS, LibraryCall

_FIRST_CAPABILITY = (9, 0)


def can_run(query: torch.Tensor, rows: BlockRows) -> bool:
    """Is this a dtype, a width and a device that it does well?"""
    return (
        query.is_cuda
        and query.dtype == torch.bfloat16
        and rows.values is not None
        and rows.k_head_dim == rows.v_head_dim
        and rows.k_head_dim in LIBRARY_HEAD_DIMS
        and _has_library(query.device)
    )


@lru_cache(maxsize=16)
def _has_library(device: torch.device) -> bool:
    return (
        torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY
        and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    )


def attend_fresh(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: LibraryCall,
    scaling: float,
) -> torch.Tensor:
    """The tokens of `call`, of [T, H, D] and [T, K, D] twice -> [B * tokens, H, D]."""
    part = slice(call.first_row, call.first_row + call.num_sequences * call.num_tokens)
    q, k, v = (
        x[part].view(call.num_sequences, call.num_tokens, *x.shape[1:]).transpose(1, 2)
        for x in (query, key, value)
    )
    # Below torch's own function, which first asks what else could run.
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001
        q, k, v, None, False, 0.0, True, False, scale=scaling
    )
    attended: torch.Tensor = found[0]  # [B, H, tokens, D], strides as the query's
    return attended.transpose(1, 2).reshape(-1, *query.shape[1:])
