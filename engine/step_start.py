"""PlainSteps: the first part of plain steps, up to their sampling: draft tokens, the model's input,
and the forward pass. It schedules nothing and applies no results. Engine thread only."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Values

from engine.begun import BegunStep
from engine.grammar_constraints import Constraints
from engine.in_flight import InFlight
from engine.kv.memory import KvMemory
from engine.models.interface import LoadedModel
from engine.sampling.host_device_copies import StreamMark
from engine.sampling.sampler import Sampler
from engine.sequence import Key, Sequence
from engine.speculation.manager import SpeculationManager
from engine.speculation.proposer import DraftTokens, HiddenStateScope
from engine.step_builder import Step, build


class PlainSteps:
    """Begins plain steps."""

    def __init__(
        self,
        model: LoadedModel,
        kv: KvMemory,
        constraints: Constraints,
        in_flight: InFlight,
        speculation: SpeculationManager | None,
        *,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._model = model
        self._kv = kv
        self._constraints = constraints
        self._in_flight = in_flight
        self._speculation = speculation
        self._eos_token_ids = eos_token_ids
        self._sampler = Sampler()

    def begin(
        self, planned: list[tuple[Sequence, int]], running: Mapping[Key, Sequence]
    ) -> BegunStep:
        """Queue the forward pass of a plan. An exception leaves every sequence as it was."""
        drafts = self._propose(planned, running)
        try:
            return self._forward(planned, drafts, self._build(planned, drafts))
        except BaseException:
            self.discard(planned, drafts)
            raise

    def begin_queued(
        self, planned: list[tuple[Sequence, int]], running: Mapping[Key, Sequence]
    ) -> BegunStep | None:
        """Queue the forward pass of a plan if that returns at once (LoadedModel.queues_step).
        Returns: None if it does not, and nothing was queued."""
        drafts = self._propose(planned, running)
        try:
            step = self._build(planned, drafts)
            if self._model.queues_step(step.batch):
                return self._forward(planned, drafts, step)
        except BaseException:
            self.discard(planned, drafts)
            raise
        self.discard(planned, drafts)
        return None

    def discard(
        self, planned: Values[tuple[Sequence, int]], drafts: Mapping[Key, DraftTokens]
    ) -> None:
        """Free the draft tokens of a step that failed or is not needed any more."""
        if self._speculation is not None:
            self._speculation.discard(planned, drafts)

    def _propose(
        self, planned: list[tuple[Sequence, int]], running: Mapping[Key, Sequence]
    ) -> Mapping[Key, DraftTokens]:
        return {} if self._speculation is None else self._speculation.propose(planned, running)

    def _build(
        self, planned: list[tuple[Sequence, int]], drafts: Mapping[Key, DraftTokens]
    ) -> Step:
        speculation = self._speculation
        scope = HiddenStateScope.NONE if speculation is None else speculation.hidden_state_scope
        return build(
            planned,
            self._kv,
            self._eos_token_ids,
            drafts,
            clears_entered=self._model.reads_unwritten,
            wants_hidden=scope,
            wants_layers=speculation.aux_layers if speculation is not None and scope else (),
        )

    def _forward(
        self, planned: list[tuple[Sequence, int]], drafts: Mapping[Key, DraftTokens], step: Step
    ) -> BegunStep:
        copied = StreamMark(self._kv.device) if self._in_flight.has_copied else None
        masks = self._constraints.begin_masks(step.grammars) if step.has_grammars else None
        try:
            logits = self._model.forward(step.batch)
        except BaseException:
            if masks is not None:
                masks.wait()  # they are made of states that the next step will touch
            raise
        return BegunStep(planned, drafts, step, logits, masks, copied, self._sampler)
