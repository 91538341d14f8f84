"""Conversion of a worker's values to protobuf: WorkerStatus and KvLeg.

Pure; shared by both roles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from google.protobuf import json_format

from engine.metrics import EngineStats
from engine.outputs import PositionLogprobs, SampleTrace
from engine.request import FinishReason, ModelInfo
from kvstore.link_quality import Link, Verdict
from protos import common_pb2
from services.worker.provenance import Leg, WorkerCounts

FINISH_REASONS: dict[FinishReason, common_pb2.FinishReason] = {
    FinishReason.EOS: common_pb2.FINISH_REASON_EOS,
    FinishReason.STOP_TOKEN: common_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.GRAMMAR: common_pb2.FINISH_REASON_GRAMMAR,
    FinishReason.POLICY: common_pb2.FINISH_REASON_POLICY,
}


def model_to_proto(model: ModelInfo) -> common_pb2.WorkerStatus:
    """Convert the model's description."""
    return common_pb2.WorkerStatus(
        model=model.model,
        model_fingerprint=model.fingerprint,
        tokenizer_digest=model.tokenizer_digest,
        dtype=model.dtype,
        device=model.device,
        block_size=model.block_size,
        context_window=model.context_window,
        vocab_size=model.vocab_size,
    )


def stats_to_proto(stats: EngineStats) -> common_pb2.WorkerStatus:
    """Convert the engine's statistics."""
    return common_pb2.WorkerStatus(
        num_blocks=stats.num_blocks,
        num_free_blocks=stats.num_free_blocks,
        num_cached_blocks=stats.num_cached_blocks,
        num_quarantined_blocks=stats.num_quarantined_blocks,
        num_waiting=stats.num_waiting + stats.num_reserved,
        num_running=stats.num_running,
        num_holding=stats.num_holding,
        num_steps=stats.num_computing_steps,
        step_s=stats.step_s,
        num_computed_tokens=stats.num_computed_tokens,
        num_decode_tokens=stats.num_decode_tokens,
    )


def counts_to_proto(counts: WorkerCounts) -> common_pb2.WorkerStatus:
    """Convert the counters of this worker life."""
    return common_pb2.WorkerStatus(
        num_prompt_tokens_computed=counts.num_prompt_tokens_computed,
        num_prompt_tokens_local=counts.num_prompt_tokens_local,
        num_prompt_tokens_from_store=counts.num_prompt_tokens_from_store,
        num_output_tokens=counts.num_output_tokens,
        recomputed=recomputed_to_proto(counts.recomputed),
    )


def status_to_json(status: common_pb2.WorkerStatus) -> str:
    """Convert a status to one line of protobuf JSON, as the registry stores it."""
    return json_format.MessageToJson(status, indent=None)


def recomputed_to_proto(recomputed: Counter[str]) -> list[common_pb2.RecomputeCount]:
    """Convert counts by reason, sorted by the reasons' names."""
    return [
        common_pb2.RecomputeCount(reason=reason, num_blocks=num_blocks)
        for reason, num_blocks in sorted(recomputed.items())
        if num_blocks
    ]


def links_to_proto(links: Iterable[tuple[Link, Verdict]]) -> list[common_pb2.LinkStatus]:
    """Convert the measured links to stores."""
    messages = []
    for link, verdict in links:
        message = common_pb2.LinkStatus(
            node_id=link.node_id,
            store_address=link.address,
            transport=link.transport,
            floor_bytes_per_s=verdict.floor_bytes_per_s,
            degraded=verdict.degraded,
            problem=link.problem,
            measured_unix_ms=link.measured_unix_ms,
        )
        if link.rates is not None:
            message.write_bytes_per_s = link.rates.write_bytes_per_s
            message.read_bytes_per_s = link.rates.read_bytes_per_s
            message.latency_s = link.rates.latency_s
        messages.append(message)
    return messages


def leg_to_proto(
    leg: Leg, *, role: str, worker_id: str, incarnation: str, dtype: str
) -> common_pb2.KvLeg:
    """Convert one worker's leg of a request."""
    return common_pb2.KvLeg(
        role=role,
        worker_id=worker_id,
        incarnation=incarnation,
        transport=", ".join(leg.transports),
        dtype=dtype,
        num_tokens_computed=leg.num_tokens_computed,
        num_tokens_local=leg.num_tokens_local,
        from_store=[
            common_pb2.TierCount(
                tier=common_pb2.Tier.Name(place.tier.value),
                node_id=place.node_id,
                num_tokens=num_tokens,
                num_bytes=leg.bytes_by_place[place],
                transport=leg.transport_by_node.get(place.node_id, ""),
            )
            for place, num_tokens in sorted(leg.tokens_by_place.items())
        ],
        num_bytes_read=leg.num_bytes_read,
        num_bytes_written=leg.num_bytes_written,
        recomputed=recomputed_to_proto(leg.recomputed),
        not_stored=recomputed_to_proto(leg.not_stored),
        num_tokens_early=leg.num_tokens_early,
        num_blocks_written_back=leg.num_blocks_written_back,
        handover=common_pb2.HandoverPath.Name(leg.handover.value),
        num_tokens_direct=leg.num_tokens_direct,
        num_blocks_behind=leg.num_blocks_behind,
        transports=[
            common_pb2.TransportCount(
                transport=transport,
                num_bytes_read=leg.bytes_read[transport],
                num_bytes_written=leg.bytes_written[transport],
            )
            for transport in leg.transports
        ],
    )


def times_to_proto(seconds: Mapping[str, float]) -> list[common_pb2.StageTime]:
    """Convert seconds per stage, in the order in which the stages were entered."""
    return [common_pb2.StageTime(stage=stage, seconds=value) for stage, value in seconds.items()]


def logprobs_to_proto(logprobs: Iterable[PositionLogprobs]) -> list[common_pb2.TokenLogprobs]:
    """Convert log-probabilities, one message per token."""
    return [
        common_pb2.TokenLogprobs(
            chosen=common_pb2.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob),
            top=[
                common_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
                for token_id, logprob in entry.top
            ],
        )
        for entry in logprobs
    ]


def traces_to_proto(traces: Iterable[SampleTrace]) -> list[common_pb2.StepTrace]:
    """Convert sampling traces, one message per token. The RNG key, signed in the engine, is sent as
    its 64 bits."""
    return [
        common_pb2.StepTrace(
            position=trace.position,
            token_id=trace.token_id,
            raw_logprob=trace.raw_logprob,
            processed_logprob=trace.processed_logprob,
            top=[
                common_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
                for token_id, logprob in trace.top
            ],
            support_size=trace.support_size,
            processors=trace.processors,
            rng_key=None if trace.rng_key is None else trace.rng_key & (2**64 - 1),
            is_forced=trace.is_forced,
        )
        for trace in traces
    ]
