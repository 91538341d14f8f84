"""The streams of benchmarks.storm, in a process of their own: nothing else that the benchmark does
can delay what they see. Times are seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

from baton.client import Client

PROMPT_TOKENS = 256
TIMEOUT_S = 300.0
_WARM_TOKENS = 8


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


class Streams:
    """The way to that process: `running` starts it, `wait_begun` waits, `end` brings back when
    each token of each stream came, and how many came with it."""

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

    def end(self) -> list[list[tuple[float, int]]]:
        """Raises: RuntimeError when a stream ended before."""
        self._connection.send("end")
        found: list[list[tuple[float, int]]] = self._hear()
        return found

    def _hear(self) -> Any:
        if not self._connection.poll(TIMEOUT_S):
            raise RuntimeError("the streams do not answer")
        problem, value = self._connection.recv()
        if problem:
            raise RuntimeError(problem)
        return value


def _run(plan: StreamPlan, connection: Connection) -> None:
    try:
        asyncio.run(_stream_all(plan, connection))
    except Exception as error:  # the other process says it
        connection.send((f"{type(error).__name__}: {error}", None))


async def _stream_all(plan: StreamPlan, connection: Connection) -> None:
    rng = random.Random(plan.seed)
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
        connection.send(("", seen))


def _check(tasks: Sequence[asyncio.Task[None]]) -> None:
    over = [task for task in tasks if task.done()]
    for task in over:
        task.result()  # what it failed with
    if over:
        raise RuntimeError(f"{len(over)} streams ended before the storm: raise --max-tokens")
