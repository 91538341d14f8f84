"""pieces: splits one step into several for the stages of a pipeline, so that one stage computes the
second piece while the next one computes the first. A pure function; it knows no stages. Any
thread."""

from __future__ import annotations

import itertools

from engine.batch import Batch, TokenSpan


def pieces(batch: Batch, num_pieces: int, min_tokens: int) -> list[Batch]:
    """Split a batch into at most `num_pieces` batches with about equal numbers of tokens, at least
    `min_tokens` each, with the same tokens and `draw_indices` in the same order.

    A span may be split: its later tokens find the KV of the earlier ones, since every stage
    computes the pieces in order. A warm-up, which writes no KV, is not split.
    """
    num_tokens = len(batch.token_ids)
    num_pieces = min(num_pieces, num_tokens // min_tokens)
    if num_pieces < 2 or not all(span.block_ids for span in batch.spans):
        return [batch]
    borders = [num_tokens * index // num_pieces for index in range(num_pieces + 1)]
    return [_cut(batch, first, end) for first, end in itertools.pairwise(borders)]


def _cut(batch: Batch, first: int, end: int) -> Batch:
    spans: list[TokenSpan] = []
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
