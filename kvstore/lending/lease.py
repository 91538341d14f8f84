"""One lease of a lender: the blocks that it names, and who wants to hear of it. A record of
`LoanTable`, which alone changes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from kvstore.block import Block
from kvstore.errors import IntegrityError


@dataclass(slots=True, eq=False)
class Lease:
    """expires_at_s: infinite until it is handed over."""

    expires_at_s: float
    blocks: dict[int, Block] = field(default_factory=dict)
    """By block id, in the order in which they were lent."""
    unsealed: dict[int, None] = field(default_factory=dict)
    """Of them those that wait for a checksum; theirs is 0."""
    on_end: list[Callable[[], None]] = field(default_factory=list)
    watchers: list[Callable[[], None]] = field(default_factory=list)

    @property
    def is_kept(self) -> bool:
        """It was not handed over."""
        return math.isinf(self.expires_at_s)

    @property
    def num_sealed(self) -> int:
        """Leading blocks whose checksums are known."""
        if not self.unsealed:
            return len(self.blocks)
        return next(at for at, block_id in enumerate(self.blocks) if block_id in self.unsealed)

    def checksum_of(self, block_id: int) -> int | None:
        """None: it is not lent under this lease, or not sealed."""
        block = self.blocks.get(block_id)
        return None if block is None or block_id in self.unsealed else block.checksum

    def seal(self, checksums: Mapping[int, int]) -> tuple[Block, ...]:
        """See LoanTable.seal."""
        for block_id in checksums:
            if block_id not in self.unsealed:
                raise IntegrityError(f"block {block_id} waits for no checksum")
        sealed: list[Block] = []
        for block_id, checksum in checksums.items():
            block = replace(self.blocks[block_id], checksum=checksum)
            self.blocks[block_id] = block
            del self.unsealed[block_id]
            sealed.append(block)
        self.tell()
        return tuple(sealed)

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
