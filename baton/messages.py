"""What a client gets back, as plain frozen values; the protos stop here.

A generation is a run of `Chunk`s, of one sample or of several; the last one of each sample has an
`end` that says why it ended and what it cost, and the very last one of the request says where its
KV came from and where its time went, too. A `Completion` is all of one sample put together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import json_format

from baton import errors
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
    """What one tier of one store gave, or a worker that lends its own blocks."""

    tier: str
    """device, host, file or object."""
    node_id: str
    num_tokens: int
    num_bytes: int
    transport: str = ""
    """By which they were read."""


@dataclass(frozen=True)
class TransportCount:
    """What one worker moved over one transport."""

    transport: str
    num_bytes_read: int
    num_bytes_written: int


@dataclass(frozen=True)
class KvLeg:
    """Where one worker's share of the prompt's KV came from."""

    role: str
    worker_id: str
    incarnation: str
    transport: str
    """Every transport that moved bytes, sorted, with ", " between; empty: none was moved."""
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
    num_tokens_early: int = 0
    """Of those from the store: fetched while prefill still ran."""
    num_blocks_written_back: int = 0
    """Full blocks of the answer that were stored for the next turn."""
    handover: str = ""
    """Of a prefill worker, which way its handle went: store or direct."""
    num_tokens_direct: int = 0
    """Of those from the store: read out of the prefill worker's own cache."""
    num_blocks_behind: int = 0
    """Of a direct handover: blocks that were not in the store yet when the handle went out."""
    ended_by: str = ""
    """Why the answer went on at another worker: "moved", since this one was leaving, or
    "worker_lost". Then, without an account, all numbers are 0. Empty: it did not."""
    transports: tuple[TransportCount, ...] = ()
    """Its bytes by transport, sorted."""

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
    adapter_digest: str = ""
    """Of the LoRA adapter's content, hex; empty: none."""

    @property
    def num_bytes_moved(self) -> int:
        """Into and out of stores, over all legs."""
        return sum(leg.num_bytes_read + leg.num_bytes_written for leg in self.legs)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities of one place under the model's own distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The best as (token id, logprob), best first."""


@dataclass(frozen=True)
class StepTrace:
    """How one token came to be; each field means what `StepTrace` in protos/common.proto says."""

    position: int
    token_id: int
    raw_logprob: float
    processed_logprob: float
    top: tuple[tuple[int, float], ...]
    support_size: int
    processors: tuple[str, ...]
    rng_key: int | None
    is_forced: bool = False


@dataclass(frozen=True)
class End:
    """What the last message of a sample says."""

    finish_reason: str
    """eos, stop_token, stop_string, length, cancelled, grammar, policy or tool_call."""
    usage: Usage
    provenance: Provenance | None
    """Of the request as a whole. None while other samples go on."""
    times: Mapping[str, float]
    """Seconds by stage, in the order of the stages; with `provenance` only."""
    seed: int
    """With it and the same request the same tokens come again."""
    stop_token_id: int | None = None
    stop_string: str = ""
    score: float | None = None
    """Of a beam search's hypothesis."""
    prompt_token_ids: tuple[int, ...] = ()
    """The prompt as the model got it; with `provenance` and `trace` only."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """SamplingParams with every default filled in, as JSON values; with `provenance` and `trace`
    only."""


@dataclass(frozen=True)
class Chunk:
    """What became visible at once."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    end: End | None = None
    """Set on the last chunk of a sample only."""
    sample_index: int = 0
    """Which of the request's samples this is of."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token where asked for."""
    traces: tuple[StepTrace, ...] = ()
    """One per token where asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's next tokens where asked for, in chunks without text; NaN for the first."""


