"""pieces: one step cut into several, for the stages of a pipeline: while one stage computes the
second piece, the next one computes the first. A pure function; knows no stages. Any thread.
"""

from __future__ import annotations

import itertools

from engine.batch import Batch, Span


def pieces(batch: Batch, num_pieces: int, min_tokens: int) -> list[Batch]:
    """The same tokens and draws in the same order, as at most `num_pieces` batches of about equally
    many tokens, each of at least `min_tokens`.

    A span may be cut: its later tokens find the KV of the earlier ones, since every stage computes
    the pieces in order. A warm-up, which keeps no KV, is not cut.
    """
    num_tokens = len(batch.token_ids)
    num_pieces = min(num_pieces, num_tokens // min_tokens)
    if num_pieces < 2 or not all(span.block_ids for span in batch.spans):
        return [batch]
    borders = [num_tokens * index // num_pieces for index in range(num_pieces + 1)]
    return [_cut(batch, first, end) for first, end in itertools.pairwise(borders)]


def _cut(batch: Batch, first: int, end: int) -> Batch:
    spans: list[Span] = []
    place = 0  # of the span's first token
    for span in batch.spans:
        skipped = max(0, first - place)
        left = min(span.num_tokens, end - place) - skipped
        if span.branches:
            raise ValueError("a token tree cannot be cut")
        if left > 0:
            spans.append(span._replace(start=span.start + skipped, num_tokens=left))
        place += span.num_tokens
    draws = tuple(index - first for index in batch.draw_indices if first <= index < end)
    return Batch(batch.token_ids[first:end], tuple(spans), draws)
