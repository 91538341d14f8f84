"""What a test sees of a running worker, and by what it holds it: states, status, metrics and the
ways to stores. The one place that knows where in a worker these are.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest

from kvstore.client import KvStoreClient
from kvstore.errors import Quarantine, TransferCancelled, TransferFailed, TransferTimeout
from kvstore.transport.base import GetResult
from process import rpc
from process.deadline import Deadline
from process.rpc_errors import BatonError, DeadlineExceeded
from protos import (
    common_pb2,
    decode_pb2_grpc,
    prefill_pb2_grpc,
    worker_control_pb2,
    worker_control_pb2_grpc,
)
from services.decode import server as decode_server
from services.prefill import server as prefill_server
from services.worker import main
from services.worker.metrics import WorkerCollector
from services.worker.store_pool import StoreConnector
from tests.harness.gated_engine import SALT
from tests.harness.waiting import WAIT_S, Gate, until

_CALLS = {"match": "match", "get": "get_blocks", "put": "_put", "renew": "renew"}


def leases_of(handle: common_pb2.KvHandle) -> set[str]:
    return {run.lease_id for run in (*handle.runs, handle.tail)} - {""}


@dataclass
class LateGets:
    """Transfers that a client has given up, and that may still write."""

    block_ids: list[int] = field(default_factory=list)
    """Of the worker's cache, which they may write into."""
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    async def wait_entered(self) -> None:
        """One is under way."""
        async with asyncio.timeout(WAIT_S):
            await self.entered.wait()

    def settle(self) -> None:
        """Nothing can come any more."""
        self.settled.set_result(None)


