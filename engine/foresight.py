"""Foresight: what the host does for the steps to come while the device computes this one: the chain
hashes of blocks that this step fills, and of the prompts that come next.

Nothing but hashes: they follow from tokens that are known whatever is drawn, so no result depends
on whether, or when, they were made here. Who needs one that is missing makes it himself
(Sequence.chain_hash). Engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.request import WITHOUT_BLOCKS
from engine.scheduler import Scheduler
from engine.sequence import Sequence


class Foresight:
    """See the module."""

    def __init__(self, scheduler: Scheduler, block_size: int) -> None:
        self._scheduler = scheduler
        self._block_size = block_size

    def use_wait(self, planned: Iterable[tuple[Sequence, int]]) -> None:
        """Called when a step is queued on the device, before its draws are waited for.

        Of prompts that come next no more tokens are hashed than the step computes: a short step is
        not waited for that long.

        Args:
            planned: (sequence, number of its tokens that the step computes).
        Raises: whatever a request's `block_hasher` does.
        """
        size, num_tokens_left = self._block_size, 0
        for sequence, num_tokens in planned:
            num_tokens_left += num_tokens
            num_full = (sequence.num_computed_tokens + num_tokens) // size
            if sequence.request.beam is not None:
                num_full = min(num_full, sequence.num_prompt_tokens // size)
            if num_full > len(sequence.chain_hashes):
                sequence.chain_hash(num_full - 1, size)  # and all before it
        if not self._scheduler.has_queued:
            return
        for sequence in self._scheduler.next_in_line():
            if sequence.state not in WITHOUT_BLOCKS:
                continue
            num_known = len(sequence.chain_hashes)
            # As KVCacheManager.allocate_first asks for: what may be found, its last token left out.
            num_wanted = (len(sequence.token_ids) - 1) // size - num_known
            num_more = min(num_wanted, num_tokens_left // size)
            if num_more > 0:
                sequence.chain_hash(num_known + num_more - 1, size)
                num_tokens_left -= num_more * size
            if num_tokens_left < size:
                return
