"""PrefillRequest: one prefill request's state and resources at the worker; PrefillRequestSpec: its
parameters. services/prefill/worker.py describes the states.

PrefixLeases: the leases that the request holds in stores, besides its writer's. `add` when a store
has answered a match -> `take` by the writer that continues under its lease, or `keep`, which
releases all others -> `hand_over` (the handle names it) or `release` (the request ended otherwise).
After `start_renewing` the held leases do not expire. Invariant: a granted lease belongs to
PrefixLeases, to the writer or to the handle, or is being released.

PartialHandleSchedule: when to send partial handles while prefill still runs. Invariants: at most
one per engine step, besides the first; and each names over a sixteenth more than the one before. A
handle names all blocks stored so far, so without the second rule a prompt of n chunks would cost n
* n / 2 chunks' worth of references; with it about 17 n.

Values and state without I/O, except the leases. Used on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from engine.outputs import FilledBlock, PositionLogprobs, RequestOutput
from engine.request import Beam, Sampling
from kvstore.block_refs import Block
from kvstore.client import KvStoreClient
from process import trace_spans
from process.background_tasks import end_tasks, start_task
from process.deadline import Deadline
from process.rpc_errors import BatonError, Internal
from process.trace_spans import Span
from services.prefill.lending import LentPrompt
from services.worker.provenance import HandoverPath, LegProvenance, StageClock, TracedChunks
from services.worker.runtime import Chain
from services.worker.store_pool import StoreConnector
from services.worker.store_writer import RENEWALS_PER_TTL, BlockWriter, ReleaseLater, WriteChain

MIN_RENEWAL_S = 0.01
"""Shortest time between renewals in seconds, however little of the request's time is left."""


@dataclass(eq=False)
class PrefixLease:
    """Leading blocks of a prompt in one store, held by one lease (empty: no block is pinned)."""

    client: KvStoreClient
    lease_id: str
    refs: tuple[Block, ...]
    release_later: ReleaseLater
    """Function that releases leases of the client in the background."""
    num_hits: int = 0
    """Number of earlier matches of the last of `refs`."""

    def release(self) -> None:
        """Release the lease in the background."""
        self.release_later(self.client, [self.lease_id])


class PrefixLeases:
    """Leases of one request, renewed together and released or handed over at its end."""

    def __init__(
        self,
        connector: StoreConnector,
        *,
        ttl_s: Callable[[], float],
        renew_budget_s: float,
        deadline: Deadline,
    ) -> None:
        """Create without pins. ttl_s: lease time in seconds from each renewal on."""
        self._connector = connector
        self._ttl_s = ttl_s
        self._renew_budget_s = renew_budget_s
        self._deadline = deadline
        self._pins: list[PrefixLease] = []
        self._renewing: asyncio.Task[None] | None = None

    @property
    def held(self) -> tuple[PrefixLease, ...]:
        """Return the held pins in the order in which they were added."""
        return tuple(self._pins)

    def add(self, pin: PrefixLease) -> None:
        """Add a pin that a store has granted for this request."""
        self._pins.append(pin)

    def anew(self, pin: PrefixLease) -> PrefixLease | None:
        """Return an empty pin at the same store, for a pin that is held no longer; None: the store
        is gone."""
        if pin.client.broken is not None:
            return None
        self.add(PrefixLease(pin.client, "", (), pin.release_later))
        return self._pins[-1]

    def take(self, pin: PrefixLease) -> PrefixLease:
        """Remove a pin, whose lease is the caller's from here on."""
        self._pins.remove(pin)
        return pin

    def keep(self, pins: Collection[PrefixLease]) -> None:
        """Release all pins but these, at once."""
        for pin in [pin for pin in self._pins if pin not in pins]:
            self._give_up(pin)

    def start_renewing(self) -> None:
        """Start to renew the held leases in time. Idempotent."""
        if self._renewing is None:
            self._renewing = start_task(self._renew_often(), "prefix leases")

    async def renew(self) -> None:
        """Renew all leases now, concurrently. One that cannot be renewed is no longer held."""
        await asyncio.gather(*(self._renew(pin) for pin in self.held))

    def hand_over(self, lease_ids: Collection[str]) -> tuple[PrefixLease, ...]:
        """Hand these leases over to a handle and release the others. Returns: the pins handed
        over."""
        handed_over = tuple(pin for pin in self._pins if pin.lease_id in lease_ids)
        for pin in handed_over:
            self._pins.remove(pin)
        self.release()
        return handed_over

    def release(self) -> None:
        """Release all held leases at the end. Idempotent."""
        pins, self._pins = self._pins, []
        task, self._renewing = self._renewing, None
        if task is None:
            for pin in pins:
                pin.release()
        else:
            self._connector.spawn(self._release_after_end(task, pins))

    # ---- inside

    def _give_up(self, pin: PrefixLease) -> None:
        self._pins.remove(pin)
        pin.release()

    async def _renew_often(self) -> None:
        while True:
            # The request's deadline is the end of it: then nothing is worth a renewal.
            await asyncio.sleep(max(self._ttl_s() / RENEWALS_PER_TTL, MIN_RENEWAL_S))
            await self.renew()

    async def _renew(self, pin: PrefixLease) -> None:
        if not pin.lease_id:
            return
        if pin.client.broken is not None:
            self._lose(pin)
            return
        deadline = self._deadline.sooner(self._renew_budget_s)
        had_s = deadline.left_s()
        try:
            await pin.client.renew(pin.lease_id, ttl_s=self._ttl_s(), deadline=deadline)
        except BatonError as error:
            self._connector.suspect(pin.client, error, had_s=had_s)
            self._lose(pin)

    def _lose(self, pin: PrefixLease) -> None:
        """Remove a pin that can no longer be used; its lease expires or is gone already."""
        if pin in self._pins:
            self._give_up(pin)

    async def _release_after_end(self, task: asyncio.Task[None], pins: list[PrefixLease]) -> None:
        await end_tasks([task])
        for pin in pins:
            pin.release()


