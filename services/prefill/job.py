"""One prefill request as its worker keeps it: what was asked, where it stands, what it holds.

Values and one record; no I/O. The states are explained in services/prefill/worker.py. Belongs to
the loop's thread.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.request import Beam, RequestEvent, Sampling
from process.deadline import Deadline
from process.errors import Internal
from services.prefill.early_handles import EarlyHandles
from services.prefill.lent_prompt import LentPrompt
from services.prefill.pins import Pins
from services.worker.block_writer import BlockWriter
from services.worker.core import Chain
from services.worker.provenance import HandoverPath, Leg, StageClock


class PrefillState(enum.Enum):
    """Where a request is; see the module of the worker."""

    QUEUED = "queued"
    FETCHING = "fetching"
    COMPUTING = "computing"
    STORING = "storing"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"


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


Firsts = Sequence[RequestEvent]
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
    firsts: dict[int, RequestEvent] = field(default_factory=dict)
    """Of the samples that have drawn, until all have."""
    clock: StageClock = field(default_factory=StageClock)
    state: PrefillState = PrefillState.QUEUED
    writer: BlockWriter | None = None
    lent: LentPrompt | None = None
    """Where the way to decode is the direct one."""
    handed_over: frozenset[str] = frozenset()
    """Leases that are the handle's; it counts once the request is DONE."""

    def move(self, state: PrefillState) -> None:
        """Raises: Internal for what is no transition."""
        if state not in ALLOWED[self.state]:
            raise Internal(
                f"{self.engine_id}: {self.state.value} -> {state.value} is no transition"
            )
        self.state = state
