"""DecodeEventSink: the interface by which a decode worker sends a request's events to its router;
StreamLoad: the worker's load, which each message carries. No protobuf types.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.metrics import EngineStats
from engine.outputs import RequestOutput, StepOutput
from services.decode.migration import MigratedKv
from services.worker.provenance import LegProvenance


@dataclass(frozen=True)
class StreamLoad:
    """Load of the worker, which every message carries."""

    num_free_blocks: int
    num_running: int
    num_waiting: int
    step: int

    @classmethod
    def after_step(cls, output: StepOutput) -> StreamLoad:
        return cls(output.num_free_blocks, output.num_running, output.num_waiting, output.step)

    @classmethod
    def now(cls, stats: EngineStats) -> StreamLoad:
        return cls(
            stats.num_free_blocks + stats.num_cached_blocks,
            stats.num_running,
            stats.num_waiting,
            stats.num_steps,
        )


class DecodeEventSink(Protocol):
    """Interface to send the events of one stream. Events wait for `flush`, which makes one message
    of them; no method blocks."""

    def queued(self, key: int) -> None:
        """Send that the request has its blocks and waits for places in the engine's steps."""

    def reserved(self, key: int, num_tokens_local: int) -> None: ...
    def tokens(self, key: int, event: RequestOutput) -> None:
        """Send one sample's event while the request continues; it may be the sample's last."""

    def finished(
        self, key: int, event: RequestOutput | None, leg: LegProvenance, seconds: dict[str, float]
    ) -> None:
        """Send the end of a request; `event` None: it was cancelled."""

    def failed(self, key: int, error: BaseException, leg: LegProvenance | None) -> None: ...
    def moved(
        self,
        key: int,
        luggage: MigratedKv,
        num_output_tokens: Sequence[int],
        leg: LegProvenance | None,
        seconds: dict[str, float],
    ) -> None:
        """Send that the request leaves this worker. num_output_tokens: of each sample, as many as
        were sent from here, plus those that the leg began with. leg: None: it computed nothing."""

    def flush(self, load: StreamLoad) -> None: ...
    def close(self) -> None:
        """Close because the stream has ended: leases of handles that were not written are released.
        Idempotent."""
