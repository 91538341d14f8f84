"""Lessons: what each drafter believed of its guesses for the step that is being computed, and what
it is taught by what came of them: how far it can be believed from then on (`Calibration`).

How many guesses were right is known at once; what follows from that for later ones is learnt while
the device computes the next step (`study`): the first tree after a step is calibrated by what was
learnt of those before it. Which steps' lessons a tree knows depends on the order of steps alone,
on no clock and on no caller. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from engine.schedule.order import Key
from engine.speculation.expansion import Calibration, calibrated, observe_tree
from engine.speculation.tree import TokenTree
from engine.step_output import RequestEvent


class Lessons:
    """See the module. Drafters are numbers."""

    def __init__(self, num_drafters: int) -> None:
        self._calibrations = [Calibration() for _ in range(num_drafters)]
        self._believed: list[tuple[Key, int, TokenTree]] = []
        """Of the step that is being computed: drafters' own trees, before all choice."""
        self._unlearnt: list[tuple[Calibration, TokenTree, Sequence[int]]] = []
        """Of the step before it: trees, and what came in their place."""

    def begin(self) -> None:
        """Of a step: nobody has guessed for it."""
        self._believed = []

    def believe(self, key: Key, drafter: int, tree: TokenTree) -> TokenTree:
        """A drafter's tree for one sequence in this step. Returns: it, with chances that can be
        believed."""
        self._believed.append((key, drafter, tree))
        return calibrated(tree, self._calibrations[drafter])

    def prepare(self) -> None:
        """While the step is computed: what its outcome will be held against is made ready."""
        for _, _, tree in self._believed:
            tree.prepare()

    def hear(
        self,
        drafters: Iterable[int],
        events: Iterable[RequestEvent],
        num_kept: Mapping[Key, int],
    ) -> dict[int, int]:
        """The step is over.

        Args:
            drafters: that were asked.
            events: of the step.
            num_kept: of each guess, how many nodes.
        Returns: kept tokens that each of the drafters had guessed.
        """
        self.study()
        num_right = dict.fromkeys(drafters, 0)
        if not self._believed:
            return num_right
        told = {(event.request_id, event.sample_index): event.token_ids for event in events}
        for key, drafter, tree in self._believed:
            # One token more than was kept is known to be the model's: it judges all guesses of it,
            # those that were not computed, too, so that a drafter can win its trust back.
            num_judged = num_kept.get(key, 0)
            token_ids = told.get(key, ())[: num_judged + 1]
            num_right[drafter] += min(tree.num_followed(token_ids), num_judged)
            self._unlearnt.append((self._calibrations[drafter], tree, token_ids))
        return num_right

    def study(self) -> None:
        """Learn what was heard of the step before. Somebody has the time now."""
        unlearnt, self._unlearnt = self._unlearnt, []
        for calibration, tree, token_ids in unlearnt:
            observe_tree(calibration, tree, token_ids)
