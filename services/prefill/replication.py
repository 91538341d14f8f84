"""Replication policy: whether blocks at another node's store are copied to the home store. Pure."""

from __future__ import annotations


def worth_a_copy(num_hits: int, replicate_after_hits: int) -> bool:
    """Decide whether a prefix that was pulled from another node is copied to the home store.

    Args:
        num_hits: how often its last block was matched at that node before; the blocks above it were
            matched at least as often.
        replicate_after_hits: number of hits from which on a prefix is copied. 0: every prefix is
            copied.
    """
    return num_hits >= replicate_after_hits
