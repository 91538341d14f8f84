"""Readers: those of the drafters that go by hidden states, and what a step must keep for them.
Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engine.models.interface import LoadedModel
from engine.sequence import Key
from engine.sequence import Sequence as Sample
from engine.speculation.drafter import Drafter, Guess
from engine.speculation.heads.hidden import ReadsHidden, Wants
from engine.speculation.heads.kept import computed
from engine.speculation.roster import Roster
from engine.step_builder import Step


class Readers:
    """See the module.

    Args:
        roster: of the same drafters.
        clock: what they cost is measured by.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        roster: Roster,
        clock: Callable[[], float],
    ) -> None:
        self._all = {
            index: drafter
            for index, drafter in enumerate(drafters)
            if isinstance(drafter, ReadsHidden)
        }
        self._roster = roster
        self._clock = clock

    @property
    def wants(self) -> Wants:
        """What some of them can use."""
        if not self._all:
            return Wants.NONE
        return max((one.wants for one in self._live().values()), default=Wants.NONE)

    @property
    def layers(self) -> tuple[int, ...]:
        """Whose inputs some of them can use."""
        if not self._all:
            return ()
        return tuple(sorted({layer for one in self._live().values() for layer in one.layers}))

    def see(
        self,
        step: Step,
        planned: Sequence[tuple[Sample, int]],
        guesses: Mapping[Key, Guess],
        model: LoadedModel,
    ) -> dict[int, float]:
        """A step that kept what `wants` said, once it is booked: whatever fails here may cost
        readers, never what the step drew. See kept.computed. Returns: seconds that it took, by
        number of the drafter."""
        if not self._all:
            return {}
        live = dict(self._live())
        if not live:
            return {}
        began_s = self._clock()
        try:
            seen = computed(step, planned, guesses, model)
            for sample, _ in seen:
                self._roster.meet(sample)
        except Exception:
            for index in live:
                self._roster.fail(index)
            return {}
        gathered_s = (self._clock() - began_s) / len(live)
        own_s: dict[int, float] = {}
        for index, reader in live.items():
            began_s = self._clock()
            try:
                if index in self._roster.failed:  # since the step ended
                    continue
                reader.see([one for _, one in seen])
            except Exception:
                self._roster.fail(index)
            own_s[index] = self._clock() - began_s + gathered_s
        return own_s

    def _live(self) -> dict[int, ReadsHidden]:
        if not self._roster.failed:
            return self._all
        return {index: one for index, one in self._all.items() if index not in self._roster.failed}
