"""SpeculationController: chooses the number of sequences that each proposer is called for in a step
and the proposed nodes that are computed, and learns from the results. SpecInfer leaves this choice
open (section 3.1).

**Nodes.** A step of B sequences yields B tokens, and one more for each accepted node: on average
the sum of the nodes' chances. It lasts `base_s + row_s * rows` (StepCost). So nodes are taken from
the likeliest on while each raises tokens per second (`choose_nodes`). The proposer's own
probabilities are corrected by the acceptance of such nodes before (AcceptanceRates).

**Calls.** A proposer is called as long as its calls save more time than they cost, and otherwise
for a small share of the time served, to measure it. The cost and yield of a call depend on the
batch: each class of batch sizes has an account of its own (CallBudget). A call costs the proposer's
seconds, those of this bookkeeping, and those by which its nodes made the step longer; it yields the
time that its accepted tokens would have taken in plain steps, or a part of it (`TOKEN_VALUE`). The
account is credited with the yield of calls and a share of each step's duration, and debited with
the cost of calls; the next trial pays for bookkeeping of steps without a call. A proposer whose
account is in debt is not called. Hence the law (test_controller.py): **time lost <= share * time
served + a few steps' seconds, once + the loss of one trial**, in each class, whatever the costs
are.

A trial is a few calls in a row, as the first call after a pause has to catch up. The first trial of
a small batch begins at once and calls for all sequences, or for fewer if they are long, as there
would be much to catch up; that of a larger batch begins later and calls for one sequence. If a call
would pay with as many accepted tokens for every sequence of the batch, at the same cost of the
proposer, the next trial calls for more sequences. If each sequence's tokens are worth less than its
rows, the next one calls for fewer. A trial ends early if not even the best outcome would pay. It
continues in debt while calls gain (the last one, or all after the first together) and the credit is
not below that after its first call: a single loss, such as catching up, is paid by later gains.

**Launched steps.** Where steps are launched ahead (engine/runner.py), a step with drafts is not,
nor does it hide the next one's launch. That time (the overhead of launching) is charged to the
drafts: the duration of a step without drafts is that of a launched one, and the first launch after
drafts is charged the time by which it is longer. The overhead does not depend on the number of
sequences; it is measured by a few plain steps of each size class that are not launched ahead, and
does not count in the estimated cost of a call for more sequences.

**Sleep.** While all accounts are deep in debt, steps are slept through (`is_asleep`): only their
durations are recorded, so that the bookkeeping costs next to nothing. Sleep ends some steps before
a proposer can be called, and those steps are measured. Each size class sleeps by itself.

Results of a step are learnt while the device computes the next one (`update_rates`), so that the
device does not wait: a tree is calibrated by the results of all steps but the one right before it,
which depends on the order of steps alone, on no clock and no caller.

It decides by pure policy: no device, no RPC, no clock of its own. Engine thread only.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import NamedTuple, TypeVar

from engine.config import EngineConfig
from engine.outputs import RequestOutput
from engine.sequence import Key
from engine.speculation.token_tree import ROOT, TokenTree

_Task = TypeVar("_Task")

# ---- acceptance rates
_NUM_BINS = 16
_PRIOR = 8.0
"""Weight of the proposer's own probability, in observations; guessed."""
_RATE_MEMORY = 400.0
"""Number of observations of a bin after which older ones count for little; guessed."""

# ---- step costs
_SIZE_BITS = 4
"""Number of leading bits of a size that are distinguished: sizes averaged together differ by an
eighth at most."""
_COST_MEMORY = 32.0
"""Number of steps of a size that its average covers; guessed."""
_KNOWN_STEPS = 4.0
"""Number of steps of a size after which one of twice the usual seconds is an outlier; guessed."""
_REACH = 4
_REACH_ROWS = 16
"""Number of rows beyond a quarter to four times a step's rows within which other steps determine
the cost of a row; guessed."""

# ---- plain steps
_NUM_NEWEST = 8
"""Number of plain steps of a size that are measured before the first call of a proposer, and of
newest ones whose median is a step's duration. Few plain steps come between drafts, so that an
average of more would be out of date; the shortest one would make steps with drafts seem more
expensive than they are."""
_NUM_OVERHEAD_STEPS = 3
"""Number of plain steps of a size class that are not launched ahead, for comparison, before the
first call of a proposer; the shortest of them counts; guessed."""
OUTLIER = 4.0
"""Limit of a measured duration, as a multiple of the usual one: a step with drafts, or the first
launched one after it, that lasts longer was delayed by something else, and is counted with this
limit; guessed."""

