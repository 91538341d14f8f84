"""The decode worker of benchmarks.admission: a real one, over gRPC, whose engine decodes on a
device that is paced: each launch takes so long, as a GPU's would, and the host is free meanwhile.

A process of its own, so that nothing but a decode worker is in it. It says its address as one JSON
line; told `end` on stdin it says, as another, what it saw: when the device was busy, how long each
call of the engine took its thread, how late a thread was back from waiting for the device, and what
each thread cost. Times are seconds of the machine's monotonic clock.

    python -m benchmarks.admission_worker '{"store_address": ..., "key_file": ..., ...}'
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvloop

from engine.config import EngineConfig
from engine.fake import FakeModel
from engine.loop import Engine
from engine.models.interface import DecodeRow, Progress
from engine.sampling.row import Draw, Drawn
from process import entrypoint
from services.decode.role import DecodeRole
from services.worker import main
from services.worker.config import WorkerSettings

VOCAB = 32000
WINDOW = 9216
BLOCK_SIZE = 16
MAX_ROWS = 64
NUM_BLOCKS = 12288
TIMED = ("step", "reserve", "start", "abort")


def model() -> FakeModel:
    """As both workers have it: their fingerprints must be the same."""
    return FakeModel(vocab_size=VOCAB, context_window=WINDOW, block_size=BLOCK_SIZE)


@dataclass(frozen=True, eq=False)
class _Launch:
    num_rows: int
    over_s: float


@dataclass
class Seen:
    """What was measured, in order of time."""

    launches: list[tuple[float, float]] = field(default_factory=list)
    """(when the device could have begun, when it did)."""
    late: list[tuple[float, float]] = field(default_factory=list)
    """(when a launch was over, how much later the engine's thread knew)."""
    calls: list[tuple[str, float, float, float]] = field(default_factory=list)
    """(method of the engine, begun, how long, CPU time of its thread)."""
    collections: list[tuple[float, float]] = field(default_factory=list)
    """(begun, how long): of Python's garbage collector."""
    held: list[tuple[float, float]] = field(default_factory=list)
    """(when a timer of the loop was due, how late it was)."""


class PacedDevice:
    """DecodesAhead without arithmetic: launches take `step_s` each, one after the other."""

    def __init__(self, step_s: float, seen: Seen) -> None:
        self.max_rows = MAX_ROWS
        self.takes_prompts = False
        self._step_s = step_s
        self._seen = seen
        self._free_s = 0.0

    def warm_up(self, progress: Progress | None = None) -> None:
        """Nothing to compile."""

    def takes(self, draw: Draw) -> bool:
        """All draws."""
        return True

    def launch(self, rows: Sequence[DecodeRow]) -> _Launch:
        """Begins when the one before is over, or now."""
        now_s = time.monotonic()
        begun_s = max(now_s, self._free_s)
        self._seen.launches.append((self._free_s, begun_s))
        self._free_s = begun_s + self._step_s
        return _Launch(len(rows), self._free_s)

    def read(self, launch: Any) -> list[Drawn]:
        """Waits as for a device: without the interpreter's lock."""
        left_s = launch.over_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
            self._seen.late.append((launch.over_s, time.monotonic() - launch.over_s))
        return [Drawn(1)] * launch.num_rows

    def drain(self) -> None:
        """Nothing of it is read."""


class TimedEngine:
    """An engine whose calls are timed on their thread."""

    def __init__(self, engine: Engine, seen: Seen) -> None:
        self._engine = engine
        self._seen = seen
        for name in TIMED:
            setattr(self, name, self._timed(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _timed(self, name: str) -> Callable[..., Any]:
        call = getattr(self._engine, name)
        calls = self._seen.calls

        def timed(*arguments: Any, **options: Any) -> Any:
            began_s, cpu_s = time.monotonic(), time.thread_time()
            try:
                return call(*arguments, **options)
            finally:
                took_s, used_s = time.monotonic() - began_s, time.thread_time() - cpu_s
                calls.append((name, began_s, took_s, used_s))

        return timed


def _watch_collections(seen: Seen) -> None:
    began_s = 0.0

    def heard(phase: str, info: dict[str, int]) -> None:
        nonlocal began_s
        if phase == "start":
            began_s = time.monotonic()
        else:
            seen.collections.append((began_s, time.monotonic() - began_s))

    gc.callbacks.append(heard)


async def _watch_loop(seen: Seen, every_s: float = 0.01) -> None:
    while True:
        due_s = time.monotonic() + every_s
        await asyncio.sleep(every_s)
        seen.held.append((due_s, time.monotonic() - due_s))


async def _cpu(told: asyncio.Queue[str]) -> list[dict[str, float]]:
    """CPU seconds of each thread by its name, at each line on stdin; the last is `end`."""
    found = []
    while True:
        line = await told.get()
        by_name = {}
        for thread in threading.enumerate():
            if thread.ident is not None:
                clock = time.pthread_getcpuclockid(thread.ident)
                by_name[thread.name] = time.clock_gettime(clock)
        found.append(by_name | {"process": time.process_time()})
        if line == "end":
            return found


async def _run(ask: dict[str, Any]) -> None:
    seen = Seen()
    paced = model()
    paced.ahead = PacedDevice(ask["step_s"], seen)
    config = EngineConfig(block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_num_running=MAX_ROWS)
    engine: Any = TimedEngine(Engine(config, paced), seen)
    settings = WorkerSettings(
        worker_id="decode-0",
        redis_url="",
        store_address=ask["store_address"],
        transport="shm",
        remote_transport=ask["transport"],
        handle_keys_file=ask["key_file"],
    )
    worker = await main.start(engine, settings, "decode", DecodeRole)
    if ask["serves"]:
        entrypoint.begin_serving()
    loop = asyncio.get_running_loop()
    told: asyncio.Queue[str] = asyncio.Queue()

    def listen() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(told.put_nowait, line.strip())

    threading.Thread(target=listen, name="stdin", daemon=True).start()
    _watch_collections(seen)
    watching = asyncio.create_task(_watch_loop(seen))
    _say({"address": worker.address})
    cpu = await _cpu(told)
    watching.cancel()
    _say(vars(seen) | {"cpu": cpu})
    await worker.stop()


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(_run(json.loads(sys.argv[1])))
