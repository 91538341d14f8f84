"""Whether a drafter is asked, and for how many sequences: as long as it costs no time, and a share
of the time served for finding out whether it does.

What a call costs and brings depends on the batch: each class of batch sizes has an account of its
own. A call costs the drafter's seconds, those of this bookkeeping, and what its nodes made the step
longer; it brings the time that its kept tokens would have taken in plain steps, or a part of it
(`VALUE`). The account gets what calls bring and a share of each step's seconds, and pays what calls
cost; bookkeeping of steps in which nobody is asked is paid by the next trial. Nobody is asked while
it is in debt. Hence the law (test_exploration.py): **time lost <= share * time served + a few
steps' seconds, once + the loss of one trial**, in each class, whatever the costs are.

A trial is a few calls in a row: after a pause the first one has to catch up. With few sequences the
first trial asks for all of them at once, or for fewer where those are long and so much would have
to be caught up with; with more it asks for one, and some time later. Where their tokens would pay,
were there as many for each of the batch and the drafter's call no dearer, the next trial asks for
more of them: only all together may pay the call. Where each sequence's tokens are worth less than
its rows, the next one asks for fewer. It ends early where not even the best outcome would pay, and
goes on in debt while calls gain, the last one or all behind the first together, and the debt does
not grow by what they do not tell: what was lost once, as by catching up, is theirs to pay.

Where steps are launched ahead (engine/runner.py), a step with guesses is not, nor is the next one's
launch hidden behind it. That time (the pause) is charged like any other: what a step lasts without
guesses is what a launched one lasts, and the first launch after guesses is charged what it lasts
longer. It is the same for one sequence and for all, so it is measured, by a few plain steps of each
size that are not launched, and has no say in what more sequences would cost.

While all are deep in debt, steps are slept through (`sleeps`): all that is learnt of them is how
long they lasted, so that rest costs next to nothing. It ends some steps before anybody can be
asked, and those say what a step lasts now. Each class of sizes sleeps by itself.

Policy: pure; running averages that nobody else writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.speculation.expansion import Load, StepCost
from engine.speculation.pace import ACCIDENT, Pace, size_place
from engine.speculation.worth import FEW, SHARE, Call, Worth, size_class

_Task = TypeVar("_Task")

_MOST, _MOST_CLEAR, _MOST_CLEAR_LAUNCHED = 8, 32, 128
"""Steps with guesses in a row, after which a plain one says what those cost now; more of them where
there is no doubt that guessing pays, still more where a launched one takes others before and after
it; guessed."""
_CATCH_UP = 512
"""Tokens, at most, of the sequences that a first trial asks for, if they are several: a drafter may
have to compute all of them; guessed."""
_ROWS_SHARE = 0.1
"""What a row costs is not known before the first guesses: it is taken for so much of what a token
costs that the step gives without them. So guesses that are that unlikely are left out; guessed."""
_AWAKE_STEPS = 24
"""Before somebody can be asked: three times what the pace of steps is a median of (pace.py). Each
costs the bookkeeping, which the trial pays: on a CPU, bundled pair, 0.1 ms of a step of 5."""


class Exploration:
    """What the drafters of one engine are asked for, and what of it is learnt.

    Args:
        always: they are asked for everybody, whatever it costs: it is not measured.
        measures_again: what a launched step lasts is measured among guesses, too. False where
            drafters must see every step, which launched ones do not let them: it is measured
            before the first guesses, and whenever they do not pay.
    """

    def __init__(
        self, num_drafters: int, *, always: bool = False, measures_again: bool = True
    ) -> None:
        self._always = always
        self._worths = [Worth(SHARE / num_drafters) for _ in range(num_drafters)]
        self._pace = Pace(measures_again=measures_again)
        self._cost = StepCost()
        self.load = Load(1, 1, 1.0, 0.0)
        """Of the step that is being computed."""
        self._num_sequences = self._num_rows = 0
        self._seen: set[int] = set()
        """About so many rows a step with guesses had."""
        self._widths: dict[int, int] = {}
        self._num_tasks: dict[int, int] = {}
        self._is_pausing = False
        """The step that is being computed is a plain one, not launched to see what that costs."""
        self._has_paused = False
        """The newest step was not launched, because of guesses."""
        self._saved_s = 0.0
        """By the newest launched step that was the last."""
        self._sleeps: dict[int, _Sleep] = {}
        """By class of sizes."""

    def sleeps(self, num_sequences: int) -> bool:
        """Nobody can be asked in a step of so many sequences that draw, nor in the next ones.
        Instead of `begin` and `learn`, `sleep` is told how long it lasted."""
        one = self._sleeps.get(size_class(num_sequences)) if num_sequences else None
        return one is not None and one.served_s < one.end_s

    def sleep(self, num_sequences: int, seconds: float) -> None:
        """A step is over that `sleeps` was said of."""
        self._sleeps[size_class(num_sequences)].served_s += seconds

    def _wake(self, num_sequences: int) -> None:
        one = self._sleeps.pop(size_class(num_sequences), None) if num_sequences else None
        if one is not None:
            for worth in self._worths:
                worth.serve(num_sequences, one.served_s)

    def _fall_asleep(self, step_s: float) -> None:
        """If it is long enough until somebody can be asked, by what a step lasts."""
        num_sequences = self._num_sequences
        end_s = min(worth.barred_s(num_sequences) for worth in self._worths)
        end_s -= _AWAKE_STEPS * step_s
        if end_s > 0.0:
            self._sleeps[size_class(num_sequences)] = _Sleep(end_s)

    def rests(self, num_sequences: int) -> bool:
        """Nobody would be asked in a step of so many sequences that draw, nor anything else be
        found out that a launched one does not tell. Changes nothing."""
        if self._always:
            return False
        able = self._able(num_sequences)
        most = self._most(able, num_sequences)
        is_known = self._pace.is_known(num_sequences, most)
        return num_sequences == 0 or not able or not is_known

    def pass_by(self, num_sequences: int, seconds: float, *, is_first: bool, is_last: bool) -> None:
        """A launched step is over.

        Args:
            is_first: no other one was under way when it was launched: it lasted longer.
            is_last: none was launched after it. Where a launch does not return before it is
                computed, it lasted no time, and the first one twice as long.
        """
        if self._always:
            return
        self._wake(num_sequences)
        has_paused, self._has_paused = self._has_paused, False
        for worth in self._worths:
            worth.serve(num_sequences, seconds)
        if is_last:
            self._saved_s = self._pace.shorter_s(num_sequences, seconds)
        elif not is_first:
            self._pace.observe(num_sequences, seconds, is_launched=True)
            self._open(num_sequences)
            pause_s = self._pace.pause_s(num_sequences)
            if pause_s is not None:
                self._cost.observe(num_sequences, seconds + pause_s)
        if is_first and has_paused:
            longer_s = max(self._pace.longer_s(num_sequences, seconds) - self._saved_s, 0.0)
            self._saved_s = 0.0
            for worth in self._worths:
                worth.charge(num_sequences, longer_s / len(self._worths))

    def _open(self, num_sequences: int) -> None:
        """Accounts that begin in debt, as soon as it is known what a launched step lasts: else some
        steps would not be launched, to find out what that costs, long before anybody is asked."""
        if num_sequences > FEW and self._able(num_sequences):
            pace_s = self._pace.seconds(num_sequences, 0.0, 1)
            if pace_s is not None:
                for worth in self._worths:
                    worth.open(Load(num_sequences, num_sequences, pace_s, 0.0))

    def _able(self, num_sequences: int) -> list[Worth]:
        return [worth for worth in self._worths if worth.is_able(num_sequences)]

    def _most(self, able: Sequence[Worth], num_sequences: int) -> int:
        if not all(one.is_clear(num_sequences) for one in able):
            return _MOST
        return _MOST_CLEAR_LAUNCHED if self._pace.is_launched(num_sequences) else _MOST_CLEAR

    def begin(
        self, num_sequences: int, num_rows: int, num_tokens: int = 0, *, can_ask: bool = True
    ) -> bool:
        """A step is planned. Returns: somebody is to be asked.

        Args:
            num_sequences: that draw a token in it.
            num_rows: without guesses.
            num_tokens: that its sequences have, together.
            can_ask: False: none of them takes guesses. No trial's call is spent on such a step.
        """
        if self._always:
            return num_sequences > 0
        self._wake(num_sequences)
        self._widths.clear()
        self._num_tasks.clear()
        self._num_sequences, self._num_rows = num_sequences, num_rows
        self._is_pausing = False
        if num_sequences == 0:
            return False
        able = self._able(num_sequences)
        if not able:
            return False
        base_s, row_s = self._cost.line(num_sequences)
        pace_s = self._pace.seconds(num_sequences, row_s, self._most(able, num_sequences))
        if pace_s is not None and num_rows == num_sequences:
            if not self._cost.knows_rows(num_sequences):
                row_s = max(row_s, _ROWS_SHARE * pace_s / num_sequences)
            base_s = max(pace_s - row_s * num_rows, 0.0)
        self.load = Load(num_sequences, num_rows, base_s, row_s)
        # What rows cost is learnt without prompts, and what it costs beside them is not measured.
        may_ask = num_rows == num_sequences or self._cost.knows_rows(num_sequences)
        if pace_s is not None and may_ask and can_ask:
            if self._pace.wants_pause(num_sequences):
                self._is_pausing = num_rows == num_sequences
                return False
            first = max(1, _CATCH_UP * num_sequences // max(num_tokens, 1))
            for drafter, worth in enumerate(self._worths):
                width = worth.num_asked(self.load, first)
                if width > 0:
                    self._widths[drafter] = width
        return bool(self._widths)

    def take_back(self) -> None:
        """The step that was planned last came to nothing."""
        for drafter in self._widths:
            self._worths[drafter].take_back(self.load)
        self._widths.clear()

    def among(self, samples: Sequence[_Task]) -> Sequence[_Task]:
        """Those that somebody is asked for: other ones with each trial."""
        if self._always:
            return samples
        width = max(self._widths.values(), default=0)
        if width >= len(samples):
            return samples
        drafter = max(self._widths, key=self._widths.__getitem__)
        first = self._worths[drafter].num_trials(self._num_sequences) % len(samples)
        return [samples[(first + place) % len(samples)] for place in range(width)]

    def choose(self, drafter: int, tasks: Sequence[_Task]) -> Sequence[_Task]:
        """The first of `among`, for which this drafter is asked; maybe none."""
        if self._always:
            return tasks
        width = min(self._widths.get(drafter, 0), len(tasks))
        self._num_tasks[drafter] = width
        return tasks[:width]

    def learn(
        self,
        num_rows: int,
        seconds: float,
        own_s: Mapping[int, float],
        num_right: Mapping[int, int],
        *,
        beside_s: float = 0.0,
    ) -> None:
        """The step is over.

        Args:
            num_rows: with guesses.
            seconds: of all of it.
            own_s: what each drafter that was asked took, and what was done with its guesses.
            num_right: kept tokens that it had guessed.
            beside_s: what else of the step would not have been done in one that is slept through.
        """
        num_sequences = self._num_sequences
        if num_sequences == 0 or self._always:
            return
        for worth in self._worths:
            worth.serve(num_sequences, seconds)
        is_whole = self._num_rows == num_sequences  # nothing but decodes
        seconds -= beside_s
        if not own_s:
            for worth in self._worths:
                worth.owe(num_sequences, beside_s / len(self._worths))
            if is_whole:
                self._cost.observe(num_rows, seconds)
                if self._is_pausing:
                    self._pace.on_pause(num_sequences, seconds)
                else:
                    self._pace.observe(num_sequences, seconds)
            self._has_paused = self._is_pausing
            if is_whole:
                self._fall_asleep(seconds)
            return
        load = self.load
        step_s = seconds - sum(own_s.values())
        longer_s, pause_s = load.row_s * (num_rows - load.num_rows), 0.0
        is_example = not is_whole or self._is_example(num_rows)
        if is_whole:
            if is_example:
                self._cost.observe(num_rows, step_s)
            self._pace.on_guessed(num_sequences)
            known_s = self._pace.pause_s(num_sequences)
            self._has_paused = known_s is not None
            if num_rows > load.num_rows or known_s is not None:
                usual_s = load.seconds + longer_s + (known_s or 0.0)
                # Rows make no step shorter: one that seems so says that plain ones were measured
                # in a bad moment (an engine's first), and would be taken for gain.
                longer_s = max(min(step_s, ACCIDENT * usual_s) - load.seconds, 0.0)
                pause_s = min(known_s or 0.0, longer_s)
        share = 1.0 / len(own_s)
        for drafter, one_s in own_s.items():
            num_tasks, num_kept = self._num_tasks[drafter], num_right[drafter]
            rows_s = (longer_s - pause_s) * share
            num_nodes = num_rows - load.num_rows
            call = Call(
                num_tasks,
                num_kept,
                num_nodes,
                own_s=one_s + beside_s * share,
                rows_s=rows_s,
                pause_s=pause_s * share,
                is_example=is_example,
            )
            self._worths[drafter].observe(load, call)

    def _is_example(self, num_rows: int) -> bool:
        """Not the first step of about so many rows, which may have compiled what the later ones
        find."""
        if num_rows == self._num_rows:
            return True
        place = size_place(num_rows)
        is_first = place not in self._seen
        self._seen.add(place)
        return not is_first


@dataclass(slots=True)
class _Sleep:
    """Through steps of one class of batch sizes."""

    end_s: float
    """To be served until it is over."""
    served_s: float = 0.0
    """So far, and in no account yet."""
