"""Preemptor: preempts a sequence, and restores its KV later: by recomputing it, or by copying its
parked blocks back. engine/scheduler.py chooses the sequence.

Causes that are counted, one for each preemption of a sequence:

    recompute  as configured: KV that the prefix cache does not keep is recomputed
    swap       as configured: its blocks are parked
    refused    its blocks should have been parked, but there was no room: recomputed
    lost       its parked blocks were lost: recomputed (counted in addition to its swap)

Engine thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.errors import ParkingRefused
from engine.kv.cache_manager import KVCacheManager
from engine.metrics import EngineMetrics
from engine.parking import Parking
from engine.request import RequestState
from engine.sequence import Sequence

CAUSES = ("recompute", "swap", "refused", "lost")


def parking_key(sequence: Sequence) -> str:
    """Return the key under which a sequence's blocks are parked."""
    return f"{sequence.request.request_id}/{sequence.sample_index}"


class Preemptor:
    """Preempts sequences and restores their KV. Without a parking, all KV is recomputed."""

    def __init__(
        self, cache_manager: KVCacheManager, parking: Parking | None, metrics: EngineMetrics
    ) -> None:
        self._cache_manager = cache_manager
        self._parking = parking
        self._metrics = metrics
        self.num_by_cause: Counter[str] = Counter()

    def use_parking(self, parking: Parking) -> None:
        """Replace the parking. Called only while nothing is parked."""
        self._parking = parking

    def preempt(self, sequence: Sequence) -> str:
        """Preempt a sequence that is WAITING, PREFILLING or RUNNING: it is PREEMPTED or PARKED
        then, without blocks. Returns: the cause."""
        cause = self._park(sequence)
        self._count(cause)
        self._cache_manager.free(sequence)
        sequence.num_computed_tokens = sequence.num_local_tokens = 0
        sequence.num_cached_blocks = 0
        sequence.move(RequestState.PARKED if cause == "swap" else RequestState.PREEMPTED)
        return cause

    def _park(self, sequence: Sequence) -> str:
        if self._parking is None or sequence.num_computed_tokens == 0:
            return "recompute"
        num_full = sequence.num_computed_tokens // self._cache_manager.block_size
        try:
            self._parking.put(
                parking_key(sequence),
                sequence.chain_hashes[:num_full],
                self._cache_manager.copy_out(sequence),
                owner=sequence.request.owner,
            )
        except ParkingRefused:
            return "refused"
        sequence.num_parked_tokens = sequence.num_computed_tokens
        return "swap"

    def bring_back(self, sequence: Sequence) -> bool:
        """Start or continue to restore a PARKED sequence that has blocks again: it is SWAPPING,
        then WAITING. Returns: whether it is WAITING; False while its blocks are being read back."""
        if self._parking is None:
            raise AssertionError("a parked sequence, but no parking")
        if sequence.parked is None:
            sequence.move(RequestState.SWAPPING)
            sequence.parked = self._parking.get(parking_key(sequence))
        if not sequence.parked.is_done:
            return False
        blocks = sequence.parked.result()
        if blocks is None:
            self._count("lost")
        else:
            self._cache_manager.copy_in(sequence, blocks, sequence.num_parked_tokens)
        self.forget(sequence)
        self._cache_manager.cache_full_blocks(sequence)
        sequence.move(RequestState.WAITING)
        return True

    def _count(self, cause: str) -> None:
        self.num_by_cause[cause] += 1
        self._metrics.on_preempt(cause)

    def forget(self, sequence: Sequence) -> None:
        """Drop the parked blocks of a sequence."""
        if self._parking is not None and sequence.num_parked_tokens:
            self._parking.drop(parking_key(sequence))
        sequence.parked = None
        sequence.num_parked_tokens = 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Check that exactly the blocks that live sequences wait for are parked. Raises:
        IntegrityError."""
        if self._parking is not None:
            self._parking.check_integrity(
                {parking_key(one) for one in sequences if one.num_parked_tokens}
            )
