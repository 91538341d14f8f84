"""Engine clients for the conformance suite: each kind as a blocking `EngineClient`."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from engine.config import EngineConfig
from engine.metrics import EngineStats, MetricsSnapshot
from engine.request import ModelInfo
from engine_client import child_process_link
from engine_client.async_client import AsyncProcessClient
from engine_client.config import ClientLimits
from engine_client.encoded_errors import Failure
from engine_client.in_process import InProcessClient
from engine_client.interface import Ask, EngineClient, LoadedAdapter, News
from engine_client.process_client import DataParallelClient, ProcessClient
from process.rpc_errors import BatonError

T = TypeVar("T")

KINDS = ("in_process", "process", "async", "data_parallel")
WAIT_S = 60.0


def fake(mode: str) -> tuple[str, ...]:
    """The program of a child with a FakeModel."""
    return (sys.executable, str(Path(__file__).with_name("fake_engine_child.py")), mode)


def make_client(
    kind: str,
    config: EngineConfig,
    *,
    program: Sequence[str] = child_process_link.PROGRAM,
    limits: ClientLimits | None = None,
) -> EngineClient:
    """A client of this kind with an engine of its own; two for data_parallel."""
    if kind == "in_process":
        return InProcessClient.load(config)
    if kind == "process":
        return ProcessClient(config, program=program, limits=limits)
    if kind == "data_parallel":
        return DataParallelClient(config, 2, program=program, limits=limits)
    return AsyncFace(config, program=program, limits=limits)


class AsyncFace:
    """An AsyncProcessClient as a blocking client: a loop on a thread of its own, and a task for
    each ask that reads its iterator."""

    def __init__(
        self, config: EngineConfig, *, program: Sequence[str], limits: ClientLimits | None
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop")
        self._thread.start()
        self._news: queue.Queue[News] = queue.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            self.client = self._await(
                AsyncProcessClient.start(config, program=program, limits=limits)
            )
        except BaseException:
            self.end_loop()
            raise
        self.model: ModelInfo = self.client.model
        self.num_engines = self.client.num_engines

    @property
    def pids(self) -> tuple[int | None, ...]:
        return self.client.pids

    @property
    def num_live(self) -> int:
        return len(self._tasks)

    def check(self, asks: Sequence[Ask]) -> None:
        self._await(self.client.check(asks))

    def submit(self, ask: Ask, *, rank: int | None = None) -> None:
        self._await(self._submit(ask, rank))

    async def _submit(self, ask: Ask, rank: int | None) -> None:
        is_taken = asyncio.Event()
        task = asyncio.create_task(self._read(ask, rank, is_taken))
        await asyncio.sleep(0)  # up to its first wait: what `submit` raises has been raised
        is_taken.set()
        if task.done():
            await task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, ask: Ask, rank: int | None, is_taken: asyncio.Event) -> None:
        try:
            async for news in self.client.generate(ask, rank=rank):
                self._news.put(news)
        except BatonError as error:
            if not is_taken.is_set():
                raise
            self._news.put(News(ask.request_id, is_over=True, failure=Failure.of(error)))

    def receive(self, timeout_s: float) -> tuple[News, ...]:
        found: list[News] = []
        try:
            found.append(self._news.get(timeout=timeout_s if self._tasks else 0.01))
            while True:
                found.append(self._news.get_nowait())
        except queue.Empty:
            return tuple(found)

    def cancel(self, request_id: str) -> None:
        self._loop.call_soon_threadsafe(self.client.cancel, request_id)

    def end_sample(self, request_id: str, sample_index: int) -> None:
        self._loop.call_soon_threadsafe(self.client.end_sample, request_id, sample_index)

    def metrics(self) -> tuple[MetricsSnapshot, ...]:
        return self._await(self.client.metrics())

    def load_adapter(self, name: str, folder: str) -> LoadedAdapter:
        return self._await(self.client.load_adapter(name, folder))

    def unload_adapter(self, name: str) -> None:
        self._await(self.client.unload_adapter(name))

    def adapters(self) -> tuple[LoadedAdapter, ...]:
        return self._await(self.client.adapters())

    def stats(self) -> tuple[EngineStats, ...]:
        return self._await(self.client.stats())

    def check_integrity(self) -> None:
        self._await(self.client.check_integrity())

    def close(self) -> None:
        self._await(self.client.close())

    def end_loop(self) -> None:
        """After `close`, or instead of it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        self.end_loop()
