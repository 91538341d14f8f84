"""The host's own huge pages stay, whatever the kernel grants. On a file of our own."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

import pytest

from tests.harness.huge_pool import HugePool

_OWN = 5
"""Pages that the host has before any test asks."""


class _Kernel(HugePool):
    """Grants no more than it has room for, without an error."""

    def __init__(self, file: Path, most: int) -> None:
        super().__init__(file)
        file.write_text(f"{_OWN}\n")
        self._most = most

    def _write(self, pool: TextIO, num_pages: int) -> None:
        pool.truncate(0)
        super()._write(pool, min(num_pages, self._most))


@pytest.mark.parametrize(("most", "num_given"), [(100, 24), (17, 12), (_OWN, 0), (3, 0)])
def test_only_what_was_given_is_given_back(tmp_path: Path, most: int, num_given: int) -> None:
    file = tmp_path / "nr_hugepages"
    pool = _Kernel(file, most)
    assert pool.grow(24) == num_given
    pool.shrink(num_given)
    assert int(file.read_text()) == min(_OWN, most)


def test_two_at_once_each_give_back_their_own(tmp_path: Path) -> None:
    file = tmp_path / "nr_hugepages"
    pool = _Kernel(file, 40)
    first, second = pool.grow(24), pool.grow(24)
    assert (first, second) == (24, 11)
    pool.shrink(first)
    pool.shrink(second)
    assert int(file.read_text()) == _OWN


def test_where_there_is_no_pool_that_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nr_hugepages"):
        HugePool(tmp_path / "nr_hugepages").grow(1)
