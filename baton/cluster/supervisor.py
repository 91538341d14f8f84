"""Starts, watches, restarts and stops child processes, each described by a `ProcessSpec`.

States of a part (`ProcessState`):
    STARTING -> READY
    STARTING | READY -> BACKOFF (it died; the first restart comes at once) -> STARTING
    STARTING | READY -> HELD (stopped until `restart`) -> STARTING
    any -> RETIRING (asked to end for good, killed after its time) -> removed
    any -> STOPPED
Before `keep_up` a death is a failure that `wait_ready` raises. After it a part that died is started
again, and a READY part whose event loop has not turned for `max_silence_s` is killed. If the
supervisor's own thread ends, every waiting caller gets a failure at once.

One thread starts, signals and restarts all children, because the kernel ends a child with the
thread that started it. The public methods may be called from any thread; each hands its work to
that thread and waits, up to a limit.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import json
import logging
import math
import os
import queue
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from baton.cluster.command_lines import ProcessSpec
from baton.errors import ClusterError

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

STOP_TIMEOUT_S = 5.0
"""Time from SIGTERM to SIGKILL, added to the time for requests to end (`drain_s`)."""
_FAILURE_LOOK_S = 0.1
_COMMAND_TIMEOUT_S = 30.0
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 5.0
"""Pauses from the second restart on."""
_HEALTHY_AFTER_S = 30.0
"""After a life of this length the next restart counts as the first."""
_LISTEN_S = 1.0
"""Interval between two checks for signs of life."""
_SAY_SILENT_S = 3.0
"""A part that is silent for this long gets a line."""
_REDIS_READY = "eady to accept connections"
"""End of the line in Redis' log; versions differ in its beginning."""
_NUM_LAST_LINES = 12
_LAST_WORDS_S = 2.0
"""Limit of the wait for the last output of a child that has ended: a process that it left behind
may hold the output open."""
_READ_BYTES = 4096


