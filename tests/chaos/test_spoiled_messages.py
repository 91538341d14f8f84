"""What a spoiled message leaves behind.

An answer that cannot be right may have reserved frames, so the connection is over, and the store
takes back what was that attachment's. No answer, however spoiled, becomes anything but an error of
ours, and none makes a worker write where it must not or use a wrong byte.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from typing import Any

import grpc.aio
import pytest

from kvstore import store_process
from kvstore.block_refs import Block
from kvstore.client import PutResult
from kvstore.slot_pool import SlotState
from process.rpc_errors import BatonError
from tests.harness.control_proxy import ControlProxy, Mischief
from tests.harness.store import SETTINGS, Worker, driven
from tests.harness.waiting import within

pytestmark = pytest.mark.chaos

TRANSPORTS = ("shm", "nixl", "grpc")
NUM_SLOTS = 4


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_nothing_stays_reserved_after_spoiled_answers(
    transport: str, seed: int, scale: Callable[[int], int]
) -> None:
    """Each try meets a garbled link at another moment; at the end every frame must come free."""
    rng = random.Random(f"{seed}-{transport}-spoiled")
    num_failed = 0
    with ControlProxy(f"{seed}-{transport}") as proxy:
        async with store_process.running(SETTINGS) as store:
            proxy.upstream = store.address
            for _ in range(max(12, scale(200))):
                proxy.behave()
                worker = Worker(transport, 4096, 8, rng.randrange(2**31))
                await worker.attach(proxy.address)
                proxy.behave(Mischief(garble=rng.choice((0.3, 1.0))))
                try:
                    chain = [rng.randbytes(16) for _ in range(4)]
                    await worker.put(chain, range(4), ttl_s=0.2, deadline=within(1.0))
                except BatonError:
                    num_failed += 1
                proxy.behave()
                proxy.cut()
                await worker.client.close()
            await _all_free(store)
    assert num_failed > 0


class _Spoiler:
    """Turns one bit of an answer on its way out of gRPC, as often as it is told to."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num_spoiled = 0
        self.is_on = False

    def spoil(self, client: Any) -> None:
        """From now on, every answer that this client's stub gives."""
        stub = client._connection.stub
        for name in ("Match", "Reserve", "Commit", "Pin", "Push", "GetPush", "Abort"):
            setattr(stub, name, self._unary(getattr(stub, name)))
        stub.Read = self._streaming(stub.Read)

    def _unary(self, method: Any) -> Any:
        async def call(request: Any, **options: Any) -> Any:
            return self._turned(await method(request, **options))

        return call

    def _streaming(self, method: Any) -> Any:
        def call(request: Any, **options: Any) -> Any:
            return _Turning(method(request, **options), self._turned)

        return call

    def _turned(self, answer: Any) -> Any:
        data = bytearray(answer.SerializeToString())
        if not self.is_on or not data:
            return answer
        self.num_spoiled += 1
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        try:
            return type(answer).FromString(bytes(data))
        except Exception:  # gRPC hands on None for what cannot be read, whatever it was
            return None


class _Turning:
    """A stream of answers, each turned."""

    def __init__(self, call: Any, turn: Callable[[Any], Any]) -> None:
        self._call, self._turn = call, turn
        self.cancel = call.cancel

    def __aiter__(self) -> Any:
        return self._turned()

    async def _turned(self) -> Any:
        async for answer in self._call:
            yield self._turn(answer)


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_spoiled_answer_is_an_error_of_ours_and_hurts_nobody(
    transport: str, seed: int, scale: Callable[[int], int]
) -> None:
    """One bit of one answer, thousands of times: what comes out is an error or right, and what
    others have in the store stays as it is."""
    rng = random.Random(f"{seed}-{transport}-turned")
    spoiler = _Spoiler(rng)
    num_failed = num_read = 0
    async with store_process.running(SETTINGS) as store:
        bystander = Worker(transport, 4096, NUM_SLOTS, 1)
        await bystander.attach(store.address)
        held = await bystander.put(_chain(rng), range(NUM_SLOTS))
        truth = bystander.view.copy()
        worker = Worker(transport, 4096, 2 * NUM_SLOTS, seed)
        # Most of it is attaching anew, which takes NIXL ten times as long.
        least, most = (20, 600) if transport == "nixl" else (50, 4000)
        for _ in range(max(least, scale(most))):
            if not hasattr(worker, "client") or worker.client.broken:
                await _reattach(worker, store, spoiler)
            outcome = await _outcome(_use(worker, spoiler, _chain(rng)))
            num_failed += outcome is None
            num_read += outcome or 0
            await bystander.match([])  # lives
        assert not await bystander.get(held.lease_id, held.refs, range(NUM_SLOTS))
        assert (bystander.view == truth).all(), "somebody else's blocks were written over"
        await worker.client.close()
        await bystander.release(held.lease_id)
        await bystander.client.close()
        await _all_free(store)
    assert spoiler.num_spoiled > 0 and num_failed > 0 and num_read > 0