@dataclass(frozen=True)
class Completion:
    """One sample of a generation, whole. Provenance and times are the request's."""

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
    sample_index: int = 0
    score: float | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    traces: tuple[StepTrace, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """One per token of the prompt where asked for, with sample 0; NaN for the first."""
    prompt_token_ids: tuple[int, ...] = ()
    """With `trace` only."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """What it was drawn with, every default filled in, as JSON values; with `trace` only."""


@dataclass(frozen=True)
class Embedding:
    """A prompt as one point: the model's hidden state behind its last token."""

    request_id: str
    values: tuple[float, ...]
    """Of length 1."""
    usage: Usage
    provenance: Provenance
    times: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage."""


def embedding_from(reply: inference_pb2.GenerateResponse) -> Embedding:
    """The only message of a request for an embedding. Raises: Internal when it holds none."""
    if not reply.embedding:
        raise errors.Internal("the router's answer holds no embedding; see its log")
    return Embedding(
        reply.request_id,
        tuple(reply.embedding),
        _usage(reply.usage),
        provenance_from(reply.provenance),
        {time.stage: time.seconds for time in reply.times},
    )


def chunk_from(reply: inference_pb2.GenerateResponse) -> Chunk:
    """One message of the stream as a value."""
    end = None
    if reply.finish_reason != common_pb2.FINISH_REASON_UNSPECIFIED:
        end = End(
            finish_reason=_short(common_pb2.FinishReason, reply.finish_reason, "FINISH_REASON_"),
            usage=_usage(reply.usage),
            provenance=(
                provenance_from(reply.provenance) if reply.HasField("provenance") else None
            ),
            times={time.stage: time.seconds for time in reply.times},
            seed=reply.seed,
            stop_token_id=reply.stop_token_id if reply.HasField("stop_token_id") else None,
            stop_string=reply.stop_string,
            score=reply.score if reply.HasField("score") else None,
            prompt_token_ids=tuple(reply.prompt_token_ids),
            sampling=json_format.MessageToDict(reply.sampling, preserving_proto_field_name=True),
        )
    return Chunk(
        reply.request_id,
        reply.text,
        tuple(reply.token_ids),
        end,
        reply.sample_index,
        tuple(_logprobs(entry) for entry in reply.logprobs),
        tuple(_trace(trace) for trace in reply.traces),
        tuple(_logprobs(entry) for entry in reply.prompt_logprobs),
    )


def completions_from(chunks: Iterable[Chunk]) -> list[Completion]:
    """All chunks of one generation as one value for each sample, in their order.

    Raises: Internal when an end is missing.
    """
    parts: dict[int, list[Chunk]] = {}
    account: End | None = None
    for chunk in chunks:
        parts.setdefault(chunk.sample_index, []).append(chunk)
        account = chunk.end if chunk.end is not None and chunk.end.provenance else None
    if account is None:
        raise errors.Internal("the stream ended without its last message; see the router's log")
    return [_completion(parts[index], account) for index in sorted(parts)]


def _completion(chunks: Sequence[Chunk], account: End) -> Completion:
    last = chunks[-1]
    if last.end is None or account.provenance is None:
        raise errors.Internal(f"sample {last.sample_index} has no end; see the router's log")
    return Completion(
        request_id=last.request_id,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        finish_reason=last.end.finish_reason,
        usage=last.end.usage,
        provenance=account.provenance,
        times=account.times,
        seed=last.end.seed,
        stop_token_id=last.end.stop_token_id,
        stop_string=last.end.stop_string,
        sample_index=last.sample_index,
        score=last.end.score,
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        traces=tuple(trace for chunk in chunks for trace in chunk.traces),
        prompt_logprobs=tuple(entry for chunk in chunks for entry in chunk.prompt_logprobs),
        prompt_token_ids=account.prompt_token_ids,
        sampling=account.sampling,
    )


def _usage(usage: common_pb2.Usage) -> Usage:
    return Usage(usage.num_prompt_tokens, usage.num_output_tokens, usage.num_cached_tokens)


def _logprobs(entry: common_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(entry.chosen.token_id, entry.chosen.logprob, _pairs(entry.top))


def _trace(trace: common_pb2.StepTrace) -> StepTrace:
    return StepTrace(
        position=trace.position,
        token_id=trace.token_id,
        raw_logprob=trace.raw_logprob,
        processed_logprob=trace.processed_logprob,
        top=_pairs(trace.top),
        support_size=trace.support_size,
        processors=tuple(trace.processors),
        rng_key=trace.rng_key if trace.HasField("rng_key") else None,
        is_forced=trace.is_forced,
    )


def _pairs(top: Iterable[common_pb2.TokenLogprob]) -> tuple[tuple[int, float], ...]:
    return tuple((entry.token_id, entry.logprob) for entry in top)


def provenance_from(message: common_pb2.Provenance) -> Provenance:
    """The provenance message as a value."""
    return Provenance(
        model=message.model,
        model_fingerprint=message.model_fingerprint,
        num_prompt_tokens=message.num_prompt_tokens,
        legs=tuple(_leg(leg) for leg in message.legs),
        adapter_digest=message.adapter_digest,
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
                transport=count.transport,
            )
            for count in leg.from_store
        ),
        num_bytes_read=leg.num_bytes_read,
        num_bytes_written=leg.num_bytes_written,
        recomputed={count.reason: count.num_blocks for count in leg.recomputed},
        not_stored={count.reason: count.num_blocks for count in leg.not_stored},
        num_tokens_early=leg.num_tokens_early,
        num_blocks_written_back=leg.num_blocks_written_back,
        handover=(
            _short(common_pb2.HandoverPath, leg.handover, "HANDOVER_PATH_") if leg.handover else ""
        ),
        num_tokens_direct=leg.num_tokens_direct,
        num_blocks_behind=leg.num_blocks_behind,
        ended_by=leg.ended_by,
        transports=tuple(
            TransportCount(each.transport, each.num_bytes_read, each.num_bytes_written)
            for each in leg.transports
        ),
    )


def _short(enum: Any, number: int, prefix: str) -> str:
    return str(enum.Name(number)).removeprefix(prefix).lower()
