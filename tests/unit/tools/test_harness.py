"""What benchmarks share: options, turns of ways, and the last line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from benchmarks import harness
from benchmarks.harness import Several


@harness.case
@click.option("--batches", type=Several(int), default="1,8")
@click.option("--ways", type=Several(click.Choice(("a", "b"))), default="a")
def counted(batches: tuple[int, ...], ways: tuple[str, ...]) -> dict[str, Any]:
    """Counts."""
    harness.show("a table", [{"": way, "sum": sum(batches)} for way in ways])
    return {"sum": sum(batches), "ways": ways}


def test_the_last_line_is_the_result_and_its_context(tmp_path: Path) -> None:
    out = tmp_path / "new" / "result.json"
    ran = CliRunner().invoke(counted, ["--batches", "1,8,64", "--ways", "b,a", "--out", str(out)])
    assert ran.exit_code == 0
    found = json.loads(ran.stdout.splitlines()[-1])
    assert (found["sum"], found["ways"]) == (73, ["b", "a"])
    assert {"benchmark", "commit", "command", "hardware", "python"} <= found.keys()
    assert json.loads(out.read_text(encoding="utf-8")) == found
    assert json.loads(CliRunner().invoke(counted, []).stdout.splitlines()[-1])["sum"] == 9


@pytest.mark.parametrize("arguments", [["--batches", "1,x"], ["--ways", "a,c"]])
def test_a_wrong_value_is_named(arguments: list[str]) -> None:
    ran = CliRunner().invoke(counted, arguments)
    assert ran.exit_code == 2
    assert arguments[0] in ran.stderr and arguments[1][-1] in ran.stderr


def test_ways_take_turns_in_an_order_that_is_reversed_every_other_round() -> None:
    calls: list[str] = []

    def way(name: str) -> float:
        calls.append(name)
        return float(len(calls))

    ways = {name: (lambda name=name: way(name)) for name in "ab"}
    found = harness.interleaved(ways, num_rounds=2, num_warm_ups=1)
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": [4.0, 5.0], "b": [3.0, 6.0]}


def test_a_row_that_fails_hides_no_other() -> None:
    def fails() -> dict[str, Any]:
        raise RuntimeError("no device\nand more")

    assert harness.attempt("x", fails) == {"case": "x", "failed": "RuntimeError: no device"}
    assert harness.attempt("y", lambda: {"us": 1}) == {"case": "y", "us": 1}
    harness.show("both", [harness.attempt("x", fails), {"case": "y", "us": 1.5}])
