"""Children are started, watched, replaced and never left behind; with small scripts as children."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from baton.cluster import command_lines as cluster_plan
from baton.cluster.command_lines import ProcessSpec
from baton.cluster.local_cluster import find_redis_server
from baton.cluster.supervisor import STOP_TIMEOUT_S, Child, ClusterEvent, ProcessState, Supervisor
from baton.errors import ClusterError
from tests.harness.waiting import WAIT_S, block_until

ROOT = Path(__file__).resolve().parents[3]

GOOD = """
import json, signal, sys
print(json.dumps({"event": "loading", "what": "weights", "done": 1, "total": 2}), flush=True)
print(json.dumps({"event": "ready", "address": "127.0.0.1:1"}), flush=True)
signal.sigwait([signal.SIGTERM])
"""
STUBBORN = """
import json, signal, threading
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(json.dumps({"event": "ready", "address": ""}), flush=True)
threading.Event().wait()
"""
WRONG_KEY = """
import sys
print('{"event": "settings"}', flush=True)
sys.exit("store: settings: unknown key 'x', nearest is 'y'")
"""
MANY_LINES = """
import sys
def load():
    raise RuntimeError("device: out of memory\\nSearch for the number.\\nCompile with advice.")
print('{"event": "settings"}', flush=True)
load()
"""
SILENT_DEATH = "import os; os.kill(os.getpid(), 9)"
ONCE = """
import json, pathlib, signal, sys
mark = pathlib.Path(sys.argv[1])
if mark.exists():
    sys.exit(3)
