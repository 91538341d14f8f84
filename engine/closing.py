"""closed_on_failure: what a start has opened is closed where it fails. Start-up only."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def closed_on_failure() -> Generator[list[Callable[[], None]], None, None]:
    """Where the body fails, what it has put into the list is called, the last first. The body's
    error is the one to tell, so what fails meanwhile is only logged."""
    closes: list[Callable[[], None]] = []
    try:
        yield closes
    except BaseException:
        for close in reversed(closes):
            try:
                close()
            except Exception:
                logger.exception("a start has failed, and not all of it could be closed")
        raise
