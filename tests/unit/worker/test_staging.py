"""Staging: who is told, and rows that come back when the transfer into them is over."""

from __future__ import annotations

import asyncio

from kvstore.errors import Quarantine
from services.worker.kv_swap import ParkedPut, Staging


def test_a_loop_that_is_not_there_is_told_nothing() -> None:
    staging, told = Staging(2, 8), list[int]()
    assert not staging.is_open and not staging.tell(told.append, 1)

    async def serve() -> None:
        staging.open()
        assert staging.is_open and staging.tell(told.append, 2)
        await asyncio.sleep(0)

    asyncio.run(serve())
    assert told == [2]
    assert staging.is_open and not staging.tell(told.append, 3)  # its loop is closed
    staging.close()
    assert not staging.is_open and not staging.tell(told.append, 4)
    assert told == [2]


async def test_each_row_of_a_holder_comes_back_once() -> None:
    staging, told = Staging(6, 8), list[str]()
    put = ParkedPut("a", (), staging.rows.take(4) or (), "acme")
    settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    staging.quarantine(put, Quarantine((1, 2), settled), lambda: told.append("room"))
    assert put.rows == (0, 3)
    assert staging.num_rows == {"free": 2, "taken": 2, "quarantined": 2}
    staging.rows.check_integrity(put.rows)
    with staging.lock:
        staging.give_back(put)
    assert put.rows == () and not told
    settled.set_result(None)
    await asyncio.sleep(0)
    assert staging.num_rows == {"free": 6, "taken": 0, "quarantined": 0} and told == ["room"]
    staging.rows.check_integrity(())
