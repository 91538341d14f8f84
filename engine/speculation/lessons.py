"""Lessons: what each drafter believed of its guesses for a step, and what it is taught by what came
of them: how far it can be believed from then on (`Calibration`).

What is heard of a step is learnt while the device computes the next one (`study`), so that nothing
waits for it: a tree is calibrated by what came of all steps but the one right before it. Which
those are depends on the order of steps alone, on no clock and on no caller. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from engine.outputs import RequestOutput
from engine.sequence import Key
from engine.speculation.expansion import Calibration, calibrated, observe_tree
from engine.speculation.tree import TokenTree


class _Belief(NamedTuple):
    key: Key
    drafter: int
    tree: TokenTree
    """The drafter's own, before all choice."""


class _Outcome(NamedTuple):
    """Of a step."""

    believed: Sequence[_Belief]
    events: Sequence[RequestOutput]
    num_kept: Mapping[Key, int]


class Lessons:
    """See the module. Drafters are numbers."""

    def __init__(self, num_drafters: int) -> None:
        self._calibrations = [Calibration() for _ in range(num_drafters)]
        self._believed: list[_Belief] = []
        """Of the step that is being computed."""
        self._unlearnt: _Outcome | None = None

    def begin(self) -> None:
        """Of a step: nobody has guessed for it."""
        self._believed = []

    def note(self, key: Key, drafter: int, tree: TokenTree) -> None:
        """A drafter has this tree for one sequence in this step."""
        self._believed.append(_Belief(key, drafter, tree))

    def calibrated(self, drafter: int, tree: TokenTree) -> TokenTree:
        """Its tree, with chances that can be believed."""
        return calibrated(tree, self._calibrations[drafter])

    def prepare(self) -> None:
        """While the step is computed: what its outcome will be held against is made ready."""
        for one in self._believed:
            one.tree.prepare()

    def hear(self, events: Sequence[RequestOutput], num_kept: Mapping[Key, int]) -> None:
        """The step is over.

        Args:
            events: of it.
            num_kept: of each guess, how many nodes.
        """
        self.study()
        if self._believed:
            self._unlearnt = _Outcome(self._believed, events, num_kept)

    def num_right(self, drafters: Iterable[int]) -> dict[int, int]:
        """Of the step that was just heard of: kept tokens that each of these had guessed."""
        num_right = dict.fromkeys(drafters, 0)
        if self._unlearnt is not None:
            for one, token_ids in _judged(self._unlearnt):
                num_right[one.drafter] += one.tree.num_followed(token_ids[:-1])
        return num_right

    def study(self) -> None:
        """Learn what was heard, if that was not done yet. Somebody has the time now."""
        unlearnt, self._unlearnt = self._unlearnt, None
        if unlearnt is not None:
            for one, token_ids in _judged(unlearnt):
                observe_tree(self._calibrations[one.drafter], one.tree, token_ids)


def _judged(outcome: _Outcome) -> Iterator[tuple[_Belief, Sequence[int]]]:
    """Trees that something came in place of, and what."""
    believed, events, num_kept = outcome
    told = {(event.request_id, event.sample_index): event.token_ids for event in events}
    for one in believed:
        # After those that were kept one more is known to be the model's: it judges all guesses of
        # it, those that were not computed, too, so that a drafter can win its trust back.
        token_ids = told.get(one.key, ())[: num_kept.get(one.key, 0) + 1]
        if token_ids:
            yield one, token_ids
