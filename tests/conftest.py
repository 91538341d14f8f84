"""Fixtures of every test: a seed that is printed and can be replayed, and the scale of stated
counts.

`BATON_TEST_SEED=<n>` replays a seed. Without it a commit has one of three, and the long run a fresh
one. `BATON_TEST_LONG=1` (`make test-long`) runs the full stated counts; otherwise at least a
fortieth of each.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import TypeVar

import hypothesis
import pytest

T = TypeVar("T")

collect_ignore = ["clients"]  # they have an environment of their own: make test-clients

LONG = os.environ.get("BATON_TEST_LONG") == "1"
LONG_TIMEOUT_S = 1800
"""Of one test at its full count; the short ones have pyproject's."""
SEEDS = (1_621_111_629, 1_282_960_189, 1_711_126_218)
"""A failure of a run says something of its commit, not of what was drawn: the long run draws new
cases, and one that fails becomes a test of its own."""
DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds of each file that takes at least one, as `BATON_RECORD_DURATIONS=1` wrote them."""


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).parent
    try:
        ran = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None


def _draw_seed() -> int:
    """The long run meets new cases; any other one of three seeds, by its commit."""
    if LONG:
        return secrets.randbelow(2**31)
    tree = _git("rev-parse", "HEAD^{tree}") or "0"
    return SEEDS[int(tree[:12], 16) % len(SEEDS)]


# Kept in the environment: a second copy of this module, or a process of the tests, sees it too.
if "BATON_TEST_SEED" not in os.environ:
    os.environ["BATON_TEST_SEED"] = str(_draw_seed())
SESSION_SEED = int(os.environ["BATON_TEST_SEED"])
TURN = SEEDS.index(SESSION_SEED) if SESSION_SEED in SEEDS else SESSION_SEED % len(SEEDS)


def third(cases: Iterable[T]) -> list[T]:
    """A third of cases that are alike, and at least one: another for each seed. The long run has
    all."""
    found = list(cases)
    return found if LONG else found[TURN % len(found) :: len(SEEDS)]


def examples(full: int) -> int:
    """A sixth of a property's examples: other ones for each seed. The long run has all."""
    return full if LONG else math.ceil(full / 6)


# What a start keeps of a rehearsal: the run's own, so that no start finds what another code kept.
if "BATON_TEST_CACHE" not in os.environ:
    _CACHE = tempfile.TemporaryDirectory(prefix="baton-test-cache-")  # gone when this process ends
    os.environ["BATON_TEST_CACHE"] = os.environ["XDG_CACHE_HOME"] = _CACHE.name

# Triton decides when it is first imported (transformers does) whether it compiles or interprets:
# without a GPU the kernels' tests run them through its interpreter.
if importlib.util.find_spec("torch") is not None:
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")

# Property tests say what holds, not how fast: a loaded machine must not fail them.
hypothesis.settings.register_profile("untimed", deadline=None, max_examples=examples(100))
hypothesis.settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws from the same seed; Ctrl-C means the same however the run was started."""
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SESSION_SEED)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell gives this to what it runs in the background, and our children would inherit it:
        # the tests that send Ctrl-C would wait for nothing.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Thousands of tests and what they import stay to the end: the garbage collector rests while
    they are found, a third of whose time it takes, and then looks at what the tests make."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_report_header() -> list[str]:
    return [
        f"baton seed: {SESSION_SEED} (replay with BATON_TEST_SEED={SESSION_SEED}), long: {LONG}"
    ]


_file_seconds: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    path = report.nodeid.partition("::")[0]
    _file_seconds[path] = _file_seconds.get(path, 0.0) + report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    is_whole = "PYTEST_XDIST_WORKER" not in os.environ
    if is_whole and os.environ.get("BATON_RECORD_DURATIONS") == "1":
        known = {path: round(each) for path, each in _file_seconds.items() if each >= 1}
        DURATIONS.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest files first, so that no process of the run ends long after the others.
    known = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: -known.get(item.nodeid.partition("::")[0], 0))
    for item in items:
        if item.get_closest_marker("long") and not LONG:
            item.add_marker(pytest.mark.skip(reason="the full stated counts: make test-long"))
        if LONG and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test that hangs says which of its tasks waits where: threads show only a loop."""
    try:
        return (yield)
    except pytest.fail.Exception as failed:
        if "Timeout" in str(failed):
            # By type: an object's own `__class__` may be code that warns.
            every = gc.get_objects()
            for task in [each for each in every if issubclass(type(each), asyncio.Task)]:
                if not task.done():
                    task.print_stack(file=sys.stderr)
        raise


@pytest.fixture
def seed() -> int:
    """This run's seed; printed in the header and with a failure."""
    print(f"BATON_TEST_SEED={SESSION_SEED}")  # noqa: T201  pytest shows it with the failure
    return SESSION_SEED


@pytest.fixture
def scale() -> Callable[[int], int]:
    """`scale(full)`: how many of a stated count this run does."""
    return lambda full: full if LONG else math.ceil(full / 40)
