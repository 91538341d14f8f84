"""Parking: the Protocol of a store for the KV of preempted requests until they have blocks again;
and HostParking, which stores it in this process.

A parking may lose blocks: the engine then recomputes their KV, and counts that. Called from the
engine's thread only; an implementation that transfers bytes does so on threads of its own, with
deadlines of its own. Invariant: the bytes stored are the sum over keys, and at most the limit
(`check_integrity`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.config import EngineConfig
from engine.errors import IntegrityError, ParkingRefused
from process.settings import SettingsError

Blocks = npt.NDArray[np.uint8]
"""The bytes of blocks, [num_blocks, block_bytes] uint8."""


class Parked(Protocol):
    """Protocol of parked blocks that are being read back."""

    @property
    def is_done(self) -> bool:
        """Return whether `result` returns at once."""
        ...

    def result(self) -> Blocks | None:
        """Return the blocks as they were put, or None if they were lost. Called once `is_done`."""
        ...


class Parking(Protocol):
    """Protocol of a store for the blocks of preempted requests."""

    def put(
        self, key: str, chain_hashes: Sequence[bytes], blocks: Blocks, *, owner: str = ""
    ) -> None:
        """Store a copy of these blocks, which may change as soon as this returns.

        Args:
            chain_hashes: chain hashes of the full blocks among them, from the first on.
            owner: `Request.owner`.
        Raises: ParkingRefused if there is no room; nothing is stored then.
        """
        ...

    def get(self, key: str) -> Parked:
        """Start to read the blocks stored under `key`, without waiting. The read ends by itself,
        with the blocks or without."""
        ...

    def drop(self, key: str) -> None:
        """Drop the blocks of `key`, if it is known."""
        ...

    def check_integrity(self, keys: Collection[str]) -> None:
        """Check that exactly the blocks of `keys` are stored, or were lost. Raises:
        IntegrityError."""
        ...


class _Here:
    """Parked blocks in this process's memory, which can be read at once."""

    is_done = True

    def __init__(self, blocks: Blocks | None) -> None:
        self._blocks = blocks

    def result(self) -> Blocks | None:
        return self._blocks


class HostParking:
    """A Parking in this process's memory, of at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._kept: dict[str, Blocks] = {}

    def put(
        self, key: str, chain_hashes: Sequence[bytes], blocks: Blocks, *, owner: str = ""
    ) -> None:
        """Store a copy of the blocks; `owner` is ignored. Raises: ParkingRefused if it exceeds the
        limit."""
        if key in self._kept:
            raise IntegrityError(f"{key} is parked already")
        if self.num_bytes + blocks.nbytes > self.max_bytes:
            raise ParkingRefused(
                f"{blocks.nbytes} bytes beside {self.num_bytes} are more than the "
                f"{self.max_bytes} of park_bytes"
            )
        self._kept[key] = blocks.copy()
        self.num_bytes += blocks.nbytes

    def get(self, key: str) -> Parked:
        """Return the blocks of `key`, which stay stored until `drop`."""
        return _Here(self._kept.get(key))

    def drop(self, key: str) -> None:
        """Drop the blocks of `key`, if it is known."""
        blocks = self._kept.pop(key, None)
        if blocks is not None:
            self.num_bytes -= blocks.nbytes

    def check_integrity(self, keys: Collection[str]) -> None:
        """Check that the bytes add up and that no other keys are stored. Raises: IntegrityError."""
        if set(self._kept) != set(keys):
            raise IntegrityError(f"parked are {sorted(self._kept)}, swapped out {sorted(keys)}")
        num_bytes = sum(blocks.nbytes for blocks in self._kept.values())
        if num_bytes != self.num_bytes or num_bytes > self.max_bytes:
            raise IntegrityError(
                f"{num_bytes} bytes are parked, {self.num_bytes} by count, {self.max_bytes} allowed"
            )


def choose_parking(
    config: EngineConfig, device: str, max_bytes: int, given: Parking | None
) -> Parking | None:
    """Return the parking of an engine whose KV lies on `device`: the given one, or one in this
    process; None if nothing is ever parked. Raises: SettingsError if the device does not support
    swapping."""
    if config.preemption != "swap":
        return None
    if device.partition(":")[0] != "cpu":
        raise SettingsError(
            f"preemption: 'swap' is for KV on CPU, this engine's lies on {device}; use 'recompute'"
        )
    return given or HostParking(max_bytes)
