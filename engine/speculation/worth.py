"""Worth: whether one drafter is asked, and for how many sequences: an account for each class of
batch sizes. The law, and what a trial is: exploration.py.

Policy: pure; running averages that nobody else writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.speculation.expansion import Load

SHARE = 0.005
"""Of the time served: what finding out may cost, all drafters together."""
TRIAL = 3
"""Calls in a row; guessed."""
_LEAST_TRIAL = 2
"""Of them where even the best outcome would not pay: the first one may have to catch up."""
_NOISE = 0.1
"""Of a step: by so much may two of the same rows differ, and what rows cost is one's difference to
others. It is shared by the sequences that were asked for, and reckoned for all of the batch: where
one of 32 is asked, a tenth of a step is taken for three steps. The best outcome leaves it out."""
FEW = 4
"""A batch of so many is small: the first trial asks for all of it, as a call for a few costs little
more than one for a single sequence (on a CPU, bundled pair: 9 ms for 1, 13 for 2, 14 for 4), and
begins at once. Of larger ones it asks for one sequence: each of them pays less of the call, and
their rows cost as much as their tokens bring where a row has its price (on a CPU from 8 on)."""
VALUE = 0.9
"""What a kept token is worth of its share of a plain step, where that step is several sequences':
who is ahead of the others waits for a batch that is as long as its slowest. Measured as steps that
a batch needed, against those that its average sequence needed: 1.0 with 2 to 8, 0.92 with 16 and
32, of 96 tokens each."""
_GROWTH = 4
"""How many times more sequences are asked for where few promised gain; guessed."""
_MEMORY = 16
"""Calls that an average is about; guessed."""
GRANT_STEPS = 1.0
"""So many steps' seconds the account of a small batch begins with: chance may have it that the
first calls bring nothing where the next ones would; guessed."""
_DEBT_STEPS = 1.0
"""And that of a larger one in debt: it is served 1 / share as much before the first trial. Who has
few steps to serve is not delayed by it, and who has many soon has done them; guessed."""
_AGAIN_STEPS = 0.5
"""Who is in debt is asked again when so many steps' seconds are there: a hundred steps later or
more, and then a few calls, if they are cheap, instead of one every now and then. Between them
nothing needs to be measured, which has its price, too (exploration.py:sleeps); guessed."""
_OWED_STEPS = 32
"""Of so many steps at most a trial pays the bookkeeping: those that come before it where the others
are slept through. More were not for its sake, and who owes for all would never be asked again."""
_BANK_STEPS = 16.0
"""Gain is kept for bad times up to so many steps' seconds; guessed."""
_CLEAR = 0.2
"""There is none where a call gains this share of a step; guessed."""


