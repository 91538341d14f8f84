"""ExportedBlocks: which blocks of a worker's own KV cache other workers may read, and the leases
that keep them in place meanwhile.

Life of an exported block: `lend` under a lease -> read by holders of the lease, under holds -> its
last lease and its last hold are over: it is given back, once (`on_free`), and its generation grows
by two, so that no earlier handle fits it again. In between its bytes do not change: the worker sees
to that before it lends.

A block may be lent before its checksum is known: it can be read from then on, but not verified
until it is sealed. And it may be entered before it is computed, so that no more than its number is
left to be sent then: until it is computed it is named to no reader, it is stale at any generation,
and no hold or handle has it.

A lease is kept by the request that lends until `hand_over`; then it grows no more, lapses by its
deadline unless its reader renews it, and ends at once when it is released. A hold keeps blocks
beyond the end of their leases: one of our own copies or pushes, until that is over; or a reader's,
which copies out of this memory by itself, for exactly the time that it was promised (`pin`).

Laws, recomputed by `check_integrity`: a block is lent as long as leases and holds name it and no
longer, each counted once; no lease that was handed over names a block that is not sealed; what is
not computed has no hold; what a reader was promised is held. The worker sees to it that no lease
is kept for a request that is gone (`kept`).

Knows no engine, no bytes and no clock: times are seconds on the caller's. Plain synchronous values,
one thread.
"""

from __future__ import annotations

import math
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvstore.block_refs import Block, PackedBlocks, Tier, block_of
from kvstore.block_refs import row as pack
from kvstore.errors import StoreIntegrityError
from kvstore.leases import Leases, TimedLease

FIRST_GENERATION = 2
"""The generation of a block that was never lent before: even, as of every block that can be read,
and not the 0 of a field that is not set."""


class ExportOffer(NamedTuple):
    """A block to be lent; a tuple, for one is made of each block of each prompt. chain_hash is
    empty for a tail block; num_tokens counts filled slots; checksum None: it is sealed later."""

    block_id: int
    chain_hash: bytes
    checksum: int | None
    num_tokens: int


@dataclass
class ExportCounters:
    """Sums over the life of a lending worker."""

    num_blocks_lent: int = 0
    num_bytes_read: int = 0
    num_leases_lapsed: int = 0


@dataclass(slots=True)
class ExportedBlock:
    """One block that is lent. is_computed: its bytes are complete; until then no reader gets it."""

    chain_hash: bytes
    is_computed: bool = False
    num_leases: int = 0
    num_holds: int = 0


@dataclass(slots=True, eq=False)
class ExportLease(TimedLease):
    """The lease of one request's exported blocks. It does not lapse until it is handed over."""

    blocks: dict[int, bytes] = field(default_factory=dict)
    """The lent blocks by block id, in the order in which they were lent, packed as readers get
    them."""
    unsealed: dict[int, None] = field(default_factory=dict)
    """Ids of the blocks of `blocks` whose checksum is still to come; it is 0 in their rows."""
    ahead: dict[int, bytes] = field(default_factory=dict)
    """Blocks that the lease will lend once they are computed, by block id, in that order, packed.
    None of them is in `blocks`."""
    on_end: list[Callable[[], None]] = field(default_factory=list)
    watchers: list[Callable[[], None]] = field(default_factory=list)

    @property
    def is_kept(self) -> bool:
        """Whether the lease still belongs to the request that lends: it was not handed over and may
        grow."""
        return math.isinf(self.expires_at_s)

    @property
    def num_sealed(self) -> int:
        """The number of leading blocks of the lease whose checksums are known."""
        num_unsealed = len(self.unsealed)
        newest = dict.fromkeys(islice(reversed(self.blocks), num_unsealed))
        if newest.keys() == self.unsealed.keys():  # as nearly always
            return len(self.blocks) - num_unsealed
        return next(at for at, block_id in enumerate(self.blocks) if block_id in self.unsealed)

    def checksum_of(self, block_id: int) -> int | None:
        """The checksum of a block of this lease; None where the lease does not lend the block, or
        it is not sealed."""
        row = self.blocks.get(block_id)
        return None if row is None or block_id in self.unsealed else block_of(row).checksum

    def computed(self, block_ids: Sequence[int]) -> None:
        """Lend the next blocks of `ahead`: their bytes are complete. Raises: IntegrityError for
        others than the next; nothing was done."""
        if list(islice(self.ahead, len(block_ids))) != list(block_ids):
            raise StoreIntegrityError(
                f"blocks {list(block_ids)} are not the next that it was to lend"
            )
        for block_id in block_ids:
            self.blocks[block_id] = self.ahead.pop(block_id)
            self.unsealed[block_id] = None

    def seal(self, checksums: Mapping[int, int]) -> PackedBlocks:
        """Enter the checksums of unsealed blocks, by block id. Returns: these blocks, packed, in
        that order. Raises: IntegrityError for a block that does not wait for a checksum; nothing
        was done."""
        for block_id in checksums:
            if block_id not in self.unsealed:
                raise StoreIntegrityError(f"block {block_id} waits for no checksum")
        packed = PackedBlocks.of_rows(self.blocks[block_id] for block_id in checksums)
        sealed = packed.with_checksums(0, list(checksums.values()))
        for block_id, row in zip(checksums, sealed.rows, strict=True):
            self.blocks[block_id] = row
            del self.unsealed[block_id]
        self.tell()
        return sealed

    def tell(self) -> None:
        """Call every watcher of the lease: it has grown, or ended."""
        for then in tuple(self.watchers):
            then()

    def check_integrity(self) -> None:
        """Recompute the invariants of this lease alone. Raises: IntegrityError naming the first
        that does not hold."""
        if not self.unsealed.keys() <= self.blocks.keys():
            raise StoreIntegrityError("a block waits for a checksum and is not lent")
        if self.unsealed and not self.is_kept:
            raise StoreIntegrityError("handed over with a block that is not sealed")
        if self.ahead and not self.is_kept:
            raise StoreIntegrityError("handed over with a block that is not computed")
        if self.ahead.keys() & self.blocks.keys():
            raise StoreIntegrityError("a block is lent and yet to be computed")


