"""What `benchmarks.speculation` makes of whole rounds, and where it keeps what it has: in which
order ways take their turns, medians and spreads of each way against plain decoding in the same
round, and a file with a line for each cell that is done. Knows no engine. What it makes of single
steps, and which ways are too slow: speculation_steps.py.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLAIN, AGAIN = "plain", "plain again"
"""The latter does the very same: how far its speed is from 1 is noise."""

_DIGITS = 3


@dataclass(frozen=True)
class Round:
    """One way's answers to all prompts of a cell, once."""

    wall_s: float
    cpu_s: float
    """That the engine's thread computed."""
    num_tokens: int
    """Answered."""
    num_kept: int
    """Of them, guessed."""
    answers_s: float = 0.0
    """Of all answers, from the round's beginning to each one's last token."""


def turns(ways: Sequence[str], seed: str) -> Iterator[list[str]]:
    """The order of each turn, without end: shuffled anew each time, the same for a seed."""
    rng = random.Random(seed)
    order = list(ways)
    while True:
        rng.shuffle(order)
        yield list(order)


def summary(rounds: Mapping[str, Sequence[Round]]) -> dict[str, dict[str, Any]]:
    """By way, against plain decoding: `wall_speed` and `cpu_speed`, medians over rounds, each with
    its least and its greatest (`_range`) and with that of all rounds together (`_total`), in which
    what an engine tries for the first time counts; `wall_speeds` of each round;
    `tokens_per_step`: tokens per row of logits that the target drew from; and `answers_speed`, by
    the mean time of an answer: a batch is over when its slowest answer is, and whose guesses are
    right more often than the others' has his answer before.

    Args:
        rounds: of each way equally many, its n-th beside the others' n-th; "plain" among them.
    """
    plain = rounds[PLAIN]
    found: dict[str, dict[str, Any]] = {}
    for way, own in rounds.items():
        one: dict[str, Any] = {}
        for clock in ("wall", "cpu"):
            seconds = [getattr(each, f"{clock}_s") for each in own]
            of_plain = [getattr(each, f"{clock}_s") for each in plain]
            speeds = [base / taken for base, taken in zip(of_plain, seconds, strict=True)]
            one[f"{clock}_speed"] = round(statistics.median(speeds), _DIGITS)
            one[f"{clock}_speed_range"] = [round(pick(speeds), _DIGITS) for pick in (min, max)]
            one[f"{clock}_speed_total"] = round(sum(of_plain) / sum(seconds), _DIGITS)
            if clock == "wall":
                one["wall_speeds"] = [round(speed, _DIGITS) for speed in speeds]
        num_tokens, num_kept = (sum(getattr(each, key) for each in own)
                                for key in ("num_tokens", "num_kept"))  # fmt: skip
        answers_s = sum(each.answers_s for each in own)
        if answers_s > 0.0:
            one["answers_speed"] = round(sum(each.answers_s for each in plain) / answers_s, _DIGITS)
        one["tokens_per_s"] = round(num_tokens / sum(each.wall_s for each in own), 1)
        one["tokens_per_step"] = round(num_tokens / (num_tokens - num_kept), _DIGITS)
        found[way] = one
    return found


class Kept:
    """Cells that are done, in a file that an interrupted run goes on from.

    Args:
        file: None: nothing is kept.
        run: what the figures belong to; a file of another run is refused.
    Raises: SystemExit for such a file, or one that is none of these.
    """

    def __init__(self, file: Path | None, run: Mapping[str, Any]) -> None:
        self._file = file
        self.by_batch: dict[str, dict[str, Any]] = {}
        self._run = json.loads(json.dumps(run))
        if file is None:
            return
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(self._run) + "\n", encoding="utf-8")
            return
        # What an end in the middle of a line left is of no cell.
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]
        try:
            first, *rest = [json.loads(line) for line in lines]
            for one in rest:
                self.by_batch[one["cell"]] = one["found"]
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{file}: is no file of this benchmark: {error}") from error
        if first != self._run:
            raise SystemExit(f"{file}: is of another run ({first}); name another file")
        self._write()

    def add(self, cell: str, found: dict[str, Any]) -> None:
        """This cell is done."""
        self.by_batch[cell] = found
        if self._file is not None:
            self._write()

    def _write(self) -> None:
        assert self._file is not None
        lines = [self._run]
        lines += [{"cell": cell, "found": found} for cell, found in self.by_batch.items()]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        beside = self._file.with_name(self._file.name + ".new")
        beside.write_text(text, encoding="utf-8")
        beside.replace(self._file)
