"""The KV cache of several ranks: on CPU one KvMemory that all ranks map (`map_file`), with whole
blocks, of which each rank uses its heads in its layers. On CUDA each rank has a cache on its own
device (`RankMemory`): a part of every block, with the rank's heads and layers, as a contiguous
record.

With one stage, such a record is one run of the whole block; with several it is a run for each head
(`runs`).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence

from engine.kv.layout import DTYPE_BYTES, KvLayout
from engine.kv.memory import ByteRun, KvMemory, RankPart
from engine.parallel.cuda_ipc import SharedCache, close_cache, open_cache
from engine.parallel.messages import Change
from engine.parallel.rank_grid import Grid, RankPlace


def runs(whole: KvLayout, place: RankPlace) -> list[ByteRun]:
    """Return the places of a rank's record in the whole block, ascending; adjacent runs are
    merged."""
    own = place.layout(whole)
    width = DTYPE_BYTES[whole.dtype]
    found: list[ByteRun] = []
    first_layer = place.layers(whole.num_layers).start
    for section in own.sections:
        whole_section = whole.section(first_layer + section.layer, section.kv)
        first_head = place.part(whole_section.num_heads).start
        matrix = section.dim * whole.block_size
        scale = whole.num_scales * 4
        for head in range(section.num_heads):
            whole_start = (first_head + head) * whole_section.head_stride
            start = head * section.head_stride
            found.append(
                ByteRun(
                    (whole_section.offset + whole_start) * width,
                    (section.offset + start) * width,
                    matrix * width,
                )
            )
            if scale:
                found.append(
                    ByteRun(
                        whole_section.scale_offset + whole_start,
                        section.scale_offset + start,
                        scale,
                    )
                )
    return _joined(sorted(found))


def _joined(parts: Iterable[ByteRun]) -> list[ByteRun]:
    joined: list[ByteRun] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and (
            last.block_offset + last.num_bytes == part.block_offset
            and last.record_offset + last.num_bytes == part.record_offset
        ):
            joined[-1] = last._replace(num_bytes=last.num_bytes + part.num_bytes)
        else:
            joined.append(part)
    return joined


def map_file(layout: KvLayout, num_blocks: int, file: int) -> KvMemory:
    """Map the whole cache on CPU, in a file that all ranks have open; sets the size of the file."""
    os.ftruncate(file, num_blocks * layout.block_bytes)
    return KvMemory(layout, num_blocks, "cpu", shared_file=file)


class RankMemory(KvMemory):
    """One rank's own cache: `cache`, its address and its views contain this rank's part only. In
    rank 0 it is the engine's `kv`: `layout` is that of the whole block, changes are sent to the
    other ranks, and `parts` has the addresses of all ranks' parts.

    Args:
        on_change: called for every block that is cleared or copied.
        settle: waits until the other ranks have done all changes.
    """

    def __init__(
        self,
        whole: KvLayout,
        place: RankPlace,
        num_blocks: int,
        device: str,
        *,
        on_change: Callable[[Change], None] = lambda _: None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(whole, num_blocks, device, record=place.layout(whole))
        self._on_change = on_change
        self._settle = settle
        self._has_changed = False

    def reach(self, caches: Sequence[SharedCache], grid: Grid) -> None:
        """Map the caches of ranks 1 and up. Raises: LoadError."""
        found = [self._part(grid.place(0), self.cache.device.index or 0, self.address)]
        for rank, cache in enumerate(caches, 1):
            if not cache.handle:
                return  # nothing can be moved; whoever wants to says so
            address = open_cache(cache)
            weakref.finalize(self, close_cache, cache, address)
            found.append(self._part(grid.place(rank), cache.device_id, address))
        self.parts = tuple(found)

    def _part(self, place: RankPlace, device_id: int, address: int) -> RankPart:
        record_bytes = place.layout(self.layout).block_bytes
        return RankPart(device_id, address, record_bytes, tuple(runs(self.layout, place)))

    def clear(self, block_id: int) -> None:
        """Zero this rank's part of a block, and send the change to the other ranks."""
        super().clear(block_id)
        self._change(Change(block_id))

    def copy(self, source: int, target: int) -> None:
        """Copy this rank's part of block `source` over block `target`, and send the change to the
        other ranks."""
        super().copy(source, target)
        self._change(Change(target, source))

    def _change(self, change: Change) -> None:
        self._has_changed = True
        self._on_change(change)

    def settle(self) -> None:
        """Wait until all ranks have done the changes of `clear` and `copy`."""
        if self._has_changed:
            self._settle()
            self._has_changed = False
