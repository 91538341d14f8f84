"""A process tells its parent that its event loop turns: a byte a second into a pipe whose number is
in BATON_PULSE_FD. A parent that hears nothing for long may restart it. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

ENVIRONMENT = "BATON_PULSE_FD"
EVERY_S = 1.0


def start() -> None:
    """Beat from now on, as long as the running loop turns; nothing where no parent listens."""
    number = os.environ.pop(ENVIRONMENT, "")  # no child of ours beats for us
    if not number:
        return
    fd, loop = int(number), asyncio.get_running_loop()
    os.set_inheritable(fd, False)
    os.set_blocking(fd, False)

    def beat() -> None:
        # A pipe that is full was not read for long, one that is closed has no reader.
        with contextlib.suppress(OSError):
            os.write(fd, b".")
        loop.call_later(EVERY_S, beat)

    beat()
