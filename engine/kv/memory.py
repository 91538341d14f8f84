"""KvMemory: the memory of the device cache, one allocation, and each layer's view of it. It knows
no requests and no free list.

The bytes of a block of a RESERVED request may be written by the thread that loads it; from `start`
on by the engine's thread only. A full block of a started request changes no more and may be read by
any thread.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from baton_kernels.block_rows import BlockRows

from engine.errors import LoadError
from engine.kv.layout import KvLayout, Section
from engine.kv.unquantized_tails import UnquantizedTails

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8_e4m3": torch.int8,  # its bits: few operations know the type itself
}


@dataclass(frozen=True)
class HeadRows:
    """The rows of a layer view that belong to a block: head k of block b is row b * rows_per_block
    + k * head_step."""

    num_heads: int
    rows_per_block: int
    head_step: int


@dataclass(frozen=True)
class LayerView:
    """One layer's keys and values in the cache, as tensors that share its memory."""

    keys: torch.Tensor
    """A view [rows, block_size, k_head_dim]; latents where `values` is None."""

    values: torch.Tensor | None
    """A view [rows, block_size, v_head_dim]. None: the values are the first `v_head_dim` columns of
    the keys."""

    v_head_dim: int
    heads: HeadRows

    k_scales: torch.Tensor | None = None
    """The scales of the keys, a view [rows, scales] float32; None if the cache is not quantized."""
    v_scales: torch.Tensor | None = None

    def block_rows(self, dtype: str) -> BlockRows:
        """Return this view as a BlockRows, the argument of the kernels.

        Args: dtype: the dtype of a quantized cache; "" if it is not quantized.
        """
        return BlockRows(
            self.keys,
            self.values,
            self.v_head_dim,
            self.heads.num_heads,
            self.heads.rows_per_block,
            self.heads.head_step,
            self.k_scales,
            self.v_scales,
            dtype,
        )


class ByteRun(NamedTuple):
    """A range of bytes that is contiguous both in a whole block and in a rank's part of it."""

    block_offset: int
    record_offset: int
    num_bytes: int


class RankPart(NamedTuple):
    """The place of one rank's part of every block, as this process addresses it: block b begins at
    address + b * record_bytes."""

    device_id: int
    address: int
    record_bytes: int
    runs: tuple[ByteRun, ...]