class PipePulse:
    """Watches the event loop of a Baton process by a pipe, into which the loop writes a byte as
    long as it turns."""

    def __init__(self) -> None:
        self._read: int | None
        self._read, self.write_fd = os.pipe()
        """The child's end of the pipe; `started` closes it in this process."""
        os.set_blocking(self._read, False)

    def started(self) -> None:
        """Close the child's end of the pipe here: the child was started, or could not be
        started."""
        os.close(self.write_fd)

    def has_beaten(self) -> bool:
        """Whether the child's event loop has turned since the last call."""
        if self._read is None:
            return False
        try:
            return bool(os.read(self._read, _READ_BYTES))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Close the pipe. A second call does nothing."""
        if self._read is not None:
            os.close(self._read)
            self._read = None


class RedisPulse:
    """Watches a Redis without a password, at a socket file, by PING."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None

    def has_beaten(self) -> bool:
        """Whether the Redis has answered since the last call. Sends the next PING."""
        has_answered = False
        with self._failures():
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.setblocking(False)
                self._socket.connect(self._path)
            else:
                has_answered = bool(self._socket.recv(_READ_BYTES))
                if not has_answered:
                    raise ConnectionResetError("Redis closed the connection")
            self._socket.send(b"PING\r\n")
        return has_answered

    def close(self) -> None:
        """Close the socket. A second call does nothing."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """No answer yet is not a failure; a failed connection is closed and made again."""
        try:
            yield
        except BlockingIOError:
            return
        except OSError:
            self.close()


@dataclass(frozen=True)
class LogEvent:
    """An event that a child has written to its log, with its fields."""

    child: Child
    event: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Exited:
    """The end of a child. A negative exit code is a signal, as in `subprocess`."""

    child: Child
    exit_code: int


Notify = Callable[["LogEvent | Exited"], None]


@dataclass(eq=False)
class Child:
    """A child process of the supervisor, from its start to its end."""

    spec: ProcessSpec
    log_path: Path
    notify: Notify
    address: str = ""
    """Address that the child serves at; known when it is ready."""
    incarnation: str = ""
    """The incarnation of a worker, in hex."""
    metrics_address: str = ""
    """Address of the child's /metrics; empty: it has none."""
    http_address: str = ""
    """Address of the child's HTTP API; empty: it has none."""
    last_lines: collections.deque[str] = field(
        default_factory=lambda: collections.deque(maxlen=_NUM_LAST_LINES)
    )
    _process: subprocess.Popen[str] | None = None
    _pulse: PipePulse | RedisPulse | None = None
    _reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """Process id of the child; 0 before it was started."""
        return 0 if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Exit code of the child; None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start the process in a session of its own, so that Ctrl-C in the terminal does not reach
        it.

        Raises: OSError when the program cannot be started.
        """
        pipe = PipePulse()
        self._pulse = RedisPulse(self.spec.socket) if self.spec.kind == "redis" else pipe
        try:
            self._process = subprocess.Popen(
                self.spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=os.environ
                | {
                    "BATON_PARENT_PID": str(os.getpid()),
                    "BATON_PULSE_FD": str(pipe.write_fd),
                    "PYTHONUNBUFFERED": "1",
                },
                pass_fds=(pipe.write_fd,),
                start_new_session=True,
            )
        finally:
            pipe.started()
            if self._pulse is not pipe:
                pipe.close()
        name = f"log-{self.spec.name}"
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()

    def has_beaten(self) -> bool:
        """Whether the child has shown a sign of life since the last call."""
        return self._pulse is not None and self._pulse.has_beaten()

    def close(self) -> None:
        """Complete the log of a child that has ended, and close its pulse. A second call does
        nothing."""
        if self._reader is not None:
            self._reader.join(_LAST_WORDS_S)
        if self._pulse is not None:
            self._pulse.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child, unless it has ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` for the child's end. Returns: whether it has ended."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read(self) -> None:
        process = self._process
        assert process is not None and process.stdout is not None
        with self.log_path.open("a", encoding="utf-8") as log, process.stdout:
            for line in process.stdout:
                log.write(line)
                log.flush()
                self._understand(line.rstrip())
        self.notify(Exited(self, process.wait()))

    def _understand(self, line: str) -> None:
        if line:
            self.last_lines.append(line)
        if _REDIS_READY in line and self.spec.kind == "redis":
            self.notify(LogEvent(self, "ready", {}))
            return
        if not line.startswith("{"):
            return
        try:
            fields = json.loads(line)
        except ValueError:
            return
        event = fields.get("event") if isinstance(fields, dict) else None
        if event in ("loading", "ready", "role_changed"):
            self.notify(LogEvent(self, event, fields))


def last_error(child: Child) -> str:
    """The reason that a child printed for its end, in one line: its last line that is not JSON. Of
    an uncaught exception it is the first line of the message: messages of devices end in advice."""
    lines = [line for line in child.last_lines if not line.startswith("{")]
    frames = [at for at, line in enumerate(lines) if line.startswith('  File "')]
    for line in lines[frames[-1] + 1 :] if frames else ():
        if not line.startswith("    "):  # source code of the frame
            return line
    return lines[-1] if lines else ""


class ProcessState(enum.Enum):
    """The state of a part; the top of this file shows the transitions."""

    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    HELD = "held"
    RETIRING = "retiring"
    STOPPED = "stopped"


_ALIVE = (ProcessState.STARTING, ProcessState.READY)
_TIMED = (ProcessState.BACKOFF, ProcessState.RETIRING)


@dataclass(frozen=True)
class ProcessInfo:
    """A part of the cluster as it is at one moment."""

    name: str
    kind: str
    state: ProcessState
    pid: int
    address: str
    num_restarts: int
    log_path: Path
    metrics_address: str = ""
    """Address of the part's /metrics; empty: it has none."""
    http_address: str = ""
    """Address of the part's HTTP API; empty: it has none."""
    incarnation: str = ""
    """The incarnation of a worker, in hex."""