MIN_GROWTH = 16
"""Least growth of a handle over the previous one: one block in so many. Guessed: decode then
fetches at most that share of the prompt at the end, and making the handles of a prompt of 8,192
blocks takes some 1 s of a CPU in all (8 us a reference, measured on two shared cores)."""


class PartialHandleSchedule:
    """Schedule of one request's partial handles. `news` is set whenever `is_due` may have become
    true."""

    def __init__(self, *, wanted: bool) -> None:
        """Create a schedule. wanted: False where no KV will be handed over; then no handle is ever
        due."""
        self.news = asyncio.Event()
        self._wanted = wanted
        self._num_stored = 0
        self._num_told = 0
        self._has_stepped = True

    @property
    def is_due(self) -> bool:
        has_more = self._num_stored - self._num_told > self._num_told // MIN_GROWTH
        return self._wanted and self._has_stepped and has_more

    def stored(self, num_blocks: int) -> None:
        """Record that the prompt's first `num_blocks` blocks can be fetched now."""
        self._num_stored = num_blocks
        self._wake()

    def stepped(self) -> None:
        """Record that the engine has made a step for this request."""
        self._has_stepped = True
        self._wake()

    def told(self, num_blocks: int) -> None:
        """Record that a partial handle of `num_blocks` blocks is being sent."""
        self._num_told = max(self._num_told, num_blocks)
        self._has_stepped = False

    def _wake(self) -> None:
        if self.is_due:
            self.news.set()


class PrefillState(enum.Enum):
    """State of a prefill request; services/prefill/worker.py describes the transitions."""

    QUEUED = "queued"
    FETCHING = "fetching"
    COMPUTING = "computing"
    STORING = "storing"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


BEFORE_FIRST = frozenset({PrefillState.QUEUED, PrefillState.FETCHING, PrefillState.COMPUTING})
"""States before the first tokens are drawn."""

_OVER = frozenset({PrefillState.CANCELLED, PrefillState.FAILED})
ALLOWED: dict[PrefillState, frozenset[PrefillState]] = {
    PrefillState.QUEUED: frozenset({PrefillState.FETCHING}) | _OVER,
    PrefillState.FETCHING: frozenset({PrefillState.COMPUTING}) | _OVER,
    PrefillState.COMPUTING: frozenset({PrefillState.STORING}) | _OVER,
    PrefillState.STORING: frozenset({PrefillState.DONE}) | _OVER,
    PrefillState.DONE: frozenset(),
    PrefillState.CANCELLED: frozenset(),
    PrefillState.FAILED: frozenset(),
}


