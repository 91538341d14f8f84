"""LegProvenance: the origin of a request's KV at one worker (computed, in the local cache, or
loaded from a store), in prompt tokens; StageClock: the time that the request spent in each stage
there. The part of a request at one worker is its leg. Values without I/O, for both roles.

Invariant of a leg that ran: num_tokens_computed + num_tokens_local + the sum of from_store tokens
== prompt tokens; of a leg that ended inside its prompt: == the tokens that it reached.

Also here: the trace attributes and spans of a leg, which do nothing for a request that is not
traced, and the conversion of a worker's values to protobuf (WorkerStatus and KvLeg among them).
"""

from __future__ import annotations

import enum
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from google.protobuf import json_format

from engine.metrics import EngineStats
from engine.outputs import PositionLogprobs, RequestOutput, SampleTrace, StepOutput
from engine.request import FinishReason, ModelInfo
from kvstore.block_refs import Block, InTier, PackedBlocks, Tier
from kvstore.link_quality import Link, Verdict
from kvstore.node_ids import is_lender
from process.deadline import Clock
from process.trace_spans import Span, Value
from protos import common_pb2

FINGERPRINT = "fingerprint"
"""Metrics reason, beside those of `kvstore.errors`, of a handle for another model, tenant or
prompt."""


class HandoverPath(enum.IntEnum):
    """Path of a prompt's KV to decode; the numbers are those of the protobuf enum."""

    UNSPECIFIED = 0
    STORE = 1
    DIRECT = 2


class BlockPlace(NamedTuple):
    """Tier of one node's store, or of a worker that lends its blocks."""

    node_id: str
    tier: Tier


@dataclass
class LegProvenance:
    """Provenance of the KV of one worker's leg of a request, in prompt tokens."""

    num_prompt_tokens: int
    num_reached: int | None = None
    """Number of leading tokens whose KV the leg has had; None: all of the prompt."""
    num_tokens_local: int = 0
    store_node_id: str = ""
    """Node id of the store that blocks come from where `count_loaded` is given no other."""
    tokens_by_place: Counter[BlockPlace] = field(default_factory=Counter)
    bytes_by_place: Counter[BlockPlace] = field(default_factory=Counter)
    num_tokens_early: int = 0
    """Number of the tokens from stores that were fetched while prefill still ran."""
    bytes_read: Counter[str] = field(default_factory=Counter)
    """Bytes read from stores and lenders, by transport."""
    bytes_written: Counter[str] = field(default_factory=Counter)
    """Bytes written to stores, by transport; for decode without the answer's blocks."""
    transport_by_node: dict[str, str] = field(default_factory=dict)
    """Transport over which each store or lender was read, by node id."""
    recomputed: Counter[str] = field(default_factory=Counter)
    """Number of blocks that were or should have been in the store and had to be computed, by
    reason."""
    not_stored: Counter[str] = field(default_factory=Counter)
    """Number of blocks of a handover that were not stored, by reason."""
    num_blocks_written_back: int = 0
    """Number of full blocks that no handle names and that were stored when the request ended."""
    handover: HandoverPath = HandoverPath.UNSPECIFIED
    """Path of the handle; set by prefill."""
    num_tokens_direct: int = 0
    """Number of the tokens from stores that decode read out of a prefill worker's own cache, which
    lent them."""
    num_blocks_behind: int = 0
    """Number of full blocks that prefill had not stored yet when the answer was sent, where no
    handle names the store."""

    @property
    def num_bytes_read(self) -> int:
        return self.bytes_read.total()

    @property
    def num_bytes_written(self) -> int:
        return self.bytes_written.total()

    @property
    def transports(self) -> list[str]:
        """Return the transports that moved bytes, sorted."""
        return sorted(name for name, num in (self.bytes_read + self.bytes_written).items() if num)

    @property
    def num_tokens_from_store(self) -> int:
        return self.tokens_by_place.total()

    @property
    def num_tokens_computed(self) -> int:
        end = self.num_prompt_tokens
        if self.num_reached is not None:
            end = min(end, self.num_reached)
        # What is fetched is counted a moment before it is reached.
        return max(0, end - self.num_tokens_local - self.num_tokens_from_store)

    def count_read(self, node_id: str, transport: str, num_bytes: int) -> None:
        """Count bytes read from a store or lender over `transport`."""
        self.bytes_read[transport] += num_bytes
        self.transport_by_node[node_id] = transport

    def count_loaded(
        self,
        first_token: int,
        end_token: int,
        blocks: Sequence[Block],
        *,
        block_bytes: int,
        node_id: str | None = None,
        is_early: bool = False,
    ) -> None:
        """Count verified blocks from the store or lender `node_id`, of which prompt tokens [first,
        end) are used."""
        self.count_tiers(
            first_token,
            end_token,
            PackedBlocks.of(blocks).tiers(),
            block_bytes=block_bytes,
            node_id=self.store_node_id if node_id is None else node_id,
            is_early=is_early,
        )

    def count_tiers(
        self,
        first_token: int,
        end_token: int,
        tiers: Sequence[InTier],
        *,
        block_bytes: int,
        node_id: str,
        is_early: bool,
    ) -> None:
        """Count loaded blocks as `count_loaded` does, given their number per tier."""
        end_token = min(end_token, self.num_prompt_tokens)
        for tier, num_blocks, num_there in tiers:
            num_tokens = max(0, min(num_there, end_token - first_token))
            place = BlockPlace(node_id, tier)
            self.tokens_by_place[place] += num_tokens
            self.bytes_by_place[place] += num_blocks * block_bytes
            self.num_tokens_early += num_tokens if is_early else 0
            self.num_tokens_direct += num_tokens if is_lender(node_id) else 0
            first_token += num_there


