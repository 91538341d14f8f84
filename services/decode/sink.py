"""EventSink: a request's way to its router, as a Protocol, and the load that rides along. Values,
no stubs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.metrics import EngineStats
from engine.outputs import RequestOutput, StepOutput
from services.decode.moving import Luggage
from services.worker.provenance import Leg


@dataclass(frozen=True)
class Load:
    """The worker's load, as it rides with every message."""

    num_free_blocks: int
    num_running: int
    num_waiting: int
    step: int

    @classmethod
    def after_step(cls, output: StepOutput) -> Load:
        return cls(output.num_free_blocks, output.num_running, output.num_waiting, output.step)

    @classmethod
    def now(cls, stats: EngineStats) -> Load:
        return cls(
            stats.num_free_blocks + stats.num_cached_blocks,
            stats.num_running,
            stats.num_waiting,
            stats.num_steps,
        )


class EventSink(Protocol):
    """One stream's way out. Events wait for `flush`, which makes one message of them.

    None of it blocks.
    """

    def queued(self, key: int) -> None:
        """It has its blocks, and waits for its places."""

    def reserved(self, key: int, num_tokens_local: int) -> None: ...
    def tokens(self, key: int, event: RequestOutput) -> None:
        """News of one sample while the request goes on; they may be the sample's last."""

    def finished(
        self, key: int, event: RequestOutput | None, leg: Leg, seconds: dict[str, float]
    ) -> None:
        """`event` None: cancelled."""

    def failed(self, key: int, error: BaseException, leg: Leg | None) -> None: ...
    def moved(
        self,
        key: int,
        luggage: Luggage,
        num_output_tokens: Sequence[int],
        leg: Leg | None,
        seconds: dict[str, float],
    ) -> None:
        """The worker leaves it. num_output_tokens: of each sample, as far as it was told of here,
        with those that the leg began with. leg: None: it computed nothing."""

    def flush(self, load: Load) -> None: ...
    def close(self) -> None:
        """The stream is gone: what handles hand over that were not written is given back.
        Idempotent."""
