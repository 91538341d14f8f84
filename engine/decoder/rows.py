"""RowTable: the host's side of the rows that decode on the device from launch to launch: which
place of the device's tables each has, and what of it changed since the launch before.

A launch's rows are one run of words, the image: small fields of all rows, which change at every
step, and behind them only those entries of the block tables that are new. The rows of a launch lie
at places [0, number of rows): those that stay keep theirs, one that lay behind the end moves into a
gap. Knows no model and no device. Invariant: after `update` the device's tables, with all images
applied in order, hold every row's blocks. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from baton_kernels import noise
from baton_kernels.lora import NO_SLOT, TILE_ROWS, most_tiles, tiles_of
from baton_kernels.sampling import Needs
from baton_kernels.step_rows import HEADER_WORDS, ImageLayout
from numpy.typing import NDArray

from engine.errors import IntegrityError
from engine.models.interface import DecodeRow
from engine.request import Sampling
from engine.sequence import Key

Words = NDArray[np.int32]

_ALIGNMENT = 16
"""Words (64 bytes): where each field begins: kernels compiled for aligned pointers serve."""

_FIELDS = (
    ("seed_keys", "int64"),
    ("positions", "int32"),
    ("sources", "int32"),
    ("given", "int32"),
    ("draw_positions", "int32"),
    ("top_k", "int32"),
    ("temperature", "float32"),
    ("top_p", "float32"),
    ("min_p", "float32"),
)
"""Behind the header, [rows] each: see `Image`."""

_TILES = "tiles"
_TILE_SLOTS = "tile_slots"


def aligned(num: int) -> int:
    """`num`, rounded up to what fields and tables are padded to."""
    return -(-num // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Image:
    """Where things lie in an image: a header (its first word: the number of changes), the fields of
    `max_rows` rows, the tiles of rows with adapters, the changes.

    positions: of the token computed; -1: no row. sources: the place in the launch before whose
    drawn token this row computes; -1: `given` has it. draw_positions: the place in the sequence
    that the drawn token will take; -1: no row. tiles, tile_slots: places by adapter, as LoraRows
    has them, its `row_ids` one after the other; tiles that are not empty come first.
    """

    max_rows: int
    """A multiple of 16."""

    max_changes: int
    """Changed entries of the block tables that one image brings."""

    num_slots: int = 0
    """Of adapters that rows may have; 0: there are no tiles."""

    @property
    def max_tiles(self) -> int:
        return aligned(most_tiles(self.max_rows, self.num_slots)) if self.num_slots else 0

    @cached_property
    def _fields(self) -> tuple[tuple[str, str, int], ...]:
        """(name, dtype, numbers)"""
        of_rows = tuple((name, dtype, self.max_rows) for name, dtype in _FIELDS)
        tiles = (_TILES, "int32", self.max_tiles * TILE_ROWS)
        return (*of_rows, tiles, (_TILE_SLOTS, "int32", self.max_tiles))

    def field(self, name: str) -> tuple[slice, str]:
        """The words of a field, and the dtype to view them as."""
        start = HEADER_WORDS
        for known, dtype, num_numbers in self._fields:
            num_words = num_numbers * (2 if dtype == "int64" else 1)
            if known == name:
                return slice(start, start + num_words), dtype
            start += num_words
        raise KeyError(name)

    @property
    def first_change(self) -> int:
        """The word where the changes begin: pairs of (flat index into the tables, block id)."""
        words: int = self.field(_TILE_SLOTS)[0].stop
        return words

    @property
    def num_words(self) -> int:
        return self.first_change + 2 * self.max_changes

    @property
    def layout(self) -> ImageLayout:
        """What kernels must know of it."""
        given, sources = self.field("given")[0], self.field("sources")[0]
        return ImageLayout(given.start, sources.start, self.first_change)


class Placed(NamedTuple):
    """What `RowTable.update` says of a launch."""

    order: NDArray[np.intp]
    """[rows]: the place of each, in the order that they were given in."""

    num_words: int
    """Of the image that are in use."""

    num_blocks: int
    """Of the longest row: how much of the tables' width is read."""

    needs: Needs
    """The most that a row's draw asks for."""

    overflow: Words
    """[C, 2]: changes for which the image has no room; to be applied before it."""

    has_adapters: bool = False
    """Some row has one."""


_NO_CHANGES = np.empty((0, 2), dtype=np.int32)


