"""The longest turns of a store's event loop, by what the store does meanwhile: while one turn runs
every other call waits.

A store in a process of its own holds `--blocks` blocks as small as frames can be and publishes its
index to a Redis. One operation after the other: fill, match, evict, a report of damage, a check of
the laws to its end, full publications, a list of everything; then all at once for `--seconds`.
`late` is how much later a timer of 1 ms fired than it was due: the length of a turn, and what other
processes took of the core. `cpu` is the time that the loop's thread computed between two timers,
which other processes change less (`same_work` says how much: the same piece of work, over and
over); `gc` is that of the garbage collector. `status_s` is how long
`baton status` took beside it, from the start of the process, `answer_s` how long the router took to
answer what it asks, `status_without_store` how often it did not show the store, and
`first_attach_s` how long the first worker waited for the store's memory.

    python -m benchmarks.store_loop turns --blocks 1000000 --seconds 600

The last line printed is one JSON object. Takes 4 KiB of memory a block in /dev/shm and 1 KB beside
it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
import redis.asyncio
import uvloop

from baton.client import Client
from baton.cluster.local_cluster import find_redis_server
from benchmarks import harness
from kvstore import block_hash, store_process, wire
from kvstore.block_refs import PackedBlocks
from kvstore.config import KvStoreSettings
from kvstore.invariants import SlicedCheck
from process import entrypoint, logs, registry, rpc
from protos import kvstore_pb2, kvstore_pb2_grpc

MODEL = "baton-5m"
NODE = "big"
FRAME_BYTES = 64
STRIDE_BYTES = 4096
"""Bytes from one frame of the store to the next: a page."""
CHAIN = 64
"""Number of blocks of a prompt."""
CHAINS = 8
"""Number of prompts in one Reserve: a step of a prefill worker."""
TTL_MS = 60_000
CALL_S = 120.0
TICK_S = 0.001
STALL_S = 0.02
CHECKSUM = block_hash.checksum(bytes(FRAME_BYTES))
"""Checksum of the zeros that lie in a frame which was never written."""


# -- the store


class Turns:
    """Measures how late a timer of an event loop fires, and what the loop's thread computes between
    two."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last_s, self._cpu_s = time.monotonic(), time.thread_time()
        self._late_s: list[float] = []
        self._computed_s: list[float] = []
        self._collected_s: list[float] = []
        self._began_s = 0.0
        gc.callbacks.append(self._collect)
        self._loop.call_later(TICK_S, self._tick)

    def take(self) -> dict[str, Any]:
        """The figures since the last call."""
        late_s, computed_s = sorted(self._late_s), sorted(self._computed_s)
        collected_s = sorted(self._collected_s)
        self._late_s, self._computed_s, self._collected_s = [], [], []
        return {
            "turns": len(late_s),
            "late_ms": [round(each * 1e3, 1) for each in late_s[:-4:-1]],
            "cpu_ms": [round(each * 1e3, 1) for each in computed_s[:-4:-1]],
            "cpu_p999_ms": round(computed_s[len(computed_s) * 999 // 1000] * 1e3, 1),
            "gc_ms": [round(each * 1e3, 1) for each in collected_s[:-4:-1]],
            "late_over_20_ms": sum(each > STALL_S for each in late_s),
            "cpu_over_20_ms": sum(each > STALL_S for each in computed_s),
        }

    def _collect(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.thread_time()
        else:
            self._collected_s.append(time.thread_time() - self._began_s)

    def _tick(self) -> None:
        now_s, cpu_s = time.monotonic(), time.thread_time()
        self._late_s.append(now_s - self._last_s - TICK_S)
        self._computed_s.append(cpu_s - self._cpu_s)
        self._last_s, self._cpu_s = now_s, cpu_s
        self._loop.call_later(TICK_S, self._tick)


async def _serve(settings: dict[str, Any]) -> None:
    """Serve a store. Each line of stdin asks for its turns since the last one; `check` checks the
    invariants to the end before that."""
    loop, asked = asyncio.get_running_loop(), asyncio.Queue[str]()

    def listen() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(asked.put_nowait, line.strip())
        loop.call_soon_threadsafe(asked.put_nowait, "stop")

    async with store_process.running(KvStoreSettings(**settings)) as store:
        entrypoint.begin_serving()
        turns = Turns()
        threading.Thread(target=listen, name="stdin", daemon=True).start()
        _say({"address": store.address})
        while (word := await asked.get()) != "stop":
            found: dict[str, Any] = {}
            if word == "check" and store.node.store is not None:
                check, began_s = SlicedCheck(store.node.store, time.monotonic), time.monotonic()
                found["whole"] = await check.run(began_s + CALL_S)
                found["check_s"] = round(time.monotonic() - began_s, 1)
            _say({**turns.take(), **found})


def _say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


class StoreProcess:
    """A store in a process of its own, whose loop's turns are measured."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    @asynccontextmanager
    async def start(cls, **settings: Any) -> AsyncIterator[tuple[StoreProcess, str]]:
        """Start the process. Returns: the store's address."""
        process = await asyncio.create_subprocess_exec(
            *harness.module("benchmarks.store_loop", "serve", json.dumps(settings)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        store = cls(process)
        try:
            yield store, (await store._line())["address"]
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                async with asyncio.timeout(CALL_S):
                    await process.wait()
            except TimeoutError:
                process.kill()

    async def turns(self, word: str = "turns") -> dict[str, Any]:
        """The figures of the store's loop since the last call."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n".encode())
        return await self._line()

    async def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        async with asyncio.timeout(CALL_S):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the store ended")
        found: dict[str, Any] = json.loads(line)
        return found


# -- the load


class Load:
    """The calls of a worker. No bytes are written: the store's zeros are the blocks' bytes, and a
    block is damaged when it was committed with another checksum."""

    def __init__(self, stub: Any, attachment_id: str, num_blocks: int, seed: int) -> None:
        self._stub = stub
        self._attachment_id = attachment_id
        self._draw = random.Random(seed)
        self._num_kept = num_blocks // CHAIN
        self.chains: list[list[bytes]] = []
        """The latest chains that were written, the oldest first: as many as the store has room
        for."""

    @classmethod
    async def attach(cls, stub: Any, name: str, num_blocks: int) -> Load:
        request = kvstore_pb2.AttachRequest(
            worker_id=name,
            worker_incarnation=name.encode().ljust(16, b"-"),
            model_fingerprint=bytes(32),
            block_bytes=FRAME_BYTES,
            transport="grpc",
        )
        request.checksum = wire.checksum_of(request)
        reply = await stub.Attach(request, timeout=CALL_S)
        return cls(stub, reply.attachment_id, num_blocks, seed=len(name))

    async def detach(self) -> None:
        request = kvstore_pb2.DetachRequest(attachment_id=self._attachment_id)
        await self._stub.Detach(request, timeout=CALL_S)

    async def write(self, num_blocks: int) -> None:
        """Reserve and commit new chains, so many blocks together."""
        for _ in range(0, num_blocks, CHAINS * CHAIN):
            await self._write([self._new_chain(CHAIN) for _ in range(CHAINS)], b"", CHECKSUM)

    async def match(self, num_matches: int) -> None:
        """Match a chain with a pin, and release it."""
        for _ in range(num_matches):
            await self._release((await self._match(self._draw.choice(self.chains))).lease_id)

    async def report(self, num_reports: int) -> None:
        """Report damaged blocks with a chain below each."""
        for _ in range(num_reports):
            chain = self._new_chain(CHAIN)
            await self._write([chain], b"", CHECKSUM ^ 1)
            matched = await self._match(chain)
            reply = await self._stub.Report(
                kvstore_pb2.ReportRequest(
                    attachment_id=self._attachment_id, blocks=matched.blocks[:1]
                ),
                timeout=CALL_S,
            )
            if reply.num_dropped != CHAIN:
                raise RuntimeError(f"{reply.num_dropped} blocks were dropped, not {CHAIN}")
            self.chains.remove(chain)
            await self._release(matched.lease_id)

    async def list_all(self) -> int:
        """List all blocks of the store. Returns: how many there are."""
        call = self._stub.List(kvstore_pb2.ListRequest(), timeout=CALL_S)
        return sum([len(reply.chain_hashes) async for reply in call])

    async def status(self, *, check: bool = False) -> kvstore_pb2.GetStatusReply:
        request = kvstore_pb2.GetStatusRequest(check_integrity=check)
        reply: kvstore_pb2.GetStatusReply = await self._stub.GetStatus(request, timeout=CALL_S)
        if reply.integrity_error:
            raise RuntimeError(reply.integrity_error)
        return reply

    async def until_synced(self) -> None:
        """Wait until the index has everything."""
        async with asyncio.timeout(CALL_S):
            while not (await self.status()).index_synced:
                await asyncio.sleep(0.05)

    def _new_chain(self, length: int) -> list[bytes]:
        chain = [self._draw.randbytes(16) for _ in range(length)]
        self.chains.append(chain)
        del self.chains[: len(self.chains) - self._num_kept]
        return chain

    async def _match(self, chain: list[bytes]) -> kvstore_pb2.MatchReply:
        request = kvstore_pb2.MatchRequest(
            attachment_id=self._attachment_id, chain_hashes=chain, pin=True, ttl_ms=TTL_MS
        )
        reply: kvstore_pb2.MatchReply = await self._stub.Match(request, timeout=CALL_S)
        return reply

    async def _release(self, lease_id: str) -> None:
        request = kvstore_pb2.ReleaseRequest(
            attachment_id=self._attachment_id, lease_ids=[lease_id]
        )
        await self._stub.Release(request, timeout=CALL_S)

    async def _write(self, chains: list[list[bytes]], parent: bytes, checksum: int) -> None:
        asked = [
            kvstore_pb2.ReserveChain(parent=parent, chain_hashes=b"".join(chain))
            for chain in chains
        ]
        reply = await self._stub.Reserve(
            kvstore_pb2.ReserveRequest(
                attachment_id=self._attachment_id, ttl_ms=TTL_MS, chains=asked
            ),
            timeout=CALL_S,
        )
        taken = wire.to_be_written(reply)
        written = PackedBlocks.of(
            dataclasses.replace(block, checksum=checksum, num_tokens=1) for block in taken
        )
        await self._stub.Commit(
            kvstore_pb2.CommitRequest(
                attachment_id=self._attachment_id,
                lease_id=reply.lease_id,
                blocks=written.data,
                ends_lease=True,
            ),
            timeout=CALL_S,
        )


async def _all_at_once(
    load: Load,
    stub: Any,
    client: redis.asyncio.Redis,
    ask_status: Callable[[], Awaitable[float]],
    ask_router: Callable[[], Awaitable[float]],
    seconds: float,
) -> tuple[list[float], list[float], list[float]]:
    """Writers and readers all the time; every few seconds everything else. Returns: seconds of each
    `baton status` and of each answer of the router, and CPU seconds of a piece of work that is
    always the same."""
    ends_s = time.monotonic() + seconds
    took: list[float] = []
    answered: list[float] = []
    noise: list[float] = []

    async def every(pause_s: float, work: Callable[[], Awaitable[Any]]) -> None:
        while time.monotonic() + pause_s < ends_s:
            await asyncio.sleep(pause_s)
            await work()

    async def come_and_go() -> None:
        other = await Load.attach(stub, "passing-by", 0)
        await other.detach()

    async def see_status() -> None:
        took.append(await ask_status())

    async def see_answer() -> None:
        answered.append(await ask_router())

    async def compute() -> None:
        began_s = time.thread_time()
        sum(range(50_000))
        noise.append(time.thread_time() - began_s)

    await asyncio.gather(
        every(0.01, lambda: load.write(CHAINS * CHAIN)),
        every(0.005, lambda: load.match(1)),
        every(5.0, lambda: load.report(1)),
        every(3.0, lambda: load.status(check=True)),
        every(7.0, come_and_go),
        every(60.0, load.list_all),
        every(45.0, partial(client.flushall, asynchronous=True)),
        every(10.0, see_status),
        every(1.0, see_answer),
        every(0.1, compute),
    )
    return took, answered, noise


async def measure(num_blocks: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Measure all rows of the table."""
    async with AsyncExitStack() as stack:
        socket = folder / "redis.sock"
        server = (str(find_redis_server()), "--port", "0", "--unixsocket", str(socket))
        stack.enter_context(
            harness.child(*server, "--save", "", "--dir", str(folder), stdout=subprocess.DEVNULL)
        )
        client = registry.connect_redis(f"unix://{socket}", CALL_S)
        stack.push_async_callback(client.aclose)
        await _until_there(client)
        store, address = await stack.enter_async_context(
            StoreProcess.start(
                listen="127.0.0.1:0",
                node_id=NODE,
                redis_url=f"unix://{socket}",
                capacity_bytes=num_blocks * STRIDE_BYTES,
                attachment_ttl_s=3600.0,
            )
        )
        _, router = stack.enter_context(
            harness.service(
                "services.router", redis_url=f"unix://{socket}", listen="127.0.0.1:0", model=MODEL
            )
        )

        shown: list[bool] = []

        async def ask_status() -> float:
            began_s = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                *harness.module("baton.cli", "status", "--address", router["address"]),
                stdout=subprocess.PIPE,
            )
            said, _ = await process.communicate()
            shown.append(NODE.encode() in said)
            if not shown[-1]:
                harness.CONSOLE.print(f"baton status: {process.returncode}, {said.decode()}")
            return time.monotonic() - began_s

        cluster = await stack.enter_async_context(Client(router["address"]))

        async def ask_router() -> float:
            began_s = time.monotonic()
            await cluster.status()
            return time.monotonic() - began_s

        channel = await stack.enter_async_context(rpc.channel(address))
        stub: Any = kvstore_pb2_grpc.KvStoreStub(channel)
        began_s = time.monotonic()
        load = await Load.attach(stub, "worker", num_blocks)
        first_attach_s = time.monotonic() - began_s
        rows: list[dict[str, Any]] = []

        async def row(name: str, work: Awaitable[Any], word: str = "turns") -> None:
            began_s = time.monotonic()
            await work
            found = await store.turns(word)
            rows.append({"doing": name, "seconds": round(time.monotonic() - began_s, 1), **found})

        async def publish() -> None:
            before = (await load.status()).index_sequence
            await client.flushall(asynchronous=True)
            while (await load.status()).index_sequence == before:  # a heartbeat notices
                await asyncio.sleep(0.05)
            await load.until_synced()

        await row("attach", asyncio.sleep(1.0))
        await row("fill", load.write(num_blocks))
        await row("match", load.match(5000))
        await row("evict", load.write(num_blocks // 10))
        await row("report", load.report(10))
        await row("check", load.until_synced(), "check")
        await row("idle", asyncio.sleep(30.0 if num_blocks > 50000 else 1.0))
        await row("publish", publish())
        await row("list", load.list_all())
        await row("status", load.status(check=True))
        status_s = [await ask_status() for _ in range(5)]
        await row("after status", asyncio.sleep(0.1))
        answer_s = [await ask_router() for _ in range(5)]
        noise_s: list[float] = []
        if seconds:
            task = _all_at_once(load, stub, client, ask_status, ask_router, seconds)
            began_s = time.monotonic()
            more_s, more_answers_s, noise_s = await task
            answer_s += more_answers_s
            status_s += more_s
            found = await store.turns()
            rows.append(
                {"doing": "all at once", "seconds": round(time.monotonic() - began_s, 1), **found}
            )
    harness.show("turns of the store's loop", rows)
    return {
        "blocks": num_blocks,
        "first_attach_s": round(first_attach_s, 2),
        "status_s": harness.cuts(status_s, "s", 1.0),
        "answer_s": harness.cuts(answer_s, "s", 1.0),
        "same_work": harness.cuts(noise_s),
        "status_without_store": shown.count(False),
        "rows": rows,
    }


async def _until_there(client: redis.asyncio.Redis) -> None:
    async with asyncio.timeout(CALL_S):
        while True:
            try:
                await client.ping()
            except registry.REDIS_FAILURES:
                await asyncio.sleep(0.02)
            else:
                return


@harness.case
@click.option("--blocks", default=1_000_000)
@click.option("--seconds", default=60.0, help="of everything at once; 0: none")
def turns(blocks: int, seconds: float) -> dict[str, Any]:
    """The longest turns of a store's loop."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        found: dict[str, Any] = uvloop.run(measure(blocks, seconds, Path(name)))
    return found


@click.command("serve", hidden=True)
@click.argument("settings", type=json.loads)
def _serving(settings: dict[str, Any]) -> None:
    logs.configure("kvstore", "warning")
    uvloop.run(_serve(settings))


main = harness.program(__doc__, turns, _serving)

if __name__ == "__main__":
    main()
