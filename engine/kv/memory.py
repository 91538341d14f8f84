"""KvMemory: the bytes of the device cache, one allocation. Knows no request and no free list.

Who may touch a block's bytes when: a block of a RESERVED request belongs to whoever loads it (any
thread); from `start` on to the engine thread; a full block of a started request changes no more and
may be read by any thread.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.kv.layout import KvLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KvMemory:
    """[num_blocks, kv_heads, layers, 2, block_size, head_dim], page-aligned on CPU, zero at start.

    Attributes:
        layout, num_blocks: what it holds.
        cache: the tensor, model dtype, on `device`.
        address: of the first byte; block b begins at address + b * layout.block_bytes.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: str = "cpu") -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        shape = (num_blocks, *layout.block_shape)
        dtype = TORCH_DTYPES[layout.dtype]
        self._bytes: npt.NDArray[np.uint8] | None = None
        if torch.device(device).type == "cpu":
            # Anonymous pages: zero, page-aligned, and committed only when first written.
            buffer = mmap.mmap(
                -1, num_blocks * layout.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without them: slower, nothing else
                    buffer.madvise(mmap.MADV_HUGEPAGE)
            self._bytes = np.frombuffer(buffer, dtype=np.uint8).reshape(num_blocks, -1)
            self.cache: torch.Tensor = torch.frombuffer(buffer, dtype=dtype).view(shape)
        else:
            self.cache = torch.zeros(shape, dtype=dtype, device=device)
        self.address: int = self.cache.data_ptr()

    @property
    def host_view(self) -> npt.NDArray[np.uint8]:
        """[num_blocks, block_bytes] uint8, sharing the cache's memory. Raises: TypeError when the
        cache is not on CPU."""
        if self._bytes is None:
            raise TypeError(
                f"the KV cache lies on {self.device}: it has an address, but no host view"
            )
        return self._bytes

    def clear(self, block_id: int) -> None:
        """Make every slot of a block zero."""
        self.cache[block_id].zero_()

    def block_array(self, block_id: int) -> npt.NDArray[Any]:
        """One block's bytes (CPU only), for checks and copies."""
        view: npt.NDArray[np.uint8] = self.host_view[block_id]
        return view
