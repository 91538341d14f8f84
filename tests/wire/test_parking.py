"""A decode worker whose cache is too small for what it was given: requests' blocks go to its store
and come back, and no token is another.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from protos import common_pb2
from tests.conftest import third
from tests.harness.gated_engine import prompt_of
from tests.harness.prefill_decode_pair import Pair, pair

pytestmark = pytest.mark.oracle

NUM_REQUESTS = 5
NUM_TOKENS = 60
MOST_ROUNDS = 50

Shown = dict[tuple[str, ...], float]
"""What the decode worker's metrics show."""


def preemptions(shown: Shown) -> dict[str, float]:
    """By cause."""
    found = {name: value for name, value in shown.items() if name[0] == "baton_preemptions_total"}
    return {cause: value for (_, cause), value in found.items()}


def lost(shown: Shown) -> float:
    """Requests whose blocks did not come back."""
    return sum(value for (name, *_), value in shown.items() if name == "baton_parked_lost_total")


async def finish_all(p: Pair) -> Shown:
    """Several requests that fit as prompts, but not as they grow."""
    prompts = [prompt_of(42, start) for start in range(NUM_REQUESTS)]
    for prompt, answer in zip(
        prompts, await p.generate_together(prompts, max_tokens=NUM_TOKENS), strict=True
    ):
        assert answer.token_ids == p.expected(prompt, NUM_TOKENS)
        assert answer.finished is not None
        assert answer.finished.finish_reason == common_pb2.FINISH_REASON_LENGTH
    return await p.at_decode.metrics()


def assert_no_row_is_taken(shown: Shown) -> None:
    rows = {label: shown["baton_parking_rows", label] for label in ("free", "taken", "quarantined")}
    assert rows == {"free": 64, "taken": 0, "quarantined": 0}


@pytest.mark.parametrize("transport", third(["shm", "nixl", "grpc"]))
async def test_a_small_cache_swaps_through_the_store_to_the_same_tokens(
    transport: str, tmp_path: Path
) -> None:
    async with pair(tmp_path, transport=transport, decode_blocks=64, decode_preemption="swap") as p:
        causes = preemptions(await finish_all(p))
        assert causes["swap"] > 0 and not causes.get("lost")
        await p.check()
        shown = await p.at_decode.metrics()
        assert lost(shown) == 0
        num_out = shown["baton_parked_bytes_total", "out"]
        assert num_out > 0 and shown["baton_parked_bytes_total", "back"] > 0
        status = await p.store_status()
        assert {row.tenant for row in status.tenants} == {"t"}, "charged to the requests' tenant"
        num_handed_over = NUM_REQUESTS * (10 + 1) * status.frame_bytes
        num_back = p.at_decode.count("baton_kv_written_back_blocks") * status.frame_bytes
        # A block that is parked and written back at the same moment is stored once, counted twice.
        most = num_handed_over + num_out + num_back
        assert most - min(num_out, num_back) <= status.num_bytes_written <= most
        assert_no_row_is_taken(shown)


async def test_a_full_share_of_the_store_computes_again_to_the_same_tokens(tmp_path: Path) -> None:
    """Parked blocks are of their request's tenant, whose share is all that others left."""
    async with pair(
        tmp_path,
        num_frames=64,
        tenant_shares=("t=0.1",),
        decode_blocks=64,
        decode_preemption="swap",
    ) as p:
        for index in range(8):  # of ten full blocks each, in 64 frames
            prompt = prompt_of(42, 100 + index)
            answer = await p.generate(prompt, name=f"o{index}", tenant="other")
            assert answer.failed is None
        for _ in range(MOST_ROUNDS):  # what is wanted back before the store was asked is still here
            shown = await finish_all(p)
            if shown.get(("baton_parked_lost_total", "no_room"), 0) > 0:
                break
        assert shown["baton_parked_lost_total", "no_room"] > 0
        assert preemptions(shown)["lost"] == lost(shown)
        await p.check()
        (row,) = [row for row in (await p.store_status()).tenants if row.tenant == "t"]
        assert row.num_blocks <= row.num_blocks_guaranteed == 6


async def test_without_its_store_a_small_cache_computes_again_to_the_same_tokens(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path, decode_blocks=64, decode_preemption="swap") as p:
        await p.kill_store()
        shown = await finish_all(p)
        causes = preemptions(shown)
        assert sum(causes.values()) > 0
        assert causes.get("lost", 0) == lost(shown)
        await p.check()
        assert_no_row_is_taken(await p.at_decode.metrics())
