"""SpeculationController: how many sequences each proposer is called for in a step, which of the
proposed nodes are computed, and what is learnt from the results. SpecInfer leaves this choice open
(section 3.1); ours:

**Nodes.** A step of B sequences yields B tokens, and one more for each accepted node: on average
the sum of the nodes' chances. It lasts `base_s + row_s * rows` (StepCost). So nodes are taken from
the likeliest on while each raises tokens per second (`choose_nodes`). The proposer's own
probabilities are corrected by what became of such nodes before (AcceptanceRates).

**Calls.** A proposer is called as long as it costs no time, and for a share of the time served to
find out whether it does. What a call costs and yields depends on the batch: each class of batch
sizes has an account of its own (CallBudget). A call costs the proposer's seconds, those of this
bookkeeping, and what its nodes made the step longer; it yields the time that its accepted tokens
would have taken in plain steps, or a part of it (`TOKEN_VALUE`). The account gets what calls yield
and a share of each step's seconds, and pays what calls cost; the next trial pays for bookkeeping of
steps without a call. A proposer whose account is in debt is not called. Hence the law
(test_controller.py): **time lost <= share * time served + a few steps' seconds, once + the loss of
one trial**, in each class, whatever the costs are.

A trial is a few calls in a row: after a pause the first one has to catch up. With few sequences the
first trial calls for all of them at once, or for fewer where those are long and so much would have
to be caught up with; with more it calls for one, and some time later. Where their tokens would pay,
were there as many for each of the batch and the proposer's call no dearer, the next trial calls for
more of them: only all together may pay for the call. Where each sequence's tokens are worth less
than its rows, the next one calls for fewer. A trial ends early where not even the best outcome
would pay. It goes on in debt while calls gain, the last one or all after the first together, and
the debt does not grow by what they do not tell: what was lost once, as by catching up, is theirs to
pay.

**Launched steps.** Where steps are launched ahead (engine/runner.py), a step with drafts is not,
nor is the next one's launch hidden by it. That time (the overhead of launching) is charged like any
other: what a step lasts without drafts is what a launched one lasts, and the first launch after
drafts is charged what it lasts longer. It is the same for one sequence and for all, so it is
measured, by a few plain steps of each size that are not launched, and has no say in what more
sequences would cost.

**Sleep.** While all accounts are deep in debt, steps are slept through (`is_asleep`): all that is
learnt of them is how long they lasted, so that rest costs next to nothing. Sleep ends some steps
before a proposer can be called, and those steps say what one lasts now. Each class of sizes sleeps
by itself.

Results of a step are learnt while the device computes the next one (`update_rates`), so that
nothing waits for it: a tree is calibrated by the results of all steps but the one right before it.
Which those are depends on the order of steps alone, on no clock and on no caller.

Policy: no device, no RPC, no clock of its own. Engine thread only.
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
"""Observations of a bin after which older ones count for little; guessed."""

# ---- step costs
_SIZE_BITS = 4
"""Sizes that are averaged together differ by an eighth at most."""
_COST_MEMORY = 32.0
"""Steps of a size that its average is about; guessed."""
_KNOWN_STEPS = 4.0
"""Steps of a size after which one of twice its seconds is an outlier; guessed."""
_REACH = 4
_REACH_ROWS = 16
"""Steps of a quarter to four times the rows, and 16 more, determine what a row costs; guessed."""

# ---- plain steps
_NUM_NEWEST = 8
"""Number of plain steps of a size before any call, and of newest ones whose median is what a step
lasts: the very first ones are no example, and neither is the shortest, which would make steps with
drafts seem dearer than they are. Among drafts few plain steps come, so that an average of more
would be of another time."""
_NUM_OVERHEAD_STEPS = 3
"""Plain steps of a class of sizes that are not launched, before any call where others are; the
shortest of them counts; guessed."""
OUTLIER = 4.0
"""Times the usual seconds: a step with drafts that lasts longer, or the first launched one after
it, was held up by something else, and counts as one of just so many; guessed."""

# ---- budgets
PROBE_SHARE = 0.005
"""Share of the time served that finding out may cost, all proposers together."""
TRIAL = 3
"""Calls in a row; guessed."""
_LEAST_TRIAL = 2
"""Calls of a trial where even the best outcome would not pay: the first one may have to catch
up."""
_NOISE = 0.1
"""Share of a step by which two of the same rows may differ, and what rows cost is one's difference
to others. It is shared by the sequences of the call, and reckoned for all of the batch: where the
call is for one of 32, a tenth of a step counts as three steps. The best outcome leaves it out."""
FEW = 4
"""Largest size of a small batch: its first trial calls for all of it, as a call for a few costs
little more than one for a single sequence (on a CPU, bundled pair: 9 ms for 1, 13 for 2, 14 for 4),
and begins at once. The first trial of a larger one calls for one sequence: each pays less of the
call, and their rows cost as much as their tokens yield where a row has its price (on a CPU from 8
on)."""
TOKEN_VALUE = 0.9
"""Value of an accepted token as a part of its share of a plain step, where that step is several
sequences': a sequence that is ahead waits for a batch that is as long as its slowest. Measured as
steps that a batch needed, against those that its average sequence needed: 1.0 with 2 to 8, 0.92
with 16 and 32, of 96 tokens each."""
_GROWTH = 4
"""Factor of the number of sequences after few of them promised gain; guessed."""
_CALL_MEMORY = 16
"""Calls that an average is about; guessed."""
GRANT_STEPS = 1.0
"""Initial credit of a small batch's account, in steps' seconds: by chance the first calls may yield
nothing where the next ones would; guessed."""
_DEBT_STEPS = 1.0
"""Initial debt of a larger one's: it is served 1 / share as much before the first trial. A batch
with few steps left is not delayed by it, and one with many soon has done them; guessed."""
_AGAIN_STEPS = 0.5
"""Credit, in steps' seconds, at which a proposer in debt is called again: a hundred steps later or
more, and then a few calls, if they are cheap, instead of one every now and then. Between them
nothing needs to be measured, which has its price, too (`is_asleep`); guessed."""
_OWED_STEPS = 32
"""Number of steps at most whose bookkeeping a trial pays: those that come before it where the
others are slept through. More were not for its sake, and an account that owes for all would never
be called again."""
_BANK_STEPS = 16.0
"""Largest credit, in steps' seconds: gain is kept for bad times; guessed."""
_CLEAR = 0.2
"""Share of a step above which a call's gain leaves no doubt; guessed."""

