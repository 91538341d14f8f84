"""What a long request that joins costs those who decode, of the host: no GPU needed.

The model costs nothing (benchmarks/engine_step.py), and each step is launched ahead. So many
streams decode; every `--every` steps a request of `--prompt-tokens` joins as one that was handed
over does, with its cache and its first token, and ends with the next one. Microseconds, p10, p50
and p90: of `reserve` and `start`, which run while a step computes; and from a step's draws to its
events, which everybody waits for: of a step in which it ends, and of the others. The last line
printed is one JSON object.

    OMP_NUM_THREADS=1 python -m benchmarks.joining --walk-mib 32

With `--walk-mib` so much memory is read before each call: a worker's engine thread finds nothing of
its own in the processor's caches either, after a device's step.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from rich.console import Console

from benchmarks.context import context, publish
from benchmarks.engine_step import BLOCK_SIZE, VOCAB_SIZE, ZeroCostAhead, ZeroCostModel, block_hash
from engine.config import EngineConfig
from engine.loop import Engine
from engine.models.interface import Launch
from engine.request import Request, Sampling
from engine.sampling.row import Drawn
from process import entrypoint

T = TypeVar("T")

NUM_BEFORE = 3
"""Steps between `reserve` and `start`, while the cache would be on its way."""
_STREAM_TOKENS = 256


class _Ahead(ZeroCostAhead):
    """Knows when it was read last."""

    read_s = 0.0

    def read(self, launch: Launch) -> list[Drawn]:
        """What `launch` gave."""
        drawn = super().read(launch)
        self.read_s = time.perf_counter()
        return drawn


class Joining:
    """The engine, and the microseconds that it took by stretch."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.us: dict[str, list[float]] = {}
        self._rng = random.Random(0)
        self._num_prompt = arguments.prompt_tokens
        self._walked = bytearray(arguments.walk_mib << 20)
        num_streams = arguments.streams
        num_steps = (arguments.every + NUM_BEFORE + 8) * (arguments.joins + 2)
        num_tokens = _STREAM_TOKENS + num_steps
        num_blocks = num_streams * (num_tokens // BLOCK_SIZE + 2)
        num_blocks += arguments.room * (self._num_prompt // BLOCK_SIZE + 1)
        window = max(num_tokens, self._num_prompt) + BLOCK_SIZE
        model = ZeroCostModel(num_streams + 1, window)
        model.ahead = self._ahead = _Ahead()
        config = EngineConfig(num_blocks=num_blocks, max_num_tokens_per_step=window)
        self._engine = Engine(config, model)
        for number in range(num_streams):
            self._engine.submit(self._request(f"stream {number}", _STREAM_TOKENS, num_steps))
        while self._engine.stats().num_output_tokens < num_streams:
            self._engine.step()

    def _request(self, name: str, num_tokens: int, max_tokens: int) -> Request:
        """Its prompt's hashes are known, as a handed-over one's are."""
        prompt = tuple(self._rng.choices(range(1, VOCAB_SIZE), k=num_tokens))
        hashes, parent = [], b""
        for first in range(0, num_tokens - BLOCK_SIZE + 1, BLOCK_SIZE):
            parent = block_hash(parent, prompt[first : first + BLOCK_SIZE])
            hashes.append(parent)
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        return Request(name, prompt, sampling, block_hash, prompt_hashes=tuple(hashes))

    def _timed(self, name: str, work: Callable[[], T]) -> T:
        for first in range(0, len(self._walked), 1 << 20):
            bytes(memoryview(self._walked)[first : first + (1 << 20)])
        began_s = time.perf_counter()
        found = work()
        ended_s = time.perf_counter()
        if name in ("step", "end"):  # from its draws on
            began_s = self._ahead.read_s
        self.us.setdefault(name, []).append((ended_s - began_s) * 1e6)
        return found

    def join(self, number: int, every: int) -> None:
        """Ordinary steps, and one request that joins. Raises: RuntimeError if it did not."""
        engine, name = self._engine, str(number)
        for _ in range(every):
            self._timed("step", engine.step)
        request = self._request(name, self._num_prompt, 2)
        self._timed("reserve", lambda: engine.reserve(request))
        for _ in range(NUM_BEFORE):
            self._timed("step", engine.step)
        outputs = ((1,),)
        self._timed(
            "start",
            lambda: engine.start(name, num_loaded_tokens=self._num_prompt, outputs=outputs),
        )
        engine.step()  # it is in the launch for the next one
        events = self._timed("end", engine.step).events
        if not any(event.finish_reason for event in events):
            raise RuntimeError(f"request {name} did not end")
        engine.step()
        engine.check_integrity()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--every", type=int, default=20, help="steps")
    parser.add_argument("--joins", type=int, default=60)
    parser.add_argument("--room", type=int, default=4, help="prompts that the cache has room for")
    parser.add_argument("--walk-mib", type=int, default=0, help="see above")
    parser.add_argument("--out", type=Path, help="also write the JSON line to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    joining = Joining(arguments)
    entrypoint.begin_serving()
    for number in range(arguments.joins):
        joining.join(number, arguments.every)
    cuts = {name: statistics.quantiles(us, n=10) for name, us in joining.us.items()}
    found = {
        name: {f"p{10 * i + 10}": round(one[i]) for i in (0, 4, 8)} for name, one in cuts.items()
    }
    Console(stderr=True).print(found)
    settings = {name: value for name, value in vars(arguments).items() if name != "out"}
    result = {
        "benchmark": "joining",
        **settings,
        "us": found,
        "load_average": round(os.getloadavg()[0], 1),  # others' work on the same cores
        **context(),
        "torch": torch.__version__,
    }
    publish(result, arguments.out)


if __name__ == "__main__":
    main()
