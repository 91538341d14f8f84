"""What a worker needs of an engine, as a Protocol: `engine.loop.Engine` and
`engine.fake.FakeEngine` both fit it.

Knows no asyncio. Every method is called from the one thread of `EngineThread`; `kv` and
`model_info` are values that any thread may read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.kv.layout import KvLayout
from engine.request import EngineStats, ModelInfo, Request, Reservation, StepOutput


class KvMemoryPort(Protocol):
    """The device cache as the connector sees it."""

    @property
    def layout(self) -> KvLayout: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def host_view(self) -> npt.NDArray[np.uint8]: ...


class WorkerEngine(Protocol):
    """Each method means what it means in `engine.loop.Engine`."""

    @property
    def kv(self) -> KvMemoryPort: ...
    @property
    def model_info(self) -> ModelInfo: ...

    def reserve(self, request: Request) -> Reservation: ...
    def start(
        self, request_id: str, *, num_loaded_tokens: int = 0, output_token_ids: Iterable[int] = ()
    ) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> StepOutput: ...
    def abort(self, request_id: str) -> None: ...
    def release(self, request_id: str) -> None: ...
    def quarantine(self, request_id: str, block_ids: Iterable[int]) -> None: ...
    def unquarantine(self, block_ids: Iterable[int]) -> None: ...
    def check_integrity(self) -> None: ...
    def stats(self) -> EngineStats: ...
