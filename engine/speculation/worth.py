"""Worth: whether one drafter is asked, and for how many sequences: an account for each class of
batch sizes. The law, and what a trial is: exploration.py.

Policy: pure; running averages that nobody else writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.speculation.expansion import Load

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
GRANT_STEPS = 1.0
"""So many steps' seconds each account begins with: chance may have it that the first calls bring
nothing where the next ones would; guessed."""
_BANK_STEPS = 16.0
"""Gain is kept for bad times up to so many steps' seconds; guessed."""
_CLEAR = 0.2
"""There is none where a call gains this share of a step; guessed."""


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
    pause_s: float = 0.0
    """What the step lasted longer because it was not launched ahead."""


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
        return one is None or one.num_left > 0 or one.credit_s >= 0.0

    def barred_s(self, num_sequences: int) -> float:
        """Seconds to be served before it may be asked; 0.0: it may be."""
        one = self._accounts.get(size_class(num_sequences))
        if one is None or one.num_left > 0 or one.credit_s >= 0.0:
            return 0.0
        return -one.credit_s / self._share if self._share > 0.0 else float("inf")

    def is_clear(self, num_sequences: int) -> bool:
        """There is no doubt that it pays."""
        one = self._accounts.get(size_class(num_sequences))
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

    def observe(self, load: Load, call: Call) -> None:
        """A call of this step has had its outcome."""
        one = self._account(load)
        token_s = value_s(load)
        gain_s = call.num_kept * token_s - call.own_s - call.rows_s - call.pause_s
        one.most_s = _BANK_STEPS * load.plain_s
        one.credit_s = min(one.credit_s + gain_s, one.most_s)
        one.num_calls += 1
        share = max(1.0 / one.num_calls, 1.0 / _MEMORY)
        one.kept += (call.num_kept / call.num_tasks - one.kept) * share
        one.rows_s += (call.rows_s / call.num_tasks - one.rows_s) * share
        one.gain_s += (gain_s - one.gain_s) * share
        one.is_clear = one.gain_s > _CLEAR * load.plain_s
        one.own_s = min(one.own_s, call.own_s)
        if one.num_left == 0:
            # Each of the batch as those that were asked for; a call for more at no more.
            each_s = one.kept * token_s - one.rows_s
            promised_s = each_s * load.num_sequences - one.own_s - call.pause_s
            if promised_s > 0.0:
                one.width = min(one.width * _GROWTH, 1 << size_class(load.num_sequences))
            else:
                one.width = max(one.width // _GROWTH, 1)

    def _account(self, load: Load) -> _Account:
        place = size_class(load.num_sequences)
        if place not in self._accounts:
            granted_s = GRANT_STEPS * load.plain_s
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
    """Seconds that a kept token is worth. Prompts in the step have no part in it: they are computed
    in any case."""
    if load.num_sequences == 1:
        return load.plain_s
    return VALUE * load.plain_s / load.num_sequences


def size_class(num_sequences: int) -> int:
    """1, 2, 3-4, 5-8, ...: its greatest size is 2 to this power."""
    return (num_sequences - 1).bit_length()
