"""Trace attributes of a worker's leg of one request: its stages, the chunks of its prompt, and the
provenance of its KV. They do nothing for a request that is not traced."""

from __future__ import annotations

from engine.outputs import RequestOutput, StepOutput
from process.trace_spans import Span, Value
from services.worker.provenance import Leg, StageClock


def tell(span: Span, clock: StageClock, leg: Leg) -> None:
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
