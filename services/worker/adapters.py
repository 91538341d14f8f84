"""The LoRA adapters of one worker: loaded at start and at run time, known by content.

The engine holds them and runs in a thread of its own, so what is known here is as of the last
change. A request is checked twice: here, when it comes, and on the engine's thread in the moment
its blocks are reserved (`check_digest`), because from then on the engine keeps the adapter in
place. Belongs to the loop's thread, but for `check_digest`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from engine.lora.registry import AdapterInfo
from process.errors import FailedPrecondition
from protos import common_pb2
from services.worker.engine_port import WorkerEngine
from services.worker.engine_thread import EngineThread


class WorkerAdapters:
    """See the module. `on_change` is called when routers should hear of a change."""

    def __init__(self, thread: EngineThread, infos: Sequence[AdapterInfo]) -> None:
        self._thread = thread
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
        """Read and load an adapter; the engine's steps wait meanwhile.

        Raises: InvalidArgument naming what is wrong with its files; NoCapacity; FailedPrecondition
            when other content of this name is in use. Nothing changed then.
        """
        info = await self._thread.call(lambda engine: engine.load_adapter(name, folder))
        self._infos[name] = info
        self.on_change()
        return info

    async def unload(self, name: str) -> None:
        """Raises: NotFound; FailedPrecondition while requests use it."""
        await self._thread.call(lambda engine: engine.unload_adapter(name))
        self._infos.pop(name, None)
        self.on_change()

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
