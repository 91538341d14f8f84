"""A decode worker whose cache is too small for what it was given: requests' blocks go to its store
and come back, and no token is another.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from protos import common_pb2
from services.decode.states import DecodeState
from services.worker.metrics import WorkerCollector
from services.worker.parking import StoreParking
from tests.harness.gated_engine import prompt_of
from tests.harness.prefill_decode_pair import Pair, pair
from tests.harness.waiting import until

NUM_REQUESTS = 5
NUM_TOKENS = 60


def parking_of(both: Pair) -> StoreParking:
    parking = both.decode.core.parking
    assert parking is not None and both.prefill.core.parking is None
    return parking


async def finish_all(both: Pair) -> dict[str, int]:
    """Several requests that fit as prompts, but not as they grow. Returns: preemptions by cause."""
    prompts = [prompt_of(42, start) for start in range(NUM_REQUESTS)]
    async with both.stream() as stream:
        keys = []
        for index, prompt in enumerate(prompts):
            asked = both.reserve(prompt, name=f"r{index}", max_tokens=NUM_TOKENS)
            keys.append(await stream.reserve(asked))
            assert (await stream.next(keys[-1])).WhichOneof("event") == "reserved"
        both.decode_model.hold()  # so that they run together
        replies = []
        for index, (key, prompt) in enumerate(zip(keys, prompts, strict=True)):
            reply = await both.run_prefill(prompt, name=f"r{index}", max_tokens=NUM_TOKENS)
            await stream.generate(key, reply)
            replies.append(reply)
        all_run = [DecodeState.RUNNING] * NUM_REQUESTS
        await until(lambda: [*both.decode_role.worker.states.values()] == all_run)
        both.decode_model.release()
        for key, prompt, reply in zip(keys, prompts, replies, strict=True):
            answer = await stream.collect(key)
            assert answer.failed is None
            token_ids = [*reply.token_ids, *answer.token_ids]
            assert token_ids == both.expected(prompt, NUM_TOKENS)
            assert answer.finished is not None
            assert answer.finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
    return dict(both.decode.core.thread.stats.num_preemptions)


@pytest.mark.parametrize("transport", ["shm", "nixl", "grpc"])
async def test_a_small_cache_swaps_through_the_store_to_the_same_tokens(
    transport: str, tmp_path: Path
) -> None:
    async with pair(
        tmp_path, transport=transport, decode_blocks=64, decode_preemption="swap"
    ) as both:
        causes = await finish_all(both)
        parking = parking_of(both)
        assert causes["swap"] > 0 and not parking.lost and "lost" not in causes
        assert parking.num_bytes_stored > 0
        assert parking.num_bytes_fetched > 0
        await both.check()
        status = await both.store_status()
        assert {row.tenant for row in status.tenants} == {"t"}, "charged to the requests' tenant"
        num_handed_over = NUM_REQUESTS * (10 + 1) * status.frame_bytes
        num_back = both.decode.core.counts.num_blocks_written_back * status.frame_bytes
        # A block that is parked and written back at the same moment is stored once, counted twice.
        most = num_handed_over + parking.num_bytes_stored + num_back
        assert most - min(parking.num_bytes_stored, num_back) <= status.num_bytes_written <= most
        assert parking.staging.num_rows == {"free": 64, "taken": 0, "quarantined": 0}
        collector = WorkerCollector(both.decode.core, asyncio.get_running_loop())
        families = await asyncio.to_thread(lambda: list(collector.collect()))
        shown = {
            (sample.name, sample.labels.get("direction", sample.labels.get("class"))): sample.value
            for family in families
            for sample in family.samples
        }
        assert shown["baton_parked_bytes_total", "out"] == parking.num_bytes_stored
        assert shown["baton_parked_bytes_total", "back"] == parking.num_bytes_fetched
        assert shown["baton_parking_rows", "free"] == 64


async def test_without_its_store_a_small_cache_computes_again_to_the_same_tokens(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path, decode_blocks=64, decode_preemption="swap") as both:
        await both.kill_store()
        causes = await finish_all(both)
        parking = parking_of(both)
        assert sum(causes.values()) > 0
        assert causes.get("lost", 0) == sum(parking.lost.values())
        await both.check()
        assert parking.staging.num_rows == {"free": 64, "taken": 0, "quarantined": 0}
