"""A lender's cache that its reader has mapped: what the lender was asked about it, what it
promised, and clocks and checksums of the reader that a test drives."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

from kvstore import block_hash
from kvstore import block_lender as lender_module
from kvstore import client as client_module
from kvstore.block_lender import LenderLimits as LenderLimits
from kvstore.block_refs import Block
from kvstore.transport import cuda_ipc
from kvstore.transport.base import GetItems, GetResult
from kvstore.transport.device import DeviceMark
from kvstore.transport.device import PeerCopies as PeerCopies
from process.deadline import Deadline
from process.rpc_errors import NoCapacity
from tests.harness.fake_device import FakeStream
from tests.harness.sources import MAPPED, Lending, lending
from tests.harness.store import BLOCK_BYTES, NUM_BLOCKS, Worker
from tests.harness.waiting import WAIT_S, Clock, within

FOR_LONG_S = 1e4
HELD_FOR_LONG = PeerCopies(hold_s=FOR_LONG_S)
ALL_ARE_LONG = PeerCopies(ask_early_bytes=0, hold_s=FOR_LONG_S)
"""The lender is asked while a copy runs, however small."""


def pieces_of(num_blocks: int, **sizes: int) -> PeerCopies:
    return PeerCopies(piece_bytes=num_blocks * BLOCK_BYTES, **sizes)


def promise(held_for_s: float) -> float:
    """Blocks are held for so long from now. Returns: until when."""
    return time.monotonic() + held_for_s


class Mapping:
    """A lender on a device, a reader that has mapped its cache, and the questions between them.

    Attributes:
        num_asked: questions for a hold.
        num_confirmed: questions behind a copy, for none.
        has_answered: set once a hold was asked for, and answered.
        refuses: the lender answers no question for a hold.
    """

    def __init__(self, lent: Lending, reader: Worker) -> None:
        self.lent, self.reader = lent, reader
        self.num_asked = self.num_confirmed = 0
        self.has_answered = threading.Event()
        self.refuses = False
        hold = lent.lender.hold

        def asked(
            attachment_id: str, lease_id: str, pairs: Any, ttl_s: float
        ) -> tuple[float, list[int]]:
            if not ttl_s:
                self.num_confirmed += 1
                return hold(attachment_id, lease_id, pairs, ttl_s)
            self.num_asked += 1
            try:
                if self.refuses:
                    raise NoCapacity("no question is answered")
                return hold(attachment_id, lease_id, pairs, ttl_s)
            finally:
                self.has_answered.set()

        lent.lender.hold = asked  # type: ignore[method-assign]

    def while_copied(self, then: Callable[[], object], *, is_asked: bool = False) -> None:
        """The next copy goes on when `then` was called on the loop; `is_asked`: behind the lender's
        answer to a question for a promise."""
        loop, is_done = asyncio.get_running_loop(), threading.Event()

        def move(*_: int) -> None:
            self.reader.device.on_move = lambda *_: None
            if not is_asked or self.has_answered.wait(WAIT_S):
                loop.call_soon_threadsafe(lambda: (then(), is_done.set()))
                is_done.wait(WAIT_S)

        self.reader.device.on_move = move

    async def told(self, *block_ids: int) -> tuple[str, Sequence[Block], float]:
        """The reader is told of blocks that nobody vouches for. Returns: their lease, they, and
        until when they are held."""
        lease_id = self.lent.tell(block_ids)
        num_blocks = len(block_ids)
        told, held_until_s = await self.reader.client.await_lent(
            lease_id, num_known=0, num_wanted=num_blocks, wait_s=5.0, deadline=within()
        )
        assert told.is_all and told.num_unsealed == num_blocks
        return lease_id, tuple(told.blocks), held_until_s

    async def get(
        self,
        lease_id: str,
        blocks: Sequence[Block],
        block_ids: Sequence[int],
        held_until_s: float = 0.0,
        *,
        num_unsealed: int = 0,
    ) -> GetResult:
        return await self.reader.client.get_blocks(
            lease_id,
            list(zip(blocks, block_ids, strict=True)),
            within(),
            num_unsealed=num_unsealed,
            held_until_s=held_until_s,
        )

    async def get_by_transport(
        self, lease_id: str, blocks: Sequence[Block], block_ids: Sequence[int], held_for_s: float
    ) -> None:
        """Blocks that are promised, without any time."""
        pairs = list(zip(blocks, block_ids, strict=True))
        items = GetItems(pairs, time.monotonic() + held_for_s)
        await self.reader.client.transport.get(lease_id, items, Deadline.after(0.0))

    def when_answered(self, then: Callable[[], object]) -> None:
        """Every answer comes to the reader behind this."""
        connection: Any = self.reader.client._connection
        call = connection.call

        async def late(*arguments: Any, **options: Any) -> Any:
            reply = await call(*arguments, **options)
            then()
            return reply

        connection.call = late

    @contextlib.contextmanager
    def slow_checksums(self) -> Iterator[tuple[threading.Event, threading.Event]]:
        """Gives: set when those of a copy are asked for, and what lets them be computed."""
        is_here, goes_on = threading.Event(), threading.Event()
        checksums = self.reader.memory.checksums

        def slowly(block_ids: Any) -> Any:
            is_here.set()
            assert goes_on.wait(WAIT_S)
            return checksums(block_ids)

        object.__setattr__(self.reader.memory, "checksums", slowly)
        yield is_here, goes_on
        goes_on.set()


@contextlib.asynccontextmanager
async def mapping(
    seed: int, peer_copies: PeerCopies = HELD_FOR_LONG, **bounds: Any
) -> AsyncIterator[Mapping]:
    """With promises that last for long; at the end all of them have ended."""
    limits = LenderLimits(**{"max_hold_s": FOR_LONG_S} | bounds)
    async with lending(seed, is_on_device=True, limits=limits) as lent:
        reader = Worker(MAPPED, BLOCK_BYTES, NUM_BLOCKS, seed + 1, peer_copies=peer_copies)
        await reader.attach(lent.address)
        try:
            yield Mapping(lent, reader)
            lent.end_leases()
        finally:
            lent.end_promises()
            await reader.client.close()


@contextlib.contextmanager
def reader_clock() -> Iterator[Clock]:
    """By which a reader says whether a promise is over."""
    clock = Clock(time.monotonic())
    both = SimpleNamespace(monotonic=clock, perf_counter=time.perf_counter)
    with (
        mock.patch.object(cuda_ipc, "time", clock),
        mock.patch.object(client_module, "time", both),
    ):
        yield clock


@contextlib.contextmanager
def hosts(lenders: str, readers: str | None = None) -> Iterator[None]:
    """What kernels say which host they are; None: as it is."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(lender_module, "own_host_id", lambda: lenders))
        if readers is not None:
            stack.enter_context(mock.patch.object(client_module, "own_host_id", lambda: readers))
        yield


