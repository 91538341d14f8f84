"""Checks of a store's invariants (conservation laws such as "the states of all frames add up"),
recomputed from scratch. Read only. `SlicedCheck` runs them between the calls that a store serves.

Each `check_*` yields after each step of some microseconds, so that its caller can stop between two
of them, and raises IntegrityError naming the first law that fails. What it found holds if nothing
changed meanwhile. O(frames + pages + leases): 8 us a frame. A check makes no table of all blocks,
but one of those that are pinned: to make a large one longer, or to free it, stops the loop.

These laws stand apart from the classes that keep them: a law that is recomputed by the code which
may be wrong proves less.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from operator import attrgetter

from kvstore.attached_workers import AttachmentTable, QuarantineList
from kvstore.block_store import BlockStore
from kvstore.errors import StoreIntegrityError
from kvstore.frame_table import FrameTable
from kvstore.leases import LeaseTable
from kvstore.prefix_tree import LruOrder, PrefixTree, TreeNode
from kvstore.slot_pool import FramePool, SlotPool, SlotState
from kvstore.tenant_shares import SlotAccount
from process import logs
from process.background_tasks import end_tasks, start_task
from process.deadline import Clock

logger = logging.getLogger(__name__)

SLICE_S = 0.002
"""Longest time that a check of the invariants keeps the event loop in one turn."""
CHECK_BUDGET_S = 0.25
"""Longest time that a check takes which a call asked for."""
LEAST_S_PER_FRAME = 4e-6
"""Least time of a whole check for each frame, on a fast machine (half of what was measured): a
check with a time limit below that is not begun."""
_STEPS = 64
"""Steps between two looks at the clock: 20 to 60 us (measured)."""
_END = object()


def check(store: BlockStore) -> None:
    """Recompute every invariant of a store at once. Raises: IntegrityError naming the first that
    fails."""
    run(check_store(store))


def run(steps: Iterator[None]) -> None:
    """Run all steps of a check at once. Raises: IntegrityError."""
    deque(steps, maxlen=0)


def check_store(store: BlockStore) -> Iterator[None]:
    """Check every invariant of a store, step by step. Raises: IntegrityError."""
    yield from check_table(store.table)
    yield from check_leases(store.leases)
    yield from check_writing(store.table, store.leases, store.attachments, store.quarantined)
    yield from check_pins(store.table, store.leases)


def check_table(table: FrameTable) -> Iterator[None]:
    """Check frames, pages, the tree, tenants' accounts, and what moves between the tiers."""
    yield from check_frames(table.frames)
    yield from check_slots(table.pages, "pages")
    yield from check_tree(table.tree)
    yield from check_committed(table)
    yield from check_pages(table)
    yield from check_account(table.frame_account, table.frames)
    yield from check_account(table.page_account, table.pages)
    for frame, node in chain(enumerate(table.committed), table.damaged.items()):
        if node is not None and table.frame_account.tenant_of(frame) != node.tenant:
            raise StoreIntegrityError(f"frame {frame}: charged to another tenant than its block")
        yield
    yield from check_orders(table)
    yield from check_moves(table)


def check_slots(pool: SlotPool, kind: str) -> Iterator[None]:
    """Check that the counts of a pool's states are right, and that its free slots are those that
    can be taken."""
    counts = dict.fromkeys(SlotState, 0)
    for state in pool.states:
        counts[state] += 1
        yield
    if sum(counts.values()) != pool.num_slots:
        raise StoreIntegrityError(f"{kind}: the states do not add up to {pool.num_slots}")
    for state, recount in counts.items():
        if recount != pool.count(state):
            raise StoreIntegrityError(
                f"{kind} {state.value}: counted {recount}, kept {pool.count(state)}"
            )
    is_free = bytearray(pool.num_slots)
    for slot in pool.free_heap:
        is_free[slot] = True
        if pool.states[slot] is not SlotState.FREE:
            raise StoreIntegrityError(f"{kind}: {slot} is in the free heap, and not free")
        yield
    if not len(pool.free_heap) == is_free.count(True) == counts[SlotState.FREE]:
        raise StoreIntegrityError(f"{kind}: the free heap differs from those that are free")


