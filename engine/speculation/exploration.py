"""Whether a drafter is asked, and for how many sequences: as long as it costs no time, and a share
of the time served for finding out whether it does.

What a call costs and brings depends on the batch: each class of batch sizes has an account of its
own. A call costs the drafter's seconds and what its nodes made the step longer; it brings the time
that its kept tokens would have taken in plain steps, or a part of it (`VALUE`). The account gets
what calls bring and a share of each step's seconds, and pays what calls cost. Nobody is asked while
it is in debt. Hence the law (test_exploration.py): **time lost <= share * time served + a few
steps' seconds, once + the loss of one trial**, in each class, whatever the costs are.

A trial is a few calls in a row: after a pause the first one has to catch up. It begins with one
sequence. Where one sequence's tokens would pay, were there as many for each of the batch and the
drafter's call no dearer, the next trial asks for more of them: on a device a call for all costs
little more than for one, and only all together pay it.

Policy: pure; running averages that nobody else writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.speculation.expansion import Load, StepCost

_Task = TypeVar("_Task")

SHARE = 0.005
"""Of the time served: what finding out may cost, all drafters together."""
TRIAL = 3
"""Calls in a row; guessed."""
VALUE = 0.75
"""What a kept token is worth of its share of a plain step, where that step is several sequences':
who is ahead of the others waits for a batch that is as long as its slowest. Guessed."""
_GROWTH = 4
"""How many times more sequences are asked for where few promised gain; guessed."""
_MEMORY = 16
"""Calls that an average is about; guessed."""
GRANT_STEPS = 2.0
"""So many steps' seconds each account begins with: chance may have it that the first calls bring
nothing where the next ones would; guessed."""
_BANK_STEPS = 16.0
"""Gain is kept for bad times up to so many steps' seconds; guessed."""
_MOST, _MOST_CLEAR = 8, 64
"""Steps with guesses in a row, after which a plain one says what those cost now; more of them where
there is no doubt that guessing pays; guessed."""
_CLEAR = 0.2
"""There is none where a call gains this share of a step; guessed."""
_MEMORY_STEPS = 16
_FIRST = 8
"""Steps of a size before anybody is asked; the shortest of them is what one lasts."""
_ACCIDENT = 4.0
"""Times the usual seconds: a step that lasts longer was held up by something else, and is taken for
one of just so many; guessed. The same for steps with guesses and without, or one of them would
seem dearer than it is on a machine that does other work, too."""


