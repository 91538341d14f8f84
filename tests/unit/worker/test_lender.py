"""WorkerLender: no lease without an end is kept for nobody."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore.exported_blocks import ExportOffer
from kvstore.transport.base import BlockMemory
from process.rpc_errors import Internal
from services.worker.lender import WorkerLender
from services.worker.store_pool import StoreTarget

NUM_BLOCKS = 8


class Sealing:
    """A lender whose checksums take until they are let."""

    def __init__(self) -> None:
        self.may_end, self.has_begun = threading.Event(), threading.Event()
        memory = BlockMemory.of(np.zeros((NUM_BLOCKS, 64), np.uint8))
        checksums = memory.checksums

        def slow(block_ids: Any) -> list[int]:
            self.has_begun.set()
            assert self.may_end.wait(20)
            return list(checksums(block_ids))

        object.__setattr__(memory, "checksums", slow)
        target = StoreTarget("a:1", "w", b"i" * 16, "ab" * 32, memory, "grpc")
        self.returned: list[int] = []
        engine = SimpleNamespace(
            lend_blocks=lambda num_blocks: tuple(range(num_blocks)),
            return_blocks=self.returned.extend,
            unquarantine=lambda block_ids: None,
        )

        async def call(run: Any) -> Any:
            return run(engine)

        thread: Any = SimpleNamespace(call=call, post=lambda run, _=None: run(engine))
        self.lender = WorkerLender(
            target, thread, 30.0, address=lambda: "a:2", on_room=lambda: None
        )

    def measure(self) -> asyncio.Task[Any]:
        """A reader asks for blocks to measure with."""
        return asyncio.create_task(self.lender.lender._lend_probes("reader", 3, 5.0))


async def test_a_lease_that_is_kept_for_nobody_is_found_beside_one_to_measure_with() -> None:
    made = Sealing()
    measuring = made.measure()
    assert await asyncio.to_thread(made.has_begun.wait, 20)
    made.lender.enter([ExportOffer(7, bytes(16), None, 16)], "")
    with pytest.raises(Internal, match="its request is over"):
        made.lender.check_integrity()
    made.lender.loans.end_all()  # that to measure with too
    made.lender.enter([ExportOffer(6, bytes(16), None, 16)], "")
    with pytest.raises(Internal, match="its request is over"):
        made.lender.check_integrity()
    made.may_end.set()
    await asyncio.wait([measuring])
    assert measuring.exception() is not None