@dataclass(frozen=True)
class ClusterEvent:
    """A change of a part, to be shown: `what` is starting, loading, ready, silent, died,
    restarting, retiring or stopped."""

    name: str
    what: str
    detail: str = ""
    done: int = 0
    total: int = 0


OnEvent = Callable[[ClusterEvent], None]


@dataclass(eq=False)
class SupervisedProcess:
    """A part of the cluster: its current child process and its state."""

    spec: ProcessSpec
    child: Child
    state: ProcessState = ProcessState.STARTING
    started_s: float = 0.0
    backoff_s: float = 0.0
    """Pause before the part's next restart; the first restart has none."""
    due_s: float = 0.0
    num_restarts: int = 0
    silent_s: float = 0.0
    """Time for which a READY part has shown no sign of life."""

    @property
    def info(self) -> ProcessInfo:
        """Describe the part as it is at this moment."""
        return ProcessInfo(
            name=self.spec.name,
            kind=self.spec.kind,
            state=self.state,
            pid=self.child.pid,
            address=self.child.address,
            num_restarts=self.num_restarts,
            log_path=self.child.log_path,
            metrics_address=self.child.metrics_address,
            http_address=self.child.http_address,
            incarnation=self.child.incarnation,
        )

    @property
    def last_line(self) -> str:
        """The last line that the part printed, for an error."""
        lines = list(self.child.last_lines)
        return f"its last line: {lines[-1]}" if lines else "it printed nothing"


@dataclass(frozen=True)
class _Command:
    work: Callable[[], Any]
    future: Future[Any]