class Call(NamedTuple):
    """What became of one call of a drafter."""

    num_tasks: int
    """Sequences that it was asked for; at least 1."""
    num_kept: int
    """Tokens that it was right in, and that the step computed."""
    num_nodes: int
    """That the step computed, of whomever; at least `num_kept`."""
    own_s: float
    """Of the drafter, and of all that is done with what it guessed but computing it."""
    rows_s: float
    """What its nodes made the step longer."""
    pause_s: float = 0.0
    """What the step lasted longer because it was not launched ahead."""
    is_example: bool = True
    """Later ones may take as long: False where a step was the first of its kind."""


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
        one = self._accounts.get(size_class(num_sequences))
        return one is None or one.num_left > 0 or one.credit_s >= one.least_s

    def barred_s(self, num_sequences: int) -> float:
        """Seconds to be served before it may be asked; 0.0: it may be."""
        one = self._accounts.get(size_class(num_sequences))
        if one is None or one.num_left > 0 or one.credit_s >= one.least_s:
            return 0.0
        missing_s = one.least_s - one.credit_s
        return missing_s / self._share if self._share > 0.0 else float("inf")

    def is_clear(self, num_sequences: int) -> bool:
        """There is no doubt that it pays."""
        one = self._accounts.get(size_class(num_sequences))
        return one is not None and one.is_clear

    def open(self, load: Load) -> None:
        """An account for a batch of that size, if it has none and is no small one, whose first
        trial begins at once. Nobody is able there before it has served."""
        if load.num_sequences > FEW:
            self._account(load)

    def num_asked(self, load: Load, first: int = FEW) -> int:
        """Sequences that it is asked for in this step; 0: not asked. Counts as asked.

        Args:
            first: most of them in the first trial.
        """
        one = self._account(load, first)
        if one.num_left == 0:
            if one.credit_s < one.least_s:
                return 0
            one.least_s = 0.0
            one.credit_s -= one.owed_s
            one.owed_s = 0.0
            one.num_owed = 0
            one.num_left = TRIAL
            one.num_trials += 1
            one.most_nodes = 0
            one.own_s = float("inf")
            one.later_s = 0.0
            one.floor_s = None
        one.num_left -= 1
        return min(one.width, load.num_sequences)

    def take_back(self, load: Load) -> None:
        """The step for which it was asked last is computed again, or never was: nothing will be
        observed of it."""
        self._account(load).num_left += 1

    def num_trials(self, num_sequences: int) -> int:
        """So far, with about so many sequences."""
        one = self._accounts.get(size_class(num_sequences))
        return 0 if one is None else one.num_trials

    def serve(self, num_sequences: int, seconds: float) -> None:
        """A step has lasted so long, guesses included."""
        one = self._accounts.get(size_class(num_sequences))
        if one is not None:
            one.credit_s = min(one.credit_s + self._share * seconds, one.most_s)

    def charge(self, num_sequences: int, seconds: float) -> None:
        """So much was lost that no call tells."""
        one = self._accounts.get(size_class(num_sequences))
        if one is not None:
            one.credit_s -= seconds
            one.later_s -= seconds

    def owe(self, num_sequences: int, seconds: float) -> None:
        """So much was spent on finding out whether to ask. The next trial pays for it: were it paid
        at once, who is to be asked soon would be as far from it with each step."""
        one = self._accounts.get(size_class(num_sequences))
        if one is not None and one.num_owed < _OWED_STEPS:
            one.num_owed += 1
            one.owed_s += seconds

    def observe(self, load: Load, call: Call) -> None:
        """A call of this step has had its outcome."""
        one = self._account(load)
        token_s = value_s(load)
        gain_s = call.num_kept * token_s - call.own_s - call.rows_s - call.pause_s
        if one.num_left < TRIAL - 1:
            one.later_s += gain_s
        one.most_s = _BANK_STEPS * load.plain_s
        one.credit_s = min(one.credit_s + gain_s, one.most_s)
        one.num_calls += 1
        share = max(1.0 / one.num_calls, 1.0 / _MEMORY)
        one.kept += (call.num_kept / call.num_tasks - one.kept) * share
        one.gain_s += (gain_s - one.gain_s) * share
        one.is_clear = one.gain_s > _CLEAR * load.plain_s
        if call.is_example or one.num_examples == 0:
            one.num_examples += call.is_example
            rows_share = max(1.0 / max(one.num_examples, 1), 1.0 / _MEMORY)
            one.rows_s += (call.rows_s / call.num_tasks - one.rows_s) * rows_share
        one.own_s = min(one.own_s, call.own_s)
        one.most_nodes = max(one.most_nodes, -(-call.num_nodes // call.num_tasks))
        if call.is_example and 0 < one.num_left <= TRIAL - _LEAST_TRIAL and one.most_nodes > 0:
            noise_s = _NOISE * load.plain_s / call.num_tasks * load.num_sequences
            noise_s = min(noise_s, one.rows_s * load.num_sequences)
            best_s = one.promised_s(load, one.most_nodes) - call.pause_s
            if best_s + noise_s <= 0.0:
                one.num_left = 0
        if one.num_left == 0:
            self._end(one, load, call, gain_s)

    def _end(self, one: _Account, load: Load, call: Call, gain_s: float) -> None:
        """Of a trial: how many to ask for from now on; or it goes on."""
        if one.promised_s(load, one.kept) > call.pause_s:
            one.width = min(one.width * _GROWTH, 1 << size_class(load.num_sequences))
        elif one.kept * value_s(load) <= one.rows_s:
            # The more are asked for, the more is lost.
            one.width = max(one.width // _GROWTH, 1)
        # What it lost once, as by catching up, is paid by those calls that gain; of several, since
        # by chance one of them brings nothing where calls pay. Not where the debt grows all the
        # same, by what no call tells.
        if one.floor_s is None:
            one.floor_s = min(one.credit_s, one.credit_s - one.later_s)
        pays = (gain_s > 0.0 or one.later_s > 0.0) and one.credit_s >= one.floor_s
        if one.credit_s < 0.0 and pays:
            one.num_left = 1
        elif one.credit_s < 0.0:
            one.least_s = _AGAIN_STEPS * load.plain_s

    def _account(self, load: Load, first: int = FEW) -> _Account:
        place = size_class(load.num_sequences)
        if place not in self._accounts:
            size, most_s = 1 << place, GRANT_STEPS * load.plain_s
            if size <= FEW:
                one = _Account(most_s, most_s, min(first, size))
            else:
                one = _Account(-_DEBT_STEPS * load.plain_s, most_s, 1)
            self._accounts[place] = one
        return self._accounts[place]


@dataclass(slots=True)
class _Account:
    """Of one class of batch sizes."""

    credit_s: float
    most_s: float
    """Of it."""
    width: int
    """Sequences to ask for."""
    least_s: float = 0.0
    """Credit of who may be asked."""
    owed_s: float = 0.0
    """That no trial has paid for yet."""
    num_owed: int = 0
    """Steps that it is of."""
    num_left: int = 0
    """Calls of this trial that are still to come."""
    num_trials: int = 0
    num_calls: int = 0
    num_examples: int = 0
    """Of them, of what rows cost."""
    own_s: float = 0.0
    """The least that a call of this trial cost."""
    later_s: float = 0.0
    """Gain of this trial's calls behind the first."""
    floor_s: float | None = None
    """Credit below which this trial does not go on: what there was behind its first call, or when
    it was to end if that is less. None: it was not to end yet."""
    most_nodes: int = 0
    """That a call of this trial had computed, per sequence."""
    kept: float = 0.0
    """Per sequence asked for."""
    rows_s: float = 0.0
    """Per sequence asked for."""
    gain_s: float = 0.0
    """Of a call."""
    is_clear: bool = False

    def promised_s(self, load: Load, num_kept: float) -> float:
        """Gain of a call, were it for each of the batch as for those that were asked, and so many
        kept of each; a call for more at no more."""
        each_s = num_kept * value_s(load) - self.rows_s
        return each_s * load.num_sequences - self.own_s


def value_s(load: Load) -> float:
    """Seconds that a kept token is worth. Prompts in the step have no part in it: they are computed
    in any case."""
    if load.num_sequences == 1:
        return load.plain_s
    return VALUE * load.plain_s / load.num_sequences


def size_class(num_sequences: int) -> int:
    """1, 2, 3-4, 5-8, ...: its greatest size is 2 to this power."""
    return (num_sequences - 1).bit_length()
