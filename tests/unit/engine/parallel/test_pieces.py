"""A step cut into pieces has the same tokens at the same positions, and the same draws."""

from __future__ import annotations

import random

from engine.batch import Batch, TokenSpan, warm_up
from engine.parallel.microbatches import pieces


def _cells(batch: Batch) -> list[tuple[int, int, tuple[int, ...], bool]]:
    """(token, position, blocks, is drawn from) of every token."""
    spans = [span for span in batch.spans for _ in range(span.num_tokens)]
    return [
        (token, position, span.block_ids, index in batch.draw_indices)
        for index, (token, position, span) in enumerate(
            zip(batch.token_ids, batch.positions, spans, strict=True)
        )
    ]


def test_pieces_are_the_step(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        spans = tuple(
            TokenSpan(
                rng.randrange(20), rng.choice([1, 1, rng.randrange(1, 40)]), (index, 50 + index)
            )
            for index in range(rng.randrange(1, 8))
        )
        num_tokens = sum(span.num_tokens for span in spans)
        draws = tuple(index for index in range(num_tokens) if rng.random() < 0.3)
        batch = Batch(tuple(rng.randrange(100) for _ in range(num_tokens)), spans, draws)
        num_pieces, min_tokens = rng.randrange(1, 5), rng.randrange(1, 30)
        found = pieces(batch, num_pieces, min_tokens)
        assert [cell for piece in found for cell in _cells(piece)] == _cells(batch)
        sizes = [len(piece.token_ids) for piece in found]
        assert len(found) <= num_pieces and max(sizes) - min(sizes) <= 1
        assert len(found) == max(1, min(num_pieces, num_tokens // min_tokens))
        assert len(found) == 1 or min(sizes) >= min_tokens


def test_a_warm_up_is_not_cut() -> None:
    """It keeps no KV that a second piece could find."""
    assert pieces(warm_up(100), 4, 1) == [warm_up(100)]
