"""Compiler: the engine's client of the compiling process: compiles a GrammarSpec to a
CompiledGrammar, with a deadline.

The process (engine/grammar/compile_server.py) is started by `start`, or by the first compilation,
and again if it has ended. Calls block, and belong on a worker thread. Any thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from engine.grammar.compile_server import NICENESS, GrammarError, compile_grammar
from engine.grammar.config import GrammarLimits
from engine.grammar.errors import GrammarFailed, GrammarTooCostly, refuse
from engine.grammar.state import CompiledGrammar
from engine.grammar.vocabulary import GrammarTokenizer
from engine.request import GrammarSpec

_START_TIMEOUT_S = 120.0
_GRACE_S = 5.0
"""Time in seconds after a child's own timer at which it counts as dead."""
_STOP_TIMEOUT_S = 10.0


class CompileProcess:
    """The compiling process, which is started on demand."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Create the client without starting the process. `folder` contains the model's
        tokenizer.json."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_closed = False
        self.num_starts = 0

    @property
    def is_alive(self) -> bool:
        with self._lock:
            return self._process is not None and _is_running(self._process)

    @property
    def process_id(self) -> int | None:
        """Process id of the process that was started last; None before."""
        with self._lock:
            return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Wait until the process is ready, and start it if there is none. Concurrent callers wait
        for the same start. Raises: GrammarFailed."""
        with self._lock:
            self._running()

    def hand_over(self, stream: socket.socket) -> None:
        """Send the process one end of a stream, for one compilation; start it if there is none.
        Raises: GrammarFailed."""
        with self._lock:
            running = self._running()
            try:
                socket.send_fds(running, [b"C"], [stream.fileno()])
            except OSError as error:
                raise GrammarFailed(f"the compiling process is gone: {error}") from error

    def close(self) -> None:
        """End the process and its children. No other is started afterwards."""
        self._is_closed = True
        process = self._process
        if process is not None:
            _kill(process)  # who waits for its start holds the lock, and finds it dead
        with self._lock:
            self._stop()

    def _running(self) -> socket.socket:
        """Return the socket of a process that is ready. Called with the lock held. Raises:
        GrammarFailed."""
        if self._is_closed:
            raise GrammarFailed("the grammar service is closed")
        if self._socket is None or self._process is None or not _is_running(self._process):
            self._stop()
            self._socket = self._start()
        return self._socket

    def _start(self) -> socket.socket:
        """Start the process. Called with the lock held. Raises: GrammarFailed."""
        ours, theirs = socket.socketpair()
        # One thread each: the process forks, and forks have only the thread that made them.
        single = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # A child's threads share arenas: each of its own would count 64 MiB against its bound.
        single["MALLOC_ARENA_MAX"] = "2"
        module = "engine.grammar.compile_server"
        command = [sys.executable, "-m", module, str(theirs.fileno()), str(self._vocab_size)]
        roots = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(self._folder.resolve())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # with its children a group of its own
                env={**os.environ, **single, "PYTHONPATH": os.pathsep.join(filter(None, roots))},
            )
        # From its first import on: it may start beside the engine's first requests.
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)
        if self._is_closed:  # while it was started: `close` may have seen none to kill
            _kill(self._process)
        self.num_starts += 1
        ours.settimeout(_START_TIMEOUT_S)
        try:
            ready = ours.recv(1)
        except OSError:
            ready = b""
        if ready != b"R":
            ours.close()
            self._stop()
            raise GrammarFailed("the compiling process did not start")
        ours.settimeout(_GRACE_S)
        return ours

    def _stop(self) -> None:
        """End the process. Called with the lock held."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            _kill(self._process)
            self._process.wait(_STOP_TIMEOUT_S)
            self._process = None


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    """Return whether the process runs, without reaping it: until it is reaped, its id and that of
    its group are not reused."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return process.returncode is None and os.waitid(os.P_PID, process.pid, options) is None


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, if it was not reaped yet."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class Compiler:
    """Compiles grammars in the compiling process."""

    def __init__(
        self, process: CompileProcess, tokenizer: GrammarTokenizer, limits: GrammarLimits
    ) -> None:
        """Create the compiler. `process` must have the same vocabulary as `tokenizer`."""
        self._process = process
        self._tokenizer = tokenizer
        self._limits = limits

    def compile(
        self, spec: GrammarSpec, stream: tuple[socket.socket, socket.socket]
    ) -> tuple[CompiledGrammar, int]:
        """Compile a grammar. Returns: the compiled grammar, and about how many bytes it takes.
        Blocks for at most the time limit, and the first time for the start of the process.

        Args: stream: a pair of connected sockets, which are closed here. Shutting the first one
            down, from any thread, ends the compilation.
        Raises: InvalidRequest, GrammarTooCostly, GrammarFailed.
        """
        ours, theirs = stream
        with ours:
            with theirs:
                self._process.hand_over(theirs)
            answer = self._ask(ours, spec)
        if answer["costly"]:
            raise GrammarTooCostly("grammar", answer["problem"])
        if not answer["ok"]:
            raise refuse(answer["problem"])
        try:
            matcher = compile_grammar(self._tokenizer, answer["grammar"], self._limits)
        except GrammarError as error:  # it worked in the child
            if error.is_limit:  # by a little less than what it may cost
                raise GrammarTooCostly("grammar", f"{error}; make it smaller") from error
            raise GrammarFailed(f"a compiled grammar is refused: {error}") from error
        return CompiledGrammar(matcher, self._tokenizer, self._limits), answer["num_bytes"]

    def _ask(self, ours: socket.socket, spec: GrammarSpec) -> dict[str, Any]:
        """Send the specification to a child and return its answer."""
        ours.settimeout(self._limits.compile_timeout_s + _GRACE_S)
        request = {
            "kind": spec.kind.value,
            "text": spec.text,
            "choices": spec.choices,
            "limits": dataclasses.asdict(self._limits),
        }
        try:
            ours.sendall(json.dumps(request).encode() + b"\n")
            with ours.makefile("rb") as stream:
                line = stream.readline()
        except TimeoutError as error:
            raise self._too_costly() from error
        except OSError as error:
            raise self._died() from error
        if not line.endswith(b"\n"):
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _died(self) -> GrammarTooCostly | GrammarFailed:
        """Return the error for an end of file in place of an answer: the child reached its own
        limits, if its parent is alive."""
        if self._process.is_alive:
            return self._too_costly()
        return GrammarFailed("the compiling process ended")

    def _too_costly(self) -> GrammarTooCostly:
        limits = self._limits
        return GrammarTooCostly(
            "grammar",
            f"compiling it takes more than {limits.compile_timeout_s:g} s or "
            f"{limits.compile_bytes} bytes of memory; make it smaller",
        )
