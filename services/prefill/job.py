"""PrefillAsk and PrefillJob: one prefill request's parameters, and its state and resources at the
worker.

Values and one record; no I/O. The states are explained in services/prefill/worker.py. Belongs to
the loop's thread.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.outputs import FilledBlock, PositionLogprobs, RequestOutput
from engine.request import Beam, Sampling
from process import trace_spans
from process.deadline import Deadline
from process.errors import Internal
from process.trace_spans import Span
from services.prefill.early_handles import EarlyHandles
from services.prefill.lent_prompt import LentPrompt
from services.prefill.pins import Pin, Pins
from services.worker.block_writer import BlockWriter
from services.worker.chain import Chain
from services.worker.provenance import HandoverPath, Leg, StageClock
from services.worker.request_spans import TracedChunks
from services.worker.write_behind import WriteChain


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
class PrefillAsk:
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
class PrefillJob:
    """State and resources of one prefill request."""

    ask: PrefillAsk
    engine_id: str
    deadline: Deadline
    leg: Leg
    pins: Pins
    early: EarlyHandles
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
    place: Pin | None = None
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
