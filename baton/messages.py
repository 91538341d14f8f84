"""What a client gets back, as plain frozen values; the protos stop here.

A generation is a run of `Chunk`s; the last one's `end` says why it ended, what it cost, where its
KV came from and where its time went. A `Completion` is all of them put together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from protos import common_pb2, inference_pb2


@dataclass(frozen=True)
class Usage:
    """Token counts of one request."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Prompt tokens that nobody computed for this request."""


@dataclass(frozen=True)
class TierCount:
    """What one tier of one store gave."""

    tier: str
    """host, file or object."""
    node_id: str
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True)
class KvLeg:
    """Where one worker's share of the prompt's KV came from."""

    role: str
    worker_id: str
    incarnation: str
    transport: str
    dtype: str
    num_tokens_computed: int
    num_tokens_local: int
    from_store: tuple[TierCount, ...]
    num_bytes_read: int
    num_bytes_written: int
    recomputed: Mapping[str, int]
    """Blocks that failed verification and were computed again, by reason."""
    not_stored: Mapping[str, int] = field(default_factory=dict)
    """Blocks that this worker should have handed over and could not store, by reason."""

    @property
    def num_tokens_from_store(self) -> int:
        return sum(count.num_tokens for count in self.from_store)


@dataclass(frozen=True)
class Provenance:
    """The account of one request's prompt tokens by source."""

    model: str
    model_fingerprint: str
    num_prompt_tokens: int
    legs: tuple[KvLeg, ...]

    @property
    def num_bytes_moved(self) -> int:
        """Into and out of stores, over all legs."""
        return sum(leg.num_bytes_read + leg.num_bytes_written for leg in self.legs)


@dataclass(frozen=True)
class End:
    """What the last message of a generation says."""

    finish_reason: str
    """eos, stop_token, stop_string, length, cancelled, grammar or policy."""
    usage: Usage
    provenance: Provenance
    times: Mapping[str, float]
    """Seconds by stage, in the order of the stages."""
    seed: int
    """With it and the same request the same tokens come again."""
    stop_token_id: int | None = None
    stop_string: str = ""


@dataclass(frozen=True)
class Chunk:
    """What became visible at once."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    end: End | None = None
    """Set on the last chunk only."""


@dataclass(frozen=True)
class Completion:
    """A whole generation."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    provenance: Provenance
    times: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    stop_token_id: int | None = None
    stop_string: str = ""


def chunk_from(reply: inference_pb2.GenerateResponse) -> Chunk:
    """One message of the stream as a value."""
    end = None
    if reply.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED:
        end = End(
            finish_reason=_short(common_pb2.FinishReason, reply.finish_reason, "FINISH_REASON_"),
            usage=Usage(
                num_prompt_tokens=reply.usage.num_prompt_tokens,
                num_output_tokens=reply.usage.num_output_tokens,
                num_cached_tokens=reply.usage.num_cached_tokens,
            ),
            provenance=provenance_from(reply.provenance),
            times={time.stage: time.seconds for time in reply.times},
            seed=reply.seed,
            stop_token_id=reply.stop_token_id if reply.HasField("stop_token_id") else None,
            stop_string=reply.stop_string,
        )
    return Chunk(reply.request_id, reply.text, tuple(reply.token_ids), end)


def provenance_from(message: common_pb2.Provenance) -> Provenance:
    """The provenance message as a value."""
    return Provenance(
        model=message.model,
        model_fingerprint=message.model_fingerprint,
        num_prompt_tokens=message.num_prompt_tokens,
        legs=tuple(_leg(leg) for leg in message.legs),
    )


def _leg(leg: common_pb2.KvLeg) -> KvLeg:
    return KvLeg(
        role=leg.role,
        worker_id=leg.worker_id,
        incarnation=leg.incarnation,
        transport=leg.transport,
        dtype=leg.dtype,
        num_tokens_computed=leg.num_tokens_computed,
        num_tokens_local=leg.num_tokens_local,
        from_store=tuple(
            TierCount(
                tier=_short(common_pb2.Tier, count.tier, "TIER_"),
                node_id=count.node_id,
                num_tokens=count.num_tokens,
                num_bytes=count.num_bytes,
            )
            for count in leg.from_store
        ),
        num_bytes_read=leg.num_bytes_read,
        num_bytes_written=leg.num_bytes_written,
        recomputed={count.reason: count.num_blocks for count in leg.recomputed},
        not_stored={count.reason: count.num_blocks for count in leg.not_stored},
    )


def _short(enum: Any, number: int, prefix: str) -> str:
    return str(enum.Name(number)).removeprefix(prefix).lower()
