"""What may share a batch: a pure function over values.

Most things may: sampling parameters, grammar masks, penalties and seeds are per row, positions and
blocks per span, and one engine has one model, one tokenizer and one KV dtype. What may not:

- more different adapters than the configured bound: each costs every layer of the step another pair
  of small products.
- more rows than places: each row that has drawn must get its token in every step.

Beams of one request draw together or not at all; that is a matter of the plan
(engine/schedule/step.py), not of who shares a batch.
"""

from __future__ import annotations

from typing import NamedTuple


class BatchTraits(NamedTuple):
    """Those that take part in steps already."""

    num_rows: int
    adapters: frozenset[str]
    """Without "", the model as it is."""


def may_share_batch(
    batch: BatchTraits, *, num_rows: int, adapter: str, max_num_rows: int, max_num_adapters: int
) -> bool:
    """Whether a request with these traits may join.

    Args:
        num_rows: those that it will have once its samples or beams part.
        max_num_adapters: 0 for no bound.
    """
    if batch.num_rows + num_rows > max_num_rows:
        return False
    if not adapter or adapter in batch.adapters or max_num_adapters == 0:
        return True
    return len(batch.adapters) < max_num_adapters
