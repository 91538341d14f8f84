"""Parking: where the bytes of a preempted request's blocks lie until it has blocks again, as a
Protocol, and HostParking, which keeps them in this process.

What swap needs and nothing more. A parking may lose what it keeps: the engine then computes it
again, and counts that. Called from the engine's thread only; an implementation that moves bytes
elsewhere does so on threads of its own, with deadlines of its own.

Conservation: bytes kept == sum over keys, at most the bound (`check_integrity`).
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
"""[num_blocks, block_bytes]."""


class Parked(Protocol):
    """Bytes on their way back."""

    @property
    def is_done(self) -> bool:
        """Whether `result` answers at once."""
        ...

    def result(self) -> Blocks | None:
        """What was put, byte for byte; None if it was lost. Called once `is_done`."""
        ...


class Parking(Protocol):
    """See the module."""

    def put(
        self, key: str, chain_hashes: Sequence[bytes], blocks: Blocks, *, owner: str = ""
    ) -> None:
        """Keep a copy of these blocks; they may change as soon as this returns.

        Args:
            chain_hashes: of the full blocks among them, from the first on.
            owner: `Request.owner`.
        Raises: ParkingRefused: there is no room; nothing was kept.
        """
        ...

    def get(self, key: str) -> Parked:
        """Ask for what was put under `key`. Never waits; ends by itself, with bytes or without."""
        ...

    def drop(self, key: str) -> None:
        """Forget `key`, if it is known."""
        ...

    def check_integrity(self, keys: Collection[str]) -> None:
        """Exactly `keys` are kept, or were lost. Raises: IntegrityError."""
        ...


class _Here:
    """Bytes that never left this process."""

    is_done = True

    def __init__(self, blocks: Blocks | None) -> None:
        self._blocks = blocks

    def result(self) -> Blocks | None:
        return self._blocks


class HostParking:
    """At most `max_bytes` of this process' memory."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._kept: dict[str, Blocks] = {}

    def put(
        self, key: str, chain_hashes: Sequence[bytes], blocks: Blocks, *, owner: str = ""
    ) -> None:
        """See Parking; this process' memory is charged to no owner."""
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
        """See Parking."""
        return _Here(self._kept.get(key))

    def drop(self, key: str) -> None:
        """See Parking."""
        blocks = self._kept.pop(key, None)
        if blocks is not None:
            self.num_bytes -= blocks.nbytes

    def check_integrity(self, keys: Collection[str]) -> None:
        """See Parking."""
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
    """Where an engine whose KV lies on `device` parks: where it was told, or in this process; None
    where nothing is ever parked. Raises: SettingsError for a swap that the device cannot do."""
    if config.preemption != "swap":
        return None
    if device.partition(":")[0] != "cpu":
        raise SettingsError(
            f"preemption: 'swap' is for KV on CPU, this engine's lies on {device}; use 'recompute'"
        )
    return given or HostParking(max_bytes)
