"""Group: one live request: its samples, and the state that they share. Engine thread only.

A group has one sequence up to the end of its prompt. There it is forked: the samples share all
blocks so far, and the block with the prompt's last tokens is copied on write while it is shared
(engine/kv/cache_manager.py).

A group that `is_whole` has all blocks that it may ever need from its begin, and is never preempted:
those that its samples have not reached yet are its `spare_block_ids`. With F full prompt blocks,
shared by all, and R more for each sample:

    spare + distinct blocks after the first F of its live samples == live samples * R
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.beam_search import BeamState, Candidates
from engine.request import Request, RequestState
from engine.sampling.token_history import needs_history
from engine.sequence import Sequence

if TYPE_CHECKING:
    from engine.grammar.service import Compilation

_BY_PROGRESS = (
    RequestState.RESERVED,
    RequestState.QUEUED,
    RequestState.WAITING_FOR_GRAMMAR,
    RequestState.RUNNING,
    RequestState.PREFILLING,
    RequestState.WAITING,
    RequestState.SWAPPING,
    RequestState.PARKED,
    RequestState.PREEMPTED,
    RequestState.HOLDING,
)


def may_be_ahead(request: Request) -> bool:
    """Return whether the request's decode steps may be planned before the previous tokens are
    known: sampling does not depend on them, and nothing but the token is read of a step. Its
    adapter is checked separately (LoraManager.is_launched)."""
    sampling = request.sampling
    return (
        request.beam is None
        and request.hold_after is None
        and not request.wants_embedding
        and request.prompt_logprobs is None
        and sampling.grammar is None
        and not needs_history(sampling)
    )


def num_rows(request: Request) -> int:
    """Return the number of rows of a batch that the request has once its samples or beams are
    forked."""
    if request.beam is None:
        return request.num_samples
    return request.beam.num_beams if request.hold_after is None else 1


class Group:
    """One live request: its samples, and the state that they share.

    Attributes:
        samples: the live samples by index; one until the fork.
        first_outputs: output tokens that another engine has sampled, per sample, which are appended
            at the fork.
    """

    def __init__(
        self, request: Request, state: RequestState, *, max_output_tokens: int, is_whole: bool
    ) -> None:
        self.request = request
        self.max_output_tokens = max_output_tokens  # max_tokens, or less where the window ends
        self.is_whole = is_whole
        self.order = 0
        self.adapter_slot = 0
        self.may_be_ahead = may_be_ahead(request)
        self.num_rows = num_rows(request)
        self.is_forked = self.num_rows == 1  # and so it stays
        self.num_own_blocks = 0
        self.spare_block_ids: list[int] = []
        self.beam_start: Candidates = ()
        """The beam search candidates that another engine computed from the prompt."""
        self.beam_state: BeamState | None = None
        self.compilation: Compilation | None = None
        self.unwanted: set[int] = set()
        """Indices of samples that were finished before the fork, which will not create them."""
        self.first_outputs: tuple[tuple[int, ...], ...] = ()
        self.samples: dict[int, Sequence] = {0: Sequence(self, state)}

    @property
    def prompt(self) -> Sequence:
        """The only sequence before the fork."""
        return self.samples[0]

    @property
    def is_continued(self) -> bool:
        """Whether another engine has sampled the tokens after the prompt, so that nothing is
        sampled from its last token."""
        return bool(self.first_outputs or self.beam_start)

    @property
    def num_places(self) -> int:
        """Number of rows that each of its sequences will have: before the fork that of all samples,
        then 1."""
        return 1 if self.is_forked else self.num_rows

    @property
    def state(self) -> RequestState:
        """The state of the request: that of the sample with the most work left."""
        if len(self.samples) == 1:
            for sequence in self.samples.values():
                return sequence.state
        states = {sequence.state for sequence in self.samples.values()}
        return next((state for state in _BY_PROGRESS if state in states), RequestState.FINISHED)
