"""One request as the router serves it, and what it is served with. Values; no work of their own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from protos import common_pb2
from services.router.candidates import NO_ADAPTER, Adapter, Candidates
from services.router.config import RouterTimes
from services.router.decode_streams import DecodeStreams
from services.router.lease_release import LeaseRelease
from services.router.lookup import PrefixLookup
from services.router.prefill_client import PrefillClient
from services.router.prefix_runs import NO_PREFIXES, Prefixes
from services.router.routing import Routing


@dataclass(frozen=True)
class Job:
    """One request, validated, with nothing left to default."""

    request_id: str
    leg_id: str
    """Names this attempt at the workers, where ids of all tenants and attempts meet."""
    tenant: str
    tenant_salt: bytes
    prompt_token_ids: Sequence[int]
    """Never changed; in production a field of the request's message."""
    sampling: common_pb2.SamplingParams
    affinity: bytes
    priority: int
    adapter: Adapter = NO_ADAPTER
    wants_embedding: bool = False
    """Of the prompt, and nothing else."""
    prompt_logprobs: int | None = None
    """Best tokens beside each of the prompt's; None: no log probabilities of it."""
    is_prompt_only: bool = False
    """The one token that is drawn means nothing, and is not shown."""

    @property
    def needs_decode(self) -> bool:
        # Hypotheses are compared at the end, where the beams are, even of one token.
        return self.sampling.max_tokens > 1 or self.sampling.HasField("beam")

    @property
    def may_skip_prefill(self) -> bool:
        """Whether a decode worker can compute the prompt and draw all of the answer. A beam search
        starts from what prefill found, and a prompt's own results are the prefill worker's."""
        is_told_of = self.wants_embedding or self.prompt_logprobs is not None
        return not (self.sampling.HasField("beam") or is_told_of)

    @property
    def num_sequences(self) -> int:
        """Outputs that take blocks at the same time."""
        return max(self.sampling.n, self.sampling.beam.num_beams, 1)


@dataclass(frozen=True)
class Cluster:
    """What every request works with."""

    routing: Routing
    streams: DecodeStreams
    prefills: PrefillClient
    lookup: PrefixLookup
    leases: LeaseRelease
    times: RouterTimes
    model: str
    max_failovers: int = 3
    """As in RouterLimits."""

    @property
    def candidates(self) -> Candidates:
        return self.routing.candidates

    async def find_prefixes(self, job: Job, drawn: Sequence[int] = ()) -> Prefixes:
        """Where the job's prefix lies, and what was drawn behind it, by the index; nothing when the
        index does not answer, or all of the prompt is to be computed."""
        if job.prompt_logprobs is not None:
            return NO_PREFIXES
        begin_s = time.perf_counter()
        prefixes = await self.lookup.find(
            job.prompt_token_ids,
            job.tenant_salt,
            self.candidates.layouts(),
            job.adapter.digest,
            drawn=drawn,
        )
        seconds = time.perf_counter() - begin_s
        self.routing.metrics.on_lookup(seconds, ok=self.lookup.problem is None)
        return prefixes