class Supervisor:
    """Runs the processes of one cluster, in a thread that owns them: starts, watches, restarts and
    stops them."""

    def __init__(
        self,
        log_dir: Path,
        on_event: OnEvent,
        max_silence_s: float = math.inf,
        stop_timeout_s: float = STOP_TIMEOUT_S,
    ) -> None:
        """Args: on_event: called in the supervisor's thread; must not block. Its first exception is
        logged; none of them stops the supervisor."""
        self._log_dir = log_dir
        self._on_event = on_event
        self._on_event_failed = False
        self._max_silence_s = max_silence_s
        self._stop_timeout_s = stop_timeout_s
        self._listened_s = time.monotonic()
        self._inbox: queue.Queue[LogEvent | Exited | _Command | None] = queue.Queue()
        self._parts: dict[str, SupervisedProcess] = {}
        self._changed = threading.Condition()
        self._failure: ClusterError | None = None
        self._keep_up = False
        self._stopping = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="baton-supervisor", daemon=True)
        self._thread.start()

    # From any thread

    def launch(self, specs: Sequence[ProcessSpec]) -> None:
        """Start a part for each spec. Raises: ClusterError when a program cannot be started."""

        def begin() -> None:
            for spec in specs:
                self._begin(spec)

        self._do(begin)

    def replace_spec(self, spec: ProcessSpec) -> None:
        """Use `spec` for the next start of the part of its name."""
        self._do(lambda: setattr(self._part(spec.name), "spec", spec))

    def wait_ready(self, names: Sequence[str], deadline_s: float) -> None:
        """Wait until these parts are READY, or until `deadline_s` of the monotonic clock.

        Raises: ClusterError with the error of a part that died, or naming the parts not ready.
        """
        self._do(self._notice_deaths)
        with self._changed:
            self._changed.wait_for(
                lambda: self._failure is not None or not self._missing(names),
                timeout=max(0.0, deadline_s - time.monotonic()),
            )
            self.check_failure()
            missing = self._missing(names)
        if missing:
            raise ClusterError(f"not ready in time: {', '.join(missing)}")

    def check_failure(self) -> None:
        """Check that the cluster can be kept running. Raises: ClusterError when a part died before
        `keep_up`, or the supervisor ended."""
        if self._failure is not None:
            raise self._failure

    def wait_failure(self, timeout_s: float | None = None) -> None:
        """Wait for a failure, at most `timeout_s`; None: without limit.

        Raises: ClusterError, the failure.
        """
        # Polls without a lock: Ctrl-C ends this wait, and an interrupt while a lock is acquired can
        # leave it locked for ever, which would block the supervisor's thread.
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._failure is None and time.monotonic() < end_s:
            time.sleep(_FAILURE_LOOK_S)
        self.check_failure()

    def keep_up(self) -> None:
        """Begin to start parts again that die."""
        self._do(lambda: setattr(self, "_keep_up", True))

    def processes(self) -> dict[str, ProcessInfo]:
        """All parts by name, in the order of their start."""
        with self._changed:
            return {name: part.info for name, part in self._parts.items()}

    def kill(self, name: str, *, restart: bool) -> None:
        """SIGKILL one part and wait for its end. Without `restart` it is then HELD."""

        def end() -> None:
            part = self._end(name, signal.SIGKILL)
            if restart:
                self._back_off(part)

        self._do(end)

    def restart(self, name: str) -> None:
        """End a part (SIGTERM) if it runs, and start it again; does not wait until it is READY."""

        def again() -> None:
            self._again(self._end(name, signal.SIGTERM))

        self._do(again, _COMMAND_TIMEOUT_S + self._part(name).spec.drain_s)

    def retire(self, names: Sequence[str], within_s: float) -> None:
        """Ask parts to end (SIGTERM, and SIGKILL after `within_s`), and remove each when it has
        ended. Does not wait. Has no effect on a part that is RETIRING. Raises: ClusterError for an
        unknown name; then no part is asked."""

        def begin() -> None:
            for part in [self._part(name) for name in names]:
                self._retire(part, within_s)

        self._do(begin)

    def stop(self, order: Sequence[Sequence[str]]) -> None:
        """Stop the parts, one group of kinds after the other: SIGTERM, a limited wait, SIGKILL."""
        if not self._thread.is_alive():
            self._end_orphans()
            return
        self._stopping = True
        drains_s = sum(part.spec.drain_s for part in list(self._parts.values()))
        bound_s = 2 * self._stop_timeout_s * (len(order) + 1) + drains_s
        with contextlib.suppress(ClusterError):
            self._do(lambda: self._stop_all(order), timeout_s=bound_s)
        self.kill_all()
        self._inbox.put(None)
        self._thread.join(self._stop_timeout_s)

    def _end_orphans(self) -> None:
        """End the children when the supervisor's thread ended early; the kernel may have killed
        them."""
        self.kill_all()
        for part in self._parts.values():
            part.child.wait(self._stop_timeout_s)
            part.state = ProcessState.STOPPED

    def kill_all(self) -> None:
        """SIGKILL every part. It only sends signals, so a signal handler may call it."""
        self._stopping = True
        for part in list(self._parts.values()):
            part.child.signal(signal.SIGKILL)

    def _do(self, work: Callable[[], Result], timeout_s: float = _COMMAND_TIMEOUT_S) -> Result:
        future: Future[Result] = Future()
        self._inbox.put(_Command(work, future))
        if self._ended:
            # The thread has ended. If the command came before that, `_give_up` has answered it.
            self.check_failure()
        try:
            return future.result(timeout_s)
        except TimeoutError:
            raise ClusterError("the supervisor of the local cluster does not answer") from None

    def _missing(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self._part(name).state is not ProcessState.READY]

    # In the supervisor's thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            self._give_up(error)

    def _give_up(self, error: BaseException) -> None:
        """Fail all waiting callers: this thread ends by a bug, and the children end with it."""
        failure = ClusterError(f"the supervisor of the local cluster ended unexpectedly: {error!r}")
        failure.__cause__ = error
        with self._changed:
            self._failure = self._failure or failure
            self._ended = True
            self._changed.notify_all()
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, _Command):
                    item.future.set_exception(self._failure)

    def _serve(self) -> None:
        while True:
            self._listen()
            try:
                item = self._inbox.get(timeout=self._next_due_s())
            except queue.Empty:
                self._restart_due()
                continue
            if item is None:
                return
            with self._changed:
                if isinstance(item, _Command):
                    _run_command(item)
                else:
                    self._take(item)
                self._changed.notify_all()

    def _next_due_s(self) -> float | None:
        due = [part.due_s for part in self._parts.values() if part.state in _TIMED]
        if self._keep_up and self._max_silence_s < math.inf:
            due.append(self._listened_s + _LISTEN_S)
        due = [due_s for due_s in due if due_s < math.inf]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _listen(self) -> None:
        """Check all parts for signs of life. Only time in which this process ran counts: it may
        have been frozen together with a part."""
        now_s = time.monotonic()
        passed_s = now_s - self._listened_s
        if passed_s < _LISTEN_S:
            return
        self._listened_s = now_s
        with self._changed:
            for part in self._parts.values():
                has_beaten = part.child.has_beaten()
                if has_beaten or part.state is not ProcessState.READY or not self._keep_up:
                    part.silent_s = 0.0
                else:
                    self._note_silence(part, min(passed_s, 2 * _LISTEN_S))

    def _note_silence(self, part: SupervisedProcess, more_s: float) -> None:
        before_s, part.silent_s = part.silent_s, part.silent_s + more_s
        most_s = self._max_silence_s
        if before_s < _SAY_SILENT_S <= part.silent_s:
            self._show(
                part,
                "silent",
                f"it does not answer; it is restarted after {most_s:g} s without an answer",
            )
        if before_s < most_s <= part.silent_s:
            part.child.signal(signal.SIGKILL)  # an Exited message follows

    def _take(self, item: LogEvent | Exited) -> None:
        part = self._parts.get(item.child.spec.name)
        if part is None or part.child is not item.child:
            return  # a message of an earlier life
        if part.state is ProcessState.RETIRING and isinstance(item, Exited):
            self._retired(part)
        if part.state not in _ALIVE:
            return  # its end was handled
        if isinstance(item, Exited):
            self._died(part, item.exit_code)
        elif item.event == "ready":
            part.child.address = str(item.fields.get("address", ""))
            part.child.metrics_address = str(item.fields.get("metrics", ""))
            part.child.http_address = str(item.fields.get("http", ""))
            part.child.incarnation = str(item.fields.get("incarnation", ""))
            part.state = ProcessState.READY
            self._show(part, "ready", part.child.address)
        elif item.event == "role_changed":
            part.child.incarnation = str(item.fields.get("incarnation", ""))
        else:
            what, done, total = (item.fields.get(key, 0) for key in ("what", "done", "total"))
            self._tell(ClusterEvent(part.spec.name, "loading", str(what), int(done), int(total)))

    def _notice_deaths(self) -> None:
        """Handle ends of children that their reader threads have not reported yet."""
        for part in self._parts.values():
            if part.state in _ALIVE and part.child.exit_code is not None:
                self._died(part, part.child.exit_code)

    def _died(self, part: SupervisedProcess, exit_code: int) -> None:
        if self._stopping:
            part.state = ProcessState.STOPPED
            return
        if not self._keep_up:
            part.child.close()  # its last output is the error, and may not have been read yet
        reason = last_error(part.child)
        how = f"killed by signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        self._show(part, "died", f"{how}; {reason}" if reason else how)
        if not self._keep_up:
            part.state = ProcessState.STOPPED
            if self._failure is None:
                self._failure = ClusterError(
                    reason or f"{part.spec.name} ended at its start ({how}); {part.last_line}"
                )
            return
        self._back_off(part)

    def _back_off(self, part: SupervisedProcess) -> None:
        if time.monotonic() - part.started_s > _HEALTHY_AFTER_S:
            part.backoff_s = 0.0
        part.state = ProcessState.BACKOFF
        part.due_s = time.monotonic() + part.backoff_s
        part.backoff_s = min(_MAX_BACKOFF_S, part.backoff_s * 2 or _FIRST_BACKOFF_S)

    def _restart_due(self) -> None:
        with self._changed:
            now = time.monotonic()
            for part in self._parts.values():
                if part.state is ProcessState.BACKOFF and part.due_s <= now and not self._stopping:
                    self._again(part)
                if part.state is ProcessState.RETIRING and part.due_s <= now:
                    part.child.signal(signal.SIGKILL)
                    part.due_s = math.inf  # an Exited message follows
            self._changed.notify_all()

    def _retire(self, part: SupervisedProcess, within_s: float) -> None:
        if part.state is ProcessState.RETIRING:
            return
        part.state = ProcessState.RETIRING
        part.due_s = time.monotonic() + within_s
        if part.child.exit_code is not None:  # it waits for a restart
            self._retired(part)
            return
        self._show(part, "retiring")
        part.child.signal(signal.SIGTERM)

    def _retired(self, part: SupervisedProcess) -> None:
        part.child.close()
        del self._parts[part.spec.name]
        self._show(part, "stopped", "for good")

    def _begin(self, spec: ProcessSpec) -> None:
        part = SupervisedProcess(spec, self._child(spec))
        self._spawn(part)
        self._parts[spec.name] = part
        self._show(part, "starting")

    def _again(self, part: SupervisedProcess) -> None:
        part.child.close()
        part.silent_s = 0.0
        part.child = self._child(part.spec)
        part.state = ProcessState.STARTING
        part.num_restarts += 1
        self._show(part, "restarting")
        try:
            self._spawn(part)
        except ClusterError as error:
            self._show(part, "died", str(error))
            self._back_off(part)

    def _spawn(self, part: SupervisedProcess) -> None:
        part.started_s = time.monotonic()
        try:
            part.child.start()
        except OSError as error:
            raise ClusterError(f"{part.spec.name}: cannot be started: {error}") from error

    def _child(self, spec: ProcessSpec) -> Child:
        return Child(spec, self._log_dir / f"{spec.name}.log", self._inbox.put)

    def _end(self, name: str, number: signal.Signals) -> SupervisedProcess:
        part = self._part(name)
        if part.state in _ALIVE:
            part.child.signal(number)
            self._await_end(part, time.monotonic() + part.spec.drain_s + self._stop_timeout_s)
            self._show(part, "stopped", f"by {number.name}, on purpose")
        part.state = ProcessState.HELD
        return part

    def _await_end(self, part: SupervisedProcess, deadline_s: float) -> None:
        """Wait for a part that got SIGTERM; at the deadline it gets SIGKILL."""
        if not part.child.wait(max(0.0, deadline_s - time.monotonic())):
            part.child.signal(signal.SIGKILL)
            part.child.wait(self._stop_timeout_s)

    def _stop_all(self, order: Sequence[Sequence[str]]) -> None:
        for kinds in order:
            group = [part for part in self._parts.values() if part.spec.kind in kinds]
            for part in group:
                if part.state is not ProcessState.RETIRING:  # a second SIGTERM would end it at once
                    part.child.signal(signal.SIGTERM)
            now_s = time.monotonic()
            for part in group:
                self._await_end(part, now_s + part.spec.drain_s + self._stop_timeout_s)
                part.state = ProcessState.STOPPED
                part.child.close()
                self._show(part, "stopped")

    def _part(self, name: str) -> SupervisedProcess:
        if name not in self._parts:
            raise ClusterError(f"no part '{name}'; there are {', '.join(self._parts)}")
        return self._parts[name]

    def _show(self, part: SupervisedProcess, what: str, detail: str = "") -> None:
        self._tell(ClusterEvent(part.spec.name, what, detail))

    def _tell(self, event: ClusterEvent) -> None:
        # A view whose terminal or pipe was closed raises BrokenPipeError, or rich raises SystemExit
        # for it. Neither may stop the supervisor.
        try:
            self._on_event(event)
        except (Exception, SystemExit) as error:
            if not self._on_event_failed:
                logger.warning("events of the cluster cannot be shown: %r", error)
            self._on_event_failed = True


def _run_command(command: _Command) -> None:
    # The caller waits in another thread and gets any exception.
    try:
        command.future.set_result(command.work())
    except BaseException as error:
        command.future.set_exception(error)
