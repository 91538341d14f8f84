"""Blocking clients of engines in child processes: one (`ProcessClient`) or several of one model
(`DataParallelClient`).

The engine computes while the caller does something else, and a crash of it is an error here, not
the end of this process. `submit`, `cancel`, `stats` and `close` may be called from any thread; the
news belong to the one that calls `receive`.
"""

from __future__ import annotations

import os
import queue
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from engine.config import EngineConfig
from engine.metrics import EngineStats, MetricsSnapshot
from engine_client import child_process_link, data_parallel
from engine_client.child_process_link import Progress
from engine_client.config import ClientLimits
from engine_client.data_parallel import Fleet
from engine_client.interface import Ask, LoadedAdapter, News
from process.rpc_errors import BatonError, FailedPrecondition


class DataParallelClient:
    """`EngineClient` of `num_engines` engines, each in a child process of its own.

    A request goes to the engine with the fewest outstanding tokens, or to the rank that the caller
    names (external load balancing).
    """

    def __init__(
        self,
        config: EngineConfig,
        num_engines: int,
        *,
        limits: ClientLimits | None = None,
        progress: Progress | None = None,
        program: Sequence[str] = child_process_link.PROGRAM,
    ) -> None:
        """Start the engines and wait until they are loaded.

        Args:
            program: command line of each process; the number of its socket is appended as last
                argument.
        Raises: LoadError, Unavailable, DeadlineExceeded; no process is left then.
        """
        # No SimpleQueue: before Python 3.13 its `get` may wait for ever where its time is short.
        self._news: queue.Queue[tuple[News, ...]] = queue.Queue()
        self._fleet = Fleet(
            share_cores(config, num_engines),
            num_engines,
            deliver=self._news.put,
            limits=limits or ClientLimits(),
            program=program,
            progress=progress,
        )
        # Also when this object is dropped, and at the interpreter's exit.
        self._finalizer = weakref.finalize(self, self._fleet.close)
        self._fleet.start()
        self.model = self._fleet.model
        self.num_engines = num_engines

    @property
    def pids(self) -> tuple[int | None, ...]:
        """Return the engines' process ids by rank; None for one that was not started."""
        return self._fleet.pids

    @property
    def num_live(self) -> int:
        """Return the number of requests whose last news are still to come."""
        return self._fleet.num_live

    def check(self, asks: Sequence[Ask]) -> None:
        """Check whether the engines would accept these requests; since they are alike, only one is
        asked."""
        for start, group in data_parallel.check_groups(asks):
            try:
                self._fleet.wait(self._fleet.ask_one("check", group))
            except BatonError as error:
                raise data_parallel.shifted(error, start) from error

    def submit(self, ask: Ask, *, rank: int | None = None) -> None:
        """Submit a request to the engine with the fewest outstanding tokens, or to `rank`. Raises:
        as `EngineClient.submit`."""
        self._fleet.submit(ask, rank)

    def receive(self, timeout_s: float) -> tuple[News, ...]:
        """Return the news since the last call, in order; wait up to `timeout_s` seconds for the
        first."""
        self._refuse_when_closed()
        found: list[News] = []
        ends_s = time.monotonic() + timeout_s
        try:
            # Live is asked before the queue is: what ends in between is in the queue by then.
            while not found:
                is_live = self._fleet.num_live > 0
                left_s = max(0.0, ends_s - time.monotonic()) if is_live else 0.0
                found += self._news.get(timeout=left_s) if left_s else self._news.get_nowait()
            while True:
                found += self._news.get_nowait()
        except queue.Empty:
            return tuple(found)

    def cancel(self, request_id: str) -> None:
        """Cancel a request in any state; an id that is not live is ignored."""
        self._fleet.cancel(request_id)

    def end_sample(self, request_id: str, sample_index: int) -> None:
        """End one sample whose text has ended before its tokens; the others go on."""
        self._fleet.end_sample(request_id, sample_index)

    def stats(self) -> tuple[EngineStats, ...]:
        """Return gauges and counters of each engine that is alive, in order of rank."""
        futures = self._fleet.ask_all("stats")
        return tuple(
            data_parallel.value(self._fleet.wait(future), EngineStats) for future in futures
        )

    def metrics(self) -> tuple[MetricsSnapshot, ...]:
        """Return throughput and latency histograms of each engine that is alive, in order of
        rank."""
        futures = self._fleet.ask_all("metrics")
        return tuple(
            data_parallel.value(self._fleet.wait(future), MetricsSnapshot) for future in futures
        )

    def load_adapter(self, name: str, folder: str) -> LoadedAdapter:
        """Load a LoRA adapter from `folder` on every engine that is alive, so that requests can
        name it."""
        futures = self._fleet.ask_all("load_adapter", name=name, folder=folder)
        loaded = [
            data_parallel.value(self._fleet.wait(future), LoadedAdapter) for future in futures
        ]
        return data_parallel.common_adapter(loaded)

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter from every engine that is alive."""
        for future in self._fleet.ask_all("unload_adapter", name=name):
            self._fleet.wait(future)

    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Return the adapters loaded on the first engine that is alive."""
        raw = self._fleet.wait(self._fleet.ask_one("adapters"))
        return data_parallel.value(raw, tuple[LoadedAdapter, ...])

    def check_integrity(self) -> None:
        """Check the invariants of every engine that is alive and of the client itself. Raises:
        IntegrityError."""
        self._fleet.check_own_integrity()
        for future in self._fleet.ask_all("check_integrity"):
            self._fleet.wait(future)

    def close(self) -> None:
        """Stop all engines and end all live requests; bounded in time and idempotent."""
        self._finalizer()

    def _refuse_when_closed(self) -> None:
        if not self._finalizer.alive:
            raise FailedPrecondition("the client is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class ProcessClient(DataParallelClient):
    """`EngineClient` of one engine in a child process."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        limits: ClientLimits | None = None,
        progress: Progress | None = None,
        program: Sequence[str] = child_process_link.PROGRAM,
    ) -> None:
        """Start the engine and wait until it is loaded. Raises: LoadError, Unavailable,
        DeadlineExceeded; no process is left then."""
        super().__init__(config, 1, limits=limits, progress=progress, program=program)


def share_cores(config: EngineConfig, num_engines: int) -> EngineConfig:
    """Share the CPU cores between engines: where no number of threads is configured, each engine
    gets its share, since engines that each use all cores stall one another."""
    if num_engines < 2 or config.num_threads or "OMP_NUM_THREADS" in os.environ:
        return config
    num_processes = num_engines * config.num_ranks
    return replace(config, num_threads=max(1, (os.cpu_count() or 1) // num_processes))
