"""RankProcesses: the processes of ranks 1 and up, as the engine's process holds them: started,
spoken to, watched, reaped.

Life: `start` -> `wait_ready` -> `tell` and steps -> the end, which is `close`, or the failure of
one of them: then all are killed, `on_failure` is called, and every later call says why in one line.
Whichever comes, every process is reaped.

A rank dies with this process by the kernel's hand (`process.entrypoint.die_with_parent`). That
signal is tied to the thread that started it, so the thread that watches starts them and lives as
long as they do. All else may be called from any one thread at a time.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from engine.errors import LoadError, RankFailed
from engine.parallel.framing import FrameReader, FrameWriter
from engine.parallel.messages import (
    Attached,
    Met,
    RankFailure,
    RankLoading,
    RankRefused,
    Ready,
    Settled,
    StartRank,
    StopRank,
    ToRank,
    encode,
    read_from_rank,
)
from engine.parallel.rank_grid import Grid
from process.rpc_errors import Unavailable

PROGRAM = (sys.executable, "-P", "-m", "engine.parallel.rank_main")
"""The command of a rank's process; the numbers of its socket and its two files are appended."""

Answer = TypeVar("Answer", Ready, Met, Attached, Settled)

FOLLOWED = 3
"""Exit code of a rank that ends because another one did."""

_POLL_S = 0.1
_READ_S = 0.001
_STOP_S = 2.0
"""Longest time in seconds for a rank to end after Stop; it has nothing to save."""
_KILL_S = 10.0
"""Longest time in seconds for a killed process to be gone."""
_BLAME_S = 2.0
"""Longest time in seconds to find the process that failed first, if one that ended because of it is
noticed before."""


@dataclass
class _Rank:
    start: StartRank
    name: str
    process: subprocess.Popen[bytes]
    reader: FrameReader
    writer: FrameWriter
    heard_s: float
    is_ready: bool = False
    answers: dict[type, object] = field(default_factory=dict)
    last_words: str = ""
    is_over: bool = False

    @property
    def whole_name(self) -> str:
        return f"{self.name}, pid {self.process.pid},"


@dataclass
class _State:
    """The state that the threads share, guarded by `lock`."""

    lock: threading.Condition = field(default_factory=threading.Condition)
    ranks: list[_Rank] = field(default_factory=list)
    is_started: bool = False
    is_closing: bool = False
    failure: str = ""
    refusal: str = ""
    tell: Callable[[], None] | None = None
    began_s: float | None = None
    """Start time of the step in progress; None without one."""