# ---- the controller
_MOST, _MOST_CLEAR, _MOST_CLEAR_LAUNCHED = 8, 32, 128
"""Steps with drafts in a row, after which a plain one says what those cost now; more of them where
there is no doubt that drafts pay, still more where a launched one takes others before and after it;
guessed."""
_CATCH_UP = 512
"""Tokens, at most, of the sequences that a first trial calls for, if they are several: a proposer
may have to compute all of them; guessed."""
_ROWS_SHARE = 0.1
"""Price of a row before the first drafts, as a share of what a token costs without them. So drafts
that are that unlikely are left out; guessed."""
_AWAKE_STEPS = 24
"""Steps before a proposer can be called that are not slept through: three times _NUM_NEWEST. Each
costs the bookkeeping, which the trial pays: on a CPU, bundled pair, 0.1 ms of a step of 5."""


def cost_clock(
    config: EngineConfig, device: str, clock: Callable[[], float]
) -> Callable[[], float]:
    """The clock that costs are measured by. On a CPU whose cores do other work, too, the wall clock
    tells how busy they are: there it is the time that the engine's thread computed. Not where the
    thread waits for what is computed elsewhere: a device, other ranks, draft workers.

    Args:
        device: the model's.
        clock: the engine's; any but the system's is taken as it is.
    """
    is_here = (
        device == "cpu"
        and config.tensor_parallel * config.pipeline_parallel == 1
        and not config.speculation.draft_workers
    )
    return time.thread_time if is_here and clock is time.monotonic else clock


