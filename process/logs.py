"""Log lines as JSON, one object a line on stderr: `ts`, `level`, `component`, `event`, then the
event's own fields; for a request that is traced also `trace_id` and `span_id`.

Prompts and outputs never go into a log, except by a router's setting `log_prompts`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from process import trace_spans

LEVELS = ("debug", "info", "warning", "error")
"""The log levels that a process can be started with."""


class _JsonFormatter(logging.Formatter):
    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "component": self._component,
            "event": record.getMessage(),
        }
        # In the task, or the thread, that logs.
        context = trace_spans.current_span().context
        if context is not None:
            line["trace_id"] = f"{context.trace_id:032x}"
            line["span_id"] = f"{context.span_id:016x}"
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(component: str, level: str = "info") -> None:
    """Send every logger's lines of at least `level` to stderr as JSON. Called once, at the start of
    a process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(component))
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def event(
    logger: logging.Logger,
    name: str,
    *,
    level: int = logging.INFO,
    exc_info: bool = False,
    **fields: Any,
) -> None:
    """Write one log line: the event's name and its fields, the values that belong to it."""
    logger.log(level, name, extra={"fields": fields}, exc_info=exc_info)
