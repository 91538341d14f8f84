"""BlockSource: the interface by which workers read KV blocks, of a store or of a worker that lends
its cache. BlockSink: that by which they write, of a store only. And the values that client and
server use for the calls.

Knows no stubs: wire.py has these values as messages.
"""

from __future__ import annotations

import functools
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from kvstore import tenant_shares
from kvstore.block_history import OneHistory
from kvstore.block_refs import Block
from kvstore.block_store import BlockStore, Reserved, WrittenFrame
from kvstore.errors import GENERATION
from kvstore.exported_blocks import LeaseUpdate
from kvstore.nixl_push import PeerBlocks, PushOutcome, Readable
from kvstore.prefix_tree import TreeNode
from kvstore.slot_pool import SlotState
from kvstore.tenant_shares import TenantSlots
from kvstore.transport.device import Shared
from process.rpc_errors import InvalidArgument
from process.trace_spans import TraceContext

MAX_CHUNK_BYTES = 16 * 1024 * 1024
"""Most bytes of one piece of a block in a gRPC message."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def own_host_id() -> str:
    """The boot id of the running kernel: containers of one host have the same, and no two hosts
    have. Empty where it cannot be read."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class WorkerInfo:
    """A worker as it describes itself when it attaches. peer: of transport nixl. host_id: of
    transport cuda_ipc, the worker's `own_host_id`."""

    worker_id: str
    worker_incarnation: bytes
    model_fingerprint: bytes
    block_bytes: int
    transport: str
    peer: PeerBlocks | None = None
    host_id: str = ""


@dataclass(frozen=True)
class StoreInfo:
    """The answer to Attach: the identity of the source, and where its frames lie.

    slab_path: of a store's slab. nixl_metadata, region_address: of transport nixl; a lender has no
    region for others. shared: a lender's memory, of transport cuda_ipc. keeps_history: Renew and
    Release shall name the blocks that the worker has verified.
    """

    attachment_id: str
    node_id: str
    incarnation: bytes
    frame_bytes: int
    num_frames: int
    slab_path: str = ""
    nixl_metadata: bytes = b""
    region_address: int = 0
    shared: Shared | None = None
    keeps_history: bool = False


@dataclass(frozen=True)
class MatchResult:
    """The longest prefix present, in order. lease_id: empty when nothing was pinned. num_hits: how
    often the last of the blocks was matched before."""

    blocks: Sequence[Block]
    lease_id: str
    num_hits: int = 0


class ReadPiece(NamedTuple):
    """A piece of a block that is read over gRPC: `data` at `offset` of block `at` of those asked
    for. A stale one has no bytes: its frame does not hold the block any more."""

    at: int
    offset: int
    data: bytes
    is_stale: bool = False


class ChainToReserve(NamedTuple):
    """One chain of a Reserve: consecutive blocks of one prompt, charged to `tenant`. parent: chain
    hash before the first of them; empty at the start of a prompt. tail_name: name of the unfilled
    last block; empty: there is none."""

    parent: bytes
    chain_hashes: Sequence[bytes]
    tail_name: str
    tenant: str


class ReservedChain(NamedTuple):
    """The answer to one chain of a Reserve: one for each of its hashes, and one for its tail if one
    was asked for."""

    blocks: Sequence[Reserved]
    tail: Reserved | None