class RankProcesses:
    """The processes of ranks 1 and up: starts them, sends messages, and watches them.

    Args:
        starts: the Start messages of ranks 1, 2, ...
        files: descriptors that they inherit, whose numbers are appended to the command.
        on_failure: ends waits of this process for other ranks; called once, from the watching
            thread.
    """

    def __init__(
        self,
        grid: Grid,
        starts: Sequence[StartRank],
        *,
        timeout_s: float,
        files: Sequence[int],
        on_failure: Callable[[], None],
        program: Sequence[str] = PROGRAM,
    ) -> None:
        self._grid = grid
        self._starts = tuple(starts)
        self._timeout_s = timeout_s
        self._files = tuple(files)
        self._on_failure = on_failure
        self._program = tuple(program)
        self._state = _State()
        self._followed_s: float | None = None  # when a rank ended that only followed another
        self._thread = threading.Thread(target=self._run, name="ranks", daemon=True)

    # -- for the engine's thread

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of ranks 1 and up."""
        return tuple(rank.process.pid for rank in self._state.ranks)

    def start(self) -> None:
        """Start the processes, which begin to load. Raises: RankFailed if that fails."""
        self._thread.start()
        with self._state.lock:
            self._state.lock.wait_for(lambda: self._state.is_started or self._state.failure)
        self.check()

    def wait_ready(self) -> list[Ready]:
        """Wait until all have loaded. Returns: their Ready messages. Raises: LoadError for a rank
        that cannot load; RankFailed for one that ended, or sent nothing for too long."""
        return self.answers(Ready)

    def answers(self, kind: type[Answer]) -> list[Answer]:
        """Wait for one message of this kind from each rank. Returns: the messages by rank. Bounded
        by the watching thread: within `step`, or while they load. Raises: the errors of
        `wait_ready`."""
        state = self._state
        with state.lock:
            state.lock.wait_for(
                lambda: state.failure or all(kind in rank.answers for rank in state.ranks)
            )
            if state.refusal:
                raise LoadError(state.refusal)
            self.check()
            found = [rank.answers.pop(kind) for rank in state.ranks]
        return [answer for answer in found if isinstance(answer, kind)]

    def tell(self, message: ToRank) -> None:
        """Send a message to all ranks. Raises: RankFailed."""
        self.check()
        frame = encode(message)
        for rank in self._state.ranks:
            try:
                rank.writer.write(frame, self._timeout_s)
            except (EOFError, OSError):  # it is gone, or was given up just now
                raise self.why() from None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Return a context for work that all ranks do together; they fail if it takes longer than
        `timeout_s`."""
        self.check()
        self._state.began_s = time.monotonic()
        try:
            yield
        except RankFailed:
            raise self.why() from None
        except BaseException as error:  # the others wait in the middle of something
            line = f"{type(error).__name__}: {error}".partition("\n")[0]
            self._fail(f"rank 0 failed in a step that others took part in ({line})")
            raise
        finally:
            self._state.began_s = None
        self.check()

    def begin_again(self) -> None:
        """Restart the time limit of the current `step`."""
        self._state.began_s = time.monotonic()

    def check(self) -> None:
        """Check that no rank has failed. Raises: RankFailed."""
        if self._state.failure:
            raise RankFailed(self._state.failure)

    def watch(self, tell: Callable[[], None]) -> None:
        """Register a callback that the watching thread calls when a rank fails; called at once if
        one has."""
        with self._state.lock:
            self._state.tell = tell
            has_failed = bool(self._state.failure)
        if has_failed:
            tell()

    def why(self) -> RankFailed:
        """Wait for the watching thread to find the failed rank, and return its error."""
        state = self._state
        with state.lock:
            state.lock.wait_for(lambda: state.failure, _BLAME_S + 1.0)
        return RankFailed(state.failure or "another rank is gone or too late")

    def close(self) -> None:
        """End all processes, in bounded time. Idempotent."""
        state = self._state
        with state.lock:
            if state.is_closing or not self._thread.is_alive():
                return
            state.is_closing = True
        if self._thread is not threading.current_thread():
            self._thread.join(_STOP_S + _KILL_S + _POLL_S)

    # -- the watching thread

    def _run(self) -> None:
        state = self._state
        try:
            try:
                for number, start in enumerate(self._starts, 1):
                    state.ranks.append(self._begin(number, start))
            except OSError as error:
                self._fail(f"a rank's process cannot be started: {error}")
            with state.lock:
                state.is_started = True
                state.lock.notify_all()
            self._watch()
        except Exception as error:  # the last line of defence: a waiter must hear of it
            self._fail(f"the ranks' watch ended: {type(error).__name__}: {error}")
        finally:
            self._reap()

    def _begin(self, number: int, start: StartRank) -> _Rank:
        """Start one process: in its own session, so that Ctrl-C in the terminal reaches the engine
        only; with this process's import path."""
        environment = os.environ | {
            "BATON_PARENT_PID": str(os.getpid()),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        frame = encode(start)  # what cannot be told has no process
        ours, theirs = socket.socketpair()
        with ours, theirs:
            files = (theirs.fileno(), *self._files)
            process = subprocess.Popen(
                [*self._program, *map(str, files)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # our standard output is the user's
                env=environment,
                pass_fds=files,
                start_new_session=True,
            )
            name = self._grid.name(number)
            reader, writer = FrameReader(ours), FrameWriter(ours)
        rank = _Rank(start, name, process, reader, writer, time.monotonic())
        with contextlib.suppress(EOFError):  # it has ended already: its reader says so
            writer.write(frame, self._timeout_s)
        return rank

    def _watch(self) -> None:
        """Watch the processes until one has failed, or they are to stop."""
        with selectors.DefaultSelector() as selector:
            for rank in self._state.ranks:
                selector.register(rank.reader.fileno(), selectors.EVENT_READ, rank)
            while not self._state.failure and not self._state.is_closing:
                for key, _ in selector.select(_POLL_S):
                    self._hear(key.data)
                    if key.data.is_over:
                        selector.unregister(key.fd)
                self._look_at_time()

    def _hear(self, rank: _Rank) -> None:
        try:
            while (frame := rank.reader.read(_READ_S)) is not None:
                rank.heard_s = time.monotonic()
                message = read_from_rank(frame)
                match message:
                    case Ready() | Met() | Attached() | Settled():
                        with self._state.lock:
                            rank.is_ready = True
                            rank.answers[type(message)] = message
                            self._state.lock.notify_all()
                    case RankRefused(reason):
                        self._state.refusal = f"{rank.name}: {reason}"
                        self._fail(self._state.refusal)
                    case RankFailure(reason):
                        rank.last_words = reason
                    case RankLoading():
                        pass
        except EOFError:
            rank.is_over = True
            if not self._state.is_closing:
                self._judge(rank)
        except Unavailable as error:
            self._fail(f"{rank.name}: {error}")

    def _judge(self, rank: _Rank) -> None:
        """Handle the end of a process that should not have ended. If it only followed another one,
        that one is looked for first."""
        try:
            exit_code = rank.process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            self._fail(f"{rank.whole_name} closed its socket and has not ended")
            return
        if exit_code == FOLLOWED and self._followed_s is None:
            self._followed_s = time.monotonic()
        if exit_code != FOLLOWED:
            how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
            words = f": {rank.last_words}" if rank.last_words else ""
            self._fail(f"{rank.whole_name} ended ({how}){words}")

    def _look_at_time(self) -> None:
        now_s, state = time.monotonic(), self._state
        if self._followed_s is not None and now_s - self._followed_s > _BLAME_S:
            words = next(rank.last_words for rank in state.ranks if rank.is_over)
            self._fail(f"a rank ended, since {words or 'another one was gone or too late'}")
        for rank in state.ranks:
            if not rank.is_ready and now_s - rank.heard_s > self._timeout_s:
                self._fail(
                    f"{rank.whole_name} said nothing for {self._timeout_s:g} s while it loaded"
                )
        began_s = state.began_s
        if began_s is not None and now_s - began_s > self._timeout_s:
            pids = ", ".join(map(str, self.pids))
            self._fail(f"a step took more than {self._timeout_s:g} s (ranks' pids: {pids})")

    def _fail(self, reason: str) -> None:
        """Kill all processes, then report the failure."""
        with self._state.lock:
            if self._state.failure:
                return
            self._kill()
            self._state.failure = reason
            self._state.lock.notify_all()
        self._on_failure()
        if self._state.tell is not None:
            self._state.tell()

    def _kill(self) -> None:
        for rank in self._state.ranks:
            if rank.process.poll() is None:
                rank.process.send_signal(signal.SIGKILL)

    def _reap(self) -> None:
        ends_s = time.monotonic() + (_STOP_S if self._state.is_closing else 0.0)
        frame = encode(StopRank())
        for rank in self._state.ranks:
            with contextlib.suppress(EOFError):
                rank.writer.write(frame, _READ_S)
            rank.writer.close()
            rank.reader.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, ends_s - time.monotonic()))
        self._kill()
        for rank in self._state.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
                rank.process.wait(_KILL_S)
