"""RequestTrace: the OpenTelemetry span of one request at the router, with attributes of the GenAI
semantic conventions, and one child span for each stage of the request.

The stage spans follow each other without gap or overlap from the request's first moment to its
last, because `request_stats.StageTimes` measures them that way. Those with `baton.to_first_token`
set are the critical path to the first token; their durations sum to the time to first token. Spans
of the workers lie beside them. No text of a prompt or an answer goes into a span. Nothing is
recorded for a request that is not sampled. One asyncio loop.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from types import MappingProxyType, TracebackType

from process.trace_spans import Attributes, Span, Value
from process.tracing import Tracing
from protos import common_pb2, inference_pb2
from services.router.prefixes import FoundPrefixes
from services.router.request import RouterRequest
from services.router.request_stats import Lap, StageTimes

SYSTEM = "baton"
STAGE = "baton.stage"
MAX_SEED = 2**63
"""Seeds from here on do not fit into a span attribute, which is a signed 64-bit integer."""
TO_FIRST_TOKEN = "baton.to_first_token"
UNFINISHED = "unfinished"
"""Name of the last stage of a request that ended without finishing."""

_FINISH_REASONS = {
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_TOOL_CALL: "tool_calls",
    common_pb2.FINISH_REASON_CANCELLED: "cancelled",
}
"""Finish reasons as span attributes; every other reason is "stop"."""


class TracedCall:
    """Call by which a request reached the router; each protocol has a subclass. This base class
    stands for no protocol."""

    name = "request"
    """Name of the span of a request that could not be parsed."""
    is_streamed = True
    headers: Mapping[str, str] = MappingProxyType({})
    """W3C trace context as received, with lower-case names, not validated."""

    def about(self) -> Attributes:
        """Return the protocol's attributes that are known when the call begins."""
        return {}

    def status(self, error: BaseException | None, *, has_begun: bool) -> Attributes:
        """Return the protocol's attributes that are known at the end.

        Args: has_begun: whether a message of the answer was sent.
        """
        return {}


class RequestTrace:
    """Span of one request and recorder of its stages. A context manager: inside it, `span` is the
    current span."""

    def __init__(
        self,
        tracing: Tracing,
        call: TracedCall,
        request: inference_pb2.GenerateRequest | None,
        times: StageTimes,
        model: str,
    ) -> None:
        """request: None for a request that could not be parsed.
        model: name of the served model."""
        self._times = times
        self._call = call
        self._has_begun = False
        self._reasons: dict[int, str] = {}
        self._num_output_tokens = 0
        self._last: inference_pb2.GenerateResponse | None = None
        self._state = ""
        self._outcome = ""
        operation = _operation(request) if request is not None else ""
        name = f"{operation} {model}" if request is not None else call.name
        self.span: Span = tracing.begin(name, call.headers, begin_s=times.begin_s)
        if not self.span.is_recording:
            return
        self.span.set(call.about())
        if request is not None:
            self.span.set(
                {
                    "gen_ai.operation.name": operation,
                    "gen_ai.provider.name": SYSTEM,
                    "gen_ai.request.model": request.model or model,
                    "gen_ai.request.stream": call.is_streamed,
                }
            )
            if request.session:
                self.span.set({"gen_ai.conversation.id": request.session})

    def __enter__(self) -> RequestTrace:
        self.span.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end(error)
        self.span.__exit__(kind, error, traceback)

    def on_job(self, job: RouterRequest) -> None:
        """Record the validated request, with all defaults filled in."""
        if self.span.is_recording:
            self.span.set(_of_job(job))

    def on_message(self, message: inference_pb2.GenerateResponse) -> None:
        """Record a message that was sent."""
        if not self.span.is_recording:
            return
        self._has_begun = True
        self._num_output_tokens += len(message.token_ids)
        if message.finish_reason:
            reason = _FINISH_REASONS.get(message.finish_reason, "stop")
            self._reasons[message.sample_index] = reason
        if message.HasField("provenance"):
            self._last = message

    def on_end(self, outcome: str, state: str) -> None:
        """Record how the request ended: `outcome` as in metrics, `state` as the lifecycle
        names it."""
        self._outcome, self._state = outcome, state

    def end(self, error: BaseException | None) -> None:
        """End the span, and add a child span for each stage."""
        span, times = self.span, self._times
        if not span.is_recording:
            return
        end_s, first_s = time.monotonic(), times.first_token_s
        laps = list(times.laps())
        stage = "stream" if self._outcome == "finished" else UNFINISHED
        bounds = (times.last_s, times.cut(times.last_s, end_s), end_s)
        laps += [
            Lap(stage, begin_s, until_s, lambda: {"baton.state": self._state})
            for begin_s, until_s in itertools.pairwise(bounds)
            if until_s > begin_s
        ]

        def kind(lap: Lap) -> tuple[str, bool]:
            return lap.stage, first_s is not None and lap.end_s <= first_s

        for (stage, is_to_first), group in itertools.groupby(laps, kind):
            pieces = list(group)
            attributes: dict[str, Value] = {STAGE: stage, TO_FIRST_TOKEN: is_to_first}
            for piece in pieces:
                if piece.details is not None:
                    attributes.update(piece.details())
            span.add_child(stage, pieces[0].begin_s, pieces[-1].end_s, attributes)
        if first_s is not None:
            span.event("first_token", at_s=first_s)
            seconds = first_s - times.begin_s
            span.set({"gen_ai.response.time_to_first_chunk": seconds})
        span.set({"baton.outcome": self._outcome or "refused"})
        if self._outcome:  # also when the request did not finish: the tokens were sent
            span.set({"gen_ai.usage.output_tokens": self._num_output_tokens})
        if self._reasons:
            reasons = [self._reasons[index] for index in sorted(self._reasons)]
            span.set({"gen_ai.response.finish_reasons": reasons})
        if self._last is not None:
            span.set(_of_answer(self._last))
        span.set(self._call.status(error, has_begun=self._has_begun))
        span.end(error, at_s=end_s)


