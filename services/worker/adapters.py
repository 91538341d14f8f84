"""WorkerAdapters: the LoRA adapters of one worker, loaded at start, by RPC, or by the cluster's
desired state, and identified by name and content digest.

Several contents of one name can be loaded at once: requests that began with the old content finish
on it while new requests get the new one. The engine knows an adapter by its digest alone. The
engine runs in a thread of its own, so the table here is as of the last change; it follows the
engine even when the caller of a change is cancelled. A request's digest is checked twice: here when
the request arrives, and on the engine's thread when its blocks are reserved (`check_digest`); from
then on the engine keeps the adapter in place. Files are read on a separate thread, since a file
system may hang.

States of a content: loaded -> held (during a load across the whole cluster, until a time) -> wanted
-> unloaded, when the desired state of its name no longer includes it and no request uses it. A
content that was loaded at start, or by an RPC without a hold time, stays as long as the desired
state does not contain its name.

Used on the event loop's thread, except `check_digest`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from engine.lora.adapter import LoraAdapter, read_adapter
from engine.lora.limits import LoraLimits
from engine.lora.manager import AdapterInfo
from process import logs
from process.background_tasks import end_tasks, start_task
from process.rpc_errors import (
    BatonError,
    FailedPrecondition,
    InvalidArgument,
    NoCapacity,
    NotFound,
    Unavailable,
)
from protos import common_pb2
from services import adapter_wishes
from services.adapter_wishes import Wishes
from services.worker.engine_port import WorkerEngine
from services.worker.engine_thread import EngineThread

logger = logging.getLogger(__name__)

T = TypeVar("T")

Key = tuple[str, str]
"""Adapter name and content digest (hex)."""

READ_TIMEOUT_S = 120.0
"""Seconds to read all of an adapter's files. Guessed: a gigabyte from a slow disk."""

MAX_NUM_READING = 4
"""Most adapters that are read at a time, including those whose file system hangs. Guessed."""

RETRY_S = 10.0
"""Seconds between attempts to load an adapter that the cluster wants and this worker could not
load. Guessed."""


@dataclass(frozen=True)
class Hold:
    """A temporary hold on a loaded adapter that the cluster's desired state does not name yet."""

    until_s: float
    version: int
    """Version of the desired state that is about to be changed: a later one decides about the
    adapter."""


@dataclass
class Known:
    """State of a worker's adapters that is kept beside the engine's own."""

    keys: set[Key] = field(default_factory=set)
    """Adapters that are loaded."""

    holds: dict[Key, Hold] = field(default_factory=dict)
    """Adapters among them that are held for a load across the whole cluster."""

    wishes: Wishes = field(default_factory=dict)


