"""One lease of a lender: the blocks that it names, and who wants to hear of it; what is known of
one lent block, and what is said of one to be lent. Records of `LoanTable`, which alone changes
them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvstore.blocks import PackedBlocks, block_of
from kvstore.errors import IntegrityError


class Offer(NamedTuple):
    """A block to be lent; a tuple, for one is made of each block of each prompt. chain_hash is
    empty for a tail block; num_tokens counts filled slots; checksum None: it is sealed later."""

    block_id: int
    chain_hash: bytes
    checksum: int | None
    num_tokens: int


@dataclass
class LoanCounters:
    """Sums since the worker began."""

    num_blocks_lent: int = 0
    num_bytes_read: int = 0
    num_leases_lapsed: int = 0


@dataclass(slots=True)
class Lent:
    """One block. is_computed: its bytes are complete; until then nobody can read it."""

    chain_hash: bytes
    is_computed: bool = False
    num_leases: int = 0
    num_holds: int = 0


@dataclass(slots=True, eq=False)
class Lease:
    """expires_at_s: infinite until it is handed over."""

    expires_at_s: float
    blocks: dict[int, bytes] = field(default_factory=dict)
    """By block id, in the order in which they were lent, as readers are told of them: packed."""
    unsealed: dict[int, None] = field(default_factory=dict)
    """Of them those that wait for a checksum; theirs is 0."""
    ahead: dict[int, bytes] = field(default_factory=dict)
    """Those that it will lend when they are computed, by block id, in that order: packed. None of
    `blocks`."""
    on_end: list[Callable[[], None]] = field(default_factory=list)
    watchers: list[Callable[[], None]] = field(default_factory=list)

    @property
    def is_kept(self) -> bool:
        """It was not handed over."""
        return math.isinf(self.expires_at_s)

    @property
    def num_sealed(self) -> int:
        """Leading blocks whose checksums are known."""
        num_unsealed = len(self.unsealed)
        newest = dict.fromkeys(islice(reversed(self.blocks), num_unsealed))
        if newest.keys() == self.unsealed.keys():  # as nearly always
            return len(self.blocks) - num_unsealed
        return next(at for at, block_id in enumerate(self.blocks) if block_id in self.unsealed)

    def checksum_of(self, block_id: int) -> int | None:
        """None: it is not lent under this lease, or not sealed."""
        row = self.blocks.get(block_id)
        return None if row is None or block_id in self.unsealed else block_of(row).checksum

    def computed(self, block_ids: Sequence[int]) -> None:
        """See LoanTable.computed, which tells whoever watches."""
        if list(islice(self.ahead, len(block_ids))) != list(block_ids):
            raise IntegrityError(f"blocks {list(block_ids)} are not the next that it was to lend")
        for block_id in block_ids:
            self.blocks[block_id] = self.ahead.pop(block_id)
            self.unsealed[block_id] = None

    def seal(self, checksums: Mapping[int, int]) -> PackedBlocks:
        """See LoanTable.seal."""
        for block_id in checksums:
            if block_id not in self.unsealed:
                raise IntegrityError(f"block {block_id} waits for no checksum")
        packed = PackedBlocks.of_rows(self.blocks[block_id] for block_id in checksums)
        sealed = packed.with_checksums(0, list(checksums.values()))
        for block_id, row in zip(checksums, sealed.rows, strict=True):
            self.blocks[block_id] = row
            del self.unsealed[block_id]
        self.tell()
        return sealed

    def tell(self) -> None:
        """Have all who watch look."""
        for then in tuple(self.watchers):
            then()

    def check_integrity(self) -> None:
        """Raises: IntegrityError."""
        if not self.unsealed.keys() <= self.blocks.keys():
            raise IntegrityError("a block waits for a checksum and is not lent")
        if self.unsealed and not self.is_kept:
            raise IntegrityError("handed over with a block that is not sealed")
        if self.ahead and not self.is_kept:
            raise IntegrityError("handed over with a block that is not computed")
        if self.ahead.keys() & self.blocks.keys():
            raise IntegrityError("a block is lent and yet to be computed")
