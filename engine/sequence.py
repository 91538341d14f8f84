"""Sequence: one live request inside the engine, the mutable half of what request.py describes.
Engine thread only.

Its tokens, as half-open intervals (P = block size):

    [0, num_local_tokens)                  found in the device cache at `reserve`; never written
    [num_local_tokens, num_loaded)         written by another thread between `reserve` and `start`
    [.., num_computed_tokens)              computed here
    [num_computed_tokens, len(token_ids))  pending: the next steps' work; the last gives a draw
    [0, num_cached_blocks * P)             full blocks that were offered to the prefix cache
"""

from __future__ import annotations

from engine.errors import IntegrityError
from engine.request import ALLOWED, FinishReason, Request, State

HOLE = -1
"""Stands in `block_ids` for a block that was quarantined before `start`; start takes a new one for
it."""


class Sequence:
    """See the module."""

    def __init__(
        self,
        request: Request,
        *,
        max_output_tokens: int,
        block_ids: tuple[int, ...],
        num_local_tokens: int,
        chain_hashes: tuple[bytes, ...],
    ) -> None:
        self.request = request
        self.state = State.RESERVED
        self.max_output_tokens = (
            max_output_tokens  # max_tokens, or less where the window ends before
        )
        self.block_ids = list(block_ids)
        self.num_local_tokens = num_local_tokens
        self.chain_hashes = list(chain_hashes)
        self.token_ids = list(request.prompt_token_ids)
        self.num_computed_tokens = num_local_tokens
        self.num_cached_blocks = 0
        self.order = 0

    def move(self, state: State) -> None:
        """Change state. Raises: IntegrityError for a transition that is not allowed."""
        if state not in ALLOWED[self.state]:
            name = self.request.request_id
            raise IntegrityError(f"{name}: {self.state.value} -> {state.value} is no transition")
        self.state = state

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_pending_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def held_block_ids(self) -> list[int]:
        """Blocks that this request references."""
        return [block_id for block_id in self.block_ids if block_id != HOLE]

    def chain_hash(self, index: int, block_size: int) -> bytes:
        """The chain hash of full block `index`; all before it are known or made on the way."""
        while len(self.chain_hashes) <= index:
            start = len(self.chain_hashes) * block_size
            parent = self.chain_hashes[-1] if self.chain_hashes else b""
            tokens = self.token_ids[start : start + block_size]
            self.chain_hashes.append(self.request.block_hasher(parent, tokens))
        return self.chain_hashes[index]


def finish_reason(
    sequence: Sequence, token_id: int, eos_token_ids: frozenset[int]
) -> FinishReason | None:
    """Why a sequence ends with `token_id`, its newest output token; None: it goes on."""
    sampling = sequence.request.sampling
    if sequence.num_output_tokens >= sampling.min_tokens:
        if token_id in eos_token_ids and not sampling.ignore_eos:
            return FinishReason.EOS
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP_TOKEN
    if sequence.num_output_tokens >= sequence.max_output_tokens:
        return FinishReason.LENGTH
    return None


def should_hold(sequence: Sequence) -> bool:
    """The request asked to keep its blocks from this many output tokens on."""
    after = sequence.request.hold_after
    return after is not None and sequence.num_output_tokens >= after