class StageClock:
    """Clock of the seconds per stage of one request. Stages do not overlap: `enter` ends the
    previous one."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._stage: str | None = None
        self._since = clock()
        self.seconds: dict[str, float] = {}
        self.laps: list[tuple[str, float, float]] = []
        """(stage, from, to) on the clock, in order."""

    def enter(self, stage: str | None) -> None:
        """Start a stage; None: the time from now on belongs to no stage."""
        now = self._clock()
        if self._stage is not None:
            self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._since
            self.laps.append((self._stage, self._since, now))
        self._stage, self._since = stage, now


@dataclass
class WorkerCounts:
    """Sums over all legs of one worker life."""

    num_prompt_tokens_computed: int = 0
    num_prompt_tokens_local: int = 0
    num_prompt_tokens_from_store: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens_early: int = 0
    num_prompt_tokens_direct: int = 0
    handovers: Counter[HandoverPath] = field(default_factory=Counter)
    """Number of handles that were sent, by path."""
    num_blocks_written_back: int = 0
    """Number of blocks written back, including those stored after their request's end."""
    not_written_back: Counter[str] = field(default_factory=Counter)
    """Number of blocks that no handle names and that could not be stored, by reason."""
    early_pulls_failed: Counter[str] = field(default_factory=Counter)
    """Number of early pulls that failed, by reason: unusable partial handles, incomplete pulls
    while prefill still ran, and lenders that did not answer; the final handle tries again. A
    question whose lease has ended is not counted."""
    recomputed: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    """Number of requests that left a draining decode worker: "draining" with all of their KV, else
    by the reason why not."""

    def add(self, leg: LegProvenance) -> None:
        """Add the counts of a leg that ran."""
        self.num_prompt_tokens_computed += leg.num_tokens_computed
        self.num_prompt_tokens_local += leg.num_tokens_local
        self.num_prompt_tokens_from_store += leg.num_tokens_from_store
        self.num_prompt_tokens_early += leg.num_tokens_early
        self.num_prompt_tokens_direct += leg.num_tokens_direct
        if leg.handover:
            self.handovers[leg.handover] += 1
        self.recomputed.update(leg.recomputed)


def set_leg_attributes(span: Span, clock: StageClock, leg: LegProvenance) -> None:
    """Record the stages and provenance of a finished leg on its span."""
    if not span.is_recording:
        return
    clock.enter(None)
    for stage, begin_s, end_s in clock.laps:
        # Not the name of the router's stage, which has this one's time within it.
        span.add_child(f"worker.{stage}", begin_s, end_s, {"baton.worker_stage": stage})
    about: dict[str, Value] = {
        "baton.num_prompt_tokens": leg.num_prompt_tokens,
        "baton.num_tokens_computed": leg.num_tokens_computed,
        "baton.num_tokens_local": leg.num_tokens_local,
        "baton.num_tokens_from_store": leg.num_tokens_from_store,
        "baton.num_bytes_read": leg.num_bytes_read,
        "baton.num_bytes_written": leg.num_bytes_written,
        "baton.transport": ", ".join(leg.transports),
        "baton.handover": leg.handover.name.lower(),
    }
    for reason, num_blocks in leg.recomputed.items():
        about[f"baton.recomputed.{reason}"] = num_blocks
    for reason, num_blocks in leg.not_stored.items():
        about[f"baton.not_stored.{reason}"] = num_blocks
    span.set(about)


class TracedChunks:
    """Spans of the engine steps that compute one prompt."""

    def __init__(self, span: Span, num_prompt_tokens: int) -> None:
        """Create for a request's span. num_prompt_tokens: prompt tokens, including those that an
        earlier leg drew."""
        self._span = span
        self._num_prompt_tokens = num_prompt_tokens
        self._num_known = 0

    def start(self, num_loaded_tokens: int) -> None:
        """Start with the number of leading tokens whose KV was loaded."""
        self._num_known = num_loaded_tokens

    def add(self, event: RequestOutput, output: StepOutput) -> None:
        """Add a step's event of the request."""
        if not self._span.is_recording:
            return
        num_tokens = min(event.num_computed_tokens, self._num_prompt_tokens) - self._num_known
        if num_tokens <= 0:
            return  # another sample of it, or a token of the answer
        self._num_known += num_tokens
        about: dict[str, Value] = {
            "baton.num_tokens": num_tokens,
            "baton.step": output.step,
            "baton.step.num_tokens": output.num_scheduled_tokens,
        }
        self._span.add_child("prefill_chunk", output.began_s, output.ended_s, about)


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
    leg: LegProvenance, *, role: str, worker_id: str, incarnation: str, dtype: str
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
