"""InProcessClient: client of an engine in this process, with no second process and no encoding; the
engine's steps run on the thread that calls `receive`.

One thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from engine.metrics import EngineStats, MetricsSnapshot
from engine.models.interface import Progress
from engine.request import ModelInfo, StopPolicy
from engine_client.engine_core import EngineCore
from engine_client.interface import Ask, LoadedAdapter, News
from process.rpc_errors import FailedPrecondition, InvalidArgument


class InProcessClient:
    """`EngineClient` of an engine in this process."""

    def __init__(self, engine: LLMEngine) -> None:
        self._core: EngineCore | None = EngineCore(engine)
        self.model: ModelInfo = engine.model_info
        self.num_engines = 1

    @property
    def num_live(self) -> int:
        """Return the number of requests whose last news are still to come."""
        return self._open().num_live

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        stop_policy: StopPolicy | None = None,
    ) -> InProcessClient:
        """Load the model and create the client. Raises: LoadError."""
        return cls(load_engine(config, progress=progress, stop_policy=stop_policy))

    def check(self, asks: Sequence[Ask]) -> None:
        """Check whether the engine would accept these requests, without submitting them. Raises:
        InvalidArgument."""
        self._open().check(asks)

    def submit(self, ask: Ask, *, rank: int | None = None) -> None:
        """Submit a request; `rank` must be None or 0. Raises: as `EngineClient.submit`."""
        if rank not in (None, 0):
            raise InvalidArgument("rank", f"{rank} does not exist; there is one engine, rank 0")
        self._open().submit(ask)

    def receive(self, timeout_s: float) -> tuple[News, ...]:
        """Run one engine step if there is work, and return its news; never waits longer than the
        step."""
        return self._open().step()

    def cancel(self, request_id: str) -> None:
        """Cancel a request in any state; an id that is not live is ignored."""
        self._open().cancel(request_id)

    def end_sample(self, request_id: str, sample_index: int) -> None:
        """End one sample whose text has ended before its tokens; the others go on."""
        self._open().end_sample(request_id, sample_index)

    def stats(self) -> tuple[EngineStats, ...]:
        """Return the engine's gauges and counters, as a tuple of one."""
        return (self._open().stats(),)

    def metrics(self) -> tuple[MetricsSnapshot, ...]:
        """Return the engine's throughput and latency histograms, as a tuple of one."""
        return (self._open().metrics(),)

    def load_adapter(self, name: str, folder: str) -> LoadedAdapter:
        """Load a LoRA adapter from `folder`, so that requests can name it."""
        return self._open().load_adapter(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter."""
        self._open().unload_adapter(name)

    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Return the adapters that the engine has loaded."""
        return self._open().adapters()

    def check_integrity(self) -> None:
        """Check the invariants of the engine and of the client. Raises: IntegrityError."""
        self._open().check_integrity()

    def close(self) -> None:
        """Stop the engine and free its memory."""
        if self._core is not None:
            self._core.close()
        self._core = None

    def _open(self) -> EngineCore:
        if self._core is None:
            raise FailedPrecondition("the client is closed")
        return self._core

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
