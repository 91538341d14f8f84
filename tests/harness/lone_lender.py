"""A process with blocks on a CUDA device that lends them: what another one maps. Run as a script:

    lone_lender.py <device> <block bytes> <blocks> <seed>

Prints one line when it serves: its address and the checksums of its blocks as the host computes
them. Then each line on stdin is a command: `lend` lends all blocks and prints the lease and the
references; `free` gives the memory back to the driver though it is mapped elsewhere; it ends with
stdin.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import Sequence
from typing import Any

import torch

from kvstore import block_hash
from kvstore.block_lender import BlockLender
from kvstore.exported_blocks import ExportedBlocks, ExportOffer
from kvstore.node_ids import lender_node_id
from kvstore.service import KvStoreServicer
from kvstore.transport.base import BlockMemory
from kvstore.transport.cuda_device import CudaDevice
from process import entrypoint, grpc_server
from services.worker.device_checksums import CudaChecksums

FINGERPRINT = "ab" * 16
TTL_S = 600.0


async def _no_free(num_blocks: int, budget_s: float) -> Sequence[int]:
    return ()


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)  # noqa: T201  whoever started this reads it


async def main(device_id: int, block_bytes: int, num_blocks: int, seed: int) -> None:
    torch.cuda.set_device(device_id)
    generator = torch.Generator(f"cuda:{device_id}").manual_seed(seed)
    cache = torch.randint(
        0, 256, (num_blocks, block_bytes), dtype=torch.uint8, device=f"cuda:{device_id}",
        generator=generator,
    )  # fmt: skip
    torch.cuda.synchronize()
    on_host = cache[:4].cpu().numpy()
    memory = BlockMemory.on_device(
        CudaDevice.open(device_id), cache.data_ptr(), block_bytes, num_blocks,
        CudaChecksums(cache),
    )  # fmt: skip
    loans = ExportedBlocks(num_blocks, block_bytes, TTL_S, lambda block_ids: None)
    lender = BlockLender(
        lender_node_id("lone"), secrets.token_bytes(16), memory, loans, _no_free,
        fingerprint=bytes.fromhex(FINGERPRINT), lets_map=True,
    )  # fmt: skip
    server, address = await grpc_server.listen("127.0.0.1:0", [KvStoreServicer(lender).add_to])
    lender.start()
    _say({"address": address, "checksums": [block_hash.checksum(row) for row in on_host]})
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.strip() == "lend":
            lease_id = lender.enter(
                ExportOffer(block_id, b"%16d" % block_id, None, 16)
                for block_id in range(num_blocks)
            )
            refs = await lender.seal(lease_id)
            loans.hand_over(lease_id, TTL_S, lender.now_s())
            found = [[r.chain_hash.hex(), r.frame, r.generation, r.checksum] for r in refs]
            _say({"lease_id": lease_id, "refs": found})
        if line.strip() == "free":
            cache.untyped_storage().resize_(0)  # whoever still has a view of it has none now
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            _say({"allocated": torch.cuda.memory_allocated()})
    await server.stop(0)
    await lender.stop(1.0)


if __name__ == "__main__":
    entrypoint.die_with_parent()
    asyncio.run(main(*map(int, sys.argv[1:])))
