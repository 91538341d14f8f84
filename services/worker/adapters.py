"""The LoRA adapters of one worker: loaded at start and at run time, known by content.

The engine holds them and runs in a thread of its own, so what is known here is as of the last
change. A request is checked twice: here, when it comes, and on the engine's thread in the moment
its blocks are reserved (`check_digest`), because from then on the engine keeps the adapter in
place. Files are read by a thread of their own, for a file system may hang: the engine's thread only
puts in place what was read. Belongs to the loop's thread, but for `check_digest`.

Invariant: what is known here follows the engine, whatever becomes of the caller that asked for the
change.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

from engine.lora.config import LoraLimits
from engine.lora.files import Adapter, read_adapter
from engine.lora.registry import AdapterInfo
from process.errors import FailedPrecondition, InvalidArgument, NoCapacity, Unavailable
from protos import common_pb2
from services.worker.engine_port import WorkerEngine
from services.worker.engine_thread import EngineThread

T = TypeVar("T")

READ_TIMEOUT_S = 120.0
"""For all of an adapter's files. Guessed: a gigabyte from a slow disk."""

MAX_NUM_READING = 4
"""Adapters read at a time, those whose file system hangs counted. Guessed."""


class WorkerAdapters:
    """See the module. `on_change` is called when routers should hear of a change."""

    def __init__(
        self,
        thread: EngineThread,
        infos: Sequence[AdapterInfo],
        *,
        model_names: Collection[str] = (),
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        """model_names: of the model that adapters are of: requests name both in one field."""
        self._thread = thread
        self._model_names = frozenset(model_names)
        self._read_timeout_s = read_timeout_s
        self._readers: list[threading.Thread] = []
        self._infos = {info.name: info for info in infos}
        self.on_change: Callable[[], None] = _nobody

    def digest(self, name: str) -> str:
        """Content of the adapter, hex; empty for no adapter. Raises: FailedPrecondition when it is
        not loaded (any more): another worker may have it."""
        if not name:
            return ""
        info = self._infos.get(name)
        if info is None:
            loaded = ", ".join(sorted(self._infos)) or "none"
            raise FailedPrecondition(f"adapter: {name!r} is not loaded here; loaded are: {loaded}")
        return info.digest

    async def load(self, name: str, folder: Path) -> AdapterInfo:
        """Read and load an adapter; the engine's steps wait only while it is put in place.

        Raises: InvalidArgument naming what is wrong with its name or files; NoCapacity; FailedPrecondition
            when other content of this name is in use; Unavailable when the files cannot be read
            in time. Nothing changed then.
        """
        if name in self._model_names:
            raise InvalidArgument("adapter", f"{name!r} is the served model's name; choose another")
        limits = await self._thread.call(lambda engine: engine.adapter_limits())
        adapter = await self._read(folder, limits)
        return await self._change(lambda engine: engine.install_adapter(name, adapter))

    async def unload(self, name: str) -> None:
        """Raises: NotFound; FailedPrecondition while requests use it."""
        await self._change(lambda engine: engine.unload_adapter(name))

    async def _change(self, change: Callable[[WorkerEngine], T]) -> T:
        """Run a change between two steps; what is known here is told of it before the caller."""
        loop = asyncio.get_running_loop()

        def changed(engine: WorkerEngine) -> T:
            result = change(engine)
            loop.call_soon_threadsafe(self._follow, engine.adapters())
            return result

        return await self._thread.call(changed)

    def _follow(self, infos: Sequence[AdapterInfo]) -> None:
        self._infos = {info.name: info for info in infos}
        self.on_change()

    async def _read(self, folder: Path, limits: LoraLimits) -> Adapter:
        """On a daemon thread: one that hangs is given up, and counts until it comes back."""
        self._readers = [reader for reader in self._readers if reader.is_alive()]
        if len(self._readers) >= MAX_NUM_READING:
            raise NoCapacity(f"adapter: {MAX_NUM_READING} are being read already")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Adapter] = loop.create_future()

        def settle(adapter: Adapter | None, problem: Exception | None) -> None:
            if done.done():
                return  # its caller gave up
            if problem is not None:
                done.set_exception(problem)
            elif adapter is not None:
                done.set_result(adapter)

        def read() -> None:
            adapter, problem = None, None
            try:
                adapter = read_adapter(folder, limits)
            except Exception as error:  # handed to the caller
                problem = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                loop.call_soon_threadsafe(settle, adapter, problem)

        reader = threading.Thread(target=read, name="adapter-reader", daemon=True)
        self._readers.append(reader)
        reader.start()
        try:
            async with asyncio.timeout(self._read_timeout_s):
                return await done
        except TimeoutError as error:
            raise Unavailable(
                f"adapter: {folder} was not read within {self._read_timeout_s:g} s; is its file "
                "system there?"
            ) from error

    def to_proto(self) -> list[common_pb2.AdapterStatus]:
        """Those that are loaded, by name."""
        return [info_to_proto(self._infos[name]) for name in sorted(self._infos)]


def info_to_proto(info: AdapterInfo) -> common_pb2.AdapterStatus:
    """One adapter on the wire."""
    return common_pb2.AdapterStatus(
        name=info.name, digest=info.digest, rank=info.rank, num_bytes=info.num_bytes
    )


def check_digest(engine: WorkerEngine, name: str, digest: str) -> None:
    """On the engine's thread, with the reservation: the content is still the one that the request's
    chain hashes are keyed with. Raises: FailedPrecondition."""
    if not name:
        return
    for info in engine.adapters():
        if info.name == name and info.digest == digest:
            return
    raise FailedPrecondition(f"adapter: {name!r} was unloaded or replaced meanwhile")


def _nobody() -> None:
    """Nobody wants to hear of changes."""
