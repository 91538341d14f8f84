"""EventSink: interface to send a request's events to its router, and the worker's load that each
message carries. Values, no stubs."""

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
    """Load of the worker, which every message carries."""

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
    """Interface to send the events of one stream. Events wait for `flush`, which makes one message
    of them; no method blocks."""

    def queued(self, key: int) -> None:
        """Send that the request has its blocks and waits for places in the engine's steps."""

    def reserved(self, key: int, num_tokens_local: int) -> None: ...
    def tokens(self, key: int, event: RequestOutput) -> None:
        """Send one sample's event while the request continues; it may be the sample's last."""

    def finished(
        self, key: int, event: RequestOutput | None, leg: Leg, seconds: dict[str, float]
    ) -> None:
        """Send the end of a request; `event` None: it was cancelled."""

    def failed(self, key: int, error: BaseException, leg: Leg | None) -> None: ...
    def moved(
        self,
        key: int,
        luggage: Luggage,
        num_output_tokens: Sequence[int],
        leg: Leg | None,
        seconds: dict[str, float],
    ) -> None:
        """Send that the request leaves this worker. num_output_tokens: of each sample, as many as
        were sent from here, plus those that the leg began with. leg: None: it computed nothing."""

    def flush(self, load: Load) -> None: ...
    def close(self) -> None:
        """Close because the stream has ended: leases of handles that were not written are released.
        Idempotent."""
