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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import NamedTuple

from engine.speculation.tree import ROOT, TokenTree

_NUM_BINS = 16
_PRIOR = 8.0
"""So many observations weigh as much as the drafter's own belief; guessed."""
_MEMORY = 400.0
"""Observations of a bin after which older ones count for little; guessed."""

_SIZE_BITS = 4
"""Sizes that are taken together differ by an eighth at most."""
_STEPS = 32.0
"""Steps of a size that its average is about; guessed."""
_KNOWN = 4.0
"""Steps of a size after which one of twice its seconds is an accident; guessed."""
_REACH = 4
_MORE = 16
"""Steps of a quarter to four times the rows, and 16 more, say what a row costs here; guessed."""


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
        return self.chances((ROOT,), (belief,))[0]

    def chances(self, parents: Sequence[int], believed: Sequence[float]) -> tuple[float, ...]:
        """Of a tree's nodes to be kept, with all above them.

        Args:
            parents, believed: of each node; see TokenTree.
        """
        num_seen, num_kept, last = self._num_seen, self._num_kept, _NUM_BINS - 1
        found: list[float] = []
        for parent, belief in zip(parents, believed, strict=True):
            # No calls: of every node, while the device waits.
            if parent != ROOT:
                above = believed[parent]
                belief = belief / above if above > 0.0 else 0.0
            place = int(belief * _NUM_BINS)
            if place > last:
                place = last
            chance = (num_kept[place] + _PRIOR * belief) / (num_seen[place] + _PRIOR)
            if chance > 1.0:
                chance = 1.0
            found.append(chance if parent == ROOT else chance * found[parent])
        return tuple(found)


def _bin(belief: float) -> int:
    return min(int(belief * _NUM_BINS), _NUM_BINS - 1)


class StepCost:
    """Seconds of a step by its rows, as `base_s + row_s * rows`: a line through what was measured
    of steps of about this size. Until it has seen steps of different sizes, a row costs nothing.

    By size, so that what was seldom seen is not forgotten for what is seen all the time, and so
    that steps of a thousand rows have no say in the price of the ninth.
    """

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step has lasted so long."""
        shift = max(0, num_rows.bit_length() - _SIZE_BITS)
        size = self._sizes.setdefault(num_rows >> shift << shift, _Size())
        if size.weight >= _KNOWN:  # the machine did something else, too
            seconds = min(seconds, 2.0 * size.seconds)
        size.weight = min(size.weight + 1.0, _STEPS)
        size.num_rows += (num_rows - size.num_rows) / size.weight
        size.seconds += (seconds - size.seconds) / size.weight

    def knows_rows(self, num_rows: int) -> bool:
        """Near a step of so many rows more than one size was seen."""
        return len({one.num_rows for one in self._near(num_rows)}) > 1

    def _near(self, num_rows: int) -> list[_Size]:
        least, most = num_rows / _REACH, num_rows * _REACH + _MORE
        return [one for one in self._sizes.values() if least <= one.num_rows <= most]

    def line(self, num_rows: int) -> tuple[float, float]:
        """(base_s, row_s), neither negative, near a step of so many rows."""
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
class _Size:
    """Steps of about one size: averages."""

    weight: float = 0.0
    num_rows: float = 0.0
    seconds: float = 0.0


class Load(NamedTuple):
    """What a step is without guesses."""

    num_sequences: int
    """That draw a token in it."""
    num_rows: int
    """All tokens of it, those of prompts included; at least `num_sequences`."""
    base_s: float
    row_s: float

    @property
    def seconds(self) -> float:
        """What it lasts."""
        return self.base_s + self.row_s * self.num_rows

    @property
    def plain_s(self) -> float:
        """What it would last without prompts."""
        return self.base_s + self.row_s * self.num_sequences


def choose(trees: Sequence[TokenTree], load: Load, max_num_nodes: int) -> list[TokenTree]:
    """The nodes of each tree that are worth their rows.

    Args:
        trees: with chances that can be believed.
        max_num_nodes: of all trees together.
    Returns: as many trees, some maybe empty. More nodes never mean fewer tokens per second by the
        same reckoning, and no node is taken without its parent.
    """
    if not any(map(len, trees)):
        return list(trees)  # of a lookup most are so
    # Among equals, those of the first tree: which of its own, `best` says.
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


def calibrated(tree: TokenTree, calibration: Calibration) -> TokenTree:
    """The tree with chances by what was seen."""
    if not len(tree):
        return tree
    return tree.with_chances(calibration.chances(tree.parents, tree.chances))


def observe_tree(calibration: Calibration, tree: TokenTree, token_ids: Iterable[int]) -> None:
    """Each node whose parent was kept, put to the test by the token that came there.

    Args:
        token_ids: the last of them was drawn in any case.
    """
    if not len(tree):
        return
    node, chance = ROOT, 1.0
    for token_id in token_ids:
        for guess, child in tree.children.get(node, {}).items():
            belief = tree.chances[child] / chance if chance > 0.0 else 0.0
            calibration.observe(belief, is_kept=guess == token_id)
        next_node = tree.child(node, token_id)
        if next_node is None:
            break
        node, chance = next_node, tree.chances[next_node]
