"""A process's exit code and its one line on stderr are what a supervisor and a person go by."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio
from dataclasses import dataclass
from process import entrypoint, rpc_errors

@dataclass(frozen=True)
class Settings:
    fail: str = ""

async def main(settings, stop):
    if settings.fail:
        raise getattr(rpc_errors, settings.fail)("the reason")
    stop.set()
    await stop.wait()

raise SystemExit(entrypoint.run("part", Settings, main))
"""

WITHOUT_TORCH = """
import runpy, sys
sys.modules["torch"] = None  # whoever imports it fails
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


def run(*arguments: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    root = str(Path(__file__).parents[3])
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ | {"PYTHONPATH": root} | (environment or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    plain = [line for line in result.stderr.splitlines() if not line.startswith("{")]
    return result.returncode, "\n".join(plain)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), (0, "")),
        (("--set", "fail=Unavailable"), (2, "part: the reason")),
        (("--set", "fail=Internal"), (1, "part: the reason")),
        (("--check", "--set", "fail=Internal"), (0, "")),
        (("--set", "fial=x"), (2, "part: settings: unknown key 'fial', nearest is 'fail'")),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], expected: tuple[int, str]) -> None:
    assert run(*arguments) == expected


@pytest.mark.parametrize(
    "override",
    [
        "fail_secret=hunter2",
        "redis.password='hunter2'",
        "url=redis://:hunter2@h/0",
        'url="rediss://me:hunter2@h:1/0?x=1"',
    ],
)
def test_a_secret_on_the_command_line_is_refused_and_not_repeated(override: str) -> None:
    code, line = run("--set", override)
    assert code == 2 and "read a command line" in line and "hunter2" not in line


def test_what_is_no_secret_may_stand_there() -> None:
    for override in ("password_file=/x", "url=redis://h:1/0", "url=unix:///x@y:z", "url=x://[y"):
        assert "unknown key" in run("--set", override)[1]


def test_a_process_whose_parent_is_gone_does_not_start() -> None:
    code, line = run(environment={"BATON_PARENT_PID": "1"})
    assert (code, line) == (2, "part: the parent process 1 is gone")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_tells_a_wrong_setting_before_torch_is_imported(role: str) -> None:
    program = WITHOUT_TORCH.format(module=f"services.{role}")
    ended = subprocess.run(
        [sys.executable, "-c", program, "--set", "lisen=x"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last == f"{role}: settings: unknown key 'lisen', nearest is 'listen'"


def test_a_process_that_is_told_to_end_while_it_imports_ends(tmp_path: Path) -> None:
    """By its own word, not by the default action, which the first process of a container lacks."""
    (tmp_path / "slow.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGTERM)\ntime.sleep(50)\n"
    )
    program = PROGRAM.replace("Settings, main)", 'Settings, main, imports=["slow"])')
    assert program != PROGRAM
    paths = os.pathsep.join((str(Path(__file__).parents[3]), str(tmp_path)))
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr


TWICE = """
import asyncio, os, signal
from dataclasses import dataclass
from process import entrypoint

@dataclass(frozen=True)
class Settings:
    pass

async def main(settings, stop):
    os.kill(os.getpid(), signal.SIGTERM)
    await stop.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(50)  # an end that takes its time

raise SystemExit(entrypoint.run("part", Settings, main))
"""


def test_a_second_signal_ends_a_process_at_once() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TWICE],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        timeout=40,
        check=False,
    )
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr


CODE = """if True:
    import gc
    import sys
    import weakref

    from process import entrypoint

    class Node:
        pass

    garbage = Node()
    garbage.itself = garbage
    gone = weakref.ref(garbage)
    del garbage
    kept = [[] for _ in range(1000)]
    entrypoint.begin_serving()
    assert gone() is None
    assert gc.get_freeze_count() > len(kept)
    assert not any(each is kept for each in gc.get_objects())  # no collection comes upon it
    assert round(sys.getswitchinterval() * 1e6) == entrypoint.SWITCH_INTERVAL_S * 1e6 < 1000
    later = Node()
    later.itself = later
    gone = weakref.ref(later)
    del later
    gc.collect()
    assert gone() is None  # what is made from here on is collected as ever
"""

IMPORTING_CODE = """if True:
    import gc

    from process import entrypoint

    class Broken(Exception):
        pass

    try:
        with entrypoint.importing():
            assert not gc.isenabled()
            kept = [[] for _ in range(1000)]
            raise Broken
    except Broken:
        pass
    assert gc.isenabled() and not any(each is kept for each in gc.get_objects())
    gc.disable()
    with entrypoint.importing():
        assert not gc.isenabled()
    assert not gc.isenabled()  # as it was
"""


def test_the_collector_rests_while_something_is_imported_and_then_goes_on() -> None:
    subprocess.run([sys.executable, "-c", IMPORTING_CODE], timeout=60, check=True)


def test_what_is_loaded_is_out_of_the_collectors_way() -> None:
    subprocess.run([sys.executable, "-c", CODE], timeout=60, check=True)
