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
LABELS = ("direction", "class", "reason", "cause")
MOST_ROUNDS = 50


def parking_of(both: Pair) -> StoreParking:
    parking = both.decode.core.parking
    assert parking is not None and both.prefill.core.parking is None
    return parking


async def shown_by(both: Pair) -> dict[tuple[str, str | None], float]:
    """The decode worker's metrics by name and the first label that tells samples apart."""
    collector = WorkerCollector(both.decode.core, asyncio.get_running_loop())
    families = await asyncio.to_thread(lambda: list(collector.collect()))
    return {
        (sample.name, next(filter(None, map(sample.labels.get, LABELS)), None)): sample.value
        for family in families
        for sample in family.samples
    }


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
        shown = await shown_by(both)
        assert shown["baton_parked_bytes_total", "out"] == parking.num_bytes_stored
        assert shown["baton_parked_bytes_total", "back"] == parking.num_bytes_fetched
        assert shown["baton_parking_rows", "free"] == 64


async def test_a_full_share_of_the_store_computes_again_to_the_same_tokens(tmp_path: Path) -> None:
    """Parked blocks are charged to their request's tenant: where another one's blocks have all the
    room but this one's share, and that is smaller than what is parked, it is computed again."""
    async with pair(
        tmp_path,
        num_frames=64,
        tenant_shares=("t=0.1",),
        decode_blocks=64,
        decode_preemption="swap",
    ) as both:
        for index in range(8):  # of ten full blocks each, in 64 frames
            prompt = prompt_of(42, 100 + index)
            answer = await both.generate(prompt, name=f"o{index}", tenant="other")
            assert answer.failed is None
        for _ in range(MOST_ROUNDS):  # what is wanted back before the store was asked is still here
            await finish_all(both)
            shown = await shown_by(both)
            if shown.get(("baton_parked_lost_total", "no_room"), 0) > 0:
                break
        assert shown["baton_parked_lost_total", "no_room"] > 0
        num_lost = sum(parking_of(both).lost.values())
        assert shown["baton_preemptions_total", "lost"] == num_lost
        await both.check()
        (row,) = [row for row in (await both.store_status()).tenants if row.tenant == "t"]
        assert row.num_blocks <= row.num_blocks_guaranteed == 6


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
