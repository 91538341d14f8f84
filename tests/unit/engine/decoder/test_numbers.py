"""Tuples of integers as numpy's."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.decoder.numbers import int32s, table_of

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