class PastBlock(NamedTuple):
    """A block and what happened to it. node: where the block lies now; None: it is not present."""

    chain_hash: bytes
    events: OneHistory
    node: TreeNode | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """The numbers of a store or lender: levels of now, and sums since it started; what it does not
    have is 0. The fields have the names that GetStatusReply gives them.

    refused: blocks that were asked for and not given, by reason. integrity_error: the invariant
    that did not hold, empty: all held. file_tier_problem: why the tier that was asked for is not
    used.
    """

    frame_bytes: int = 0
    num_frames: int = 0
    num_free: int = 0
    num_writing: int = 0
    num_committed: int = 0
    num_quarantined: int = 0
    num_pinned: int = 0
    num_tails: int = 0
    num_pages: int = 0
    num_pages_used: int = 0
    num_leases: int = 0
    num_attachments: int = 0
    num_lookups: int = 0
    num_blocks_asked: int = 0
    num_blocks_matched: int = 0
    num_bytes_written: int = 0
    num_bytes_read: int = 0
    num_evictions: int = 0
    num_leases_lapsed: int = 0
    num_demoted: int = 0
    num_promoted: int = 0
    num_pages_bad: int = 0
    num_damaged: int = 0
    integrity_error: str = ""
    file_tier_problem: str = ""
    tenants: Sequence[TenantSlots] = ()
    refused: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, store: BlockStore) -> StoreStats:
        """The numbers of a store now. Each is read where it is kept."""
        frames, table, sums = store.frames, store.table, store.counters
        return cls(
            frame_bytes=store.frame_bytes,
            num_frames=frames.num_slots,
            num_free=frames.count(SlotState.FREE),
            num_writing=frames.count(SlotState.WRITING),
            num_committed=frames.count(SlotState.COMMITTED),
            num_quarantined=frames.count(SlotState.QUARANTINED),
            num_pinned=store.num_pinned(),
            num_tails=store.num_tails,
            num_pages=table.pages.num_slots,
            num_pages_used=table.pages.count(SlotState.COMMITTED),
            num_leases=len(store.leases),
            num_attachments=len(store.attachments),
            num_lookups=sums.num_lookups,
            num_blocks_asked=sums.num_blocks_asked,
            num_blocks_matched=sums.num_blocks_matched,
            num_bytes_written=sums.num_bytes_written,
            num_bytes_read=sums.num_bytes_read,
            num_evictions=table.num_evictions,
            num_leases_lapsed=sums.num_leases_lapsed,
            num_demoted=table.num_demoted,
            num_promoted=table.num_promoted,
            num_pages_bad=table.num_pages_bad,
            num_damaged=sums.num_damaged,
            tenants=tenant_shares.usage([table.frame_account, table.page_account]),
            refused=store.refused,
        )


class BlockSource(Protocol):
    """The interface of a process that workers attach to and read KV blocks from, under leases: a
    store or a lender. A call that names an attachment shows that its worker lives. Leases travel
    with handles: any worker may use one.

    Every method raises UnknownAttachment, and LeaseLapsed where it takes a lease.
    """

    @property
    def node_id(self) -> str:
        """The node id of the store or lender; a store knows its own once it listens."""

    @property
    def incarnation(self) -> bytes:
        """The random id of this start of the process."""

    def now_s(self) -> float:
        """The time on the source's clock, in seconds."""

    async def attach(self, worker: WorkerInfo) -> StoreInfo:
        """Attach a worker over one transport. Raises: InvalidArgument, FailedPrecondition,
        NoCapacity."""

    def detach(self, attachment_id: str) -> None:
        """End an attachment whose worker leaves by itself: no transfer of it is under way."""

    async def match(
        self,
        attachment_id: str,
        chain_hashes: Sequence[bytes],
        *,
        pin: bool,
        lease_id: str,
        ttl_s: float,
        budget_s: float,
    ) -> MatchResult:
        """Find the longest prefix of the chain that is present, and pin it under a lease if asked.
        A lender has no blocks to find, but for PROBE_HASH. budget_s: longest time that it may take.
        """

    def pin(self, attachment_id: str, blocks: Sequence[Block], *, ttl_s: float) -> tuple[str, int]:
        """Pin the longest prefix of `blocks` that is still valid. Returns: the new lease's id,
        empty for none, and how many blocks it pins."""

    def renew(self, lease_id: str, *, ttl_s: float, num_bytes_read: int) -> None:
        """Let a lease live at least `ttl_s` from now. num_bytes_read: bytes that the worker has
        read without a call."""

    def release(self, lease_ids: Iterable[str], *, num_bytes_read: int) -> int:
        """End leases. num_bytes_read: bytes that the worker has read without a call. Returns: how
        many leases were ended."""

    async def await_lent(
        self,
        attachment_id: str,
        lease_id: str,
        num_known: int,
        num_wanted: int,
        budget_s: float,
        *,
        hold_s: float,
    ) -> LeaseUpdate:
        """Wait until a lender's lease has grown. Raises: FailedPrecondition at a store, whose
        leases do not grow."""

    def hold(
        self,
        attachment_id: str,
        lease_id: str,
        pairs: Sequence[tuple[int, int]],
        ttl_s: float,
    ) -> tuple[float, list[int]]:
        """Hold a lender's blocks, named as (block id, generation), for a reader that copies them by
        itself.

        Returns: for how many seconds they are held, and the indices of those that are stale.
        Raises: FailedPrecondition at a store, whose slab shows the generations.
        """

    async def push(
        self,
        attachment_id: str,
        lease_id: str,
        push_id: str,
        blocks: Sequence[Block],
        destinations: Sequence[int],
        budget_s: float,
    ) -> PushOutcome:
        """Write blocks into the worker's own (transport nixl)."""

    def close_push(self, push_id: str) -> bool:
        """Whether no byte of this push moves, now and later: a push that is not known is refused
        from here on."""

    def copy_out(
        self, attachment_id: str, lease_id: str, blocks: Sequence[Block], chunk_bytes: int
    ) -> AsyncGenerator[ReadPiece, None]:
        """Yield pieces of blocks of at most `chunk_bytes` (transport grpc). The blocks are held
        until the generator is closed."""

    async def report(self, attachment_id: str, blocks: Sequence[Block]) -> int:
        """Look at blocks that a reader found damaged. Returns: how many of them were, and are
        gone."""

    def present(self, num_hashes: int) -> Iterator[list[bytes]]:
        """Yield every chain hash that is present, in no order, in lists of `num_hashes`, each of
        the moment in which it is asked for; one list at least."""

    async def status(self, *, check_integrity: bool) -> StoreStats:
        """The numbers of now. check_integrity: recompute the invariants first."""