def check_frames(frames: FramePool) -> Iterator[None]:
    """Check a frame pool as check_slots does, and that a generation is odd exactly while bytes may
    change."""
    yield from check_slots(frames, "frames")
    changing = (SlotState.WRITING, SlotState.QUARANTINED)
    for frame, state in enumerate(frames.states):
        generation = frames.generations[frame]
        if (generation % 2 == 1) != (state in changing):
            raise StoreIntegrityError(f"frame {frame}: generation {generation} while {state.value}")
        yield


def check_tree(tree: PrefixTree) -> Iterator[None]:
    """Check that each node is among its parent's children, and that both tiers are
    prefix-closed."""
    num_below = num_children = 0
    for chain_hash, node in tree.nodes.items():
        yield
        if node.chain_hash != chain_hash:
            raise StoreIntegrityError(f"tree: {chain_hash.hex()} names another block")
        if node.block is None and node.page is None:
            raise StoreIntegrityError(f"tree: {chain_hash.hex()} lies nowhere")
        parent = node.parent
        if parent is not None:
            num_below += 1
            if not tree.is_present(parent):
                raise StoreIntegrityError(f"tree: {chain_hash.hex()} has an absent parent")
            if node.page is not None and parent.page is None:
                raise StoreIntegrityError(f"tree: {chain_hash.hex()} has a page, its parent none")
        num_page_children, before = 0, None
        for child in node.children():
            num_children += 1
            num_page_children += child.page is not None
            if (
                (child.parent, child.previous_sibling) != (node, before)
                or not tree.is_present(child)
                or num_children > len(tree)
            ):
                raise StoreIntegrityError(
                    f"tree: {chain_hash.hex()} has children that are not its own"
                )
            before = child
            yield
        if num_page_children != node.num_page_children:
            raise StoreIntegrityError(f"tree: {chain_hash.hex()} miscounts its children")
    if num_children != num_below:
        raise StoreIntegrityError("tree: a node is not among its parent's children")


def check_committed(table: FrameTable) -> Iterator[None]:
    """Check that committed frames hold blocks of the tree, pinned tails, or pinned blocks that were
    removed from the tree; one each, at the frame's own generation."""
    frames, tree, committed = table.frames, table.tree, table.committed
    num_committed = 0
    for frame, node in enumerate(committed):
        yield
        if node is None:
            continue
        num_committed += 1
        block = node.block
        if block is None or frames.state(frame) is not SlotState.COMMITTED:
            raise StoreIntegrityError(f"frame {frame}: has a node but is not committed")
        if (block.frame, block.chain_hash) != (frame, node.chain_hash):
            raise StoreIntegrityError(f"frame {frame}: its node is another's")
        if block.generation != frames.generation(frame):
            raise StoreIntegrityError(f"frame {frame}: its node has another generation")
        if (frame in table.tails) == bool(block.chain_hash):
            raise StoreIntegrityError(f"frame {frame}: neither tail nor block, or both")
        if node.num_pins == 0 and not tree.is_present(node):
            raise StoreIntegrityError(f"frame {frame}: no lease pins it and it is not in the tree")
    if num_committed != frames.count(SlotState.COMMITTED):
        raise StoreIntegrityError("committed frames and their nodes differ in number")
    for node in tree:
        if node.block is not None and committed[node.block.frame] is not node:
            raise StoreIntegrityError(f"{node.chain_hash.hex()}: its frame is not its own")
        yield


