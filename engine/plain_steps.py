"""PlainSteps: plain steps up to their draws: what is guessed for them, the model's input, the
forward pass. Schedules nothing, books nothing. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Values

from engine.begun import BegunStep
from engine.constraints import Constraints
from engine.in_flight import InFlight
from engine.kv.memory import KvMemory
from engine.models.interface import LoadedModel
from engine.sampling.copies import Mark
from engine.sampling.sampler import Sampler
from engine.sequence import Key, Sequence
from engine.speculation.drafter import Guess
from engine.speculation.heads.hidden import Wants
from engine.speculation.speculator import Speculator
from engine.step_builder import Step, build


class PlainSteps:
    """See the module."""

    def __init__(
        self,
        model: LoadedModel,
        kv: KvMemory,
        constraints: Constraints,
        in_flight: InFlight,
        speculator: Speculator | None,
        *,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._model = model
        self._kv = kv
        self._constraints = constraints
        self._in_flight = in_flight
        self._speculator = speculator
        self._eos_token_ids = eos_token_ids
        self._sampler = Sampler()

    def begin(
        self, planned: list[tuple[Sequence, int]], running: Mapping[Key, Sequence]
    ) -> BegunStep:
        """Queue a plan's forward pass. An exception leaves every sequence as it was."""
        guesses = self._guess(planned, running)
        try:
            return self._forward(planned, guesses, self._build(planned, guesses))
        except BaseException:
            self.take_back(planned, guesses)
            raise

    def begin_queued(
        self, planned: list[tuple[Sequence, int]], running: Mapping[Key, Sequence]
    ) -> BegunStep | None:
        """`begin`, if the host is done with it at once (LoadedModel.queues_step). None: it is not,
        and nothing was begun."""
        guesses = self._guess(planned, running)
        try:
            step = self._build(planned, guesses)
            if self._model.queues_step(step.batch):
                return self._forward(planned, guesses, step)
        except BaseException:
            self.take_back(planned, guesses)
            raise
        self.take_back(planned, guesses)
        return None

    def take_back(
        self, planned: Values[tuple[Sequence, int]], guesses: Mapping[Key, Guess]
    ) -> None:
        """It failed, or nobody wants it."""
        if self._speculator is not None:
            self._speculator.take_back(planned, guesses)

    def _guess(
        self, planned: list[tuple[Sequence, int]], running: Mapping[Key, Sequence]
    ) -> Mapping[Key, Guess]:
        return {} if self._speculator is None else self._speculator.guess(planned, running)

    def _build(self, planned: list[tuple[Sequence, int]], guesses: Mapping[Key, Guess]) -> Step:
        readers = None if self._speculator is None else self._speculator.readers
        wants = Wants.NONE if readers is None else readers.wants
        return build(
            planned,
            self._kv,
            self._eos_token_ids,
            guesses,
            clears_entered=self._model.reads_unwritten,
            wants_hidden=wants,
            wants_layers=readers.layers if readers is not None and wants else (),
        )

    def _forward(
        self, planned: list[tuple[Sequence, int]], guesses: Mapping[Key, Guess], step: Step
    ) -> BegunStep:
        copied = Mark(self._kv.device) if self._in_flight.has_copied else None
        masks = self._constraints.begin_masks(step.grammars) if step.has_grammars else None
        try:
            logits = self._model.forward(step.batch)
        except BaseException:
            if masks is not None:
                masks.wait()  # they are made of states that the next step will touch
            raise
        return BegunStep(planned, guesses, step, logits, masks, copied, self._sampler)
