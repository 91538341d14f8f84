"""Tuples of integers as numpy's."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.decoder.int32_arrays import Tables, int32s, table_of

int32 = st.integers(-(2**31), 2**31 - 1)


@settings(max_examples=25)
@given(values=st.lists(int32, max_size=40))
def test_they_are_numpys(values: list[int]) -> None:
    for found in (int32s(values), table_of(tuple(values))):
        assert found.dtype == np.int32 and found.tolist() == values
        assert not found.flags.writeable  # it is remembered
    assert table_of(tuple(values)) is table_of(tuple(values))


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_what_is_no_int32_is_refused(value: int) -> None:
    with pytest.raises(struct.error):
        int32s([3, value])


def test_what_is_remembered_is_bound_in_bytes() -> None:
    """Of tables that grow with each step, as those of long sequences do."""
    limit = 1 << 16
    tables = Tables(max_bytes=limit)
    for num_blocks in range(500, 600):
        table = tuple(range(num_blocks))
        assert tables.of(table) is tables.of(table)
        assert tables.of(table).tolist() == list(table)
        assert tables.num_bytes <= limit
    assert tables.num_bytes > limit // 4, "some of it is remembered"
    assert len(tables.of(tuple(range(limit)))) == limit  # larger than all of it
    assert tables.num_bytes <= limit