async def _reattach(worker: Worker, store: store_process.RunningStore, spoiler: _Spoiler) -> None:
    if hasattr(worker, "client"):
        await worker.client.close()
    await worker.attach(store.address)
    spoiler.spoil(worker.client)


async def _use(worker: Worker, spoiler: _Spoiler, chain: list[bytes]) -> int:
    """Put a prompt, find it, pin it, read it, with one of the steps spoiled. Returns: how many
    blocks came back."""
    steps = [lambda: None] * 4
    steps[spoiler.rng.randrange(4)] = lambda: setattr(spoiler, "is_on", True)
    leases: list[str] = []
    try:
        put: PutResult = await _spoiled(
            spoiler, steps[0], worker.put(chain, range(NUM_SLOTS), ttl_s=0.5, deadline=within(2.0))
        )
        leases.append(put.lease_id)
        matched = await _spoiled(
            spoiler, steps[1], worker.client.match(chain, ttl_s=0.5, deadline=within(2.0))
        )
        leases.append(matched.lease_id)
        pinned = await _spoiled(
            spoiler, steps[2], worker.client.pin(matched.blocks, ttl_s=0.5, deadline=within(2.0))
        )
        leases.append(pinned[0])
        assert len(matched.blocks) <= len(chain) and pinned[1] <= len(matched.blocks)
        return await _spoiled(spoiler, steps[3], _read(worker, matched.lease_id, matched.blocks))
    finally:
        if not worker.client.broken:
            await worker.client.release(leases, deadline=within(2.0))


async def _spoiled(
    spoiler: _Spoiler, begin: Callable[[], None], work: Coroutine[Any, Any, Any]
) -> Any:
    begin()
    try:
        return await work
    finally:
        spoiler.is_on = False


async def _read(worker: Worker, lease_id: str, refs: tuple[Block, ...]) -> int:
    """Blocks that are not refused are what was written."""
    targets = range(NUM_SLOTS, NUM_SLOTS + len(refs))
    worker.view[NUM_SLOTS:] = 0xA5
    failed = await worker.get(lease_id, refs, targets, 2.0)
    for index in range(len(refs)):
        if index not in failed:
            assert (worker.view[NUM_SLOTS + index] == worker.view[index]).all()
    return len(refs) - len(failed)


async def _outcome(work: Coroutine[Any, Any, int]) -> int | None:
    """None: it ended with an error of ours."""
    try:
        return await work
    except (BatonError, grpc.aio.AioRpcError) as error:
        assert isinstance(error, BatonError), repr(error)
        return None


def _chain(rng: random.Random) -> list[bytes]:
    return [rng.randbytes(16) for _ in range(NUM_SLOTS)]


async def _all_free(store: store_process.RunningStore) -> None:
    """No frame stays written or out of use, and no lease is left, as time passes."""
    truth: Any = store.node.store

    def is_free() -> bool:
        held = [truth.frames.count(state) for state in (SlotState.WRITING, SlotState.QUARANTINED)]
        return sum(held) == 0 and len(truth.leases) == 0

    await driven(store)(is_free)
    assert await store.node.check_integrity() == ""
