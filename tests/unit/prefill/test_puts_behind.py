"""PutsBehind: what it waits for, and what it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from engine.step_output import FilledBlock
from kvstore.lending.loans import LoanTable, Offer
from kvstore.packed import PackedBlocks
from services.prefill.puts_behind import PutsBehind

NUM_BLOCKS = 3
HASHES = [bytes([index]) * 16 for index in range(NUM_BLOCKS)]
LAST = [FilledBlock(NUM_BLOCKS - 1, HASHES[-1], NUM_BLOCKS - 1)]
WAIT_S = 30.0


class FakeWriter:
    """Stores what it is given at its end, unless it has a problem."""

    def __init__(self, num_stored: int, problem: str | None = None) -> None:
        self.num_stored = num_stored
        self.problem = problem
        self.is_cancelled = False

    def add(self, blocks: Iterable[FilledBlock]) -> None: ...

    async def finish(self, tail: None) -> Any:
        if self.problem is None:
            self.num_stored = NUM_BLOCKS
        return SimpleNamespace(problem=self.problem)

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.mark.parametrize(
    ("num_stored", "problem", "last", "not_stored"),
    [
        (NUM_BLOCKS - 1, "no_room", LAST, {"no_room": 1}),
        (NUM_BLOCKS, None, LAST, {}),
        (NUM_BLOCKS - 1, None, (), {}),
    ],
    ids=["nothing more is stored", "all is stored", "the last step filled none"],
)
async def test_who_has_no_put_to_begin_waits_for_no_reader(
    num_stored: int,
    problem: str | None,
    last: Sequence[FilledBlock],
    not_stored: dict[str, int],
) -> None:
    freed: list[int] = []
    loans = LoanTable(NUM_BLOCKS, 4096, 1e9, freed.extend)
    offers = [Offer(index, HASHES[index], index, 4) for index in range(NUM_BLOCKS)]
    lease_id, blocks = loans.lend(offers)
    lent: Any = SimpleNamespace(
        refs=PackedBlocks.of(blocks), lease_id=lease_id, lender=SimpleNamespace(loans=loans)
    )
    writer: Any = FakeWriter(num_stored, problem)
    behind = PutsBehind(put_budget_s=1e10, yield_s=1e9)
    behind.follow(writer, lent, last)
    await asyncio.wait_for(behind.settle(), WAIT_S)
    assert writer.is_cancelled and behind.not_stored == not_stored
    assert loans.num_leases == 1 and not freed
    loans.release([lease_id], 0.0)
    assert sorted(freed) == list(range(NUM_BLOCKS))
    loans.check_integrity()