def check_pages(table: FrameTable) -> Iterator[None]:
    """Check that pages that hold a block are those that nodes lie in, one each."""
    pages = table.pages
    is_taken = bytearray(pages.num_slots)
    for node in table.tree:
        if node.page is not None:
            if node.page.index >= pages.num_slots:
                raise StoreIntegrityError(
                    f"pages: a node lies in page {node.page.index}, which is none"
                )
            if is_taken[node.page.index]:
                raise StoreIntegrityError(f"pages: two nodes lie in page {node.page.index}")
            if pages.state(node.page.index) is SlotState.FREE:
                raise StoreIntegrityError("pages: a node lies in a page that is free")
            is_taken[node.page.index] = True
        yield
    num_used = pages.count(SlotState.COMMITTED)
    if is_taken.count(True) != num_used:
        raise StoreIntegrityError(
            f"pages: {num_used} are used, {is_taken.count(True)} nodes lie in one"
        )


def check_account(account: SlotAccount, pool: SlotPool) -> Iterator[None]:
    """Check that the slots charged to tenants are those that are taken, and are counted right."""
    used: Counter[str] = Counter()
    for slot, tenant in enumerate(account.tenants):
        yield
        if tenant is None:
            continue
        used[tenant] += 1
        if pool.state(slot) is SlotState.FREE:
            raise StoreIntegrityError("a slot that is free is charged to a tenant")
    if used.total() != pool.num_taken:
        raise StoreIntegrityError("slots charged to tenants are not those that are taken")
    if used != account.used:
        raise StoreIntegrityError("tenants' slots are miscounted")
    groups: Counter[str] = Counter()
    for tenant, num_slots in used.items():
        groups[account.shares.group(tenant)] += num_slots
    if groups != account.used_by_group:
        raise StoreIntegrityError("groups' slots are miscounted")
    if sum(account.guaranteed.values()) != account.num_slots:
        raise StoreIntegrityError("guaranteed slots do not add up")


def check_orders(table: FrameTable) -> Iterator[None]:
    """Check that every node that may give up a frame or a page can be found, and that the clean
    ones are counted right."""
    tree = table.tree
    num_clean = 0
    for node in tree:
        num_clean += node.is_clean
        if node.is_clean != (node in tree.clean):
            raise StoreIntegrityError(f"{node.chain_hash.hex()}: clean, or counted as clean")
        yield
    if num_clean != len(tree.clean):
        raise StoreIntegrityError("clean nodes are miscounted")
    num_frames, num_pages = table.frames.num_slots, table.pages.num_slots
    yield from check_order(tree, tree.leaf_order, num_frames, FRAME)
    if tree.has_pages:  # else check_pages has seen that there are no candidates
        yield from check_order(tree, tree.clean_order, num_frames, FRAME)
        yield from check_order(tree, tree.page_order, num_pages, PAGE)
        yield from check_order(tree, tree.demotion_order, num_frames, FRAME)


FRAME, PAGE = attrgetter("block.frame"), attrgetter("page.index")
"""The slot that a candidate would give up."""


def check_order(
    tree: PrefixTree,
    orders: Mapping[str, LruOrder],
    num_slots: int,
    slot_of: Callable[[TreeNode], int],
) -> Iterator[None]:
    """Check that every candidate of one kind can be found: it is filed once, by its own group, and
    not below its age."""
    is_filed = bytearray(num_slots)
    for group, order in orders.items():
        for last_used, _, _, node in order.heap:
            yield
            if last_used > node.last_used:
                raise StoreIntegrityError(f"{order.kind}: {node.chain_hash.hex()} is filed too new")
            if not order.is_candidate(node):
                continue
            if tree.shares.group(node.tenant) != group:
                raise StoreIntegrityError(f"{order.kind}: {node.tenant} is of another group")
            if is_filed[slot_of(node)]:
                raise StoreIntegrityError(f"{order.kind}: {node.chain_hash.hex()} is filed twice")
            is_filed[slot_of(node)] = True
    for node in tree:
        yield
        order = orders[tree.shares.group(node.tenant)]
        if order.is_candidate(node) and not is_filed[slot_of(node)]:
            raise StoreIntegrityError(f"{order.kind}: {node.chain_hash.hex()} would never be found")


