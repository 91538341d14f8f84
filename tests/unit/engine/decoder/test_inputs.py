"""From a Batch to tensors: rows, positions, tables and lengths of any step."""

from __future__ import annotations

import random

import pytest
import torch

from engine.batch import Batch, TokenSpan, warm_up
from engine.decoder.inputs import mixed_inputs, singles_first

CPU = torch.device("cpu")


def _random_batch(rng: random.Random) -> Batch:
    spans, draws, num_rows = [], [], 0
    for _ in range(rng.randint(1, 9)):
        start, length = rng.choice([0, 0, 5, 33]), rng.choice([1, 1, 2, 17])
        num_blocks = -(-(start + length) // 4)
        spans.append(TokenSpan(start, length, tuple(rng.randrange(99) for _ in range(num_blocks)),
                          rng.randrange(3)))  # fmt: skip
        num_rows += length
        if rng.random() < 0.7:
            draws.append(num_rows - 1)
    return Batch(tuple(rng.randrange(1000) for _ in range(num_rows)), tuple(spans), tuple(draws))


def _rows(batch: Batch) -> list[tuple[int, int, TokenSpan]]:
    """(token id, position, span) of each row."""
    places = [(position, span) for span in batch.spans for position in range(span.start, span.end)]
    return [(token, *place) for token, place in zip(batch.token_ids, places, strict=True)]


def test_singles_come_first_and_every_row_stays_itself(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        batch = _random_batch(rng)
        ordered = singles_first(batch)
        is_long = [span.num_tokens > 1 for span in ordered.spans]
        assert is_long == sorted(is_long)
        before, after = _rows(batch), _rows(ordered)
        assert sorted(before, key=repr) == sorted(after, key=repr)
        drawn = [before[row] for row in batch.draw_indices]
        assert [after[row] for row in ordered.draw_indices] == drawn


def test_tensors_say_what_the_batch_says(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        batch = singles_first(_random_batch(rng))
        inputs = mixed_inputs(batch, CPU)
        rows = _rows(batch)
        assert inputs.token_ids.tolist() == [token for token, _, _ in rows]
        assert inputs.positions.tolist() == [position for _, position, _ in rows]
        for row, index in enumerate(inputs.sequence_ids.tolist()):
            assert batch.spans[index] == rows[row][2]
        for span, table in zip(batch.spans, inputs.block_tables.tolist(), strict=True):
            assert tuple(table[: len(span.block_ids)]) == span.block_ids
            assert set(table[len(span.block_ids) :]) <= {0}
        singles = [span for span in batch.spans if span.num_tokens == 1]
        chunks = batch.spans[len(singles) :]
        assert inputs.num_singles == len(singles)
        assert inputs.ends.tolist() == [span.end for span in singles]
        assert inputs.starts.tolist() == [span.start for span in chunks]
        assert inputs.query_starts[0] == 0
        assert inputs.query_starts.diff().tolist() == [span.num_tokens for span in chunks]
        assert inputs.max_query_len == max((span.num_tokens for span in chunks), default=0)
        assert inputs.max_end == max((span.end for span in chunks), default=0)
        assert inputs.draw_indices.tolist() == list(batch.draw_indices)
        assert all(one.dtype == torch.int32 for one in (inputs.starts, inputs.draw_indices))
        assert inputs.starts.data_ptr() % 64 == inputs.token_ids.data_ptr() % 64


def test_a_warm_up_has_no_positions() -> None:
    """Its table is as wide as its tokens are many: what a kernel looks up must be there."""
    assert mixed_inputs(warm_up(100), CPU).block_tables.shape[1] >= 100
    inputs = mixed_inputs(warm_up(5), CPU)
    assert inputs.positions.tolist() == [-1] * 5
    assert inputs.starts.tolist() == [0]
    assert mixed_inputs(warm_up(1), CPU).ends.tolist() == [0]


def test_another_order_is_refused() -> None:
    batch = Batch((1, 2, 3), (TokenSpan(0, 2, (1,)), TokenSpan(4, 1, (0,))), ())
    with pytest.raises(ValueError, match="do not come first"):
        mixed_inputs(batch, CPU)