mark.touch()
print(json.dumps({"event": "ready", "address": ""}), flush=True)
signal.sigwait([signal.SIGTERM])
"""


def _spec(name: str, code: str, *arguments: str, kind: str = "store") -> ProcessSpec:
    # SIGTERM is blocked from the start where the script waits for it with sigwait.
    block = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
    prefix = block if "sigwait" in code else ""
    return ProcessSpec(
        name, kind, (sys.executable, "-c", prefix + textwrap.dedent(code), *arguments)
    )


class Watcher:
    """Collects events; `wait` blocks until one fits."""

    def __init__(self) -> None:
        self.events: list[ClusterEvent] = []
        self._changed = threading.Condition()

    def __call__(self, event: ClusterEvent) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def wait(self, fits: Callable[[list[ClusterEvent]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: fits(self.events), timeout=30), self.events

    def count(self, name: str, what: str) -> int:
        return sum(event.name == name and event.what == what for event in self.events)


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def stop_timeout_s() -> float:
    return STOP_TIMEOUT_S


@pytest.fixture
def supervisor(tmp_path: Path, watcher: Watcher, stop_timeout_s: float) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path, watcher, stop_timeout_s=stop_timeout_s)
    yield supervisor
    supervisor.stop((("store",), ("router",)))
    for info in supervisor.processes().values():
        assert info.pid == 0 or not psutil.pid_exists(info.pid)


def _soon() -> float:
    return time.monotonic() + 30


def test_ready_then_stopped_in_order(supervisor: Supervisor, watcher: Watcher) -> None:
    supervisor.launch([_spec("a", GOOD, kind="router"), _spec("b", GOOD)])
    supervisor.wait_ready(["a", "b"], _soon())
    info = supervisor.processes()["b"]
    assert (info.state, info.address) == (ProcessState.READY, "127.0.0.1:1")
    assert "weights" in info.log_path.read_text()
    supervisor.stop((("store",), ("router",)))
    stopped = [event.name for event in watcher.events if event.what == "stopped"]
    assert stopped == ["b", "a"]
    assert all(info.state is ProcessState.STOPPED for info in supervisor.processes().values())
    supervisor.stop((("store",), ("router",)))


def test_loading_is_shown(supervisor: Supervisor, watcher: Watcher) -> None:
    supervisor.launch([_spec("a", GOOD)])
    watcher.wait(lambda events: ClusterEvent("a", "loading", "weights", 1, 2) in events)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (WRONG_KEY, "unknown key 'x', nearest is 'y'"),
        (SILENT_DEATH, "killed by signal 9"),
        ("raise SystemExit(3)", "exit code 3"),
        (MANY_LINES, "^RuntimeError: device: out of memory$"),
    ],
)
def test_a_death_at_the_start_is_the_childs_own_line(
    supervisor: Supervisor, code: str, says: str
) -> None:
    supervisor.launch([_spec("good", GOOD), _spec("bad", code)])
    with pytest.raises(ClusterError, match=says) as caught:
        supervisor.wait_ready(["good", "bad"], _soon())
    assert "\n" not in str(caught.value)


def test_never_ready_names_who(supervisor: Supervisor) -> None:
    supervisor.launch([_spec("slow", "import threading; threading.Event().wait()")])
    with pytest.raises(ClusterError, match="not ready in time: slow"):
        supervisor.wait_ready(["slow"], time.monotonic() + 0.2)


def test_a_program_that_is_not_there(supervisor: Supervisor) -> None:
    with pytest.raises(ClusterError, match="cannot be started"):
        supervisor.launch([ProcessSpec("x", "store", ("/nowhere/program",))])


def test_a_killed_part_comes_back_as_another_life(supervisor: Supervisor, watcher: Watcher) -> None:
    supervisor.launch([_spec("a", GOOD)])
    supervisor.wait_ready(["a"], _soon())
    supervisor.keep_up()
    first = supervisor.processes()["a"].pid
    supervisor.kill("a", restart=True)
    assert not psutil.pid_exists(first)
    supervisor.wait_ready(["a"], _soon())
    info = supervisor.processes()["a"]
    assert info.pid != first and info.num_restarts == 1


def test_a_part_killed_by_somebody_else_comes_back(
    supervisor: Supervisor, watcher: Watcher
) -> None:
    supervisor.launch([_spec("a", GOOD)])
    supervisor.wait_ready(["a"], _soon())
    supervisor.keep_up()
    os.kill(supervisor.processes()["a"].pid, signal.SIGKILL)
    watcher.wait(lambda events: watcher.count("a", "ready") == 2)
    assert watcher.count("a", "died") == 1


def test_a_held_part_stays_away_until_restart(supervisor: Supervisor, watcher: Watcher) -> None:
    supervisor.launch([_spec("a", GOOD), _spec("b", GOOD)])
    supervisor.wait_ready(["a", "b"], _soon())
    supervisor.keep_up()
    supervisor.kill("a", restart=False)
    supervisor.kill("b", restart=True)
    supervisor.wait_ready(["b"], _soon())  # the pause that "a" would have had is over, too
    assert supervisor.processes()["a"].state is ProcessState.HELD
    supervisor.restart("a")
    supervisor.wait_ready(["a"], _soon())
    assert supervisor.processes()["a"].num_restarts == 1


def test_restarts_that_fail_back_off_visibly(
    supervisor: Supervisor, watcher: Watcher, tmp_path: Path
) -> None:
    supervisor.launch([_spec("a", ONCE, str(tmp_path / "mark"))])
    supervisor.wait_ready(["a"], _soon())
    supervisor.keep_up()
    supervisor.kill("a", restart=True)
    watcher.wait(lambda events: watcher.count("a", "died") == 2)
    died = [event.detail for event in watcher.events if event.what == "died"]
    assert died == ["exit code 3"] * 2
    assert watcher.count("a", "restarting") == 2


def test_a_new_spec_counts_from_the_next_life(supervisor: Supervisor) -> None:
    supervisor.launch([_spec("a", GOOD)])
    supervisor.wait_ready(["a"], _soon())
    supervisor.keep_up()
    supervisor.replace_spec(_spec("a", GOOD.replace("127.0.0.1:1", "127.0.0.1:2")))
    assert supervisor.processes()["a"].address == "127.0.0.1:1"
    supervisor.restart("a")
    supervisor.wait_ready(["a"], _soon())
    assert supervisor.processes()["a"].address == "127.0.0.1:2"


@pytest.mark.parametrize("stop_timeout_s", [0.2])
def test_one_that_ignores_sigterm_is_killed_within_the_bound(supervisor: Supervisor) -> None:
    supervisor.launch([_spec("a", STUBBORN)])
    supervisor.wait_ready(["a"], _soon())
    pid = supervisor.processes()["a"].pid
    supervisor.stop((("store",),))
    block_until(lambda: not psutil.pid_exists(pid))


DRAINS = """
import json, signal, sys
print(json.dumps({"event": "ready", "address": ""}), flush=True)
signal.sigwait([signal.SIGTERM])
print("told", flush=True)
if signal.sigtimedwait([signal.SIGTERM], 1.0):
    sys.exit("told twice")
