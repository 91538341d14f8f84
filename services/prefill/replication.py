"""Whether blocks that lie at another node's store are copied to the home store. Pure."""

from __future__ import annotations


def worth_a_copy(num_hits: int, replicate_after_hits: int) -> bool:
    """Whether a prefix that was pulled from another node shall lie at home, too.

    Args:
        num_hits: how often its last block was matched at that node before; the blocks above it were
            matched at least as often.
        replicate_after_hits: from which number on it is hot. 0: everything is copied.
    Source: ours.
    """
    return num_hits >= replicate_after_hits
