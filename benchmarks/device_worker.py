"""One GPU worker of benchmarks.device_transfer: a cache on a device and a client of a real store,
in a process of its own, told what to do by JSON lines on stdin; each answer is one JSON line.

Times in answers are seconds on the machine's monotonic clock, so that those of two workers fit
together. Needs torch with CUDA.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.device_ceilings import dma, torch_copies
from kvstore import block_hash
from kvstore.blocks import Block
from kvstore.client import KvStoreClient
from kvstore.transport.base import BlockMemory, GetItems, GetResult, PutItem, Transport
from kvstore.transport.cuda import CudaDevice
from kvstore.transport.device import wait_for
from kvstore.transport.nixl import region_of
from kvstore.transport.nixl_agent import NixlAgent, Region, merge_runs
from process.deadline import Deadline

FINGERPRINT = "ab" * 16
BLOCK_SIZE = 16
BUDGET_S = 60.0
MATRIX = 4096
"""Side of the products that stand for a prefill chunk's arithmetic."""
FLIP = 0x5A
"""What a chunk's computation does to each byte of its blocks."""


class Timed:
    """A transport whose last transfer's time is known."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.name = inner.name
        self.counts_own_reads = inner.counts_own_reads
        self.last_s = 0.0

    async def put(
        self, lease_id: str, items: Sequence[PutItem], deadline: Deadline
    ) -> Sequence[int]:
        """See Transport."""
        began = time.monotonic()
        checksums = await self._inner.put(lease_id, items, deadline)
        self.last_s = time.monotonic() - began
        return checksums

    async def get(self, lease_id: str, items: GetItems, deadline: Deadline) -> GetResult:
        """See Transport."""
        began = time.monotonic()
        got = await self._inner.get(lease_id, items, deadline)
        self.last_s = time.monotonic() - began
        return got

    async def close(self) -> None:
        """See Transport."""
        await self._inner.close()


class Worker:
    """One process' device, cache and connections. Commands are the methods called do_<name>."""

    def __init__(self, device_id: int) -> None:
        self.device_id = device_id
        torch.cuda.set_device(device_id)
        torch.zeros(1, device=self.torch_device)  # the context is torch's and ours
        self.device = CudaDevice.open(device_id)
        self.cache: torch.Tensor
        self.memory: BlockMemory
        self.client: KvStoreClient | None = None
        self.agent: NixlAgent | None = None
        self.region: Region
        self.metadata = b""
        self.timed: Timed
        self._background: set[asyncio.Task[int]] = set()
        self._whole: torch.Tensor | None = None
        self._factors: list[torch.Tensor] | None = None

    @property
    def torch_device(self) -> str:
        return f"cuda:{self.device_id}"

    # -- set-up

    async def do_hello(self) -> dict[str, Any]:
        """What there is."""
        return {
            "device": torch.cuda.get_device_name(self.device_id),
            "num_devices": torch.cuda.device_count(),
            "torch": torch.__version__,
        }

    async def do_cache(self, total_bytes: int, block_bytes: int, seed: int) -> dict[str, Any]:
        """A cache of random bytes, always in the same memory: peers may hold its address."""
        if self._whole is None:
            self._whole = torch.empty(total_bytes, dtype=torch.uint8, device=self.torch_device)
        self.cache = self._whole.view(-1, block_bytes)
        num_blocks = len(self.cache)
        self.cache.copy_(self._random(num_blocks, block_bytes, seed))
        address = self.cache.data_ptr()
        self.memory = BlockMemory.on_device(self.device, address, block_bytes, num_blocks)
        torch.cuda.synchronize()
        return {}

    async def do_attach(self, address: str) -> dict[str, Any]:
        """To the store, over its slab, locked for the device."""
        began = time.monotonic()
        self.client = await KvStoreClient.attach(
            address,
            worker_id=f"worker-{secrets.token_hex(4)}",
            worker_incarnation=secrets.token_bytes(16),
            fingerprint=FINGERPRINT,
            memory=self.memory,
            transport="shm",
            timeout_s=BUDGET_S,
        )
        transport = self.client.transport
        self.client.transport = self.timed = Timed(transport)
        return {"seconds": time.monotonic() - began, "transport": type(transport).__name__}

    async def do_detach(self) -> dict[str, Any]:
        """Leave the store."""
        if self._background:
            await asyncio.wait(self._background)
        if self.client is not None:
            await self.client.close()
            self.client = None
        return {}

    async def do_same(
        self, seed: int, sources: list[int], targets: list[int], flips: int = 0
    ) -> dict[str, Any]:
        """Whether blocks hold the bytes of `sources` of a cache of that seed, computed over
        `flips` times."""
        expected = self._random(self.memory.num_blocks, self.memory.block_bytes, seed)
        expected = expected[sources] ^ (FLIP if flips % 2 else 0)
        is_same = torch.equal(expected, self.cache[targets])
        return {"same": is_same}

    # -- through the store

    async def do_put(self, chain: str, block_ids: list[int]) -> dict[str, Any]:
        """Blocks into the store, then their lease is given back."""
        began = time.monotonic()
        put = await self._client.put_blocks(
            None,
            b"",
            list(zip(_hashes(chain, len(block_ids)), block_ids, strict=True)),
            None,
            BUDGET_S,
            Deadline.after(BUDGET_S),
            num_tokens=BLOCK_SIZE,
        )
        ended = time.monotonic()
        await self._client.release([put.lease_id], deadline=Deadline.after(BUDGET_S))
        if put.not_stored or put.num_bytes != len(block_ids) * self.memory.block_bytes:
            raise RuntimeError(f"put: {put.not_stored} blocks not stored, {put.num_bytes} bytes")
        return {"began": began, "ended": ended, "transport_s": self.timed.last_s}

    async def do_get(self, chain: str, block_ids: list[int]) -> dict[str, Any]:
        """The blocks of a chain out of the store, verified; match and release beside it."""
        hashes = _hashes(chain, len(block_ids))
        began = time.monotonic()
        matched = await self._client.match(
            hashes, ttl_s=BUDGET_S, deadline=Deadline.after(BUDGET_S)
        )
        matched_at = time.monotonic()
        await self._take(matched.lease_id, matched.blocks, block_ids)
        return {
            "began": matched_at,
            "ended": time.monotonic(),
            "match_s": matched_at - began,
            "transport_s": self.timed.last_s,
        }

    async def do_pull(self, refs: list[list[Any]], block_ids: list[int]) -> dict[str, Any]:
        """Blocks that somebody else named, as a handle does: pinned, copied, verified."""
        began = time.monotonic()
        blocks = [Block(bytes.fromhex(ref[0]), *ref[1:]) for ref in refs]
        lease_id, num_pinned = await self._client.pin(
            blocks, ttl_s=BUDGET_S, deadline=Deadline.after(BUDGET_S)
        )
        if num_pinned != len(blocks):
            raise RuntimeError(f"pin: {num_pinned} of {len(blocks)}")
        await self._take(lease_id, blocks, block_ids)
        return {"began": began, "ended": time.monotonic()}

    async def _take(self, lease_id: str, blocks: Sequence[Block], block_ids: list[int]) -> None:
        items = list(zip(blocks, block_ids, strict=True))
        got = await self._client.get_blocks(lease_id, items, Deadline.after(BUDGET_S))
        self._background.add(
            release := asyncio.create_task(
                self._client.release([lease_id], deadline=Deadline.after(BUDGET_S))
            )
        )
        release.add_done_callback(self._background.discard)
        if got.failed:
            raise RuntimeError(f"get: {got.failed}")

    async def do_prefill(
        self, chain: str, chunks: list[list[int]], num_products: int, overlapped: bool
    ) -> dict[str, Any]:
        """Compute chunk after chunk; put each one's blocks while the next computes, or, not
        `overlapped`, when all are computed. A line is written as soon as a chunk is in the store.
        """
        loop = asyncio.get_running_loop()
        filled: asyncio.Queue[tuple[float, float]] = asyncio.Queue()

        def engine() -> None:
            for block_ids in chunks:
                began = time.monotonic()
                self._compute(num_products, block_ids)
                # As services.worker.engine_thread: told only when the kernels are over.
                wait_for(self.device.compute_mark())
                loop.call_soon_threadsafe(filled.put_nowait, (began, time.monotonic()))

        began = time.monotonic()
        computing = loop.run_in_executor(None, engine)
        computes: list[tuple[float, float]] = []
        puts: list[tuple[float, float]] = []
        if not overlapped:
            await computing
        hashes = _hashes(chain, sum(map(len, chunks)))
        lease_id, first = None, 0
        for index, block_ids in enumerate(chunks):
            computes.append(await filled.get())
            put_began = time.monotonic()
            put = await self._client.put_blocks(
                lease_id,
                hashes[first - 1] if first else b"",
                list(zip(hashes[first:], block_ids, strict=False)),
                None,
                BUDGET_S,
                Deadline.after(BUDGET_S),
                num_tokens=BLOCK_SIZE,
            )
            puts.append((put_began, time.monotonic()))
            lease_id, first = put.lease_id, first + len(block_ids)
            refs = [
                [ref.chain_hash.hex(), ref.frame, ref.generation, ref.checksum, ref.num_tokens]
                for ref in put.refs
            ]
            say({"stored": index, "refs": refs})
        await computing
        await self._client.release([lease_id or ""], deadline=Deadline.after(BUDGET_S))
        return {"began": began, "computes": computes, "puts": puts}

    async def do_products(self, target_ms: float) -> dict[str, Any]:
        """How many products take about that long."""
        self._compute(20, [])
        torch.cuda.synchronize()
        began = time.monotonic()
        self._compute(100, [])
        torch.cuda.synchronize()
        one_ms = (time.monotonic() - began) * 1e3 / 100
        return {"num_products": max(1, round(target_ms / one_ms)), "one_ms": one_ms}

    def _compute(self, num_products: int, block_ids: list[int]) -> None:
        """Matrix products, then new contents for blocks: on the default stream, like the engine."""
        torch.cuda.set_device(self.device_id)
        if self._factors is None:
            self._factors = [
                torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device=self.torch_device) / 64
                for _ in range(2)
            ]
        product, factor = self._factors
        for _ in range(num_products):
            product = product @ factor
        if block_ids:
            self.cache[block_ids] ^= FLIP

    # -- the parts, and ceilings

    async def do_dma(self, block_ids: list[int], repeats: int) -> dict[str, Any]:
        """See device_ceilings.dma."""
        return dma(self.device, self.memory, block_ids, repeats)

    async def do_ceilings(self, num_bytes: int, repeats: int) -> dict[str, Any]:
        """See device_ceilings.torch_copies."""
        return torch_copies(self.device_id, num_bytes, repeats)

    # -- device to device by NIXL

    async def do_nixl(self) -> dict[str, Any]:
        """An agent with the cache registered. Returns: what a peer must know."""
        if self.agent is None:
            name = f"gpu-{secrets.token_hex(8)}"
            self.agent = await NixlAgent.start(name, "lo", Deadline.after(BUDGET_S))
            self.region = region_of(self.memory)  # of every block size: always the same memory
            before = self.device.use_in_this_thread
            self.metadata = await self.agent.register(self.region, before=before)
        region = [self.region.address, self.region.num_bytes, self.region.device_id]
        return {"metadata": self.metadata.hex(), "region": region, "memory": self.region.memory}

    async def do_nixl_write(
        self,
        metadata: str,
        region: list[int],
        sources: list[int],
        targets: list[int],
        repeats: int,
    ) -> dict[str, Any]:
        """WRITE blocks into a peer's, `repeats` times. Returns: bytes/s, median."""
        if self.agent is None:
            raise RuntimeError("no agent")
        peer = await self.agent.add_peer(bytes.fromhex(metadata))
        remote = Region(region[0], region[1], self.region.memory, region[2])
        num_bytes = self.memory.block_bytes
        pairs = [
            (self.region.address + source * num_bytes, remote.address + target * num_bytes)
            for source, target in zip(sources, targets, strict=True)
        ]
        seconds = []
        for _ in range(repeats + 2):  # the first ones make the connection
            began = time.monotonic()
            runs = merge_runs(pairs, num_bytes)
            transfer = self.agent.write(
                peer, runs, Deadline.after(BUDGET_S), local=self.region, remote=remote
            )
            error = await transfer.done
            if error is not None:
                raise error
            seconds.append(time.monotonic() - began)
        await self.agent.remove_peer(peer)
        rate = len(pairs) * num_bytes / statistics.median(seconds[2:])
        return {"rate": rate, "first_s": seconds[0], "num_runs": len(runs)}

    @property
    def _client(self) -> KvStoreClient:
        if self.client is None:
            raise RuntimeError("not attached")
        return self.client

    def _random(self, num_blocks: int, block_bytes: int, seed: int) -> torch.Tensor:
        generator = torch.Generator(self.torch_device).manual_seed(seed)
        numbers = torch.randint(
            -(2**62),
            2**62,
            (num_blocks, block_bytes // 8),
            generator=generator,
            device=self.torch_device,
        )
        return numbers.view(torch.uint8)


def say(answer: dict[str, Any]) -> None:
    """One line to whoever started this process."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def _hashes(chain: str, num_blocks: int) -> list[bytes]:
    root = block_hash.root_key(chain.encode(), FINGERPRINT)
    return block_hash.chain(root, range(num_blocks * BLOCK_SIZE), BLOCK_SIZE)


async def main(device_id: int) -> None:
    """Commands one after another until stdin ends. An error ends the process, after its line."""
    worker = Worker(device_id)
    say({"ready": True})
    while line := await asyncio.to_thread(sys.stdin.readline):
        command: dict[str, Any] = json.loads(line)
        try:
            answer = await getattr(worker, f"do_{command.pop('do')}")(**command)
        except Exception as error:
            say({"error": f"{type(error).__name__}: {error}"})
            raise
        say({"done": answer})
    await worker.do_detach()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
