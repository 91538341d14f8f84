"""DecodeRequestSpec: the parameters of one prompt's decode request; DecodeState: the states of a
decode request and their transitions, which services/decode/worker.py describes. Values.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from engine.request import Beam, Request, Sampling
from kvstore.block_hash import HashTurns
from process.trace_spans import TraceContext
from services.worker.runtime import Chain


class DecodeState(enum.Enum):
    """State of a decode request."""

    RESERVING = "reserving"
    RESERVED = "reserved"
    PREFETCHING = "prefetching"
    FETCHING = "fetching"
    RUNNING = "running"
    MOVING = "moving"
    FINISHED = "finished"
    MOVED = "moved"
    CANCELLED = "cancelled"
    FAILED = "failed"


_OVER = frozenset({DecodeState.CANCELLED, DecodeState.FAILED})
ALLOWED: dict[DecodeState, frozenset[DecodeState]] = {
    DecodeState.RESERVING: frozenset({DecodeState.RESERVED}) | _OVER,
    DecodeState.RESERVED: frozenset({DecodeState.PREFETCHING, DecodeState.FETCHING}) | _OVER,
    DecodeState.PREFETCHING: frozenset({DecodeState.RESERVED}) | _OVER,
    DecodeState.FETCHING: frozenset({DecodeState.RUNNING, DecodeState.MOVED}) | _OVER,
    DecodeState.RUNNING: frozenset({DecodeState.FINISHED, DecodeState.MOVING, DecodeState.MOVED})
    | _OVER,
    DecodeState.MOVING: frozenset({DecodeState.MOVED}) | _OVER,
    DecodeState.FINISHED: frozenset(),
    DecodeState.MOVED: frozenset(),
    DecodeState.CANCELLED: frozenset(),
    DecodeState.FAILED: frozenset(),
}


@dataclass(frozen=True)
class DecodeRequestSpec:
    """Parameters of a decode request: the samples of one prompt."""

    request_id: str
    tenant: str
    adapter: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    chain: Chain
    priority: int
    num_samples: int = 1
    beam: Beam | None = None
    has_begun: bool = False
    """Whether the client has seen a part of the answer, which another worker drew."""
    trace: TraceContext | None = None
    """Trace context of the router's span; None: the request is not traced."""

    async def request(self, engine_id: str, turns: HashTurns) -> Request:
        """Convert to an engine request with that id. A long prompt yields to the event loop
        meanwhile, so that steps' tokens are sent in between."""
        hashes = await self.chain.hashes_in_turns(self.prompt_token_ids, turns)
        return Request(
            request_id=engine_id,
            prompt_token_ids=self.prompt_token_ids,
            sampling=self.sampling,
            block_hasher=self.chain.hasher,
            prompt_hashes=tuple(hashes),
            cache_root=self.chain.root,
            priority=self.priority,
            num_samples=self.num_samples,
            beam=self.beam,
            adapter=self.chain.adapter_digest,
            owner=self.tenant,
        )