print("drained", flush=True)
"""


@pytest.mark.parametrize("stop_timeout_s", [0.2])
def test_a_part_gets_its_time_to_drain_and_is_told_once(supervisor: Supervisor) -> None:
    supervisor.launch([dataclasses.replace(_spec("a", DRAINS), drain_s=30.0)])
    supervisor.wait_ready(["a"], _soon())
    supervisor.stop((("store",),))
    said = supervisor.processes()["a"].log_path.read_text().splitlines()
    assert said[-2:] == ["told", "drained"]


TWO_WORDS = """
import json, signal
print(json.dumps({"event": "ready", "address": ""}), flush=True)
signal.sigwait([signal.SIGTERM])
print("one\\ntwo", flush=True)
"""


def test_the_last_words_of_a_part_are_in_its_log_when_it_has_stopped(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However busy the thread is that reads them."""
    understand = Child._understand

    def slowly(child: Child, line: str) -> None:
        if line == "one":
            child.wait(WAIT_S)
            time.sleep(0.2)
        understand(child, line)

    monkeypatch.setattr(Child, "_understand", slowly)
    supervisor.launch([_spec("a", TWO_WORDS)])
    supervisor.wait_ready(["a"], _soon())
    supervisor.stop((("store",),))
    said = supervisor.processes()["a"].log_path.read_text().splitlines()
    assert said[-2:] == ["one", "two"]


def test_unknown_parts_are_named(supervisor: Supervisor) -> None:
    with pytest.raises(ClusterError, match="no part 'x'"):
        supervisor.kill("x", restart=True)


OWNER = """
import pathlib, sys, threading, time
from baton.cluster import command_lines as cluster_plan
from baton.cluster.local_cluster import find_redis_server
from baton.cluster.command_lines import ProcessSpec
from baton.cluster.supervisor import Supervisor
supervisor = Supervisor(pathlib.Path(sys.argv[1]), lambda event: None)
bound = ("-m", "baton.cluster.end_with_parent", sys.executable, "-c", sys.argv[2])
supervisor.launch([ProcessSpec("a", "store", (sys.executable, *bound))])
supervisor.wait_ready(["a"], time.monotonic() + 30)
print(supervisor.processes()["a"].pid, flush=True)
threading.Event().wait()
"""


