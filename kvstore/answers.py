"""What the store is told and what it answers, as values. No I/O, any thread.

What is made for each block of a put is a tuple: it takes a third of a frozen dataclass' time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.blocks import Block, Tier
from kvstore.catalog import Entry
from kvstore.tenancy import TenantShares


@dataclass(frozen=True)
class StoreLimits:
    """max_ttl_s: longest lease. quarantine_grace_s: how long after its worker is gone a quarantined
    frame stays out of use. shares: tenants' guaranteed parts."""

    max_ttl_s: float = 300.0
    quarantine_grace_s: float = 30.0
    shares: TenantShares = field(default_factory=TenantShares)


@dataclass
class StoreCounters:
    """Sums since the store began."""

    num_lookups: int = 0
    num_blocks_asked: int = 0
    num_blocks_found: int = 0
    num_blocks_lost: int = 0
    """Of those found: not there any more, or found bad, when they were brought into memory."""
    num_bytes_written: int = 0
    num_bytes_read: int = 0
    num_leases_lapsed: int = 0
    num_damaged: int = 0
    """Committed blocks whose bytes or generation were found changed."""

    @property
    def num_blocks_matched(self) -> int:
        """Found, and handed out."""
        return self.num_blocks_found - self.num_blocks_lost


class Reserved(NamedTuple):
    """What became of one block asked for. `block` is set when it was PRESENT; frame and generation
    when it was RESERVED; none of them when there was NO ROOM."""

    block: Block | None = None
    frame: int = -1
    generation: int = -1

    @property
    def has_room(self) -> bool:
        return self.block is not None or self.frame >= 0


NO_ROOM = Reserved()


class Written(NamedTuple):
    """A frame whose bytes are complete, at the odd generation that it was reserved at."""

    frame: int
    generation: int
    checksum: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class Match:
    """The longest prefix present, in any tier. lease_id: empty when nothing was pinned. num_hits:
    how often the last of `entries` was matched before. in_file: those that lay in the file tier
    only when they were matched. newly_pinned: by this match."""

    entries: list[Entry]
    lease_id: str
    num_hits: int
    in_file: set[Entry] = field(default_factory=set)
    newly_pinned: list[Entry] = field(default_factory=list)

    @property
    def blocks(self) -> list[Block]:
        """In order. One that lies in a page only has generation 0, which no frame ever shows: it
        must be matched with a pin before it can be read."""
        return [self._block(entry) for entry in self.entries]

    def _block(self, entry: Entry) -> Block:
        tier = Tier.FILE if entry in self.in_file else Tier.HOST
        held = entry.block
        if held is not None:
            numbers = (held.frame, held.generation, held.checksum, held.num_tokens)
            return Block(entry.chain_hash, *numbers, tier)
        page = entry.page
        return Block(
            entry.chain_hash,
            0,
            0,
            page.checksum if page else 0,
            page.num_tokens if page else 0,
            tier,
        )
