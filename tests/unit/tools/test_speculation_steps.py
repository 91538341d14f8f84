"""What the benchmark says of single steps, against steps whose speed was planted: with a machine
that slows down for a while, steps that are held up, and engines of which each has its own memory.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from benchmarks.speculation import (
    AGAIN,
    PLAIN,
    Step,
    control,
    figures,
    markdown,
    verdicts,
)

NUM_STEPS, NUM_ROWS = 95, 8


def _rounds(
    rng: random.Random, costs: dict[str, float], num_rounds: int = 9
) -> dict[str, list[list[Step]]]:
    """Of ways that cost so many times what plain decoding does. As measured on a quiet machine:
    steps of a pair differ by 5 %, engines by 0.4 %, and a bad moment lasts for several steps."""
    found: dict[str, list[list[Step]]] = {way: [] for way in costs}
    for _ in range(num_rounds):
        own = {way: cost * rng.gauss(1.0, 0.003) for way, cost in costs.items()}
        steps: dict[str, list[Step]] = {way: [] for way in costs}
        slowness = 0.0
        for _ in range(NUM_STEPS):
            slowness = 0.9 * slowness + rng.gauss(0.0, 0.1)
            for way in rng.sample(list(costs), len(costs)):
                seconds = 0.006 * own[way] * math.exp(slowness + rng.gauss(0.0, 0.035))
                if rng.random() < 0.02:
                    seconds *= 4.0
                steps[way].append(Step(seconds, NUM_ROWS, is_asked=False))
        for way, those in steps.items():
            found[way].append(those)
    return found


def _figures(steps: dict[str, list[list[Step]]]) -> dict[str, Any]:
    return {way: figures(steps[PLAIN], own) for way, own in steps.items()}


def test_planted_speeds_are_found() -> None:
    """Of 40 runs: 0.97 is never shown, and nearly always refuted; 1.00 the other way round; and all
    intervals have what was planted in them as often as they should."""
    speeds = {PLAIN: 1.0, AGAIN: 1.0, "slow": 0.97, "just": 0.98}
    num_runs, num_in = 40, dict.fromkeys(speeds, 0)
    told: dict[str, list[str]] = {"shown": [], "open": [], "refuted": []}
    for seed in range(num_runs):
        steps = _rounds(random.Random(seed), {way: 1.0 / one for way, one in speeds.items()})
        found = _figures(steps)
        for verdict, those in verdicts({"cell": found}, 0.98).items():
            told[verdict] += those
        for way, one in found.items():
            low, high = one["interval"]
            num_in[way] += low <= speeds[way] <= high
            assert one["resting_loss"] == pytest.approx(1.0 / one["speed"] - 1.0, abs=2e-4)
            assert one["guessing_loss"] == 0.0
    assert num_in[PLAIN] == num_runs
    for way in (AGAIN, "slow", "just"):
        assert num_in[way] >= 0.85 * num_runs
    assert sum(", slow" in line for line in told["refuted"]) >= 0.9 * num_runs
    assert sum(", plain again" in line for line in told["shown"]) >= 0.9 * num_runs
    assert not any(", slow" in line for line in told["shown"])
    assert not any(", plain again" in line for line in told["refuted"])
    assert sum(", just" in line for line in told["open"]) >= 0.8 * num_runs


def test_trials_are_counted_by_what_they_took() -> None:
    """Once in a run, and bringing nothing: three steps of which each lasts as long as five. Then
    one sequence is ahead, and the last step has a row less."""
    steps = _rounds(random.Random(1), {PLAIN: 1.0, AGAIN: 1.0})
    one_s = sum(step.seconds for own in steps[PLAIN] for step in own) / (9 * NUM_STEPS)
    own = steps[AGAIN][4]
    for place in (10, 11, 12):
        own[place] = Step(5.0 * one_s, NUM_ROWS, is_asked=True)
    own[-1] = own[-1]._replace(num_tokens=NUM_ROWS - 1)
    without = _figures(_rounds(random.Random(1), {PLAIN: 1.0, AGAIN: 1.0}))[AGAIN]
    found = figures(steps[PLAIN], steps[AGAIN])
    assert [round_[5] for round_ in found["held"]] == [0, 0, 0, 0, 4, 0, 0, 0, 0]
    assert found["guessing_loss"] == pytest.approx(12.0 / (9 * NUM_STEPS), rel=0.2)
    assert found["resting_loss"] == pytest.approx(without["resting_loss"], abs=0.002)
    both = found["resting_loss"] + found["guessing_loss"]
    assert found["speed"] == pytest.approx(1.0 / (1.0 + both), abs=2e-4)


def test_guesses_that_pay() -> None:
    """Two tokens a step, each step half as long again: 4 / 3 times as fast."""
    steps = _rounds(random.Random(2), {PLAIN: 1.0, "tree": 1.5})
    own = [
        [step._replace(is_asked=True, num_tokens=2 * NUM_ROWS) for step in one[: NUM_STEPS // 2]]
        for one in steps["tree"]
    ]
    found = figures(steps[PLAIN], own)
    low, high = found["interval"]
    assert low < NUM_STEPS / (NUM_STEPS // 2 * 1.5) < high
    assert 1.2 < low
    assert found["resting_loss"] == 0.0


def test_one_round_shows_nothing() -> None:
    found = _figures(_rounds(random.Random(3), {PLAIN: 1.0, AGAIN: 1.0}, num_rounds=1))
    assert found[AGAIN]["interval"] is None
    told = verdicts({"cell": found}, 0.98)
    assert [len(told[verdict]) for verdict in ("shown", "open", "refuted")] == [0, 1, 0]
    assert "no interval" in told["open"][0]


def test_a_control_that_is_off_is_named() -> None:
    steps = _rounds(random.Random(4), {PLAIN: 1.0, AGAIN: 1.0})
    slow = _rounds(random.Random(5), {PLAIN: 1.0, AGAIN: 1.05})
    found = control({"batch 8": _figures(steps), "batch 16": _figures(slow)})
    assert found["num_cells"] == 2
    assert len(found["off"]) == 1 and found["off"][0].startswith("batch 16, plain again: 0.9")


def test_no_way_takes_more_steps_than_plain_decoding() -> None:
    plain, longer = ([Step(1.0, 1, is_asked=False)] * number for number in (3, 4))
    with pytest.raises(ValueError, match="4 steps where plain decoding took 3"):
        figures([plain], [longer])


def test_the_table_has_a_row_for_each_cell() -> None:
    one = {"speed": 0.99123, "interval": [0.98, 1.0021]}
    by_batch = {"batch 8": {"tree": one}, "batch 16": {"tree": {**one, "interval": None}}}
    found = markdown(by_batch, ["tree"])
    assert found.splitlines()[2:] == [
        "| batch 8 | 0.991 (0.980-1.002) |",
        "| batch 16 | 0.991 (nan-nan) |",
    ]
