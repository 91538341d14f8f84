"""DecodeAsk: what a router asks of a decode worker for one prompt, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import Beam, Request, Sampling
from kvstore.block_hash import HashTurns
from process.spans import TraceContext
from services.worker.chain import Chain


@dataclass(frozen=True)
class DecodeAsk:
    """The samples of one prompt to decode."""

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
    """Its client has seen a part of the answer, which another worker drew."""
    trace: TraceContext | None = None
    """Of the router's span; None: the request is not traced."""

    async def request(self, engine_id: str, turns: HashTurns) -> Request:
        """As the engine is asked, under that name. A long prompt takes some turns of the loop, so
        that those who decode are told of a step between them."""
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