def test_a_killed_owner_takes_its_children_along(tmp_path: Path) -> None:
    """SIGKILL leaves no time to clean up: the kernel does it, for any program."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), STUBBORN],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert owner.stdout is not None
    child = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    owner.stdout.close()
    child.wait(30)


def test_with_parent_refuses_when_the_parent_is_gone_already() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "baton.cluster.end_with_parent", "true"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "BATON_PARENT_PID": "1"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 2
    assert "is gone" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), SystemExit(1)])
def test_a_view_that_fails_does_not_end_the_cluster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    def closed(event: ClusterEvent) -> None:
        raise error

    supervisor = Supervisor(tmp_path, closed)
    try:
        supervisor.launch([_spec("a", GOOD)])
        supervisor.wait_ready(["a"], _soon())
        supervisor.keep_up()
        supervisor.kill("a", restart=True)
        supervisor.wait_ready(["a"], _soon())
        assert supervisor.processes()["a"].num_restarts == 1
    finally:
        supervisor.stop((("store",),))
    assert [record.message for record in caplog.records if "cannot be shown" in record.message] == [
        f"events of the cluster cannot be shown: {error!r}"
    ]


def test_the_end_of_the_supervisors_thread_reaches_all_who_wait(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor.launch([_spec("a", STUBBORN)])
    supervisor.wait_ready(["a"], _soon())
    supervisor.keep_up()
    supervisor.wait_failure(timeout_s=0)  # none yet

    def mistake(item: object) -> None:
        raise ValueError("a mistake")

    caught: list[BaseException] = []

    def wait() -> None:
        try:
            supervisor.wait_failure(timeout_s=30)
        except ClusterError as error:
            caught.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    monkeypatch.setattr(supervisor, "_take", mistake)
    os.kill(supervisor.processes()["a"].pid, signal.SIGKILL)
    waiter.join(30)
    assert "ended unexpectedly: ValueError('a mistake')" in str(caught[0])
    # Commands do not wait for a thread that is gone.
    with pytest.raises(ClusterError, match="ended unexpectedly"):
        supervisor.restart("a")


def test_no_child_outlives_a_supervisor_that_ended(
    supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor.launch([_spec("a", STUBBORN), _spec("b", GOOD)])
    supervisor.wait_ready(["a", "b"], _soon())
    pid = supervisor.processes()["a"].pid
    monkeypatch.setattr(supervisor, "_take", lambda item: 1 / 0)
    os.kill(supervisor.processes()["b"].pid, signal.SIGKILL)
    with pytest.raises(ClusterError, match="ZeroDivisionError"):
        supervisor.wait_failure(timeout_s=30)
    supervisor.stop((("store",),))
    assert not psutil.pid_exists(pid)


def test_a_part_that_retires_is_told_to_end_and_forgotten(
    supervisor: Supervisor, watcher: Watcher
) -> None:
    supervisor.launch([_spec("a", GOOD), _spec("b", GOOD)])
    supervisor.wait_ready(["a", "b"], _soon())
    supervisor.keep_up()
    supervisor.retire(["a"], 20.0)
    watcher.wait(lambda events: ClusterEvent("a", "stopped", "for good") in events)
    assert list(supervisor.processes()) == ["b"]
    assert not watcher.count("a", "died") and not watcher.count("a", "restarting")
    # Its name is free again.
    supervisor.launch([_spec("a", GOOD)])
    supervisor.wait_ready(["a"], _soon())


def test_one_that_does_not_end_in_time_is_killed(supervisor: Supervisor, watcher: Watcher) -> None:
    supervisor.launch([_spec("a", STUBBORN)])
    supervisor.wait_ready(["a"], _soon())
    supervisor.retire(["a"], 0.05)
    supervisor.retire(["a"], 60.0)  # again: its time is not prolonged
    watcher.wait(lambda events: ClusterEvent("a", "stopped", "for good") in events)
    assert not supervisor.processes()


def test_one_between_two_lives_retires_at_once(
    supervisor: Supervisor, watcher: Watcher, tmp_path: Path
) -> None:
    supervisor.launch([_spec("a", ONCE, str(tmp_path / "mark"))])
    supervisor.wait_ready(["a"], _soon())
    supervisor.keep_up()
    supervisor.kill("a", restart=False)
    assert supervisor.processes()["a"].state is ProcessState.HELD
    supervisor.retire(["a"], 60.0)
    assert not supervisor.processes()


def test_who_is_not_there_cannot_retire_and_nobody_else_does(supervisor: Supervisor) -> None:
    supervisor.launch([_spec("a", GOOD)])
    supervisor.wait_ready(["a"], _soon())
    with pytest.raises(ClusterError, match="no part 'x'"):
        supervisor.retire(["a", "x"], 1.0)
    assert supervisor.processes()["a"].state is ProcessState.READY


PULSING = """
import asyncio, json
from process import entrypoint

async def serve():
    entrypoint.start_pulse()
    print(json.dumps({"event": "ready", "address": ""}), flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


def test_a_part_that_is_frozen_is_said_and_started_again(
    tmp_path: Path, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis, too; the others are left alone."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    supervisor = Supervisor(tmp_path, watcher, max_silence_s=4.0)
    redis = cluster_plan.redis(find_redis_server(), tmp_path / "redis.sock")
    try:
        supervisor.launch([redis, _spec("a", PULSING), _spec("b", PULSING)])
        supervisor.wait_ready(["redis", "a", "b"], _soon())
        supervisor.keep_up()
        for name in ("redis", "a"):
            os.kill(supervisor.processes()[name].pid, signal.SIGSTOP)
        for name in ("redis", "a"):
            watcher.wait(lambda events, name=name: watcher.count(name, "ready") == 2)
    finally:
        supervisor.stop((("store",), ("redis",)))
    for name in ("redis", "a"):
        told = [event.what for event in watcher.events if event.name == name]
        assert told[:7] == ["starting", "ready", "silent", "died", "restarting", "ready", "stopped"]
    assert watcher.count("b", "silent") == 0


def test_the_first_restart_of_a_part_waits_for_nothing(
    supervisor: Supervisor, watcher: Watcher
) -> None:
    supervisor.launch([_spec("a", GOOD)])
    supervisor.wait_ready(["a"], _soon())
    supervisor.keep_up()
    part = supervisor._part("a")
    assert part.backoff_s == 0.0
    os.kill(supervisor.processes()["a"].pid, signal.SIGKILL)
    watcher.wait(lambda events: watcher.count("a", "ready") == 2)
    assert part.backoff_s > 0.0
