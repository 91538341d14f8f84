"""KeptPaths: of token trees that a step verified, the KV of the paths that are kept, moved to where
their tokens belong. Knows no requests. Engine thread only.

Invariant: what was asked for since the last `move` is not there yet, and nobody is told of it.
"""

from __future__ import annotations

from collections.abc import Sequence as Values

from engine.in_flight import InFlight
from engine.kv.memory import KvMemory


class KeptPaths:
    """See the module."""

    def __init__(self, kv: KvMemory, in_flight: InFlight) -> None:
        self._kv = kv
        self._in_flight = in_flight
        self._moves: list[tuple[int, int, int, int]] = []

    def keep(self, block_ids: Values[int], first: int, nodes: Values[int]) -> None:
        """Of a token tree whose first node lies in slot `first`, keep the KV of these nodes, the
        root's child first, in the slots from there on: at `move`, which must come before anybody is
        told of them. (Of a quantized cache at once: a block that they fill is cached right away.)

        Args:
            block_ids: of the tree's sequence.
        """
        size = self._kv.layout.block_size
        if self._kv.tails is not None:
            self._kv.tails.keep(block_ids, first, nodes)
            self._in_flight.has_copied = self._in_flight.has_copied or len(nodes) > 0
            return
        for place, node in enumerate(nodes):
            if place != node:
                source, target = first + node, first + place
                self._moves.append(
                    (
                        *(block_ids[source // size], source % size),
                        *(block_ids[target // size], target % size),
                    )
                )

    def move(self) -> None:
        """Do what `keep` has asked for since the last call: all sequences' at once."""
        if self._moves:
            self._kv.move_tokens(self._moves)
            self._moves = []
            # On a device it is queued behind the draws: no wait for them says when it is over.
            self._in_flight.has_copied = True
