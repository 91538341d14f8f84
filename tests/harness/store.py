"""Stores in processes of their own and workers of them: real slabs in shared memory, real NIXL
agents."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from kvstore import block_hash, store_process, store_status, wire
from kvstore.block_refs import Block
from kvstore.block_source import MatchResult
from kvstore.client import KvStoreClient, PutResult
from kvstore.config import KvStoreSettings
from kvstore.errors import StoreIntegrityError, TransferCancelled, TransferTimeout, reason_of
from kvstore.store_connection import HEARTBEAT_S
from kvstore.transport.base import BlockMemory, GetResult
from kvstore.transport.device import PEER_COPIES, PeerCopies
from kvstore.transport.shm import ShmTransport
from process.deadline import Deadline
from protos import inference_pb2, kvstore_pb2
from tests.harness.fake_device import FakeDevice
from tests.harness.service_process import own_address
from tests.harness.waiting import Gate, within

FINGERPRINT = "ab" * 16
BLOCK_BYTES = 5000  # no multiple of a page
NUM_BLOCKS = 48
BLOCK_SIZE = 16
START_S = 30.0
CALL_S = 10.0
TRANSPORTS = ("shm", "nixl", "grpc")

SETTINGS = KvStoreSettings(
    capacity_bytes=32 * 8192,
    sweep_interval_s=0.02,
    integrity_interval_s=0.05,
    attachment_ttl_s=60.0,
    quarantine_grace_s=0.2,
    drain_s=0.3,
)


def chain_of(name: str, num_blocks: int) -> list[bytes]:
    """The chain hashes of the first full blocks of a prompt of that name."""
    root = block_hash.root_key(name.encode(), FINGERPRINT)
    return block_hash.chain(root, range(num_blocks * BLOCK_SIZE), BLOCK_SIZE)


class OnDevice(str):
    """The name of a transport, for a worker whose blocks lie on a device."""


class LocalStore(store_process.RunningStore):
    """A store in this process, and how tests damage what it holds."""

    @property
    def slab_path(self) -> Path:
        assert self.node.slab is not None
        return self.node.slab.path

    def flip_bit(self, block: Block, at: int = -1) -> None:
        """One of this byte of the frame."""
        assert self.node.slab is not None
        self.node.slab.block(block.frame)[at] ^= 1

    def flip_generation(self, block: Block, bit: int) -> None:
        assert self.node.slab is not None
        self.node.slab.generations[block.frame] ^= np.uint64(1 << bit)

    def row(self) -> inference_pb2.StoreStatus:
        """What the registry says about it."""
        return store_status.store_status(self.node, self.address)

    def break_a_law_once(self, words: str) -> None:
        """At its next look after leases that lapsed."""
        store = self.node.store
        assert store is not None
        real = store.lapse

        def broken(now_s: float) -> None:
            store.lapse = real  # type: ignore[method-assign]
            raise StoreIntegrityError(words)

        store.lapse = broken  # type: ignore[method-assign]

    @contextlib.contextmanager
    def miscounting_pins(self, block: Block) -> Iterator[None]:
        assert self.node.store is not None
        entry = self.node.store.tree.find(block.chain_hash)
        assert entry is not None
        entry.num_pins += 1
        try:
            yield
        finally:
            entry.num_pins -= 1

    @contextlib.contextmanager
    def tearing(self, block: Block) -> Iterator[None]:
        """Shared memory: the frame is written again behind each copy of it, before the second look
        at its generation."""
        slab, copy_in = self.node.slab, ShmTransport._copy_in
        assert slab is not None

        def torn(transport: ShmTransport, blocks: Any, frames: Any) -> list[int]:
            checksums = copy_in(transport, blocks, frames)
            if block.frame in frames:
                slab.publish(block.frame, block.generation + 1)
            return checksums

        ShmTransport._copy_in = torn  # type: ignore[method-assign]
        try:
            yield
        finally:
            ShmTransport._copy_in = copy_in  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def local_store(
    settings: KvStoreSettings = SETTINGS, *, law: str = ""
) -> AsyncIterator[LocalStore]:
    """At the end every law holds, or the one is broken that the test broke."""
    async with store_process.running(settings) as running:
        yield LocalStore(running.node, running.address, running.publisher, running.metrics_address)
        error = await running.node.check_integrity()
        assert law in error if law else not error


class HeldCopies:
    """Copies out of shared memory go on when they may. There alone a test has nothing between."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def __enter__(self) -> HeldCopies:
        self._copy_in = copy_in = ShmTransport._copy_in

        def slowly(transport: ShmTransport, *places: Any) -> list[int]:
            assert self.may_go_on.wait(START_S)
            time.sleep(0.002)
            return copy_in(transport, *places)

        ShmTransport._copy_in = slowly  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.may_go_on.set()
        ShmTransport._copy_in = self._copy_in  # type: ignore[method-assign]


async def cancelled(
    work: Coroutine[Any, Any, Any], num_turns: int, release: Callable[[], object]
) -> Any:
    """Cancel a call of a client after so many turns of the loop, then `release` what holds it, and
    wait until nothing moves any more. Returns: its result, if it was over before; else None."""
    task = asyncio.create_task(work)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    task.cancel()
    release()
    try:
        return await task
    except TransferCancelled as error:
        await asyncio.wait_for(error.quarantine.settled, START_S)
    except asyncio.CancelledError:
        pass
    return None


