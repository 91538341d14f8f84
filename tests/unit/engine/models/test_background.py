"""Work beside other work: its progress is told in the waiting thread, its error is raised there,
and it stops when nobody waits."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from engine.models.loader import Background, Progress


def test_progress_of_both_is_told_by_the_caller() -> None:
    seen: list[tuple[str, int, int, int]] = []

    def note(what: str, done: int, total: int) -> None:
        seen.append((what, done, total, threading.get_ident()))

    half = threading.Event()

    def work(report: Progress) -> str:
        report("beside", 1, 2)
        half.set()
        report("beside", 2, 2)
        return "done"

    with Background(work, note) as beside:
        assert half.wait(30)
        telling = beside.telling()
        assert telling is not None
        telling("main", 1, 1)
        assert beside.result() == "done"
    assert {ident for *_, ident in seen} == {threading.get_ident()}
    assert ("main", 1, 1, threading.get_ident()) in seen
    own = [done for what, done, *_ in seen if what == "beside"]
    assert own == sorted(set(own)) and own[-1] == 2


def test_its_error_is_the_callers() -> None:
    def work(report: Progress) -> None:
        raise OSError("the disk is gone")

    with Background(work, None) as beside, pytest.raises(OSError, match="the disk is gone"):
        beside.result()
    assert beside.telling() is None


def test_work_that_nobody_waits_for_stops() -> None:
    stopped = threading.Event()

    def work(report: Progress) -> None:
        try:
            while True:
                report("beside", 0, 1)
        finally:
            stopped.set()

    with pytest.raises(ValueError, match="other work"), Background(work, None):
        raise ValueError("other work")
    assert stopped.is_set()


def test_a_process_that_ends_does_not_wait_for_it() -> None:
    """As a worker that is told to stop while it loads: its loading thread is no reason to stay, nor
    is what goes on beside it and does not report for long."""
    code = """if True:
        import threading
        from engine.models.loader import Background

        began = threading.Event()

        def work(report):
            began.set()
            threading.Event().wait()

        def load():
            with Background(work, None) as beside:
                beside.result()

        threading.Thread(target=load, daemon=True).start()
        began.wait(30)
    """
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert ended.returncode == 0
