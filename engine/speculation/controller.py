"""SpeculationController: chooses the number of sequences that each proposer is called for in a step
and the proposed nodes that are computed, and learns from the results. SpecInfer leaves this choice
open (section 3.1).

**Nodes.** A step of B sequences yields B tokens, and one more for each accepted node: on average
the sum of the nodes' chances. It lasts `base_s + row_s * rows` (StepCost). So nodes are taken from
the likeliest on while each raises tokens per second (`choose_nodes`). The proposer's own
probabilities are corrected by the acceptance of such nodes before (AcceptanceRates).

**Calls.** For each proposer and each class of batch sizes there is a credit in seconds
(CallBudget). A call adds the time that its accepted tokens would have taken in plain steps, or a
part of it (`TOKEN_VALUE`), and subtracts the time by which it made the step longer than a plain
one; each step adds a small share of its duration. A proposer is called as long as its credit is
not negative, and again for a trial of a few calls when it has recovered. Hence the law
(test_controller.py): **time lost <= share * time served + a few steps' seconds, once + the loss of
one trial**, in each class, whatever the costs are.

A trial is a few calls in a row, as the first call after a pause has to catch up. It continues in
debt while the credit is above its lowest value in those calls: a single loss, such as catching up,
is paid by later gains. In a large batch, or with long sequences, the first calls are for one
sequence. A call is for four times as many when the tokens accepted so far would pay for the last
call if each sequence of the batch had as many: what a wider call costs is not estimated from a
narrow one, whose step differs from a plain one by more than its own rows, but measured. When calls
stop and that is not so, the next ones are for a quarter.

**Launched steps.** Where steps are launched ahead (engine/runner.py), a step with drafts is not,
nor does it hide the next one's launch. The former is charged to the drafts, since a plain step is
a launched one; the latter is not measured.

**Sleep.** While no proposer of a class can be called for a while, its steps are slept through
(`is_asleep`): only their durations are recorded, so that the bookkeeping costs next to nothing.
Sleep ends some steps before a proposer can be called, and those steps are measured.

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
_RATE_MEMORY = 100.0
"""Number of observations of a bin after which older ones count for little; guessed."""

# ---- step costs
_SIZE_BITS = 4
"""Number of leading bits of a size that are distinguished: sizes averaged together differ by an
eighth at most."""
_COST_MEMORY = 32.0
"""Number of steps of a size that its average covers; guessed."""
_MOST_LONGER = 1.25
"""Limit of a step's duration, as a multiple of the average of its size: one that was held up, taken
for the cost of its rows, would leave drafts out for good; guessed."""
_REACH = 4
_REACH_ROWS = 16
"""Number of rows beyond a quarter to four times a step's rows within which other steps determine
the cost of a row; guessed."""
_ROWS_SHARE = 0.1
"""Cost of a row before the first drafts, as a share of a token's cost without drafts; draft tokens
less likely than that are left out; guessed."""

# ---- plain steps
_NUM_NEWEST = 8
"""Number of plain steps of a size that are measured before the first call of a proposer, and of
newest ones whose median is a step's duration. Few plain steps come between drafts, so that an
average of more would be out of date; the shortest one would make steps with drafts seem more
expensive than they are."""
_MAX_DRAFTED, _MAX_DRAFTED_LAUNCHED = 32, 128
"""Number of consecutive steps with drafts after which a plain one is measured, in general and where
plain steps are launched ahead, as one then delays the steps around it; guessed."""
_OUTLIER = 4.0
"""Limit of a measured duration, as a multiple of the usual one: a step with drafts that lasts
longer was delayed by something else, and is counted with this limit; guessed."""

# ---- budgets
PROBE_SHARE = 0.005
"""Share of the serving time that calls without gain may cost, all proposers together."""
TRIAL = 3
"""Number of consecutive calls of a trial; guessed."""
FEW = 4
"""Largest size of a small batch, whose first calls are for all sequences: a call for a few costs
little more than one for a single sequence (on a CPU, bundled pair: 9 ms for 1, 13 for 2, 14 for 4).
The first calls of a larger batch are for one sequence, and where steps are not launched ahead they
come when it was served for a while: a batch that ends soon would not earn back what they cost."""
_CATCH_UP = 512
"""Largest number of tokens, together, of several sequences in a first call: a proposer may have to
compute all of them; guessed."""
TOKEN_VALUE = 0.9
"""Value of an accepted token, as a part of its share of a plain step, in a batch of several
sequences: a sequence that is ahead waits for the slowest one. Measured as the ratio of the steps
that an average sequence needed to those of the batch: 1.0 with 2 to 8 sequences, 0.92 with 16
and 32, of 96 tokens each."""
_GROWTH = 4
"""Factor by which the number of sequences of a call grows and shrinks; guessed."""
GRANT_STEPS = 3.0
"""Initial credit, in durations of a step, since the first calls may yield nothing by chance;
guessed."""
_AGAIN_STEPS = 0.5
"""Credit, in durations of a step, at which a proposer that was in debt is called again: during the
pause nothing is measured (`is_asleep`); guessed."""
_BANK_STEPS = 16.0
"""Largest credit, in durations of a step: earlier gain pays for later losses; guessed."""
_OWED_STEPS = 32
"""Largest number of steps whose bookkeeping a trial pays for: those right before it, where the
others are slept through. A budget that paid for more might never allow a call again."""
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
        if size.weight > 0.0:  # the machine did something else, too
            seconds = min(seconds, _MOST_LONGER * size.seconds)
        if seconds < 0.5 * size.seconds:  # or did in the steps before, such as compiling
            size.weight = 0.0
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
    plain_s: float
    """Duration in seconds without prompt tokens, launched ahead if such steps are."""
    step_s: float
    """Duration in seconds without prompt tokens, not launched ahead; at least `plain_s`."""
    row_s: float

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
    seconds = load.step_s
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
    """Durations in seconds of steps without drafts and prompts, launched ahead of time or not, by
    the number of sequences. The newest steps of about the same size predict the next one.

    Args: measures_again: whether launched steps are measured among drafts (SpeculationController).
    """

    def __init__(self, *, measures_again: bool = True) -> None:
        self._by_size: dict[tuple[int, bool], _StepTimes] = {}
        self._is_launched: dict[int, bool] = {}
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

    def is_known(self, num_sequences: int) -> bool:
        """Whether enough steps of about this size were measured, and not too many steps with drafts
        came after the newest, so that the next step need not be plain."""
        one = self._newest(num_sequences)
        if one is None or one.num_seen < _NUM_NEWEST:
            return False
        if not self.is_launched(num_sequences):
            return one.num_drafted < _MAX_DRAFTED
        return one.num_drafted < _MAX_DRAFTED_LAUNCHED or not self._measures_again

    def seconds(self, num_sequences: int, row_s: float) -> float | None:
        """Return the duration of a plain step of this size; None if it is not known, so that this
        step should be plain."""
        one = self._newest(num_sequences)
        if one is None or not self.is_known(num_sequences):
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
    cost_s: float
    """Seconds by which the call and its nodes made the step longer than a plain one."""


class CallBudget:
    """Decides whether one proposer is called in batches of one size class, and for how many
    sequences.

    Args:
        share: share of the serving time that calls without gain may cost.
        credit_s: initial credit in seconds.
        width: number of sequences of the first calls.
        pause_s: credit in seconds that is earned by serving before the first call.
    """

    def __init__(self, share: float, credit_s: float, width: int, pause_s: float = 0.0) -> None:
        self.credit_s = credit_s
        self.width = width
        self.num_trials = 0
        self._share = share
        self._most_s = credit_s + pause_s
        self._least_s = credit_s + pause_s if pause_s else 0.0
        """Credit in seconds that the next trial needs."""
        self._owed_s = 0.0
        """Seconds of bookkeeping that no trial has paid for."""
        self._num_left = 0
        """Number of calls that are still to come before it is judged whether they go on."""
        self._lowest_s = 0.0
        """Lowest credit in seconds after a call that was not judged."""
        self._num_tasks = self._num_accepted = 0
        """Sequences and accepted tokens of the calls of this width in this trial."""

    @property
    def blocked_s(self) -> float:
        """Seconds to be served before the next call; 0.0 if it is possible now."""
        if self._num_left > 0 or self.credit_s >= self._least_s:
            return 0.0
        missing_s = self._least_s - self.credit_s
        return missing_s / self._share if self._share > 0.0 else float("inf")

    def take_call(self) -> int:
        """Return the number of sequences to call the proposer for in this step, and count the call;
        0: no call."""
        if self._num_left == 0:
            if self.credit_s < self._least_s:
                return 0
            self.credit_s -= self._owed_s
            self._least_s = self._owed_s = 0.0
            self.num_trials += 1
            self._num_left, self._lowest_s = TRIAL, float("inf")
            self._num_tasks = self._num_accepted = 0
        self._num_left -= 1
        return self.width

    def return_call(self) -> None:
        """Undo the last `take_call`, whose step is computed again or was cancelled: no `on_call`
        follows."""
        self._num_left += 1

    def on_served(self, seconds: float) -> None:
        """Credit the duration of a step, drafts included."""
        self.credit_s = min(self.credit_s + self._share * seconds, self._most_s)

    def owe(self, seconds: float) -> None:
        """Add the seconds of bookkeeping of a step without a call; the next trial pays for them.
        Charging them at once would postpone a due call with each step."""
        self._owed_s = min(self._owed_s + seconds, _OWED_STEPS * seconds)

    def on_call(self, load: StepEstimate, call: ProposerCall) -> None:
        """Record the result of a call in this step, and decide whether the next ones follow."""
        self._most_s = _BANK_STEPS * load.plain_s
        gain_s = call.num_accepted * load.token_s - call.cost_s
        self.credit_s = min(self.credit_s + gain_s, self._most_s)
        self._num_tasks += call.num_tasks
        self._num_accepted += call.num_accepted
        accepted = self._num_accepted / self._num_tasks * load.num_sequences
        is_promising = accepted * load.token_s > call.cost_s
        if is_promising and self.width < load.num_sequences:
            self.width = min(self.width * _GROWTH, 1 << size_class(load.num_sequences))
        if self._num_left > 0:
            self._lowest_s = min(self._lowest_s, self.credit_s)
        elif self.credit_s >= 0.0 or self.credit_s > self._lowest_s:
            self._num_left = 1
        else:
            self._least_s = _AGAIN_STEPS * load.plain_s
            if not is_promising:
                self.width = max(self.width // _GROWTH, 1)


@dataclass(slots=True)
class _SizeClass:
    """A class of batch sizes."""

    budgets: list[CallBudget]
    """By proposer."""
    sleep_s: float = 0.0
    """Seconds to be served until its sleep ends; not positive: it is awake."""

    @property
    def blocked_s(self) -> float:
        """Seconds to be served before the next call of some proposer."""
        return min(budget.blocked_s for budget in self.budgets)

    def on_served(self, seconds: float) -> None:
        """Credit the duration of a step."""
        self.sleep_s -= seconds
        for budget in self.budgets:
            budget.on_served(seconds)


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
        self._num_proposers = num_proposers
        self._classes: dict[int, _SizeClass] = {}
        """Those for which a call was possible, by `size_class`."""
        self._step_times = PlainStepTimes(measures_again=measures_again)
        self._cost = StepCost()
        """Of steps that are not launched ahead."""
        self.load = StepEstimate(1, 1, 1.0, 1.0, 0.0)
        self._num_sequences = self._num_rows = 0
        self._widths: dict[int, int] = {}
        """Number of sequences to call for, by proposer."""
        self._num_tasks: dict[int, int] = {}
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
        one = self._class(num_sequences)
        return one is not None and one.sleep_s > 0.0

    def on_slept_step(self, num_sequences: int, seconds: float) -> None:
        """Record the duration of a step for which `is_asleep` was true."""
        self._classes[size_class(num_sequences)].on_served(seconds)

    def is_idle(self, num_sequences: int) -> bool:
        """Whether no proposer would be called in a step of `num_sequences` sampling sequences, and
        nothing would be measured that a launched step does not show. Changes nothing."""
        if self._always:
            return False
        one = self._class(num_sequences)
        is_blocked = num_sequences == 0 or (one is not None and one.blocked_s > 0.0)
        return is_blocked or not self._step_times.is_known(num_sequences)

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
        self._widths.clear()
        self._num_tasks.clear()
        self._num_sequences, self._num_rows = num_sequences, num_rows
        one = self._class(num_sequences)
        if num_sequences == 0 or (one is not None and one.blocked_s > 0.0):
            return False
        base_s, row_s = self._cost.line(num_sequences)
        plain_s = self._step_times.seconds(num_sequences, row_s)
        # What rows cost is learnt without prompts, and what it costs beside them is not measured.
        knows_rows = self._cost.knows_rows(num_sequences)
        may_draft = num_rows == num_sequences or knows_rows
        if plain_s is None or not may_draft or not can_draft:
            return False
        step_s = plain_s
        if not knows_rows:
            row_s = max(row_s, _ROWS_SHARE * plain_s / num_sequences)
        elif self._step_times.is_launched(num_sequences):
            step_s = max(plain_s, base_s + row_s * num_sequences)
        self.load = StepEstimate(num_sequences, num_rows, plain_s, step_s, row_s)
        if one is None:
            first = max(1, _CATCH_UP * num_sequences // max(num_tokens, 1))
            one = self._open(self.load, first)
        for proposer, budget in enumerate(one.budgets):
            width = budget.take_call()
            if width > 0:
                self._widths[proposer] = min(width, num_sequences)
        return bool(self._widths)

    def cancel_step(self) -> None:
        """Undo `begin_step` for a step that failed or is computed again."""
        for proposer in self._widths:
            self._classes[size_class(self._num_sequences)].budgets[proposer].return_call()
        self._widths.clear()

    def select_sequences(self, sequences: Sequence[_Task]) -> Sequence[_Task]:
        """Return the sequences that some proposer is called for: other ones in each trial."""
        if self._always:
            return sequences
        width = max(self._widths.values(), default=0)
        if width >= len(sequences):
            return sequences
        proposer = max(self._widths, key=self._widths.__getitem__)
        budget = self._classes[size_class(self._num_sequences)].budgets[proposer]
        first = budget.num_trials % len(sequences)
        return [sequences[(first + place) % len(sequences)] for place in range(width)]

    def select_tasks(self, proposer: int, tasks: Sequence[_Task]) -> Sequence[_Task]:
        """Return the first of `select_sequences` that this proposer is called for; may be empty."""
        if self._always:
            return tasks
        width = min(self._widths.get(proposer, 0), len(tasks))
        self._num_tasks[proposer] = width
        return tasks[:width]

    def _class(self, num_sequences: int) -> _SizeClass | None:
        return self._classes.get(size_class(num_sequences)) if num_sequences else None

    def _open(self, load: StepEstimate, first: int) -> _SizeClass:
        """Open the budgets of a size class.

        Args: first: largest number of sequences of the first calls of a small batch.
        """
        place = size_class(load.num_sequences)
        is_small = load.num_sequences <= FEW
        width = min(first, 1 << place) if is_small else 1
        share, credit_s = PROBE_SHARE / self._num_proposers, GRANT_STEPS * load.plain_s
        # Where steps are not launched ahead, as on a CPU, drafts rarely pay for a large batch.
        is_launched = self._step_times.is_launched(load.num_sequences)
        pause_s = 0.0 if is_small or is_launched else _AGAIN_STEPS * load.plain_s
        budgets = [CallBudget(share, credit_s, width, pause_s) for _ in range(self._num_proposers)]
        self._classes[place] = one = _SizeClass(budgets)
        return one

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
        one = self._class(num_sequences)
        if one is not None:
            one.on_served(seconds)
        if not is_first and not is_last:
            self._step_times.observe(num_sequences, seconds, is_launched=True)

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
        one = self._class(num_sequences)
        if one is not None:
            one.on_served(seconds)
        is_whole = self._num_rows == num_sequences  # nothing but decodes
        seconds -= beside_s
        if not own_s or one is None:
            if is_whole:
                self._cost.observe(num_rows, seconds)
                self._step_times.observe(num_sequences, seconds)
            if one is not None:
                for budget in one.budgets:
                    budget.owe(beside_s / len(one.budgets))
                if is_whole:
                    one.sleep_s = one.blocked_s - _AWAKE_STEPS * seconds
            return
        load = self.load
        step_s = seconds - sum(own_s.values())
        longer_s = load.row_s * (num_rows - load.num_rows)
        if is_whole:
            self._cost.observe(num_rows, step_s)
            self._step_times.on_drafted(num_sequences)
            if num_rows > load.num_rows or self._step_times.is_launched(num_sequences):
                # Rows make no step shorter: one that seems so says that plain ones were measured
                # in a bad moment (an engine's first), and would be taken for gain.
                usual_s = load.step_s + longer_s
                longer_s = max(min(step_s, _OUTLIER * usual_s) - load.plain_s, 0.0)
        beside_s += longer_s
        for proposer, one_s in own_s.items():
            cost_s = one_s + beside_s / len(own_s)
            call = ProposerCall(self._num_tasks[proposer], num_accepted[proposer], cost_s)
            one.budgets[proposer].on_call(load, call)

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
