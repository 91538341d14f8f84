"""One request as the router serves it, and what it is served with. Values; no work of their own."""

from __future__ import annotations

from dataclasses import dataclass

from protos import common_pb2
from services.router.candidates import NO_ADAPTER, Adapter, Candidates
from services.router.config import HandoverMode, RouterCosts, RouterTimes
from services.router.decode_streams import DecodeStreams
from services.router.lease_release import LeaseRelease
from services.router.lookup import PrefixLookup
from services.router.prefill_client import PrefillClient
from services.router.prefix_runs import Prefixes


@dataclass(frozen=True)
class Job:
    """One request, validated, with nothing left to default."""

    request_id: str
    leg_id: str
    """Names this attempt at the workers, where ids of all tenants and attempts meet."""
    tenant: str
    tenant_salt: bytes
    prompt_token_ids: tuple[int, ...]
    sampling: common_pb2.SamplingParams
    affinity: bytes
    priority: int
    adapter: Adapter = NO_ADAPTER

    @property
    def needs_decode(self) -> bool:
        # Hypotheses are compared at the end, where the beams are, even of one token.
        return self.sampling.max_tokens > 1 or self.sampling.HasField("beam")

    @property
    def num_sequences(self) -> int:
        """Outputs that take blocks at the same time."""
        return max(self.sampling.n, self.sampling.beam.num_beams, 1)


@dataclass(frozen=True)
class Cluster:
    """What every request works with."""

    candidates: Candidates
    streams: DecodeStreams
    prefills: PrefillClient
    lookup: PrefixLookup
    leases: LeaseRelease
    costs: RouterCosts
    times: RouterTimes
    model: str
    handover: HandoverMode = "auto"

    async def find_prefixes(self, job: Job) -> Prefixes:
        """Where the job's prefix lies, by the index; nothing when the index does not answer."""
        return await self.lookup.find(
            job.prompt_token_ids,
            job.tenant_salt,
            self.candidates.layouts(),
            job.adapter.digest,
        )
