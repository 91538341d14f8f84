"""Which way a prefill worker is told to hand over: by its router's setting, by what both workers
can, and by who shares memory. A whole router over fake workers."""

from __future__ import annotations

from typing import Any

import pytest

from process.errors import Unavailable
from protos import common_pb2
from tests.harness.router_bench import BOUND_S, Bench, request, running

pytestmark = pytest.mark.oracle

PROMPT = list(range(5, 105))
STORE, DIRECT = common_pb2.HANDOVER_PATH_STORE, common_pb2.HANDOVER_PATH_DIRECT


async def _set(bench: Bench, *workers: Any, **fields: Any) -> None:
    for worker in workers:
        vars(worker).update(fields)
        await bench.publish(worker)


async def _pair(bench: Bench, transport: str) -> None:
    """One prefill worker that lends, and one decode worker, both with the same store."""
    workers = (bench.prefill, bench.decode)
    await _set(bench, *workers, store_node_id="n0", transport=transport)
    await _set(bench, bench.prefill, lender_node_id="p0/lent")


async def _told(bench: Bench, **sampling: Any) -> int:
    """What the prefill worker that answered was told last."""
    options = {"max_tokens": 2, **sampling}
    (end,) = [
        message.provenance
        for message in await bench.generate(request(token_ids={"ids": PROMPT}, sampling=options))
        if message.HasField("provenance")
    ]
    (name,) = (leg.worker_id for leg in end.legs if leg.role == "prefill")
    (worker,) = (worker for worker in bench.prefills if worker.worker_id == name)
    return worker.requests[-1].handover


@pytest.mark.parametrize(
    ("mode", "shm", "grpc"),
    [("auto", STORE, DIRECT), ("store", STORE, STORE), ("direct", DIRECT, DIRECT)],
)
async def test_the_setting_says_which_way(mode: str, shm: int, grpc: int) -> None:
    async with running(handover=mode) as bench:
        await _pair(bench, "shm")
        assert await _told(bench) == shm
        await _pair(bench, "grpc")
        assert await _told(bench) == grpc


async def test_only_where_both_workers_can() -> None:
    async with running(handover="direct") as bench:
        await _pair(bench, "grpc")
        assert await _told(bench) == DIRECT
        await _set(bench, bench.decode, remote_transport="")
        assert await _told(bench) == STORE
        await _set(bench, bench.decode, remote_transport="nixl")
        assert await _told(bench) == DIRECT
        await _set(bench, bench.prefill, lender_node_id="")
        assert await _told(bench) == STORE
        await _pair(bench, "grpc")
        assert await _told(bench, max_tokens=1) == STORE  # nothing is handed over


async def test_a_link_that_was_found_slow_is_gone_around() -> None:
    async with running() as bench:
        await _pair(bench, "grpc")
        links = [
            {"node_id": "n0", "read_bytes_per_s": 1e9},
            {"node_id": "p0/lent", "read_bytes_per_s": 1e7},
        ]
        await _set(bench, bench.decode, links=links)
        assert await _told(bench) == STORE
        links[0]["read_bytes_per_s"] = 1e6
        await _set(bench, bench.decode, links=links)
        assert await _told(bench) == DIRECT


@pytest.mark.parametrize(("lends", "told"), [("", STORE), ("p1/lent", DIRECT)])
async def test_who_tries_again_is_told_its_own_way(lends: str, told: int) -> None:
    """The second worker's way is to the decode worker that holds blocks already."""
    async with running(num_prefill=2, handover="direct") as bench:
        first, second = bench.prefills
        await _set(bench, first, lender_node_id="p0/lent")
        await _set(bench, second, lender_node_id=lends, store_node_id="n0")
        first.error = Unavailable("not today")
        second.is_draining = True
        await bench.publish(second)
        first.gate.close()
        asking = request(token_ids={"ids": PROMPT}, sampling={"max_tokens": 2})
        call = bench.stub.Generate(asking, timeout=BOUND_S)
        await first.gate.reached.wait()
        await _set(bench, second, is_draining=False)
        first.gate.open()
        assert [message async for message in call][-1].HasField("provenance")
        assert first.requests[-1].handover == DIRECT
        assert second.requests[-1].handover == told
