"""TracedDrafts: one span for all draft worker calls of one traced request; it does nothing for
others. One request, the loop's thread."""

from __future__ import annotations

from engine.speculation.remote import DraftTraces
from process.trace_spans import Span


class TracedDrafts:
    """Span of the draft calls of one request.

    Args:
        request_id: the engine's name of the request.
    """

    def __init__(self, span: Span, traces: DraftTraces, request_id: str) -> None:
        self._span = span
        self._traces = traces
        self._request_id = request_id
        if span.is_recording:
            traces.watch(request_id)

    def tell(self) -> None:
        """End the span: the request is over."""
        if not self._span.is_recording:
            return
        calls = self._traces.take(self._request_id)
        if calls is None:
            return
        self._span.add_child(
            "draft_calls",
            calls.first_s,
            calls.last_s,
            {
                "baton.num_calls": calls.num_calls,
                "baton.num_late": calls.num_late,
                "baton.num_failed": calls.num_failed,
                "baton.num_guessed_tokens": calls.num_nodes,
                "baton.waited_s": calls.waited_s,
                "baton.longest_call_s": calls.longest_s,
                "baton.draft_workers": tuple(calls.addresses),
            },
        )
