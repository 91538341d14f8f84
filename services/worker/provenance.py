"""Where one worker's share of a request's KV came from, and where its time went. Values; no I/O, no
wire.

Law of a leg that ran: num_tokens_computed + num_tokens_local + sum of from_store tokens == prompt
tokens.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.block import Block, Tier
from process.deadline import Clock

FINGERPRINT = "fingerprint"
"""Beside those of `kvstore.errors`: the handle is of another model, tenant or prompt."""


@dataclass
class Leg:
    """One worker's leg, filled in as the request lives. Prompt tokens only."""

    num_prompt_tokens: int
    num_tokens_local: int = 0
    store_node_id: str = ""
    tokens_by_tier: Counter[Tier] = field(default_factory=Counter)
    bytes_by_tier: Counter[Tier] = field(default_factory=Counter)
    num_bytes_read: int = 0
    num_bytes_written: int = 0
    transport: str = ""
    recomputed: Counter[str] = field(default_factory=Counter)
    """Blocks that were or should have been in the store and had to be computed, by reason."""
    not_stored: Counter[str] = field(default_factory=Counter)
    """Blocks of a handover that did not get into the store, by reason."""

    @property
    def num_tokens_from_store(self) -> int:
        return self.tokens_by_tier.total()

    @property
    def num_tokens_computed(self) -> int:
        return self.num_prompt_tokens - self.num_tokens_local - self.num_tokens_from_store

    def count_loaded(
        self, first_token: int, end_token: int, blocks: Sequence[Block], *, block_bytes: int
    ) -> None:
        """These blocks came out of the store and were verified; of theirs, prompt tokens [first,
        end) are used.
        """
        end_token = min(end_token, self.num_prompt_tokens)
        for block in blocks:
            self.tokens_by_tier[block.tier] += max(
                0, min(block.num_tokens, end_token - first_token)
            )
            self.bytes_by_tier[block.tier] += block_bytes
            first_token += block.num_tokens


class StageClock:
    """Seconds per stage of one request. Stages follow one another; `enter` ends the one before."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._stage: str | None = None
        self._since = clock()
        self.seconds: dict[str, float] = {}

    def enter(self, stage: str | None) -> None:
        """Time from now on belongs to `stage`; None: to nobody."""
        now = self._clock()
        if self._stage is not None:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = stage, now


@dataclass
class WorkerCounts:
    """Sums over all legs of one worker life."""

    num_prompt_tokens_computed: int = 0
    num_prompt_tokens_local: int = 0
    num_prompt_tokens_from_store: int = 0
    num_output_tokens: int = 0
    recomputed: Counter[str] = field(default_factory=Counter)

    def add(self, leg: Leg) -> None:
        """Count a leg that ran."""
        self.num_prompt_tokens_computed += leg.num_tokens_computed
        self.num_prompt_tokens_local += leg.num_tokens_local
        self.num_prompt_tokens_from_store += leg.num_tokens_from_store
        self.recomputed.update(leg.recomputed)