class RowTable:
    """See the module.

    Args:
        image: its `max_rows` is the number of places.
        table_width: entries of a row of the block tables.
    """

    def __init__(self, image: Image, *, table_width: int, block_size: int) -> None:
        self.image = image
        self.words: Words = np.zeros(image.num_words, dtype=np.int32)
        self._table_width = table_width
        self._block_size = block_size
        views = {}
        for name in (*(name for name, _ in _FIELDS), _TILES, _TILE_SLOTS):
            place, dtype = image.field(name)
            views[name] = self.words[place].view(dtype)
        self._seed_keys, self._temperature = views["seed_keys"], views["temperature"]
        self._top_k, self._top_p, self._min_p = views["top_k"], views["top_p"], views["min_p"]
        self._positions, self._draw_positions = views["positions"], views["draw_positions"]
        self._sources, self._given = views["sources"], views["given"]
        self._tiles = views[_TILES].reshape(-1, TILE_ROWS)
        self._tile_slots = views[_TILE_SLOTS]
        self._changes = self.words[image.first_change :].reshape(-1, 2)
        self.forget()

    def forget(self) -> None:
        """No row is known any more: what the device holds is not sure after an error."""
        num_places = self.image.max_rows
        self._keys: tuple[Key, ...] = ()
        self._left_elsewhere: dict[Key, int] | None = None
        self._places: dict[Key, int] = {}
        self._order = np.empty(0, dtype=np.intp)
        self._place_list: list[int] = []
        # What the device's tables hold, whosever it is.
        self._block_ids: list[tuple[int, ...]] = [()] * num_places
        self._samplings: list[Sampling | None] = [None] * num_places
        self._num_changes = self.words[0] = 0
        self._overflow: list[Words] = []
        self._slots: list[int] = []
        self._tiles[:] = -1
        self._tile_slots[:] = NO_SLOT
        self._clear(slice(None))

    @property
    def drawn_at(self) -> Mapping[Key, int]:
        """The places where the launch before left what each row drew."""
        return self._places if self._left_elsewhere is None else self._left_elsewhere

    def leave_elsewhere(self, places: dict[Key, int]) -> None:
        """The launch before was none of this table's, and left its draws at these places. Rows keep
        their own."""
        self._left_elsewhere = places

    def _clear(self, places: int | slice) -> None:
        """No row is there. Its token is a valid one all the same: it is looked up."""
        self._positions[places] = self._draw_positions[places] = self._sources[places] = -1
        self._given[places] = self._temperature[places] = 0

    def update(self, rows: Sequence[DecodeRow]) -> Placed:
        """Lay out a launch in `words`.

        Args:
            rows: 1 to as many as there are places.
        Raises: IntegrityError for a row that is there twice, that has no block for its token, whose
            token was drawn by no row of the launch before, or that has an adapter which there is no
            slot for. The table is spoiled then: `forget`.
        """
        keys, token_ids, positions, block_ids, draws, adapters = zip(*rows, strict=True)
        before = self._order
        if keys != self._keys:
            before = self._move(keys)
        order = self._order
        if self._left_elsewhere is not None:
            elsewhere, self._left_elsewhere = self._left_elsewhere, None
            before = np.array([elsewhere.get(key, -1) for key in keys], dtype=np.intp)
        tokens = np.array(token_ids, dtype=np.int32)
        position = np.array(positions, dtype=np.int32)
        is_drawn = tokens < 0
        if before is not order and (before[is_drawn] < 0).any():
            at = int(np.flatnonzero(is_drawn & (before < 0))[0])
            raise IntegrityError(
                f"{keys[at]} takes a token of the launch before, but was not in it"
            )
        self._given[order] = tokens
        self._sources[order] = np.where(is_drawn, before, -1)
        self._positions[order] = position
        self._draw_positions[order] = np.array([draw.position for draw in draws], dtype=np.int32)
        self._num_changes = 0
        self._overflow = []
        known_blocks, known_samplings = self._block_ids, self._samplings
        for place, own, draw in zip(self._place_list, block_ids, draws, strict=True):
            if own is not known_blocks[place]:
                self._set_blocks(place, tuple(own))
            if draw.sampling is not known_samplings[place]:
                self._set_sampling(place, draw.sampling, draw.sample_index)
        has_adapters = any(adapters)
        if has_adapters:
            self._set_tiles(adapters)
        num_blocks = self._check_blocks(keys, position)
        self.words[0] = self._num_changes
        overflow = np.concatenate(self._overflow) if self._overflow else _NO_CHANGES
        num_words = self.image.first_change + 2 * self._num_changes
        return Placed(order, num_words, num_blocks, self._needs(), overflow, has_adapters)

    def _needs(self) -> Needs:
        if not self._temperature.any():
            return "greedy"
        is_cut = (self._top_k > 0) | (self._top_p < 1.0)
        return "truncated" if (is_cut & (self._temperature > 0.0)).any() else "sampled"

    def _move(self, keys: tuple[Key, ...]) -> NDArray[np.intp]:
        """Give these rows places. Returns: those that they had, -1 for new ones."""
        num_rows = len(keys)
        if len(set(keys)) != num_rows:
            raise IntegrityError("a row is twice in one launch")
        before = [self._places.get(key, -1) for key in keys]
        kept = {place for place in before if 0 <= place < num_rows}
        gaps = iter([place for place in range(num_rows) if place not in kept])
        places = [place if 0 <= place < num_rows else next(gaps) for place in before]
        for place, old in zip(places, before, strict=True):
            if place != old:
                self._samplings[place] = None  # whose it is counts, too: samples share one
        for place in range(num_rows, len(self._keys)):
            self._clear(place)
        self._keys, self._places = keys, dict(zip(keys, places, strict=True))
        self._place_list, self._order = places, np.array(places, dtype=np.intp)
        return np.array(before, dtype=np.intp)

    def _set_blocks(self, place: int, block_ids: tuple[int, ...]) -> None:
        """Note what of a row's table is new: nearly always one block at its end."""
        known = self._block_ids[place]
        first = len(known) if block_ids[: len(known)] == known else 0
        self._block_ids[place] = block_ids
        num_new = len(block_ids) - first
        if len(block_ids) > self._table_width:
            raise IntegrityError(f"{len(block_ids)} blocks, but a table has {self._table_width}")
        if not num_new:
            return
        index = place * self._table_width + first
        start, end = self._num_changes, self._num_changes + num_new
        if end > self.image.max_changes:
            part = np.empty((num_new, 2), dtype=np.int32)
            self._overflow.append(part)
        else:
            part, self._num_changes = self._changes[start:end], end
        part[:, 0] = np.arange(index, index + num_new)
        part[:, 1] = block_ids[first:]

    def _set_sampling(self, place: int, sampling: Sampling, sample_index: int) -> None:
        self._samplings[place] = sampling
        self._seed_keys[place] = noise.seed_key(sampling.seed, sample_index)
        self._temperature[place] = sampling.temperature
        self._top_k[place] = sampling.top_k
        self._top_p[place] = sampling.top_p
        self._min_p[place] = sampling.min_p

    def _set_tiles(self, adapters: Sequence[int]) -> None:
        """Group the places by adapter. Nobody looks at tiles in a launch without any.

        Args:
            adapters: of each row, in the order that they were given in.
        """
        slots = [NO_SLOT] * len(adapters)
        for place, adapter in zip(self._place_list, adapters, strict=True):
            slots[place] = adapter - 1 if adapter else NO_SLOT
        if slots == self._slots:
            return
        if not 0 <= max(slots) < self.image.num_slots or min(slots) < NO_SLOT:
            raise IntegrityError(
                f"rows have adapters {sorted(set(adapters))} of {self.image.num_slots}"
            )
        self._slots = slots
        self._tiles[:] = -1
        self._tile_slots[:] = NO_SLOT
        for at, (slot, places) in enumerate(tiles_of(slots)):
            self._tile_slots[at] = slot
            self._tiles[at, : len(places)] = places

    def _check_blocks(self, keys: tuple[Key, ...], positions: Words) -> int:
        """Blocks that the longest row needs. Raises: IntegrityError where one lacks them."""
        counts = np.array([len(self._block_ids[place]) for place in self._place_list])
        needed = positions // self._block_size + 1
        if (counts < needed).any() or (positions < 0).any():
            at = int(np.flatnonzero((counts < needed) | (positions < 0))[0])
            raise IntegrityError(
                f"{keys[at]} has {counts[at]} blocks of {self._block_size} for a token at "
                f"{positions[at]}"
            )
        return int(needed.max())
