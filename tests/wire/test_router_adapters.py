"""The router sends a request with an adapter only where that adapter's content is loaded."""

from __future__ import annotations

from typing import Any

import aiohttp
import grpc.aio
import pytest

from process.errors import BatonError, InvalidArgument, Unavailable
from tests.harness.router_bench import (
    SHORT_WAITS,
    Bench,
    error_from_rpc,
    fake_model,
    http_bench,
    request,
    running,
)

pytestmark = pytest.mark.oracle

OLD, NEW = "11" * 32, "22" * 32


async def _load(bench: Bench, **digests: str) -> None:
    """Have each worker say which content it has under the name "tales" ("": none)."""
    for worker in (*bench.prefills, *bench.decodes):
        digest = digests.get(worker.worker_id, "")
        worker.adapters = {"tales": digest} if digest else {}
        await bench.publish(worker)


async def _refusal(bench: Bench, **fields: Any) -> BatonError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.generate(request(sampling={"max_tokens": 3}, **fields))
    return error_from_rpc(caught.value)


async def test_only_workers_that_have_it_are_asked() -> None:
    async with running(num_prefill=2, num_decode=2) as bench:
        await _load(bench, p1=NEW, d0=NEW, d1=OLD)
        for index in range(6):
            await bench.generate(
                request(adapter="tales", sampling={"max_tokens": 3}, session=f"s{index}")
            )
        assert not bench.prefills[0].requests and len(bench.prefills[1].requests) == 6
        assert bench.decodes[0].num_reserved == 6 and bench.decodes[1].num_reserved == 0
        asked = bench.prefills[1].requests[0]
        assert (asked.adapter, asked.adapter_digest) == ("tales", NEW)
        # Without an adapter everybody serves.
        for index in range(12):
            await bench.generate(request(sampling={"max_tokens": 1}, session=f"t{index}"))
        assert bench.prefills[0].requests
        assert not bench.prefills[0].requests[0].adapter_digest


async def test_what_nobody_has_is_wrong_and_what_only_one_role_has_may_come() -> None:
    async with running(times=SHORT_WAITS) as bench:
        await _load(bench, p0=NEW)
        error = await _refusal(bench, adapter="nothing")
        assert isinstance(error, InvalidArgument) and error.field == "adapter"
        assert "loaded are: tales" in str(error)
        assert isinstance(await _refusal(bench, adapter="tales"), Unavailable)
        await _load(bench, p0=NEW, d0=OLD)
        error = await _refusal(bench, adapter="tales")
        assert isinstance(error, Unavailable) and "same content" in str(error)
        assert not bench.prefill.requests


async def test_of_two_contents_the_one_on_more_workers_serves() -> None:
    async with running(num_prefill=3, num_decode=2) as bench:
        await _load(bench, p0=OLD, p1=NEW, p2=NEW, d0=OLD, d1=NEW)
        for index in range(6):
            await bench.generate(
                request(adapter="tales", sampling={"max_tokens": 3}, session=f"s{index}")
            )
        assert not bench.prefills[0].requests and bench.decodes[0].num_reserved == 0


async def test_no_adapter_is_asked_for_under_the_name_of_any_model() -> None:
    """Not of another model's workers either, which cannot know that name."""
    other = fake_model(name="other")
    async with http_bench(others=[other], num_prefill=1, num_decode=1) as bench:
        for worker in (bench.prefill, bench.decode):
            worker.adapters = {"other": NEW, "tales": NEW}
            await bench.publish(worker)
        async with aiohttp.ClientSession(bench.url) as session:
            async with session.get("/v1/models") as answer:
                ids = [entry["id"] for entry in (await answer.json())["data"]]
            assert sorted(ids) == ["fake", "other", "tales"]
            body = {"model": "other", "prompt": "x", "max_tokens": 1}
            async with session.post("/v1/completions", json=body) as answer:
                assert answer.status == 503  # of `other` there are no workers
        assert not bench.prefill.requests
