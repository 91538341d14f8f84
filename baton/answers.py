"""Answers as a client gets them: streamed chunks, completions, usage, as frozen values; code above
this module sees no protobuf messages.

An answer is a sequence of `Chunk`s, of one sample or several. The last chunk of each sample has an
`end` with the finish reason and the usage; the last chunk of the request also has its provenance
and times there. A `Completion` is all chunks of one sample put together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from google.protobuf import json_format

from baton import errors
from protos import common_pb2, inference_pb2

Value = TypeVar("Value")


@dataclass(frozen=True)
class Usage:
    """Token counts of one request."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Prompt tokens that came from a cache."""


@dataclass(frozen=True)
class TierCount:
    """Prompt tokens that a worker read from one tier of a store, or from another worker's cache."""

    tier: str
    """Tier that the tokens were read from: device, host, file or object."""
    node_id: str
    num_tokens: int
    num_bytes: int
    transport: str = ""
    """Transport that read them."""


@dataclass(frozen=True)
class TransportCount:
    """Bytes that one worker moved over one transport."""

    transport: str
    num_bytes_read: int
    num_bytes_written: int


@dataclass(frozen=True)
class KvLeg:
    """The source of the KV of a prompt at one worker."""

    role: str
    worker_id: str
    incarnation: str
    transport: str
    """The transports that moved bytes, sorted, joined by ", "; empty: no bytes were moved."""
    dtype: str
    num_tokens_computed: int
    num_tokens_local: int
    from_store: tuple[TierCount, ...]
    num_bytes_read: int
    num_bytes_written: int
    recomputed: Mapping[str, int]
    """Blocks that failed verification and were computed again, by reason."""
    not_stored: Mapping[str, int] = field(default_factory=dict)
    """Blocks that this worker should have stored and could not, by reason."""
    num_tokens_early: int = 0
    """Tokens of `from_store` that were read while prefill still ran."""
    num_blocks_written_back: int = 0
    """Full blocks of the answer that this worker stored for later requests."""
    handover: str = ""
    """Path of the KV from a prefill worker to decode: store or direct."""
    num_tokens_direct: int = 0
    """Tokens of `from_store` that were read from the prefill worker's own cache."""
    num_blocks_behind: int = 0
    """Blocks of a direct handover that were not in the store yet when the handle was sent."""
    ended_by: str = ""
    """Why the answer continued at another worker: "moved" (this worker drained) or "worker_lost"
    (then the numbers are 0 if the worker sent no account). Empty: it did not continue elsewhere."""
    transports: tuple[TransportCount, ...] = ()
    """Bytes that this worker moved, by transport, sorted."""

    @property
    def num_tokens_from_store(self) -> int:
        return sum(count.num_tokens for count in self.from_store)


@dataclass(frozen=True)
class Provenance:
    """The source of the KV of a request's prompt, with a leg for each worker."""

    model: str
    model_fingerprint: str
    num_prompt_tokens: int
    legs: tuple[KvLeg, ...]
    adapter_digest: str = ""
    """Digest of the LoRA adapter's content, in hex; empty: no adapter."""

    @property
    def num_bytes_moved(self) -> int:
        """Bytes read and written, over all legs."""
        return sum(leg.num_bytes_read + leg.num_bytes_written for leg in self.legs)


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logarithms of token probabilities at one position, before sampling processors."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens as (token id, logprob), the most likely first."""


