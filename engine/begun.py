"""BegunStep: a plain step whose forward pass is queued and whose sampling is queued later, when its
result is asked for: by then the outputs of the step before are sent, and the device is still
busy with the forward pass. It schedules nothing and changes no sequence. Engine thread only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from typing import TYPE_CHECKING

import torch

from engine.in_flight import StepRow
from engine.sampling.host_device_copies import StreamMark
from engine.sampling.metadata import LATE, SamplerOutput, SamplingRequest
from engine.sampling.sampler import Sampler
from engine.sequence import Key, Sequence
from engine.speculation.proposer import DraftTokens
from engine.step_builder import Step

if TYPE_CHECKING:
    from engine.grammar_constraints import Masks


class BegunStep:
    """A plain step whose forward pass is queued (implements in_flight.Begun).

    Attributes:
        planned: (sequence, number of its tokens) of each sequence.
        drafts: the draft tokens after a sequence's last token.
        logits: [R, V], the rows to sample from, valid until the next forward pass.
        all_logits: all rows of the batch, those of scored prompts included.

    Args: copied: the point after copies that were queued before the forward pass and not waited
        for; None: there were none.
    """

    def __init__(
        self,
        planned: list[tuple[Sequence, int]],
        drafts: Mapping[Key, DraftTokens],
        step: Step,
        logits: torch.Tensor,
        masks: Masks | None,
        copied: StreamMark | None,
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
        """Return the slots that the step writes, by sequence. For a step in which each sample
        computes its last token."""
        return [
            (one, StepRow(one.key, span.start, span.num_tokens, span.block_ids))
            for (one, _), span in zip(self.planned, self.step.batch.spans, strict=True)
        ]

    def wait_for_copies(self) -> None:
        """Wait for the copies that were queued before the forward pass."""
        if self._copied is not None:
            self._copied.wait()

    def begin_draws(self) -> None:
        """Queue the sampling."""
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
        """Wait for the step. Returns: the samples from the logits of all rows that are not
        beams'."""
        self.begin_draws()
        assert self._drawing is not None
        return self._drawing()

    def wait(self) -> None:
        """Wait until the step no longer touches the cache; its samples are dropped."""
        StreamMark(self.logits.device).wait()

    def of_live(
        self, drawn: list[SamplerOutput], live: Set[Key]
    ) -> tuple[list[tuple[Sequence, int]], list[SamplerOutput], Mapping[Key, DraftTokens]]:
        """Return the parts of plan, samples and drafts that belong to live sequences."""
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
    """Merge the sampled outputs with LATE for each row whose mask was not ready."""
    found = iter(drawn)
    return [LATE if one is None else next(found) for one in masked]


def may_be_early(sequences: Iterable[Sequence]) -> bool:
    """Return whether the sequences' next step needs nothing but their last sampled tokens, and may
    run as a CUDA graph, which excludes adapters."""
    return all(
        one.grammar is None and one.request.beam is None and not one.group.adapter_slot
        for one in sequences
    )
