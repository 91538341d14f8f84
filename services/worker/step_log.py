"""StepLog: timestamps of the engine's steps, jobs, block transfers, garbage collections and event
loop stalls, to find out why a step was late.

The newest MAX_ENTRIES are kept in memory and written when the worker ends: a file in the folder of
the setting `step_log`, with one header object and then one JSON array per line. Times are seconds
of the machine's monotonic clock, so logs of several processes on it can be compared. The log has no
request names and no tokens. Any thread adds entries; `run` and `write` are used on the event loop.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections import deque
from pathlib import Path

MAX_ENTRIES = 1 << 18
"""Most entries that are kept: some 40 MB; 10 minutes of 5 ms steps with a few jobs each."""

LOOP_EVERY_S = 0.005
LOOP_LATE_S = 0.001
"""Seconds between checks of the event loop's delay, and the delay from which on it is logged."""

FIELDS = {
    "step": ["begun_s", "took_s", "num_tokens", "num_running"],
    "job": ["begun_s", "took_s", "name"],
    "transfer": ["begun_s", "took_s", "num_blocks"],
    "collection": ["begun_s", "took_s", "generation"],
    "loop_late": ["due_s", "late_s"],
}

Entry = tuple[str | float | int, ...]


class StepLog:
    """Log of the newest `max_entries` events of one worker, in memory."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._entries: deque[Entry] = deque(maxlen=max_entries)
        self._collecting_s = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def step(self, begun_s: float, num_tokens: int, num_running: int) -> None:
        """Log a step that has just ended."""
        took_s = time.monotonic() - begun_s
        self._entries.append(("step", begun_s, took_s, num_tokens, num_running))

    def job(self, begun_s: float, name: str) -> None:
        """Log a job that has just ended."""
        self._entries.append(("job", begun_s, time.monotonic() - begun_s, name))

    def transfer(self, begun_s: float, num_blocks: int) -> None:
        """Log a transfer that has just ended, with the number of blocks fetched and verified."""
        took_s = time.monotonic() - begun_s
        self._entries.append(("transfer", begun_s, took_s, num_blocks))

    async def run(self) -> None:
        """Log event loop stalls and garbage collections until cancelled."""
        gc.callbacks.append(self._on_collection)
        try:
            while True:
                due_s = time.monotonic() + LOOP_EVERY_S
                await asyncio.sleep(LOOP_EVERY_S)
                late_s = time.monotonic() - due_s
                if late_s > LOOP_LATE_S:
                    self._entries.append(("loop_late", due_s, late_s))
        finally:
            gc.callbacks.remove(self._on_collection)

    def write(self, folder: Path, worker_id: str) -> Path:
        """Write the log to a file in `folder`. Returns: its path. Raises: OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{worker_id}.steps.jsonl"
        with path.open("w", encoding="utf-8") as file:
            file.write(json.dumps({"worker_id": worker_id, "fields": FIELDS}) + "\n")
            for entry in tuple(self._entries):
                file.write(json.dumps(entry) + "\n")
        return path

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        now_s = time.monotonic()
        if phase == "start":
            self._collecting_s = now_s
            return
        took_s = now_s - self._collecting_s
        self._entries.append(("collection", self._collecting_s, took_s, info["generation"]))


def read(path: Path) -> dict[str, list[Entry]]:
    """Read the entries of a log file by kind, in order. Raises: OSError; ValueError for another
    file."""
    found: dict[str, list[Entry]] = {kind: [] for kind in FIELDS}
    with path.open(encoding="utf-8") as file:
        if json.loads(file.readline()).get("fields") != FIELDS:
            raise ValueError(f"{path.name} is no step log of this version")
        for line in file:
            kind, *values = json.loads(line)
            found[kind].append(tuple(values))
    return found