def check_moves(table: FrameTable) -> Iterator[None]:
    """Check that pages being written are those of the demotions under way, and that only moves keep
    pages from leaving."""
    writing = {write.index for each in table.demotions for write in each.writes}
    if len(writing) != table.pages.count(SlotState.WRITING):
        raise StoreIntegrityError("pages being written are not those of the demotions under way")
    uses = Counter(each.parent for each in table.demotions if each.parent is not None)
    uses.update(promotion.node for promotion in table.promotions.values())
    for node in table.tree:
        if node.num_page_uses != uses[node]:
            raise StoreIntegrityError(f"{node.chain_hash.hex()}: miscounts the uses of its page")
        yield


def check_leases(leases: LeaseTable) -> Iterator[None]:
    """Check that every lease lapses at its own end, and holds a frame in one way only."""
    due = set(leases.due)
    for lease in leases:
        is_hold = math.isinf(lease.expires_at_s)
        if not is_hold and (lease.expires_at_s, lease.lease_id) not in due:
            raise StoreIntegrityError(f"lease {lease.lease_id} would never lapse")
        for node in lease.pins:
            if node.block is not None and node.block.frame in lease.reservations:
                raise StoreIntegrityError(f"lease {lease.lease_id} pins a frame that it is writing")
            yield
        writing = {r.chain_hash: f for f, r in lease.reservations.items() if r.chain_hash}
        if writing != lease.writing:
            raise StoreIntegrityError(f"lease {lease.lease_id} miscounts what it is writing")
        yield


def check_writing(
    table: FrameTable,
    leases: LeaseTable,
    attachments: AttachmentTable,
    quarantined: QuarantineList,
) -> Iterator[None]:
    """Check that writing frames are reserved once, by a worker that is attached, or are being
    promoted into; and that quarantined ones have an end: their worker's, or that of the last lease
    on their bad bytes."""
    frames = table.frames
    writing = table.promoting()
    for lease in leases:
        for frame, reservation in lease.reservations.items():
            if frame in writing:
                raise StoreIntegrityError(f"frame {frame}: reserved twice")
            if attachments.find(reservation.attachment_id) is None:
                raise StoreIntegrityError(f"frame {frame}: reserved by a worker that is gone")
            writing[frame] = reservation.generation
            yield
    out_of_use = quarantined.frames()
    for frame, node in table.damaged.items():
        if frame in out_of_use:
            raise StoreIntegrityError(f"frame {frame}: quarantined twice")
        if node.num_pins == 0:
            raise StoreIntegrityError(f"frame {frame}: bad, and no lease pins it")
        if node.block is not None:
            out_of_use[frame] = node.block.generation + 1
    for state, held in ((SlotState.WRITING, writing), (SlotState.QUARANTINED, out_of_use)):
        if len(held) != frames.count(state):
            raise StoreIntegrityError(f"{state.value} frames: {len(held)} are accounted for")
        for frame, generation in held.items():
            if frames.state(frame) is not state:
                raise StoreIntegrityError(f"frame {frame}: is not {state.value}")
            if frames.generation(frame) != generation:
                raise StoreIntegrityError(f"frame {frame}: {state.value} at another generation")
            yield
    for owner in quarantined.owners():
        if attachments.find(owner) is None:
            raise StoreIntegrityError("a frame is quarantined for ever: its worker is gone")


