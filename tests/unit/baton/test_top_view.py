"""`baton top`: what one frame shows of a cluster, within the screen it has, and how the command
behaves."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from baton import cli
from baton.cli import status
from baton.cli.options import RouterTarget
from baton.cli.status import bar, frame, sparks
from baton.errors import Unavailable
from protos import common_pb2, inference_pb2

WIDTH = 170


def _shown(status: inference_pb2.GetClusterStatusReply, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False)
    console.print(frame(status, **options))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _status(num_requests: int = 0) -> inference_pb2.GetClusterStatusReply:
    status = inference_pb2.GetClusterStatusReply(
        router_id="router-1",
        redis_reachable=True,
        num_requests_in_flight=1,
        num_requests_finished=7,
        history_interval_ms=2000,
    )
    status.workers.add(worker_id="decode-0", role="decode", model="tiny", num_blocks=10)
    status.workers.add(
        worker_id="prefill-0",
        role="prefill",
        model="tiny",
        num_blocks=10,
        num_free_blocks=4,
        num_cached_blocks=3,
        num_quarantined_blocks=1,
        num_running=2,
        num_prompt_tokens_computed=30,
        num_prompt_tokens_local=10,
    )
    status.stores.add(node_id="store", num_frames=8, num_committed=4, num_pinned=1, num_leases=1)
    for index in range(num_requests):
        request = status.requests.add(
            request_id=f"request-{index}",
            tenant="[red]acme[/red]",
            outcome="" if index == 0 else "finished",
            state="decoding" if index == 0 else "",
            elapsed_s=2.0,
            num_prompt_tokens=12,
        )
        request.spans.add(stage="prefill_compute", begin_s=0, end_s=1)
        request.spans.add(stage="decode", begin_s=1, end_s=2)
    for index in range(5):
        status.history.add(unix_ms=index, num_output_tokens=20, num_tokens_local=1)
    return status


def test_a_frame_names_what_there_is() -> None:
    text = _shown(_status(num_requests=3))
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert lines["prefill-0"].split()[2:8] == ["2", "3", "10", "2", "0", "25"]
    assert "busy" in lines["prefill-0"] and "idle" in lines["decode-0"]
    assert text.index("prefill-0") < text.index("decode-0")
    assert "decoding" in lines["request-0"] and "finished" in lines["request-2"]
    # What clients named is text, never markup.
    assert "[red]acme[/red]" in lines["request-1"]
    assert "10.0 tokens/s" in text and "hit rate 100 %" in text and "tiny" in text
    assert "problem" not in text and "NOT reachable" not in text


def test_what_is_wrong_stands_first() -> None:
    status = _status()
    status.problems.append("store-1 does not answer")
    status.redis_reachable = False
    status.workers[0].integrity_error = "counts differ"
    text = _shown(status)
    assert text.splitlines()[0].endswith("Redis NOT reachable")
    assert text.splitlines()[1] == "problem: store-1 does not answer"
    assert "counts differ" in text


def test_an_empty_cluster_says_so() -> None:
    text = _shown(inference_pb2.GetClusterStatusReply())
    for words in ("no model", "none is registered", "every prompt is computed", "none yet"):
        assert words in text


@pytest.mark.parametrize("height", [20, 30, 60])
def test_it_fits_the_screen(height: int) -> None:
    text = _shown(_status(num_requests=64), height=height, note="Ctrl-C ends it")
    assert len(text.splitlines()) <= height
    assert "request-0" in text and "Ctrl-C ends it" in text


def test_a_bar_is_as_long_as_it_should_be_and_shows_the_smallest_part() -> None:
    parts = [("red", 1.0), ("blue", 500.0), ("green", 499.0)]
    made = bar(parts, 1000, width=20)
    assert len(made) == 20
    assert [str(span.style) for span in made.spans][:3] == ["red", "blue", "green"]
    assert bar([("red", 5)], 0, width=4).plain in ("░░░░", "█░░░")
    assert bar([], 10, width=4).plain == "░░░░"
    assert len(bar([("red", 7)] * 9, 10, width=6)) == 6  # more than the whole


def test_sparks_leave_gaps_and_keep_the_peaks() -> None:
    assert sparks([0, None, 4, 8]).plain == "▁ ▅█"
    assert sparks([]).plain == ""
    assert sparks([0, 0]).plain == "▁▁"
    many = sparks([0.0] * 299 + [9.0])
    assert len(many) == 30 and many.plain[-1] == "█"
    assert sparks([0.5], top=1.0).plain == "▅"


class _Client:
    """Answers as it is told to."""

    def __init__(self, *answers: inference_pb2.GetClusterStatusReply | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[inference_pb2.GetClusterStatusRequest] = []

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *error: object) -> None: ...

    def status(
        self, timeout_s: float, request: inference_pb2.GetClusterStatusRequest
    ) -> inference_pb2.GetClusterStatusReply:
        self.asked.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _run(monkeypatch: pytest.MonkeyPatch, client: _Client, *, once: bool) -> int:
    monkeypatch.setattr(RouterTarget, "client", lambda target: client)
    return cli.main(["top", "--interval", "0.001", *(["--once"] if once else [])])


def test_once_prints_one_frame(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client = _Client(_status(num_requests=2))
    assert _run(monkeypatch, client, once=True) == 0
    assert "prefill-0" in capsys.readouterr().out
    (asked,) = client.asked
    assert asked.as_heard and asked.num_requests == status.NUM_AT_ONCE
    assert _run(monkeypatch, _Client(Unavailable("no router answers at x")), once=True) == 1
    assert "no router answers at x" in capsys.readouterr().err


def test_a_router_that_goes_away_is_asked_again_until_ctrl_c(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = io.StringIO()
    monkeypatch.setattr(
        status,
        "Console",
        lambda **_: Console(file=file, width=WIDTH, height=40, force_terminal=True),
    )
    back = _status()
    back.num_requests_finished = 4321
    client = _Client(_status(), Unavailable("no router answers"), back, KeyboardInterrupt())  # type: ignore[arg-type]
    assert _run(monkeypatch, client, once=False) == 0
    text = file.getvalue()
    assert "not up to date; trying again: no router answers" in text
    assert text.index("trying again") < text.index("4321 finished")


def test_each_stage_has_its_colour() -> None:
    colours = {
        stage: status._colour(stage)
        for stage in ("receive", "prefill_queue", "prefill_compute", "decode_fetch", "decode")
    }
    assert len(set(colours.values())) == len(colours)
    assert status._colour("something new") == status._colour("receive")


def test_roles_are_those_of_the_wire() -> None:
    worker = common_pb2.WorkerStatus(role="decode", draining=True)
    assert "draining" in status._worker_state(worker).plain
