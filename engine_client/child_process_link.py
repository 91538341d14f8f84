"""ChildLink: the parent's side of one engine in a child process: it starts, calls, watches and
reaps the child.

Life: `start` (returns at once) -> `wait_ready` -> `submit`, `cancel`, `call` -> the end, which is
`close`, the child's death, or its silence. At the end all live requests and calls fail with
Unavailable, and the process is reaped.

The kernel kills the child when this process dies (PR_SET_PDEATHSIG). That signal is tied to the
*thread* that started the child, so the thread that reads from it starts it and lives as long as the
child does. A second thread writes, so no caller ever waits for the child to read.

`submit`, `cancel`, `call` and `close` may be called from any thread; `deliver` and `progress` are
called from the reading thread and must not block.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from engine.config import EngineConfig
from engine.parallel.framing import FrameReader, FrameWriter, check_size
from engine.request import ModelInfo
from engine_client.config import ClientLimits
from engine_client.encoded_errors import Failure
from engine_client.interface import Ask, News
from engine_client.messages import (
    VERSION,
    Call,
    Cancel,
    EndSample,
    Failed,
    FromEngine,
    Hello,
    Loading,
    Refused,
    Reply,
    Start,
    StepNews,
    Stop,
    Submit,
    What,
    encode,
    read_from_engine,
)
from process.rpc_errors import BatonError, DeadlineExceeded, Unavailable

Deliver = Callable[[int, tuple[News, ...]], None]
"""Callback for news: called with (rank, news)."""
Progress = Callable[[str, int, int], None]

PROGRAM = (sys.executable, "-P", "-m", "engine_client.engine_process")
"""Command line of the child; the number of its socket is appended as last argument."""

_POLL_S = 0.25
_KILL_S = 10.0
"""Seconds for a killed process to be gone."""


@dataclass
class _State:
    """State that the threads share, protected by `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    live: set[str] = field(default_factory=set)
    calls: dict[int, concurrent.futures.Future[msgspec.Raw]] = field(default_factory=dict)
    end: BatonError | None = None


class ChildLink:
    """One engine in a child process, with its socket, its reading and writing threads, and its live
    requests and calls."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        rank: int,
        deliver: Deliver,
        limits: ClientLimits,
        program: Sequence[str] = PROGRAM,
        progress: Progress | None = None,
    ) -> None:
        self._rank = rank
        self._config = config
        self._deliver = deliver
        self._limits = limits
        self._program = tuple(program)
        self._progress = progress
        self._state = _State()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._ready: concurrent.futures.Future[ModelInfo] = concurrent.futures.Future()
        self._call_ids = itertools.count(1)
        self._heard_s = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None
        self._last_words: BatonError | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"engine-{rank}", daemon=True)

    # -- for callers

    def start(self) -> None:
        """Start the child and its threads; returns before the engine is loaded."""
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> ModelInfo:
        """Wait until the engine is loaded.

        Raises: LoadError, Unavailable when the process ended,
            DeadlineExceeded.
        """
        try:
            return self._ready.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            raise DeadlineExceeded(f"{self._name}: not loaded within {timeout_s:g} s") from error

    @property
    def pid(self) -> int | None:
        """Return the child's process id; None before it was started."""
        return None if self._process is None else self._process.pid

    @property
    def end(self) -> BatonError | None:
        """Return the error that ended the engine; None while it runs."""
        return self._state.end

    def submit(self, ask: Ask) -> None:
        """Send a request to the engine. Raises: Unavailable when the engine has ended,
        InvalidArgument for a request that is too long or cannot be encoded."""
        frame = encode(Submit(ask))
        check_size(frame)
        with self._state.lock:
            self._refuse_after_end()
            self._begin_work()
            self._state.live.add(ask.request_id)
            self._outbox.put(frame)

    def cancel(self, request_id: str) -> None:
        """Send a cancellation; the request's last news say when it is over."""
        with self._state.lock:
            if request_id in self._state.live:
                self._outbox.put(encode(Cancel(request_id)))

    def end_sample(self, request_id: str, sample_index: int) -> None:
        """Send the request to end one sample."""
        with self._state.lock:
            if request_id in self._state.live:
                self._outbox.put(encode(EndSample(request_id, sample_index)))

    def call(
        self, what: What, asks: Sequence[Ask] = (), *, name: str = "", folder: str = ""
    ) -> concurrent.futures.Future[msgspec.Raw]:
        """Send a call to the engine; the caller bounds the wait for the future, which raises the
        engine's error or Unavailable. Raises: as `submit`."""
        call_id = next(self._call_ids)
        frame = encode(Call(call_id, what, tuple(asks), name, folder))
        check_size(frame)
        future: concurrent.futures.Future[msgspec.Raw] = concurrent.futures.Future()
        with self._state.lock:
            self._refuse_after_end()
            self._begin_work()
            self._state.calls[call_id] = future
            self._outbox.put(frame)
        return future

    def tell_to_end(self) -> None:
        """Send Stop, which ends the engine after the step in progress; returns at once."""
        self._is_closing.set()
        self._outbox.put(encode(Stop()))

    def close(self) -> None:
        """Stop the engine, and kill it if it does not end; bounded in time and idempotent."""
        self.tell_to_end()
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return
        self._thread.join(self._limits.stop_timeout_s)
        self._kill()
        self._thread.join(_KILL_S)

    # -- the reading thread

    def _run(self) -> None:
        reason: BatonError = Unavailable(f"{self._name}: its thread ended")
        try:
            reason = self._serve()
        except Exception as error:  # the last line of defence: a waiter must hear of it
            reason = Unavailable(f"{self._name}: {type(error).__name__}: {error}")
        finally:
            self._finish(reason)

    def _serve(self) -> BatonError:
        """Run the whole life of the child. Returns: the error that ended it."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                self._process = self._popen(theirs)
            except OSError as error:
                return Unavailable(f"{self._name} cannot be started: {error}")
            theirs.close()
            writer = threading.Thread(
                target=self._write, args=(FrameWriter(ours),), name=f"to-{self._rank}", daemon=True
            )
            self._outbox.put(encode(Start(VERSION, self._config)))
            writer.start()
            reader = FrameReader(ours)
            try:
                reason = self._listen(reader)
            except Exception as error:  # the child must be reaped all the same
                reason = Unavailable(f"{self._name}: {type(error).__name__}: {error}")
            finally:
                self._outbox.put(None)
                with contextlib.suppress(OSError):  # the other side was quicker
                    ours.shutdown(socket.SHUT_RDWR)
                reader.close()
            exit_code = self._reap()
            writer.join(self._limits.write_timeout_s)
        return reason or self._last_words or self._died(exit_code)

    def _popen(self, theirs: socket.socket) -> subprocess.Popen[bytes]:
        """Start the child in a session of its own, so that Ctrl-C in the terminal reaches only the
        parent, and with the parent's import path, which a fresh interpreter would not have."""
        environment = os.environ | {
            "BATON_PARENT_PID": str(os.getpid()),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        return subprocess.Popen(
            [*self._program, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=2,  # our standard output is the user's
            env=environment,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )

    def _listen(self, reader: FrameReader) -> BatonError | None:
        """Read messages until there are no more. Returns: the error, where the child did not just
        end."""
        while True:
            try:
                frame = reader.read(_POLL_S)
            except EOFError:
                return None
            except Unavailable as error:
                return error
            if frame is None:
                if self._is_stuck():
                    return Unavailable(
                        f"{self._name} said nothing for {self._limits.silence_timeout_s:g} s"
                    )
                continue
            self._heard_s = time.monotonic()
            try:
                self._hear(read_from_engine(frame))
            except Unavailable as error:
                return error

    def _is_stuck(self) -> bool:
        has_work = bool(self._state.live or self._state.calls) and self._ready.done()
        return has_work and time.monotonic() - self._heard_s > self._limits.silence_timeout_s

    def _hear(self, message: FromEngine) -> None:
        match message:
            case StepNews(news):
                with self._state.lock:
                    self._state.live -= {each.request_id for each in news if each.is_over}
                if news:
                    self._deliver(self._rank, news)
            case Reply(call_id):
                with self._state.lock:
                    future = self._state.calls.pop(call_id, None)
                if future is not None:
                    _settle(future, message)
            case Loading(what, done, total):
                if self._progress is not None:
                    self._progress(what, done, total)
            case Hello(version, model):
                if version != VERSION:
                    raise Unavailable(f"{self._name} speaks version {version}, not {VERSION}")
                self._ready.set_result(model)
            case Refused(failure) | Failed(failure):
                self._last_words = failure.to_error()

    def _reap(self) -> int | None:
        """Wait for the child to end, and kill it if it does not. Returns: its exit code; None where
        even killing did not end it (it hangs in the kernel)."""
        assert self._process is not None
        try:
            return self._process.wait(self._limits.stop_timeout_s)
        except subprocess.TimeoutExpired:
            self._kill()
        try:
            return self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            return None

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    def _died(self, exit_code: int | None) -> BatonError:
        if self._is_closing.is_set():
            return Unavailable("the client was closed")
        if exit_code is None:
            return Unavailable(f"{self._name} was killed and has not ended")
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        return Unavailable(f"{self._name} ended ({how})")

    def _finish(self, reason: BatonError) -> None:
        """Fail all live requests and calls with `reason`."""
        with self._state.lock:
            self._state.end = reason
            live, self._state.live = sorted(self._state.live), set()
            calls, self._state.calls = self._state.calls, {}
        if not self._ready.done():
            self._ready.set_exception(reason)
        failure = Failure.of(Unavailable(str(reason)))
        for call_id, future in calls.items():
            _settle(future, Reply(call_id, failure=failure))
        self._deliver(self._rank, tuple(News(name, is_over=True, failure=failure) for name in live))

    # -- the writing thread

    def _write(self, writer: FrameWriter) -> None:
        try:
            while (frame := self._outbox.get()) is not None:
                writer.write(frame, self._limits.write_timeout_s)
        except EOFError:
            self._kill()  # it does not read, or is gone: the reading thread hears of it
        finally:
            writer.close()

    # -- the rest

    @property
    def _name(self) -> str:
        return f"engine process {self._rank} (pid {self.pid})"

    def _begin_work(self) -> None:
        """Restart the silence timer if the engine had no work before; the lock must be held."""
        if not (self._state.live or self._state.calls):
            self._heard_s = time.monotonic()

    def _refuse_after_end(self) -> None:
        if self._state.end is not None:
            raise Unavailable(str(self._state.end))


def _settle(future: concurrent.futures.Future[msgspec.Raw], reply: Reply) -> None:
    if not future.set_running_or_notify_cancel():
        return  # its caller gave up
    if reply.failure is not None:
        future.set_exception(reply.failure.to_error())
    else:
        future.set_result(reply.value)