class Exploration:
    """What the drafters of one engine are asked for, and what of it is learnt.

    Args:
        always: they are asked for everybody, whatever it costs.
    """

    def __init__(self, num_drafters: int, *, always: bool = False) -> None:
        self._always = always
        self._worths = [Worth(SHARE / num_drafters) for _ in range(num_drafters)]
        self._pace = Pace()
        self._cost = StepCost()
        self.load = Load(1, 1, 1.0, 0.0)
        """Of the step that is being computed."""
        self._num_sequences = self._num_rows = 0
        self._widths: dict[int, int] = {}
        self._num_tasks: dict[int, int] = {}

    def begin(self, num_sequences: int, num_rows: int) -> bool:
        """A step is planned. Returns: somebody is to be asked.

        Args:
            num_sequences: that draw a token in it.
            num_rows: without guesses.
        """
        self._widths.clear()
        self._num_tasks.clear()
        self._num_sequences, self._num_rows = num_sequences, num_rows
        if num_sequences == 0:
            return False
        able = [worth for worth in self._worths if worth.is_able(num_sequences)]
        if not (able or self._always):
            return False
        base_s, row_s = self._cost.line(num_sequences)
        most = _MOST_CLEAR if all(one.is_clear(num_sequences) for one in able) else _MOST
        pace_s = self._pace.seconds(num_sequences, row_s, most)
        if pace_s is not None and num_rows == num_sequences:
            base_s = max(pace_s - row_s * num_rows, 0.0)
        self.load = Load(num_sequences, num_rows, base_s, row_s)
        if self._always:
            return True
        if pace_s is not None:
            for drafter, worth in enumerate(self._worths):
                width = worth.num_asked(self.load)
                if width > 0:
                    self._widths[drafter] = width
        return bool(self._widths)

    def among(self, samples: Sequence[_Task]) -> Sequence[_Task]:
        """Those that somebody is asked for: other ones with each trial."""
        width = max(self._widths.values(), default=0)
        if self._always or width >= len(samples):
            return samples
        drafter = max(self._widths, key=self._widths.__getitem__)
        first = self._worths[drafter].num_trials(self._num_sequences) % len(samples)
        return [samples[(first + place) % len(samples)] for place in range(width)]

    def choose(self, drafter: int, tasks: Sequence[_Task]) -> Sequence[_Task]:
        """Those of `among` that this drafter is asked for; maybe none."""
        width = len(tasks) if self._always else min(self._widths.get(drafter, 0), len(tasks))
        self._num_tasks[drafter] = width
        return tasks[:width]

    def learn(
        self,
        num_rows: int,
        seconds: float,
        own_s: Mapping[int, float],
        num_right: Mapping[int, int],
    ) -> None:
        """The step is over.

        Args:
            num_rows: with guesses.
            seconds: of all of it.
            own_s: what each drafter that was asked took.
            num_right: kept tokens that it had guessed.
        """
        num_sequences = self._num_sequences
        if num_sequences == 0:
            return
        for worth in self._worths:
            worth.serve(num_sequences, seconds)
        is_whole = self._num_rows == num_sequences  # nothing but decodes
        if not own_s:
            if is_whole:
                self._cost.observe(num_rows, seconds)
                self._pace.observe(num_sequences, seconds)
            return
        load = self.load
        step_s = seconds - sum(own_s.values())
        longer_s = load.row_s * (num_rows - load.num_rows)
        if is_whole:
            self._cost.observe(num_rows, step_s)
            self._pace.on_guessed(num_sequences)
            if num_rows > load.num_rows:
                usual_s = load.seconds + longer_s
                # Rows make no step shorter: one that seems so says that plain ones were measured
                # in a bad moment (an engine's first), and would be taken for gain.
                longer_s = max(min(step_s, _ACCIDENT * usual_s) - load.seconds, 0.0)
        for drafter, one_s in own_s.items():
            call = Call(self._num_tasks[drafter], num_right[drafter], one_s, longer_s / len(own_s))
            self._worths[drafter].observe(load, call)


class Pace:
    """Seconds of steps without guesses and prompts, by the number of sequences."""

    def __init__(self) -> None:
        self._by_size: dict[int, _Pace] = {}

    def observe(self, num_sequences: int, seconds: float) -> None:
        """A plain step has lasted so long."""
        one = self._by_size.setdefault(_place(num_sequences), _Pace())
        one.num_seen += 1
        one.num_guessed = 0
        share = max(1.0 / one.num_seen, 1.0 / _MEMORY_STEPS)
        if 1 < one.num_seen <= _FIRST:  # the very first ones are no example
            one.seconds = seconds = min(one.seconds, seconds)
        seconds = min(seconds, _ACCIDENT * one.seconds) if one.num_seen > 1 else seconds
        one.seconds += (seconds - one.seconds) * share
        one.num_sequences += (num_sequences - one.num_sequences) * share

    def seconds(self, num_sequences: int, row_s: float, most: int) -> float | None:
        """Of a step; None: too few were seen of about this size, or `most` with guesses since the
        last one, and this one should be plain."""
        one = self._by_size.get(_place(num_sequences))
        if one is None or one.num_seen < _FIRST or one.num_guessed >= most:
            return None
        return max(one.seconds + row_s * (num_sequences - one.num_sequences), 0.0)

    def on_guessed(self, num_sequences: int) -> None:
        """A step of so many sequences had guesses."""
        one = self._by_size.get(_place(num_sequences))
        if one is not None:
            one.num_guessed += 1


@dataclass(slots=True)
class _Pace:
    seconds: float = 0.0
    num_sequences: float = 0.0
    num_seen: int = 0
    num_guessed: int = 0
    """Steps with guesses since the last one without."""


def _place(num_sequences: int) -> int:
    """Sizes of one place differ by an eighth at most."""
    shift = max(0, num_sequences.bit_length() - 4)
    return num_sequences >> shift << shift


