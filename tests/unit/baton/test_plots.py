"""A request's time as a picture: every second of its account in one lane, and files as asked."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

from baton.answers import Completion, KvLeg, Provenance, Usage
from baton.cli import plots
from baton.cli.plots import PlotBar, bars_of
from baton.errors import FailedPrecondition, InvalidArgument

TIMES = {
    "receive": 0.001,
    "tokenize": 0.002,
    "prefill_queue": 0.003,
    "prefill_compute": 0.2,
    "handover": 0.004,
    "decode_fetch": 0.005,
    "decode": 0.5,
    "stream": 0.01,
}


def _completion() -> Completion:
    legs = (
        KvLeg("prefill", "prefill-0", "ab", "shm", "bfloat16", 8192, 0, (), 0, 1 << 30, {}, {}),
        KvLeg("decode", "decode-0", "cd", "shm", "bfloat16", 0, 0, (), 1 << 30, 0, {}, {}),
    )
    return Completion(
        "r-1",
        "a text that nobody else shall see",
        (1, 2, 3),
        "length",
        Usage(8192, 3, 0),
        Provenance("m", "ef", 8192, legs),
        TIMES,
    )


def test_each_stage_follows_the_one_before_in_the_lane_of_who_had_it() -> None:
    bars = bars_of(TIMES)
    assert bars[0] == PlotBar("router", "receive", 0.0, 0.001)
    assert [bar.lane for bar in bars] == [
        *("router", "router", "prefill", "prefill", "router"),
        *("decode", "decode", "router"),
    ]
    for before, after in itertools.pairwise(bars):
        assert before.end_s == after.begin_s
    assert bars[-1].end_s == pytest.approx(sum(TIMES.values()))
    assert bars_of({}) == []
    assert bars_of(TIMES, 0.1)[0] == PlotBar("router", "receive", 0.1, 0.101)


@pytest.mark.parametrize("suffix", plots.FORMATS)
def test_a_picture_is_drawn_as_its_name_says(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"new/r{suffix}"
    plots.check("--timeline", file)
    plots.draw_timeline(_completion(), [0.21, 0.22, 0.73], 0.74, file)
    begin = {".svg": b"<?xml", ".png": b"\x89PNG", ".pdf": b"%PDF"}[suffix]
    content = file.read_bytes()
    assert content.startswith(begin) and len(content) > 5000
    if suffix == ".svg":
        assert content.count(b"<path") > len(TIMES)
        assert b"prefill_compute 200.0 ms" in content and b"decode-0" in content
        assert b"nobody else" not in content


def test_a_request_without_times_or_tokens_has_a_picture_too(tmp_path: Path) -> None:
    empty = Completion("r", "", (), "length", Usage(1, 0, 0), Provenance("m", "ef", 1, ()))
    plots.draw_timeline(empty, [], 0.0, tmp_path / "r.svg")
    assert (tmp_path / "r.svg").stat().st_size > 1000


def test_what_cannot_be_drawn_is_said_before_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match=r"--timeline: r\.gif: name it \*\.svg"):
        plots.check("--timeline", Path("r.gif"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(FailedPrecondition, match="needs matplotlib"):
        plots.check("--timeline", Path("r.svg"))