def check_pins(table: FrameTable, leases: LeaseTable) -> Iterator[None]:
    """Check that each node's pin count is the number of leases and moves that hold it, and that
    each pinned frame is known to the table."""
    tree, committed, damaged = table.tree, table.committed, table.damaged
    pins = table.pins_of_moves()
    for lease in chain(leases, leases.ending):
        for node in lease.pins:
            pins[node] += 1
            yield
    for held in chain(tree, committed, damaged.values(), pins):
        if held is not None and held.num_pins != pins.get(held, 0):
            raise StoreIntegrityError(
                f"{held.chain_hash.hex()}: {held.num_pins} pins kept, {pins[held]} are held"
            )
        yield
    num_pinned = 0
    for node, num_pins in pins.items():
        num_pinned += num_pins > 0
        block = node.block
        if block is not None and node not in (
            committed[block.frame],
            damaged.get(block.frame),
        ):
            raise StoreIntegrityError(f"frame {block.frame}: pinned but not committed")
        yield
    if num_pinned != tree.num_pinned:
        raise StoreIntegrityError(f"{num_pinned} nodes are pinned, counted {tree.num_pinned}")


class SlicedCheck:
    """Recomputes the invariants of a store on an event loop that serves calls, in slices of
    `slice_s`. A check begins again when something changed in the middle of it. An invariant that
    does not hold is looked at once more in one go before it is reported, since only that is free of
    changes. One that breaks in use is reported until the store restarts, whatever later checks
    find."""

    def __init__(self, store: BlockStore, clock: Clock, slice_s: float = SLICE_S) -> None:
        self.error = ""
        """The invariant that the last complete check, or the store's own work, found violated;
        empty: every one held."""
        self.num_calls = 0
        """Calls that may have changed what is checked. The store counts them here."""
        self._store = store
        self._clock = clock
        self._slice_s = slice_s
        self._broken = ""  # the law that did not hold in use
        self._checking: asyncio.Task[None] | None = None

    async def stop(self) -> None:
        """End a check that a call asked for, if one is under way."""
        await end_tasks([self._checking])

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """The context of the store's own work. An IntegrityError ends that work and goes no
        further: it is logged, and `error` names it until the store restarts."""
        try:
            yield
        except StoreIntegrityError as error:
            self._report(error)
            self._broken = str(error)

    async def check(self, budget_s: float = CHECK_BUDGET_S) -> str:
        """Recompute every invariant, for `budget_s` at most, if that can be enough at all; callers
        at the same time share one check.

        Returns: `error`, after this check or, without one that came to its end, after the last that
            did.
        """
        if self._store.frames.num_slots * LEAST_S_PER_FRAME > budget_s:
            return self.error
        if self._checking is None or self._checking.done():
            self._checking = start_task(self._check_for(budget_s), "store check")
        await asyncio.wait([self._checking], timeout=2 * budget_s)
        return self.error

    async def run(self, until_s: float) -> bool:
        """Run one check. until_s: when to give up, on time.monotonic(). Returns: whether it came to
        its end, in time and with no change meanwhile."""
        with self.in_use():
            self._store.lapse(self._clock())
        state, steps = self._state(), check_store(self._store)
        slice_end_s = time.monotonic() + self._slice_s
        try:
            while next(itertools.islice(steps, _STEPS - 1, None), _END) is not _END:
                if time.monotonic() < slice_end_s:
                    continue
                await asyncio.sleep(0)
                if self._state() != state or time.monotonic() >= until_s:
                    return False
                slice_end_s = time.monotonic() + self._slice_s
        except RuntimeError:  # a table changed while it was iterated over
            return False
        except StoreIntegrityError:
            return self._state() == state and not self._holds_in_one_go()
        self.error = self._broken
        return True

    async def _check_for(self, budget_s: float) -> None:
        until_s = time.monotonic() + budget_s
        while not await self.run(until_s) and time.monotonic() < until_s:
            await asyncio.sleep(0)

    def _holds_in_one_go(self) -> bool:
        try:
            check(self._store)
        except StoreIntegrityError as error:
            self._report(error)
            return False
        return True

    def _state(self) -> tuple[int, ...]:
        """Differs when something that is checked has changed, or may have."""
        return self.num_calls, self._store.frames.num_changes, len(self._store.leases)

    def _report(self, error: StoreIntegrityError) -> None:
        self.error = str(error)
        logs.event(logger, "integrity_error", level=logging.ERROR, error=str(error))
