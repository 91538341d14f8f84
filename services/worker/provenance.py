"""Provenance of one worker's share of a request's KV, and the time spent per stage. Values only; no
I/O.

Law of a leg that ran: num_tokens_computed + num_tokens_local + sum of from_store tokens == prompt
tokens; of one that ended inside its prompt: == the tokens that it reached.
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.block_refs import Block, InTier, PackedBlocks, Tier
from kvstore.node_ids import is_lender
from process.deadline import Clock

FINGERPRINT = "fingerprint"
"""Metrics reason, beside those of `kvstore.errors`, of a handle for another model, tenant or
prompt."""


class HandoverPath(enum.IntEnum):
    """Path of a prompt's KV to decode; the numbers are those of the protobuf enum."""

    UNSPECIFIED = 0
    STORE = 1
    DIRECT = 2


class Place(NamedTuple):
    """Tier of one node's store, or of a worker that lends its blocks."""

    node_id: str
    tier: Tier


@dataclass
class Leg:
    """Provenance of the KV of one worker's leg of a request, in prompt tokens."""

    num_prompt_tokens: int
    num_reached: int | None = None
    """Number of leading tokens whose KV the leg has had; None: all of the prompt."""
    num_tokens_local: int = 0
    store_node_id: str = ""
    """Node id of the store that blocks come from where `count_loaded` is given no other."""
    tokens_by_place: Counter[Place] = field(default_factory=Counter)
    bytes_by_place: Counter[Place] = field(default_factory=Counter)
    num_tokens_early: int = 0
    """Number of the tokens from stores that were fetched while prefill still ran."""
    bytes_read: Counter[str] = field(default_factory=Counter)
    """Bytes read from stores and lenders, by transport."""
    bytes_written: Counter[str] = field(default_factory=Counter)
    """Bytes written to stores, by transport; for decode without the answer's blocks."""
    transport_by_node: dict[str, str] = field(default_factory=dict)
    """Transport over which each store or lender was read, by node id."""
    recomputed: Counter[str] = field(default_factory=Counter)
    """Number of blocks that were or should have been in the store and had to be computed, by
    reason."""
    not_stored: Counter[str] = field(default_factory=Counter)
    """Number of blocks of a handover that were not stored, by reason."""
    num_blocks_written_back: int = 0
    """Number of full blocks that no handle names and that were stored when the request ended."""
    handover: HandoverPath = HandoverPath.UNSPECIFIED
    """Path of the handle; set by prefill."""
    num_tokens_direct: int = 0
    """Number of the tokens from stores that decode read out of a prefill worker's own cache, which
    lent them."""
    num_blocks_behind: int = 0
    """Number of full blocks that prefill had not stored yet when the answer was sent, where no
    handle names the store."""

    @property
    def num_bytes_read(self) -> int:
        return self.bytes_read.total()

    @property
    def num_bytes_written(self) -> int:
        return self.bytes_written.total()

    @property
    def transports(self) -> list[str]:
        """Return the transports that moved bytes, sorted."""
        return sorted(name for name, num in (self.bytes_read + self.bytes_written).items() if num)

    @property
    def num_tokens_from_store(self) -> int:
        return self.tokens_by_place.total()

    @property
    def num_tokens_computed(self) -> int:
        end = self.num_prompt_tokens
        if self.num_reached is not None:
            end = min(end, self.num_reached)
        # What is fetched is counted a moment before it is reached.
        return max(0, end - self.num_tokens_local - self.num_tokens_from_store)

    def count_read(self, node_id: str, transport: str, num_bytes: int) -> None:
        """Count bytes read from a store or lender over `transport`."""
        self.bytes_read[transport] += num_bytes
        self.transport_by_node[node_id] = transport

    def count_loaded(
        self,
        first_token: int,
        end_token: int,
        blocks: Sequence[Block],
        *,
        block_bytes: int,
        node_id: str | None = None,
        is_early: bool = False,
    ) -> None:
        """Count verified blocks from the store or lender `node_id`, of which prompt tokens [first,
        end) are used."""
        self.count_tiers(
            first_token,
            end_token,
            PackedBlocks.of(blocks).tiers(),
            block_bytes=block_bytes,
            node_id=self.store_node_id if node_id is None else node_id,
            is_early=is_early,
        )

    def count_tiers(
        self,
        first_token: int,
        end_token: int,
        tiers: Sequence[InTier],
        *,
        block_bytes: int,
        node_id: str,
        is_early: bool,
    ) -> None:
        """Count loaded blocks as `count_loaded` does, given their number per tier."""
        end_token = min(end_token, self.num_prompt_tokens)
        for tier, num_blocks, num_there in tiers:
            num_tokens = max(0, min(num_there, end_token - first_token))
            place = Place(node_id, tier)
            self.tokens_by_place[place] += num_tokens
            self.bytes_by_place[place] += num_blocks * block_bytes
            self.num_tokens_early += num_tokens if is_early else 0
            self.num_tokens_direct += num_tokens if is_lender(node_id) else 0
            first_token += num_there


class StageClock:
    """Clock of the seconds per stage of one request. Stages do not overlap: `enter` ends the
    previous one."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._stage: str | None = None
        self._since = clock()
        self.seconds: dict[str, float] = {}
        self.laps: list[tuple[str, float, float]] = []
        """(stage, from, to) on the clock, in order."""

    def enter(self, stage: str | None) -> None:
        """Start a stage; None: the time from now on belongs to no stage."""
        now = self._clock()
        if self._stage is not None:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
            self.laps.append((self._stage, self._since, now))
        self._stage, self._since = stage, now


@dataclass
class WorkerCounts:
    """Sums over all legs of one worker life."""

    num_prompt_tokens_computed: int = 0
    num_prompt_tokens_local: int = 0
    num_prompt_tokens_from_store: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens_early: int = 0
    num_prompt_tokens_direct: int = 0
    handovers: Counter[HandoverPath] = field(default_factory=Counter)
    """Number of handles that were sent, by path."""
    num_blocks_written_back: int = 0
    """Number of blocks written back, including those stored after their request's end."""
    not_written_back: Counter[str] = field(default_factory=Counter)
    """Number of blocks that no handle names and that could not be stored, by reason."""
    early_pulls_failed: Counter[str] = field(default_factory=Counter)
    """Number of early pulls that failed, by reason: unusable partial handles, incomplete pulls
    while prefill still ran, and lenders that did not answer; the final handle tries again. A
    question whose lease has ended is not counted."""
    recomputed: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    """Number of requests that left a draining decode worker: "draining" with all of their KV, else
    by the reason why not."""

    def add(self, leg: Leg) -> None:
        """Add the counts of a leg that ran."""
        self.num_prompt_tokens_computed += leg.num_tokens_computed
        self.num_prompt_tokens_local += leg.num_tokens_local
        self.num_prompt_tokens_from_store += leg.num_tokens_from_store
        self.num_prompt_tokens_early += leg.num_tokens_early
        self.num_prompt_tokens_direct += leg.num_tokens_direct
        if leg.handover:
            self.handovers[leg.handover] += 1
        self.recomputed.update(leg.recomputed)
