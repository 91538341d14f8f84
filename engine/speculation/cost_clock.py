"""By which clock it is judged what guesses cost."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.config import EngineConfig


def cost_clock(
    config: EngineConfig, device: str, clock: Callable[[], float]
) -> Callable[[], float]:
    """On a CPU whose cores do other work, too, the wall clock says how busy they are, and guesses
    would be judged by that: there it is the time that the engine's thread computed. Not where it
    waits for what is computed elsewhere: a device, other ranks, draft workers.

    Args:
        device: the model's.
        clock: the engine's; any but the system's is taken as it is.
    """
    is_here = (
        device == "cpu"
        and config.tensor_parallel * config.pipeline_parallel == 1
        and not config.speculation.draft_workers
    )
    return time.thread_time if is_here and clock is time.monotonic else clock
