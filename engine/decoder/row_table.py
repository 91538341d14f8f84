"""RowTable: the host's state of the rows that decode on the device from launch to launch: the place
of each row in the device's tables, and its changes since the launch before.

A launch's rows are written as one run of words, the image: small fields of all rows, which change
in every step, and then the new entries of the block tables only. The rows of a launch occupy places
[0, number of rows): rows that stay keep their places, and one behind the end moves into a gap. It
knows no model and no device. Invariant: after `update` the device's tables, with all images applied
in order, contain every row's blocks. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from baton_kernels import gumbel_noise
from baton_kernels.decode_step_rows import HEADER_WORDS, ImageLayout
from baton_kernels.lora import NO_SLOT, TILE_ROWS, most_tiles, tiles_of
from baton_kernels.sampling import Needs
from numpy.typing import NDArray

from engine.errors import IntegrityError
from engine.models.interface import DecodeRow
from engine.request import Sampling
from engine.sequence import Key

Words = NDArray[np.int32]

_ALIGNMENT = 16
"""Number of words (64 bytes) to which each field is aligned, for kernels that are compiled for
aligned pointers."""

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
"""The fields after the header, [rows] each (see `Image`): (name, dtype)."""

_TILES = "tiles"
_TILE_SLOTS = "tile_slots"


def aligned(num: int) -> int:
    """Round `num` up to the multiple to which fields and tables are padded."""
    return -(-num // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Image:
    """The layout of an image: a header (its first word is the number of changes), the fields of
    `max_rows` rows, the tiles of rows with adapters, and the changes of block tables.

    positions: the position of the token to compute; -1: no row. sources: the place in the launch
    before whose sampled token this row computes; -1: the token is in `given`. draw_positions: the
    position of the token to sample; -1: no row. tiles, tile_slots: places by adapter, in the format
    of LoraRows: its `row_ids` one after the other, tiles that are not empty first.
    """

    max_rows: int
    """Number of places, a multiple of 16."""

    max_changes: int
    """Largest number of changed block table entries in one image."""

    num_slots: int = 0
    """Number of adapter slots that rows may have; 0: there are no tiles."""

    @property
    def max_tiles(self) -> int:
        return aligned(most_tiles(self.max_rows, self.num_slots)) if self.num_slots else 0

    @cached_property
    def _fields(self) -> tuple[tuple[str, str, int], ...]:
        """All fields: (name, dtype, number of elements)."""
        of_rows = tuple((name, dtype, self.max_rows) for name, dtype in _FIELDS)
        tiles = (_TILES, "int32", self.max_tiles * TILE_ROWS)
        return (*of_rows, tiles, (_TILE_SLOTS, "int32", self.max_tiles))

    def field(self, name: str) -> tuple[slice, str]:
        """Return the words of a field, and the dtype to view them as."""
        start = HEADER_WORDS
        for known, dtype, num_numbers in self._fields:
            num_words = num_numbers * (2 if dtype == "int64" else 1)
            if known == name:
                return slice(start, start + num_words), dtype
            start += num_words
        raise KeyError(name)

    @property
    def first_change(self) -> int:
        """Index of the first word of the changes: pairs of (flat index into the tables, block
        id)."""
        words: int = self.field(_TILE_SLOTS)[0].stop
        return words

    @property
    def num_words(self) -> int:
        return self.first_change + 2 * self.max_changes

    @property
    def layout(self) -> ImageLayout:
        """The layout as an argument of the kernels."""
        given, sources = self.field("given")[0], self.field("sources")[0]
        return ImageLayout(given.start, sources.start, self.first_change)


class Placed(NamedTuple):
    """The result of `RowTable.update` for a launch."""

    order: NDArray[np.intp]
    """[rows], the place of each row, in the order of the arguments."""

    num_words: int
    """Number of words of the image that are in use."""

    num_blocks: int
    """Number of blocks of the longest row, which is the width of the tables that is read."""

    needs: Needs
    """The most demanding kind of sampling of the rows."""

    overflow: Words
    """[C, 2], changes for which the image has no room, to be applied before it."""

    has_adapters: bool = False
    """Whether some row has an adapter."""


_NO_CHANGES = np.empty((0, 2), dtype=np.int32)


class RowTable:
    """Assigns places to rows and writes images.

    Args:
        image: the layout; its `max_rows` is the number of places.
        table_width: number of entries of a row of the block tables.
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
        """Forget all rows, since the device's tables are undefined after an error."""
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
        """The places at which the launch before stored each row's sampled token."""
        return self._places if self._left_elsewhere is None else self._left_elsewhere

    def leave_elsewhere(self, places: dict[Key, int]) -> None:
        """Record that the latest launch had prompts, which do not use this table.

        Args: places: the index of each row's sampled token in the device's `last_drawn`, which
            `drawn_at` returns until the next `update`. The rows' places in the table stay.
        """
        self._left_elsewhere = places

    def _clear(self, places: int | slice) -> None:
        """Mark places as empty. Their token is a valid one all the same, since its embedding is
        read."""
        self._positions[places] = self._draw_positions[places] = self._sources[places] = -1
        self._given[places] = self._temperature[places] = 0

    def update(self, rows: Sequence[DecodeRow]) -> Placed:
        """Write the image of a launch to `words`.

        Args: rows: 1 to the number of places.
        Raises: IntegrityError for a row that occurs twice, has no block for its token, whose token
            was not sampled by the launch before, or whose adapter slot does not exist. The table
            must be reset with `forget` then.
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
        """Assign places to these rows. Returns: their previous places, -1 for new rows."""
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
        """Record the new entries of a row's block table, mostly one block at its end."""
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
        self._seed_keys[place] = gumbel_noise.seed_key(sampling.seed, sample_index)
        self._temperature[place] = sampling.temperature
        self._top_k[place] = sampling.top_k
        self._top_p[place] = sampling.top_p
        self._min_p[place] = sampling.min_p

    def _set_tiles(self, adapters: Sequence[int]) -> None:
        """Group the places by adapter. Called only if the launch has adapters.

        Args: adapters: the slot of each row, in the order of the rows.
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
        """Return the number of blocks of the longest row. Raises: IntegrityError if a row has too
        few blocks."""
        counts = np.array([len(self._block_ids[place]) for place in self._place_list])
        needed = positions // self._block_size + 1
        if (counts < needed).any() or (positions < 0).any():
            at = int(np.flatnonzero((counts < needed) | (positions < 0))[0])
            raise IntegrityError(
                f"{keys[at]} has {counts[at]} blocks of {self._block_size} for a token at "
                f"{positions[at]}"
            )
        return int(needed.max())