class AcceptanceRates:
    """How often nodes were accepted whose parent was, by the chance that one proposer gave them."""

    def __init__(self) -> None:
        self._num_seen = [0.0] * _NUM_BINS
        self._num_accepted = [0.0] * _NUM_BINS

    def observe(self, belief: float, *, is_accepted: bool) -> None:
        """A node with this chance, given its parent was accepted, was verified."""
        place = min(int(belief * _NUM_BINS), _NUM_BINS - 1)
        fading = 1.0 - 1.0 / _RATE_MEMORY
        self._num_seen[place] = self._num_seen[place] * fading + 1.0
        self._num_accepted[place] = self._num_accepted[place] * fading + is_accepted

    def observe_tree(self, tree: TokenTree, token_ids: Iterable[int]) -> None:
        """Observe each node whose parent was accepted, by the token that came there.

        Args:
            token_ids: accepted ones, and the token that was sampled after them.
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
        """Chance in [0, 1] that such a node is accepted, given its parent is."""
        return self.chances((ROOT,), (belief,))[0]

    def chances(self, parents: Sequence[int], believed: Sequence[float]) -> tuple[float, ...]:
        """Chances of a tree's nodes to be accepted, with all above them.

        Args:
            parents, believed: those of each node; see TokenTree.
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
        """The tree with chances by what was observed."""
        if not len(tree):
            return tree
        return tree.with_chances(self.chances(tree.parents, tree.chances))


class StepCost:
    """Seconds of a step by its rows, as `base_s + row_s * rows`: a line through measured steps of
    about this size. Until it has seen steps of different sizes, a row costs nothing.

    Averages are kept by size, so that sizes that are seldom seen are not forgotten, and so that
    steps of a thousand rows have no say in the price of the ninth.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _SizeAverage] = {}

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step of `num_rows` lasted so long."""
        shift = max(0, num_rows.bit_length() - _SIZE_BITS)
        size = self._sizes.setdefault(num_rows >> shift << shift, _SizeAverage())
        if size.weight >= _KNOWN_STEPS:  # the machine did something else, too
            seconds = min(seconds, 2.0 * size.seconds)
        size.weight = min(size.weight + 1.0, _COST_MEMORY)
        size.num_rows += (num_rows - size.num_rows) / size.weight
        size.seconds += (seconds - size.seconds) / size.weight

    def knows_rows(self, num_rows: int) -> bool:
        """Whether more than one size was seen near a step of `num_rows`."""
        return len({one.num_rows for one in self._near(num_rows)}) > 1

    def _near(self, num_rows: int) -> list[_SizeAverage]:
        least, most = num_rows / _REACH, num_rows * _REACH + _REACH_ROWS
        return [one for one in self._sizes.values() if least <= one.num_rows <= most]

    def line(self, num_rows: int) -> tuple[float, float]:
        """(base_s, row_s), neither negative, near a step of `num_rows`."""
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
    """A step without drafts."""

    num_sequences: int
    """Sequences that sample a token in it."""
    num_rows: int
    """All tokens of it, those of prompts included; at least `num_sequences`."""
    base_s: float
    row_s: float

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.base_s + self.row_s * self.num_rows

    @property
    def plain_s(self) -> float:
        """Duration that it would have without prompts."""
        return self.base_s + self.row_s * self.num_sequences

    @property
    def token_s(self) -> float:
        """Value of an accepted token in seconds. Prompts in the step have no part in it: they are
        computed in any case."""
        if self.num_sequences == 1:
            return self.plain_s
        return TOKEN_VALUE * self.plain_s / self.num_sequences


