"""What an arena asks of a leg's account."""

from __future__ import annotations

from typing import Any

import pytest

from baton.answers import KvLeg, TierCount
from tests.chaos.arena import check_account

_PROMPT = 100


def _leg(num_computed: int, **about: Any) -> KvLeg:
    """10 local, 30 from a store, and so many computed."""
    found = (TierCount("DRAM", "node", 30, 4096),)
    about = {"transport": "shm", "ended_by": "", **about}
    return KvLeg(
        "decode",
        "decode-0",
        "life",
        dtype="float32",
        num_tokens_computed=num_computed,
        num_tokens_local=10,
        from_store=found,
        num_bytes_read=4096,
        num_bytes_written=0,
        recomputed={},
        **about,
    )


def test_accounts_that_sum_up() -> None:
    moved = _leg(60, ended_by="moved", num_blocks_written_back=1)
    inside = _leg(20, ended_by="moved")
    silent = _leg(0, ended_by="worker_lost", transport="")
    check_account([_leg(60), moved, inside, silent], _PROMPT)


@pytest.mark.parametrize(
    ("num_computed", "about"),
    [
        (59, {}),
        (61, {}),
        (59, {"ended_by": "moved", "num_blocks_written_back": 1}),
        (61, {"ended_by": "moved"}),
        (61, {"ended_by": "worker_lost"}),
    ],
)
def test_accounts_that_do_not(num_computed: int, about: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        check_account([_leg(60), _leg(num_computed, **about)], _PROMPT)
