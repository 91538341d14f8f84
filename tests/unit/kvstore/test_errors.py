"""The word for why a transfer brought nothing."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.errors import (
    CANCELLED,
    REASONS,
    LeaseLapsed,
    Quarantine,
    TransferFailed,
    TransferTimeout,
    reason_of,
)
from process.rpc_errors import DeadlineExceeded, FailedPrecondition, Unavailable


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (asyncio.CancelledError(), CANCELLED),
        (LeaseLapsed("x"), "lease_lapsed"),
        (DeadlineExceeded("x"), "deadline"),
        (Unavailable("x"), "store_unavailable"),
        (TransferFailed("x"), "transport"),
        (FailedPrecondition("x"), "missing"),
    ],
)
def test_each_error_has_its_word(error: BaseException, word: str) -> None:
    assert reason_of(error) == word
    assert word in (*REASONS, CANCELLED)


async def test_one_that_still_writes_is_late() -> None:
    settled = asyncio.get_running_loop().create_future()
    assert reason_of(TransferTimeout("x", Quarantine((), settled))) == "deadline"
