"""Python processes whose imports are done when they begin: a server, which has imported what stores
and their workers need, forks for each. Run as a script it is that server:

    forks.py <number of its socket>

`python -m kvstore` itself is started by tests/conformance/test_store.py.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import functools
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

IMPORTS = ("kvstore.__main__", "kvstore.client", "numpy")
START_S = 120.0
_PR_SET_PDEATHSIG = 1
_REQUEST_BYTES = 1 << 20


class Forked:
    """A process, with the part of asyncio.subprocess.Process that tests use."""

    def __init__(self, pid: int, pid_fd: int, life: socket.socket) -> None:
        """life: tells the exit code."""
        self.pid = pid
        self.returncode: int | None = None
        self.stdout, self.stderr = asyncio.StreamReader(), asyncio.StreamReader()
        self._pid_fd = pid_fd
        self._life = life

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing if it has ended."""
        with contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                signal.pidfd_send_signal(self._pid_fd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def communicate(self) -> tuple[bytes, bytes]:
        """What it says until it ends."""
        said = await asyncio.gather(self.stdout.read(), self.stderr.read())
        if self.returncode is None:
            loop = asyncio.get_running_loop()
            self.returncode = int(await loop.sock_recv(self._life, 16))
            self._life.close()
            os.close(self._pid_fd)
        return said[0], said[1]


async def start(*argv: str) -> Forked:
    """As `python argv`, which is `-m` with a module or the path of a script, and its arguments;
    with the environment of now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read_out, out = os.pipe()
    read_err, err = os.pipe()
    request = json.dumps({"argv": argv, "environment": dict(os.environ)}).encode()
    with theirs:
        socket.send_fds(_server()[0], [request], [theirs.fileno(), out, err])
    os.close(out)
    os.close(err)
    ours.settimeout(START_S)
    pid, fds, _, _ = await asyncio.to_thread(socket.recv_fds, ours, 16, 1)
    ours.setblocking(False)
    process = Forked(int(pid), fds[0], ours)
    loop = asyncio.get_running_loop()
    for fd, reader in ((read_out, process.stdout), (read_err, process.stderr)):
        protocol = asyncio.StreamReaderProtocol(reader)
        await loop.connect_read_pipe(lambda protocol=protocol: protocol, os.fdopen(fd, "rb"))
    return process


@functools.cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """It ends with this process, and takes along what it has forked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # threads do not survive a fork
        )
    atexit.register(_end, ours, process)
    return ours, process


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.wait(START_S)


def _serve(control: socket.socket) -> None:
    for name in IMPORTS:
        importlib.import_module(name)
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not control:
                    pid, life = key.data
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    _, status = os.waitpid(pid, 0)
                    with life, contextlib.suppress(OSError):
                        life.send(b"%d" % os.waitstatus_to_exitcode(status))
                    continue
                request, fds, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 3)
                if not request:
                    return
                pid = os.fork()
                if not pid:
                    selector.close()
                    _run(json.loads(request), control, fds)
                pid_fd, life = os.pidfd_open(pid), socket.socket(fileno=fds.pop(0))
                for fd in fds:
                    os.close(fd)
                socket.send_fds(life, [b"%d" % pid], [pid_fd])
                selector.register(pid_fd, selectors.EVENT_READ, (pid, life))


def _run(request: dict[str, Any], control: socket.socket, fds: list[int]) -> None:
    """What was asked for, in the forked process. Never returns."""
    code: Any = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        control.close()
        os.close(fds[0])
        for fd, number in zip(fds[1:], (1, 2), strict=True):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(request["environment"])
        random.seed()
        argv = request["argv"]
        if argv[0] == "-m":
            sys.argv = argv[1:]
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as control:
        _serve(control)
