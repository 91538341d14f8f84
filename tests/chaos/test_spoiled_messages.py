"""What a spoiled message leaves behind: an answer that cannot be read may have reserved frames, so
the connection is over, and the store takes back what was that attachment's."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable

import pytest

from kvstore import serve
from kvstore.frames import FrameState
from process.errors import BatonError
from tests.chaos.control_proxy import ControlProxy, Mischief
from tests.conformance.conftest import SETTINGS, Worker, within

pytestmark = pytest.mark.chaos

TRANSPORTS = ("shm", "nixl", "grpc")


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_nothing_stays_reserved_after_spoiled_answers(
    transport: str, seed: int, scale: Callable[[int], int]
) -> None:
    """Each try meets a garbled link at another moment; at the end every frame must come free."""
    rng = random.Random(f"{seed}-{transport}-spoiled")
    settings = dataclasses.replace(SETTINGS, attachment_ttl_s=1.0, quarantine_grace_s=0.1)
    num_failed = 0
    with ControlProxy(f"{seed}-{transport}") as proxy:
        async with serve.running(settings) as store:
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
            async with asyncio.timeout(30):
                while not _is_free(store):
                    await asyncio.sleep(0.02)
            assert store.node.check_integrity() == ""
    assert num_failed > 0


def _is_free(store: serve.RunningStore) -> bool:
    """No frame is being written or out of use, no lease is left."""
    truth = store.node.store
    assert truth is not None
    held = [truth.frames.count(state) for state in (FrameState.WRITING, FrameState.QUARANTINED)]
    return sum(held) == 0 and len(truth.leases) == 0
