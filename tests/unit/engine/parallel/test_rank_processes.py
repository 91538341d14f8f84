"""Ranks' processes end with the engine, and the engine with them: in one line, in time, and nothing
is left."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import transformers

from engine.batch import warm_up
from engine.config import EngineConfig
from engine.errors import LoadError, RankFailed
from engine.models.llama import read_llama_config
from engine.parallel.messages import ComputeBatch, Meet, Met, StartRank
from engine.parallel.rank_grid import Grid
from engine.parallel.rank_processes import RankProcesses
from tests.harness.waiting import block_until

STUB = Path(__file__).parent / "stub_rank.py"
Make = Callable[..., RankProcesses]


@pytest.fixture
def make() -> Iterator[Make]:
    """`make(behaviour)`: two other ranks that behave like that, started."""
    made: list[RankProcesses] = []

    def start(behaviour: str, timeout_s: float = 30.0) -> RankProcesses:
        shape = read_llama_config(transformers.LlamaConfig())
        config = EngineConfig(tensor_parallel=3)
        processes = RankProcesses(
            Grid(3, 1),
            [StartRank(config, "/nowhere", shape, rank) for rank in (1, 2)],
            timeout_s=timeout_s,
            files=(),
            on_failure=lambda: called.append(behaviour),
            program=(sys.executable, "-P", str(STUB), behaviour),
        )
        made.append(processes)
        processes.start()
        return processes

    called: list[str] = []
    start.called = called  # type: ignore[attr-defined]
    yield start
    for processes in made:
        processes.close()
        assert not any(map(_is_there, processes.pids))


def _is_there(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it may end between two looks
        return False


def _failure(processes: RankProcesses) -> str:
    """What every call says from now on; nothing is left."""
    block_until(lambda: bool(processes._state.failure))
    block_until(lambda: not any(map(_is_there, processes.pids)))
    with pytest.raises(RankFailed) as caught:
        processes.check()
    with pytest.raises(RankFailed, match=re.escape(str(caught.value))), processes.step():
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_ranks_load_meet_and_stop(make: Make) -> None:
    processes = make("ready")
    processes.wait_ready()
    processes.tell(Meet())
    assert processes.answers(Met) == [Met(1000), Met(2000)]
    with processes.step():
        processes.tell(ComputeBatch(warm_up(3)))
    processes.check()
    processes.close()
    processes.close()
    assert not any(map(_is_there, processes.pids))


def test_a_killed_rank_fails_the_engine_in_one_line(make: Make) -> None:
    """Also where nobody computes; the other rank is killed, too."""
    processes = make("ready")
    processes.wait_ready()
    os.kill(processes.pids[0], signal.SIGKILL)
    message = _failure(processes)
    assert message.startswith("rank 1 (stage 0, share 1), pid ") and "ended (signal 9)" in message
    assert make.called == ["ready"]  # type: ignore[attr-defined]


def test_whoever_followed_is_not_blamed(make: Make) -> None:
    """Rank 2 ends, too, since rank 1 is gone."""
    processes = make("fails")
    processes.wait_ready()
    with pytest.raises(RankFailed), processes.step():
        processes.tell(ComputeBatch(warm_up(3)))
        raise RankFailed("another rank is gone or too late (as gloo says it)")
    message = _failure(processes)
    assert message.startswith("rank 1 ") and message.endswith("ValueError: all wrong")


def test_ranks_that_all_followed_say_what_they_saw(make: Make) -> None:
    processes = make("follows")
    processes.wait_ready()
    processes.tell(ComputeBatch(warm_up(3)))
    assert "another rank is gone or too late (socket closed)" in _failure(processes)


def test_a_rank_that_cannot_load_says_why(make: Make) -> None:
    processes = make("refuses")
    with pytest.raises(LoadError, match=r"rank . .*: the checkpoint is a riddle; fetch it again$"):
        processes.wait_ready()


def test_a_rank_that_dies_while_it_loads(make: Make) -> None:
    processes = make("dies")
    with pytest.raises(RankFailed, match=r"rank . \(.*\), pid \d+, ended \(exit code 7\)$"):
        processes.wait_ready()


def test_a_rank_that_loads_in_silence_is_given_up(make: Make) -> None:
    processes = make("silent", 0.5)
    with pytest.raises(RankFailed, match=r"said nothing for 0\.5 s while it loaded$"):
        processes.wait_ready()


def test_a_step_that_takes_too_long_is_given_up(make: Make) -> None:
    """Whoever waits in it is woken by `on_failure`."""
    processes = make("ready", 0.5)
    processes.wait_ready()
    with pytest.raises(RankFailed, match=r"a step took more than 0\.5 s"), processes.step():
        processes.tell(ComputeBatch(warm_up(3)))
        block_until(lambda: bool(make.called))  # type: ignore[attr-defined]


def test_our_own_mistake_in_a_step_ends_the_others(make: Make) -> None:
    """They wait in its middle; a second step would meet them there."""
    processes = make("ready")
    processes.wait_ready()
    with pytest.raises(ZeroDivisionError), processes.step():
        processes.tell(ComputeBatch(warm_up(3)))
        _ = 1 // 0
    assert "rank 0 failed in a step" in _failure(processes)


def test_a_rank_that_hears_nothing_is_killed_at_the_end(make: Make) -> None:
    processes = make("deaf")
    processes.wait_ready()
    processes.tell(Meet())
    processes.close()
    assert not any(map(_is_there, processes.pids))


def test_what_cannot_be_told_to_a_rank_ends_the_start() -> None:
    """A folder whose name is not UTF-8: no frame holds it."""
    shape = read_llama_config(transformers.LlamaConfig())
    processes = RankProcesses(
        Grid(2, 1),
        [StartRank(EngineConfig(tensor_parallel=2), "/models/caf\udce9", shape, 1)],
        timeout_s=5.0,
        files=(),
        on_failure=lambda: None,
        program=(sys.executable, "-P", str(STUB), "load"),
    )
    with pytest.raises(RankFailed, match="UnicodeEncodeError"):
        processes.start()
    processes.close()
    assert processes.pids == ()
