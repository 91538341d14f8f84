"""What the benchmark says of its rounds, against rounds that were written down; and where an
interrupted run goes on."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.speculation import Kept, Round, summary, turns


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


def test_answers_are_held_against_plain_decodings_by_their_mean_time() -> None:
    """Of two answers one is whole after half of the batch's time."""
    plain, own = Round(1.0, 1.0, 96, 0, answers_s=2.0), Round(1.0, 1.0, 96, 24, answers_s=1.5)
    found = summary({"plain": [plain, plain], "ngram": [own, own]})
    assert found["ngram"]["answers_speed"] == 1.333 and found["plain"]["answers_speed"] == 1.0
    assert found["ngram"]["wall_speed"] == 1.0


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
