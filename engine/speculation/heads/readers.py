"""Readers: those of the drafters that go by hidden states, and what a step must keep for them.
Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from engine.models.interface import LoadedModel
from engine.schedule.order import Key
from engine.sequence import Sequence as Sample
from engine.speculation.drafter import Drafter, Guess
from engine.speculation.heads.hidden import ReadsHidden, Wants
from engine.speculation.heads.kept import computed
from engine.step_builder import Step


class Readers:
    """See the module.

    Args:
        failed: numbers of drafters that are not asked any more; grows.
        fail: one has failed, with the exception that is being handled.
        meet: called with each sample that they hear of, before they do.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        failed: Collection[int],
        fail: Callable[[int], None],
        meet: Callable[[Sample], None],
    ) -> None:
        self._all = {
            index: drafter
            for index, drafter in enumerate(drafters)
            if isinstance(drafter, ReadsHidden)
        }
        self._failed = failed
        self._fail = fail
        self._meet = meet

    @property
    def wants(self) -> Wants:
        """What some of them can use."""
        return max((one.wants for one in self._live().values()), default=Wants.NONE)

    def see(
        self,
        step: Step,
        planned: Sequence[tuple[Sample, int]],
        guesses: Mapping[Key, Guess],
        model: LoadedModel,
    ) -> None:
        """A step that kept what `wants` said, once it is booked. See kept.computed."""
        if self.wants is Wants.NONE:
            return
        seen = computed(step, planned, guesses, model)
        for sample, _ in seen:
            self._meet(sample)
        for index, reader in self._live().items():
            try:
                reader.see([one for _, one in seen])
            except Exception:
                self._fail(index)

    def _live(self) -> dict[int, ReadsHidden]:
        if not self._failed:
            return self._all
        return {index: one for index, one in self._all.items() if index not in self._failed}