class StoreWay:
    """A worker's way to one store: its calls `match`, `get`, `put` and `renew`, to be watched, held
    and broken."""

    def __init__(self, client: KvStoreClient) -> None:
        self.client: Any = client

    @property
    def is_broken(self) -> bool:
        return self.client.broken is not None

    def hold(self, call: str) -> Gate:
        """Calls wait there until it is opened."""
        return Gate(self.client, _CALLS[call])

    def watch(self, call: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Arguments and options of each call from here on, as it begins."""
        seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        async def watched(real: Any, *arguments: Any, **options: Any) -> Any:
            seen.append((arguments, options))
            return await real(*arguments, **options)

        self.replace(call, watched)
        return seen

    def loads(self) -> list[list[bytes]]:
        """The chain hashes of each load from here on; a tail is b""."""
        loads: list[list[bytes]] = []

        async def watched(real: Any, lease_id: str, items: Any, *rest: Any, **options: Any) -> Any:
            loads.append([block.chain_hash for block, _ in items])
            return await real(lease_id, items, *rest, **options)

        self.replace("get", watched)
        return loads

    def replace(self, call: str, stand_in: Callable[..., Any]) -> None:
        """stand_in: called with the real one first, then as it is; see `restore`."""
        real = getattr(self.client, _CALLS[call])

        async def replaced(*arguments: Any, **options: Any) -> Any:
            return await stand_in(real, *arguments, **options)

        setattr(self.client, _CALLS[call], replaced)

    def restore(self, call: str) -> None:
        """As if nothing had been done to this call."""
        vars(self.client).pop(_CALLS[call], None)

    def fail(self, call: str, *, times: int | None = None) -> None:
        """It fails as where the wire broke. times: so often; None: until `restore`."""
        left = times

        async def failing(real: Any, *arguments: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                return await real(*arguments, **options)
            left = None if left is None else left - 1
            raise TransferFailed("the wire broke")

        self.replace(call, failing)

    def late_gets(self, *, num_in_time: int = 0) -> LateGets:
        """From here on no load is over in time. num_in_time: blocks of each that nothing writes
        into any more."""
        late = LateGets()

        async def too_late(real: Any, lease_id: str, items: Any, *rest: Any, **options: Any) -> Any:
            late.entered.set()
            late.block_ids += [block_id for _, block_id in items[num_in_time:]]
            quarantine = Quarantine(tuple(late.block_ids), late.settled)
            raise TransferTimeout("the time ran out", quarantine)

        self.replace("get", too_late)
        return late

    def uncallable_gets(self) -> LateGets:
        """From here on a load does not end, and cannot be called back."""
        late = LateGets()

        async def stalled(real: Any, lease_id: str, items: Any, *rest: Any, **options: Any) -> Any:
            late.entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                late.block_ids += [block_id for _, block_id in items]
                quarantine = Quarantine(tuple(block_id for _, block_id in items), late.settled)
                raise TransferCancelled("cancelled", quarantine) from error

        self.replace("get", stalled)
        return late

    def miss_get(self, number: int) -> list[int]:
        """The blocks of that load from here on, counted from 1, do not come in time, and nothing
        writes into their places. Returns: how many blocks each load asked for."""
        sizes: list[int] = []

        async def missing(real: Any, lease_id: str, items: Any, *rest: Any, **options: Any) -> Any:
            sizes.append(len(items))
            if len(sizes) == number:
                return GetResult(0, dict.fromkeys(range(len(items)), "deadline"))
            return await real(lease_id, items, *rest, **options)

        self.replace("get", missing)
        return sizes

    def silence(self, answers: asyncio.Event | None = None) -> Callable[[], int]:
        """Calls wait until `answers`, those that have the time for it. Returns: how many wait."""
        connection = self.client._connection
        real, heard, num_waiting = connection.call, answers or asyncio.Event(), 0

        async def call(method: Any, request: Any, deadline: Any, **options: Any) -> Any:
            nonlocal num_waiting
            num_waiting += 1
            try:
                async with asyncio.timeout(deadline.left_s()):
                    await heard.wait()
                return await real(method, request, Deadline.after(WAIT_S), **options)
            except TimeoutError as error:
                raise DeadlineExceeded("the store") from error
            finally:
                num_waiting -= 1

        connection.call = call
        return lambda: num_waiting

    def speak(self) -> None:
        """After `silence`."""
        vars(self.client._connection).pop("call", None)


class WorkerProbe:
    """See the module. `model`: the worker's own, which a test may hold."""

    def __init__(self, worker: main.Worker, model: Any = None) -> None:
        self.worker = worker
        self.model = model

    @property
    def _core(self) -> Any:
        return self.worker.core

    @property
    def _role(self) -> Any:
        return self.worker.role

    # ---- look

    def status(self) -> common_pb2.WorkerStatus:
        """As GetWorkerStatus answers, but for the laws, which ask the engine."""
        status: common_pb2.WorkerStatus = self._core.status()
        return status

    async def checked_status(self) -> common_pb2.WorkerStatus:
        """All of it; the engine must not be held."""
        status: common_pb2.WorkerStatus = await self._core.checked_status()
        return status

    async def metrics(self) -> dict[tuple[str, ...], float]:
        """As /metrics shows them: by name and what labels besides the worker's own."""
        collector = WorkerCollector(self._core, asyncio.get_running_loop())
        return _by_name(await asyncio.to_thread(lambda: list(collector.collect())))

    def counts(self, name: str) -> dict[str, int]:
        """Those of one of the worker's own counters that are above zero, by its labels; "" where it
        has none. The engine is not asked: it may be held."""
        collector: Any = WorkerCollector(self._core, asyncio.get_running_loop())
        collector._snapshot = lambda: None
        return {
            " ".join(labels): int(value)
            for (found, *labels), value in _by_name(collector.collect()).items()
            if found == f"{name}_total" and value
        }

    def count(self, name: str) -> int:
        """Of a counter, over all of its labels."""
        return sum(self.counts(name).values())

    def states(self) -> list[str]:
        """Of its requests."""
        return [state.value for state in self._role.worker.states.values()]

    @property
    def is_idle(self) -> bool:
        """No request is live."""
        return self._core.num_live == 0

    @property
    def is_draining(self) -> bool:
        return bool(self._core.draining)

    @property
    def has_failed(self) -> bool:
        """Its process should end."""
        return bool(self._core.failed.is_set())

    @property
    def num_in_line(self) -> int:
        """Of a decode worker: requests that wait for a place in its steps."""
        return int(self._role.worker.num_in_line)

    @property
    def num_free_places(self) -> int:
        """Of a decode worker: samples more that its steps have room for."""
        return int(self._role.worker.num_free_places)

    @property
    def num_in_steps(self) -> int:
        """Requests that its engine has."""
        stats = self._core.thread.stats
        return int(stats.num_waiting + stats.num_running)

    @property
    def num_chains_behind(self) -> int:
        """Chains of blocks that wait to be stored behind their requests."""
        return int(self._core.write_behind.num_chains)

    @property
    def not_stored_behind(self) -> dict[str, int]:
        """Blocks that no handle named and that did not get into the store, by reason."""
        return dict(self._core.counts.not_written_back)

    @property
    def num_lent_blocks(self) -> int:
        return int(self._core.lender.num_lent_blocks) if self._core.lender else 0

    @property
    def num_loans(self) -> int:
        """Leases on what it lends."""
        return int(self._core.lender.loans.num_leases) if self._core.lender else 0

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        """Of the full blocks."""
        found: list[bytes] = self._core.chain(SALT, "").hashes(tuple(tokens))
        return found

    async def settle(self) -> None:
        """What it puts and gives back is through."""
        await self._core.connector.settle()

    async def links(self) -> list[common_pb2.LinkStatus]:
        """What was measured of its ways, once that is over."""
        await self._core.links.settle()
        return list(self.status().links)

    @property
    def num_quarantined_blocks(self) -> int:
        """Blocks that a put or a copy still reads, or may still write into."""
        return int(self._core.thread.stats.num_quarantined_blocks)

    async def quarantined(self, num_blocks: int) -> None:
        """Until so many blocks are out of use."""
        await until(lambda: self._core.thread.stats.num_quarantined_blocks == num_blocks)

    async def unreferenced(self, *, is_engine_dead: bool = False) -> None:
        """Until no block is held, nor lent to the measuring of a link; and every law holds."""
        thread = self._core.thread
        if is_engine_dead:  # its thread does nothing more
            await until(lambda: thread._engine.stats().num_referenced_blocks == 0)
            thread._engine.check_integrity()
            return
        await until(lambda: thread.stats.num_referenced_blocks == 0)
        await thread.call(lambda engine: engine.check_integrity())

    async def status_as(self, role: str) -> common_pb2.WorkerStatus:
        """Asked for by the service of that role. Raises: BatonError."""
        made = {"prefill": prefill_pb2_grpc.PrefillStub, "decode": decode_pb2_grpc.DecodeStub}
        async with rpc.channel(self.worker.address) as channel:
            stub: Any = made[role](channel)
            with translated():
                asked = common_pb2.GetWorkerStatusRequest()
                status: common_pb2.WorkerStatus = await stub.GetWorkerStatus(asked, timeout=WAIT_S)
        return status

    async def set_role(self, role: str) -> worker_control_pb2.SetRoleReply:
        """As an operator does. Raises: BatonError."""
        async with rpc.channel(self.worker.address) as channel:
            stub: Any = worker_control_pb2_grpc.WorkerControlStub(channel)
            with translated():
                asked = worker_control_pb2.SetRoleRequest(role=role)
                reply: worker_control_pb2.SetRoleReply = await stub.SetRole(asked, timeout=WAIT_S)
        return reply

    @property
    def memory(self) -> Any:
        """Its engine's cache as transports see it."""
        return self._core.memory

    async def drain(self) -> bool:
        """As a worker that is asked to stop begins. Returns: whether all that it had is over."""
        return bool(await self._core.drain(WAIT_S))

    # ---- hold

    @property
    def home(self) -> StoreWay:
        """The way to its own store, which must be there."""
        assert self.has_store
        return StoreWay(self._core.connector.client)

    @property
    def has_store(self) -> bool:
        """Its own store answers it."""
        return self._core.connector.client is not None

    async def way_to(self, node_id: str, address: str, incarnation: bytes) -> StoreWay:
        """The way to another node's store or lender, made and measured if need be. Raises:
        BatonError."""
        client = await self._core.remote_stores.client(
            node_id, address, incarnation, Deadline.after(WAIT_S)
        )
        await self._core.links.settle()
        return StoreWay(client)

    async def way_by(self, handle: common_pb2.KvHandle) -> StoreWay:
        """To where its first blocks are."""
        run = handle.runs[0]
        return await self.way_to(run.node_id, run.store_address, run.store_incarnation)

    async def forget_ways(self) -> None:
        """As if it had met no other node's store, nor been refused by one."""
        remote = self._core.remote_stores
        for peer in remote._peers.values():
            peer.drop()
        remote._peers.clear()
        await remote.settle()

    async def can_reach(self, handle: common_pb2.KvHandle) -> bool:
        """It has a way to where the handle's blocks are, or makes one."""
        try:
            await self.way_by(handle)
        except BatonError:
            return False
        return True

    def watch_reservations(self) -> list[str]:
        """Request ids whose blocks the engine was asked for, in order."""
        engine, asked = self._core.thread._engine, []
        reserve = engine.reserve

        def watched(request: Any) -> Any:
            reservation = reserve(request)
            asked.append(request.request_id.partition("#")[0])
            return reservation

        engine.reserve = watched
        return asked

    def release_loan(self, lease_id: str) -> None:
        """As decode gives back what was lent to it."""
        self._core.lender.release(lease_id)

    def break_sealing(self, *, is_released: bool = False) -> None:
        """Lending a prompt fails; or its lease is released before it is sealed."""
        lender = self._core.lender
        real = lender.seal

        async def troubled(lease_id: str) -> Any:
            if not is_released:
                raise TransferFailed("the test says so")
            sealed = await real(lease_id)
            lender.release(lease_id)
            return sealed

        lender.seal = troubled

    def mend_sealing(self) -> None:
        vars(self._core.lender).pop("seal", None)

    def flip_bit(self, block_id: int) -> None:
        """In its cache, as damage does."""
        self._core.lender.lender.memory.view[block_id, 5] ^= 1

    @property
    def num_blocks_ever_lent(self) -> int:
        return int(self._core.lender.loans.counters.num_blocks_lent)

    @property
    def num_bytes_lent(self) -> int:
        """So many were read of what it lent."""
        return int(self._core.lender.loans.counters.num_bytes_read)

    def num_blocks_read(self, key: int) -> int:
        """Of a decode worker: blocks that were copied for the request under this key."""
        requests = self._role.worker._requests.values()
        (request,) = [request for request in requests if request.key == key]
        return int(request._leg.num_bytes_read // self._core.layout.block_bytes)

    def hold_sealing(self) -> Gate:
        """It lends no prompt until it is opened."""
        return Gate(self._core.lender, "seal")

    def hold_attaching(self) -> Gate:
        """It comes to no other node's store that it has not met."""
        return Gate(self._core.remote_stores, "_attach")

    def hold_meeting(self) -> Gate:
        """It comes to no other node's store until it is opened."""
        return Gate(self._core.remote_stores, "client")

    def release_later(self, *handles: common_pb2.KvHandle) -> None:
        """Give back the leases of handles, as the holder does, at its own store."""
        leases: set[str] = set().union(*map(leases_of, handles))
        connector = self._core.connector
        connector.release_later(connector.client, sorted(leases))

    async def put_one(self) -> int:
        """One block and a tail into its store. Returns: how many of both were not stored."""
        client = self._core.connector.client
        put = await client.put_blocks(
            None, b"", [(bytes(16), 0)], ("t", 1, 2), 5.0, Deadline.after(WAIT_S), num_tokens=4
        )
        assert len(put.refs) + (put.tail is not None) + put.not_stored == 2
        await client.release([put.lease_id], deadline=Deadline.after(WAIT_S))
        return int(put.not_stored)

    async def ask_engine(self) -> None:
        """Raises: Unavailable where it has none any more."""
        await self._core.thread.call(lambda engine: engine.stats())

    def stall_store(self) -> None:
        """Its own store is slow, whatever its own look at it finds; until `wake_store`."""
        self._core.connector.__class__ = _StalledConnector

    def wake_store(self) -> None:
        self._core.connector.__class__ = StoreConnector

    @property
    def why_not_ready(self) -> str:
        """As its readiness probe is answered; "": ready."""
        return self.worker.why_not_ready()

    def write_late(self, block_ids: Sequence[int]) -> None:
        """Into its cache, as a transfer does that was given up."""
        self._core.thread._engine.kv.host_view[list(block_ids)] = 255


class Beats:
    """Stands for a worker's heartbeat: what the registry would have been told, in order."""

    def __init__(self, worker: WorkerProbe) -> None:
        self._worker = worker
        self.told: list[str] = []
        life: Any = worker.worker._life
        life.heartbeat = self

    def beat_now(self) -> None:
        self.told.append("draining" if self._worker.is_draining else "serving")

    async def stop(self) -> None:
        num_live, num_lent = self._worker.worker.core.num_live, self._worker.num_lent_blocks
        self.told.append(f"gone, {num_live} live, {num_lent} lent")


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """What gRPC says, as our errors."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise rpc.error_from_rpc(error) from error


class _StalledConnector(StoreConnector):
    client = property(lambda self: None)  # type: ignore[assignment]


def _by_name(families: Iterable[Any]) -> dict[tuple[str, ...], float]:
    return {
        (
            sample.name,
            *(v for k, v in sample.labels.items() if k not in ("worker_id", "role")),
        ): sample.value
        for family in families
        for sample in family.samples
    }


class HeldWrites:
    """What workers of a role write to routers stands still, on streams that are opened from here
    on: as at a router that does not read. `batches`: what was to be written, of which the first
    waits."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        role: str = "prefill",
        *,
        until: Callable[[Any], bool] = lambda event: True,
    ) -> None:
        """until: what comes before a message with such an event is written."""
        self.batches: list[list[Any]] = []
        self._until = until
        self._may_write, self._is_waiting = asyncio.Event(), asyncio.Event()
        module = {"prefill": prefill_server, "decode": decode_server}[role]
        self._real = module.serve
        monkeypatch.setattr(module, "serve", self._serve)

    async def wait_held(self) -> None:
        """A message is to be written, and is not."""
        async with asyncio.timeout(WAIT_S):
            await self._is_waiting.wait()

    def open(self) -> None:
        self._may_write.set()

    async def _serve(
        self, commands: Any, obey: Any, session: Any, outbox: Any, write: Any, *others: Any
    ) -> None:
        async def gated(events: Any) -> None:
            self.batches.append(events)
            if any(map(self._until, events)):
                self._is_waiting.set()
                await self._may_write.wait()
            await write(events)

        await self._real(commands, obey, session, outbox, gated, *others)


def is_account(event: Any) -> bool:
    """A prefill worker's last word of a prompt."""
    return bool(event.reply.HasField("leg"))