def choose_nodes(
    trees: Sequence[TokenTree], load: StepEstimate, max_num_nodes: int
) -> list[TokenTree]:
    """The nodes of each tree that are worth their rows.

    Args:
        trees: trees with calibrated chances.
        max_num_nodes: largest number of nodes of all trees together.
    Returns: as many trees, some maybe empty. More nodes never mean fewer tokens per second by the
        same reckoning, and no node is taken without its parent.
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
    """Seconds of steps without drafts and prompts, by the number of sequences: launched ahead, and
    not. The newest steps of about its size predict the next one.

    Args:
        measures_again: see SpeculationController.
    """

    def __init__(self, *, measures_again: bool = True) -> None:
        self._by_size: dict[tuple[int, bool], _StepTimes] = {}
        self._is_launched: dict[int, bool] = {}
        self._overheads: dict[int, _LaunchOverhead] = {}
        """By class of sizes: up to twice as many."""
        self._measures_again = measures_again

    def observe(self, num_sequences: int, seconds: float, *, is_launched: bool = False) -> None:
        """A plain step lasted so long."""
        place = size_place(num_sequences)
        self._is_launched[place] = is_launched
        one = self._by_size.setdefault((place, is_launched), _StepTimes())
        one.num_seen += 1
        one.num_drafted = 0
        one.newest_s.append(seconds)
        share = max(1.0 / one.num_seen, 1.0 / _NUM_NEWEST)
        one.num_sequences += (num_sequences - one.num_sequences) * share

    def is_known(self, num_sequences: int, most: int) -> bool:
        """Whether enough steps of about this size were seen, one of them not longer than `most`
        steps with drafts ago."""
        one = self._newest(num_sequences)
        if one is None or one.num_seen < _NUM_NEWEST:
            return False
        is_launched = self._is_launched[size_place(num_sequences)]
        return one.num_drafted < most or (is_launched and not self._measures_again)

    def seconds(self, num_sequences: int, row_s: float, most: int) -> float | None:
        """Duration of a step; None: it is not known, and this one should be plain."""
        one = self._newest(num_sequences)
        if one is None or not self.is_known(num_sequences, most):
            return None
        return max(one.seconds + row_s * (num_sequences - one.num_sequences), 0.0)

    def is_launched(self, num_sequences: int) -> bool:
        """Whether plain steps of about this size are launched ahead."""
        return self._is_launched.get(size_place(num_sequences), False)

    def on_drafted(self, num_sequences: int) -> None:
        """A step of this size had drafts."""
        one = self._newest(num_sequences)
        if one is not None:
            one.num_drafted += 1

    def wants_overhead(self, num_sequences: int) -> bool:
        """Whether steps of its size are launched, and too few were not to tell what that costs."""
        is_launched = self.is_launched(num_sequences)
        return is_launched and self._overhead(num_sequences).num_seen < _NUM_OVERHEAD_STEPS

    def on_overhead(self, num_sequences: int, seconds: float) -> None:
        """A plain step was not launched, though it could have been, and lasted so long."""
        one = self._overhead(num_sequences)
        one.num_seen += 1
        one.seconds = min(one.seconds, self.longer_s(num_sequences, seconds))

    def overhead_s(self, num_sequences: int) -> float | None:
        """Seconds that a step lasts longer where it is not launched; None: such steps are never
        launched, or it is not known."""
        one = self._overhead(num_sequences)
        return one.seconds if self.is_launched(num_sequences) and one.num_seen else None

    def _overhead(self, num_sequences: int) -> _LaunchOverhead:
        return self._overheads.setdefault(num_sequences.bit_length(), _LaunchOverhead())

    def longer_s(self, num_sequences: int, seconds: float) -> float:
        """Seconds that a launched step lasted longer than others of its size; 0.0 where none is
        known."""
        one = self._by_size.get((size_place(num_sequences), True))
        if one is None:
            return 0.0
        return max(min(seconds, OUTLIER * one.seconds) - one.seconds, 0.0)

    def shorter_s(self, num_sequences: int, seconds: float) -> float:
        """Seconds that a launched step lasted less than others of its size."""
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
    """Steps with drafts since the last one without."""

    @property
    def seconds(self) -> float:
        """Median; computed when it is asked for, which is seldom."""
        return statistics.median_low(self.newest_s)


@dataclass(slots=True)
class _LaunchOverhead:
    num_seen: int = 0
    seconds: float = float("inf")


def size_place(num_rows: int) -> int:
    """Sizes of one place differ by an eighth at most."""
    shift = max(0, num_rows.bit_length() - 4)
    return num_rows >> shift << shift


def size_class(num_sequences: int) -> int:
    """1, 2, 3-4, 5-8, ...: the largest size of a class is 2 to this power."""
    return (num_sequences - 1).bit_length()


class ProposerCall(NamedTuple):
    """Costs and results of one call of a proposer."""

    num_tasks: int
    """Sequences of the call; at least 1."""
    num_accepted: int
    """Accepted tokens that it had proposed, and that the step computed."""
    num_nodes: int
    """Nodes that the step computed, those of other proposers included; at least `num_accepted`."""
    own_s: float
    """Seconds of the proposer, and of all that is done with its drafts but computing them."""
    rows_s: float
    """Seconds that its nodes made the step longer."""
    overhead_s: float = 0.0
    """Seconds that the step lasted longer because it was not launched ahead."""
    is_example: bool = True
    """Later calls may take as long: False where a step was the first of its kind."""


class CallBudget:
    """Whether one proposer is called, and for how many sequences: an account for each class of
    batch sizes.

    Args:
        share: share of the time served that finding out may cost.
    """

    def __init__(self, share: float = PROBE_SHARE) -> None:
        self._share = share
        self._accounts: dict[int, _Account] = {}

    def may_call(self, num_sequences: int) -> bool:
        """Whether a call is possible in a step of this size."""
        one = self._accounts.get(size_class(num_sequences))
        return one is None or one.num_left > 0 or one.credit_s >= one.least_s

    def blocked_s(self, num_sequences: int) -> float:
        """Seconds to be served before the next call; 0.0: it may come now."""
        one = self._accounts.get(size_class(num_sequences))
        if one is None or one.num_left > 0 or one.credit_s >= one.least_s:
            return 0.0
        missing_s = one.least_s - one.credit_s
        return missing_s / self._share if self._share > 0.0 else float("inf")

    def clearly_pays(self, num_sequences: int) -> bool:
        """Whether there is no doubt that calls pay."""
        one = self._accounts.get(size_class(num_sequences))
        return one is not None and one.is_clear

    def open(self, load: StepEstimate) -> None:
        """Open the account of a batch of that size, if it has none and is no small one, whose first
        trial begins at once. No call is possible there before it has served."""
        if load.num_sequences > FEW:
            self._account(load)

    def take_call(self, load: StepEstimate, first: int = FEW) -> int:
        """Number of sequences to call the proposer for in this step; 0: no call. It counts as
        called.

        Args:
            first: largest number of sequences in the first trial.
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
        """The step of the last call is computed again, or never was: no `on_call` follows."""
        self._account(load).num_left += 1

    def num_trials(self, num_sequences: int) -> int:
        """Number of trials so far with about this many sequences."""
        one = self._accounts.get(size_class(num_sequences))
        return 0 if one is None else one.num_trials

    def on_served(self, num_sequences: int, seconds: float) -> None:
        """A step lasted so long, drafts included."""
        one = self._accounts.get(size_class(num_sequences))
        if one is not None:
            one.credit_s = min(one.credit_s + self._share * seconds, one.most_s)

    def charge(self, num_sequences: int, seconds: float) -> None:
        """Charge a loss that is in no ProposerCall."""
        one = self._accounts.get(size_class(num_sequences))
        if one is not None:
            one.credit_s -= seconds
            one.later_s -= seconds

    def owe(self, num_sequences: int, seconds: float) -> None:
        """Note the cost of finding out whether to call. The next trial pays for it: were it paid at
        once, a proposer that is to be called soon would be as far from it with each step."""
        one = self._accounts.get(size_class(num_sequences))
        if one is not None and one.num_owed < _OWED_STEPS:
            one.num_owed += 1
            one.owed_s += seconds

    def on_call(self, load: StepEstimate, call: ProposerCall) -> None:
        """A call of this step has its result."""
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
        """Choose the number of sequences from now on; or let the trial go on."""
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
    """Credit and averages of one class of batch sizes. A trial is the present one, or the last."""

    credit_s: float
    most_s: float
    """Largest credit."""
    width: int
    """Number of sequences of a call."""
    least_s: float = 0.0
    """Credit that the next trial needs."""
    owed_s: float = 0.0
    """Bookkeeping that no trial has paid for yet."""
    num_owed: int = 0
    """Number of steps of that bookkeeping."""
    num_left: int = 0
    """Calls of the trial that are still to come."""
    num_trials: int = 0
    num_calls: int = 0
    num_examples: int = 0
    """Calls that `rows_s` is an average of."""
    own_s: float = 0.0
    """Least cost of a call of the trial."""
    later_s: float = 0.0
    """Gain of the trial's calls after the first."""
    floor_s: float | None = None
    """Credit below which the trial does not go on: the credit after its first call, or when it was
    to end if that is less. None: it was not to end yet."""
    most_nodes: int = 0
    """Largest number of computed nodes of a call of the trial, per sequence."""
    accepted: float = 0.0
    """Accepted tokens per sequence of a call."""
    rows_s: float = 0.0
    """Seconds of rows per sequence of a call."""
    gain_s: float = 0.0
    """Gain of a call."""
    is_clear: bool = False

    def promised_s(self, load: StepEstimate, num_accepted: float) -> float:
        """Gain of a call, were it the same for each sequence of the batch as for those of the call,
        with `num_accepted` tokens of each; a call for more sequences costs no more."""
        each_s = num_accepted * load.token_s - self.rows_s
        return each_s * load.num_sequences - self.own_s


