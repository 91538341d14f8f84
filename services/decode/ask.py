"""DecodeAsk: parameters of one prompt's decode request."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import Beam, Request, Sampling
from kvstore.block_hash import HashTurns
from process.trace_spans import TraceContext
from services.worker.chain import Chain


@dataclass(frozen=True)
class DecodeAsk:
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