class KvMemory:
    """The memory of the KV cache: a tensor [num_blocks, *layout.block_shape], zero at start,
    page-aligned on CPU.

    Args:
        shared_file: CPU only: the descriptor of a file of zeros of the cache's size that several
            processes map; the caller closes it. None: private memory.
        record: the layout of this process's part of each block; None: the whole block.
    Attributes:
        layout: the layout of a whole block.
        record: the layout of the part that lies here; `layout` itself unless other ranks have the
            rest.
        cache: the tensor, of the layout's dtype, on `device`.
        tails: the unquantized numbers of unfilled blocks of a quantized cache; else None.
        parts: the places of all ranks' parts, if the cache is split and all can be addressed; else
            empty.
        address: the address of the first byte; block b begins at address + b * record.block_bytes.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        device: str = "cpu",
        *,
        shared_file: int | None = None,
        record: KvLayout | None = None,
    ) -> None:
        self.layout = layout
        self.record = record = record or layout
        self.parts: tuple[RankPart, ...] = ()
        self.num_blocks = num_blocks
        self.device = device
        shape = (num_blocks, *record.block_shape)
        dtype = TORCH_DTYPES[layout.dtype]
        self._bytes: npt.NDArray[np.uint8] | None = None
        if torch.device(device).type == "cpu":
            # Zero pages, page-aligned, and committed only when first written.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            if shared_file is not None:
                flags = mmap.MAP_SHARED
            file = -1 if shared_file is None else shared_file
            try:
                buffer = mmap.mmap(file, num_blocks * record.block_bytes, flags=flags)
            except (OSError, OverflowError) as error:
                raise self._no_room(error) from error
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without them: slower, nothing else
                    buffer.madvise(mmap.MADV_HUGEPAGE)
            self._bytes = np.frombuffer(buffer, dtype=np.uint8).reshape(num_blocks, -1)
            self.cache: torch.Tensor = torch.frombuffer(buffer, dtype=dtype).view(shape)
        else:
            try:
                self.cache = torch.zeros(shape, dtype=dtype, device=device)
            except torch.OutOfMemoryError as error:
                raise self._no_room(error) from error
        self.address: int = self.cache.data_ptr()
        self._views: list[LayerView] | None = None
        self.tails: UnquantizedTails | None = None
        if layout.is_quantized:
            self.tails = UnquantizedTails(lambda num_slots: KvMemory(record.raw, num_slots, device))

    def _no_room(self, error: Exception) -> LoadError:
        num_bytes = self.num_blocks * self.record.block_bytes
        return LoadError(
            f"no memory on {self.device} for a KV cache of {self.num_blocks} blocks "
            f"({num_bytes / 2**30:.1f} GiB: {str(error).splitlines()[0]}); lower num_blocks, or "
            "kv_bytes or memory_share where they decide"
        )

    @property
    def is_whole(self) -> bool:
        """Whether the whole of each block lies here, and none of it on other ranks."""
        return self.record is self.layout

    @property
    def host_view(self) -> npt.NDArray[np.uint8]:
        """The cache as an array [num_blocks, block_bytes] uint8 that shares its memory. Raises:
        TypeError if the cache is not on CPU."""
        if self._bytes is None:
            raise TypeError(
                f"the KV cache lies on {self.device}: it has an address, but no host view"
            )
        return self._bytes

    def settle(self) -> None:
        """Wait until `clear` and `copy` are done on all ranks. Returns at once here, as there is
        only one; work queued on this process's own device is not waited for."""

    def clear(self, block_id: int) -> None:
        """Zero every slot of a block, and close its tail."""
        self.cache[block_id].zero_()
        if self.tails is not None:
            self.tails.close(block_id)

    def copy(self, source: int, target: int) -> None:
        """Copy all bytes of block `source`, and its tail, over block `target`: the copy of
        copy-on-write."""
        self.cache[target].copy_(self.cache[source])
        if self.tails is not None:
            self.tails.copy(source, target)

    def move_tokens(self, moves: Sequence[tuple[int, int, int, int]]) -> None:
        """Copy the keys and values of single tokens; all are read before any is written.

        Args: moves: (source block, slot, target block, slot) of each token.
        Raises: ValueError for a quantized cache, or one that is split between ranks.
        """
        if not moves:
            return
        if self.tails is not None or not self.is_whole:
            raise ValueError("single tokens of this cache cannot be moved")
        is_cuda = self.cache.device.type == "cuda"
        brought = torch.tensor(moves, pin_memory=is_cuda).to(self.cache.device, non_blocking=True)
        source, source_slot, target, target_slot = brought.T
        if self.record.is_uniform:  # at once: the next step waits for it
            matrices = self.cache.flatten(1, 3)  # [blocks, matrices, P, D]
            matrices[target, :, target_slot] = matrices[source, :, source_slot]
            return
        source, source_slot, target, target_slot = brought.T[:, :, None]
        rows: dict[HeadRows, tuple[torch.Tensor, torch.Tensor]] = {}
        for view in self._own_views():
            heads = view.heads
            if heads not in rows:
                steps = torch.arange(heads.num_heads, device=brought.device) * heads.head_step
                first = source * heads.rows_per_block, target * heads.rows_per_block
                rows[heads] = first[0] + steps, first[1] + steps
            from_rows, to_rows = rows[heads]
            for numbers in (view.keys, view.values):
                if numbers is not None:
                    numbers[to_rows, target_slot] = numbers[from_rows, source_slot]

    def clear_tokens(self, block_id: int, first_slot: int) -> None:
        """Zero the slots of a block from `first_slot` on. Not for a quantized cache."""
        for view in self._own_views():
            heads = view.heads
            first = block_id * heads.rows_per_block
            rows = range(first, first + heads.num_heads * heads.head_step, heads.head_step)
            for numbers in (view.keys, view.values):
                if numbers is not None:
                    numbers[list(rows)[: heads.num_heads], first_slot:] = 0

    def _own_views(self) -> list[LayerView]:
        if self._views is None:
            self._views = self.layer_views()
        return self._views

    def check_integrity(self) -> None:
        """Check the slots of unfilled blocks. Raises: IntegrityError where one is lost or has two
        owners."""
        if self.tails is not None:
            self.tails.check_integrity()

    def layer_views(
        self, layers: Iterable[int] | None = None, share: int = 0, num_shares: int = 1
    ) -> list[LayerView]:
        """Return one view per layer; they share the cache's memory.

        Args:
            layers: the indices of the layers; None: all.
            num_shares: into how many equal runs each layer's heads are cut.
            share: the index of the run that the views cover.
        """
        if layers is None:
            layers = range(self.record.num_layers)
        return [self._layer_view(index, share, num_shares) for index in layers]

    def _layer_view(self, index: int, share: int, num_shares: int) -> LayerView:
        layer = self.record.layers[index]
        unit = self.record.row_elements
        num_heads = layer.num_k_heads // num_shares
        heads = HeadRows(
            num_heads,
            self.record.num_elements // unit,
            self.record.section(index, 0).head_stride // unit,
        )
        first_head = share * num_heads
        key, value = self.record.section(index, 0), None
        if not layer.is_latent:
            value = self.record.section(index, 1)
        return LayerView(
            keys=self._rows(key, heads, first_head),
            values=None if value is None else self._rows(value, heads, first_head),
            v_head_dim=layer.v_head_dim,
            heads=heads,
            k_scales=self._scale_rows(key, heads, first_head),
            v_scales=None if value is None else self._scale_rows(value, heads, first_head),
        )

    def _num_rows(self, heads: HeadRows) -> int:
        """Return the number of rows of a view, up to the last head of the last block."""
        num_rows = (self.num_blocks - 1) * heads.rows_per_block
        return num_rows + (heads.num_heads - 1) * heads.head_step + 1

    def _rows(self, section: Section, heads: HeadRows, first_head: int) -> torch.Tensor:
        """Return a view of a section's matrices, [rows, block_size, dim]."""
        offset = section.offset + first_head * section.head_stride
        return self.cache.as_strided(
            (self._num_rows(heads), self.record.block_size, section.dim),
            (self.record.row_elements, section.dim, 1),
            self.cache.storage_offset() + offset,
        )

    def _scale_rows(
        self, section: Section, heads: HeadRows, first_head: int
    ) -> torch.Tensor | None:
        """Return a view of a section's scales, [rows, scales] float32; None without scales."""
        if not self.record.is_quantized:
            return None
        numbers = self.cache.view(torch.float32)
        offset = section.scale_offset + first_head * section.head_stride
        return numbers.as_strided(
            (self._num_rows(heads), self.record.num_scales),
            (self.record.row_elements // 4, 1),
            numbers.storage_offset() + offset // 4,
        )

    def block_array(self, block_id: int) -> npt.NDArray[Any]:
        """Return one block's bytes, an array [block_bytes] uint8 that shares the cache's memory.
        CPU only."""
        view: npt.NDArray[np.uint8] = self.host_view[block_id]
        return view