@dataclass(frozen=True)
class PrefixRun:
    """Location of part of the prefix according to the router's index: a hint."""

    node_id: str
    store_address: str
    store_incarnation: bytes
    first_block: int
    num_blocks: int

    @property
    def end_block(self) -> int:
        return self.first_block + self.num_blocks


@dataclass(frozen=True)
class PrefillRequestSpec:
    """One prompt to prefill, and the number of samples of which to draw the first token."""

    request_id: str
    tenant: str
    adapter: str
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    sampling: Sampling
    chain: Chain
    priority: int
    wants_handle: bool
    handover: HandoverPath = HandoverPath.UNSPECIFIED
    num_samples: int = 1
    beam: Beam | None = None
    wants_embedding: bool = False
    prompt_logprobs: int | None = None
    prefix_runs: tuple[PrefixRun, ...] = ()
    """Hints in order of blocks, without gaps from block 0."""

    @property
    def num_firsts(self) -> int:
        """Return the number of events with a first token: one per sample, but one for all beams of
        a beam search."""
        return 1 if self.beam is not None else self.num_samples

    @property
    def context(self) -> tuple[int, ...]:
        """Return all tokens that are known before the draw: the prompt and earlier output."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_context_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_fetchable_tokens(self) -> int:
        """Return the number of leading tokens that need not be computed here: all but the last,
        whose logits draw the next token; 0 where prompt log-probabilities are requested, which need
        the logits of all."""
        return 0 if self.prompt_logprobs is not None else self.num_context_tokens - 1


Firsts = Sequence[RequestOutput]
"""Events with the first token of each sample, in order of samples."""


@dataclass(eq=False)
class PrefillRequest:
    """State and resources of one prefill request."""

    ask: PrefillRequestSpec
    engine_id: str
    deadline: Deadline
    leg: LegProvenance
    pins: PrefixLeases
    early: PartialHandleSchedule
    first: asyncio.Future[Firsts]
    firsts: dict[int, RequestOutput] = field(default_factory=dict)
    """First tokens of the samples that have drawn, until all have."""
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    """Prompt log-probabilities that are not sent yet."""
    last_filled: Sequence[FilledBlock] = ()
    """Full blocks of the step that drew the first tokens: lent at once, stored afterwards."""
    clock: StageClock = field(default_factory=StageClock)
    state: PrefillState = PrefillState.QUEUED
    chain_hashes: Sequence[bytes] = ()
    """Chain hashes of the context's full blocks."""
    place: PrefixLease | None = None
    """Place where new blocks are stored; None: no store takes them."""
    writer: BlockWriter | None = None
    """Writer of the blocks, where the handle names the store."""
    behind: WriteChain | None = None
    """Background chain of the blocks, where no handle waits for the store."""
    lent: LentPrompt | None = None
    """Lent blocks, where the direct path is used."""
    span: Span = field(default_factory=trace_spans.current_span)
    chunks: TracedChunks = field(init=False)
    handed_over: frozenset[str] = frozenset()
    """Leases that belong to the handle; they count once the request is DONE."""

    def num_to_compute(self, block_size: int) -> int:
        """Return the number of context tokens that neither this worker nor a store should have; at
        least the last one, whose logits are needed."""
        num_elsewhere = sum(run.num_blocks for run in self.ask.prefix_runs) * block_size
        num_known = max(num_elsewhere, self.leg.num_tokens_local)
        return max(1, self.ask.num_context_tokens - num_known)

    def __post_init__(self) -> None:
        self.chunks = TracedChunks(self.span, self.ask.num_context_tokens)

    def move(self, state: PrefillState) -> None:
        """Change the state. Raises: Internal for an invalid transition."""
        if state not in ALLOWED[self.state]:
            raise Internal(
                f"{self.engine_id}: {self.state.value} -> {state.value} is no transition"
            )
        self.state = state