class Worker:
    """A worker's memory and its client, with shorthands. Block i begins with random bytes."""

    def __init__(
        self,
        transport: str,
        block_bytes: int,
        num_blocks: int,
        seed: int,
        *,
        peer_copies: PeerCopies = PEER_COPIES,
    ) -> None:
        """peer_copies: of its device."""
        self.transport = str(transport)
        self.transport_of = transport
        """Says where its blocks lie, too."""
        self.view = np.random.default_rng(seed).integers(
            0, 256, (num_blocks, block_bytes), dtype=np.uint8
        )
        self.memory = BlockMemory.of(self.view)
        self.device = FakeDevice()
        self.device.peer_copies = peer_copies
        if isinstance(transport, OnDevice):
            address = self.device.holding(self.view)
            self.memory = BlockMemory.on_device(self.device, address, block_bytes, num_blocks)
        self.worker_id = f"worker-{secrets.token_hex(4)}"
        self.incarnation = secrets.token_bytes(16)
        self.client: KvStoreClient

    async def attach(
        self,
        address: str,
        fingerprint: str = FINGERPRINT,
        *,
        timeout_s: float = START_S,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> KvStoreClient:
        self.client = await KvStoreClient.attach(
            address,
            worker_id=self.worker_id,
            worker_incarnation=self.incarnation,
            fingerprint=fingerprint,
            memory=self.memory,
            transport=self.transport,
            timeout_s=timeout_s,
            heartbeat_s=heartbeat_s,
        )
        return self.client

    async def put(
        self,
        chain: Sequence[bytes],
        block_ids: Sequence[int],
        *,
        parent: bytes = b"",
        tail: tuple[str, int, int] | None = None,
        lease_id: str | None = None,
        ttl_s: float = 60.0,
        deadline: Deadline | None = None,
    ) -> PutResult:
        return await self.client.put_blocks(
            lease_id,
            parent,
            list(zip(chain, block_ids, strict=True)),
            tail,
            ttl_s,
            deadline or within(),
            num_tokens=BLOCK_SIZE,
        )

    async def get(
        self,
        lease_id: str,
        refs: Sequence[Block],
        block_ids: Sequence[int],
        seconds: float = CALL_S,
        incarnation: bytes | None = None,
    ) -> dict[int, str]:
        """Returns: what failed; the byte count must fit to that."""
        items = list(zip(refs, block_ids, strict=True))
        result = await self.client.get_blocks(
            lease_id, items, within(seconds), incarnation=incarnation
        )
        assert result.num_bytes == (len(items) - len(result.failed)) * self.view.shape[1]
        return result.failed

    async def get_too_late(
        self, lease_id: str, refs: Sequence[Block], block_ids: Sequence[int]
    ) -> dict[int, str]:
        """As `get` without any time. Nothing writes there any more when it returns."""
        try:
            return await self.get(lease_id, refs, block_ids, 0.0)
        except TransferTimeout as error:
            await asyncio.wait_for(error.quarantine.settled, START_S)
            return dict.fromkeys(range(len(refs)), reason_of(error))

    async def match(self, chain: Sequence[bytes], ttl_s: float = 30.0) -> MatchResult:
        return await self.client.match(chain, ttl_s=ttl_s, deadline=within())

    async def release(self, *lease_ids: str) -> int:
        return await self.client.release(lease_ids, deadline=within())

    async def call(self, method: str, **fields: Any) -> Any:
        """One call of the store's service that its client would not make so. Raises: BatonError."""
        if method == "Write":
            request = iter([kvstore_pb2.WriteChunk(**fields)])
        else:
            request = getattr(kvstore_pb2, f"{method}Request")(**fields)
        connection = self.client._connection
        return await connection.call(getattr(connection.stub, method), request, within())

    @property
    def attachment_id(self) -> str:
        return self.client._attachment_id

    async def introduce(self, transport: str) -> Any:
        """Once more, over this transport. Returns: what it is told."""
        request = kvstore_pb2.AttachRequest(
            worker_id="w",
            worker_incarnation=bytes(16),
            model_fingerprint=bytes.fromhex(FINGERPRINT),
            block_bytes=self.view.shape[1],
            transport=transport,
        )
        request.checksum = wire.checksum_of(request)
        connection = self.client._connection
        return await connection.call(connection.stub.Attach, request, within())

    async def write_nothing(self, timeout_s: float) -> None:
        """Its transport alone is asked to."""
        await self.client.transport.put("", [], within(timeout_s))

    async def report(self, blocks: Sequence[Block]) -> int:
        """Tell the store that they are bad. Returns: how many it dropped."""
        told = [wire.block_to_proto(block) for block in blocks]
        reply = await self.call("Report", attachment_id=self.attachment_id, blocks=told)
        return int(reply.num_dropped)

    def hold_gets(self) -> Gate:
        """Copies that its client begins."""
        return Gate(self.client.transport, "get")

    def alter_gets(self, change: Callable[[GetResult], GetResult]) -> None:
        """What its transport says of blocks that arrived."""
        transport = self.client.transport
        get = transport.get

        async def altered(*arguments: Any) -> GetResult:
            return change(await get(*arguments))

        transport.get = altered  # type: ignore[method-assign]

    @contextlib.contextmanager
    def spoiling_gets(self, num_blocks: int) -> Iterator[None]:
        """One of so many blocks arrives with a flipped bit, and its transport notices nothing."""
        transport: Any = self.client.transport
        get = transport.get

        async def wrong(lease_id: str, items: Any, deadline: Deadline) -> GetResult:
            got: GetResult = await get(lease_id, items, deadline)
            if len(items) == num_blocks:
                self.view[items.block_ids[num_blocks // 2]][17] ^= 1
                got = dataclasses.replace(got, checksums=None)
            return got

        transport.get = wrong
        yield
        transport.get = get

    @contextlib.contextmanager
    def failing_puts(self, num_blocks: int, error: Exception) -> Iterator[None]:
        """Those of so many blocks."""
        transport: Any = self.client.transport
        put = transport.put

        async def failing(lease_id: str, items: Any, deadline: Deadline) -> Any:
            if len(items) == num_blocks:
                raise error
            return await put(lease_id, items, deadline)

        transport.put = failing
        yield
        transport.put = put

    def begin_reading(
        self, lease_id: str, blocks: Sequence[Block], *, chunk_bytes: int, timeout_s: float = CALL_S
    ) -> grpc.aio.UnaryStreamCall[Any, Any]:
        """The call that the transport grpc makes: its messages come as they are read from it."""
        request = kvstore_pb2.ReadRequest(
            attachment_id=self.attachment_id,
            lease_id=lease_id,
            blocks=[wire.block_to_proto(block) for block in blocks],
            chunk_bytes=chunk_bytes,
        )
        call: grpc.aio.UnaryStreamCall[Any, Any] = self.client._connection.stub.Read(
            request, timeout=timeout_s
        )
        return call

    async def listed(self) -> list[bytes]:
        """What an audit is told."""
        replies = self.client._connection.stub.List(kvstore_pb2.ListRequest(), timeout=CALL_S)
        return [each async for reply in replies for each in reply.chain_hashes]

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """As they are in its memory."""
        return [block_hash.checksum(self.view[block_id]) for block_id in block_ids]

    async def status(self) -> kvstore_pb2.GetStatusReply:
        status = await self.client.status(check_integrity=True, deadline=within())
        assert status.integrity_error == ""
        return status


class Calls:
    """Calls of one method by a worker's client: they wait until they may go on, or fail.

    Attributes: requests: that came, in order.
    """

    def __init__(self, worker: Worker, method: str, error: Exception | None = None) -> None:
        self.requests: list[Any] = []
        self.may_go_on = asyncio.Event()
        connection = worker.client._connection
        real, watched = connection.call, getattr(connection.stub, method)

        async def call(method: Any, request: Any, deadline: Deadline, **options: Any) -> Any:
            if method is watched:
                self.requests.append(request)
                if error is not None:
                    raise error
                await self.may_go_on.wait()
            return await real(method, request, deadline, **options)

        connection.call = call  # type: ignore[method-assign]


NewWorker = Callable[..., Awaitable[Worker]]
"""`new_worker(address, transport, block_bytes=, num_blocks=)`: attached."""


class StoreProcess:
    """`python -m kvstore` in a process of its own, always on one port."""

    def __init__(self, settings: KvStoreSettings) -> None:
        self.settings = dataclasses.replace(settings, listen=own_address())
        self.address = self.settings.listen
        self.process: asyncio.subprocess.Process

    async def start(self) -> dict[str, str]:
        """Returns: the fields of the ready line."""
        defaults = KvStoreSettings()
        overrides = [
            f"--set={field.name}={value}"
            for field in dataclasses.fields(defaults)
            if (value := getattr(self.settings, field.name)) != getattr(defaults, field.name)
        ]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvstore", *overrides, stderr=asyncio.subprocess.PIPE
        )
        return await self.line("ready")

    async def line(self, event: str) -> dict[str, str]:
        """The next log line of that event."""
        assert self.process.stderr is not None
        async with asyncio.timeout(START_S):
            while line := await self.process.stderr.readline():
                try:
                    fields = json.loads(line)
                except ValueError:
                    continue  # NIXL writes lines of its own
                if fields.get("event") == event:
                    return dict(fields)
        raise AssertionError(f"the store ended without '{event}'")

    async def pause(self) -> None:
        await paused(self.process)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Returns: the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
        async with asyncio.timeout(START_S):
            # Draining its log lets the pipe close with the process.
            await self.process.communicate()
        return self.process.returncode or 0


async def paused(process: asyncio.subprocess.Process) -> None:
    """Stop a process, and wait until each of its threads has stopped."""
    process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{process.pid}/task")
    async with asyncio.timeout(START_S):
        while True:
            stats = [(task / "stat").read_text() for task in tasks.iterdir()]
            if all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats):
                return
            await asyncio.sleep(0.001)
