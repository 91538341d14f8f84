"""What `entrypoint.SWITCH_INTERVAL_S` does to an engine's thread and to the loop beside it: no
engine, no GPU, two threads that compute nothing.

One waits in C for `--step-ms`, as for a device, needs Python for 0.05 ms to read what was drawn,
tells the other one, and needs 0.35 ms more to launch what comes next. The other one needs 0.2 ms to
tell the streams of it; now and then it has six turns of 0.3 ms of other work besides, between
which it looks whether there is something to tell, as asyncio does. Of each length of the interval,
in ms since the device was done: when the first thread woke up, had launched, and when the streams
were told; and how long the six turns took. The last line printed is one JSON object.

    python -m benchmarks.switch_interval

Two cores of their own, or it measures the machine's other work.
"""

from __future__ import annotations

import argparse
import random
import select
import socket
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.harness import context, publish

INTERVALS_S = (0.0005, 0.0002, 0.0001, 0.00005)
READ_S, LAUNCH_S, TELL_S, TURN_S = 0.00005, 0.00035, 0.0002, 0.0003
NUM_TURNS = 6
PAUSE_S = (0.001, 0.006)
"""Between one row of turns and the next."""


def _spin(num: int) -> int:
    total = 0
    for number in range(num):
        total += number
    return total


def _spins_per_s() -> float:
    begun_s, num = time.thread_time(), 3_000_000
    _spin(num)
    return num / (time.thread_time() - begun_s)


class _Trial:
    """Both threads for a while."""

    def __init__(self, step_s: float, spins_per_s: float, *, has_work: bool) -> None:
        self._step_s = step_s
        self._rate = spins_per_s
        self._has_work = has_work
        self._is_over = False
        self._reader, self._writer = socket.socketpair()
        self._untold: list[float] = []  # when each was over on the device
        self.ms: dict[str, list[float]] = {"woken": [], "launched": [], "told": [], "turns": []}

    def run(self, seconds: float) -> dict[str, dict[str, float]]:
        threads = [threading.Thread(target=run) for run in (self._engine, self._loop)]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        self._is_over = True
        for thread in threads:
            thread.join()
        self._reader.close()
        self._writer.close()
        return {name: _cuts(values) for name, values in self.ms.items()}

    def _compute(self, seconds: float) -> None:
        _spin(int(seconds * self._rate))

    def _note(self, name: str, since_s: float) -> None:
        self.ms[name].append((time.perf_counter() - since_s) * 1e3)

    def _engine(self) -> None:
        while not self._is_over:
            over_s = time.perf_counter() + self._step_s
            time.sleep(self._step_s)
            self._note("woken", over_s)
            self._compute(READ_S)
            self._untold.append(over_s)
            self._writer.send(b"x")
            self._compute(LAUNCH_S)
            self._note("launched", over_s)

    def _loop(self) -> None:
        rng, num_turns, begun_s = random.Random(1), 0, 0.0
        due_s = time.perf_counter()
        while not self._is_over:
            wait_s = max(0.0, due_s - time.perf_counter()) if self._has_work else 0.1
            if select.select([self._reader], [], [], 0 if num_turns else wait_s)[0]:
                self._reader.recv(64)
                while self._untold:
                    self._compute(TELL_S)
                    self._note("told", self._untold.pop(0))
            if self._has_work and not num_turns and time.perf_counter() >= due_s:
                num_turns, begun_s = NUM_TURNS, time.perf_counter()
            if num_turns:
                self._compute(TURN_S)
                num_turns -= 1
                if not num_turns:
                    self._note("turns", begun_s)
                    due_s = time.perf_counter() + rng.uniform(*PAUSE_S)


def _cuts(values_ms: list[float]) -> dict[str, float]:
    if len(values_ms) < 2:
        return {}
    found = statistics.quantiles(values_ms, n=100, method="inclusive")
    return {name: round(found[at - 1], 3) for name, at in (("p50", 50), ("p90", 90), ("p99", 99))}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=2.5, help="of each trial")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    spins_per_s = _spins_per_s()
    trials: list[dict[str, Any]] = []
    for has_work in (False, True):
        for interval_s in INTERVALS_S:
            sys.setswitchinterval(interval_s)
            trial = _Trial(arguments.step_ms / 1e3, spins_per_s, has_work=has_work)
            found = trial.run(arguments.seconds)
            trials.append({"switch_ms": interval_s * 1e3, "has_work": has_work, **found})
            Console(stderr=True).print(trials[-1])
    publish({"benchmark": "switch_interval", **context(), "trials": trials}, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
