"""BlockStore: the prefix cache of a store process: KV blocks are matched, reserved, committed,
pinned under leases, and dropped when they are damaged. FrameTable says where each one lies.

Life of a frame: FREE -> (reserve) WRITING -> (commit) COMMITTED -> (evicted, or a tail whose last
lease ended) FREE. A reservation that ends without a commit leaves its frame FREE when the store
writes by itself (gRPC), QUARANTINED when the worker writes one-sided (shm, nixl) and has not said
that its transfer is over.

Two writers of one block each write a frame of their own; the first to commit wins, the other's
frame is freed and its lease pins the winner. A block that lies in the file tier only counts as
absent to a writer: it has the bytes at hand, and writing them is faster than reading them.

Knows nothing of bytes, sockets, hashing or fingerprints: a chain hash is an opaque key. The clock
is an argument (`now_s`), so that time is a value in tests. Plain and synchronous, one thread. Its
laws are recomputed by invariants.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.attached_workers import Attachment, AttachmentTable, QuarantineList
from kvstore.block_changes import ChangeLog
from kvstore.block_hash import CHAIN_HASH_BYTES
from kvstore.block_history import DAMAGED, VERIFIED, WRITTEN, BlockHistory
from kvstore.block_refs import Block, Tier
from kvstore.errors import CHECKSUM, LeaseLapsed, StoreIntegrityError
from kvstore.frame_table import FrameTable
from kvstore.leases import FrameReservation, Lease, LeaseTable
from kvstore.prefix_tree import TreeNode
from kvstore.tenant_shares import MAX_TENANT_BYTES, TenantShares
from process.rpc_errors import FailedPrecondition, InvalidArgument
from process.trace_spans import TraceContext

LET_GO_AT_ONCE = 512
"""Blocks of ended leases that one call unpins at most: 1 to 2 ms."""


@dataclass(frozen=True)
class StoreLimits:
    """Bounds of a store, from its settings.

    max_ttl_s: longest lease. quarantine_grace_s: how long after its worker is gone a quarantined
    frame stays out of use. shares: tenants' guaranteed parts.
    """

    max_ttl_s: float = 300.0
    quarantine_grace_s: float = 30.0
    shares: TenantShares = field(default_factory=TenantShares)


@dataclass
class StoreCounters:
    """Sums over the life of a store process."""

    num_lookups: int = 0
    num_blocks_asked: int = 0
    num_blocks_found: int = 0
    num_blocks_lost: int = 0
    """Blocks that a match found and that were gone or bad when they were brought into memory."""
    num_bytes_written: int = 0
    num_bytes_read: int = 0
    num_leases_lapsed: int = 0
    num_damaged: int = 0
    """Committed blocks whose bytes or generation were found changed."""

    @property
    def num_blocks_matched(self) -> int:
        """Blocks that matches found and handed out: found, less those lost while they were brought
        into memory."""
        return self.num_blocks_found - self.num_blocks_lost


# One of each of these is made for each block of a put: a tuple takes a third of the time of a
# frozen dataclass.
class Reserved(NamedTuple):
    """The answer for one block of a Reserve: PRESENT if `block` is set, RESERVED if `frame` and
    `generation` are, NO_ROOM otherwise."""

    block: Block | None = None
    frame: int = -1
    generation: int = -1

    @property
    def has_room(self) -> bool:
        """Whether the block is present or has a frame."""
        return self.block is not None or self.frame >= 0


NO_ROOM = Reserved()


class WrittenFrame(NamedTuple):
    """A frame whose bytes are complete, at the odd generation that it was reserved at."""

    frame: int
    generation: int
    checksum: int = 0
    num_tokens: int = 0


@dataclass(slots=True)
class PrefixMatch:
    """The result of a match: the longest prefix of the asked chain that is present, in any tier.

    lease_id: empty when nothing was pinned. num_hits: how often the last of `nodes` was matched
    before. in_file: nodes that lay in the file tier only when they were matched. newly_pinned:
    nodes that the lease did not pin before this match.
    """

    nodes: list[TreeNode]
    lease_id: str
    num_hits: int
    in_file: set[TreeNode] = field(default_factory=set)
    newly_pinned: list[TreeNode] = field(default_factory=list)

    def joined(self, rest: PrefixMatch) -> PrefixMatch:
        """This match and that of the blocks which follow it, as one."""
        return PrefixMatch(
            self.nodes + rest.nodes,
            rest.lease_id or self.lease_id,
            rest.num_hits if rest.nodes else self.num_hits,
            self.in_file | rest.in_file,
            self.newly_pinned + rest.newly_pinned,
        )

    @property
    def blocks(self) -> list[Block]:
        """The matched blocks, in order. A block that lies in a page only has generation 0, which no
        frame ever shows: it must be matched with a pin before it can be read."""
        return [self._block(node) for node in self.nodes]

    def _block(self, node: TreeNode) -> Block:
        held, page = node.block, node.page
        if held is not None:
            return held if node not in self.in_file else replace(held, tier=Tier.FILE)
        tier = Tier.FILE if node in self.in_file else Tier.HOST
        if page is not None:
            return Block(node.chain_hash, 0, 0, page.checksum, page.num_tokens, tier)
        return Block(node.chain_hash, 0, 0, 0, 0, tier)


class BlockStore:
    """All state of one start of a store, except the bytes of the blocks."""

    def __init__(
        self,
        num_frames: int,
        frame_bytes: int,
        limits: StoreLimits,
        *,
        published: npt.NDArray[np.uint64] | None = None,
        changes: ChangeLog | None = None,
        history: BlockHistory | None = None,
    ) -> None:
        """Args: published: the generations that readers see (FramePool). changes: gets each block
        that comes or goes (PrefixTree). history: keeps the last events of blocks; None: nothing
        keeps them."""
        self.history = BlockHistory() if history is None else history
        self.frame_bytes = frame_bytes
        self.limits = limits
        self.is_closed = False
        """Whether the store refuses new blocks. Blocks that are present, or being written, are not
        touched."""
        self.counters = StoreCounters()
        self.refused: Counter[str] = Counter()
        """Blocks that were asked for and not given, counted by reason (kvstore.errors.REASONS)."""
        self.table = FrameTable(
            num_frames, limits.shares, published=published, changes=changes, history=self.history
        )
        self.frames = self.table.frames
        self.tree = self.table.tree
        self.leases = LeaseTable(limits.max_ttl_s)
        self.attachments = AttachmentTable()
        self.quarantined = QuarantineList()

    # -- workers come and go

    def attach(
        self,
        worker_id: str,
        worker_incarnation: bytes,
        transport: str,
        one_sided: bool,
        now_s: float,
    ) -> Attachment:
        """Attach a worker. Attachments of earlier starts of the same worker are detached."""
        self.lapse(now_s)
        for earlier in self.attachments.earlier_lives(worker_id, worker_incarnation):
            self.detach(earlier, now_s)
        return self.attachments.add(worker_id, worker_incarnation, transport, one_sided, now_s)

    def detach(self, attachment_id: str, now_s: float, grace_s: float | None = None) -> None:
        """End an attachment. Its reservations end; what it pinned stays until the leases end,
        because leases travel with handles. grace_s: 0 when its process is known to be dead."""
        self.lapse(now_s)
        attachment = self.attachments.find(attachment_id)
        if attachment is None:
            return
        for lease in self.leases:
            own = [f for f, r in lease.reservations.items() if r.attachment_id == attachment_id]
            for frame in own:
                self._end_reservation(lease.drop_reservation(frame))
        grace_s = self.limits.quarantine_grace_s if grace_s is None else grace_s
        self.quarantined.owner_gone(attachment_id, now_s + grace_s)
        self.attachments.remove(attachment_id)
        self.lapse(now_s)

    # -- reading

    def match(
        self,
        chain_hashes: Sequence[bytes],
        *,
        pin: bool,
        lease_id: str = "",
        ttl_s: float = 0.0,
        now_s: float,
        after: PrefixMatch | None = None,
    ) -> PrefixMatch:
        """The longest prefix present in any tier; with `pin` held by a lease (a new one if
        `lease_id` is empty). A caller that pins blocks that lie in a page only has FileTier promote
        them, then calls `settle`. after: the match, under the same lease, of all blocks of the
        chain before these, which the result includes."""
        self.lapse(now_s)
        lease = self.leases.get(lease_id) if lease_id else None
        nodes = self.tree.longest_prefix(chain_hashes)
        if chain_hashes:
            self.counters.num_lookups += after is None
            self.counters.num_blocks_asked += len(chain_hashes)
            self.counters.num_blocks_found += len(nodes)
        num_hits = nodes[-1].num_hits if nodes else 0
        for node in nodes:
            node.num_hits += 1
        match = PrefixMatch(nodes, "", num_hits, {node for node in nodes if node.block is None})
        if pin and nodes and lease is None:
            lease = self.leases.create(now_s, ttl_s)
        if lease is not None:
            match.lease_id = lease.lease_id
            self.leases.renew(lease, now_s, ttl_s)
            if pin:
                match.newly_pinned = lease.pin_all(self.tree, nodes)
        self.tree.touch(nodes)
        return match if after is None else after.joined(match)

    def settle(self, match: PrefixMatch, now_s: float) -> None:
        """Cut a match that pinned down to its longest prefix that lies in frames, and unpin what it
        pinned beyond. Raises: LeaseLapsed when its lease ended meanwhile."""
        self.lapse(now_s)
        num_held = 0
        for node in match.nodes:
            if node.block is None or not self.tree.is_present(node):
                break
            num_held += 1
        lost = match.nodes[num_held:]
        if not lost:
            self.leases.get(match.lease_id)
            return
        self.counters.num_blocks_lost += len(lost)
        match.nodes = match.nodes[:num_held]
        match.num_hits = match.nodes[-1].num_hits - 1 if match.nodes else 0
        lease = self.leases.get(match.lease_id)
        newly = set(match.newly_pinned)
        for node in lost:
            if node in newly and node in lease.pins:
                del lease.pins[node]
                self.table.unpin(node)

    def pin(self, blocks: Sequence[Block], *, ttl_s: float, now_s: float) -> tuple[str, int]:
        """Pin the longest prefix of `blocks` of which each frame still holds the named block, tails
        included.

        Returns: the new lease's id (empty when nothing was pinned) and how many were.
        """
        self.lapse(now_s)
        nodes: list[TreeNode] = []
        for block in blocks:
            node = self._node_of(block)
            if node is None:
                break
            nodes.append(node)
        if not nodes:
            return "", 0
        lease = self.leases.create(now_s, ttl_s)
        lease.pin_all(self.tree, nodes)
        return lease.lease_id, len(nodes)

    def hold(self, blocks: Sequence[Block]) -> tuple[str, list[bool]]:
        """Keep frames from being reused while the store itself copies out of them: until `unhold`,
        whatever else ends meanwhile.

        Returns: an id for `unhold`, and for each block whether its frame still holds it.
        """
        lease = self.leases.create_endless()
        nodes = [self._node_of(block) for block in blocks]
        lease.pin_all(self.tree, (node for node in nodes if node is not None))
        return lease.lease_id, [node is not None for node in nodes]

    def unhold(self, hold_id: str) -> None:
        """End a `hold`: the store has copied. An id that is not known is passed over."""
        lease = self.leases.remove(hold_id)
        if lease is not None:
            self._end_lease(lease)
            self.let_go()

    # -- writing

    def reserve(
        self,
        attachment_id: str,
        parent: bytes,
        chain_hashes: Sequence[bytes],
        *,
        tail_name: str = "",
        tenant: str = "",
        lease_id: str = "",
        is_probe: bool = False,
        ttl_s: float,
        now_s: float,
    ) -> tuple[str, list[Reserved], Reserved | None]:
        """Reserve a frame under one lease for each block of a chain that is not present, as far as
        there is room, charged to `tenant`'s share. is_probe: marks a lease that this call makes as
        one of a link measurement, whose bytes are not counted.

        Returns: the lease's id, one answer per hash, and one for the tail if one was asked for.
        Raises: InvalidArgument; LeaseLapsed; UnknownAttachment; FailedPrecondition when `parent` is
            neither present nor being written under this lease. Nothing is taken then.
        """
        self.lapse(now_s)
        attachment = self.attachments.get(attachment_id, now_s)
        lease = self.leases.get(lease_id) if lease_id else None
        check_chain(parent, chain_hashes, tenant)
        above = self.tree.find(parent) if parent else None
        if parent and above is None and (lease is None or parent not in lease.writing):
            raise FailedPrecondition(
                f"parent {parent.hex()}: neither present nor being written under this lease"
            )
        if lease is None:
            lease = self.leases.create(now_s, ttl_s)
            lease.is_probe = is_probe
        else:
            self.leases.renew(lease, now_s, ttl_s)
        if above is not None:
            lease.pin_all(self.tree, [above])
        answers: list[Reserved] = []
        for chain_hash in chain_hashes:
            answer = self._reserve_one(lease, attachment, parent, chain_hash, tenant)
            if not answer.has_room:
                break
            answers.append(answer)
            parent = chain_hash
        answers += [NO_ROOM] * (len(chain_hashes) - len(answers))
        tail: Reserved | None = None
        if tail_name:
            tail = NO_ROOM
            if not answers or answers[-1].has_room:
                tail = self._reserve_frame(lease, attachment, b"", b"", tail_name, tenant)
        return lease.lease_id, answers, tail

    def check_reservation(
        self, attachment_id: str, lease_id: str, frame: int, generation: int, now_s: float
    ) -> None:
        """Check that the attachment may write into the frame now. Raises: LeaseLapsed when the
        frame is not reserved for it at this generation; UnknownAttachment."""
        self.lapse(now_s)
        self.attachments.get(attachment_id, now_s)
        _reservation(self.leases.get(lease_id), attachment_id, frame, generation)

    def commit(
        self, attachment_id: str, lease_id: str, written: Sequence[WrittenFrame], now_s: float
    ) -> list[Block]:
        """Make written frames visible, parents first; all of them or none.

        Returns: the blocks as they are present now; the other writer's where that was faster.
        Raises: LeaseLapsed; UnknownAttachment; FailedPrecondition when a parent is not present.
        """
        self.lapse(now_s)
        worker_id = self.attachments.get(attachment_id, now_s).worker_id
        lease = self.leases.get(lease_id)
        coming: set[bytes] = set()
        for each in written:
            reservation = _reservation(lease, attachment_id, each.frame, each.generation)
            parent = reservation.parent
            if parent and parent not in coming and self.tree.find(parent) is None:
                raise FailedPrecondition(f"frame {each.frame}: its parent was never committed")
            coming.add(reservation.chain_hash)
        if len({each.frame for each in written}) != len(written):
            raise InvalidArgument("blocks", "a frame is named twice")
        blocks = [self._commit_one(lease, each) for each in written]
        ours = [
            block.chain_hash
            for block, each in zip(blocks, written, strict=True)
            if block.frame == each.frame
        ]
        self.history.note(WRITTEN, ours, worker_id)
        return blocks

    def abort(
        self,
        attachment_id: str,
        lease_id: str,
        written: Sequence[WrittenFrame],
        *,
        quarantine: bool,
        now_s: float,
    ) -> None:
        """Give reservations up. With `quarantine` a transfer may still write: a second call without
        it says when that is over. Frames that are neither reserved nor quarantined for the caller
        are passed over."""
        self.lapse(now_s)
        self.attachments.get(attachment_id, now_s)
        lease = self.leases.find(lease_id)
        for each in written:
            if not quarantine and self.quarantined.take(each.frame, each.generation, attachment_id):
                self.table.free_frame(each.frame)
                continue
            reservation = lease.reservations.get(each.frame) if lease else None
            if (
                lease is None
                or reservation is None
                or (reservation.generation, reservation.attachment_id)
                != (each.generation, attachment_id)
            ):
                continue
            lease.drop_reservation(each.frame)
            if quarantine:
                self.frames.quarantine(each.frame)
                self.quarantined.add(each.frame, each.generation, attachment_id)
            else:
                self.table.free_frame(each.frame)

    # -- damage

    def checksums_of(self, blocks: Sequence[Block]) -> list[int | None]:
        """The checksum that each block was committed with; None for a block that its frame does not
        hold (any more)."""
        nodes = [self._node_of(block) for block in blocks]
        return [node.block.checksum if node and node.block else None for node in nodes]

    def drop(self, bad: Sequence[Block]) -> int:
        """Remove blocks whose bytes are bad, with all below them in the tree. The generation of a
        bad block's frame changes at once; a frame that leases still pin comes free when the last of
        these ends. Each block counts as refused once, however often it is reported.

        Returns: how many blocks were removed.
        """
        found = dict.fromkeys(self._node_of(block) for block in bad)
        nodes = [node for node in found if node is not None]
        self.refused[CHECKSUM] += len(nodes)
        self.counters.num_damaged += len(nodes)
        num_tails = sum(1 for node in nodes if not node.chain_hash)
        num_lost = self.table.remove_subtrees(nodes, DAMAGED)
        for node in nodes:
            self.table.quarantine_damaged(node)
        return num_lost + num_tails

    def drop_below(self, bad: Sequence[Block], max_blocks: int) -> int:
        """Remove at most `max_blocks` blocks that lie below these in the tree, so that a large
        subtree goes over several turns of the loop; `drop` then removes the rest at once. Returns:
        how many blocks were removed."""
        found = dict.fromkeys(self._node_of(block) for block in bad)
        return self.table.remove_below([node for node in found if node is not None], max_blocks)

    # -- history

    def note_read(self, what: str, blocks: Sequence[Block], worker_id: str) -> None:
        """Enter into the history that blocks were sent to a worker (`what` is PULLED) or refused by
        it (REFUSED)."""
        self.history.note(what, [block.chain_hash for block in blocks], worker_id)

    def note_verified(
        self,
        attachment_id: str,
        frames: Sequence[int],
        generations: Sequence[int],
        trace: TraceContext | None,
    ) -> None:
        """Enter into the history that a worker has read these frames and compared their checksums.
        A frame that holds another block by now, and a worker that is gone, are passed over."""
        attachment = self.attachments.find(attachment_id)
        if attachment is None or not self.history.is_kept:
            return
        hashes: list[bytes] = []
        for frame, generation in zip(frames, generations, strict=False):
            node = self.table.find(frame)
            if node and node.block and node.block.generation == generation:
                hashes.append(node.chain_hash)
        self.history.note(VERIFIED, hashes, attachment.worker_id, trace)

    # -- leases

    def renew(self, lease_id: str, *, ttl_s: float, num_bytes_read: int = 0, now_s: float) -> None:
        """Let the lease live `ttl_s` from now (0: leave its end as it is). Raises: LeaseLapsed."""
        self.lapse(now_s)
        self.counters.num_bytes_read += num_bytes_read
        lease = self.leases.get(lease_id)
        if ttl_s > 0:
            self.leases.renew(lease, now_s, ttl_s)

    def release(self, lease_ids: Iterable[str], *, num_bytes_read: int = 0, now_s: float) -> int:
        """End leases; those that are over already are passed over. Returns: how many were ended."""
        self.lapse(now_s)
        self.counters.num_bytes_read += num_bytes_read
        num_released = 0
        for lease_id in lease_ids:
            lease = self.leases.remove(lease_id)
            if lease is not None:
                self._end_lease(lease)
                num_released += 1
        self.let_go()
        return num_released

    def lapse(self, now_s: float) -> None:
        """End all leases that have lapsed by `now_s`, and all quarantines whose grace period is
        over by then."""
        while (lease := self.leases.pop_due(now_s)) is not None:
            self.counters.num_leases_lapsed += 1
            self._end_lease(lease)
        self.let_go()
        while (frame := self.quarantined.pop_due(now_s)) is not None:
            self.table.free_frame(frame)

    def let_go(self) -> None:
        """Unpin LET_GO_AT_ONCE blocks of leases that are over. Every call that ends leases does it,
        and every later one, so that the end of a long prompt's lease keeps no other call waiting.
        The ends of chains go first, and so are evicted first."""
        ending, num_left = self.leases.ending, LET_GO_AT_ONCE
        while ending and num_left > 0:
            pins = ending[0].pins
            nodes = [pins.popitem()[0] for _ in range(min(num_left, len(pins)))]
            nodes.reverse()
            num_left -= len(nodes)
            self.tree.touch([node for node in nodes if self.tree.is_present(node)])
            for node in nodes:
                self.table.unpin(node)
            if not pins:
                ending.popleft()

    # -- counts

    @property
    def num_tails(self) -> int:
        """The number of tail blocks (unfilled last blocks of prompts) that the store holds."""
        return len(self.table.tails)

    def num_pinned(self) -> int:
        """The number of blocks that at least one lease, or a move between tiers, pins."""
        return self.tree.num_pinned

    # -- inside

    def _node_of(self, block: Block) -> TreeNode | None:
        """The node of the block, if its frame still holds it at its generation."""
        node = self.table.find(block.frame)
        if node is None or node.block is None or node.chain_hash != block.chain_hash:
            return None
        return node if node.block.generation == block.generation else None

    def _reserve_one(
        self, lease: Lease, attachment: Attachment, parent: bytes, chain_hash: bytes, tenant: str
    ) -> Reserved:
        node = self.tree.find(chain_hash)
        if node is not None:
            lease.pin_all(self.tree, [node])
            self.tree.touch([node])
            if node.block is not None:
                return Reserved(block=node.block)
        if chain_hash in lease.writing:  # asked for twice under one lease: the same frame
            frame = lease.writing[chain_hash]
            return Reserved(frame=frame, generation=lease.reservations[frame].generation)
        return self._reserve_frame(lease, attachment, parent, chain_hash, "", tenant)

    def _reserve_frame(
        self,
        lease: Lease,
        attachment: Attachment,
        parent: bytes,
        chain_hash: bytes,
        tail_name: str,
        tenant: str,
    ) -> Reserved:
        if self.is_closed:
            return NO_ROOM
        frame = self.table.take_frame(tenant)
        while frame is None and self.leases.ending:  # what they still pin is room, too
            self.let_go()
            frame = self.table.take_frame(tenant)
        if frame is None:
            return NO_ROOM
        generation = self.frames.generations[frame]
        lease.add_reservation(
            FrameReservation(
                frame, generation, attachment.attachment_id, chain_hash, parent, tail_name, tenant
            )
        )
        return Reserved(frame=frame, generation=generation)

    def _commit_one(self, lease: Lease, written: WrittenFrame) -> Block:
        reservation = lease.drop_reservation(written.frame)
        chain_hash = reservation.chain_hash
        node = self.tree.find(chain_hash) if chain_hash else None
        if node is not None and node.block is not None:
            self.table.free_frame(written.frame)  # its writer said that it is done writing
            lease.pin_all(self.tree, [node])
            return node.block
        numbers = (written.checksum, written.num_tokens)
        if not chain_hash:
            node = self.table.place_tail(written.frame, reservation.tail_name, *numbers)
            lease.pin_all(self.tree, [node])
        else:
            if node is None:
                parent = self.tree.find(reservation.parent) if reservation.parent else None
                node = self.tree.insert(chain_hash, parent, tenant=reservation.tenant)
            lease.pin_all(self.tree, [node])
            self.table.place(written.frame, node, *numbers)
        if not lease.is_probe:
            self.counters.num_bytes_written += self.frame_bytes
        if node.block is None:
            raise StoreIntegrityError(f"frame {written.frame}: committed and empty")
        return node.block

    def _end_reservation(self, reservation: FrameReservation) -> None:
        """End a reservation whose lease or worker is gone, while the worker did not say that its
        writing is over."""
        attachment = self.attachments.find(reservation.attachment_id)
        if attachment is not None and not attachment.one_sided:
            self.table.free_frame(reservation.frame)
            return
        self.frames.quarantine(reservation.frame)
        self.quarantined.add(reservation.frame, reservation.generation, reservation.attachment_id)

    def _end_lease(self, lease: Lease) -> None:
        """End the reservations of a lease that is out of the table already; `let_go` unpins."""
        for frame in list(lease.reservations):
            self._end_reservation(lease.drop_reservation(frame))
        self.leases.ending.append(lease)


def _reservation(lease: Lease, attachment_id: str, frame: int, generation: int) -> FrameReservation:
    """The frame's, if it is the caller's. Raises: LeaseLapsed."""
    reservation = lease.reservations.get(frame)
    if (
        reservation is None
        or reservation.generation != generation
        or reservation.attachment_id != attachment_id
    ):
        raise LeaseLapsed(f"frame {frame}: not reserved at generation {generation}")
    return reservation


def check_chain(parent: bytes, chain_hashes: Sequence[bytes], tenant: str) -> None:
    """Check what a Reserve asks for by itself, whatever the store holds: the lengths of tenant,
    parent and hashes, and that no hash appears twice. Raises: InvalidArgument naming the field."""
    if len(tenant.encode()) > MAX_TENANT_BYTES:
        raise InvalidArgument("tenant", f"at most {MAX_TENANT_BYTES} bytes")
    if parent and len(parent) != CHAIN_HASH_BYTES:
        raise InvalidArgument("parent", f"a chain hash has {CHAIN_HASH_BYTES} bytes")
    if any(len(chain_hash) != CHAIN_HASH_BYTES for chain_hash in chain_hashes):
        raise InvalidArgument("chain_hashes", f"a chain hash has {CHAIN_HASH_BYTES} bytes")
    if len(set(chain_hashes)) != len(chain_hashes) or parent in chain_hashes:
        raise InvalidArgument("chain_hashes", "a hash appears twice in one chain")
