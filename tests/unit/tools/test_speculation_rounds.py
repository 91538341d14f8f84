"""What the benchmark says of its rounds, against rounds that were written down; and where an
interrupted run goes on."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speculation_rounds import (
    FALSE_ALARM,
    Kept,
    Round,
    slower,
    summary,
    surely_slower,
    turns,
)


def test_each_round_is_held_against_plain_decoding_of_the_same_round() -> None:
    """The second round met a busy machine: all ways took three times as long, and no speed says
    so."""
    rounds = {
        "plain": [Round(1.0, 0.9, 96, 0), Round(3.0, 0.9, 96, 0), Round(1.0, 0.9, 96, 0)],
        "tree": [Round(2.0, 1.8, 96, 72), Round(1.5, 0.45, 96, 72), Round(0.5, 0.45, 96, 48)],
    }
    found = summary(rounds)
    assert found["plain"]["wall_speed"] == found["plain"]["cpu_speed_total"] == 1.0
    tree = found["tree"]
    assert tree["wall_speed"] == tree["cpu_speed"] == 2.0
    assert tree["wall_speed_range"] == tree["cpu_speed_range"] == [0.5, 2.0]
    assert tree["wall_speeds"] == [0.5, 2.0, 2.0]
    assert tree["wall_speed_total"] == 1.25  # the first round's tries are in it
    assert tree["cpu_speed_total"] == 1.0
    assert tree["tokens_per_step"] == 3.0
    assert tree["tokens_per_s"] == 72.0
    assert slower({"batch 8": found}, 1.5) == ["batch 8, plain: 1.000"]
    assert slower({"batch 8": found}, 1.0) == []


def _speeds(num_below: int, num_rounds: int) -> dict[str, dict[str, Any]]:
    """Of one way, whose rounds took less or more than plain ones."""
    taken = [1.1] * num_below + [1.0] * (num_rounds - num_below)
    plain = [Round(1.0, 1.0, 96, 0)] * num_rounds
    return {"cell": summary({"plain": plain, "way": [Round(one, one, 96, 0) for one in taken]})}


@pytest.mark.parametrize(
    ("num_rounds", "least"), [(1, 9), (4, 9), (5, 5), (8, 7), (11, 9), (15, 12), (21, 15)]
)
def test_too_slow_beyond_noise_is_what_chance_seldom_says(num_rounds: int, least: int) -> None:
    """`least` by the binomial distribution, written down by hand."""
    for num_below in range(num_rounds + 1):
        by_batch = _speeds(num_below, num_rounds)
        is_below = bool(slower(by_batch, 0.98))
        assert is_below == (2 * num_below >= num_rounds)
        found = surely_slower(by_batch, 0.98)
        assert bool(found) == (num_below >= least)
        if found:
            assert found == [f"cell, way: 0.909, {num_below} of {num_rounds} rounds"]


def test_a_way_is_held_against_the_slower_one_of_two_plain_engines() -> None:
    """One of them had luck, and no round tells. It does not hide what is slower than both, nor
    itself."""
    seconds = {"plain": 1.0, "plain again": 1.04, "ngram": 1.04, "tree": 1.09}
    rounds = {way: [Round(one, one, 96, 0)] * 11 for way, one in seconds.items()}
    by_batch = {"cell": summary(rounds)}
    assert len(slower(by_batch, 0.98)) == 3
    assert surely_slower(by_batch, 0.98) == [
        "cell, plain again: 0.962, 11 of 11 rounds",
        "cell, tree: 0.917, 11 of 11 rounds",
    ]


def test_a_way_that_is_just_fast_enough_is_seldom_called_too_slow() -> None:
    rng, num_called = random.Random(0), 0
    for _ in range(2000):
        taken = [rng.gauss(1.0 / 0.98, 0.03) for _ in range(11)]
        rounds = {"plain": [Round(1.0, 1.0, 96, 0)] * 11}
        rounds["way"] = [Round(one, one, 96, 0) for one in taken]
        num_called += bool(surely_slower({"cell": summary(rounds)}, 0.98))
    assert 0 < num_called <= FALSE_ALARM * 2000


def test_a_slow_way_is_found_where_all_engines_are_noisy() -> None:
    """Each of the three by 2 percent, independently."""
    rng, num_called = random.Random(0), {0.98: 0, 0.95: 0}
    for speed in num_called:
        for _ in range(500):
            seconds = {"plain": 1.0, "plain again": 1.0, "way": 1.0 / speed}
            rounds = {
                way: [Round(one, one, 96, 0) for one in (rng.gauss(mean, 0.02) for _ in range(11))]
                for way, mean in seconds.items()
            }
            found = surely_slower({"cell": summary(rounds)}, 0.98)
            num_called[speed] += any("way" in one for one in found)
    assert num_called[0.98] <= FALSE_ALARM * 500
    assert num_called[0.95] >= 0.7 * 500


def test_turns_are_shuffled_anew_by_the_seed() -> None:
    ways = ["plain", "ngram", "tree"]
    found = list(islice(turns(ways, "3 batch 8"), 60))
    assert found == list(islice(turns(ways, "3 batch 8"), 60))
    assert all(sorted(order) == sorted(ways) for order in found)
    assert len({tuple(order) for order in found}) > 1
    assert found != list(islice(turns(ways, "4 batch 8"), 60))


def test_a_run_goes_on_with_the_cells_that_are_not_done(tmp_path: Path) -> None:
    run, file = {"commit": "abc", "rounds": 5, "ways": ("plain",)}, tmp_path / "new" / "cells.json"
    Kept(file, run).add("batch 1", {"plain": 1.0})
    kept = Kept(file, run)
    assert kept.by_batch == {"batch 1": {"plain": 1.0}}
    kept.add("batch 2", {"plain": 2.0})
    with file.open("a", encoding="utf-8") as stream:  # ended while it wrote
        stream.write('{"cell": "batch 4", "fou')
    again = Kept(file, run)
    assert list(again.by_batch) == ["batch 1", "batch 2"]
    again.add("batch 4", {"plain": 3.0})
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line.get("cell") for line in lines] == [None, "batch 1", "batch 2", "batch 4"]
    assert Kept(None, run).by_batch == {}


@pytest.mark.parametrize(
    "text", ["", "no line of it\n", '{"commit": "abc"}\n{"cell": "batch 1"}\n']
)
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=r"cells\.json: is no file of this benchmark"):
        Kept(file, {"commit": "abc"})
    assert file.read_text(encoding="utf-8") == text


def test_cells_of_another_run_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "cells.json"
    Kept(file, {"commit": "abc"}).add("batch 1", {})
    with pytest.raises(SystemExit, match="is of another run"):
        Kept(file, {"commit": "abd"})
