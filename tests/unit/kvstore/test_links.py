"""When a link is degraded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.link_quality import (
    MAX_BYTES,
    MAX_ROUNDS,
    SHM_FLOOR_SHARE,
    Link,
    LinkRates,
    judge,
    num_blocks_wanted,
)

GB = 1e9


def link(transport: str, write: float, read: float, copy: float = 8 * GB) -> Link:
    return Link("node", "host:1", transport, 1, LinkRates(2**20, write, read, 0.001, copy))


@pytest.mark.parametrize(
    ("transport", "write", "read", "floor", "degraded"),
    [
        ("grpc", 0.8 * GB, 0.8 * GB, 0.0, False),
        ("grpc", 1.0, 1.0, 0.0, False),  # nobody said what it should be
        ("grpc", 0.8 * GB, 0.8 * GB, 1 * GB, True),
        ("nixl", 5 * GB, 0.9 * GB, 1 * GB, True),  # either direction
        ("nixl", 0.9 * GB, 5 * GB, 1 * GB, True),
        ("nixl", 1 * GB, 1 * GB, 1 * GB, False),  # not below
        ("shm", 4 * GB, 4 * GB, 0.0, False),
        ("shm", 4 * GB, 0.1 * GB, 0.0, True),  # under a fiftieth of a plain copy
        ("shm", 0.2 * GB, 0.2 * GB, 0.0, False),
        ("cuda_ipc", 0.0, 0.1 * GB, 0.0, True),  # a lender's: nothing is written
        ("cuda_ipc", 0.0, 300 * GB, 0.0, False),
        ("shm", 0.2 * GB, 0.2 * GB, 1 * GB, True),
        ("nixl", 0.0, 2 * GB, 1 * GB, False),  # a lender takes no writes
        ("nixl", 0.0, 0.5 * GB, 1 * GB, True),
    ],
)
def test_degraded(transport: str, write: float, read: float, floor: float, degraded: bool) -> None:
    assert judge(link(transport, write, read), floor).degraded is degraded


def test_the_floor_that_was_applied_is_told() -> None:
    assert judge(link("shm", GB, GB, copy=10 * GB), 0.0).floor_bytes_per_s == pytest.approx(
        10 * GB * SHM_FLOOR_SHARE
    )
    assert judge(link("shm", GB, GB, copy=10 * GB), 5 * GB).floor_bytes_per_s == 5 * GB
    assert judge(link("nixl", GB, GB), 0.0).floor_bytes_per_s == 0.0


@pytest.mark.parametrize("is_fault", [True, False])
def test_a_link_that_was_not_measured_is_degraded_only_by_its_own_fault(is_fault: bool) -> None:
    unmeasured = Link("node", "host:1", "shm", 1, None, "why", is_fault)
    assert judge(unmeasured, 0.0).degraded is is_fault


@given(st.integers(1, 2**28))
def test_what_is_lent_is_bounded_and_never_less_than_a_pair(block_bytes: int) -> None:
    num_blocks = num_blocks_wanted(block_bytes)
    assert num_blocks >= 2 and num_blocks % 2 == 0
    moved = num_blocks // 2 * block_bytes * MAX_ROUNDS
    assert num_blocks == 2 or moved <= MAX_BYTES // 2
