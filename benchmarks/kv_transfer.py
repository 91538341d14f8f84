"""Bytes per second into and out of a KV store, from host memory and from a GPU's, per transport,
against plain copies of as many bytes in the same run; the fixed latency of one block.

    python -m benchmarks.kv_transfer host --batch-mib 64 --rounds 9
    python -m benchmarks.kv_transfer gpu
"""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import click
import numpy as np

from benchmarks import harness
from benchmarks.harness import Several, tcp_stream, timed
from kvstore import block_hash
from kvstore.block_refs import PackedBlocks
from kvstore.client import KvStoreClient
from kvstore.transport.base import BlockMemory
from process.deadline import Deadline

MIB = 1 << 20
TRANSPORTS = ("shm", "nixl", "grpc")
FINGERPRINT = "ab" * 32
BLOCK_SIZE = 16
CALL_S = 120.0
TTL_S = 300.0
NUM_WARM_UPS = 2
"""Rounds at the beginning that touch the memory first and are not counted."""

Ceilings = Mapping[str, Callable[[], float]]
"""Seconds of plain copies of a batch, by name; of each way two: in and out of the store."""


class Bench:
    """A client of one store over one transport, with blocks to move.

    Args: sources, targets: blocks of its memory that are written, and that are read into.
    """

    def __init__(
        self, client: KvStoreClient, sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        self._client = client
        self._sources, self._targets = sources, targets

    async def write(self, num_blocks: int | None = None) -> tuple[float, PackedBlocks, str]:
        """Store the source blocks, or so many of them, under fresh hashes. Returns: seconds, where
        they lie, their lease."""
        sources = self._sources[:num_blocks]
        chain = [secrets.token_bytes(16) for _ in sources]
        began = time.perf_counter()
        put = await self._client.put_blocks(
            None,
            b"",
            list(zip(chain, sources, strict=True)),
            None,
            TTL_S,
            Deadline.after(CALL_S),
            num_tokens=BLOCK_SIZE,
        )
        seconds = time.perf_counter() - began
        if put.not_stored:
            raise RuntimeError(f"{put.not_stored} blocks had no room: the store is too small")
        return seconds, put.refs, put.lease_id

    async def read(self, refs: PackedBlocks, lease_id: str) -> float:
        """Read stored blocks into the target blocks. Returns: seconds. Raises: RuntimeError when
        something did not verify."""
        items = list(zip(refs, self._targets, strict=False))
        began = time.perf_counter()
        got = await self._client.get_blocks(lease_id, items, Deadline.after(CALL_S))
        seconds = time.perf_counter() - began
        if got.failed:
            raise RuntimeError(f"blocks did not arrive: {got.failed}")
        return seconds

    async def both(self, num_blocks: int | None = None) -> tuple[float, float]:
        """Seconds of one write and one read."""
        write_s, refs, lease_id = await self.write(num_blocks)
        read_s = await self.read(refs, lease_id)
        await self._client.release([lease_id], deadline=Deadline.after(CALL_S))
        return write_s, read_s

    async def call(self) -> float:
        """Make one call to the store that moves nothing. Returns: seconds."""
        began = time.perf_counter()
        await self._client.match(
            [secrets.token_bytes(16)], pin=False, ttl_s=1.0, deadline=Deadline.after(CALL_S)
        )
        return time.perf_counter() - began


async def _measured(
    address: str,
    transport: str,
    memory: BlockMemory,
    places: tuple[Sequence[int], Sequence[int]],
    ceilings: Ceilings,
    num_rounds: int,
) -> dict[str, list[float]]:
    """Seconds of batches, of plain copies in turns with them, and of one block."""
    client = await KvStoreClient.attach(
        address,
        worker_id=f"bench-{secrets.token_hex(4)}",
        worker_incarnation=secrets.token_bytes(16),
        fingerprint=FINGERPRINT,
        memory=memory,
        transport=transport,
        timeout_s=CALL_S,
    )
    bench, found = Bench(client, *places), dict[str, list[float]]()

    def note(**seconds: float) -> None:
        for name, value in seconds.items():
            found.setdefault(name, []).append(value)

    try:
        for number in range(num_rounds + NUM_WARM_UPS):
            copies = {name: copy() for name, copy in ceilings.items()}
            write_s, read_s = await bench.both()
            if number >= NUM_WARM_UPS:
                note(write=write_s, read=read_s, **copies)
        for _ in range(20 * num_rounds):
            note(one_call=await bench.call())
            write_s, read_s = await bench.both(1)
            note(one_block_write=write_s, one_block_read=read_s)
    finally:
        await client.close()
    return found


def _figures(
    seconds: Mapping[str, Sequence[float]], num_bytes: int, ceilings: Ceilings
) -> dict[str, Any]:
    """Rates by the median round; shares of a plain copy round by round, since both met the same
    state of the machine."""
    figures: dict[str, Any] = {
        f"{name}_gb_per_s": round(num_bytes / statistics.median(seconds[name]) / 1e9, 3)
        for name in ("write", "read", *ceilings)
    }
    for name, copy in ((way, copy) for way in ("write", "read") for copy in ceilings):
        if copy.partition("_")[2] in ("", name):
            pairs = zip(seconds[copy], seconds[name], strict=True)
            share = statistics.median(copied / own for copied, own in pairs)
            figures[f"{name}_of_{copy.removesuffix(f'_{name}')}"] = round(share, 3)
    for name in ("one_call", "one_block_write", "one_block_read"):
        cuts = harness.cuts(seconds[name], "us", 1e6)
        figures |= {f"{name}_{cut}": cuts[cut] for cut in ("p50_us", "p99_us")}
    return figures


def _show(figures: Sequence[Mapping[str, Any]]) -> None:
    shown = ("transport", "block_bytes", "blocks", "write_gb_per_s", "read_gb_per_s")
    harness.show(
        "put and get",
        [
            {name: value for name, value in one.items() if name in shown or "_of_" in name}
            for one in figures
        ],
    )


_OPTIONS: tuple[Any, ...] = (
    click.option("--block-bytes", type=Several(int), default="65536,262144,2097152"),
    click.option(
        "--transports", type=Several(click.Choice(TRANSPORTS)), default=",".join(TRANSPORTS)
    ),
    click.option("--rounds", default=9),
)


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in _OPTIONS:
        function = option(function)
    return function


@harness.case
@_options
@click.option("--batch-mib", default=64, help="moved at once")
def host(
    batch_mib: int, rounds: int, transports: Sequence[str], block_bytes: Sequence[int]
) -> dict[str, Any]:
    """Blocks of host memory: a whole put (reserve, copy, checksum, commit) and a whole get (copy,
    generations, checksum), against a memcpy and a plain TCP stream.

    A real store in a process of its own, a client as workers have it. Each figure is the median of
    rounds in which memcpy, TCP and store alternate.
    """
    figures, num_bytes = [], _batch(batch_mib, block_bytes)
    with tcp_stream(num_bytes) as send:
        for size in block_bytes:
            num_blocks = num_bytes // size
            view = np.empty((2 * num_blocks, size), dtype=np.uint8)
            view[:] = np.frombuffer(secrets.token_bytes(size), dtype=np.uint8)
            view[:, :8] = np.arange(2 * num_blocks, dtype=np.uint64).view(np.uint8).reshape(-1, 8)
            source, target = view[:num_blocks], np.zeros((num_blocks, size), dtype=np.uint8)
            ceilings: Ceilings = {
                "memcpy": timed(partial(np.copyto, target, source)),
                "checksum": timed(partial(_checksums, source)),
                "tcp": send,
            }
            places = (range(num_blocks), range(num_blocks, 2 * num_blocks))
            for transport in transports:
                with harness.store(capacity_bytes=3 * num_blocks * size) as (_, ready):
                    measured = _measured(
                        ready["address"], transport, BlockMemory.of(view), places, ceilings, rounds
                    )
                    seconds = asyncio.run(measured)
                if not np.array_equal(view[:num_blocks], view[num_blocks:]):
                    raise RuntimeError("other bytes arrived than were sent")
                about = {"transport": transport, "block_bytes": size, "num_blocks": num_blocks}
                figures.append(about | _figures(seconds, num_bytes, ceilings))
    _show(figures)
    return {"batch_mib": batch_mib, "rounds": rounds, "figures": figures}


def _batch(batch_mib: int, block_bytes: Sequence[int]) -> int:
    """Check the bytes of a batch. Raises: click.BadParameter where they are not of whole blocks."""
    if any(batch_mib * MIB % size for size in block_bytes):
        raise click.BadParameter("not of whole blocks", param_hint="--batch-mib")
    return batch_mib * MIB


def _checksums(blocks: Any) -> None:
    for block in blocks:
        block_hash.checksum(block)


def _places(num_blocks: int) -> Iterator[tuple[str, tuple[list[int], list[int]]]]:
    """Where blocks of the cache's halves come from and go to."""
    yield "side by side", (list(range(num_blocks)), list(range(num_blocks, 2 * num_blocks)))
    order = random.Random(7).sample(range(2 * num_blocks), 2 * num_blocks)
    yield "anywhere", (order[:num_blocks], order[num_blocks:])


@harness.case
@_options
@click.option("--batch-mib", default=256, help="moved at once")
@click.option("--device", "device_id", default=0)
def gpu(
    batch_mib: int,
    rounds: int,
    transports: Sequence[str],
    block_bytes: Sequence[int],
    device_id: int,
) -> dict[str, Any]:
    """Blocks of a GPU's cache, side by side and anywhere: a whole put and a whole get, against
    torch's own copies to and from pinned memory. From GPU to GPU: benchmarks.gpu_peers."""
    harness.needs_cuda(device_id + 1)
    import torch

    from kvstore.transport.cuda_device import CudaDevice
    from services.worker.device_checksums import CudaChecksums

    torch.cuda.set_device(device_id)
    device = CudaDevice.open(device_id)
    figures, num_bytes = [], _batch(batch_mib, block_bytes)
    for size in block_bytes:
        num_blocks = num_bytes // size
        shape = (2 * num_blocks, size)
        cache = torch.randint(0, 256, shape, dtype=torch.uint8, device=f"cuda:{device_id}")
        pinned = torch.empty(shape[0] // 2, size, dtype=torch.uint8, pin_memory=True)
        staged = torch.empty_like(cache[:num_blocks])

        def copy(target: torch.Tensor, source: torch.Tensor) -> None:
            target.copy_(source)
            torch.cuda.synchronize()

        ceilings: Ceilings = {
            "pinned_write": timed(partial(copy, pinned, staged)),
            "pinned_read": timed(partial(copy, staged, pinned)),
        }
        memory = BlockMemory.on_device(
            device, cache.data_ptr(), size, len(cache), CudaChecksums(cache)
        )
        for transport in transports:
            for place, (sources, targets) in _places(num_blocks):
                cache[targets] = 0
                torch.cuda.synchronize()
                with harness.store(capacity_bytes=3 * num_blocks * size) as (_, ready):
                    measured = _measured(
                        ready["address"], transport, memory, (sources, targets), ceilings, rounds
                    )
                    seconds = asyncio.run(measured)
                if not torch.equal(cache[sources], cache[targets]):
                    raise RuntimeError(f"{transport}: other bytes arrived than were sent")
                about = {"transport": transport, "block_bytes": size, "blocks": place}
                figures.append(about | _figures(seconds, num_bytes, ceilings))
    _show(figures)
    return {
        **harness.device_context(),
        "batch_mib": batch_mib,
        "rounds": rounds,
        "figures": figures,
    }


main = harness.program(__doc__, host, gpu)

if __name__ == "__main__":
    main()
