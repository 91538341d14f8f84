"""How much is worth guessing: which nodes of this step's trees are computed, by how likely each is
kept and by what a row more costs now; down to none. SpecInfer leaves this choice open (section
3.1); ours:

A step of B sequences gives B tokens, and one more for each kept node: on average the sum of the
nodes' chances. It lasts `base_s + row_s * rows`. So nodes are taken from the likeliest on while
each raises tokens per second. What a drafter believes of its nodes is corrected by what became of
such nodes before (`Calibration`).

Policy: pure functions over values, and two running averages that nobody else writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.speculation.tree import ROOT, TokenTree

_NUM_BINS = 16
_PRIOR = 8.0
"""So many observations weigh as much as the drafter's own belief; guessed."""
_MEMORY = 400.0
"""Observations of a bin after which older ones count for little; guessed."""


class Calibration:
    """How often nodes were kept whose parent was, by the chance that one drafter gave them."""

    def __init__(self) -> None:
        self._num_seen = [0.0] * _NUM_BINS
        self._num_kept = [0.0] * _NUM_BINS

    def observe(self, belief: float, *, is_kept: bool) -> None:
        """A node with this chance, given its parent was kept, was put to the test."""
        place = _bin(belief)
        fading = 1.0 - 1.0 / _MEMORY
        self._num_seen[place] = self._num_seen[place] * fading + 1.0
        self._num_kept[place] = self._num_kept[place] * fading + is_kept

    def chance(self, belief: float) -> float:
        """In [0, 1]: of such a node, given its parent is kept."""
        place = _bin(belief)
        return (self._num_kept[place] + _PRIOR * belief) / (self._num_seen[place] + _PRIOR)


def _bin(belief: float) -> int:
    return min(int(belief * _NUM_BINS), _NUM_BINS - 1)


class StepCost:
    """Seconds of a step by its rows, as `base_s + row_s * rows`: a line through what was measured,
    older steps fading. Until it has seen steps of different sizes, a row costs nothing."""

    def __init__(self) -> None:
        self._weight = self._rows = self._seconds = self._rows_2 = self._product = 0.0

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step has lasted so long."""
        fading = 1.0 - 1.0 / _MEMORY
        self._weight = self._weight * fading + 1.0
        self._rows = self._rows * fading + num_rows
        self._seconds = self._seconds * fading + seconds
        self._rows_2 = self._rows_2 * fading + num_rows * num_rows
        self._product = self._product * fading + num_rows * seconds

    def line(self) -> tuple[float, float]:
        """(base_s, row_s), neither negative."""
        if self._weight == 0.0:
            return 1.0, 0.0
        spread = self._weight * self._rows_2 - self._rows * self._rows
        mean_s = self._seconds / self._weight
        if spread <= 1e-9 * self._weight * self._rows_2:
            return mean_s, 0.0
        slope = (self._weight * self._product - self._rows * self._seconds) / spread
        row_s = min(max(slope, 0.0), mean_s * self._weight / self._rows)
        return mean_s - row_s * self._rows / self._weight, row_s


@dataclass(frozen=True)
class Load:
    """What a step is without guesses."""

    num_sequences: int
    """That draw a token in it."""
    num_rows: int
    """All tokens of it, those of prompts included; at least `num_sequences`."""
    base_s: float
    row_s: float


def choose(trees: Sequence[TokenTree], load: Load, max_num_nodes: int) -> list[TokenTree]:
    """The nodes of each tree that are worth their rows.

    Args:
        trees: with chances that can be believed.
        max_num_nodes: of all trees together.
    Returns: as many trees, some maybe empty. More nodes never mean fewer tokens per second by the
        same reckoning, and no node is taken without its parent.
    """
    nodes = sorted(
        (-chance, index, node)
        for index, tree in enumerate(trees)
        for node, chance in enumerate(tree.chances)
    )
    num_tokens = float(load.num_sequences)
    seconds = load.base_s + load.row_s * load.num_rows
    counts = [0] * len(trees)
    for negative, index, _ in nodes[: max(max_num_nodes, 0)]:
        # Worth it while what it adds per second is more than what the step has per second.
        if -negative * seconds <= num_tokens * load.row_s:
            break
        num_tokens -= negative
        seconds += load.row_s
        counts[index] += 1
    return [tree.best(count) for tree, count in zip(trees, counts, strict=True)]


class Worth:
    """Whether to ask a drafter: what its calls brought, against what they cost."""

    def __init__(self) -> None:
        self._num_kept = self._cost_s = 0.0
        self._num_calls = self._num_passed = 0

    def observe(self, num_kept: int, cost_s: float) -> None:
        """A call has brought so many tokens and cost so long, the rows of its nodes included."""
        self._num_calls += 1
        share = max(1.0 / self._num_calls, 1.0 / _CALLS)
        self._num_kept += (num_kept - self._num_kept) * share
        self._cost_s += (cost_s - self._cost_s) * share

    def is_asked(self, load: Load) -> bool:
        """Tokens per second are more with it than without, by what was seen; or it is tried again,
        once in `_TRIES` steps."""
        seconds = load.base_s + load.row_s * load.num_rows
        pays = self._num_kept * seconds >= load.num_sequences * self._cost_s
        if pays or self._num_calls < _CALLS or self._num_passed >= _TRIES:
            self._num_passed = 0
            return True
        self._num_passed += 1
        return False


_CALLS = 16
"""Calls of a drafter that its average is about; guessed."""
_TRIES = 64
"""Steps after which a drafter that did not pay is asked again; guessed."""


def calibrated(tree: TokenTree, calibration: Calibration) -> TokenTree:
    """The tree with chances by what was seen."""
    chances: list[float] = []
    for parent, believed in zip(tree.parents, tree.chances, strict=True):
        above = 1.0 if parent == ROOT else tree.chances[parent]
        chance = calibration.chance(believed / above if above > 0.0 else 0.0)
        chances.append(min(chance, 1.0) * (1.0 if parent == ROOT else chances[parent]))
    return TokenTree(tree.token_ids, tree.parents, tuple(chances), tree.tries)