# ---- budgets
PROBE_SHARE = 0.005
"""Share of the serving time that trial calls may cost, all proposers together."""
TRIAL = 3
"""Number of consecutive calls of a trial; guessed."""
_LEAST_TRIAL = 2
"""Number of calls of a trial in which even the best outcome would not pay: the first call may
include catching up."""
_NOISE = 0.1
"""Share of a step's duration that is taken as noise between two steps of the same rows. The noise
is shared by the sequences of a call and scaled to the whole batch: with a call for one of 32, a
tenth of a step counts as three steps. The best outcome is computed without it."""
FEW = 4
"""Largest size of a small batch, whose first trial begins at once and calls for all sequences: a
call for a few costs little more than one for a single sequence (on a CPU, bundled pair: 9 ms for
1, 13 for 2, 14 for 4). The first trial of a larger batch calls for one sequence."""
TOKEN_VALUE = 0.9
"""Value of an accepted token, as a part of its share of a plain step, in a batch of several
sequences: a sequence that is ahead waits for the slowest one. Measured as the ratio of the steps
that an average sequence needed to those of the batch: 1.0 with 2 to 8 sequences, 0.92 with 16
and 32, of 96 tokens each."""
_GROWTH = 4
"""Factor by which the number of sequences of a call grows when a trial with few of them promises
gain; guessed."""
_CALL_MEMORY = 16
"""Number of calls that an average covers; guessed."""
GRANT_STEPS = 1.0
"""Initial credit of a small batch's account, in durations of a step, since the first calls may
yield nothing by chance; guessed."""
_DEBT_STEPS = 1.0
"""Initial debt of a larger batch's account, in durations of a step: the time to serve before its
first trial is the debt divided by the account's share; guessed."""
_AGAIN_STEPS = 0.5
"""Credit, in durations of a step, at which a proposer that was in debt is called again: after a
long pause a few calls in a row are possible, and during the pause nothing is measured
(`is_asleep`); guessed."""
_OWED_STEPS = 32
"""Largest number of steps whose bookkeeping a trial pays for: those right before it, where the
others are slept through. An account that paid for more might never be called again."""
_BANK_STEPS = 16.0
"""Largest credit, in durations of a step: earlier gain pays for later losses; guessed."""
_CLEAR = 0.2
"""Share of a step's duration above which a call's gain is clear; guessed."""

# ---- the controller
_MOST, _MOST_CLEAR, _MOST_CLEAR_LAUNCHED = 8, 32, 128
"""Number of consecutive steps with drafts after which a plain one is measured: in general, where
drafts clearly pay, and where they clearly pay and plain steps are launched ahead, as one then
delays the steps around it; guessed."""
_CATCH_UP = 512
"""Largest number of tokens, together, of several sequences in a first trial: a proposer may have to
compute all of them; guessed."""
_ROWS_SHARE = 0.1
"""Cost of a row before the first drafts, as a share of a token's cost without drafts; draft tokens
less likely than that are left out; guessed."""
_AWAKE_STEPS = 24
"""Number of steps before the next possible call that are not slept through: three times
_NUM_NEWEST. The trial pays for their bookkeeping (on a CPU, bundled pair: 0.1 ms of a step of 5
ms)."""


def cost_clock(
    config: EngineConfig, device: str, clock: Callable[[], float]
) -> Callable[[], float]:
    """Return the clock that costs are measured with: the thread's CPU time where the model runs on
    the CPU and the thread waits for no other rank or worker, so that other load on the cores
    does not count; else the given clock.

    Args:
        device: the model's device.
        clock: the engine's clock; any but time.monotonic is returned as it is.
    """
    is_here = (
        device == "cpu"
        and config.tensor_parallel * config.pipeline_parallel == 1
        and not config.speculation.draft_workers
    )
    return time.thread_time if is_here and clock is time.monotonic else clock


class AcceptanceRates:
    """Acceptance rates of nodes whose parent was accepted, by the conditional probability that one
    proposer gave them."""

    def __init__(self) -> None:
        self._num_seen = [0.0] * _NUM_BINS
        self._num_accepted = [0.0] * _NUM_BINS

    def observe(self, belief: float, *, is_accepted: bool) -> None:
        """Record the result of verifying a node to which the proposer gave the probability
        `belief`, given that its parent was accepted."""
        place = min(int(belief * _NUM_BINS), _NUM_BINS - 1)
        fading = 1.0 - 1.0 / _RATE_MEMORY
        self._num_seen[place] = self._num_seen[place] * fading + 1.0
        self._num_accepted[place] = self._num_accepted[place] * fading + is_accepted

    def observe_tree(self, tree: TokenTree, token_ids: Iterable[int]) -> None:
        """Record the result of each node whose parent was accepted.

        Args: token_ids: the accepted tokens and the token sampled after them.
        """
        if not len(tree):
            return
        node, chance = ROOT, 1.0
        for token_id in token_ids:
            for proposed, child in tree.children.get(node, {}).items():
                belief = tree.chances[child] / chance if chance > 0.0 else 0.0
                self.observe(belief, is_accepted=proposed == token_id)
            next_node = tree.child(node, token_id)
            if next_node is None:
                break
            node, chance = next_node, tree.chances[next_node]

    def chance(self, belief: float) -> float:
        """Return the probability, 0 to 1, that a node of this `belief` is accepted if its parent
        is."""
        return self.chances((ROOT,), (belief,))[0]

    def chances(self, parents: Sequence[int], believed: Sequence[float]) -> tuple[float, ...]:
        """Return the probability of each node that it and all nodes above it are accepted.

        Args: parents: the parent of each node. believed: the proposer's probability of each path
            (TokenTree.chances).
        """
        num_seen, num_accepted, last = self._num_seen, self._num_accepted, _NUM_BINS - 1
        found: list[float] = []
        for parent, belief in zip(parents, believed, strict=True):
            # No calls: this runs for every node, while the device waits.
            if parent != ROOT:
                above = believed[parent]
                belief = belief / above if above > 0.0 else 0.0
            place = int(belief * _NUM_BINS)
            if place > last:
                place = last
            chance = (num_accepted[place] + _PRIOR * belief) / (num_seen[place] + _PRIOR)
            if chance > 1.0:
                chance = 1.0
            found.append(chance if parent == ROOT else chance * found[parent])
        return tuple(found)

    def calibrate(self, tree: TokenTree) -> TokenTree:
        """Return the tree with chances corrected by the recorded acceptance rates."""
        if not len(tree):
            return tree
        return tree.with_chances(self.chances(tree.parents, tree.chances))


