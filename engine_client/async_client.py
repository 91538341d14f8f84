"""Asyncio client of engines in child processes: each request is an asynchronous iterator of its
news, any number of them at once.

It belongs to the event loop that `start` ran on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import weakref
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self

import msgspec

from engine.config import EngineConfig
from engine.metrics import EngineStats, MetricsSnapshot
from engine.request import ModelInfo
from engine_client import child_process_link, data_parallel
from engine_client.child_process_link import Progress
from engine_client.config import ClientLimits
from engine_client.data_parallel import Fleet
from engine_client.interface import Ask, LoadedAdapter, News
from engine_client.process_client import share_cores
from process.deadline import Deadline
from process.rpc_errors import AlreadyExists, BatonError


class _Inbox:
    """Queues that carry news from the links' threads to the waiting iterators. It holds no
    reference to the client, so that the threads of its engines do not keep a dropped client
    alive."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.queues: dict[str, asyncio.Queue[News]] = {}

    def deliver(self, news: tuple[News, ...]) -> None:
        """Queue news for their iterators; may be called from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._sort, news)
        except RuntimeError:
            return  # the loop is closed: nobody is left to tell

    def _sort(self, news: tuple[News, ...]) -> None:
        for each in news:
            queue = self.queues.get(each.request_id)
            if queue is not None:
                queue.put_nowait(each)


class AsyncProcessClient:
    """Asyncio client of one engine or several of one model, balanced like `DataParallelClient`.

    Made by `start`. `async with` closes it.
    """

    def __init__(self, started: Fleet, inbox: _Inbox) -> None:
        self._fleet = started
        self._inbox = inbox
        self.model: ModelInfo = started.model
        # Also when this object is dropped, and at the interpreter's exit.
        self._finalizer = weakref.finalize(self, started.close)

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        num_engines: int = 1,
        *,
        limits: ClientLimits | None = None,
        progress: Progress | None = None,
        program: Sequence[str] = child_process_link.PROGRAM,
    ) -> AsyncProcessClient:
        """Start the engines and wait until they are loaded.

        Raises: LoadError, Unavailable, DeadlineExceeded; no process is left then, nor when the
            caller is cancelled.
        """
        inbox = _Inbox()
        made = Fleet(
            share_cores(config, num_engines),
            num_engines,
            deliver=inbox.deliver,
            limits=limits or ClientLimits(),
            program=program,
            progress=progress,
        )
        starting = asyncio.ensure_future(asyncio.to_thread(made.start))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            await asyncio.to_thread(made.close)  # which makes `starting` end
            await asyncio.wait([starting])
            if not starting.cancelled():
                starting.exception()  # seen
            raise
        return cls(made, inbox)

    @property
    def num_engines(self) -> int:
        """Number of engines; their ranks are 0 to num_engines - 1."""
        return self._fleet.num_engines

    @property
    def pids(self) -> tuple[int | None, ...]:
        """Return the engines' process ids by rank; None for one that was not started."""
        return self._fleet.pids

    async def generate(self, ask: Ask, *, rank: int | None = None) -> AsyncGenerator[News, None]:
        """Submit a request and yield its news until it is over. Leaving the iterator early cancels
        the request.

        Raises: the error that the request failed with (Cancelled after `cancel`), and the errors of
        `EngineClient.submit`.
        """
        queues = self._inbox.queues
        if ask.request_id in queues:
            raise AlreadyExists(f"ask {ask.request_id} is live already")
        queue: asyncio.Queue[News] = asyncio.Queue()
        queues[ask.request_id] = queue
        try:
            self._fleet.submit(ask, rank)
            while True:
                news = await queue.get()
                if news.failure is not None:
                    raise news.failure.to_error()
                yield news
                if news.is_over:
                    return
        finally:
            del queues[ask.request_id]
            self.cancel(ask.request_id)

    def cancel(self, request_id: str) -> None:
        """Cancel a request in any state; its iterator raises Cancelled. Never waits."""
        if self._finalizer.alive:
            self._fleet.cancel(request_id)

    def end_sample(self, request_id: str, sample_index: int) -> None:
        """End one sample whose text has ended before its tokens; the others go on. Never waits."""
        if self._finalizer.alive:
            self._fleet.end_sample(request_id, sample_index)

    async def check(self, asks: Sequence[Ask]) -> None:
        """Check whether an engine would accept these requests, without submitting them."""
        for start, group in data_parallel.check_groups(asks):
            try:
                await self._wait(self._fleet.ask_one("check", group))
            except BatonError as error:
                raise data_parallel.shifted(error, start) from error

    async def stats(self) -> tuple[EngineStats, ...]:
        """Return gauges and counters of each engine that is alive, in order of rank."""
        futures = self._fleet.ask_all("stats")
        return tuple(
            [data_parallel.value(await self._wait(future), EngineStats) for future in futures]
        )

    async def metrics(self) -> tuple[MetricsSnapshot, ...]:
        """Return throughput and latency histograms of each engine that is alive, in order of
        rank."""
        futures = self._fleet.ask_all("metrics")
        return tuple(
            [data_parallel.value(await self._wait(each), MetricsSnapshot) for each in futures]
        )

    async def load_adapter(self, name: str, folder: str) -> LoadedAdapter:
        """Load a LoRA adapter from `folder` on every engine that is alive, so that requests can
        name it."""
        futures = self._fleet.ask_all("load_adapter", name=name, folder=folder)
        loaded = [
            data_parallel.value(await self._wait(future), LoadedAdapter) for future in futures
        ]
        return data_parallel.common_adapter(loaded)

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter from every engine that is alive."""
        for future in self._fleet.ask_all("unload_adapter", name=name):
            await self._wait(future)

    async def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Return the adapters loaded on the first engine that is alive."""
        raw = await self._wait(self._fleet.ask_one("adapters"))
        return data_parallel.value(raw, tuple[LoadedAdapter, ...])

    async def check_integrity(self) -> None:
        """Check the invariants of every engine that is alive and of the client itself. Raises:
        IntegrityError."""
        self._fleet.check_own_integrity()
        for future in self._fleet.ask_all("check_integrity"):
            await self._wait(future)

    async def close(self) -> None:
        """Stop all engines and end all live requests; bounded in time and idempotent."""
        await asyncio.shield(asyncio.to_thread(self._finalizer))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def _wait(self, future: concurrent.futures.Future[msgspec.Raw]) -> msgspec.Raw:
        async with Deadline.after(self._fleet.limits.call_timeout_s).timeout("the engine's answer"):
            return await asyncio.wrap_future(future)
