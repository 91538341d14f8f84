"""How a Baton process starts and ends: arguments, settings, event loop, signals, one-line errors,
no orphans.

    python -m <package> --config file.toml --set key=value --set group.key=value
    python -m <package> --set key=value --check     # only says whether these settings are right

`--config` may be given several times: later files win, key by key, so that secrets can lie in a
file of their own.

Exit codes: 0 after a clean stop, 2 when settings or the environment are wrong (one line on stderr
says what and how to fix it), 1 for our own mistakes.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import importlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import uvloop

from process import errors, grpc_io, interpreter, logs, pulse, settings

Settings = TypeVar("Settings")

_PR_SET_PDEATHSIG = 1


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

    A process started with BATON_PARENT_PID in its environment dies with that parent; one with
    BATON_PULSE_FD tells it that its loop turns (process/pulse.py).

    Args:
        imports: modules that `main` needs and that take seconds to import. Wrong settings are told
            before that, and a signal ends the process meanwhile: SIGTERM with 143.
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
    # who was told to end would begin to serve. Nothing needs an orderly end yet.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    try:
        die_with_parent()
        settings.refuse_secrets(parsed.set)
        loaded = settings.load(settings_type, files=parsed.config, overrides=parsed.set)
        if parsed.check:
            return 0
        logs.event(logger, "settings", settings=settings.to_json(loaded), grpc=grpc_io.chosen())
        if imports:
            with interpreter.importing():
                for module in imports:
                    importlib.import_module(module)
        uvloop.run(_supervise(main, loaded))
    except (settings.SettingsError, errors.BatonError) as error:
        sys.stderr.write(f"{component}: {error}\n")
        return 1 if isinstance(error, errors.Internal) else 2
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
    pulse.start()
    await main(loaded, stop)


def end_now(component: str, error: Exception | None) -> NoReturn:
    """Say the one line and end the process without waiting for anything: what a thread waits for in
    a device's driver never comes, and an orderly end would wait for it, too."""
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
        raise errors.Unavailable(f"the parent process {expected} is gone")
