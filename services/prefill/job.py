"""One prefill request as its worker keeps it: what was asked, where it stands, what it holds.

Values and one record; no I/O. The states are explained in services/prefill/worker.py. Belongs to
the loop's thread.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.outputs import FilledBlock, RequestOutput, TokenLogprobs
from engine.request import Beam, Sampling
from process import spans
from process.deadline import Deadline
from process.errors import Internal
from process.spans import Span
from services.prefill.early_handles import EarlyHandles
from services.prefill.lent_prompt import LentPrompt
from services.prefill.pins import Pin, Pins
from services.worker.block_writer import BlockWriter
from services.worker.chain import Chain
from services.worker.provenance import HandoverPath, Leg, StageClock
from services.worker.request_spans import TracedChunks
from services.worker.write_behind import WriteChain


class PrefillState(enum.Enum):
    """Where a request is; see the module of the worker."""

    QUEUED = "queued"
    FETCHING = "fetching"
    COMPUTING = "computing"
    STORING = "storing"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


BEFORE_FIRST = frozenset({PrefillState.QUEUED, PrefillState.FETCHING, PrefillState.COMPUTING})
"""States in which the first tokens are not drawn."""

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
    """Where part of the prefix lies by the router's index: a hint."""

    node_id: str
    store_address: str
    store_incarnation: bytes
    first_block: int
    num_blocks: int

    @property
    def end_block(self) -> int:
        return self.first_block + self.num_blocks


@dataclass(frozen=True)
class PrefillAsk:
    """One prompt to prefill, and how many samples of it shall draw their first token."""

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
    """In order, without gaps from block 0."""

    @property
    def num_firsts(self) -> int:
        """Events with a first token. A beam search has one, for all of its beams."""
        return 1 if self.beam is not None else self.num_samples

    @property
    def context(self) -> tuple[int, ...]:
        """All tokens that are known before the draw."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_context_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_fetchable_tokens(self) -> int:
        """Leading ones that need not be computed here: the last one's logits draw the next, and log
        probabilities take those of all."""
        return 0 if self.prompt_logprobs is not None else self.num_context_tokens - 1


Firsts = Sequence[RequestOutput]
"""The event with the first token of each sample, in their order."""


@dataclass(eq=False)
class PrefillJob:
    """The record of one request."""

    ask: PrefillAsk
    engine_id: str
    deadline: Deadline
    leg: Leg
    pins: Pins
    early: EarlyHandles
    first: asyncio.Future[Firsts]
    firsts: dict[int, RequestOutput] = field(default_factory=dict)
    """Of the samples that have drawn, until all have."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """That are not shown yet."""
    last_filled: Sequence[FilledBlock] = ()
    """Full blocks of the step that drew the first tokens: lent at once, stored behind that."""
    clock: StageClock = field(default_factory=StageClock)
    state: PrefillState = PrefillState.QUEUED
    chain_hashes: Sequence[bytes] = ()
    """Of the context's full blocks."""
    place: Pin | None = None
    """Where its new blocks go; None: no store takes them."""
    writer: BlockWriter | None = None
    """Where the handle names what lies in the store."""
    behind: WriteChain | None = None
    """Where no handle waits for the store."""
    lent: LentPrompt | None = None
    """Where the way to decode is the direct one."""
    span: Span = field(default_factory=spans.current_span)
    chunks: TracedChunks = field(init=False)
    handed_over: frozenset[str] = frozenset()
    """Leases that are the handle's; it counts once the request is DONE."""

    def num_to_compute(self, block_size: int) -> int:
        """Context tokens that neither this worker had nor a store should have; at least the last
        one, whose logits are needed."""
        num_elsewhere = sum(run.num_blocks for run in self.ask.prefix_runs) * block_size
        num_known = max(num_elsewhere, self.leg.num_tokens_local)
        return max(1, self.ask.num_context_tokens - num_known)

    def __post_init__(self) -> None:
        self.chunks = TracedChunks(self.span, self.ask.num_context_tokens)

    def move(self, state: PrefillState) -> None:
        """Raises: Internal for what is no transition."""
        if state not in ALLOWED[self.state]:
            raise Internal(
                f"{self.engine_id}: {self.state.value} -> {state.value} is no transition"
            )
        self.state = state
