"""BegunStep: a plain step between its forward pass, which is queued, and its draws. They are queued
when somebody asks for them: by then the events of the step before are told, and a step takes the
device much longer than that. Knows no scheduling, books nothing. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import TYPE_CHECKING

import torch

from engine.in_flight import StepRow
from engine.sampling.copies import Mark
from engine.sampling.metadata import LATE, SamplerOutput, SamplingRequest
from engine.sampling.sampler import Sampler
from engine.sequence import Key, Sequence
from engine.speculation.proposer import DraftTokens
from engine.step_builder import Step

if TYPE_CHECKING:
    from engine.constraints import Masks


class BegunStep:
    """See the module, and in_flight.Begun.

    Attributes:
        planned: (sequence, number of its tokens).
        drafts: draft tokens after the last of them.
        logits: [R, V] of what is drawn, which hold until the next forward pass.
        all_logits: with those of scored prompts, row by row as the batch has them.

    Args:
        copied: before the forward pass, and nobody has waited for it.
    """

    def __init__(
        self,
        planned: list[tuple[Sequence, int]],
        drafts: Mapping[Key, DraftTokens],
        step: Step,
        logits: torch.Tensor,
        masks: Masks | None,
        copied: Mark | None,
        sampler: Sampler,
    ) -> None:
        self.planned = planned
        self.drafts = drafts
        self.step = step
        self.all_logits = logits
        self.logits = step.drawn_of(logits)
        self._masks = masks
        self._copied = copied
        self._sampler = sampler
        self._drawing: Callable[[], list[SamplerOutput]] | None = None

    def rows(self) -> list[tuple[Sequence, StepRow]]:
        """What it writes, of whom. For a step in which each sample computes its last token."""
        return [
            (one, StepRow(one.key, span.start, span.num_tokens, span.block_ids))
            for (one, _), span in zip(self.planned, self.step.batch.spans, strict=True)
        ]

    def wait_for_copies(self) -> None:
        """What was copied before it is over."""
        if self._copied is not None:
            self._copied.wait()

    def begin_draws(self) -> None:
        """Queue them."""
        if self._drawing is not None:
            return
        step, draws = self.step, self.step.draws
        if not draws:
            self._drawing = list
            return
        if self._masks is None:
            rows = None if step.is_plain else step.rows
            self._drawing = self._sampler.begin(self.logits, draws, rows).result
            return
        masked = self._masks.masked(draws, step.rows)
        ready = [(one, row) for one, row in zip(masked, step.rows, strict=True) if one is not None]
        pending = self._sampler.begin(
            self.logits, [one for one, _ in ready], [row for _, row in ready]
        )
        self._drawing = lambda: _with_late(pending.result(), masked)

    def draws(self) -> list[SamplerOutput]:
        """See in_flight.Begun: what was drawn from the logits of all rows that are not beams'."""
        self.begin_draws()
        assert self._drawing is not None
        return self._drawing()

    def wait(self) -> None:
        """See in_flight.Begun."""
        Mark(self.logits.device).wait()

    def of_live(
        self, drawn: list[SamplerOutput], live: Set[Key]
    ) -> tuple[list[tuple[Sequence, int]], list[SamplerOutput], Mapping[Key, DraftTokens]]:
        """What of plan, draws and drafts is still wanted."""
        if len(live) == len(self.planned):
            return self.planned, drawn, self.drafts
        planned: list[tuple[Sequence, int]] = []
        own: list[SamplerOutput] = []
        first = 0
        for sequence, num_tokens in self.planned:
            draft = self.drafts.get(sequence.key)
            end = first + 1 + (0 if draft is None else len(draft.tree))
            if sequence.key in live:
                planned.append((sequence, num_tokens))
                own += drawn[first:end]
            first = end
        drafts = {key: draft for key, draft in self.drafts.items() if key in live}
        return planned, own, drafts


def _with_late(
    drawn: list[SamplerOutput], masked: list[SamplingRequest | None]
) -> list[SamplerOutput]:
    """Those that were drawn, and LATE where a mask was."""
    found = iter(drawn)
    return [LATE if one is None else next(found) for one in masked]


def may_be_early(sequences: Iterable[Sequence]) -> bool:
    """Nothing is needed for their next step but what they have drawn; and it may be a graph, which
    none with adapters is."""
    return all(
        one.grammar is None and one.request.beam is None and not one.group.adapter_slot
        for one in sequences
    )
