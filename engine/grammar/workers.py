"""Threads for work that may run away: each can be waited for with a deadline and then given up on.

The grammar library gives up Python's lock while it works, so a parser that runs away stops nobody
but whoever waits for it; a thread cannot be killed, though, so one that was given up on stays until
its call returns, and is counted as stuck meanwhile. Threads are daemons, made when there is work
and none is idle.

A call that raises is logged and done; its thread goes on with the next one.

Invariant: threads == idle + busy, all of them alive, and stuck <= busy (`check_integrity`). Any
thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from engine.errors import IntegrityError

logger = logging.getLogger(__name__)


class Task:
    """One call on a worker thread."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is done within this time. Whoever finds that it is not may `give_up`."""
        return self._done.wait(timeout_s)

    def finish(self) -> None:
        """Called by the worker."""
        self._done.set()


class Workers:
    """See the module. Who must know that a call raised catches it in the call."""

    def __init__(self, name: str, max_num_threads: int) -> None:
        """`max_num_threads`: most that work at a time, stuck ones not counted."""
        self._name = name
        self._max_num_threads = max_num_threads
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._queue: deque[Task] = deque()
        self._stuck: set[Task] = set()
        self._num_idle = 0
        self._num_busy = 0
        self._threads: set[threading.Thread] = set()
        self._is_closed = False

    def submit(self, call: Callable[[], None]) -> Task:
        """Run `call` on a thread, in the order of submission. Never blocks."""
        task = Task(call)
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name}: submit after close")
            self._queue.append(task)
            self._work.notify()
            self._add_thread()
        return task

    def give_up(self, task: Task) -> None:
        """Nobody waits for `task` any more: its thread no longer counts against the bound."""
        with self._lock:
            if not task.is_done and task not in self._queue:
                self._stuck.add(task)
                self._add_thread()

    @property
    def num_stuck(self) -> int:
        """Threads whose call was given up on and has not returned."""
        with self._lock:
            return len(self._stuck)

    def close(self) -> None:
        """Take no more work; threads end when theirs is done. What is queued is not begun."""
        with self._lock:
            self._is_closed = True
            for task in self._queue:
                task.finish()
            self._queue.clear()
            self._work.notify_all()

    def check_integrity(self) -> None:
        """Raises: IntegrityError."""
        with self._lock:
            num_threads = sum(thread.is_alive() for thread in self._threads)
            if num_threads != self._num_idle + self._num_busy:
                raise IntegrityError(
                    f"{self._name}: {num_threads} threads live, {self._num_idle} idle and "
                    f"{self._num_busy} busy"
                )
            if len(self._stuck) > self._num_busy:
                raise IntegrityError(f"{self._name}: more stuck threads than busy ones")

    def _add_thread(self) -> None:
        """One more thread if work waits and none is free for it. Lock held."""
        num_able = len(self._threads) - len(self._stuck)
        if len(self._queue) > self._num_idle and num_able < self._max_num_threads:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            thread.start()  # its first step waits for the lock
            self._threads.add(thread)
            self._num_busy += 1  # until it looks for work

    def _run(self) -> None:
        while True:
            with self._lock:
                self._num_busy -= 1
                self._num_idle += 1
                while not self._queue and not self._is_closed:
                    self._work.wait()
                self._num_idle -= 1
                if not self._queue:
                    self._threads.discard(threading.current_thread())
                    return
                self._num_busy += 1
                task = self._queue.popleft()
            try:
                task.call()
            except Exception:
                logger.exception("%s: a call failed", self._name)
            finally:
                with self._lock:
                    self._stuck.discard(task)
                task.finish()
