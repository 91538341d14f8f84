"""What is copied to the home store: everything by default, else what is hot."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.prefill.prefix_loader import worth_a_copy
from services.worker.config import WorkerLimits


@given(num_hits=st.integers(0, 2**32))
def test_everything_is_copied_by_default(num_hits: int) -> None:
    assert worth_a_copy(num_hits, WorkerLimits().replicate_after_hits)


@given(num_hits=st.integers(0, 100), limit=st.integers(1, 100))
def test_what_was_matched_so_often_is_hot(num_hits: int, limit: int) -> None:
    assert worth_a_copy(num_hits, limit) == (num_hits >= limit)
