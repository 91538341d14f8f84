"""What /metrics of workers and router says after a few requests is what they did."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.cli.status import failed
from process.rpc_errors import NoCapacity, Unavailable
from protos import common_pb2
from tests.harness.exposition import scrape, values
from tests.harness.gated_engine import BLOCK_SIZE, prompt_of
from tests.harness.prefill_decode_pair import pair
from tests.harness.router_bench import SHORT_WAITS, Bench, request, running
from tests.harness.waiting import until

pytestmark = pytest.mark.oracle

STORE, DIRECT = common_pb2.HANDOVER_PATH_STORE, common_pb2.HANDOVER_PATH_DIRECT


async def test_workers_say_what_they_did(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        prompt = prompt_of(4 * BLOCK_SIZE + 1)
        for index in range(2):
            await p.generate(prompt, name=f"r{index}", max_tokens=5)
        await p.check()
        prefill, decode = await p.at_prefill.metrics(), await p.at_decode.metrics()
        statuses = [worker.status() for worker in (p.at_prefill, p.at_decode)]
    n = len(prompt)
    assert prefill["baton_up",] == decode["baton_up",] == 1
    assert prefill["baton_prompt_tokens_total",] == 2 * n
    assert prefill["baton_prompt_tokens_cached_total",] == n - 1
    assert prefill["baton_prefix_hit_ratio",] == (n - 1) / (2 * n)
    assert prefill["baton_output_tokens_total",] == 2
    assert prefill["baton_requests_ended_total", "finished"] == 2
    assert ("baton_requests_ended_total", "aborted") not in prefill
    assert prefill["baton_time_to_first_token_seconds_count",] == 2
    assert prefill["baton_kv_source_tokens_total", "computed"] == n + 1
    assert decode["baton_output_tokens_total",] == 8
    assert decode["baton_samples_finished_total", "length"] == 2
    # Of each answer's four tokens here, the first follows nothing that was drawn here.
    assert decode["baton_inter_token_latency_seconds_count",] == 6
    assert decode["baton_inter_token_latency_seconds_bucket", "+Inf"] == 6
    assert decode["baton_kv_source_tokens_total", "store"] == n + 1
    # 17 prompt tokens and four of five drawn: one block more than the prompt's, stored once.
    assert decode["baton_kv_written_back_blocks_total",] == 1
    assert decode["baton_kv_early_tokens_total",] == 0
    assert decode["baton_kv_blocks", "referenced"] == 0
    assert sum(v for k, v in decode.items() if k[0] == "baton_kv_blocks") == 256
    for status, found in zip(statuses, (prefill, decode), strict=True):
        (link,) = status.links  # measured before the worker served
        assert (link.node_id, link.transport) == (status.store_node_id, "shm")
        assert not link.problem and link.latency_s > 0
        way = (link.node_id, "shm")
        rates = {
            direction: found["baton_link_bytes_per_second", *way, direction]
            for direction in ("write", "read")
        }
        assert rates == {"write": link.write_bytes_per_s, "read": link.read_bytes_per_s}
        assert found["baton_link_latency_seconds", *way] == link.latency_s
        assert found["baton_link_degraded", *way] == link.degraded


async def test_workers_say_which_way_the_kv_went(tmp_path: Path) -> None:
    """What is lent is shown while it is, and what came that way afterwards."""
    async with pair(tmp_path) as p, p.stream() as stream:
        for name, path in (("a", STORE), ("b", DIRECT)):
            prompt = prompt_of(4 * BLOCK_SIZE + 1, start=path)
            key = await stream.begin(p.reserve(prompt, name=name, max_tokens=2))
            reply = await p.run_prefill(prompt, name=name, max_tokens=2, handover=path)
            num_lent = (await p.at_prefill.metrics())["baton_kv_lent_blocks",]
            assert num_lent == (5 if path == DIRECT else 0)  # the tail is one of them
            await stream.generate(key, reply)
            await stream.collect(key)
        await p.at_decode.links()  # which measures with blocks that are lent for it
        await until(lambda: p.at_prefill.num_lent_blocks == 0)
        found = await p.at_prefill.metrics()
        assert found["baton_kv_handovers_total", "store"] == 1
        assert found["baton_kv_handovers_total", "direct"] == 1
        assert found["baton_kv_lent_blocks",] == 0
        found = await p.at_decode.metrics()
        assert found["baton_kv_direct_tokens_total",] == len(prompt)
        assert ("baton_kv_lent_blocks",) not in found  # it lends nothing
        await p.check()


async def test_failed_requests_are_told_by_code() -> None:
    """No room (429), no worker (503), no time (504) were one number."""
    async with running(metrics_listen="127.0.0.1:0", times=SHORT_WAITS) as bench:
        asked = request(sampling={"max_tokens": 5})
        late = request(sampling={"max_tokens": 5}, budget_ms=300)
        bench.decode.error = NoCapacity("full", retry_after_s=1.0)
        await bench.failure(asked)
        bench.decode.error = Unavailable("out of order", retry_after_s=1.0)
        for _ in range(2):
            await bench.failure(asked)
        bench.decode.error = None
        bench.decode.token_gate.close()
        await bench.failure(late)
        found = values(await scrape(bench.router.metrics_address))
        status = await bench.status()
    codes = {"resource_exhausted": 1, "unavailable": 2, "deadline_exceeded": 1}
    for code, num in codes.items():
        assert found[f"baton_router_requests_total,{code},failed"] == num
    assert dict(status.num_requests_failed_by_code) == codes
    assert status.num_requests_failed == 4
    assert "4 failed (1 deadline_exceeded, 1 resource_exhausted, 2 unavailable)" in failed(status)


async def test_a_router_says_what_it_did() -> None:
    async with running(metrics_listen="127.0.0.1:0") as bench:
        await bench.generate(sampling={"max_tokens": 5, "n": 2})
        found = values(await scrape(bench.router.metrics_address))
    assert found["baton_router_requests_total,ok,finished"] == 1
    assert found["baton_router_samples_total,length"] == 2
    assert found["baton_router_output_tokens_total"] == 10
    assert found["baton_router_time_to_first_token_seconds_count"] == 1
    assert found["baton_router_request_seconds_count"] == 1
    assert found["baton_router_requests_in_flight"] == 0
    assert found["baton_router_stage_seconds_total,decode"] > 0


async def test_nobody_listens_unless_told_to(bench: Bench) -> None:
    assert bench.router.metrics_address == ""


async def test_a_put_that_write_back_tries_again_is_no_failed_transfer(tmp_path: Path) -> None:
    """The answer's blocks are refused until the prompt's are there."""
    async with pair(tmp_path) as p, p.stream() as stream:
        gate = p.at_prefill.home.hold("put")
        prompt = prompt_of(4 * BLOCK_SIZE + 1)
        key = await stream.begin(p.reserve(prompt, max_tokens=20))
        reply = await p.run_prefill(prompt, max_tokens=20, handover=DIRECT)
        await stream.generate(key, reply)
        await stream.collect(key)
        await p.at_decode.settle()
        gate.open()
        found = await p.at_decode.metrics()
    put_again = found["baton_transfer_put_again_blocks_total", "shm", "home"]
    assert put_again > 0 and found["baton_kv_written_back_blocks_total",] > 0
    failed = {k: v for k, v in found.items() if k[0].startswith("baton_transfer_failed") and v}
    assert failed == {}
