"""The start and the end of a Baton process: arguments, settings, event loop, signals, one-line
errors, no orphans; and the set-up of its interpreter and gRPC.

    python -m <package> --config file.toml --set key=value --set group.key=value
    python -m <package> --set key=value --check     # only says whether these settings are right

`--config` may be given several times: later files win, key by key, so that secrets can lie in a
file of their own.

Exit codes: 0 after a clean stop, 2 when settings or the environment are wrong (one line on stderr
says what and how to fix it), 1 for our own mistakes.

Importing this module chooses gRPC's I/O engine, which gRPC reads when it is first imported: so it
is the first import of each `__main__`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import importlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import uvloop

from process import logs, rpc_errors, settings

Settings = TypeVar("Settings")

_PR_SET_PDEATHSIG = 1

PULSE_S = 1.0
"""Time between two bytes that a process writes to its parent as a sign of life."""

GRPC_EXPERIMENTS = "GRPC_EXPERIMENTS"
"""Name of the environment variable that turns gRPC's experiments on and off. A value that is set
already, be it empty, is left as it is."""

OFF_EXPERIMENTS = (
    "-event_engine_client",
    "-event_engine_listener",
    "-event_engine_for_all_other_endpoints",
)
"""gRPC experiments that are turned off. gRPC's own choice (1.85) is an I/O engine of several
threads, which hand each other every read and write before the event loop sees it: twelve thread
switches a call. Without these experiments one thread polls: five switches. Figures:
docs/decisions.md. tests/unit/process/test_grpc_experiments.py fails when a new version does not
know the names."""

os.environ.setdefault(GRPC_EXPERIMENTS, ",".join(OFF_EXPERIMENTS))

SWITCH_INTERVAL_S = 0.0001
"""How long a computing thread keeps the interpreter's lock while another one waits for it. Python's
own is 5 ms: a decode step's whole length. Each switch costs some 10 us.

The wait begins anew when the event loop drops the lock between two turns and has it again before
the waiting thread is awake. Beside a loop of six turns of 0.3 ms now and then
(benchmarks/results/2026-11-23-switch-interval.json), in 99 of 100 cases, ms after a device's end:

| interval | the engine's thread wakes up | it has launched the next step | the loop has sent |
|---|---|---|---|
| 0.5 ms | 1.8 | 2.2 | 2.6 |
| 0.2 ms | 0.8 | 1.6 | 1.3 |
| 0.1 ms | 0.4 | 1.7 | 1.7 |
| 0.05 ms | 0.2 | 1.1 | 1.3 |

Cost: the loop's turns end 0.4 ms later, 1.2 at most, when the other thread runs between them.
Beside a loop that only sends, the launch is made after 0.7 ms instead of 0.4, and ends when it
did."""


def run(
    component: str,
    settings_type: type[Settings],
    main: Callable[[Settings, asyncio.Event], Awaitable[None]],
    arguments: Sequence[str] | None = None,
    *,
    imports: Sequence[str] = (),
) -> int:
    """Load the settings and run `main(settings, stop)` until it returns; SIGTERM and SIGINT set
    `stop`; a second one ends the process at once, with 128 + its number.

    A process with BATON_PARENT_PID in its environment dies with that parent; with BATON_PULSE_FD,
    the number of a pipe, it writes a byte a second into it as long as its event loop turns.

    Args:
        imports: modules that `main` needs and that take seconds to import. Wrong settings are
            reported before that, and a signal ends the process meanwhile: SIGTERM with 143.
    Returns: the exit code.
    """
    parser = argparse.ArgumentParser(prog=component, description=settings_type.__doc__)
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="TOML file; may be repeated, later ones win key by key",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="one setting; may be repeated",
    )
    parser.add_argument(
        "--check", action="store_true", help="check the settings and end, without starting"
    )
    parser.add_argument("--log-level", choices=logs.LEVELS, default="info")
    parsed = parser.parse_args(arguments)
    logs.configure(component, parsed.log_level)
    logger = logging.getLogger(component)
    # The first process of a container has no default action: the kernel would drop the signal, and
    # the process would start to serve. Nothing needs an orderly end yet.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    try:
        die_with_parent()
        settings.refuse_secrets(parsed.set)
        loaded = settings.load(settings_type, files=parsed.config, overrides=parsed.set)
        if parsed.check:
            return 0
        logs.event(logger, "settings", settings=settings.to_json(loaded), grpc=grpc_experiments())
        if imports:
            with importing():
                for module in imports:
                    importlib.import_module(module)
        uvloop.run(_supervise(main, loaded))
    except (settings.SettingsError, rpc_errors.BatonError) as error:
        sys.stderr.write(f"{component}: {error}\n")
        return 1 if isinstance(error, rpc_errors.Internal) else 2
    except KeyboardInterrupt:
        return 130
    return 0


async def _supervise(
    main: Callable[[Settings, asyncio.Event], Awaitable[None]], loaded: Settings
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    start_pulse()
    await main(loaded, stop)


def grpc_experiments() -> str:
    """The value of GRPC_EXPERIMENTS in this process, for logs and reports; empty: gRPC's own
    choice."""
    return os.environ[GRPC_EXPERIMENTS]


def start_pulse() -> None:
    """Write a byte every PULSE_S into the pipe BATON_PULSE_FD, as long as the running loop turns: a
    parent that reads none for long may restart the process. Nothing without the variable."""
    number = os.environ.pop("BATON_PULSE_FD", "")  # not for this process's own children
    if not number:
        return
    fd, loop = int(number), asyncio.get_running_loop()
    os.set_inheritable(fd, False)
    os.set_blocking(fd, False)

    def beat() -> None:
        # A full pipe was not read for long; a closed one has no reader.
        with contextlib.suppress(OSError):
            os.write(fd, b".")
        loop.call_later(PULSE_S, beat)

    beat()


def end_now(component: str, error: Exception | None) -> NoReturn:
    """Write the error's line and end the process without waiting for any thread: one that waits
    inside a device's driver never returns, and an orderly end would wait for it."""
    sys.stderr.write(f"{component}: {error}\n")
    sys.stderr.flush()
    os._exit(1)


def die_with_parent() -> None:
    """Have the kernel kill this process when the parent named by BATON_PARENT_PID is gone (Linux).

    Raises: Unavailable when that parent is gone already.
    """
    expected = os.environ.get("BATON_PARENT_PID")
    if not expected:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have gone before the call above took effect.
    if os.getppid() != int(expected):
        raise rpc_errors.Unavailable(f"the parent process {expected} is gone")


def new_incarnation() -> bytes:
    """A new incarnation: the random id, 16 bytes, of one start of a process. What an earlier start
    published is void."""
    return secrets.token_bytes(16)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Turn the garbage collector off while large packages are imported (a tenth of that time is
    the collector's) and exempt what exists at the end from all later collections. For imports
    alone: cycles that become garbage inside the block stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def begin_serving() -> None:
    """Call once, when everything that stays is loaded: collects, and exempts the hundreds of
    thousands of objects that are left from all later collections, which would stop every thread.
    From here on a thread waits at most SWITCH_INTERVAL_S for each computing thread before it, and
    for calls into C that keep the lock."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
