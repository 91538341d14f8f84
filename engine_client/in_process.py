"""The engine in this process: no second process to start and nothing to encode, but whoever calls
`receive` is the engine's thread while a step runs.

One thread at a time, the one that calls.
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
from engine_client.base import Ask, LoadedAdapter, News
from engine_client.core import EngineCore
from process.errors import FailedPrecondition, InvalidArgument


class InProcessClient:
    """`EngineClient` over an engine of this process."""

    def __init__(self, engine: LLMEngine) -> None:
        self._core: EngineCore | None = EngineCore(engine)
        self.model: ModelInfo = engine.model_info
        self.num_engines = 1

    @property
    def num_live(self) -> int:
        """See `EngineClient.num_live`."""
        return self._open().num_live

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        stop_policy: StopPolicy | None = None,
    ) -> InProcessClient:
        """Load the model. Raises: LoadError."""
        return cls(load_engine(config, progress=progress, stop_policy=stop_policy))

    def check(self, asks: Sequence[Ask]) -> None:
        """See `EngineClient.check`."""
        self._open().check(asks)

    def submit(self, ask: Ask, *, rank: int | None = None) -> None:
        """See `EngineClient.submit`."""
        if rank not in (None, 0):
            raise InvalidArgument("rank", f"{rank} does not exist; there is one engine, rank 0")
        self._open().submit(ask)

    def receive(self, timeout_s: float) -> tuple[News, ...]:
        """One step of the engine, if there is work; never waits for more than that."""
        return self._open().step()

    def cancel(self, request_id: str) -> None:
        """See `EngineClient.cancel`."""
        self._open().cancel(request_id)

    def end_sample(self, request_id: str, sample_index: int) -> None:
        """See `EngineClient.end_sample`."""
        self._open().end_sample(request_id, sample_index)

    def stats(self) -> tuple[EngineStats, ...]:
        """See `EngineClient.stats`."""
        return (self._open().stats(),)

    def metrics(self) -> tuple[MetricsSnapshot, ...]:
        """See `EngineClient.metrics`."""
        return (self._open().metrics(),)

    def load_adapter(self, name: str, folder: str) -> LoadedAdapter:
        """See `EngineClient.load_adapter`."""
        return self._open().load_adapter(name, folder)

    def unload_adapter(self, name: str) -> None:
        """See `EngineClient.unload_adapter`."""
        self._open().unload_adapter(name)

    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """See `EngineClient.adapters`."""
        return self._open().adapters()

    def check_integrity(self) -> None:
        """See `EngineClient.check_integrity`."""
        self._open().check_integrity()

    def close(self) -> None:
        """Let the engine and its memory go."""
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