@dataclass(frozen=True)
class Call:
    """What became of one call of a drafter."""

    num_tasks: int
    """Sequences that it was asked for; at least 1."""
    num_kept: int
    """Tokens that it was right in, and that the step computed."""
    own_s: float
    """Of the drafter."""
    rows_s: float
    """What its nodes made the step longer."""


class Worth:
    """Whom to ask one drafter for. See the module.

    Args:
        share: of the time served that finding out may cost.
    """

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self._accounts: dict[int, _Account] = {}

    def is_able(self, num_sequences: int) -> bool:
        """It may be asked in a step of so many sequences."""
        one = self._accounts.get(_class(num_sequences))
        return one is None or one.num_left > 0 or one.credit_s >= 0.0

    def is_clear(self, num_sequences: int) -> bool:
        """There is no doubt that it pays."""
        one = self._accounts.get(_class(num_sequences))
        return one is not None and one.is_clear

    def num_asked(self, load: Load) -> int:
        """Sequences that it is asked for in this step; 0: not asked. Counts as asked."""
        one = self._account(load)
        if one.num_left == 0:
            if one.credit_s < 0.0:
                return 0
            one.num_left = TRIAL
            one.num_trials += 1
            one.own_s = float("inf")
        one.num_left -= 1
        return min(one.width, load.num_sequences)

    def num_trials(self, num_sequences: int) -> int:
        """So far, with about so many sequences."""
        one = self._accounts.get(_class(num_sequences))
        return 0 if one is None else one.num_trials

    def serve(self, num_sequences: int, seconds: float) -> None:
        """A step has lasted so long, guesses included."""
        one = self._accounts.get(_class(num_sequences))
        if one is not None:
            one.credit_s = min(one.credit_s + self._share * seconds, one.most_s)

    def observe(self, load: Load, call: Call) -> None:
        """A call of this step has had its outcome."""
        one = self._account(load)
        token_s = value_s(load)
        gain_s = call.num_kept * token_s - call.own_s - call.rows_s
        one.most_s = _BANK_STEPS * load.seconds
        one.credit_s = min(one.credit_s + gain_s, one.most_s)
        one.num_calls += 1
        share = max(1.0 / one.num_calls, 1.0 / _MEMORY)
        one.kept += (call.num_kept / call.num_tasks - one.kept) * share
        one.rows_s += (call.rows_s / call.num_tasks - one.rows_s) * share
        one.gain_s += (gain_s - one.gain_s) * share
        one.is_clear = one.gain_s > _CLEAR * load.seconds
        one.own_s = min(one.own_s, call.own_s)
        if one.num_left == 0:
            # Each of the batch as those that were asked for; a call for more at no more.
            promised_s = (one.kept * token_s - one.rows_s) * load.num_sequences - one.own_s
            if promised_s > 0.0:
                one.width = min(one.width * _GROWTH, 1 << _class(load.num_sequences))
            else:
                one.width = max(one.width // _GROWTH, 1)

    def _account(self, load: Load) -> _Account:
        place = _class(load.num_sequences)
        if place not in self._accounts:
            granted_s = GRANT_STEPS * load.seconds
            self._accounts[place] = _Account(granted_s, granted_s)
        return self._accounts[place]


@dataclass(slots=True)
class _Account:
    """Of one class of batch sizes."""

    credit_s: float
    most_s: float
    """Of it."""
    width: int = 1
    """Sequences to ask for."""
    num_left: int = 0
    """Calls of this trial that are still to come."""
    num_trials: int = 0
    num_calls: int = 0
    own_s: float = 0.0
    """The least that a call of this trial cost."""
    kept: float = 0.0
    """Per sequence asked for."""
    rows_s: float = 0.0
    """Per sequence asked for."""
    gain_s: float = 0.0
    """Of a call."""
    is_clear: bool = False


def value_s(load: Load) -> float:
    """Seconds that a kept token is worth."""
    if load.num_sequences == 1:
        return load.seconds
    return VALUE * load.seconds / load.num_sequences


def _class(num_sequences: int) -> int:
    """1, 2, 3-4, 5-8, ...: its greatest size is 2 to this power."""
    return (num_sequences - 1).bit_length()
