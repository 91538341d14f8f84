"""Sequence: one sample of one live request inside the engine, the mutable counterpart of
request.py. Engine thread only.

Its tokens, as half-open intervals (P = block size):

    [0, num_local_tokens)                  found in the device cache when it got its blocks; never
                                           written
    [num_local_tokens, num_loaded)         written by another thread between `reserve` and `start`
    [.., num_computed_tokens)              computed by this engine
    [num_computed_tokens, len(token_ids))  pending: the next steps compute them; the next token is
                                           sampled from the last one
    [0, num_cached_blocks * P)             full blocks that were inserted into the prefix cache
    [0, num_told_blocks * P)               full blocks that an output has named, or that were cached
                                           before

Blocks may be shared with other sequences: full ones by the prefix cache or by a fork, the one that
contains the next token (`is_tail_shared`) by a fork alone, until one of them writes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import IntegrityError
from engine.request import ALLOWED, FinishReason, Request, RequestState, Sampling

if TYPE_CHECKING:
    from engine.grammar.state import GrammarState
    from engine.parking import Parked
    from engine.sampling.token_history import TokenHistory
    from engine.sequence_group import Group

Key = tuple[str, int]
"""(request id, sample index)."""

HOLE = -1
"""The entry in `block_ids` of a block that was quarantined before `start`, which replaces it."""


class Sequence:
    """One sample of one live request: its tokens, blocks and state."""

    __slots__ = (
        "block_ids",
        "block_table",
        "chain_hashes",
        "grammar",
        "group",
        "history",
        "is_tail_shared",
        "key",
        "num_cached_blocks",
        "num_computed_tokens",
        "num_local_tokens",
        "num_parked_tokens",
        "num_passes",
        "num_prompt_tokens",
        "num_scored_tokens",
        "num_told_blocks",
        "num_trusted_blocks",
        "parked",
        "request",
        "sample_index",
        "state",
        "takes_guesses",
        "token_ids",
    )

    def __init__(self, group: Group, state: RequestState) -> None:
        """Create a request's first sample; the others are forks of it."""
        request = group.request
        self.group = group
        self.request: Request = request
        self.sample_index = 0
        self.key: Key = (request.request_id, 0)
        self.state = state
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.token_ids = list(request.prompt_token_ids)
        self.chain_hashes: list[bytes] = list(request.prompt_hashes)
        self.block_ids: list[int] = []
        self.block_table: tuple[int, ...] = ()
        """The blocks of the sequence's last step, up to that step's last token."""
        self.is_tail_shared = False
        self.num_local_tokens = 0
        self.num_computed_tokens = 0
        self.num_cached_blocks = 0
        self.num_told_blocks = 0
        self.num_trusted_blocks = -1
        """Number of blocks that were cached when the sequence got its first blocks; -1 before."""
        self.num_scored_tokens = 0
        """Number of prompt tokens whose log probabilities were reported."""
        self.num_passes = 0
        self.num_parked_tokens = 0
        self.parked: Parked | None = None
        self.history: TokenHistory | None = None
        self.grammar: GrammarState | None = None
        self.takes_guesses = True
        """Whether the sequence gets draft tokens; False after a step with draft tokens failed for
        it."""

    def fork(self, sample_index: int) -> Sequence:
        """Create another sample with the same tokens and state, which continues independently. It
        has the same blocks: the caller adds references to them."""
        twin = object.__new__(Sequence)
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.sample_index = sample_index
        twin.key = (self.request.request_id, sample_index)
        twin.token_ids = self.token_ids.copy()
        twin.chain_hashes = self.chain_hashes.copy()
        twin.block_ids = self.block_ids.copy()
        twin.num_passes = 0
        twin.history = None if self.history is None else self.history.fork()
        twin.grammar = None if self.grammar is None else self.grammar.fork()
        return twin

    def move(self, state: RequestState) -> None:
        """Change state. Raises: IntegrityError for a transition that is not allowed."""
        if state not in ALLOWED[self.state]:
            name = f"{self.request.request_id}/{self.sample_index}"
            raise IntegrityError(f"{name}: {self.state.value} -> {state.value} is no transition")
        self.state = state

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        return tuple(self.token_ids[self.num_prompt_tokens :])

    @property
    def gives_embedding(self) -> bool:
        """Whether its next sampled token comes with the prompt's embedding."""
        return self.request.wants_embedding and len(self.token_ids) == self.num_prompt_tokens

    @property
    def is_scored(self) -> bool:
        """Whether log probabilities of its prompt are still to be reported."""
        return (
            self.request.prompt_logprobs is not None
            and self.num_scored_tokens < self.num_prompt_tokens
        )

    def scored_places(self, end: int) -> range:
        """Return the positions whose logits give the log probabilities to report once `end` tokens
        are computed: the position before each such token."""
        return range(max(self.num_scored_tokens - 1, 0), min(end, self.num_prompt_tokens - 1))

    @property
    def held_block_ids(self) -> list[int]:
        """The blocks that this sample references."""
        if HOLE not in self.block_ids:  # mostly: found thrice as fast as by looking at each
            return self.block_ids
        return [block_id for block_id in self.block_ids if block_id != HOLE]

    def add_token(self, token_id: int) -> None:
        """Append one output token."""
        self.token_ids.append(token_id)
        if self.history is not None:
            self.history.append(token_id)

    def chain_hash(self, index: int, block_size: int) -> bytes:
        """Return the chain hash of full block `index`; missing ones before it are computed."""
        while len(self.chain_hashes) <= index:
            start = len(self.chain_hashes) * block_size
            parent = self.chain_hashes[-1] if self.chain_hashes else b""
            tokens = self.token_ids[start : start + block_size]
            self.chain_hashes.append(self.request.block_hasher(parent, tokens))
        return self.chain_hashes[index]


def finish_reason(
    sampling: Sampling,
    token_id: int,
    num_output_tokens: int,
    max_output_tokens: int,
    eos_token_ids: frozenset[int],
) -> FinishReason | None:
    """Return why a sample ends with `token_id`, its newest output token; None: it continues.

    Args: num_output_tokens: number of output tokens, this one included.
    """
    if num_output_tokens >= sampling.min_tokens:
        if token_id in eos_token_ids and not sampling.ignore_eos:
            return FinishReason.EOS
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP_TOKEN
    if num_output_tokens >= max_output_tokens:
        return FinishReason.LENGTH
    return None


def should_hold(sequence: Sequence) -> bool:
    """Return whether the request is to keep its blocks (`hold_after`) at its present number of
    output tokens."""
    after = sequence.request.hold_after
    return after is not None and sequence.num_output_tokens >= after
