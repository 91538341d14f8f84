"""Group: one live request: its samples, and what they have in common. Engine thread only.

A group has one sequence up to its prompt's end. There it forks: one for each sample, which share
all blocks so far; the block that holds the prompt's last tokens is copied by whoever writes it
while another has it, too (engine/kv/cache_manager.py).

A group that `is_whole` took all blocks that it may ever need before it began, and is never
preempted: those its samples have not come to yet are its `spare_block_ids`. With F full prompt
blocks, shared by all, and R more for each sample:

    spare + distinct blocks after the first F of its live samples == live samples * R
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.beam_search import BeamState, Candidates
from engine.request import Request, State
from engine.sampling.token_history import needs_history
from engine.sequence import Sequence

if TYPE_CHECKING:
    from engine.grammar.service import Compilation

_BY_PROGRESS = (
    State.RESERVED,
    State.QUEUED,
    State.WAITING_FOR_GRAMMAR,
    State.RUNNING,
    State.PREFILLING,
    State.WAITING,
    State.SWAPPING,
    State.PARKED,
    State.PREEMPTED,
    State.HOLDING,
)


def may_be_ahead(request: Request) -> bool:
    """Its decode steps may be planned before their tokens are known: no token before has a say in
    what is drawn, and nobody needs to look at it in between, or at more than the token. Whether
    they are launched with its adapter is to be asked beside (LoraManager.is_launched)."""
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
    """Rows of a batch that the request takes once its samples or beams part."""
    if request.beam is None:
        return request.num_samples
    return request.beam.num_beams if request.hold_after is None else 1


class Group:
    """See the module.

    Attributes:
        samples: the live ones, by index; one until the fork.
        first_outputs: tokens that an earlier leg drew, per sample, to be taken at the fork.
    """

    def __init__(
        self, request: Request, state: State, *, max_output_tokens: int, is_whole: bool
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
        """What an earlier leg made of the prompt."""
        self.beam_state: BeamState | None = None
        self.compilation: Compilation | None = None
        self.unwanted: set[int] = set()
        """Samples that nobody wants, before the fork that would make them."""
        self.first_outputs: tuple[tuple[int, ...], ...] = ()
        self.samples: dict[int, Sequence] = {0: Sequence(self, state)}

    @property
    def prompt(self) -> Sequence:
        """The one sequence there is before the fork."""
        return self.samples[0]

    @property
    def is_continued(self) -> bool:
        """An earlier leg has drawn what follows the prompt: its last token gives no draw."""
        return bool(self.first_outputs or self.beam_start)

    @property
    def num_places(self) -> int:
        """Rows that each of its sequences stands for."""
        return 1 if self.is_forked else self.num_rows

    @property
    def state(self) -> State:
        """Of the request: that of the sample which is the furthest from its end."""
        if len(self.samples) == 1:
            for sequence in self.samples.values():
                return sequence.state
        states = {sequence.state for sequence in self.samples.values()}
        return next((state for state in _BY_PROGRESS if state in states), State.FINISHED)