@dataclass(slots=True)
class _Sleep:
    """Sleep through steps of one class of batch sizes."""

    end_s: float
    """Seconds to be served until it ends."""
    served_s: float = 0.0
    """Seconds so far, which are in no account yet."""


class _ProposedTree(NamedTuple):
    key: Key
    proposer: int
    tree: TokenTree
    """The proposer's own tree, before any choice."""


class _StepResult(NamedTuple):
    proposed: Sequence[_ProposedTree]
    outputs: Sequence[RequestOutput]
    num_accepted: Mapping[Key, int]

    def verified(self) -> Iterator[tuple[_ProposedTree, Sequence[int]]]:
        """Trees with tokens that came in their place."""
        outputs = {(one.request_id, one.sample_index): one.token_ids for one in self.outputs}
        for one in self.proposed:
            # After accepted tokens one more is known to be the model's: it judges all proposals of
            # it, those that were not computed, too, so that a proposer can win its trust back.
            token_ids = outputs.get(one.key, ())[: self.num_accepted.get(one.key, 0) + 1]
            if token_ids:
                yield one, token_ids


class SpeculationController:
    """Decides whom to draft for and what to compute, and learns. Proposers are indices.

    Args:
        always: proposers are called for all sequences, whatever that costs: it is not measured.
        measures_again: what a launched step lasts is measured among drafts, too. False where
            proposers must see every step, which launched ones do not let them: it is measured
            before the first drafts, and whenever they do not pay.

    Attributes:
        load: the step that is being computed.
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
        """About so many rows a step with drafts had."""
        self._widths: dict[int, int] = {}
        """Number of sequences to call for, by proposer."""
        self._num_tasks: dict[int, int] = {}
        self._is_measuring_overhead = False
        """The step that is being computed is a plain one, not launched to see what that costs."""
        self._was_not_launched = False
        """The newest step was not launched, because of drafts."""
        self._saved_s = 0.0
        """Seconds that the newest launched step that was the last lasted less than others."""
        self._sleeps: dict[int, _Sleep] = {}
        """By class of sizes."""
        self._rates = [AcceptanceRates() for _ in range(num_proposers)]
        self._proposed: list[_ProposedTree] = []
        """Trees of the step that is being computed."""
        self._result: _StepResult | None = None
        """Result that is not learnt yet."""

    # ---- whether to call

    def is_asleep(self, num_sequences: int) -> bool:
        """Whether no call is possible in a step of `num_sequences` that sample, nor in the next
        ones. `on_slept_step` is called for such a step instead of `begin_step` and `on_step`."""
        one = self._sleeps.get(size_class(num_sequences)) if num_sequences else None
        return one is not None and one.served_s < one.end_s

    def on_slept_step(self, num_sequences: int, seconds: float) -> None:
        """A step for which `is_asleep` was true has ended."""
        self._sleeps[size_class(num_sequences)].served_s += seconds

    def is_idle(self, num_sequences: int) -> bool:
        """Whether no proposer would be called in a step of `num_sequences` that sample, and nothing
        would be measured that a launched step does not tell. Changes nothing."""
        if self._always:
            return False
        able = self._able(num_sequences)
        most = self._most_drafted(able, num_sequences)
        is_known = self._step_times.is_known(num_sequences, most)
        return num_sequences == 0 or not able or not is_known

    def begin_step(
        self, num_sequences: int, num_rows: int, num_tokens: int = 0, *, can_draft: bool = True
    ) -> bool:
        """A step is planned. Returns: whether some proposer is to be called.

        Args:
            num_sequences: sequences that sample a token in it.
            num_rows: rows without drafts.
            num_tokens: tokens that its sequences have, together.
            can_draft: False: none of them takes drafts. No call of a trial is spent on such a step.
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
        """The last planned step came to nothing."""
        for proposer in self._widths:
            self._budgets[proposer].return_call(self.load)
        self._widths.clear()

    def select_sequences(self, sequences: Sequence[_Task]) -> Sequence[_Task]:
        """The sequences that some proposer is called for: other ones with each trial."""
        if self._always:
            return sequences
        width = max(self._widths.values(), default=0)
        if width >= len(sequences):
            return sequences
        proposer = max(self._widths, key=self._widths.__getitem__)
        first = self._budgets[proposer].num_trials(self._num_sequences) % len(sequences)
        return [sequences[(first + place) % len(sequences)] for place in range(width)]

    def select_tasks(self, proposer: int, tasks: Sequence[_Task]) -> Sequence[_Task]:
        """The first of `select_sequences` that this proposer is called for; maybe none."""
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
        """Sleep if it is long enough until a call is possible, by what a step lasts."""
        num_sequences = self._num_sequences
        end_s = min(budget.blocked_s(num_sequences) for budget in self._budgets)
        end_s -= _AWAKE_STEPS * step_s
        if end_s > 0.0:
            self._sleeps[size_class(num_sequences)] = _Sleep(end_s)

    # ---- what a step cost

    def on_launched_step(
        self, num_sequences: int, seconds: float, *, is_first: bool, is_last: bool
    ) -> None:
        """A launched step has ended.

        Args:
            is_first: no other one was in flight when it was launched: it lasted longer.
            is_last: none was launched after it. Where a launch does not return before it is
                computed, it lasted no time, and the first one twice as long.
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
        """Open accounts that begin in debt, as soon as it is known what a launched step lasts: else
        some steps would not be launched, to find out what that costs, long before any call."""
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
        """The planned step has ended.

        Args:
            num_rows: rows with drafts.
            seconds: duration of all of it.
            own_s: by called proposer, seconds that it took, and that its drafts took.
            num_accepted: by called proposer, accepted tokens that it had proposed.
            beside_s: seconds of the step that one which is slept through would not have.
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
        """The planned step had no call."""
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
        """Not the first step of about so many rows, which may have compiled what the later ones
        find."""
        if num_rows == self._num_rows:
            return True
        place = size_place(num_rows)
        is_first = place not in self._seen_sizes
        self._seen_sizes.add(place)
        return not is_first

    # ---- what trees are worth

    def begin_drafts(self) -> None:
        """A step begins: no tree is proposed for it yet."""
        self._proposed = []

    def on_proposed(self, key: Key, proposer: int, tree: TokenTree) -> None:
        """A proposer has this tree for one sequence in this step."""
        self._proposed.append(_ProposedTree(key, proposer, tree))

    def calibrate(self, proposer: int, tree: TokenTree) -> TokenTree:
        """A proposer's tree, with chances by its acceptance rates."""
        return self._rates[proposer].calibrate(tree)

    def choose_nodes(self, trees: Sequence[TokenTree], max_num_nodes: int) -> list[TokenTree]:
        """The nodes of each tree that this step computes."""
        return list(trees) if self._always else choose_nodes(trees, self.load, max_num_nodes)

    def prepare(self) -> None:
        """While the step is computed: prepare what its result will be compared with."""
        for one in self._proposed:
            one.tree.prepare()

    def on_outputs(self, outputs: Sequence[RequestOutput], num_accepted: Mapping[Key, int]) -> None:
        """The step has ended.

        Args:
            outputs: those of the step.
            num_accepted: number of accepted nodes by sequence.
        """
        self.update_rates()
        if self._proposed:
            self._result = _StepResult(self._proposed, outputs, num_accepted)

    def num_accepted(self, proposers: Iterable[int]) -> dict[int, int]:
        """By proposer, accepted tokens of the step that just ended which it had proposed."""
        num_accepted = dict.fromkeys(proposers, 0)
        if self._result is not None:
            for one, token_ids in self._result.verified():
                num_accepted[one.proposer] += one.tree.num_followed(token_ids[:-1])
        return num_accepted

    def update_rates(self) -> None:
        """Learn the last step's result, if that was not done yet: called where there is time."""
        result, self._result = self._result, None
        if result is not None:
            for one, token_ids in result.verified():
                self._rates[one.proposer].observe_tree(one.tree, token_ids)