def _operation(request: inference_pb2.GenerateRequest) -> str:
    """Return the request's `gen_ai.operation.name`."""
    if request.embed:
        return "embeddings"
    return "chat" if request.WhichOneof("prompt") == "chat" else "text_completion"


def of_lookup(prefixes: FoundPrefixes) -> dict[str, Value]:
    """Return span attributes of a prefix lookup: how many stores were asked, and the longest
    prefix, in blocks, that one of them holds."""
    held = [num_blocks for by_node in prefixes.held.values() for num_blocks in by_node.values()]
    return {
        "baton.lookup.num_stores": len(prefixes.stores),
        "baton.lookup.num_blocks": max(held, default=0),
    }


def _of_job(job: RouterRequest) -> dict[str, Value]:
    """Return span attributes of a validated request."""
    sampling = job.sampling
    known: dict[str, Value] = {
        "gen_ai.response.id": job.request_id,
        "gen_ai.request.choice.count": max(1, sampling.n),
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": float(sampling.top_k),
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "baton.request.seed": str(sampling.seed),
        "gen_ai.usage.input_tokens": len(job.prompt_token_ids),
        "baton.tenant": job.tenant,
        "baton.priority": job.priority,
    }
    if sampling.seed < MAX_SEED:
        known["gen_ai.request.seed"] = sampling.seed
    if job.adapter.name:
        known["baton.adapter"] = job.adapter.name
    return known


def _of_answer(last: inference_pb2.GenerateResponse) -> dict[str, Value]:
    """Return span attributes of the last message, which carries the request's account."""
    known: dict[str, Value] = {
        "gen_ai.response.model": last.provenance.model,
        "gen_ai.usage.input_tokens": last.usage.num_prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": last.usage.num_cached_tokens,
        "baton.model_fingerprint": last.provenance.model_fingerprint,
    }
    legs = last.provenance.legs
    if any(leg.ended_by for leg in legs):
        known["baton.moves"] = [f"{leg.worker_id}: {leg.ended_by}" for leg in legs if leg.ended_by]
    for leg in legs:  # of several workers of one role the last one counts: it ended the answer
        name = f"baton.{leg.role}"
        known |= {
            f"{name}.worker_id": leg.worker_id,
            f"{name}.num_tokens_computed": leg.num_tokens_computed,
            f"{name}.num_tokens_local": leg.num_tokens_local,
            f"{name}.num_tokens_from_store": sum(each.num_tokens for each in leg.from_store),
            f"{name}.num_bytes_read": leg.num_bytes_read,
            f"{name}.num_bytes_written": leg.num_bytes_written,
        }
    return known