class StepCost:
    """The duration of a step in seconds as `base_s + row_s * rows`: a line through measured steps
    of about the same size. A row costs nothing until steps of different sizes were measured.

    Averages are kept by size, so that rare sizes are not forgotten and steps of a thousand rows do
    not affect the cost of the ninth row.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _SizeAverage] = {}

    def observe(self, num_rows: int, seconds: float) -> None:
        """Record that a step of `num_rows` rows took `seconds`."""
        shift = max(0, num_rows.bit_length() - _SIZE_BITS)
        size = self._sizes.setdefault(num_rows >> shift << shift, _SizeAverage())
        if size.weight >= _KNOWN_STEPS:  # the machine did something else, too
            seconds = min(seconds, 2.0 * size.seconds)
        size.weight = min(size.weight + 1.0, _COST_MEMORY)
        size.num_rows += (num_rows - size.num_rows) / size.weight
        size.seconds += (seconds - size.seconds) / size.weight

    def knows_rows(self, num_rows: int) -> bool:
        """Whether more than one size was measured near `num_rows` rows."""
        return len({one.num_rows for one in self._near(num_rows)}) > 1

    def _near(self, num_rows: int) -> list[_SizeAverage]:
        least, most = num_rows / _REACH, num_rows * _REACH + _REACH_ROWS
        return [one for one in self._sizes.values() if least <= one.num_rows <= most]

    def line(self, num_rows: int) -> tuple[float, float]:
        """Return (base_s, row_s), neither negative, of steps near `num_rows` rows."""
        near = self._near(num_rows) or list(self._sizes.values())
        weight = sum(one.weight for one in near)
        if weight == 0.0:
            return 1.0, 0.0
        mean_rows = sum(one.weight * one.num_rows for one in near) / weight
        mean_s = sum(one.weight * one.seconds for one in near) / weight
        spread = product = 0.0
        for one in near:
            away = one.num_rows - mean_rows
            spread += one.weight * away * away
            product += one.weight * away * (one.seconds - mean_s)
        if spread <= 1e-9 * weight * mean_rows * mean_rows:
            return mean_s, 0.0
        row_s = min(max(product / spread, 0.0), mean_s / mean_rows)
        return mean_s - row_s * mean_rows, row_s


@dataclass(slots=True)
class _SizeAverage:
    """Averages of steps of about one size."""

    weight: float = 0.0
    num_rows: float = 0.0
    seconds: float = 0.0


class StepEstimate(NamedTuple):
    """The estimated cost of a step without drafts."""

    num_sequences: int
    """Number of sequences that sample a token in the step."""
    num_rows: int
    """Number of tokens of the step, those of prompts included; at least `num_sequences`."""
    base_s: float
    row_s: float

    @property
    def seconds(self) -> float:
        """The duration of the step in seconds."""
        return self.base_s + self.row_s * self.num_rows

    @property
    def plain_s(self) -> float:
        """The duration in seconds that the step would have without prompt tokens."""
        return self.base_s + self.row_s * self.num_sequences

    @property
    def token_s(self) -> float:
        """The value of an accepted token in seconds. Prompt tokens of the step do not count, since
        they are computed in any case."""
        if self.num_sequences == 1:
            return self.plain_s
        return TOKEN_VALUE * self.plain_s / self.num_sequences


def choose_nodes(
    trees: Sequence[TokenTree], load: StepEstimate, max_num_nodes: int
) -> list[TokenTree]:
    """Choose the nodes of each tree that raise the expected tokens per second. A node is chosen
    only with its parent.

    Args:
        trees: trees with calibrated chances.
        max_num_nodes: largest number of nodes of all trees together.
    Returns: as many trees, of which some may be empty.
    """
    if not any(map(len, trees)):
        return list(trees)  # most trees of a lookup are empty
    # Among equals, those of the first tree; TokenTree.best decides which of its own.
    nodes = sorted(
        chain.from_iterable(zip(tree.chances, repeat(-index)) for index, tree in enumerate(trees)),
        reverse=True,
    )
    num_tokens = float(load.num_sequences)
    seconds = load.plain_s  # prompts take theirs in any case
    row_s = load.row_s
    counts = [0] * len(trees)
    for chance, negative in nodes[: max(max_num_nodes, 0)]:
        # Worth it while what it adds per second is more than what the step has per second.
        if chance * seconds <= num_tokens * row_s:
            break
        num_tokens += chance
        seconds += row_s
        counts[-negative] += 1
    return [tree.best(count) for tree, count in zip(trees, counts, strict=True)]


class PlainStepTimes:
    """Durations in seconds of steps without drafts and prompts, launched ahead of time and not, by
    the number of sequences. The newest steps of about the same size predict the next one.

    Args: measures_again: whether launched steps are measured among drafts (SpeculationController).
    """

    def __init__(self, *, measures_again: bool = True) -> None:
        self._by_size: dict[tuple[int, bool], _StepTimes] = {}
        self._is_launched: dict[int, bool] = {}
        self._overheads: dict[int, _LaunchOverhead] = {}
        """The overhead of not launching a step ahead, by size class."""
        self._measures_again = measures_again

    def observe(self, num_sequences: int, seconds: float, *, is_launched: bool = False) -> None:
        """Record that a plain step took `seconds`."""
        place = size_place(num_sequences)
        self._is_launched[place] = is_launched
        one = self._by_size.setdefault((place, is_launched), _StepTimes())
        one.num_seen += 1
        one.num_drafted = 0
        one.newest_s.append(seconds)
        share = max(1.0 / one.num_seen, 1.0 / _NUM_NEWEST)
        one.num_sequences += (num_sequences - one.num_sequences) * share

    def is_known(self, num_sequences: int, most: int) -> bool:
        """Whether enough steps of about this size were measured, the newest at most `most` steps
        with drafts ago."""
        one = self._newest(num_sequences)
        if one is None or one.num_seen < _NUM_NEWEST:
            return False
        is_launched = self._is_launched[size_place(num_sequences)]
        return one.num_drafted < most or (is_launched and not self._measures_again)

    def seconds(self, num_sequences: int, row_s: float, most: int) -> float | None:
        """Return the duration of a plain step of this size; None if it is not known, so that this
        step should be plain."""
        one = self._newest(num_sequences)
        if one is None or not self.is_known(num_sequences, most):
            return None
        return max(one.seconds + row_s * (num_sequences - one.num_sequences), 0.0)

    def is_launched(self, num_sequences: int) -> bool:
        """Whether plain steps of about this size are launched ahead of time."""
        return self._is_launched.get(size_place(num_sequences), False)

    def on_drafted(self, num_sequences: int) -> None:
        """Count a step of this size with drafts."""
        one = self._newest(num_sequences)
        if one is not None:
            one.num_drafted += 1

    def wants_overhead(self, num_sequences: int) -> bool:
        """Whether steps of this size are launched ahead and too few that were not are measured to
        know the overhead."""
        is_launched = self.is_launched(num_sequences)
        return is_launched and self._overhead(num_sequences).num_seen < _NUM_OVERHEAD_STEPS

    def on_overhead(self, num_sequences: int, seconds: float) -> None:
        """Record the duration of a plain step that could have been launched ahead of time and was
        not."""
        one = self._overhead(num_sequences)
        one.num_seen += 1
        one.seconds = min(one.seconds, self.longer_s(num_sequences, seconds))

    def overhead_s(self, num_sequences: int) -> float | None:
        """Return the seconds by which a step that is not launched ahead of time is longer; None if
        such steps are never launched ahead, or if it is not known."""
        one = self._overhead(num_sequences)
        return one.seconds if self.is_launched(num_sequences) and one.num_seen else None

    def _overhead(self, num_sequences: int) -> _LaunchOverhead:
        return self._overheads.setdefault(num_sequences.bit_length(), _LaunchOverhead())

    def longer_s(self, num_sequences: int, seconds: float) -> float:
        """Return the seconds by which a launched step was longer than others of its size; 0.0 if
        none is known."""
        one = self._by_size.get((size_place(num_sequences), True))
        if one is None:
            return 0.0
        return max(min(seconds, OUTLIER * one.seconds) - one.seconds, 0.0)

    def shorter_s(self, num_sequences: int, seconds: float) -> float:
        """Return the seconds by which a launched step was shorter than others of its size."""
        one = self._by_size.get((size_place(num_sequences), True))
        return 0.0 if one is None else max(one.seconds - seconds, 0.0)

    def _newest(self, num_sequences: int) -> _StepTimes | None:
        place = size_place(num_sequences)
        return self._by_size.get((place, self._is_launched.get(place, False)))


@dataclass(slots=True)
class _StepTimes:
    newest_s: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_NEWEST))
    num_sequences: float = 0.0
    num_seen: int = 0
    num_drafted: int = 0
    """Number of steps with drafts since the last one without."""

    @property
    def seconds(self) -> float:
        """Return the median duration in seconds."""
        return statistics.median_low(self.newest_s)


@dataclass(slots=True)
class _LaunchOverhead:
    num_seen: int = 0
    seconds: float = float("inf")


def size_place(num_rows: int) -> int:
    """Return the index of the size bin of `num_rows`; sizes of one bin differ by an eighth at
    most."""
    shift = max(0, num_rows.bit_length() - 4)
    return num_rows >> shift << shift


def size_class(num_sequences: int) -> int:
    """Return the size class of a batch, the exponent of the next power of two: 0 for 1 sequence, 1
    for 2, 2 for 3-4, 3 for 5-8."""
    return (num_sequences - 1).bit_length()


class ProposerCall(NamedTuple):
    """Costs and results of one call of a proposer."""

    num_tasks: int
    """Number of sequences of the call; at least 1."""
    num_accepted: int
    """Number of accepted tokens that the proposer had proposed and the step computed."""
    num_nodes: int
    """Number of nodes that the step computed, those of other proposers included; at least
    `num_accepted`."""
    own_s: float
    """Seconds of the proposer's call and of the work on its drafts, without computing them in the
    step."""
    rows_s: float
    """Seconds by which the nodes made the step longer."""
    overhead_s: float = 0.0
    """Seconds by which the step was longer because it was not launched ahead of time."""
    is_example: bool = True
    """Whether later calls may take as long; False for the first step of its kind."""


class CallBudget:
    """Decides whether one proposer is called, and for how many sequences, with an account for each
    class of batch sizes.

    Args: share: share of the serving time that trial calls may cost.
    """

    def __init__(self, share: float = PROBE_SHARE) -> None:
        self._share = share
        self._accounts: dict[int, _Account] = {}

    def may_call(self, num_sequences: int) -> bool:
        """Whether a call is possible in a step of this size."""
        one = self._accounts.get(size_class(num_sequences))
        return one is None or one.num_left > 0 or one.credit_s >= one.least_s

    def blocked_s(self, num_sequences: int) -> float:
        """Return the seconds to be served before the next call; 0.0 if it is possible now."""
        one = self._accounts.get(size_class(num_sequences))
        if one is None or one.num_left > 0 or one.credit_s >= one.least_s:
            return 0.0
        missing_s = one.least_s - one.credit_s
        return missing_s / self._share if self._share > 0.0 else float("inf")

    def clearly_pays(self, num_sequences: int) -> bool:
        """Whether calls pay without doubt."""
        one = self._accounts.get(size_class(num_sequences))
        return one is not None and one.is_clear

    def open(self, load: StepEstimate) -> None:
        """Open the account of a batch of this size, if it has none and is not a small one. No call
        is possible before it has served its initial debt."""
        if load.num_sequences > FEW:
            self._account(load)

    def take_call(self, load: StepEstimate, first: int = FEW) -> int:
        """Return the number of sequences to call the proposer for in this step, and count the call;
        0: no call.

        Args: first: largest number of sequences in the first trial.
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

    def return_call(self, load: StepEstimate) -> None:
        """Undo the last `take_call`, whose step is computed again or was cancelled: no `on_call`
        follows."""
        self._account(load).num_left += 1

    def num_trials(self, num_sequences: int) -> int:
        """Return the number of trials so far with about this many sequences."""
        one = self._accounts.get(size_class(num_sequences))
        return 0 if one is None else one.num_trials

    def on_served(self, num_sequences: int, seconds: float) -> None:
        """Credit the duration of a step, drafts included."""
        one = self._accounts.get(size_class(num_sequences))
        if one is not None:
            one.credit_s = min(one.credit_s + self._share * seconds, one.most_s)

    def charge(self, num_sequences: int, seconds: float) -> None:
        """Charge a loss in seconds that is in no ProposerCall."""
        one = self._accounts.get(size_class(num_sequences))
        if one is not None:
            one.credit_s -= seconds
            one.later_s -= seconds

    def owe(self, num_sequences: int, seconds: float) -> None:
        """Add the seconds of bookkeeping that decide about calls; the next trial pays for them.
        Charging them at once would postpone a due call with each step."""
        one = self._accounts.get(size_class(num_sequences))
        if one is not None and one.num_owed < _OWED_STEPS:
            one.num_owed += 1
            one.owed_s += seconds

    def on_call(self, load: StepEstimate, call: ProposerCall) -> None:
        """Record the result of a call in this step."""
        one = self._account(load)
        gain_s = call.num_accepted * load.token_s - call.own_s - call.rows_s - call.overhead_s
        if one.num_left < TRIAL - 1:
            one.later_s += gain_s
        one.most_s = _BANK_STEPS * load.plain_s
        one.credit_s = min(one.credit_s + gain_s, one.most_s)
        one.num_calls += 1
        share = max(1.0 / one.num_calls, 1.0 / _CALL_MEMORY)
        one.accepted += (call.num_accepted / call.num_tasks - one.accepted) * share
        one.gain_s += (gain_s - one.gain_s) * share
        one.is_clear = one.gain_s > _CLEAR * load.plain_s
        if call.is_example or one.num_examples == 0:
            one.num_examples += call.is_example
            rows_share = max(1.0 / max(one.num_examples, 1), 1.0 / _CALL_MEMORY)
            one.rows_s += (call.rows_s / call.num_tasks - one.rows_s) * rows_share
        one.own_s = min(one.own_s, call.own_s)
        one.most_nodes = max(one.most_nodes, -(-call.num_nodes // call.num_tasks))
        if call.is_example and 0 < one.num_left <= TRIAL - _LEAST_TRIAL and one.most_nodes > 0:
            noise_s = _NOISE * load.plain_s / call.num_tasks * load.num_sequences
            noise_s = min(noise_s, one.rows_s * load.num_sequences)
            best_s = one.promised_s(load, one.most_nodes) - call.overhead_s
            if best_s + noise_s <= 0.0:
                one.num_left = 0
        if one.num_left == 0:
            self._end_trial(one, load, call, gain_s)

    def _end_trial(
        self, one: _Account, load: StepEstimate, call: ProposerCall, gain_s: float
    ) -> None:
        """Choose the number of sequences of later calls, or continue the trial."""
        if one.promised_s(load, one.accepted) > call.overhead_s:
            one.width = min(one.width * _GROWTH, 1 << size_class(load.num_sequences))
        elif one.accepted * load.token_s <= one.rows_s:
            # The more sequences, the more is lost.
            one.width = max(one.width // _GROWTH, 1)
        # What it lost once, as by catching up, is paid by those calls that gain; of several, since
        # by chance one of them yields nothing where calls pay. Not where the debt grows all the
        # same, by what no call tells.
        if one.floor_s is None:
            one.floor_s = min(one.credit_s, one.credit_s - one.later_s)
        pays = (gain_s > 0.0 or one.later_s > 0.0) and one.credit_s >= one.floor_s
        if one.credit_s < 0.0 and pays:
            one.num_left = 1
        elif one.credit_s < 0.0:
            one.least_s = _AGAIN_STEPS * load.plain_s

    def _account(self, load: StepEstimate, first: int = FEW) -> _Account:
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
    """Credit and averages of one class of batch sizes. The trial is the present or the last one."""

    credit_s: float
    most_s: float
    """Largest credit in seconds."""
    width: int
    """Number of sequences of a call."""
    least_s: float = 0.0
    """Credit in seconds that the next trial needs."""
    owed_s: float = 0.0
    """Seconds of bookkeeping that no trial has paid for."""
    num_owed: int = 0
    """Number of steps of that bookkeeping."""
    num_left: int = 0
    """Number of calls of the trial that are still to come."""
    num_trials: int = 0
    num_calls: int = 0
    num_examples: int = 0
    """Number of calls that `rows_s` is an average of."""
    own_s: float = 0.0
    """Smallest cost in seconds of a call of the trial."""
    later_s: float = 0.0
    """Gain in seconds of the trial's calls after the first."""
    floor_s: float | None = None
    """Credit in seconds below which the trial ends: the credit after its first call, or the smaller
    one at its scheduled end. None: that end is not reached."""
    most_nodes: int = 0
    """Largest number of computed nodes per sequence in a call of the trial."""
    accepted: float = 0.0
    """Average number of accepted tokens per sequence of a call."""
    rows_s: float = 0.0
    """Average seconds of rows per sequence of a call."""
    gain_s: float = 0.0
    """Average gain in seconds of a call."""
    is_clear: bool = False

    def promised_s(self, load: StepEstimate, num_accepted: float) -> float:
        """Return the gain in seconds of a call for the whole batch, if each of its sequences had
        `num_accepted` tokens, costs per sequence stayed, and the proposer's call cost no more."""
        each_s = num_accepted * load.token_s - self.rows_s
        return each_s * load.num_sequences - self.own_s


@dataclass(slots=True)
class _Sleep:
    """The state of one class of batch sizes while its steps are slept through."""

    end_s: float
    """Seconds to be served until the sleep ends."""
    served_s: float = 0.0
    """Seconds served so far, which are not credited to any account yet."""


class _ProposedTree(NamedTuple):
    key: Key
    proposer: int
    tree: TokenTree
    """The proposer's own tree, before nodes are chosen."""


class _StepResult(NamedTuple):
    proposed: Sequence[_ProposedTree]
    outputs: Sequence[RequestOutput]
    num_accepted: Mapping[Key, int]

    def verified(self) -> Iterator[tuple[_ProposedTree, Sequence[int]]]:
        """Iterate over the proposed trees with the tokens that the sequence got in their place."""
        outputs = {(one.request_id, one.sample_index): one.token_ids for one in self.outputs}
        for one in self.proposed:
            # After accepted tokens one more is known to be the model's: it judges all proposals of
            # it, those that were not computed, too, so that a proposer can win its trust back.
            token_ids = outputs.get(one.key, ())[: self.num_accepted.get(one.key, 0) + 1]
            if token_ids:
                yield one, token_ids


class SpeculationController:
    """Chooses the sequences to call each proposer for and the nodes to verify, from measured costs
    and acceptance rates. Proposers are given by index.

    Args:
        num_proposers: number of proposers.
        always: call the proposers for all sequences and measure nothing.
        measures_again: whether launched steps are measured between drafts, too. False for proposers
            that need the hidden states of every step, which launched ones do not keep: they are
            then measured before the first drafts, and whenever drafts do not pay.
    Attributes:
        load: the estimated cost of the step that is being computed.
    """

    def __init__(
        self, num_proposers: int, *, always: bool = False, measures_again: bool = True
    ) -> None:
        self._always = always
        self._budgets = [CallBudget(PROBE_SHARE / num_proposers) for _ in range(num_proposers)]
        self._step_times = PlainStepTimes(measures_again=measures_again)
        self._cost = StepCost()
        self.load = StepEstimate(1, 1, 1.0, 0.0)
        self._num_sequences = self._num_rows = 0
        self._seen_sizes: set[int] = set()
        """Size bins of the steps with drafts so far."""
        self._widths: dict[int, int] = {}
        """Number of sequences to call for, by proposer."""
        self._num_tasks: dict[int, int] = {}
        self._is_measuring_overhead = False
        """Whether the step that is being computed is a plain one that was not launched ahead, to
        measure the overhead."""
        self._was_not_launched = False
        """Whether the newest step was not launched ahead because of drafts."""
        self._saved_s = 0.0
        """Seconds by which the last launched step of a series was shorter than others."""
        self._sleeps: dict[int, _Sleep] = {}
        """The sleeping size classes."""
        self._rates = [AcceptanceRates() for _ in range(num_proposers)]
        self._proposed: list[_ProposedTree] = []
        """The proposers' trees for the step that is being computed."""
        self._result: _StepResult | None = None
        """The result of the last step, if it is not learnt yet."""

    # ---- whether to call

    def is_asleep(self, num_sequences: int) -> bool:
        """Whether no call is possible in a step of `num_sequences` sampling sequences, nor in the
        next ones. For such a step `on_slept_step` is called instead of `begin_step` and
        `on_step`."""
        one = self._sleeps.get(size_class(num_sequences)) if num_sequences else None
        return one is not None and one.served_s < one.end_s

    def on_slept_step(self, num_sequences: int, seconds: float) -> None:
        """Record the duration of a step for which `is_asleep` was true."""
        self._sleeps[size_class(num_sequences)].served_s += seconds

    def is_idle(self, num_sequences: int) -> bool:
        """Whether no proposer would be called in a step of `num_sequences` sampling sequences, and
        nothing would be measured that a launched step does not show. Changes nothing."""
        if self._always:
            return False
        able = self._able(num_sequences)
        most = self._most_drafted(able, num_sequences)
        is_known = self._step_times.is_known(num_sequences, most)
        return num_sequences == 0 or not able or not is_known

    def begin_step(
        self, num_sequences: int, num_rows: int, num_tokens: int = 0, *, can_draft: bool = True
    ) -> bool:
        """Start a planned step. Returns: whether some proposer is to be called.

        Args:
            num_sequences: number of sequences that sample a token in the step.
            num_rows: number of rows without drafts.
            num_tokens: number of tokens of its sequences, together.
            can_draft: False: no sequence can have drafts, so that no call of a trial is spent.
        """
        if self._always:
            return num_sequences > 0
        self._wake(num_sequences)
        self._widths.clear()
        self._num_tasks.clear()
        self._num_sequences, self._num_rows = num_sequences, num_rows
        self._is_measuring_overhead = False
        if num_sequences == 0:
            return False
        able = self._able(num_sequences)
        if not able:
            return False
        base_s, row_s = self._cost.line(num_sequences)
        most = self._most_drafted(able, num_sequences)
        plain_s = self._step_times.seconds(num_sequences, row_s, most)
        if plain_s is not None and num_rows == num_sequences:
            if not self._cost.knows_rows(num_sequences):
                row_s = max(row_s, _ROWS_SHARE * plain_s / num_sequences)
            base_s = max(plain_s - row_s * num_rows, 0.0)
        self.load = StepEstimate(num_sequences, num_rows, base_s, row_s)
        # What rows cost is learnt without prompts, and what it costs beside them is not measured.
        may_draft = num_rows == num_sequences or self._cost.knows_rows(num_sequences)
        if plain_s is not None and may_draft and can_draft:
            if self._step_times.wants_overhead(num_sequences):
                self._is_measuring_overhead = num_rows == num_sequences
                return False
            first = max(1, _CATCH_UP * num_sequences // max(num_tokens, 1))
            for proposer, budget in enumerate(self._budgets):
                width = budget.take_call(self.load, first)
                if width > 0:
                    self._widths[proposer] = width
        return bool(self._widths)

    def cancel_step(self) -> None:
        """Undo `begin_step` for a step that failed or is computed again."""
        for proposer in self._widths:
            self._budgets[proposer].return_call(self.load)
        self._widths.clear()

    def select_sequences(self, sequences: Sequence[_Task]) -> Sequence[_Task]:
        """Return the sequences that some proposer is called for: other ones in each trial."""
        if self._always:
            return sequences
        width = max(self._widths.values(), default=0)
        if width >= len(sequences):
            return sequences
        proposer = max(self._widths, key=self._widths.__getitem__)
        first = self._budgets[proposer].num_trials(self._num_sequences) % len(sequences)
        return [sequences[(first + place) % len(sequences)] for place in range(width)]

    def select_tasks(self, proposer: int, tasks: Sequence[_Task]) -> Sequence[_Task]:
        """Return the first of `select_sequences` that this proposer is called for; may be empty."""
        if self._always:
            return tasks
        width = min(self._widths.get(proposer, 0), len(tasks))
        self._num_tasks[proposer] = width
        return tasks[:width]

    def _able(self, num_sequences: int) -> list[CallBudget]:
        return [budget for budget in self._budgets if budget.may_call(num_sequences)]

    def _most_drafted(self, able: Sequence[CallBudget], num_sequences: int) -> int:
        if not all(one.clearly_pays(num_sequences) for one in able):
            return _MOST
        is_launched = self._step_times.is_launched(num_sequences)
        return _MOST_CLEAR_LAUNCHED if is_launched else _MOST_CLEAR

    def _wake(self, num_sequences: int) -> None:
        one = self._sleeps.pop(size_class(num_sequences), None) if num_sequences else None
        if one is not None:
            for budget in self._budgets:
                budget.on_served(num_sequences, one.served_s)

    def _fall_asleep(self, step_s: float) -> None:
        """Start a sleep if the time until a call is possible is long enough, given the duration of
        a step."""
        num_sequences = self._num_sequences
        end_s = min(budget.blocked_s(num_sequences) for budget in self._budgets)
        end_s -= _AWAKE_STEPS * step_s
        if end_s > 0.0:
            self._sleeps[size_class(num_sequences)] = _Sleep(end_s)

    # ---- what a step cost

    def on_launched_step(
        self, num_sequences: int, seconds: float, *, is_first: bool, is_last: bool
    ) -> None:
        """Record the end of a step without drafts that was launched ahead of time.

        Args:
            is_first: no other step was in flight when it was launched, so that it took longer.
            is_last: no step was launched after it. Where a launch returns only after the step is
                computed, this one takes no time, and the first one twice as long.
        """
        if self._always:
            return
        self._wake(num_sequences)
        was_not_launched, self._was_not_launched = self._was_not_launched, False
        for budget in self._budgets:
            budget.on_served(num_sequences, seconds)
        if is_last:
            self._saved_s = self._step_times.shorter_s(num_sequences, seconds)
        elif not is_first:
            self._step_times.observe(num_sequences, seconds, is_launched=True)
            self._open_accounts(num_sequences)
            overhead_s = self._step_times.overhead_s(num_sequences)
            if overhead_s is not None:
                self._cost.observe(num_sequences, seconds + overhead_s)
        if is_first and was_not_launched:
            longer_s = self._step_times.longer_s(num_sequences, seconds) - self._saved_s
            longer_s = max(longer_s, 0.0)
            self._saved_s = 0.0
            for budget in self._budgets:
                budget.charge(num_sequences, longer_s / len(self._budgets))

    def _open_accounts(self, num_sequences: int) -> None:
        """Open accounts that begin in debt as soon as the duration of a launched step is known;
        else steps would be measured without launching them ahead long before any call."""
        if num_sequences > FEW and self._able(num_sequences):
            plain_s = self._step_times.seconds(num_sequences, 0.0, 1)
            if plain_s is not None:
                for budget in self._budgets:
                    budget.open(StepEstimate(num_sequences, num_sequences, plain_s, 0.0))

    def on_step(
        self,
        num_rows: int,
        seconds: float,
        own_s: Mapping[int, float],
        num_accepted: Mapping[int, int],
        *,
        beside_s: float = 0.0,
    ) -> None:
        """Record the end of the planned step.

        Args:
            num_rows: number of rows, drafts included.
            seconds: duration of the whole step.
            own_s: by called proposer, seconds of the call and of the work on its drafts.
            num_accepted: by called proposer, number of accepted tokens that it had proposed.
            beside_s: seconds of bookkeeping that a step slept through would not have.
        """
        num_sequences = self._num_sequences
        if num_sequences == 0 or self._always:
            return
        for budget in self._budgets:
            budget.on_served(num_sequences, seconds)
        is_whole = self._num_rows == num_sequences  # nothing but decodes
        seconds -= beside_s
        if not own_s:
            self._on_plain_step(num_rows, seconds, beside_s, is_whole=is_whole)
            return
        load = self.load
        step_s = seconds - sum(own_s.values())
        longer_s, overhead_s = load.row_s * (num_rows - load.num_rows), 0.0
        is_example = not is_whole or self._is_example(num_rows)
        if is_whole:
            if is_example:
                self._cost.observe(num_rows, step_s)
            self._step_times.on_drafted(num_sequences)
            known_s = self._step_times.overhead_s(num_sequences)
            self._was_not_launched = known_s is not None
            if num_rows > load.num_rows or known_s is not None:
                usual_s = load.seconds + longer_s + (known_s or 0.0)
                # Rows make no step shorter: one that seems so says that plain ones were measured
                # in a bad moment (an engine's first), and would be taken for gain.
                longer_s = max(min(step_s, OUTLIER * usual_s) - load.seconds, 0.0)
                overhead_s = min(known_s or 0.0, longer_s)
        share = 1.0 / len(own_s)
        for proposer, one_s in own_s.items():
            call = ProposerCall(
                self._num_tasks[proposer],
                num_accepted[proposer],
                num_rows - load.num_rows,
                own_s=one_s + beside_s * share,
                rows_s=(longer_s - overhead_s) * share,
                overhead_s=overhead_s * share,
                is_example=is_example,
            )
            self._budgets[proposer].on_call(load, call)

    def _on_plain_step(
        self, num_rows: int, seconds: float, beside_s: float, *, is_whole: bool
    ) -> None:
        """Record the end of a planned step without a call."""
        num_sequences = self._num_sequences
        for budget in self._budgets:
            budget.owe(num_sequences, beside_s / len(self._budgets))
        self._was_not_launched = self._is_measuring_overhead
        if is_whole:
            self._cost.observe(num_rows, seconds)
            if self._is_measuring_overhead:
                self._step_times.on_overhead(num_sequences, seconds)
            else:
                self._step_times.observe(num_sequences, seconds)
            self._fall_asleep(seconds)

    def _is_example(self, num_rows: int) -> bool:
        """Whether the duration of a step is representative of its size: not that of the first step
        with drafts of about this many rows, which may include compilation. Records the size."""
        if num_rows == self._num_rows:
            return True
        place = size_place(num_rows)
        is_first = place not in self._seen_sizes
        self._seen_sizes.add(place)
        return not is_first

    # ---- what trees are worth

    def begin_drafts(self) -> None:
        """Start the drafts of a step, with no tree proposed yet."""
        self._proposed = []

    def on_proposed(self, key: Key, proposer: int, tree: TokenTree) -> None:
        """Record the tree that a proposer made for a sequence in this step."""
        self._proposed.append(_ProposedTree(key, proposer, tree))

    def calibrate(self, proposer: int, tree: TokenTree) -> TokenTree:
        """Return a proposer's tree with chances corrected by its acceptance rates."""
        return self._rates[proposer].calibrate(tree)

    def choose_nodes(self, trees: Sequence[TokenTree], max_num_nodes: int) -> list[TokenTree]:
        """Choose the nodes of each tree that this step computes, at most `max_num_nodes`
        together."""
        return list(trees) if self._always else choose_nodes(trees, self.load, max_num_nodes)

    def prepare(self) -> None:
        """Prepare the proposed trees for comparison with the step's result. Called while the device
        computes."""
        for one in self._proposed:
            one.tree.prepare()

    def on_outputs(self, outputs: Sequence[RequestOutput], num_accepted: Mapping[Key, int]) -> None:
        """Record the outputs of a step, which `update_rates` will learn from.

        Args:
            outputs: the outputs of the step.
            num_accepted: number of accepted nodes by sequence.
        """
        self.update_rates()
        if self._proposed:
            self._result = _StepResult(self._proposed, outputs, num_accepted)

    def num_accepted(self, proposers: Iterable[int]) -> dict[int, int]:
        """Return, by proposer, the number of accepted tokens of the last step that it had
        proposed."""
        num_accepted = dict.fromkeys(proposers, 0)
        if self._result is not None:
            for one, token_ids in self._result.verified():
                num_accepted[one.proposer] += one.tree.num_followed(token_ids[:-1])
        return num_accepted

    def update_rates(self) -> None:
        """Learn acceptance rates from the last recorded step, unless that was done. Called while
        the device computes."""
        result, self._result = self._result, None
        if result is not None:
            for one, token_ids in result.verified():
                self._rates[one.proposer].observe_tree(one.tree, token_ids)