class BlockSink(Protocol):
    """The interface of a store that workers also write blocks into; `BlockStore` says what each
    call does."""

    async def reserve(
        self,
        attachment_id: str,
        lease_id: str,
        chains: Sequence[ChainToReserve],
        *,
        is_probe: bool,
        ttl_s: float,
    ) -> tuple[str, list[ReservedChain | None]]:
        """Reserve frames for the blocks of several chains. Returns: the lease, and an answer for
        each chain: None where its parent is missing."""

    async def commit(
        self,
        attachment_id: str,
        lease_id: str,
        written: Sequence[WrittenFrame],
        *,
        ends_lease: bool,
    ) -> list[Block]:
        """Make written frames visible, parents first. ends_lease: the lease ends then. Returns: the
        blocks as the store has them."""

    def abort(
        self,
        attachment_id: str,
        lease_id: str,
        written: Sequence[WrittenFrame],
        *,
        quarantine: bool,
    ) -> None:
        """Give reserved frames back. quarantine: a transfer may still write into them."""

    def copy_in(
        self,
        attachment_id: str,
        lease_id: str,
        frame: int,
        generation: int,
        offset: int,
        data: bytes,
    ) -> None:
        """Write a piece of a block into a reserved frame (transport grpc)."""

    @property
    def keeps_history(self) -> bool:
        """Whether the events of blocks are kept."""

    def note_verified(
        self,
        attachment_id: str,
        frames: Sequence[int],
        generations: Sequence[int],
        trace: TraceContext | None,
    ) -> None:
        """Note that a worker has read these frames and compared their checksums."""

    def history(self, prefix: bytes, max_blocks: int) -> list[PastBlock]:
        """The latest events of at most `max_blocks` blocks whose chain hash begins with
        `prefix`."""


async def read_pieces(
    source: Readable,
    blocks: Sequence[Block],
    chunk_bytes: int,
    contents: Callable[[Sequence[int]], AsyncIterator[memoryview]],
) -> AsyncGenerator[ReadPiece, None]:
    """Yield pieces of blocks of a store or lender, which are held meanwhile; the stale ones come
    first.

    Args: contents: yields the bytes of each of these frames, in order.
    Raises: InvalidArgument, and what `contents` raises.
    """
    if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
        raise InvalidArgument("chunk_bytes", f"between 1 and {MAX_CHUNK_BYTES}")
    hold_id, held = source.hold(blocks)
    try:
        for at, holds in enumerate(held):
            if not holds:
                source.refused[GENERATION] += 1
                yield ReadPiece(at, 0, b"", is_stale=True)
        left = [at for at, holds in enumerate(held) if holds]
        places = iter(left)
        async for content in contents([blocks[at].frame for at in left]):
            at = next(places)
            for offset in range(0, source.frame_bytes, chunk_bytes):
                yield ReadPiece(at, offset, bytes(content[offset : offset + chunk_bytes]))
    finally:
        source.unhold(hold_id)
