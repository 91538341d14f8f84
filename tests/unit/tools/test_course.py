"""What a course of workers tells: peaks, turns, reaction; and its picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.load.runner import MessageArrival, RequestOutcome
from benchmarks.autoscaling import Course, Moment, PoolSize, draw, offered


def _course(*wanted: int, ready: tuple[int, ...] = ()) -> Course:
    """A look each second from -1 on; decode workers as said, one prefill worker."""
    served = ready or wanted
    return Course(
        tuple(
            Moment(i - 1.0, {"prefill": PoolSize(1, 1), "decode": PoolSize(asked, have)})
            for i, (asked, have) in enumerate(zip(wanted, served, strict=True))
        )
    )


@pytest.mark.parametrize(
    ("wanted", "num_turns"),
    [
        ((1, 1, 1), 0),
        ((1, 2, 3, 3), 0),
        ((1, 3, 3, 2, 2, 1), 1),
        ((1, 2, 1, 2, 1), 3),
        ((2, 1, 1, 2), 1),
    ],
)
def test_turns_count_changes_of_direction(wanted: tuple[int, ...], num_turns: int) -> None:
    seen = _course(*wanted)
    assert seen.num_turns("decode") == num_turns
    assert seen.num_turns("prefill") == 0
    assert seen.last_wanted("decode") == wanted[-1]


def test_reaction_is_from_the_loads_beginning_to_more_that_serve() -> None:
    seen = _course(1, 2, 2, 2, ready=(1, 1, 1, 2))
    assert seen.reaction_s("decode") == 2.0
    assert seen.reaction_s("prefill") is None
    assert seen.most_ready("decode") == 2


def _outcome(sent_s: float, error: str = "") -> RequestOutcome:
    arrivals = () if error else (MessageArrival(sent_s + 0.1, 1),)
    return RequestOutcome(sent_s, sent_s, sent_s + 0.5, arrivals, error=error)


def test_offered_load_has_its_pauses() -> None:
    outcomes = [_outcome(at_s) for at_s in (0.0, 0.5, 1.0, 4.5)]
    assert offered(outcomes, 2.0) == [(1.0, 1.5), (3.0, 0.0), (5.0, 0.5)]
    assert offered([], 2.0) == []


@pytest.mark.parametrize("num_failed", [0, 1, 2])
def test_the_picture_is_drawn_whatever_failed(tmp_path: Path, num_failed: int) -> None:
    outcomes = [_outcome(i, "NoCapacity" if i < num_failed else "") for i in range(2)]
    draw({"a": (outcomes, _course(1, 2, 1))}, tmp_path / "plots" / "a.png")
    assert (tmp_path / "plots" / "a.png").read_bytes().startswith(b"\x89PNG")


def test_several_loads_are_drawn_beside_one_another(tmp_path: Path) -> None:
    """One picture, each under its title, and no date in it."""
    step = {"step": ([_outcome(i) for i in range(4)], _course(1, 2, 1))}
    burst = {"burst": ([_outcome(i, "NoCapacity") for i in range(2)], _course(1, 3, 3, 1))}
    for name, runs in (("both.svg", step | burst), ("alone.svg", step)):
        draw(runs, tmp_path / name)
    both, alone = ((tmp_path / name).read_text() for name in ("both.svg", "alone.svg"))
    assert "<!-- step -->" in both
    assert "<!-- burst -->" in both
    assert "<!-- burst -->" not in alone
    assert "<dc:date>" not in both
