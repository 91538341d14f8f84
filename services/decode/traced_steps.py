"""TracedSteps: one span for all decode steps of one traced request, with their number and the
longest pause; it does nothing for others. One request, the loop's thread."""

from __future__ import annotations

import time

from process.trace_spans import Span


class TracedSteps:
    """Span of the decode steps of one request."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._first_s: float | None = None
        self._last_s = 0.0
        self._num_news = 0
        self._num_tokens = 0
        self._longest_s = 0.0

    def add(self, num_tokens: int) -> None:
        """Count a step that drew tokens of one sample."""
        if not self._span.is_recording:
            return
        now = time.monotonic()
        if self._first_s is None:
            self._first_s = now
        else:
            self._longest_s = max(self._longest_s, now - self._last_s)
        self._last_s = now
        self._num_news += 1
        self._num_tokens += num_tokens

    def tell(self) -> None:
        """End the span: the request is over."""
        if self._first_s is None:
            return
        self._span.add_child(
            "decode_steps",
            self._first_s,
            self._last_s,
            {
                "baton.num_news": self._num_news,
                "baton.num_tokens": self._num_tokens,
                "baton.longest_pause_s": self._longest_s,
            },
        )