@dataclass(frozen=True)
class StepTrace:
    """The account of how one token was sampled. The fields are those of `StepTrace` in
    protos/common.proto."""

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
    """The end of a sample: why it ended, and with it what is known of the request."""

    finish_reason: str
    """Why the sample ended: eos, stop_token, stop_string, length, cancelled, grammar, policy or
    tool_call."""
    usage: Usage
    provenance: Provenance | None
    """Provenance of the whole request; None while other samples continue."""
    times: Mapping[str, float]
    """Time of the request in seconds, by stage, in the order of the stages; only together with
    `provenance`."""
    seed: int
    """Seed of the request: the same request with it gives the same tokens again."""
    stop_token_id: int | None = None
    stop_string: str = ""
    score: float | None = None
    """Score of a beam search's hypothesis; None: no beam search."""
    prompt_token_ids: tuple[int, ...] = ()
    """The prompt as token ids; only together with `provenance`, where `trace` was asked for."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """SamplingParams with every default filled in, as JSON values; only together with `provenance`,
    where `trace` was asked for."""


@dataclass(frozen=True)
class Chunk:
    """One message of an answer: the next tokens and text of a sample."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    end: End | None = None
    """The end of the sample; set on its last chunk only."""
    sample_index: int = 0
    """The index of the sample within the request."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities of each token, if asked for."""
    traces: tuple[StepTrace, ...] = ()
    """Account of how each token was sampled, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities of each of the next prompt tokens, if asked for, in chunks without text;
    NaN for the first token of the prompt."""


@dataclass(frozen=True)
class Completion:
    """One whole sample of a generation. Provenance and times are those of the request."""

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
    """Log probabilities of each prompt token, if asked for, with sample 0; NaN for the first."""
    prompt_token_ids: tuple[int, ...] = ()
    """The prompt as token ids; only where `trace` was asked for."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """SamplingParams with every default filled in, as JSON values; only where `trace` was asked
    for."""


@dataclass(frozen=True)
class Embedding:
    """The embedding of a prompt: the model's hidden state after its last token."""

    request_id: str
    values: tuple[float, ...]
    """The components of the embedding, normalized to the length 1."""
    usage: Usage
    provenance: Provenance
    times: Mapping[str, float] = field(default_factory=dict)
    """Time of the request in seconds, by stage."""


def embedding_from(reply: inference_pb2.GenerateResponse) -> Embedding:
    """Convert the only message of an answer to its embedding. Raises: Internal when it holds
    none."""
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
    """Convert a message of an answer to a `Chunk`."""
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
    """Join all chunks of one generation: a `Completion` for each sample, in their order. Raises:
    Internal when an end is missing."""
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
    return _copied(Usage, usage)


def _logprobs(entry: common_pb2.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(entry.chosen.token_id, entry.chosen.logprob, _pairs(entry.top))


def _trace(trace: common_pb2.StepTrace) -> StepTrace:
    return _copied(
        StepTrace,
        trace,
        top=_pairs(trace.top),
        processors=tuple(trace.processors),
        rng_key=trace.rng_key if trace.HasField("rng_key") else None,
    )


def _pairs(top: Iterable[common_pb2.TokenLogprob]) -> tuple[tuple[int, float], ...]:
    return tuple((entry.token_id, entry.logprob) for entry in top)


def provenance_from(message: common_pb2.Provenance) -> Provenance:
    """Convert a provenance message to a `Provenance`."""
    return _copied(Provenance, message, legs=tuple(_leg(leg) for leg in message.legs))


def _leg(leg: common_pb2.KvLeg) -> KvLeg:
    handover = ""
    if leg.handover:
        handover = _short(common_pb2.HandoverPath, leg.handover, "HANDOVER_PATH_")
    return _copied(
        KvLeg,
        leg,
        from_store=tuple(
            _copied(TierCount, count, tier=_short(common_pb2.Tier, count.tier, "TIER_"))
            for count in leg.from_store
        ),
        recomputed={count.reason: count.num_blocks for count in leg.recomputed},
        not_stored={count.reason: count.num_blocks for count in leg.not_stored},
        handover=handover,
        transports=tuple(_copied(TransportCount, each) for each in leg.transports),
    )


def _copied(kind: type[Value], message: Any, **others: Any) -> Value:
    """A value whose fields are those of the message of the same names, except `others`."""
    names = (each.name for each in fields(kind) if each.name not in others)  # type: ignore[arg-type]
    return kind(**{name: getattr(message, name) for name in names}, **others)


def _short(enum: Any, number: int, prefix: str) -> str:
    return str(enum.Name(number)).removeprefix(prefix).lower()
