"""A worker in a process of its own, to be stopped and killed by tests. Run as a script:

    lone_worker.py <store address> <transport> <what>

what: `reserve` makes reservations and never commits; `hold` commits three blocks and keeps their
lease; `receive` attaches and lets the test push. Prints one line when that far, then waits for
ever.
"""

from __future__ import annotations

import asyncio
import secrets
import sys

import numpy as np

from kvstore import block_hash
from kvstore.client import KvStoreClient
from kvstore.transport.base import BlockMemory
from process.deadline import Deadline
from protos import kvstore_pb2

BLOCK_BYTES, NUM_BLOCKS = 5000, 48
TTL_MS = 60_000
"""Of what it holds, on the clock of the store, which the test drives."""


async def main(address: str, transport: str, what: str) -> None:
    view = np.full((NUM_BLOCKS, BLOCK_BYTES), 7, dtype=np.uint8)
    client = await KvStoreClient.attach(
        address,
        worker_id="lone",
        worker_incarnation=secrets.token_bytes(16),
        fingerprint="ab" * 16,
        memory=BlockMemory.of(view),
        transport=transport,
        timeout_s=30,
    )
    hashes = block_hash.chain(block_hash.root_key(b"lone", "ab"), range(48), 16)
    line = client._attachment_id
    if what == "reserve":
        request = kvstore_pb2.ReserveRequest(
            attachment_id=client._attachment_id,
            ttl_ms=TTL_MS,
            chains=[kvstore_pb2.ReserveChain(chain_hashes=b"".join(hashes), tail_name="t")],
        )
        await client._connection.call(client._connection.stub.Reserve, request, Deadline.after(10))
    elif what == "hold":
        blocks = list(zip(hashes, range(3), strict=True))
        await client.put_blocks(
            None, b"", blocks, ("t", 4, 5), TTL_MS / 1000, Deadline.after(10), num_tokens=16
        )
    print(line, flush=True)  # noqa: T201  the test waits for it
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
