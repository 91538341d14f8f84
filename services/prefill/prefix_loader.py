"""PrefixLoader: loads a prompt's cached prefix into the blocks reserved for it: from this device,
then the home store, then other nodes' stores that the router's hints name.

A hint may be out of date: each store is asked, pins the blocks that it really has, and the bytes
that it sends are verified. Blocks that do not arrive are left to the engine to compute, and counted
by reason. The next store may still have them, unless time ran out: then a transfer may still write
into the blocks.

At the end the loader names the store for the blocks that follow. A store holds a block only with
all blocks before it, so that is the home store, and blocks from elsewhere are copied there first;
or, if the prefix is not hot enough for a copy (`worth_a_copy`), the other node's store that it came
from.

A load never fails a request; a cancelled one leaves its leases to `PrefixLeases`. Used on the event
loop's thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.outputs import FilledBlock
from engine.request import Reservation
from kvstore.block_refs import Block
from kvstore.block_source import MatchResult
from kvstore.client import KvStoreClient
from kvstore.errors import DEADLINE, MISSING, STORE_UNAVAILABLE
from process import logs
from process.deadline import Deadline
from process.rpc_errors import BatonError
from services.prefill.request import PrefixLease, PrefixLeases, PrefixRun
from services.worker.provenance import FINGERPRINT, LegProvenance
from services.worker.runtime import WorkerCore
from services.worker.store_pool import LoadedBlocks, reason_of
from services.worker.store_writer import ReleaseLater


def worth_a_copy(num_hits: int, replicate_after_hits: int) -> bool:
    """Decide whether a prefix that was pulled from another node is copied to the home store.

    Args:
        num_hits: how often its last block was matched at that node before; the blocks above it were
            matched at least as often.
        replicate_after_hits: number of hits from which on a prefix is copied. 0: every prefix is
            copied.
    """
    return num_hits >= replicate_after_hits


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PrefixLoadRequest:
    """Prompt and destination of a prefix fetch."""

    engine_id: str
    reservation: Reservation
    chain_hashes: Sequence[bytes]
    """Chain hashes of the full blocks."""
    num_wanted_tokens: int
    """Number of leading tokens that can be used."""
    prefix_runs: tuple[PrefixRun, ...]
    ttl_s: float
    deadline: Deadline


class PrefixLoader:
    """One prefix fetch. `num_blocks`: number of leading blocks that are loaded by now."""

    def __init__(
        self, core: WorkerCore, ask: PrefixLoadRequest, leg: LegProvenance, pins: PrefixLeases
    ) -> None:
        self._core = core
        self._ask = ask
        self._leg = leg
        self._pins = pins
        self._size = core.model.block_size
        self._home = core.connector.client
        self._num_wanted = ask.num_wanted_tokens // self._size
        self._reasons: dict[int, str] = {}  # block index -> why it did not come, the first time
        self._is_out_of_time = False  # a transfer may still write into the next block
        self.num_blocks = ask.reservation.num_local_tokens // self._size

    @property
    def num_tokens(self) -> int:
        """Return the number of leading tokens whose KV is loaded."""
        return self.num_blocks * self._size

    async def run(self) -> PrefixLease | None:
        """Load the prefix. Returns: the pin under which new blocks are stored, which is the
        caller's from here on; None: no store takes them. Other pins that a handle needs stay in
        `PrefixLeases`."""
        home = await self._from_home()
        pulled = await self._from_elsewhere()
        self._count_lost()
        return self._choose_place(home, pulled)

    def here(self) -> list[FilledBlock]:
        """Return the leading blocks that are loaded."""
        block_ids, hashes = self._ask.reservation.block_ids, self._ask.chain_hashes
        return [
            FilledBlock(index, block_ids[index], hashes[index]) for index in range(self.num_blocks)
        ]

    def missing_at(self, place: PrefixLease) -> list[FilledBlock]:
        """Return the loaded blocks that are missing at `place`, which have to be stored before new
        ones."""
        return self.here()[len(place.refs) :]

    # ---- from one store

    async def _from_home(self) -> PrefixLease | None:
        connector = self._core.connector
        if self._home is None:
            if connector.address:
                self._lose(self._num_wanted, STORE_UNAVAILABLE)
            return None
        deadline = self._ask.deadline.sooner(self._core.limits.transfer_budget_s)
        pin = await self._match(self._home, connector.release_later, deadline, self._num_wanted)
        if pin is not None:
            # The copies have the budget to themselves.
            await self._load(pin, self._ask.deadline.sooner(self._core.limits.transfer_budget_s))
        return pin

    async def _from_elsewhere(self) -> list[PrefixLease]:
        """Load blocks from other nodes' stores. Returns: the pins of stores that had some, in
        order."""
        # One budget for all: a peer that is slow must not cost it once per run.
        deadline = self._ask.deadline.sooner(self._core.limits.transfer_budget_s)
        pulled: list[PrefixLease] = []
        for run in self._runs_elsewhere():
            if self._is_out_of_time:
                break
            # Whoever holds a run holds all that is before it.
            if min(run.end_block, self._num_wanted) <= self.num_blocks:
                continue
            pin = await self._pull(run, deadline)
            if pin is not None:
                pulled.append(pin)
        return pulled

    async def _pull(self, run: PrefixRun, deadline: Deadline) -> PrefixLease | None:
        """Load blocks from one other node's store. Returns: None if none came."""
        stores = self._core.remote_stores
        self._pins.start_renewing()  # what others have pinned for us must outlive a slow one
        try:
            client = await stores.client(
                run.node_id, run.store_address, run.store_incarnation, deadline
            )
        except BatonError as error:
            self._lose(run.end_block, reason_of(error))
            return None
        pin = await self._match(client, stores.release_later, deadline, run.end_block)
        if pin is None:
            return None
        num_before = self.num_blocks
        await self._load(pin, deadline)
        return pin if self.num_blocks > num_before else None

    async def _match(
        self, client: KvStoreClient, release_later: ReleaseLater, deadline: Deadline, end_block: int
    ) -> PrefixLease | None:
        """Look up and pin a store's blocks of the prompt. Where it does not answer, blocks up to
        `end_block` count as lost."""
        hashes = self._ask.chain_hashes
        had_s = deadline.left_s()
        try:
            matched = MatchResult((), "")
            if hashes:  # of a prompt without a full block no store has anything
                matched = await self._core.connector.match(
                    client, hashes, ttl_s=self._ask.ttl_s, deadline=deadline
                )
        except BatonError as error:
            self._core.connector.suspect(client, error, had_s=had_s)
            self._lose(end_block, reason_of(error))
            return None
        refs = _as_far_as_ours(matched.blocks, hashes, self._size)
        if len(refs) < len(matched.blocks):
            self._lose(len(matched.blocks), FINGERPRINT)
        pin = PrefixLease(client, matched.lease_id, refs, release_later, matched.num_hits)
        self._pins.add(pin)
        return pin

    async def _load(self, pin: PrefixLease, deadline: Deadline) -> None:
        """Copy the blocks of `pin` beyond those that are loaded, batch by batch; those that came
        before a timeout are used. What cannot be used is unpinned."""
        end = min(len(pin.refs), self._num_wanted)
        batch_blocks = max(1, self._core.limits.fetch_batch_bytes // self._core.layout.block_bytes)
        while self.num_blocks < end:
            first, batch_end = self.num_blocks, min(self.num_blocks + batch_blocks, end)
            loaded = await self._load_batch(pin, first, batch_end, deadline)
            if self.num_blocks == batch_end:
                continue
            pin.refs = pin.refs[: self.num_blocks]
            self._is_out_of_time = DEADLINE in loaded.not_usable
            reasons = list(loaded.not_usable.elements())
            for index, reason in enumerate(reasons, self.num_blocks):
                self._reasons.setdefault(index, reason)
            self._lose(end, reasons[-1])
            return

    async def _load_batch(
        self, pin: PrefixLease, first: int, end: int, deadline: Deadline
    ) -> LoadedBlocks:
        wanted = pin.refs[first:end]
        block_ids = self._ask.reservation.block_ids[first:end]
        with self._core.write_behind.standing_back():
            loaded = await self._core.connector.load(
                pin.client,
                self._ask.engine_id,
                pin.lease_id,
                list(zip(wanted, block_ids, strict=True)),
                deadline,
            )
        self.num_blocks += loaded.num_usable
        client = pin.client
        self._leg.count_read(client.node_id, client.transport_name, loaded.num_bytes)
        self._leg.count_loaded(
            first * self._size,
            self.num_tokens,
            wanted[: loaded.num_usable],
            block_bytes=self._core.layout.block_bytes,
            node_id=client.node_id,
        )
        return loaded

    # ---- parts

    def _runs_elsewhere(self) -> Iterator[PrefixRun]:
        """Return the hints of other nodes, if this worker pulls from them."""
        if not self._core.settings.remote_transport:
            return
        for run in self._ask.prefix_runs:
            if not self._is_home(run):
                yield run

    def _is_home(self, run: PrefixRun) -> bool:
        if run.store_address == self._core.connector.address:
            return True
        return self._home is not None and run.node_id == self._home.node_id

    def _lose(self, end_block: int, reason: str) -> None:
        """Record that blocks up to `end_block` did not come from where they should be, with the
        reason."""
        for index in range(self.num_blocks, min(end_block, self._num_wanted)):
            self._reasons.setdefault(index, reason)

    def _count_lost(self) -> None:
        """Count the tokens to compute that should have been in a store, by reason."""
        ends = [run.end_block for run in self._runs_elsewhere()]
        if self._home is not None:
            ends += [run.end_block for run in self._ask.prefix_runs if self._is_home(run)]
        self._lose(max(ends, default=0), MISSING)
        to_compute = range(self.num_blocks, self._num_wanted)
        lost = Counter(self._reasons[index] for index in to_compute if index in self._reasons)
        if lost:
            self._leg.recomputed.update(lost)
            logs.event(
                logger,
                "prefix_not_fetched",
                level=logging.WARNING,
                request=self._ask.engine_id,
                num_blocks=dict(lost),
            )

    def _choose_place(
        self, home: PrefixLease | None, pulled: Sequence[PrefixLease]
    ) -> PrefixLease | None:
        """Choose where new blocks are stored. The other pins that a handle needs are kept."""
        kept: list[PrefixLease] = []
        held = self._pins.held  # without those whose lease could not be renewed meanwhile
        pulled = [pin for pin in pulled if pin in held]
        if home is not None and home not in held:
            home = self._pins.anew(home)
        place = home
        if pulled:
            deepest = pulled[-1]
            limit = self._core.limits.replicate_after_hits
            is_home_there = home is not None and home.client.broken is None
            if not is_home_there or not worth_a_copy(deepest.num_hits, limit):
                place = deepest
                kept = [pin for pin in (home, *pulled[:-1]) if pin is not None]
        if place is not None:
            self._pins.take(place)
        self._pins.keep(kept)
        return place


def _as_far_as_ours(
    refs: Sequence[Block], chain_hashes: Sequence[bytes], block_size: int
) -> tuple[Block, ...]:
    """Return the leading blocks that are full blocks of this prompt: a store's answer is checked,
    too."""
    num_ours = 0
    for ref, chain_hash in zip(refs, chain_hashes, strict=False):
        if ref.chain_hash != chain_hash or ref.num_tokens != block_size:
            break
        num_ours += 1
    return tuple(refs[:num_ours])