class DeviceHasher:
    """Computes checksums where blocks lie, on a stream of its own.

    Attributes: begun: blocks of each batch.
    """

    def __init__(self, reader: Worker) -> None:
        self.begun: list[list[int]] = []
        self._view = reader.view
        self._stream = FakeStream()
        object.__setattr__(reader.memory, "device_checksums", self)

    def begin(self, block_ids: Any, after: DeviceMark | None = None) -> Any:
        """Computed when that is over, and no sooner."""
        self.begun.append(list(block_ids))
        if after is not None:
            after.before(self._stream.handle)
        found: Future[list[int]] = Future()

        def compute() -> None:
            found.set_result([block_hash.checksum(self._view[each]) for each in block_ids])

        self._stream.give(compute)
        return SimpleNamespace(result=lambda: found.result(20))


class OneThread(ThreadPoolExecutor):
    """The loop's executor from now on: one thread, which is busy until `let_go`.

    Attributes: num_waiting: jobs that came meanwhile.
    """

    def __init__(self) -> None:
        super().__init__(1)
        self.num_waiting = 0
        self._may_go_on = threading.Event()
        super().submit(self._may_go_on.wait, WAIT_S)
        asyncio.get_running_loop().set_default_executor(self)

    def submit(self, *arguments: Any, **options: Any) -> Any:
        self.num_waiting += 1
        return super().submit(*arguments, **options)

    def let_go(self) -> None:
        self._may_go_on.set()