class WorkerAdapters:
    """LoRA adapters of one worker, and the loading and unloading of them. `on_change` is called
    when routers should learn of a change."""

    def __init__(
        self,
        thread: EngineThread,
        infos: Sequence[AdapterInfo],
        *,
        model_names: Collection[str] = (),
        known: Known | None = None,
        read_timeout_s: float = READ_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the adapter table of one worker life.

        model_names: names of the base model, which share one request field with adapter names.
        known: adapters of the previous life over the same engine.
        """
        self._thread = thread
        self._model_names = frozenset(model_names)
        self._read_timeout_s = read_timeout_s
        self._clock = clock
        self._readers: list[threading.Thread] = []
        self._infos = {info.digest: info for info in infos}
        self.known = known or Known()
        self._retry_at_s: dict[Key, float] = {}
        self._following: asyncio.Task[None] | None = None
        self.on_change: Callable[[], None] = _nobody

    def check(self, name: str, digest: str) -> None:
        """Check that an adapter with this name and content is loaded. Raises: FailedPrecondition
        otherwise; another worker may have it."""
        if name and (name, digest) not in self.known.keys:
            has_other = any(known == name for known, _ in self.known.keys)
            what = f"has other content under {name!r}" if has_other else f"{name!r} is not loaded"
            raise FailedPrecondition(f"adapter: {what} here; loaded are: {self._loaded_names()}")

    async def load(
        self, name: str, folder: Path, *, hold_s: float = 0.0, version: int = 0
    ) -> AdapterInfo:
        """Read and load an adapter beside other contents of its name; the engine's steps wait only
        while its weights are put in place.

        Args: hold_s: seconds after which it is dropped unless the cluster wants it; 0: it stays.
            version: version of the desired state that is about to be changed.
        Raises: InvalidArgument naming what is wrong with its name or files; NoCapacity; Unavailable
            when the files cannot be read in time. Nothing changed then.
        """
        if problem := adapter_wishes.name_problem(name):
            raise InvalidArgument("adapter", problem)
        if name in self._model_names:
            raise InvalidArgument("adapter", f"{name!r} is the served model's name; choose another")
        return await self._load(name, folder, hold_s=hold_s, version=version)

    async def _load(
        self, name: str, folder: Path, *, hold_s: float = 0.0, version: int = 0, digest: str = ""
    ) -> AdapterInfo:
        """Read and load an adapter. digest: digest that the content must have; empty: any."""
        limits = await self._thread.call(lambda engine: engine.adapter_limits())
        adapter = await self._read(folder, limits)
        key = (name, adapter.digest)
        if digest and digest != adapter.digest:
            raise FailedPrecondition(
                f"adapter: {folder} holds {adapter.digest[:16]} now, not the {digest[:16]} that "
                f"{name!r} was loaded with"
            )

        def note() -> None:
            is_new = key not in self.known.keys or key in self.known.holds
            self.known.keys.add(key)
            self.known.holds.pop(key, None)
            if is_new and hold_s and not self._is_wished(key):
                self.known.holds[key] = Hold(self._clock() + hold_s, version)

        info = await self._change(
            lambda engine: engine.install_adapter(adapter.digest, adapter), note
        )
        logs.event(
            logger, "adapter_loaded", adapter=name, digest=adapter.digest, folder=str(folder)
        )
        return info

    async def unload(self, name: str, digest: str = "") -> None:
        """Unload one content of an adapter if it is only held, or all contents (digest empty);
        never one that the cluster wants.

        Raises: NotFound; FailedPrecondition while requests use it.
        """
        if digest:
            if (name, digest) in self.known.holds:
                await self._drop((name, digest))
            return
        keys = [key for key in sorted(self.known.keys) if key[0] == name]
        if not keys:
            raise NotFound(f"no adapter {name!r} is loaded; loaded are: {self._loaded_names()}")
        for key in keys:
            if not self._is_wished(key):
                await self._drop(key)

    def follow(self, raw: Mapping[bytes, bytes]) -> None:
        """Apply the cluster's desired adapters, as read from Redis: load those that are missing,
        unload those that are no longer wanted."""
        problems: list[str] = []
        read = adapter_wishes.parse(raw, problems)
        for problem in problems:
            logs.event(logger, "wish_not_read", level=logging.WARNING, why=problem)
        self.known.wishes = adapter_wishes.merged(self.known.wishes, read, time.time())
        for key in [key for key in self.known.holds if self._is_wished(key)]:
            del self.known.holds[key]
        is_busy = self._following is not None and not self._following.done()
        if not is_busy and (self._unwanted() or self._missing()):
            self._following = start_task(self._follow_wishes(), "adapter-wishes")

    async def stop(self) -> None:
        """Stop following the desired state."""
        await end_tasks([self._following])
        self._following = None

    def _unwanted(self) -> list[Key]:
        return unwanted(self.known.keys, self.known.wishes, self.known.holds, self._clock())

    def _missing(self) -> list[tuple[Key, str]]:
        own = [wish for wish in self.known.wishes.values() if wish.model in self._model_names]
        now_s = self._clock()
        return [
            (key, folder)
            for key, folder in missing(self.known.keys, own)
            if self._retry_at_s.get(key, now_s) <= now_s
        ]

    def _is_wished(self, key: Key) -> bool:
        wish = self.known.wishes.get(key[0])
        return wish is not None and key[1] in {v.digest for v in adapter_wishes.versions(wish)}

    async def _follow_wishes(self) -> None:
        for key in self._unwanted():
            with contextlib.suppress(FailedPrecondition):  # a request uses it: at a later beat
                await self._drop(key)
        for key, folder in self._missing():
            name, digest = key
            try:
                await self._load(name, Path(folder), digest=digest)
                self._retry_at_s.pop(key, None)
            except BatonError as error:
                self._retry_at_s[key] = self._clock() + RETRY_S
                logs.event(
                    logger,
                    "wish_not_followed",
                    level=logging.WARNING,
                    adapter=name,
                    digest=digest,
                    why=str(error),
                )

    async def _drop(self, key: Key) -> None:
        """Unload one adapter from the engine. Raises: FailedPrecondition while requests use it."""
        name, digest = key
        is_shared = any(other != name and d == digest for other, d in self.known.keys)

        def take_off(engine: WorkerEngine) -> None:
            if not is_shared:
                engine.unload_adapter(digest)

        def forget() -> None:
            self.known.keys.discard(key)
            self.known.holds.pop(key, None)

        try:
            await self._change(take_off, forget)
        except FailedPrecondition as error:
            raise FailedPrecondition(str(error).replace(digest, name)) from error
        logs.event(logger, "adapter_dropped", adapter=name, digest=digest)

    async def _change(self, change: Callable[[WorkerEngine], T], then: Callable[[], object]) -> T:
        """Run a change of the engine's adapters between two steps, and record it here before the
        caller continues."""
        loop = asyncio.get_running_loop()

        def changed(engine: WorkerEngine) -> T:
            result = change(engine)
            loop.call_soon_threadsafe(self._follow_engine, engine.adapters(), then)
            return result

        return await self._thread.call(changed)

    def _follow_engine(self, infos: Sequence[AdapterInfo], then: Callable[[], object]) -> None:
        self._infos = {info.digest: info for info in infos}
        then()
        self.known.keys = {key for key in self.known.keys if key[1] in self._infos}
        self.on_change()

    def _loaded_names(self) -> str:
        return ", ".join(sorted({name for name, _ in self.known.keys})) or "none"

    async def _read(self, folder: Path, limits: LoraLimits) -> LoraAdapter:
        """Read an adapter's files on a daemon thread: one that hangs is abandoned, and counts until
        it returns."""
        self._readers = [reader for reader in self._readers if reader.is_alive()]
        if len(self._readers) >= MAX_NUM_READING:
            raise NoCapacity(f"adapter: {MAX_NUM_READING} are being read already")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[LoraAdapter] = loop.create_future()

        def settle(adapter: LoraAdapter | None, problem: Exception | None) -> None:
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
        """Return the loaded adapters as protobuf messages, by name and content."""
        return [
            info_to_proto(name, self._infos[digest]) for name, digest in sorted(self.known.keys)
        ]


def unwanted(
    loaded: Iterable[Key], wishes: Wishes, holds: Mapping[Key, Hold], now_s: float
) -> list[Key]:
    """Return the adapters to unload: those neither wanted nor held whose name the desired state
    contains, and those whose hold has expired or was overtaken by a later change of the name."""
    keys = []
    for name, digest in sorted(loaded):
        wish = wishes.get(name)
        kept = {v.digest for v in adapter_wishes.versions(wish)} if wish is not None else set()
        hold = holds.get((name, digest))
        is_held = hold is not None and now_s < hold.until_s
        if hold is not None and wish is not None and wish.version > hold.version:
            is_held = False
        if digest in kept or is_held:
            continue
        if wish is not None or hold is not None:
            keys.append((name, digest))
    return keys


def missing(
    loaded: Collection[Key], wishes: Iterable[common_pb2.AdapterWish]
) -> list[tuple[Key, str]]:
    """Return the adapters that are wanted and not loaded, with their folder where it is known."""
    return [
        ((wish.name, version.digest), version.folder)
        for wish in wishes
        for version in adapter_wishes.versions(wish)
        if version.folder and (wish.name, version.digest) not in loaded
    ]


def info_to_proto(name: str, info: AdapterInfo) -> common_pb2.AdapterStatus:
    """Convert one adapter to its protobuf message."""
    return common_pb2.AdapterStatus(
        name=name, digest=info.digest, rank=info.rank, num_bytes=info.num_bytes
    )


def check_digest(engine: WorkerEngine, digest: str) -> None:
    """Check, in the engine job that reserves a request's blocks, that the adapter content its chain
    hashes are keyed with is still loaded. Raises: FailedPrecondition."""
    if digest and all(info.digest != digest for info in engine.adapters()):
        raise FailedPrecondition(f"adapter: {digest[:16]} was unloaded meanwhile")


def _nobody() -> None:
    """Ignore a change; the default for `on_change`."""