@dataclass(frozen=True)
class LeaseUpdate:
    """The answer to a reader that waited for a lender's lease to grow: the blocks beyond those that
    it knew.

    is_all: they are all that was wanted, or the lease was handed over and lends no more.
    num_unsealed: so many of the last ones have no checksum yet: their bytes are complete, and only
    a handle says what they must be. waited_s: how long the reader waited, until just before they
    were held. held_s: how long all of them are held from then on; 0: they are not.
    """

    blocks: PackedBlocks
    is_all: bool
    num_unsealed: int = 0
    waited_s: float = 0.0
    held_s: float = 0.0


class ExportedBlocks:
    """The exported blocks of one worker, and their leases."""

    def __init__(
        self,
        num_blocks: int,
        frame_bytes: int,
        max_ttl_s: float,
        on_free: Callable[[Sequence[int]], None],
    ) -> None:
        """Args: on_free: called with the ids of blocks that are lent no more: once for each `lend`
        of one."""
        self.num_blocks = num_blocks
        self.frame_bytes = frame_bytes
        self.counters = ExportCounters()
        self.refused: Counter[str] = Counter()
        self._on_free = on_free
        self._generations: dict[int, int] = {}  # of blocks that were lent before
        self._lent: dict[int, ExportedBlock] = {}
        self._leases = Leases(ExportLease, max_ttl_s)
        self._holds: dict[str, tuple[int, ...]] = {}
        self._pins: dict[str, float] = {}  # those of `_holds` that readers have -> when they end

    @property
    def num_lent(self) -> int:
        return len(self._lent)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_pins(self) -> int:
        """The number of holds that readers have now."""
        return len(self._pins)

    @property
    def kept(self) -> set[str]:
        """Ids of the leases that were not handed over, which do not lapse."""
        return {lease.lease_id for lease in self._leases if lease.is_kept}

    @property
    def num_watchers(self) -> int:
        """The number of watchers of all leases together."""
        return sum(len(lease.watchers) for lease in self._leases)

    # -- lending

    def lend(
        self, offers: Iterable[ExportOffer], lease_id: str = "", *, is_computed: bool = True
    ) -> tuple[str, PackedBlocks]:
        """Lend blocks under a lease that the caller keeps; an empty `lease_id` makes one.

        A block that another lease lends already is one block: what the caller did to keep it in
        place is undone at once (`on_free`).

        Args: is_computed: False: their bytes are not complete, checksums not known: they are only
            entered, in order, and count as lent; `computed` lets readers know of them.
        Returns: the lease, and the blocks as readers know them, or are to.
        Raises: LeaseLapsed for a lease that is over, IntegrityError for one that was handed over,
            and for a block that is lent with another content; nothing was done.
        """
        offers = list(offers)
        rows: list[bytes] = []
        for block_id, chain_hash, checksum, num_tokens in offers:
            known = self._lent.get(block_id)
            if known is not None and known.chain_hash != chain_hash:
                raise StoreIntegrityError(f"block {block_id} is lent with another content")
            generation = self._generations.get(block_id, FIRST_GENERATION)
            rows.append(
                pack(chain_hash, block_id, generation, checksum or 0, num_tokens, Tier.DEVICE)
            )
        lease = self._leases.get(lease_id) if lease_id else self._leases.create_endless()
        if not lease.is_kept:
            raise StoreIntegrityError(f"lease {lease_id} was handed over; it grows no more")
        twice: list[int] = []
        named, ahead, unsealed = lease.blocks, lease.ahead, lease.unsealed
        for (block_id, chain_hash, checksum, _), row in zip(offers, rows, strict=True):
            lent = self._lent.get(block_id)
            if lent is None:
                lent = self._lent[block_id] = ExportedBlock(chain_hash)
            else:
                twice.append(block_id)
            lent.num_leases += block_id not in named and block_id not in ahead
            if not is_computed:
                if block_id not in named:
                    ahead[block_id] = row
                continue
            ahead.pop(block_id, None)
            unsealed.pop(block_id, None)
            if checksum is None:
                unsealed[block_id] = None
            named[block_id] = row
        if twice:
            self._on_free(twice)
        if is_computed:
            self._can_be_read([offer.block_id for offer in offers])
            lease.tell()
        return lease.lease_id, PackedBlocks.of_rows(rows)

    def computed(self, lease_id: str, block_ids: Sequence[int]) -> None:
        """Lend the next blocks of a lease that were entered before they were computed: their bytes
        are complete now, and they are to be sealed.

        Raises: LeaseLapsed; IntegrityError for others than the next; nothing was done.
        """
        lease = self._leases.get(lease_id)
        lease.computed(block_ids)
        self._can_be_read(block_ids)
        lease.tell()

    def unsealed_of(self, lease_id: str) -> list[int]:
        """Ids of the blocks that a lease lends without a checksum. Raises: LeaseLapsed."""
        return list(self._leases.get(lease_id).unsealed)

    def seal(self, lease_id: str, checksums: Mapping[int, int]) -> PackedBlocks:
        """Enter the checksums of blocks that a lease lends without one, by block id.

        Returns: the blocks as readers can verify them, in that order.
        Raises: LeaseLapsed; IntegrityError for a block that does not wait for a checksum; nothing
            was done.
        """
        return self._leases.get(lease_id).seal(checksums)

    def hand_over(self, lease_id: str, ttl_s: float, now_s: float) -> None:
        """Give the lease to the holders of its handle: from here on it lapses. Blocks that it names
        and that are not computed are given back. Raises: LeaseLapsed; IntegrityError where a
        block of it is not sealed."""
        lease = self._leases.get(lease_id)
        if lease.unsealed:
            raise StoreIntegrityError(
                f"lease {lease_id}: {len(lease.unsealed)} blocks are not sealed"
            )
        not_computed, lease.ahead = lease.ahead, {}
        self._leave(not_computed)
        self._leases.end_within(lease, now_s, ttl_s)
        lease.tell()

    # -- watching a lease grow

    def watch(self, lease_id: str, then: Callable[[], None]) -> None:
        """Have `then` called whenever the lease lends or seals more, is handed over or ends, until
        `unwatch`. Raises: LeaseLapsed."""
        self._leases.get(lease_id).watchers.append(then)

    def unwatch(self, lease_id: str, then: Callable[[], None]) -> None:
        """End a `watch`. A lease that is over, or a callback that is not there, is passed over."""
        lease = self._leases.find(lease_id)
        if lease is not None and then in lease.watchers:
            lease.watchers.remove(then)

    def is_whole(self, lease_id: str, num_wanted: int) -> bool:
        """Whether a lease lends `num_wanted` blocks, sealed or not, or was handed over with fewer.
        Raises: LeaseLapsed."""
        lease = self._leases.get(lease_id)
        return len(lease.blocks) >= num_wanted or not lease.is_kept

    def num_sealed(self, lease_id: str) -> int:
        """The number of leading blocks of a lease, in the order in which they were lent, that are
        sealed. Raises: LeaseLapsed."""
        return self._leases.get(lease_id).num_sealed

    def blocks_of(self, lease_id: str, first: int) -> PackedBlocks:
        """The blocks of a lease from the `first` on, in the order in which they were lent. Raises:
        LeaseLapsed."""
        return PackedBlocks.of_rows(islice(self._leases.get(lease_id).blocks.values(), first, None))

    # -- leases

    def renew(self, lease_id: str, ttl_s: float, now_s: float) -> None:
        """Let a lease live `ttl_s` from now, within the bound; never shortens (0: leave its end as
        it is). Raises: LeaseLapsed."""
        self.lapse(now_s)
        lease = self._leases.get(lease_id)
        if ttl_s > 0:
            self._leases.renew(lease, now_s, ttl_s)

    def check_lease(self, lease_id: str, now_s: float) -> None:
        """Check that a lease is not over. Raises: LeaseLapsed."""
        self.lapse(now_s)
        self._leases.get(lease_id)

    def release(self, lease_ids: Iterable[str], now_s: float) -> int:
        """End leases; those that are over already are passed over. Returns: how many were ended."""
        self.lapse(now_s)
        return self._end(lease_ids)

    def lapse(self, now_s: float) -> None:
        """End the leases and the readers' holds whose time is over by `now_s`."""
        while (lease := self._leases.pop_due(now_s)) is not None:
            self.counters.num_leases_lapsed += 1
            self._let_go(lease)
        for hold_id in [hold_id for hold_id, ends_s in self._pins.items() if ends_s <= now_s]:
            del self._pins[hold_id]
            self.unhold(hold_id)

    def when_over(self, lease_id: str, then: Callable[[], None]) -> None:
        """Have `then` called once when the lease ends, for whatever reason; at once if it is
        over."""
        lease = self._leases.find(lease_id)
        if lease is None:
            then()
        else:
            lease.on_end.append(then)

    def end_all(self) -> None:
        """End every lease, since the worker stops. Blocks that are held stay held."""
        self._end([lease.lease_id for lease in self._leases])

    # -- reading

    def hold(self, blocks: Sequence[Block]) -> tuple[str, list[bool]]:
        """Keep blocks in place while this process copies or pushes them, until `unhold`.

        Returns: an id for `unhold`, and for each block whether it still is what its reference says.
        """
        is_held = [self._is_lent(block) for block in blocks]
        pairs = zip(blocks, is_held, strict=True)
        block_ids = tuple(dict.fromkeys(block.frame for block, held in pairs if held))
        return self._hold(block_ids), is_held

    def pin(
        self, lease_id: str, pairs: Sequence[tuple[int, int]], ttl_s: float, now_s: float
    ) -> tuple[float, list[int]]:
        """Hold (block id, generation) of a lease for a reader until `ttl_s` from now, whatever ends
        meanwhile; nothing but `lapse` ends it.

        Returns: for how long it is held, 0 where one is not of this lease, and for `ttl_s` 0; and
            in each case the indices of those that are not lent like that any more: all others have
            been, without a break, since they were lent.
        Raises: LeaseLapsed.
        """
        lease = self._leases.get(lease_id)
        stale = self.find_stale(pairs)
        gone = set(stale)
        block_ids = [block_id for at, (block_id, _) in enumerate(pairs) if at not in gone]
        if ttl_s <= 0 or not block_ids or not lease.blocks.keys() >= set(block_ids):
            return 0.0, stale
        self._pins[self._hold(tuple(dict.fromkeys(block_ids)))] = now_s + ttl_s
        return ttl_s, stale

    def pin_from(self, lease_id: str, first: int, ttl_s: float, now_s: float) -> None:
        """Hold all blocks of a lease from its block `first` on, in the order in which they were
        lent, for a reader until `ttl_s` from now. Raises: LeaseLapsed."""
        block_ids = tuple(islice(self._leases.get(lease_id).blocks, first, None))
        self._pins[self._hold(block_ids)] = now_s + ttl_s

    def unhold(self, hold_id: str) -> None:
        """End a `hold`: the copy or push is over. An id that is not known is passed over."""
        block_ids = self._holds.pop(hold_id, ())
        for block_id in block_ids:
            self._lent[block_id].num_holds -= 1
        self._settle(block_ids)

    def find_stale(self, pairs: Iterable[tuple[int, int]]) -> list[int]:
        """Look up (block id, generation) pairs. Returns: the indices of those that are not lent at
        that generation any more. All others have been, without a break, since they were lent."""
        lent, known = self._lent, self._generations
        return [
            index
            for index, (block_id, generation) in enumerate(pairs)
            if block_id not in lent
            or not lent[block_id].is_computed
            or known.get(block_id, FIRST_GENERATION) != generation
        ]

    # -- damage

    def checksums_of(self, blocks: Sequence[Block]) -> list[set[int]]:
        """For each block the checksums that leases lend it with; none for a block that is not what
        its reference says, or not sealed."""
        return [
            {
                checksum
                for lease in self._leases
                if (checksum := lease.checksum_of(block.frame)) is not None
            }
            if self._is_lent(block)
            else set()
            for block in blocks
        ]

    def drop(self, bad: Collection[tuple[int, int]]) -> int:
        """End every lease that names a (block id, checksum) of `bad`. Returns: how many."""
        return self._end(
            [
                lease.lease_id
                for lease in self._leases
                if any(lease.checksum_of(block_id) == checksum for block_id, checksum in bad)
            ]
        )

    # -- account

    def check_integrity(self) -> None:
        """Recompute the invariants of all leases and holds. Raises: IntegrityError naming the first
        that does not hold."""
        leases: Counter[int] = Counter()
        for lease in self._leases:
            leases.update([*lease.blocks, *lease.ahead])
            lease.check_integrity()
            for block_id, row in (*lease.blocks.items(), *lease.ahead.items()):
                block, is_ahead = block_of(row), block_id in lease.ahead
                if not self._is_lent(block, is_ahead=is_ahead) or block.frame != block_id:
                    raise StoreIntegrityError(f"block {block_id} is not lent as its lease says")
        holds = Counter(block_id for held in self._holds.values() for block_id in held)
        for block_id in self._lent.keys() | leases.keys() | holds.keys():
            lent = self._lent.get(block_id)
            if lent is None:
                raise StoreIntegrityError(f"block {block_id}: leased or held, and not lent")
            if (lent.num_leases, lent.num_holds) != (leases[block_id], holds[block_id]):
                raise StoreIntegrityError(f"block {block_id}: its leases or holds are miscounted")
            if lent.num_leases + lent.num_holds == 0:
                raise StoreIntegrityError(f"block {block_id}: lent without a lease or a hold")
            if lent.num_holds and not lent.is_computed:
                raise StoreIntegrityError(f"block {block_id}: held, and not computed")
            if not 0 <= block_id < self.num_blocks:
                raise StoreIntegrityError(f"block {block_id} does not exist")
        if any(generation % 2 for generation in self._generations.values()):
            raise StoreIntegrityError("a generation is odd")
        if not self._pins.keys() <= self._holds.keys():
            raise StoreIntegrityError("a reader was promised blocks that are not held")

    # -- inside

    def _hold(self, block_ids: tuple[int, ...]) -> str:
        hold_id = secrets.token_hex(16)
        self._holds[hold_id] = block_ids
        for block_id in block_ids:
            self._lent[block_id].num_holds += 1
        return hold_id

    def _generation(self, block_id: int) -> int:
        return self._generations.get(block_id, FIRST_GENERATION)

    def _is_lent(self, block: Block, *, is_ahead: bool = False) -> bool:
        """Whether a block is lent as its reference says. is_ahead: also one that is not computed
        yet."""
        lent = self._lent.get(block.frame)
        if lent is None or lent.chain_hash != block.chain_hash:
            return False
        if not (lent.is_computed or is_ahead):
            return False
        return self._generation(block.frame) == block.generation

    def _end(self, lease_ids: Iterable[str]) -> int:
        num_ended = 0
        for lease_id in lease_ids:
            lease = self._leases.remove(lease_id)
            if lease is not None:
                num_ended += 1
                self._let_go(lease)
        return num_ended

    def _let_go(self, lease: ExportLease) -> None:
        """Give back all blocks that the lease names; it is out of the table already."""
        self._leave([*lease.blocks, *lease.ahead])
        for then in lease.on_end:
            then()
        lease.tell()

    def _can_be_read(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            lent = self._lent[block_id]
            self.counters.num_blocks_lent += not lent.is_computed
            lent.is_computed = True

    def _leave(self, block_ids: Collection[int]) -> None:
        """A lease names them no more."""
        for block_id in block_ids:
            self._lent[block_id].num_leases -= 1
        self._settle(block_ids)

    def _settle(self, block_ids: Iterable[int]) -> None:
        """Give back blocks that no lease and no hold names any more."""
        free: list[int] = []
        for block_id in block_ids:
            lent = self._lent[block_id]
            if lent.num_leases == lent.num_holds == 0:
                del self._lent[block_id]
                self._generations[block_id] = self._generation(block_id) + 2
                free.append(block_id)
        if free:
            self._on_free(free)
