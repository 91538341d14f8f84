"""The streams of benchmarks.storm, in a process of their own: nothing else that the benchmark does
can delay what they see. Times are seconds of the machine's monotonic clock.

Nor can its own garbage collector: the process imports all that the benchmark does, and one look at
every object there is takes as long as a dozen tokens. It looks at them once, before the streams
begin, and tells of each later look that took long.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

from baton.client import Client
from process import entrypoint

PROMPT_TOKENS = 256
TIMEOUT_S = 300.0
_WARM_TOKENS = 8
_LONG_S = 0.001


def prompt_of(rng: random.Random, vocab_size: int, num_tokens: int) -> list[int]:
    """One that nobody had before."""
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


@dataclass(frozen=True)
class StreamPlan:
    """What streams there are."""

    address: str
    vocab_size: int
    num_streams: int
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Seen:
    """What came of the streams.

    Attributes:
        streams: when each token of each stream came, and how many came with it.
        pauses: of the process that watched, for its garbage: when each began, and seconds.
    """

    streams: list[list[tuple[float, int]]]
    pauses: list[tuple[float, float]]


class Streams:
    """The way to that process: `running` starts it, `wait_begun` waits, `end` brings back what it
    has seen."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @classmethod
    @contextmanager
    def running(cls, plan: StreamPlan) -> Iterator[Self]:
        """Until the block ends."""
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_run, args=(plan, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            yield cls(ours)
        finally:
            ours.close()
            process.join(10)
            if process.is_alive():
                process.kill()

    def wait_begun(self) -> None:
        """Until every stream decodes. Raises: RuntimeError with what they failed with."""
        self._hear()

    def end(self) -> Seen:
        """Raises: RuntimeError when a stream ended before."""
        self._connection.send("end")
        found: Seen = self._hear()
        return found

    def _hear(self) -> Any:
        if not self._connection.poll(TIMEOUT_S):
            raise RuntimeError("the streams do not answer")
        problem, value = self._connection.recv()
        if problem:
            raise RuntimeError(problem)
        return value


class _Pauses:
    """Of the garbage collector, from here on."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []
        self._begun_s = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        now_s = time.monotonic()
        if phase == "start":
            self._begun_s = now_s
        elif now_s - self._begun_s >= _LONG_S:
            self.found.append((self._begun_s, now_s - self._begun_s))


def _run(plan: StreamPlan, connection: Connection) -> None:
    try:
        entrypoint.begin_serving()
        asyncio.run(_stream_all(plan, connection))
    except Exception as error:  # the other process says it
        connection.send((f"{type(error).__name__}: {error}", None))


async def _stream_all(plan: StreamPlan, connection: Connection) -> None:
    rng = random.Random(plan.seed)
    pauses = _Pauses()
    seen: list[list[tuple[float, int]]] = [[] for _ in range(plan.num_streams)]
    async with Client(plan.address) as client:

        async def one(times: list[tuple[float, int]]) -> None:
            async for chunk in client.generate(
                prompt_of(rng, plan.vocab_size, PROMPT_TOKENS),
                max_tokens=plan.max_tokens,
                temperature=0.0,
                ignore_eos=True,
                timeout_s=TIMEOUT_S,
            ):
                if chunk.token_ids:
                    times.append((time.monotonic(), len(chunk.token_ids)))

        tasks = [asyncio.create_task(one(times)) for times in seen]
        told = asyncio.create_task(asyncio.to_thread(connection.recv))
        try:
            while not all(len(times) > _WARM_TOKENS for times in seen):
                _check(tasks)
                await asyncio.sleep(0.05)
            connection.send(("", None))
            await asyncio.wait([told, *tasks], return_when=asyncio.FIRST_COMPLETED)
            _check(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        connection.send(("", Seen(seen, pauses.found)))


def _check(tasks: Sequence[asyncio.Task[None]]) -> None:
    over = [task for task in tasks if task.done()]
    for task in over:
        task.result()  # what it failed with
    if over:
        raise RuntimeError(f"{len(over)} streams ended before the storm: raise --max-tokens")
